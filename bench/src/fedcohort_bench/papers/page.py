"""The pages: published figures next to ours, ratios and verdicts, as Markdown and as one HTML file without scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from fedcohort.report import palette
from fedcohort.report.render import render
from fedcohort.simulate.leaderboard.formats import DASHES, Cell, Table, to_markdown
from fedcohort_bench.papers.catalogue import EXHIBITS
from fedcohort_bench.papers.declare import MEASURES, Exhibit, Grid, Measure, Study
from fedcohort_bench.papers.record import NOT_RUN, StudyRecord
from fedcohort_bench.papers.verdicts import (
    MIN_COST,
    ClaimVerdict,
    count_verdicts,
    heterogeneity_cost,
    judge,
    ratios,
)

_PLURAL = {"holds": "hold", "does not hold": "do not hold", "open": "open", "not run": "not run"}
_MAX_CURVES = 8


def number(value: float, measure: Measure) -> str:
    """Return a figure as the paper would print it."""
    return f"{value:,.{measure.digits}f}"


def table_of(grid: Grid, exhibit: Exhibit, record: StudyRecord) -> Table:
    """Return published figures and ours, a row per method, two columns per setting."""
    measure, names = MEASURES[grid.measure], exhibit.study.names
    measured = [label for label in names if any(record.mean(s, label, grid.measure) for s in grid.published)]
    rows = []
    for label in dict.fromkeys([*grid.labels, *measured]):
        cells = [Cell(names.get(label, label))]
        for setting, figures in grid.published.items():
            published = "" if label not in figures else "N/A"
            if figure := figures.get(label):
                mean, deviation = figure
                # We print rounds without decimals, but a paper's mean over seeds may have them.
                digits = max(measure.digits, 0 if mean == round(mean) else 1)
                published = f"{mean:,.{digits}f}" + ("" if deviation is None else f" ± {deviation:g}")
            cells += [Cell(published), _our_cell(record.mean(setting, label, grid.measure), measure)]
        rows.append(tuple(cells))
    heads = (text for s in grid.published for text in (f"{_heading(record, s, grid.measure)}: paper", "ours"))
    return Table(grid.measure, measure.title.capitalize(), ("method", *heads), tuple(rows))


def _heading(record: StudyRecord, setting: str, measure: str) -> str:
    """Return a setting's name, with the target if the measure is the rounds to it."""
    target = record.settings.get(setting, {}).get("target")
    return f"{setting} ({100 * target:g}%)" if measure == "rounds" and target is not None else setting


def _our_cell(mean: tuple[float | None, float, int] | None, measure: Measure) -> Cell:
    if mean is None:
        return Cell("–")
    value, std, _ = mean
    if value is None:
        return Cell("N/A")
    text = number(measure.scale * value, measure)
    return Cell(text if math.isnan(std) else f"{text} ± {number(measure.scale * std, measure)}")


def _margin(value: float, measure: Measure) -> str:
    if math.isnan(value):
        return "neither reached it"
    if math.isinf(value):
        return "only one reached it"
    return f"{1 + value:.2f}×" if measure.ratio else f"{value:+.2f} points"


def summary(verdicts: Sequence[ClaimVerdict]) -> str:
    """Summarise the verdicts in one sentence, and supplements in another."""
    kinds = {"claim": [v for v in verdicts if not v.supplement], "supplement": [v for v in verdicts if v.supplement]}
    sentences = []
    for kind, members in kinds.items():
        states = [verdict.state for verdict in members]
        parts = [f"{states.count(s)} {_PLURAL[s] if states.count(s) != 1 else s}" for s in _PLURAL if s in states]
        if parts:
            sentences.append(f"{len(members)} {kind}{'s' * (len(members) != 1)}: {', '.join(parts)}.")
    return " ".join(sentences) or "No claims."


