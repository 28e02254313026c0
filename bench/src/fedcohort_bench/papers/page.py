"""The pages: published figures next to ours, ratios and verdicts, as Markdown and as one HTML file without scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcohort.report import palette
from fedcohort.report.render import render
from fedcohort.simulate.leaderboard.formats import DASHES, Cell, Table, to_markdown
from fedcohort_bench.papers.catalogue import EXHIBITS
from fedcohort_bench.papers.declare import MEASURES, Exhibit, Grid, Measure, Study
from fedcohort_bench.papers.record import StudyRecord
from fedcohort_bench.papers.verdicts import (
    MIN_COST,
    ClaimVerdict,
    MarginComparison,
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
    labels = [*grid.labels, *(label for label in measured if label not in grid.labels)]
    rows = []
    for label in labels:
        cells = [Cell(exhibit.study.names.get(label, label))]
        for setting, figures in grid.published.items():
            cells += [
                _published_cell(figures, label, measure),
                _our_cell(record.mean(setting, label, grid.measure), measure),
            ]
        rows.append(tuple(cells))
    columns = [
        "method",
        *(text for s in grid.published for text in (f"{_heading(record, s, grid.measure)}: paper", "ours")),
    ]
    return Table(grid.measure, measure.title.capitalize(), tuple(columns), tuple(rows))


def _heading(record: StudyRecord, setting: str, measure: str) -> str:
    """Return a setting's name, with the target if the measure is the rounds to it."""
    target = record.settings.get(setting, {}).get("target")
    return f"{setting} ({100 * target:g}%)" if measure == "rounds" and target is not None else setting


def _published_cell(figures: Mapping[str, tuple[float, float | None] | None], label: str, measure: Measure) -> Cell:
    if label not in figures:
        return Cell("")
    figure = figures[label]
    if figure is None:
        return Cell("N/A")
    mean, deviation = figure
    # We print rounds without decimals, but a paper's mean over seeds may have them.
    digits = max(measure.digits, 0 if mean == round(mean) else 1)
    text = f"{mean:,.{digits}f}"
    return Cell(text if deviation is None else f"{text} ± {deviation:g}")


def _our_cell(mean: tuple[float | None, float, int] | None, measure: Measure) -> Cell:
    if mean is None:
        return Cell("–")
    value, std, _ = mean
    if value is None:
        return Cell("N/A")
    text = number(measure.scale * value, measure)
    return Cell(text if math.isnan(std) else f"{text} ± {number(measure.scale * std, measure)}")


def ratio_table(exhibit: Exhibit, comparisons: Sequence[MarginComparison]) -> Table:
    """Return every comparison with the paper's margin and ours."""
    names = exhibit.study.names
    rows = []
    for ratio in comparisons:
        measure = MEASURES[ratio.measure]
        rows.append(
            (
                Cell(f"{names[str(ratio.better)]} against {names[str(ratio.worse)]}"),
                Cell(ratio.setting),
                Cell(measure.title),
                Cell(_margin(ratio.published, measure)),
                Cell(_margin(ratio.ours, measure) if ratio.seeds else "–"),
                Cell(f"{ratio.wins} of {ratio.seeds}" if ratio.seeds else "–"),
                Cell(f"{ratio.state}: {ratio.unclear}" if ratio.unclear else ratio.state),
                Cell(ratio.margin),
            )
        )
    head = ("better in the paper", "setting", "measure", "paper's margin", "ours", "seeds", "order", "margin")
    return Table("ratios", "Ratio by ratio", head, tuple(rows))


def _margin(value: float, measure: Measure) -> str:
    if math.isnan(value):
        return "neither reached it"
    if math.isinf(value):
        return "only one reached it"
    return f"{1 + value:.2f}×" if measure.ratio else f"{value:+.2f} points"


def verdict_table(verdicts: Sequence[ClaimVerdict]) -> Table:
    """Return the claims with their verdicts; those of supplements are in parentheses."""
    rows = tuple((Cell(v.text), Cell(f"({v.state})" if v.supplement else v.state), Cell(v.detail)) for v in verdicts)
    return Table("claims", "What holds", ("claim", "verdict", "seen"), rows, wrap=frozenset({0, 2}))


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


