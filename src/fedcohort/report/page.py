"""One self-contained HTML file: tables and sentences need no scripts, and inlined code draws the charts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedcohort.core.errors import UnknownNameError
from fedcohort.core.registry import suggest
from fedcohort.report.data import Bundle, Setting, boards, load_bundle
from fedcohort.report.figure import Figure
from fedcohort.report.figures import general_figures
from fedcohort.report.insights import selector_figures
from fedcohort.report.render import card, render
from fedcohort.report.setup import setup_card
from fedcohort.report.sweep import sweep
from fedcohort.report.tables import participation_table
from fedcohort.report.why import report_explanations
from fedcohort.simulate.leaderboard import Leaderboard, Table, leaderboard_table
from fedcohort.simulate.leaderboard.table import FEW, pairs_table


@dataclass(frozen=True)
class _Section:
    """One setting of a report: its tables, figures and explanations."""

    setting: Setting
    board: Leaderboard
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...]
    explanations: list[dict[str, Any]]


@dataclass(frozen=True)
class Report:
    """The content of a report; ``remarks`` come first on the page."""

    bundle: Bundle
    sections: tuple[_Section, ...]
    warnings: tuple[str, ...]
    title: str
    remarks: tuple[str, ...] = ()


def assemble(
    paths: Sequence[str | Path],
    *,
    title: str | None = None,
    targets: Sequence[float] = (),
    baseline: str | None = None,
    rounds: Sequence[int] = (),
    pictures: bool = True,
    columns: Sequence[str] = FEW,
) -> Report:
    """Read result directories and compute every table, figure and explanation.

    Parameters
    ----------
    paths : experiments' directories
    title : str, optional
        Heading; default: the directories' names.
    targets : sequence of float
        Accuracies to reach, in (0, 1]; the highest is used for the speed-up. Default: the configuration's, or else
        where the baseline ends.
    baseline : str, optional
        Label or selector that the others are compared with. Default: the configuration's, or else uniform.
    rounds : sequence of int
        Rounds whose choices the report explains, in addition to evenly spaced ones.
    pictures : bool
        Whether to compute figures and explanations too, or only the tables.
    columns : sequence of str
        Columns of the leaderboard.
    """
    bundle = load_bundle(paths)
    warnings = list(bundle.warnings)
    sections = []
    all_boards = boards(bundle.settings, targets, baseline)
    for setting, board in zip(bundle.settings, all_boards, strict=True):
        tables = (leaderboard_table(board, setting.line_styles, columns=columns), participation_table(setting))
        where = f"{setting.name}, " if len(bundle.settings) > 1 else ""
        warnings += [f"{where}{text}" for text in setting.warnings()]
        figures: tuple[Figure, ...] = ()
        explanations: list[dict[str, Any]] = []
        if pictures:
            specific, unread = selector_figures(setting)
            explanations, unexplained = report_explanations(setting, rounds)
            warnings += unread + unexplained
            general, swept = general_figures(setting, board, all_boards), sweep(setting, board)
            # The sweep is what its user ran the experiment for, so it follows the curves.
            figures = (*general[:1], *([] if swept is None else [swept]), *general[1:], *specific)
        sections.append(_Section(setting, board, tables, figures, explanations))
    # The same folder may be named twice, with another path.
    heading = title or ", ".join(dict.fromkeys(path.resolve().name for path in bundle.paths))
    return Report(bundle, tuple(sections), tuple(dict.fromkeys(warnings)), heading)


def load_figures(*paths: str | Path, setting: str | None = None) -> dict[str, Figure]:
    """Return the figures of one setting of one or several experiments, by name.

    A notebook displays them; ``load_figures("runs/digits")["accuracy"].save("accuracy.pdf")`` writes one to a file.

    Parameters
    ----------
    paths : experiments' directories
    setting : str, optional
        Default: the first.
    """
    sections = {section.setting.name: section for section in assemble(paths).sections}
    name = next(iter(sections)) if setting is None else setting
    if name not in sections:
        raise UnknownNameError(
            f"There is no setting {name!r}. Known: {', '.join(sections)}.", hint=suggest(name, sections)
        )
    return {figure.name: figure for figure in sections[name].figures}


def build_report(report: Report) -> str:
    """Return the HTML of a report."""
    panes = []
    for number, section in enumerate(report.sections):
        board, participation = section.tables
        blocks = [card("table", board, pairs_table(section.board))]
        for figure in section.figures:
            own = figure.name == "participation"
            blocks.append(card("figure", figure, number, *([participation] * own)))
            # Who was picked leads to the question why.
            if own and section.explanations:
                blocks.append(card("why", number))
        figures = {figure.name: figure for figure in section.figures}
        panes.append(Pane(section.setting.name, blocks, figures, section.explanations))
    settings = report.bundle.settings
    groups = [group for setting in settings for group in setting.groups]
    facts = [
        (len({group.label for group in groups}), "selector"), (len(settings), "setting"),
        (max(len(group.runs) for group in groups), "seed"), (report.bundle.n_runs, "run"),
        (max(setting.rounds for setting in settings), "round"),
        (max(setting.n_clients for setting in settings), "client"),
    ]  # fmt: skip
    setup = setup_card(report.bundle, report.sections[0].board)
    return build_page(report.title, facts, report.warnings, panes, remarks=report.remarks, setup=setup)


@dataclass(frozen=True)
class Pane:
    """One tab of a page."""

    name: str
    blocks: Sequence[Markup]
    figures: Mapping[str, Figure]
    explanations: list[dict[str, Any]]


def build_page(
    title: str,
    facts: Sequence[tuple[int, str]],
    warnings: Sequence[str],
    panes: Sequence[Pane],
    *,
    remarks: Sequence[str] = (),
    setup: str = "",
) -> str:
    """Return a self-contained page.

    Parameters
    ----------
    title : heading
    facts : numbers below the heading, each with a noun
    warnings, remarks : sentences above everything else
    panes : the tabs
    setup : the last card
    """
    data: dict[str, Any] = {"figures": {}, "explanations": {}}
    for number, pane in enumerate(panes):
        for figure in pane.figures.values():
            data["figures"][f"{number}-{figure.name}"] = figure.chart(pane.name if len(panes) > 1 else None)
        data["explanations"][str(number)] = pane.explanations
    return render(
        "report.html",
        title=title,
        facts=facts,
        remarks=remarks,
        warnings=warnings,
        panes=panes,
        setup=setup,
        data=data,
        date=time.strftime("%Y-%m-%d %H:%M"),
    )


def figure_files(report: Report) -> list[dict[str, Any]]:
    """Return every figure as the chart code draws it, with its file name."""
    several = len(report.sections) > 1
    return [f.chart(s.setting.name if several else None) for s in report.sections for f in s.figures]
