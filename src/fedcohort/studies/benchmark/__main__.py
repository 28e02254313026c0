"""``python -m fedcohort.studies.benchmark``: ``fedcohort bench`` without the packages for the terminal."""

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

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fedcohort.studies.benchmark", description=__doc__)
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
    parser.add_argument("--page", type=Path, help="only print the tables of a bench.json as Markdown")
    options = parser.parse_args(arguments)
    if options.out is None and not options.merge and options.page is None:
        parser.error("a run needs --out FOLDER, a new folder or one to continue")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 done, 75 stopped with more to do, 1 error."""
    options = _parse(arguments)
    until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    command = " ".join(["fedcohort bench", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        if options.page is not None:
            print(_tables(options.page), end="")
            return 0
        if options.merge:
            _print(write_scores(*options.merge))
            return 0
        if options.suite == TIME:
            return _run_time(options, until, command)
        if options.suite is not None:
            return _run_suite(options, until, command)
        return 0 if _run(options, options.data, options.out, until, command) else _stopped()
    except FedcohortError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _tables(path: Path) -> str:
    """Return the tables of a bench.json as Markdown."""
    return timed_scores.markdown(read_time_scores(path)) if is_timed(path) else markdown(read_scores(path))


def _run_suite(options: argparse.Namespace, until: float | None, command: str) -> int:
    """Run every dataset of a suite; datasets that are not on this machine are skipped and named at the end."""
    missing = []
    for data in SUITES[options.suite]:
        try:
            if not _run(options, data, options.out / data, until, command):
                return _stopped()
        except DataError as error:
            missing.append(f"{data}: {error}")
    for text in missing:
        print(f"error: {text}", file=sys.stderr)
    return 1 if missing else 0


def _run(options: argparse.Namespace, data: str, out: Path, until: float | None, command: str) -> bool:
    """Run one dataset and print its scores; return whether it finished."""
    if (out / "meta.json").is_file():
        simulation = resume(out, device=options.device, processes=options.processes)
    else:
        config, notes = plan(
            data,
            _selectors(options),
            parse_seeds(options.seeds),
            settings=_names(options.settings),
            quick=options.quick,
            folder=options.folder,
            columns={key: getattr(options, key) for key in ("label", "client") if getattr(options, key) is not None},
        )
        for note in notes:
            print_to_stderr(f"note: {note}")
        simulation = begin(config, out, device=options.device, processes=options.processes, command=command)
    if not _play(simulation, until):
        return False
    _print(write_scores(out))
    return True


def _run_time(options: argparse.Namespace, until: float | None, command: str) -> int:
    """Run both pieces of the suite "time" and print its tables."""
    pieces = plan_time(
        options.data,
        _selectors(options),
        parse_seeds(options.seeds),
        regimes=_names(options.settings),
        quick=options.quick,
        folder=options.folder,
    )
    for name, config in pieces.items():
        simulation = begin_or_resume(
            config, options.out / name, device=options.device, processes=options.processes, command=command
        )
        if not _play(simulation, until):
            return _stopped()
    print(timed_scores.markdown(write_time_scores(options.out)), end="")
    return 0


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _selectors(options: argparse.Namespace) -> dict[str, Any]:
    return {name: {} for name in _names(options.selectors) or every_selector()}


def _stopped() -> int:
    print_to_stderr("stopped; run the same command to continue")
    return STOPPED


def _play(simulation: Simulation, until: float | None) -> bool:
    """Run an experiment; return whether it finished."""
    with contextlib.suppress(ImportError):  # rich draws it, and the simulator runs without rich
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
