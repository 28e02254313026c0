"""``python -m fedcohort.studies.benchmark``: the command ``fedcohort bench`` where its terminal is not installed."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fedcohort.core.errors import FedcohortError
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.processes.interrupts import finish_round_on_interrupt, print_to_stderr
from fedcohort.simulate.rounds.listener import Deadline
from fedcohort.simulate.rounds.progress import Progress
from fedcohort.simulate.rounds.runner import Simulation
from fedcohort.studies.benchmark.page import markdown
from fedcohort.studies.benchmark.run import QUICK_ROUNDS, every_selector, parse_seeds, read_scores, write_scores
from fedcohort.studies.benchmark.suite import DATASETS, table

STOPPED = 75  # of sysexits: try again


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return the exit status: 0 done, 75 stopped with more to do, 1 error."""
    parser = argparse.ArgumentParser(prog="python -m fedcohort.studies.benchmark", description=__doc__)
    parser.add_argument("--data", choices=DATASETS, default="digits")
    parser.add_argument("--selectors", default="", help="names separated by commas; default: all")
    parser.add_argument("--seeds", default="report", help="report, tuning, or a list such as 1,2")
    parser.add_argument("--settings", default="", help="only these settings, separated by commas")
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
    try:
        if given.page is not None:
            print(markdown(read_scores(given.page)), end="")
            return 0
        if given.merge:
            scores = write_scores(*given.merge)
        else:
            simulation = _simulation(given, sys.argv[1:] if arguments is None else arguments)
            simulation.listeners.append(Progress())
            if until is not None:
                simulation.listeners.append(Deadline(simulation.stop, until))
            with finish_round_on_interrupt(simulation, print_to_stderr):
                state = simulation.run()
            if state != "finished":
                print_to_stderr("stopped; run the same command to continue")
                return STOPPED
            scores = write_scores(given.out)
    except FedcohortError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for line in scores.lines:
        print(f"{line.label}: {line.sentence}")
    return 0


def _simulation(given: argparse.Namespace, words: Sequence[str]) -> Simulation:
    if (given.out / "meta.json").is_file():
        return Simulation.open(given.out, device=given.device, processes=given.processes)
    chosen = [name for name in given.selectors.split(",") if name] or every_selector()
    wanted = table(
        given.data,
        {name: {} for name in chosen if name != "uniform"},
        parse_seeds(given.seeds)[: 1 if given.quick else None],
        settings=[name for name in given.settings.split(",") if name],
        rounds=QUICK_ROUNDS if given.quick else 0,
    )
    if given.folder is not None:
        wanted["data"]["folder"] = given.folder
    command = " ".join(["fedcohort bench", *words])
    return Simulation(
        Experiment.from_dict(wanted), given.out, device=given.device, processes=given.processes, command=command
    )


if __name__ == "__main__":
    sys.exit(main())
