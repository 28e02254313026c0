"""``python -m fedcohort_bench.benchmark``: ``fedcohort bench`` without the packages for the terminal."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcohort.core.errors import DataError, FedcohortError
from fedcohort_bench.benchmark import timed_scores
from fedcohort_bench.benchmark.run import (
    TIME,
    every_selector,
    parse_seeds,
    plan,
    plan_time,
    run_dataset,
    run_time,
    write_scores,
)
from fedcohort_bench.benchmark.scores import Scores
from fedcohort_bench.benchmark.suite import DATASETS, SUITES
from fedcohort_bench.play import Player

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fedcohort_bench.benchmark", description=__doc__)
    parser.add_argument(
        "--data", default="digits", help=f"{', '.join(DATASETS)}; or your own .csv, .parquet, .npz or folder"
    )
    parser.add_argument("--label", help="the column to predict, for a table of your own")
    parser.add_argument("--client", help="the column that names each row's client, for a table of your own")
    parser.add_argument(
        "--suite",
        choices=(*SUITES, TIME),
        help="natural: all datasets with real owners, each in its own folder below --out; time: rounds and "
        "asynchronous runs in simulated time, on --data digits or fashion-mnist",
    )
    parser.add_argument("--selectors", default="", help="names separated by commas; default: all")
    parser.add_argument("--seeds", default="report", help="report, tuning, or a list such as 1,2")
    parser.add_argument(
        "--settings",
        default="",
        help="only these settings, separated by commas; with --suite time, these kinds of availability",
    )
    parser.add_argument("--quick", action="store_true", help="check that everything runs: one seed, 20 rounds")
    parser.add_argument("--out", type=Path, help="a new folder, or one to continue; required for a run")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--processes", type=int, help="number of processes that run in parallel")
    parser.add_argument(
        "--minutes", type=float, help="stop cleanly after this many minutes; the same command continues"
    )
    parser.add_argument("--folder", help="where the datasets are")
    parser.add_argument("--merge", type=Path, nargs="+", help="only score these finished pieces together")
    options = parser.parse_args(arguments)
    if options.out is None and not options.merge:
        parser.error("a run needs --out FOLDER, a new folder or one to continue")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 done, 75 stopped with more to do, 1 error."""
    options = _parse(arguments)
    player = Player(
        device=options.device,
        processes=options.processes,
        command=" ".join(["fedcohort bench", *(sys.argv[1:] if arguments is None else arguments)]),
        until=math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes,
    )
    try:
        if options.merge:
            _print(write_scores(*options.merge))
            return 0
        finished = _run_time(options, player) if options.suite == TIME else _run(options, player)
    except FedcohortError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not finished:
        player.say("stopped; run the same command to continue")
    return 0 if finished else STOPPED


def _run(options: argparse.Namespace, player: Player) -> bool:
    """Run one dataset, or every dataset of a suite, and print the scores; return whether all are finished."""
    if options.suite is None:
        return _run_dataset(options, options.data, options.out, player)
    missing = []
    for data in SUITES[options.suite]:
        try:
            if not _run_dataset(options, data, options.out / data, player):
                return False
        except DataError as error:  # it is not on this machine; the others may be
            missing.append(f"{data}: {error}")
    if missing:
        raise DataError("\n".join(missing))
    return True


def _run_dataset(options: argparse.Namespace, data: str, out: Path, player: Player) -> bool:
    columns = {key: getattr(options, key) for key in ("label", "client") if getattr(options, key) is not None}
    config, notes = plan(
        data,
        _selectors(options),
        parse_seeds(options.seeds),
        settings=_names(options.settings),
        quick=options.quick,
        folder=options.folder,
        columns=columns,
    )
    for note in notes:
        player.say(f"note: {note}")
    scores = run_dataset(config, out, player)
    if scores is not None:
        _print(scores)
        if options.quick:
            player.say("a trial with --quick: no number here is a result")
    return scores is not None


def _run_time(options: argparse.Namespace, player: Player) -> bool:
    """Run both pieces of the suite "time" and print its tables; return whether it is finished."""
    pieces = plan_time(
        options.data,
        _selectors(options),
        parse_seeds(options.seeds),
        regimes=_names(options.settings),
        quick=options.quick,
        folder=options.folder,
    )
    scores = run_time(pieces, options.out, player)
    if scores is not None:
        print(timed_scores.markdown(scores), end="")
    return scores is not None


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _selectors(options: argparse.Namespace) -> dict[str, Any]:
    return {name: {} for name in _names(options.selectors) or every_selector()}


def _print(scores: Scores) -> None:
    for line in scores.lines:
        print(f"{line.label}: {line.sentence}")
    print(f"{scores.data}: frozen before the first round as {scores.frozen.tag}")


if __name__ == "__main__":
    sys.exit(main())
