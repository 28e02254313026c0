"""FedCor and Fed-CBS at a million clients, as ratios to matrix-vector products measured in the same run.

    OMP_NUM_THREADS=1 python bench/fedcor_fedcbs.py [--clients 1000000] [--cohort 100] [--repeat 3]

A round is ``ask`` and ``tell`` of a session without a journal file. The reference is as many products of the embedding
(N x 15) or the label factor (N x 10) with a vector as there are picks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import time
from collections.abc import Callable

import numpy as np

from fedcohort import ClientTable, LabelCounts, Selector, Session
from fedcohort.core.clients import LabelFactor
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.selectors.ours.fedcbs_chance import FedCBSChance
from fedcohort.selectors.papers.fedcbs import FedCBS
from fedcohort.selectors.papers.fedcor import FedCor
from fedcohort.session.stateful import StatefulSelector


def best(functions: list[Callable[[], object]], repeat: int) -> list[float]:
    """Return the best time of each function, measured in turn so that a busy machine is unfair to none."""
    times = [[0.0] * repeat for _ in functions]
    for turn in range(repeat):
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            taken[turn] = time.perf_counter() - start
    return [min(taken) for taken in times]


def products(matrix: np.ndarray, count: int) -> Callable[[], None]:
    vector = np.linspace(-1.0, 1.0, matrix.shape[1])

    def run() -> None:
        for _ in range(count):
            matrix @ vector

    return run


def one_round(session: Session, cohort: int) -> Callable[[], None]:
    def run() -> None:
        picked = session.ask(RoundRequest(size=cohort))
        session.tell(RoundReport(picked.ticket, picked.clients))

    return run


def compare(name: str, selector: Selector, table: ClientTable, matrix: np.ndarray, args: argparse.Namespace) -> None:
    session = Session(selector, table, seed=1)
    if isinstance(selector, FedCor):
        # As if a fit had been made: random embeddings are as much work as fitted ones.
        session._own = StatefulSelector(selector, table, dataclasses.replace(session.state, samples=1))
        matrix = session.state.embedding
    run = one_round(session, args.cohort)
    run()
    by_columns = np.asfortranarray(matrix)
    ours, reference, column = best([run, products(matrix, args.cohort), products(by_columns, args.cohort)], args.repeat)
    print(
        json.dumps(
            {
                "what": name,
                "clients": table.n,
                "cohort": args.cohort,
                "seconds": round(ours, 4),
                "reference_seconds": round(reference, 4),
                "ratio": round(ours / reference, 2),
                "ratio_to_column_major_products": round(ours / column, 2),
                "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    sizes = rng.integers(20, 500, args.clients)
    compare("fedcor", FedCor(warmup=0, interval=None), ClientTable(sizes=sizes), np.empty(0), args)
    counts = rng.multinomial(sizes, rng.dirichlet(np.full(10, 0.1), args.clients)).astype(np.float64)
    compare("fedcbs, label counts (default)", FedCBS(), ClientTable(labels=LabelCounts(counts)), counts, args)
    swapping = FedCBSChance(swaps=10)
    compare("fedcbs-chance, label counts, 10 swaps", swapping, ClientTable(labels=LabelCounts(counts)), counts, args)
    rotation = np.linalg.qr(rng.normal(size=(10, 10)))[0]
    factor = counts @ rotation
    table = ClientTable(labels=LabelFactor(factor, 10), sizes=sizes)
    compare("fedcbs, label factor (default)", FedCBS(), table, factor, args)


if __name__ == "__main__":
    main()
