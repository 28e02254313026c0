"""``python -m fedcohort.studies.benchmark``: the command ``fedcohort bench`` where its terminal is not installed."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcohort.core.errors import DataError, FedcohortError
from fedcohort.simulate.processes.interrupts import finish_round_on_interrupt, print_to_stderr
from fedcohort.simulate.rounds.listener import Deadline
from fedcohort.studies.benchmark import timed_scores
from fedcohort.studies.benchmark.page import markdown
from fedcohort.studies.benchmark.run import (
    TIME,
    begin,
    every_selector,
    is_timed,
    parse_seeds,
    read_scores,
    read_time_scores,
    resume,
    tables,
    write_scores,
    write_time_scores,
)
from fedcohort.studies.benchmark.scores import Scores
from fedcohort.studies.benchmark.suite import DATASETS, SUITES

STOPPED = 75  # of sysexits: try again


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return the exit status: 0 done, 75 stopped with more to do, 1 error."""
    parser = argparse.ArgumentParser(prog="python -m fedcohort.studies.benchmark", description=__doc__)
    parser.add_argument("--data", choices=DATASETS, default="digits")
    parser.add_argument(
        "--suite",
        choices=(*SUITES, TIME),
        help="natural: all datasets with real owners, each in a folder of its own below --out; time: rounds and "
        "asynchronous runs by the clock, on --data digits or fashion-mnist",
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
    parser.add_argument("--merge", type=Path, nargs="+", help="score these finished pieces together, nothing else")
    parser.add_argument("--page", type=Path, help="print the tables of a bench.json as Markdown, nothing else")
    given = parser.parse_args(arguments)
    if given.out is None and not given.merge and given.page is None:
        parser.error("a run needs --out FOLDER, a new folder or one to continue")
    until = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    command = " ".join(["fedcohort bench", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        if given.page is not None:
            if is_timed(given.page):
                print(timed_scores.markdown(read_time_scores(given.page)), end="")
            else:
                print(markdown(read_scores(given.page)), end="")
            return 0
        if given.merge:
            _print(write_scores(*given.merge))
            return 0
        pieces = tables(
            given.suite,
            given.data,
            {name: {} for name in [name for name in given.selectors.split(",") if name] or every_selector()},
            parse_seeds(given.seeds),
            settings=[name for name in given.settings.split(",") if name],
            quick=given.quick,
        )
        missing = []
        for name, wanted in pieces.items():
            try:
                if not _run(given, wanted, given.out / name, until, command):
                    print_to_stderr("stopped; run the same command to continue")
                    return STOPPED
            except DataError as error:
                if given.suite != "natural":
                    raise
                missing.append(f"{name}: {error}")  # the others can still be run
        if given.suite == TIME:
            print(timed_scores.markdown(write_time_scores(given.out)), end="")
        for text in missing:
            print(f"error: {text}", file=sys.stderr)
        return 1 if missing else 0
    except FedcohortError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(given: argparse.Namespace, wanted: Mapping[str, Any], out: Path, until: float | None, command: str) -> bool:
    """Run one experiment to its end and print its scores; return whether it got there."""
    if (out / "meta.json").is_file():
        simulation = resume(out, device=given.device, processes=given.processes)
    else:
        simulation = begin(
            wanted, out, folder=given.folder, device=given.device, processes=given.processes, command=command
        )
    with contextlib.suppress(ImportError):  # it is drawn with rich, which the simulator does not need
        from fedcohort.simulate.rounds.progress import Progress

        simulation.listeners.append(Progress())
    if until is not None:
        simulation.listeners.append(Deadline(simulation.stop, until))
    with finish_round_on_interrupt(simulation, print_to_stderr):
        state = simulation.run()
    if state != "finished":
        return False
    if given.suite != TIME:
        _print(write_scores(out))
    return True


def _print(scores: Scores) -> None:
    for line in scores.lines:
        print(f"{line.label}: {line.sentence}")
    if scores.frozen is not None:
        print(f"{scores.data}: frozen before the first round as {scores.frozen.tag}")


if __name__ == "__main__":
    sys.exit(main())
