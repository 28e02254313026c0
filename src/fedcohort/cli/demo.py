"""``fedcohort demo``: run the built-in comparison, write its report, and suggest what to do next."""

from __future__ import annotations

import importlib.resources
import os
import shutil
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fedcohort.cli import options
from fedcohort.cli.experiment import execute, new
from fedcohort.cli.output import out
from fedcohort.core.terminal import err, say
from fedcohort.simulate.leaderboard import Leaderboard


def known_reasons() -> dict[str, dict[str, str]]:
    """Return why a selector may do badly, by setting and label."""
    folder = importlib.resources.files("fedcohort.simulate.config") / "builtin" / "remarks"
    return tomllib.loads((folder / "demo.toml").read_text())


def explain_losses(boards: Sequence[Leaderboard]) -> list[str]:
    """Say why selectors do badly, for those that are worse than the baseline beyond chance."""
    reasons = known_reasons()
    return [
        f"In {board.setting}, {row.label} is worse than {board.baseline}: {reasons[board.setting][row.label]}."
        for board in boards
        for row in board.rows
        # Chance needs no explanation.
        if row.paired is not None and row.paired.established and row.paired.difference < 0
        if row.label in reasons.get(board.setting, {})
    ]


def demo(
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds of training; default 60.")] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="How many seeds, or a list; default 3.")] = None,
    out_dir: options.OutOption = None,
    device: options.DeviceOption = None,
    quiet: options.QuietOption = False,
) -> None:
    """Compare nine selectors on handwritten digits and write a report.

    The demo has two federations: one with skewed labels, and one with wrong labels and clients of different speeds.
    Each selector runs in the federation it was designed for. The data is the digits dataset of scikit-learn.

    Exit codes: 0 done, 1 error, 2 wrong usage, 3 some run diverged or failed, 130 interrupted (can be continued).
    """
    from fedcohort.report.page import assemble, build_report
    from fedcohort.simulate.config.experiment import Experiment
    from fedcohort.simulate.config.toml import find_table
    from fedcohort.simulate.store.writer import write_atomically

    table = find_table("demo")
    if rounds is not None:
        table["run"]["rounds"] = rounds
    if seeds is not None:
        table["seeds"] = options.parse_seeds(seeds)
    results = execute(new(Experiment.from_dict(table), out_dir, device=device), quiet=quiet)
    folder = results.path
    remarks = tuple(explain_losses(results.leaderboards()))
    with err(quiet).status("drawing the report"):
        page = build_report(replace(assemble([folder], title="Demonstration"), remarks=remarks))
    write_atomically(folder / "report.html", page.encode())
    for line in remarks:
        say(out(), line)
    say(out(), f"Report: {folder / 'report.html'}")
    # The program as it was called, if it is not on the path.
    program, called = "fedcohort", Path(sys.argv[0])
    if called.name == program and not shutil.which(program):
        program = os.path.relpath(called)
    say(out(), f"Next: {program} compare --selectors uniform,balanced,fedcbs --seeds 5")