def _conditions(exhibit: Exhibit, record: StudyRecord) -> list[str]:
    """Say how our figures were made, and where we used fewer seeds or rounds than the paper."""
    study, settings = exhibit.study, record.settings
    if not settings:
        return ["Not run yet."]
    groups: dict[str, list[str]] = {}
    for name, entry in settings.items():
        made, seeds, rounds = entry["made"], entry["seeds"], entry["rounds"]
        fewer = ["a trial on small data, not a result"] if made.get("trial") else []
        fewer += [f"fewer seeds: {len(seeds)} of {study.seeds}"] if len(seeds) < study.seeds else []
        fewer += [f"fewer rounds: {rounds:,} of {entry['planned']:,}"] if rounds < entry["planned"] else []
        fewer += [] if entry["finished"] else ["not finished"]
        several = f"{len(seeds)} seeds ({seeds[0]} to {seeds[-1]})"
        text = (
            f"{several if len(seeds) > 1 else f'seed {seeds[0]}'}, {rounds:,} rounds"
            f"{' (' + '; '.join(fewer) + ')' if fewer else ''}, on {made['device']}, {made['date']}, fedcohort "
            f"{made['fedcohort']}, by `{made['command']}`"
        )
        groups.setdefault(text, []).append(name)
    sentences = [f"{', '.join(names)}: {text}." for text, names in groups.items()]
    sentences += _added_later(study, record)

    measures = [grid.measure for grid in exhibit.grids] + [claim.measure for claim in exhibit.claims]
    for name, entry in settings.items() if "rounds" in measures else ():
        target = study.target(name)
        if target is not None and entry.get("target") not in (None, target) and not entry["made"].get("trial"):
            sentences.append(f"{name}: our rounds are to {100 * entry['target']:g}%, the paper's to {100 * target:g}%.")

    # What heterogeneity costs the baseline, and where that is too little to judge a selector by.
    measure = next((claim.measure for claim in exhibit.every_claim()), "best")
    costs = {name: heterogeneity_cost(study, record, name, measure) for name in study.rounds}
    listed = ", ".join(f"{name} {cost:.1f}" for name, cost in costs.items() if not math.isnan(cost))
    little = [name for name, cost in costs.items() if cost < MIN_COST]
    if listed:
        sentence = f"What heterogeneity costs {study.names[study.baseline]}, in points: {listed}."
        if little:
            sentence += f" Below {MIN_COST:g} points no choice of clients can show what it gains: {', '.join(little)}."
        sentences.append(sentence)
    missing = [name for name in study.rounds if name not in settings]
    return sentences + ([f"Not run: {', '.join(missing)}."] if missing else [])


def _added_later(study: Study, record: StudyRecord) -> list[str]:
    """Say which methods were added later, and how much the methods that were run again differ from the record."""
    groups: dict[str, tuple[list[str], dict[str, list[float]]]] = {}
    for setting, entry in record.settings.items():
        for piece in entry.get("later", ()):
            methods = "; ".join(study.names.get(label, label) for label in piece["labels"])
            made_with = piece["made"]
            text = f"{methods}: added on {made_with['device']}, {made_with['date']}, by `{made_with['command']}`"
            settings, again = groups.setdefault(text, ([], {}))
            settings.append(setting)
            for label, best in piece["again"].items():
                pairs = zip(best, entry["labels"][label]["best"], strict=True)
                moved = [100 * (now - then) for now, then in pairs if now is not None and then is not None]
                again.setdefault(study.names.get(label, label), []).extend(moved)
    sentences = []
    for text, (settings, again) in groups.items():
        compared = ""
        for name, moved in again.items():
            if moved:
                span = f"{min(moved):+.2f} to {max(moved):+.2f} (in {len(moved)} runs)"
                differs = span if len(moved) > 1 else f"{moved[0]:+.2f}"
                compared += (
                    f"; {name}, run again with them, differs from the record by {differs} points of best accuracy"
                )
        sentences.append(f"{', '.join(settings)}: {text}{compared}.")
    return sentences


