"""What a selector costs: ask + tell at N = 100, 10,000 and 1,000,000 clients.

    python bench/scripts/ask_tell.py [--journal] [--selectors a,b] [--sizes 100,10000,1000000] [--write FILE]

Machines differ and are noisy, so times are multiples of U, one ``np.argpartition`` over N floats measured in the same
run; each is the best of several rounds. FedCor and Fed-CBS are also compared with their own arithmetic: 100 products of
the N x 15 embedding or the N x 10 label factor with a vector. Run it on one core
(``OMP_NUM_THREADS=1 taskset -c 0``).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from fedcohort import ClientTable, LabelCounts, Losses, Session, create
from fedcohort.core.protocol import SELECTORS, Answer, RoundReport, RoundRequest
from fedcohort.core.signals import Signal

CLASSES = 10
PARAMS = {  # where the defaults would measure something else
    "fedcor": {"warmup": 3, "steps": 3},
    "fedacs": {"pool_share": 0.1},
    "flash-advantage": {"first_round": "asked"},
}


def best(function, times):
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        spent.append(time.perf_counter() - start)
    return min(spent)


def units(n, rng):
    """Seconds of one argpartition, and of 100 products of (n, 15) and (n, 10) matrices with a vector."""
    values = rng.random(n)
    wide, narrow = rng.random((n, 15)), rng.random((n, CLASSES))
    v, w = rng.random(15), rng.random(CLASSES)
    repeats = 5 if n >= 100_000 else 50
    return (
        best(lambda: np.argpartition(values, n - min(100, n // 2)), repeats),
        best(lambda: [wide @ v for _ in range(100)], 3),
        best(lambda: [narrow @ w for _ in range(100)], 3),
    )


def table(n, rng):
    counts = rng.integers(0, 30, (n, CLASSES)).astype(float)
    return ClientTable(sizes=counts.sum(axis=1), labels=LabelCounts(counts))


def answer(query, n, rng):
    if query is None:
        return None
    if isinstance(query, Losses):
        return Answer(query, {s: rng.random(len(query.clients)) + 0.5 for s in query.signals})
    return Answer(query, {Signal.LOSS_CHANGE: rng.normal(size=(len(query.cohorts), n))})


def one_selector(name, clients, *, size, rounds, rng, journal):
    """Return the best and the median time of ask + tell over the rounds, without the host's work."""
    selector = create(name, **PARAMS.get(name, {}))
    session = Session(selector, clients, seed=1, signals=Signal.all(), journal=journal)
    spent = []
    for _ in range(rounds):
        request = RoundRequest(size=size)
        start = time.perf_counter()
        query = session.query(request)
        elapsed = time.perf_counter() - start
        reply = answer(query, clients.n, rng)
        start = time.perf_counter()
        cohort = session.ask(request, reply)
        elapsed += time.perf_counter() - start
        metrics = {
            s: rng.random((cohort.size, s.numbers(CLASSES)) if s.width else cohort.size) + 0.1
            for s in Signal.all()
            if s.is_metric
        }
        report = RoundReport(cohort.ticket, cohort.clients, metrics=metrics, kept=rng.random(cohort.size) < 0.6)
        start = time.perf_counter()
        session.tell(report)
        spent.append(elapsed + time.perf_counter() - start)
    session.close()
    late = sorted(spent[len(spent) // 2 :])
    return late[0], late[len(late) // 2]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--journal", action="store_true", help="write a journal file, to measure its cost")
    parser.add_argument("--selectors", default=None)
    parser.add_argument("--sizes", default="100,10000,1000000")
    parser.add_argument("--write", default=None, help="append the table to this file")
    arguments = parser.parse_args()
    names = arguments.selectors.split(",") if arguments.selectors else SELECTORS.names()
    lines = [
        "| selector | N | cohort | best | best / U | median / U | of its own arithmetic |",
        "|---|---|---|---|---|---|---|",
    ]
    rng = np.random.default_rng(0)
    for n in map(int, arguments.sizes.split(",")):
        clients = table(n, rng)
        unit, wide, narrow = units(n, rng)
        products = f"100 products: (N, 15) {wide * 1e3:.1f} ms, (N, 10) {narrow * 1e3:.1f} ms"
        print(f"N = {n:,}: U = {unit * 1e3:.3f} ms; {products}")
        for name in names:
            if name == "all" and n > 10_000:
                continue  # a cohort of everybody is not a selection
            size, rounds = min(100, n // 2), 8 if n >= 100_000 else 40
            with tempfile.TemporaryDirectory() as folder:
                journal = Path(folder) / "journal.sqlite" if arguments.journal else None
                low, middle = one_selector(name, clients, size=size, rounds=rounds, rng=rng, journal=journal)
            own = {"fedcor": wide, "fedcbs": narrow}.get(name)
            ratio = f"{low / own:.2f} x 100 products" if own and n >= 100_000 else ""
            lines.append(
                f"| {name} | {n:,} | {size} | {low * 1e3:.3f} ms | {low / unit:.1f} | {middle / unit:.1f} | {ratio} |"
            )
            print(lines[-1], flush=True)
    if arguments.write:
        with open(arguments.write, "a") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
