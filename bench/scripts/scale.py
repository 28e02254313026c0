"""How every selector grows with the number of clients: time of a round, memory, and the exponent of growth.

    python bench/scripts/scale.py [--selectors "a;b"] [--sizes 100,...,1000000] [--largest 10000000] [--again]
    python bench/scripts/scale.py --table                                        # bench/results/scale.json as Markdown

A round is query, ask and tell of a session with every signal reported and a cohort of 100 (half of the clients if there
are fewer than 200). In a first round, everybody trains, or a million of them, so that the selector knows what
it can learn about them; if the reports would take more than 400 MB, there are several such rounds. Selectors that
choose one client after the other by the labels of all (GREEDY) start without such a round, which would take N passes;
what they remember does not change their work. Time is processor time, the best of the later half of the rounds. The
exponent b of t ~ N^b is fitted by least squares to sizes from 100,000; smaller ones show only the constant part.
``--largest`` is tried for selectors whose exponent is below 1.2 and that would take less than five seconds there.
Memory is the selector's state, and the most that a round allocates besides, in bytes per client at the largest size.
Run it with one thread (``OMP_NUM_THREADS=1``).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import time
import tracemalloc
from pathlib import Path

import numpy as np
from ask_tell import CLASSES, answer

from fedcohort import ClientTable, LabelCounts, Session, create
from fedcohort.core.protocol import SELECTORS, RoundReport, RoundRequest
from fedcohort.core.signals import SIGNALS, Signal
from fedcohort.selectors.papers.fedcor.process import fit_embedding

RESULTS = Path(__file__).parents[1] / "results" / "scale.json"
FIT = "fedcor, the fit"  # fits the embedding to eleven samples with fifty steps of Adam
PARAMS = {"fedcor": {"warmup": 2, "interval": None, "steps": 1}, "flash-advantage": {"first_round": "asked"}}
VARIANTS = {"clustered, by similarity": ("clustered", {"by": "similarity"})}  # besides the defaults
TRAINED_AT_MOST = 1_000_000  # clients in the first rounds
AT_ONCE = 50_000_000  # numbers in the report of one of the first rounds
GREEDY = frozenset({"astraea", "balanced", "fedcbs", "fedcbs-chance", "fedcbs-blind"})
PATIENCE = 20.0  # seconds of a round from which larger sizes are left out
FITTED_FROM = 100_000  # clients; smaller sizes show only the constant part
ONE_PASS = 1.2  # selectors below this exponent are tried with the largest size
LABELS = frozenset(signal for signal in SIGNALS if signal.name.startswith("label"))


def table(n: int, labels: bool) -> ClientTable:
    """Make a federation; only some selectors need label counts, which take 800 MB for ten million clients."""
    rng = np.random.default_rng(0)
    if not labels:
        return ClientTable(sizes=rng.integers(1, 300, n).astype(float))
    counts = rng.integers(0, 30, (n, CLASSES)).astype(float)
    return ClientTable(sizes=counts.sum(axis=1), labels=LabelCounts(counts))


class Rounds:
    """A session and the host's part of its rounds."""

    def __init__(self, name: str, n: int) -> None:
        plain, params = VARIANTS.get(name, (name, PARAMS.get(name, {})))
        selector = create(plain, **params)
        self.n, self.size, self.rng = n, min(100, n // 2), np.random.default_rng(1)
        clients = table(n, bool(selector.requires & LABELS))
        self.session = Session(selector, clients, seed=1, signals=Signal.all())
        if name not in GREEDY:
            reported = frozenset(s for s in self.session.selector.requires if s.reported)
            numbers = sum(signal.numbers(CLASSES) if signal.width else 1 for signal in reported)
            trained = min(n, TRAINED_AT_MOST)
            at_once = min(trained, AT_ONCE // max(numbers, 1))
            for _ in range(-(-trained // at_once)):
                self.one(at_once, reported)

    def one(self, size: int | None = None, reported: frozenset[Signal] | None = None) -> float:
        """Play a round; return the seconds of the session's calls."""
        request = RoundRequest(size=size or self.size)
        start = time.process_time()
        query = self.session.query(request)
        spent = time.process_time() - start
        reply = answer(query, self.n, self.rng)
        start = time.process_time()
        cohort = self.session.ask(request, reply)
        spent += time.process_time() - start
        metrics = {
            signal: self.rng.random((cohort.size, signal.numbers(CLASSES)) if signal.width else cohort.size) + 0.1
            for signal in (Signal.all() if reported is None else reported)
            if signal.is_metric
        }
        kept = self.rng.random(cohort.size) < 0.6
        report = RoundReport(cohort.ticket, cohort.clients, metrics=metrics, kept=kept)
        start = time.process_time()
        self.session.tell(report)
        return spent + time.process_time() - start

    def state_bytes(self) -> int:
        """Return the size of the selector's state."""
        state = self.session.state
        if not dataclasses.is_dataclass(state):
            return 0
        values = (getattr(state, field.name) for field in dataclasses.fields(state))
        return sum(value.nbytes for value in values if isinstance(value, np.ndarray))


def measure(name: str, n: int) -> dict[str, float]:
    """Return the seconds of a round, and the bytes of state and of a round's peak per client."""
    if name == FIT:
        return _measure_fit(n)
    rounds = Rounds(name, n)
    spent = [rounds.one()]
    while len(spent) < (6 if n >= 100_000 else 30) and sum(spent) < 3 * PATIENCE:
        spent.append(rounds.one())
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    if spent[-1] < PATIENCE:
        rounds.one()
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    result = {"seconds": min(spent[len(spent) // 2 :]), "state": rounds.state_bytes() / n, "peak": peak / n}
    rounds.session.close()
    return result


def _measure_fit(n: int) -> dict[str, float]:
    rng = np.random.default_rng(2)
    embedding, changes = rng.normal(size=(n, 15)) / math.sqrt(15), 0.1 * rng.normal(size=(n, 11))
    weights = 0.9 ** np.arange(11.0)

    def fit() -> None:
        fit_embedding(embedding, changes, weights, noise=0.01, learning_rate=0.01, steps=50)

    spent = []
    for _ in range(2):
        start = time.process_time()
        fit()
        spent.append(time.process_time() - start)
    tracemalloc.start()
    fit()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"seconds": min(spent), "state": (embedding.nbytes + changes.nbytes) / n, "peak": peak / n}


def exponent(by_size: dict[str, dict[str, float]]) -> float | None:
    """Fit b of t ~ N^b."""
    points = [(int(n), result["seconds"]) for n, result in by_size.items() if int(n) >= FITTED_FROM]
    if len(points) < 2:
        return None
    sizes, seconds = np.log(np.array(points)).T
    return float(np.polyfit(sizes, seconds, 1)[0])


def grow(name: str, sizes: list[int], largest: int | None, results: dict[str, dict[str, dict[str, float]]]) -> None:
    """Measure one selector at growing sizes, except those already stored."""
    by_size = results.setdefault(name, {})
    for n in sizes:
        if str(n) not in by_size:
            _measured(name, n, results)
        if by_size[str(n)]["seconds"] * 10 > PATIENCE:
            return
    power = exponent(by_size)
    last = max(map(int, by_size))
    if largest is None or largest <= last or power is None:
        return
    if power < ONE_PASS and by_size[str(last)]["seconds"] * largest / last < 5.0:
        _measured(name, largest, results)


def _measured(name: str, n: int, results: dict[str, dict[str, dict[str, float]]]) -> None:
    results[name][str(n)] = measure(name, n)
    print(f"{name} {n:,}: {results[name][str(n)]}", flush=True)
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def as_table(results: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """Return the results as Markdown."""
    sizes = sorted({int(n) for by_size in results.values() for n in by_size})
    head = " | ".join(f"{n:,}" for n in sizes)
    lines = [f"| selector | {head} | exponent | state, bytes | peak, bytes |", "|---" * (len(sizes) + 4) + "|"]
    for name in sorted(results):
        by_size = results[name]
        cells = [_shown(by_size[str(n)]["seconds"]) if str(n) in by_size else "" for n in sizes]
        last = by_size[max(by_size, key=int)]
        power = exponent(by_size)
        tail = f"{power:.2f}" if power is not None else ""
        lines.append(f"| {name} | {' | '.join(cells)} | {tail} | {last['state']:.0f} | {last['peak']:.0f} |")
    return lines


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--selectors", default=None)
    parser.add_argument("--sizes", default="100,1000,10000,100000,1000000")
    parser.add_argument("--largest", type=int, default=None)
    parser.add_argument("--again", action="store_true", help="also measure what is already stored")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.table:
        print("\n".join(as_table(results)))
        return
    names = options.selectors.split(";") if options.selectors else [*SELECTORS.names(), *VARIANTS, FIT]
    for name in (FIT if name == "fit" else name for name in names):
        if options.again:
            results.pop(name, None)
        grow(name, [int(n) for n in options.sizes.split(",")], options.largest, results)


if __name__ == "__main__":
    main()