def tables_of(exhibit: Exhibit, record: StudyRecord) -> list[Table]:
    """Return all tables of an exhibit: figures, ratios, verdicts."""
    tables = [table_of(grid, exhibit, record) for grid in exhibit.grids]
    # Without published figures, ours for the measures that the claims are about.
    for name in () if exhibit.grids else dict.fromkeys(claim.measure for claim in exhibit.claims):
        measure, settings = MEASURES[name], list(exhibit.study.rounds)
        rows = tuple(
            (Cell(full), *(_our_cell(record.mean(s, label, name), measure) for s in settings))
            for label, full in exhibit.study.names.items()
        )
        heads = (_heading(record, setting, name) for setting in settings)
        tables.append(Table(name, measure.title.capitalize(), ("method", *heads), rows))
    compared = []
    for ratio in ratios(exhibit, record):
        kind, names, run = MEASURES[ratio.measure], exhibit.study.names, ratio.seeds > 0
        cells = [f"{names[str(ratio.better)]} against {names[str(ratio.worse)]}", ratio.setting, kind.title]
        cells += [_margin(ratio.published, kind), _margin(ratio.ours, kind) if run else "–"]
        cells += [f"{ratio.wins} of {ratio.seeds}" if run else "–"]
        cells += [f"{ratio.state}: {ratio.unclear}" if ratio.unclear else ratio.state, ratio.margin]
        compared.append(tuple(map(Cell, cells)))
    if compared:
        head = ("better in the paper", "setting", "measure", "paper's margin", "ours", "seeds", "order", "margin")
        tables.append(Table("ratios", "Ratio by ratio", head, tuple(compared)))
    # The verdicts on supplements are in parentheses.
    states = [(v.text, f"({v.state})" if v.supplement else v.state, v.detail) for v in judge(exhibit, record)]
    if states:
        claims = tuple(tuple(map(Cell, state)) for state in states)
        tables.append(Table("claims", "What holds", ("claim", "verdict", "seen"), claims, wrap=frozenset({0, 2})))
    return tables


def _items(exhibit: Exhibit, record: StudyRecord) -> list[str]:
    """Return the remarks above the tables."""
    differences = (f"Differs from the paper: {text}" for text in exhibit.study.differences)
    return [*_conditions(exhibit, record), *differences, *exhibit.notes]


def markdown(exhibit: Exhibit, record: StudyRecord) -> str:
    """Return an exhibit's page as Markdown."""
    lines = [f"# {exhibit.heading}", "", summary(judge(exhibit, record)), ""]
    lines += [f"- {text}" for text in _items(exhibit, record)]
    for table in tables_of(exhibit, record):
        lines += ["", f"## {table.title}", "", to_markdown(table).strip()]
    return "\n".join(lines) + "\n"


def html_page(exhibit: Exhibit, record: StudyRecord) -> str:
    """Return an exhibit's page as HTML, with the first eight mean learning curves of each setting."""
    curves = {}
    for setting, entry in record.settings.items():
        shown = {label: one["curve"] for label, one in entry["labels"].items() if one["curve"]["round"]}
        kept = dict(list(shown.items())[:_MAX_CURVES])
        styles = palette.assign(kept)
        names = exhibit.study.names
        curves[setting] = [(names.get(k, k), curve, styles[k][0], DASHES[styles[k][1]]) for k, curve in kept.items()]
    return render(
        "exhibit.html",
        package="fedcohort_bench",
        title=exhibit.heading,
        summary=summary(judge(exhibit, record)),
        items=_items(exhibit, record),
        tables=tables_of(exhibit, record),
        curves=curves,
    )


def overview(folder: Path) -> str:
    """Return a Markdown table of all records in a folder: how many claims of each exhibit hold."""
    rows = []
    for exhibit in EXHIBITS.values():
        study = exhibit.study
        record = StudyRecord.read(folder / f"{study.name}.json", study)
        complete = all(
            entry["finished"] and len(entry["seeds"]) >= study.seeds and entry["rounds"] >= rounds
            for name, rounds in study.rounds.items()
            for entry in [record.settings.get(name, NOT_RUN)]
        )
        run = {label for entry in record.settings.values() for label in entry["labels"]}
        state = "" if complete else "fewer seeds or rounds than the paper"
        state = state if run & {*study.names} - {study.baseline} else "not run"
        tally = count_verdicts(judge(exhibit, record))
        cells = (f"`{exhibit.name}`", exhibit.heading, *map(str, tally.values()), state)
        rows.append(tuple(map(Cell, cells)))
    head = ("name", "what", "holds", "does not hold", "open", "not run", "run with")
    return to_markdown(Table("overview", "All", head, tuple(rows), wrap=frozenset({1, 6})))
