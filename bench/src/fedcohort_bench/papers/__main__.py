"""``python -m fedcohort_bench.papers``: ``fedcohort reproduce`` without the packages for the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedcohort.core.errors import FedcohortError
from fedcohort_bench.papers.catalogue import EXHIBITS, find
from fedcohort_bench.papers.page import summary
from fedcohort_bench.papers.run import reproduce
from fedcohort_bench.papers.verdicts import judge

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fedcohort_bench.papers", description=__doc__)
    parser.add_argument("name", nargs="?", help="a table, a figure, or a paper (all its tables and figures)")
    parser.add_argument("--list", action="store_true", help="show all names")
    parser.add_argument("--quick", action="store_true", help="check that everything runs: digits, one seed, few rounds")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"), help="folder for records, pages and runs")
    parser.add_argument("--seeds", type=int, help="number of seeds; default: the paper's")
    parser.add_argument("--rounds", type=int, help="number of rounds; default: the paper's")
    parser.add_argument("--parts", default="", help="only these parts, separated by commas")
    parser.add_argument("--labels", default="", help="only these methods, and the baseline")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--processes", type=int, help="number of processes that run in parallel")
    parser.add_argument(
        "--minutes", type=float, help="stop cleanly after this many minutes; the same command continues"
    )
    parser.add_argument("--folder", help="where the datasets are")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 done, 75 stopped with more to do, 1 error."""
    options = _parse(arguments)
    if options.list or options.name is None:
        for exhibit in EXHIBITS.values():
            print(f"{exhibit.name}\t{exhibit.paper}, {exhibit.place}: {exhibit.title}")
        return 0
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        outcome = reproduce(
            find(options.name),
            options.out,
            seeds=options.seeds,
            rounds=options.rounds,
            parts=[part for part in options.parts.split(",") if part],
            labels=[label for label in options.labels.split(",") if label],
            quick=options.quick,
            device=options.device,
            processes=options.processes,
            minutes=options.minutes,
            folder=options.folder,
            command=" ".join(["fedcohort reproduce", *words]),
        )
    except FedcohortError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for exhibit in find(options.name):
        verdicts = judge(exhibit, outcome.records[exhibit.study.name])
        print(f"{exhibit.name}: {'a trial, no claims are judged.' if options.quick else summary(verdicts)}")
    print("\n".join(str(path) for path in outcome.files))
    if not outcome.finished:
        print("stopped; run the same command to continue", file=sys.stderr)
        return STOPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
