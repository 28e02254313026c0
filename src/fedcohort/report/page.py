"""One self-contained HTML file: tables and sentences readable without scripts, charts drawn by inlined code."""

from __future__ import annotations

import json
import string
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import fedcohort
from fedcohort.core.errors import UnknownNameError
from fedcohort.core.registry import nearest
from fedcohort.core.text import escape_html
from fedcohort.report import palette
from fedcohort.report.data import Bundle, Setting, boards, load_bundle
from fedcohort.report.figures import Figure, general_figures
from fedcohort.report.insights import selector_figures
from fedcohort.report.setup import setup_html
from fedcohort.report.tables import participation_table
from fedcohort.report.why import report_explanations
from fedcohort.simulate.leaderboard import Leaderboard, Table, leaderboard_table
from fedcohort.simulate.leaderboard.formats import to_html


@dataclass(frozen=True)
class Section:
    """One setting of a report: its tables, figures and explanations."""

    setting: Setting
    board: Leaderboard
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...]
    explanations: list[dict[str, Any]]


@dataclass(frozen=True)
class Report:
    """Everything of a report before it is written in some format; ``remarks`` stand above everything."""

    bundle: Bundle
    sections: tuple[Section, ...]
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
) -> Report:
    """Read result directories and work out every table, figure and explanation.

    Parameters
    ----------
    paths : experiments' directories
    title : str, optional
        Heading; default: the directories' names.
    targets : sequence of float
        Accuracies to reach, in (0, 1]; the highest is used for the speed-up. Default: what the configuration says, else
        where the baseline ends.
    baseline : str, optional
        Label or selector everybody is compared with; default: what the configuration says, else uniform.
    rounds : sequence of int
        Rounds whose choices the report explains, beside the evenly spread ones.
    pictures : bool
        Whether figures and explanations are wanted, or the tables alone.
    """
    bundle = load_bundle(paths)
    warnings = list(bundle.warnings)
    sections = []
    options = bundle.options.given(targets, None, baseline, None)
    every = boards(bundle.settings, options)
    for setting, board in zip(bundle.settings, every, strict=True):
        tables = (leaderboard_table(board, setting.drawn), participation_table(setting))
        where = f"{setting.name}, " if len(bundle.settings) > 1 else ""
        warnings += [f"{where}{text}" for text in setting.warnings()]
        figures: tuple[Figure, ...] = ()
        explanations: list[dict[str, Any]] = []
        if pictures:
            special, unread = selector_figures(setting)
            explanations, unexplained = report_explanations(setting, rounds)
            warnings += unread + unexplained
            figures = (*general_figures(setting, board, every), *special)
        sections.append(Section(setting, board, tables, figures, explanations))
    heading = title or ", ".join(dict.fromkeys(path.resolve().name for path in bundle.paths))
    return Report(bundle, tuple(sections), tuple(dict.fromkeys(warnings)), heading)


def load_figures(*paths: str | Path, setting: str | None = None) -> dict[str, Figure]:
    """Return the pictures of one setting of one or several experiments, by name.

    In a notebook each shows itself; ``load_figures("runs/digits")["accuracy"].save("accuracy.pdf")`` writes one.

    Parameters
    ----------
    paths : experiments' directories
    setting : str, optional
        Default: the first.
    """
    sections = {section.setting.name: section for section in assemble(paths).sections}
    if setting is not None and setting not in sections:
        near = nearest(setting, list(sections))
        raise UnknownNameError(
            f"There is no setting {setting!r}. Known: {', '.join(sections)}.",
            hint=f"did you mean {near!r}?" if near else None,
        )
    section = sections[setting] if setting is not None else next(iter(sections.values()))
    return {figure.name: figure for figure in section.figures}


def asset(name: str) -> str:
    """Return the text of a file of ``assets/``."""
    return (resources.files("fedcohort.report") / "assets" / name).read_text(encoding="utf-8")


def scripts(*names: str) -> str:
    """Return the chart code followed by ``names``, to be put into one script element."""
    return "\n".join(asset(name) for name in ("core.js", "kinds.js", "chart.js", "why.js", *names))


def styles() -> str:
    """Return the style sheet with the colours of both themes."""
    return palette.css() + asset("style.css")