def conditions(exhibit: Exhibit, record: StudyRecord) -> list[str]:
    """Say how our figures were made, and where we used fewer seeds or rounds than the paper."""
    study, settings = exhibit.study, record.settings
    if not settings:
        return ["Not run yet."]
    groups: dict[str, list[str]] = {}
    for name, entry in settings.items():
        groups.setdefault(_conditions_of(study, entry), []).append(name)
    sentences = [f"{', '.join(names)}: {text}." for text, names in groups.items()]
    sentences += _added_later(study, record)
    sentences += _other_targets(exhibit, record)
    sentences += _costs(exhibit, record)
    missing = [name for name in study.rounds if name not in settings]
    if missing:
        sentences.append(f"Not run: {', '.join(missing)}.")
    return sentences


def _costs(exhibit: Exhibit, record: StudyRecord) -> list[str]:
    """Say what heterogeneity costs the baseline, and where that is too little to judge a selector by."""
    study = exhibit.study
    measure = next((claim.measure for claim in exhibit.every_claim()), "best")
    costs = {name: heterogeneity_cost(study, record, name, measure) for name in study.rounds}
    known = {name: cost for name, cost in costs.items() if not math.isnan(cost)}
    if not known:
        return []
    listed = ", ".join(f"{name} {cost:.1f}" for name, cost in known.items())
    little = [name for name, cost in known.items() if cost < MIN_COST]
    sentence = f"What heterogeneity costs {study.names[study.baseline]}, in points: {listed}."
    if little:
        sentence += f" Below {MIN_COST:g} points no choice of clients can show what it gains: {', '.join(little)}."
    return [sentence]


def _other_targets(exhibit: Exhibit, record: StudyRecord) -> list[str]:
    """Say where our rounds are to a different target than the paper's."""
    counted = {grid.measure for grid in exhibit.grids} | {claim.measure for claim in exhibit.claims}
    if "rounds" not in counted:
        return []
    sentences = []
    for name, entry in record.settings.items():
        target = exhibit.study.target(name)
        if target is not None and entry.get("target") not in (None, target) and not entry["made"].get("trial"):
            sentences.append(f"{name}: our rounds are to {100 * entry['target']:g}%, the paper's to {100 * target:g}%.")
    return sentences


def _conditions_of(study: Study, entry: Mapping[str, Any]) -> str:
    """Return how a setting was run, and whether with fewer seeds or rounds than the paper."""
    made_with = entry["made"]
    fewer = ["a trial on small data, not a result"] if made_with.get("trial") else []
    if len(entry["seeds"]) < study.seeds:
        fewer.append(f"fewer seeds: {len(entry['seeds'])} of {study.seeds}")
    if entry["rounds"] < entry["planned"]:
        fewer.append(f"fewer rounds: {entry['rounds']:,} of {entry['planned']:,}")
    if not entry["finished"]:
        fewer.append("not finished")
    return (
        f"{_seeds(entry['seeds'])}, {entry['rounds']:,} rounds{' (' + '; '.join(fewer) + ')' if fewer else ''}, on "
        f"{made_with['device']}, {made_with['date']}, fedcohort {made_with['fedcohort']}, by `{made_with['command']}`"
    )


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
        compared = "".join(
            f"; {name}, run again with them, differs from the record by {_span(moved)} points of best accuracy"
            for name, moved in again.items()
            if moved
        )
        sentences.append(f"{', '.join(settings)}: {text}{compared}.")
    return sentences


def _span(values: Sequence[float]) -> str:
    """Return a single value, or the smallest, the largest and the number of values."""
    if len(values) == 1:
        return f"{values[0]:+.2f}"
    return f"{min(values):+.2f} to {max(values):+.2f} (in {len(values)} runs)"


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds ({seeds[0]} to {seeds[-1]})"


def tables_of(exhibit: Exhibit, record: StudyRecord) -> list[Table]:
    """Return all tables of an exhibit: figures, ratios, verdicts."""
    verdicts = judge(exhibit, record)
    tables = [table_of(grid, exhibit, record) for grid in exhibit.grids]
    if not exhibit.grids:
        tables += _figures_of(exhibit, record)
    compared = ratios(exhibit, record)
    if compared:
        tables.append(ratio_table(exhibit, compared))
    if verdicts:
        tables.append(verdict_table(verdicts))
    return tables


def _figures_of(exhibit: Exhibit, record: StudyRecord) -> list[Table]:
    """Return our figures for an exhibit without published ones: the measures its claims are about."""
    tables = []
    for name in dict.fromkeys(claim.measure for claim in exhibit.claims):
        measure, settings = MEASURES[name], list(exhibit.study.rounds)
        rows = tuple(
            (Cell(full), *(_our_cell(record.mean(s, label, name), measure) for s in settings))
            for label, full in exhibit.study.names.items()
        )
        heads = (_heading(record, setting, name) for setting in settings)
        tables.append(Table(name, measure.title.capitalize(), ("method", *heads), rows))
    return tables


