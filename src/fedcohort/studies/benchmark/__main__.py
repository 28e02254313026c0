"""``python -m fedcohort.studies.benchmark``: the command ``fedcohort bench`` where its terminal is not installed."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcohort.core.errors import DataError, FedcohortError
from fedcohort.simulate.processes.interrupts import finish_round_on_interrupt, print_to_stderr
from fedcohort.simulate.rounds.listener import Deadline
from fedcohort.simulate.rounds.runner import Simulation
from fedcohort.studies.benchmark import timed_scores
from fedcohort.studies.benchmark.page import markdown
from fedcohort.studies.benchmark.run import (
    TIME,
    begin,
    begin_or_resume,
    every_selector,
    is_timed,
    parse_seeds,
    plan,
    plan_time,
    read_scores,
    read_time_scores,
    resume,
    write_scores,
    write_time_scores,
)
from fedcohort.studies.benchmark.scores import Scores
from fedcohort.studies.benchmark.suite import DATASETS, SUITES

STOPPED = 75  # of sysexits: try again


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fedcohort.studies.benchmark", description=__doc__)
    parser.add_argument(
        "--data", default="digits", help=f"{', '.join(DATASETS)}; or your own .csv, .parquet, .npz or folder"
    )
    parser.add_argument("--label", help="of a table of your own: the column to predict")
    parser.add_argument("--client", help="of a table of your own: the column that names each row's client")
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
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return the exit status: 0 done, 75 stopped with more to do, 1 error."""
    given = _parse(arguments)
    until = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    command = " ".join(["fedcohort bench", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        if given.page is not None:
            print(_tables(given.page), end="")
            return 0
        if given.merge:
            _print(write_scores(*given.merge))
            return 0
        if given.suite == TIME:
            return _run_time(given, until, command)
        if given.suite is not None:
            return _run_suite(given, until, command)
        return 0 if _run(given, given.data, given.out, until, command) else _stopped()
    except FedcohortError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _tables(path: Path) -> str:
    """Return the tables of a bench.json as Markdown."""
    return timed_scores.markdown(read_time_scores(path)) if is_timed(path) else markdown(read_scores(path))


def _run_suite(given: argparse.Namespace, until: float | None, command: str) -> int:
    """Run every dataset of a suite; one that is not on this machine does not keep the others from running."""
    missing = []
    for data in SUITES[given.suite]:
        try:
            if not _run(given, data, given.out / data, until, command):
                return _stopped()
        except DataError as error:
            missing.append(f"{data}: {error}")
    for text in missing:
        print(f"error: {text}", file=sys.stderr)
    return 1 if missing else 0


def _run(given: argparse.Namespace, data: str, out: Path, until: float | None, command: str) -> bool:
    """Run one dataset to its end and print its scores; return whether it got there."""
    if (out / "meta.json").is_file():
        simulation = resume(out, device=given.device, processes=given.processes)
    else:
        wanted, notes = plan(
            data,
            _selectors(given),
            parse_seeds(given.seeds),
            settings=_names(given.settings),
            quick=given.quick,
            folder=given.folder,
            columns={key: getattr(given, key) for key in ("label", "client") if getattr(given, key) is not None},
        )
        for note in notes:
            print_to_stderr(f"note: {note}")
        simulation = begin(wanted, out, device=given.device, processes=given.processes, command=command)
    if not _play(simulation, until):
        return False
    _print(write_scores(out))
    return True


def _run_time(given: argparse.Namespace, until: float | None, command: str) -> int:
    """Run both pieces of the suite "time" and print its tables."""
    pieces = plan_time(
        given.data,
        _selectors(given),
        parse_seeds(given.seeds),
        regimes=_names(given.settings),
        quick=given.quick,
        folder=given.folder,
    )
    for name, wanted in pieces.items():
        simulation = begin_or_resume(
            wanted, given.out / name, device=given.device, processes=given.processes, command=command
        )
        if not _play(simulation, until):
            return _stopped()
    print(timed_scores.markdown(write_time_scores(given.out)), end="")
    return 0


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _selectors(given: argparse.Namespace) -> dict[str, Any]:
    return {name: {} for name in _names(given.selectors) or every_selector()}


def _stopped() -> int:
    print_to_stderr("stopped; run the same command to continue")
    return STOPPED


def _play(simulation: Simulation, until: float | None) -> bool:
    """Run an experiment; return whether it got to its end."""
    with contextlib.suppress(ImportError):  # it is drawn with rich, which the simulator does not need
        from fedcohort.simulate.rounds.progress import Progress

        simulation.listeners.append(Progress())
    if until is not None:
        simulation.listeners.append(Deadline(simulation.stop, until))
    with finish_round_on_interrupt(simulation, print_to_stderr):
        state = simulation.run()
    return state == "finished"


def _print(scores: Scores) -> None:
    for line in scores.lines:
        print(f"{line.label}: {line.sentence}")
    if scores.frozen is not None:
        print(f"{scores.data}: frozen before the first round as {scores.frozen.tag}")


if __name__ == "__main__":
    sys.exit(main())