def embedded(value: Any) -> str:
    """Return JSON that may stand inside a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def build_report(report: Report, *, theme: str | None = None) -> str:
    """Return the HTML of a report.

    Parameters
    ----------
    report : Report
    theme : "light" or "dark", optional
        Default: as the reader's system says.
    """
    panes = [
        Pane(section.setting.name, _blocks(section, number), {f.name: f for f in section.figures}, section.explanations)
        for number, section in enumerate(report.sections)
    ]
    return build_page(
        report.title,
        _facts(report),
        report.warnings,
        panes,
        remarks=report.remarks,
        setup=setup_html(report.bundle),
        theme=theme,
    )


@dataclass(frozen=True)
class Pane:
    """What is shown together; of several one is chosen by its name."""

    name: str
    blocks: Sequence[str]
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
    theme: str | None = None,
) -> str:
    """Return a self-contained page.

    Parameters
    ----------
    title : heading
    facts : numbers under it, each with the word for what is counted
    warnings, remarks : sentences that stand above everything
    panes : what is shown
    setup : HTML that follows
    theme : "light" or "dark", optional
    """
    data: dict[str, Any] = {"figures": {}, "explanations": {}}
    for number, pane in enumerate(panes):
        for figure in pane.figures.values():
            data["figures"][f"{number}-{figure.name}"] = _drawn(figure, pane.name if len(panes) > 1 else None)
        data["explanations"][str(number)] = pane.explanations
    return string.Template(asset("report.html")).substitute(
        title=escape_html(title),
        theme=f' data-theme="{escape_html(theme)}"' if theme else "",
        styles=styles(),
        summary="".join(f"<li><b>{n:,}</b> {word}{'s' if n != 1 else ''}</li>" for n, word in facts),
        remarks="".join(f"<p>{escape_html(text)}</p>" for text in remarks),
        warnings="".join(f'<p class="warning">{escape_html(text)}</p>' for text in warnings),
        tabs=_tabs(panes),
        sections="".join(_pane(pane, number, len(panes) > 1) for number, pane in enumerate(panes)),
        setup=setup,
        provenance=_provenance(),
        data=embedded(data),
        scripts=scripts("report.js"),
    )


def figure_html(figure: Figure) -> str:
    """Return one figure as a page of its own."""
    spec = {"title": figure.title, "sentence": figure.sentence, "file": figure.name, **figure.spec}
    return string.Template(asset("figure.html")).substitute(
        title=escape_html(figure.title),
        styles=styles(),
        figure=figure_block(figure, 0),
        data=embedded({"figures": {f"0-{figure.name}": spec}, "explanations": {}}),
        scripts=scripts("report.js"),
    )


def figure_files(report: Report) -> list[dict[str, Any]]:
    """Return every figure with the name of the file it is saved as."""
    several = len(report.sections) > 1
    return [_drawn(f, s.setting.name if several else None) for s in report.sections for f in s.figures]


def _drawn(figure: Figure, where: str | None) -> dict[str, Any]:
    """Return what the chart code draws, with the name of the file it is saved as; ``where`` of several it belongs."""
    slug = "" if where is None else "-" + "".join(c if c.isalnum() else "-" for c in where).strip("-")
    return {"title": figure.title, "sentence": figure.sentence, "file": f"{figure.name}{slug}", **figure.spec}


def _facts(report: Report) -> list[tuple[int, str]]:
    bundle = report.bundle
    selectors = len({group.label for setting in bundle.settings for group in setting.groups})
    seeds = max(len(group.runs) for setting in bundle.settings for group in setting.groups)
    clients = max(setting.n_clients for setting in bundle.settings)
    rounds = max(setting.rounds for setting in bundle.settings)
    return [
        (selectors, "selector"), (len(bundle.settings), "setting"), (seeds, "seed"), (bundle.n_runs, "run"),
        (rounds, "round"), (clients, "client"),
    ]  # fmt: skip


def _tabs(panes: Sequence[Pane]) -> str:
    if len(panes) < 2:
        return ""
    buttons = "".join(
        f'<button role="tab" aria-selected="{"false" if i else "true"}" data-setting="{i}">'
        f"{escape_html(pane.name)}</button>"
        for i, pane in enumerate(panes)
    )
    return f'<nav class="settings" role="tablist" aria-label="settings">{buttons}</nav>'


def _pane(pane: Pane, number: int, several: bool) -> str:
    hidden = " hidden" if number else ""
    heading = f'<h2 class="setting">{escape_html(pane.name)}</h2>' if several else ""
    return f'<div class="pane" data-pane="{number}"{hidden}>{heading}{"".join(pane.blocks)}</div>'


def _blocks(section: Section, number: int) -> list[str]:
    board, participation = section.tables
    blocks = [table_block(board)]
    for figure in section.figures:
        where = figure.name == "participation"
        blocks.append(
            figure_block(figure, number, f'<div class="extra">{to_html(participation)}</div>' if where else "")
        )
        if where and section.explanations:
            blocks.append(why_block(number))
    return blocks


def table_block(table: Table) -> str:
    """Return a table as a card, with a button that saves its cells."""
    return (
        f'<section class="card"><h2>{escape_html(table.title)}</h2><div class="downloads">'
        f'<button type="button" data-table="{table.name}.csv" aria-label="Save {escape_html(table.title)} as CSV">CSV'
        f"</button></div>{to_html(table)}</section>"
    )


def figure_block(figure: Figure, number: int, extra: str = "") -> str:
    """Return a figure of pane ``number`` as a card."""
    title = escape_html(figure.title)
    buttons = "".join(
        f'<button type="button" data-save="{form}" aria-label="Save {title} as {form.upper()}">{form.upper()}</button>'
        for form in ("csv", "svg", "png")
    )
    return (
        f'<figure class="card" id="{number}-{figure.name}"><figcaption><h2>{title}</h2>'
        f'<p>{escape_html(figure.sentence)}</p></figcaption><div class="downloads">{buttons}</div>'
        f'<div class="chart" data-figure="{number}-{figure.name}"></div>{extra}</figure>'
    )


def why_block(number: int) -> str:
    """Return the card in which the explanations of pane ``number`` are browsed."""
    return (
        f'<section class="card why" data-why="{number}"><h2>Why these clients?</h2>'
        "<p>The score of every picked client and of those that were nearly picked, part by part, and what each shadow "
        "selector would have done in their place.</p>"
        '<div class="controls"><label>Selector <select data-role="selector"></select></label>'
        '<label>Round <select data-role="round"></select></label></div><div data-role="table"></div></section>'
    )


def _provenance() -> str:
    made = time.strftime("%Y-%m-%d %H:%M")
    return f"<p>Made by fedcohort {fedcohort.__version__} on {made}. Opens offline.</p>"
