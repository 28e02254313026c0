"""Shared by the commands that run experiments: live progress, Ctrl-C, the table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import typer

from fedcohort.api import simulator
from fedcohort.cli.output import Format, out, print_json, print_tables
from fedcohort.core.terminal import err, say
from fedcohort.simulate.leaderboard import leaderboard_table
from fedcohort.simulate.leaderboard.table import FEW
from fedcohort.simulate.play import play, say_notes
from fedcohort.simulate.store.results import Results, load

if TYPE_CHECKING:
    from fedcohort.simulate.config.experiment import Experiment
    from fedcohort.simulate.runner import Machine, Simulation

DIVERGED = 3
INTERRUPTED = 130


def new(experiment: Experiment, folder: Path | None, **options: Unpack[Machine]) -> Simulation:
    """Return the simulation of an experiment in a folder, or in a new one below ``runs``."""
    simulate = simulator()
    # Results name the command that made them, so that it can be run again.
    options.setdefault("command", command_line())
    simulation: Simulation = simulate.Simulation(experiment, folder or simulate.default_out(experiment.name), **options)
    return simulation


def command_line() -> str:
    """Return the command line, for the record."""
    return " ".join(["fedcohort", *sys.argv[1:]])


def execute(
    simulation: Simulation,
    *,
    quiet: bool,
    format: Format = Format.TABLE,
    track: Sequence[str] | None = None,
    columns: Sequence[str] = FEW,
) -> Results:
    """Run an experiment to its end, print the table, and exit with the right code."""
    console = err(quiet)
    if track:
        from fedcohort.report.trackers import tracker

        simulation.listeners += [tracker(name, simulation.out) for name in track]
    began = time.monotonic()
    state = play(simulation, console)
    # Everything up to the last checkpoint is on disk.
    if state == "interrupted":
        say(console, f"interrupted; continue with: fedcohort run --resume {simulation.out}")
        raise typer.Exit(INTERRUPTED)
    results = load(simulation.out)
    boards = results.leaderboards()
    # The table is data and goes to stdout; notes, progress and warnings are on stderr.
    if format is Format.JSON:
        leaderboards = [board.to_dict() for board in boards]
        print_json({"out": str(simulation.out), "state": state, "leaderboards": leaderboards})
    else:
        print_tables([leaderboard_table(board, columns=columns) for board in boards], out())
    say(console, f"done in {time.monotonic() - began:.1f} s; results in {simulation.out}")
    say_notes(simulation, console)
    for text in results.warnings():
        say(console, f"warning: {text}", style="yellow")
    # The table is complete, but a script that only looks at the exit code must not take these runs for results.
    if any(run.state in ("diverged", "failed") for run in results.runs):
        raise typer.Exit(DIVERGED)
    return results
