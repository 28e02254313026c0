"""``fedcohort demo``: run the built-in comparison, write its report, and suggest what to do next."""

from __future__ import annotations

import importlib.resources
import math
import os
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcohort.api import simulator
from fedcohort.cli.experiment import command_line, execute
from fedcohort.cli.options import DeviceOption, ExplainOption, OutOption, QuietOption, parse_seeds
from fedcohort.cli.output import Format, out
from fedcohort.core.terminal import err, say
from fedcohort.simulate.leaderboard import Leaderboard, LeaderRow
from fedcohort.simulate.leaderboard.words import names, percent

_BADLY = -0.01  # difference to uniform selection with the same training that needs an explanation


def fair_baseline(config: Mapping[str, Any], label: str, baseline: str) -> str:
    """Return the uniform selection that trains as ``label`` does, so that only the choice of clients differs."""
    selectors = config["selectors"]
    for other, entry in selectors.items():
        if entry["name"] == "uniform" and entry.get("local") == selectors[label].get("local"):
            return str(other)
    return baseline


def _difference(row: LeaderRow, other: LeaderRow) -> tuple[float, float]:
    """Return the mean difference of terminal accuracy over common seeds, and the share of seeds with a loss."""
    others = {seed.seed: seed.terminal for seed in other.seeds}
    differences = [seed.terminal - others[seed.seed] for seed in row.seeds if seed.seed in others]
    differences = [value for value in differences if not math.isnan(value)]
    return sum(differences) / len(differences), sum(value < 0 for value in differences) / len(differences)


def summarise(boards: Sequence[Leaderboard], config: Mapping[str, Any]) -> list[str]:
    """Say for each setting which selector ends highest, and how much of its gain comes from the choice of clients."""
    return [f"In {board.setting}, {_best(board, config)}." for board in boards]


def _best(board: Leaderboard, config: Mapping[str, Any]) -> str:
    rows = {row.label: row for row in board.rows if not row.lost and not math.isnan(row.terminal.mean)}
    if board.baseline not in rows:
        return f"{board.baseline} lost a run, so there is nothing to compare with"
    best = max(rows.values(), key=lambda row: row.terminal.mean)
    end = percent(best.terminal.mean)
    equal = [label for label, row in rows.items() if percent(row.terminal.mean) == end]
    if len(equal) > 1:
        return f"{names(equal)} end highest with {end}"
    text = f"{best.label} ends highest with {end}"
    if best.label == board.baseline:
        return text
    fair = fair_baseline(config, best.label, board.baseline)
    gain = _difference(best, rows[board.baseline])[0]
    text += f", {board.metric.difference(gain)} over {board.baseline}"
    if fair == best.label:
        return f"{text}; this comes from its loss function, because its clients are chosen at random"
    if fair == board.baseline or fair not in rows:
        return text
    # The gain over uniform selection with the same loss function is what the choice of clients is worth.
    by_choice = _difference(best, rows[fair])[0]
    loss, choice = board.metric.difference(gain - by_choice), board.metric.difference(by_choice)
    return f"{text}; of this, {loss} come from its loss function and {choice} from its choice of clients"


def compare_worst_groups(boards: Sequence[Leaderboard]) -> list[str]:
    """Say for each setting which selector serves the worst group best, because a mean hides minorities."""
    sentences = []
    for board in boards:
        ends = {row.label: row.fair("worst_group").mean for row in board.rows if not row.lost}
        ends = {label: end for label, end in ends.items() if not math.isnan(end)}
        if board.baseline not in ends or len(ends) < 2:
            continue
        best, base = max(ends, key=lambda label: ends[label]), percent(ends[board.baseline])
        end = percent(ends[best])
        if end == base:
            text = f"no selector serves the worst group better than {board.baseline} ({base})"
        else:
            text = f"the worst group ends highest with {best}: {end}, against {base} with {board.baseline}"
        sentences.append(f"In {board.setting}, {text}.")
    return sentences


def known_reasons() -> dict[str, dict[str, str]]:
    """Return why a selector may do badly, by setting and label."""
    folder = importlib.resources.files("fedcohort.simulate.config") / "builtin" / "remarks"
    return tomllib.loads((folder / "demo.toml").read_text())


def explain_losses(boards: Sequence[Leaderboard], config: Mapping[str, Any]) -> list[str]:
    """Explain every selector that does worse than uniform selection with the same training."""
    sentences, reasons = [], known_reasons()
    for board in boards:
        rows = {row.label: row for row in board.rows if not math.isnan(row.terminal.mean)}
        for label, row in rows.items():
            fair = fair_baseline(config, label, board.baseline)
            fair = board.baseline if fair == label else fair
            if fair == label or fair not in rows:
                continue
            difference, losses = _difference(row, rows[fair])
            if difference < _BADLY and losses > 0.5:
                why = reasons.get(board.setting, {}).get(label, "with so few seeds, this may be chance")
                points = board.metric.difference(difference)
                sentences.append(f"In {board.setting}, {label} ends {points} compared with {fair}: {why}.")
    return sentences


def demo(
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds of training; default 60.")] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="How many seeds, or a list; default 3.")] = None,
    out_dir: OutOption = None,
    device: DeviceOption = None,
    explain: ExplainOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare nine selectors on handwritten digits and write a report.

    The demo has two federations: one with skewed labels, and one with wrong labels and clients of different speeds.
    Each selector runs in the federation it was designed for. The data is the digits dataset of scikit-learn.

    Exit codes: 0 done, 1 error, 2 wrong usage, 3 some run diverged or failed, 130 interrupted (can be continued).
    """
    from fedcohort.report.page import assemble, build_report
    from fedcohort.simulate.config.experiment import Experiment
    from fedcohort.simulate.config.toml import find_table
    from fedcohort.simulate.store.results import load
    from fedcohort.simulate.store.writer import write_atomically

    table = find_table("demo")
    if rounds is not None:
        table["run"]["rounds"] = rounds
    if seeds is not None:
        table["seeds"] = parse_seeds(seeds)
    simulate = simulator()
    folder = out_dir or simulate.default_out("demo")
    execute(
        simulate.Simulation(Experiment.from_dict(table), folder, device=device, command=command_line()),
        quiet=quiet,
        format=Format.TABLE,
        explain=explain,
    )
    results = load(folder)
    boards = results.leaderboards()
    remarks = (
        " ".join(summarise(boards, results.config)),
        *compare_worst_groups(boards),
        *explain_losses(boards, results.config),
    )
    with err(quiet).status("drawing the report"):
        page = build_report(replace(assemble([folder], title="Demonstration"), remarks=remarks))
    write_atomically(folder / "report.html", page.encode())
    for line in remarks:
        say(out(), line)
    say(out(), f"Report: {folder / 'report.html'}")
    say(out(), f"Next: {_program()} compare --selectors uniform,balanced,fedcbs --seeds 5")


def _program() -> str:
    """Return the command that runs fedcohort from here."""
    program = Path(sys.argv[0])
    if shutil.which("fedcohort") or program.name != "fedcohort":
        return "fedcohort"
    return os.path.relpath(program)