def markdown(exhibit: Exhibit, record: StudyRecord) -> str:
    """Return an exhibit's page as Markdown."""
    lines = [f"# {exhibit.paper}, {exhibit.place}: {exhibit.title}", "", summary(judge(exhibit, record)), ""]
    lines += [f"- {text}" for text in conditions(exhibit, record)]
    lines += [f"- Differs from the paper: {text}" for text in exhibit.study.differences]
    lines += [f"- {text}" for text in exhibit.notes]
    for table in tables_of(exhibit, record):
        lines += ["", f"## {table.title}", "", to_markdown(table).strip()]
    return "\n".join(lines) + "\n"


def html_page(exhibit: Exhibit, record: StudyRecord) -> str:
    """Return an exhibit's page as HTML, with its learning curves."""
    title = f"{exhibit.paper}, {exhibit.place}: {exhibit.title}"
    items = [
        *conditions(exhibit, record),
        *(f"Differs from the paper: {text}" for text in exhibit.study.differences),
        *exhibit.notes,
    ]
    return render(
        "exhibit.html",
        package="fedcohort_bench",
        title=title,
        summary=summary(judge(exhibit, record)),
        items=items,
        tables=tables_of(exhibit, record),
        curves={setting: _curves(exhibit, entry["labels"]) for setting, entry in record.settings.items()},
    )


def _curves(
    exhibit: Exhibit, labels: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]
) -> dict[str, Any] | None:
    """Return the first eight mean curves as the page draws them; None before the first evaluation."""
    shown = [(label, entry["curve"]) for label, entry in labels.items() if entry["curve"]["round"]][:_MAX_CURVES]
    if not shown:
        return None
    last = max(curve["round"][-1] for _, curve in shown)
    values = [value for _, curve in shown for value in curve["accuracy"]]
    low, high = min(values), max(*values, min(values) + 1e-6)
    width, height, left = 640, 300, 60

    def place(at: float, value: float) -> str:
        return f"{left + width * at / last:.1f},{10 + height * (high - value) / (high - low):.1f}"

    drawn = palette.assign(label for label, _ in shown)
    lines = [
        {
            "name": exhibit.study.names.get(label, label),
            "points": " ".join(place(at, value) for at, value in zip(curve["round"], curve["accuracy"], strict=True)),
            "colour": drawn[label][0],
            "dash": DASHES[drawn[label][1]],
        }
        for label, curve in shown
    ]
    return {"last": last, "low": f"{low:.0%}", "high": f"{high:.0%}", "lines": lines}


def overview(folder: Path) -> str:
    """Return a Markdown table of all records in a folder: how many claims of each exhibit hold."""
    rows = []
    for exhibit in EXHIBITS.values():
        record = StudyRecord.read(folder / f"{exhibit.study.name}.json", exhibit.study)
        tally = count_verdicts(judge(exhibit, record))
        state = "" if _is_complete(exhibit, record) else "fewer seeds or rounds than the paper"
        state = state if _has_results(exhibit, record) else "not run"
        rows.append(
            (
                Cell(f"`{exhibit.name}`"),
                Cell(f"{exhibit.paper}, {exhibit.place}: {exhibit.title}"),
                Cell(str(tally["holds"])),
                Cell(str(tally["does not hold"])),
                Cell(str(tally["open"])),
                Cell(str(tally["not run"])),
                Cell(state),
            )
        )
    head = ("name", "what", "holds", "does not hold", "open", "not run", "run with")
    return to_markdown(Table("overview", "All", head, tuple(rows), wrap=frozenset({1, 6})))


def _has_results(exhibit: Exhibit, record: StudyRecord) -> bool:
    """Whether any method besides the baseline was run."""
    shown = [label for label in exhibit.study.names if label != exhibit.study.baseline]
    return any(label in entry["labels"] for entry in record.settings.values() for label in shown)


def _is_complete(exhibit: Exhibit, record: StudyRecord) -> bool:
    return all(
        name in record.settings
        and record.settings[name]["finished"]
        and len(record.settings[name]["seeds"]) >= exhibit.study.seeds
        and record.settings[name]["rounds"] >= rounds
        for name, rounds in exhibit.study.rounds.items()
    )
