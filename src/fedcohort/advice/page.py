"""Pages in the report's style: a record beside its twin, and what many twins advise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedcohort.advice.drift import Change
from fedcohort.advice.fit import Fit
from fedcohort.advice.trial import Outcome, Verdict
from fedcohort.advice.twin import Learning
from fedcohort.core.arrays import FloatArray
from fedcohort.report.figure import Figure
from fedcohort.report.figures import json_numbers
from fedcohort.report.page import Pane, build_page
from fedcohort.report.render import card
from fedcohort.simulate.leaderboard.formats import Cell, Table
from fedcohort.simulate.leaderboard.words import duration
from fedcohort.simulate.store.results import Results

_SHARES = np.linspace(0.02, 0.98, 49)


def _lines(name: str, title: str, sentence: str, x: dict[str, Any], y: str, series: list[dict[str, Any]]) -> Figure:
    views = [{"name": title, "x": x, "series": series}]
    return Figure(name, title, sentence, {"kind": "lines", "views": views, "y": {"label": y}})


def _series(label: str, color: int, x: FloatArray, y: FloatArray, **band: FloatArray) -> dict[str, Any]:
    return {
        "label": label, "color": color, "x": json_numbers(x), "y": json_numbers(y),
        **{key: json_numbers(values) for key, values in band.items()},
    }  # fmt: skip


def compared(fit: Fit, learning: Learning, results: Results) -> list[Figure]:
    """Return the record beside one run of its twin: durations, presence by hour, learning by round."""
    record, figures = fit.record, []
    info = results.runs[0]
    mine = record.seconds[record.answered & np.isfinite(record.seconds) & (record.seconds > 0)]
    members = results.members(info)
    theirs = members["seconds"][members["status"] == 0].astype(float)
    if len(mine) and len(theirs):
        ours, twins = np.quantile(mine, _SHARES), np.quantile(theirs, _SHARES)
        text = f"Half of the recorded answers took {duration(float(np.median(mine)))} or less, "
        text += f"of the twin's {duration(float(np.median(theirs)))}."
        axis = {"label": "share of answers", "format": "percent"}
        figures.append(
            _lines("durations", "How long clients take", text, axis, "seconds",
                   [_series("record", 1, _SHARES, ours), _series("twin", 2, _SHARES, twins)])
        )  # fmt: skip
    if record.online is not None and not fit.always_on:
        hours = np.arange(24)
        start = results.column(info, "clock").astype(float)
        pairs = (
            ((record.asked - record.midnight) / 3600 % 24, record.online.mean(axis=1)),
            (start / 3600 % 24, results.column(info, "available").astype(float) / len(record.names)),
        )
        series = []
        for (at, share), label, color in zip(pairs, ("record", "twin"), (1, 2), strict=True):
            count = np.bincount(at.astype(int), minlength=24)
            with np.errstate(invalid="ignore"):
                means = np.bincount(at.astype(int), share, minlength=24) / count
            series.append(_series(label, color, hours.astype(float), means))
        text = f"{record.online.mean():.0%} of the clients were online on average, "
        text += f"{pairs[1][1].mean():.0%} in the twin."
        axis = {"label": "hour", "format": "integer"}
        figures.append(_lines("presence", "Who is online by hour", text, axis, "share online", series))
    if len(learning.band):
        x, own, low, mean, high = learning.band.T
        series = [_series("record", 1, x, own), _series("twins", 2, x, mean, lo=low, hi=high)]
        label = record.metric if record.is_share else f"progress of {record.metric}"
        axis = {"label": "round", "format": "integer"}
        figures.append(_lines("learning", "How the model learns", learning.verdict, axis, label, series))
    return figures


def sentences(fit: Fit, learning: Learning, found: Sequence[Change]) -> dict[str, list[str]]:
    """Return what is fitted, what is assumed, and what changed, by heading."""
    changed = [f"{change}." for change in found if change.found]
    tested = ", ".join(change.what.lower() for change in found)
    calm = f"No change was found in {tested}." if tested else "The record is too short to see whether anything changed."
    shadows = {"What the journal's shadows say": list(fit.record.shadows)} if fit.record.shadows else {}
    return {
        **shadows,
        "Fitted": [*fit.fitted, learning.verdict],
        "Assumed": [*fit.assumed, *fit.record.remarks],
        "Did the federation change?": changed or [calm],
    }


def table(fit: Fit, outcomes: Sequence[Outcome]) -> Table:
    """Return what every way achieved on the twins."""
    timed = fit.record.timed
    rows = []
    for outcome in outcomes:
        mean, low, high = outcome.interval()
        bound = "≤" * (outcome.missed > 0.5)  # most runs did not arrive in the time there was
        speed = (
            Cell("1 (baseline)") if outcome is outcomes[0] else Cell(f"{bound}{mean:.2f}×", f"{low:.2f} to {high:.2f}")
        )
        time, work = float(outcome.seconds.mean()), float(outcome.work.mean())
        late = f"{outcome.missed:.0%} of runs later" if outcome.missed else ""
        rows.append((
            Cell(outcome.way.name),
            speed,
            Cell(duration(time) if timed else f"{time:.0f} rounds", late),
            Cell(duration(work) if timed else f"{work:.0f} models"),
            Cell(f"{outcome.slowest.mean():.0%}" if timed else "–"),
            Cell(f"{outcome.even.mean():.2f}"),
            Cell("–" if np.isnan(outcome.worst).any() else f"{outcome.worst.mean():.0%}"),
        ))  # fmt: skip
    note = (
        "Times as fast, with a 95% interval for one more federation that looks like the record. Time and client work "
        "to 95% of what the recorded way gains; runs that need longer count with the time there was (≤). Slow clients: "
        "the slowest quarter's share of all participation. Even: Jain's index, 1 if all take part equally often. "
        "Worst group: its accuracy at the end, on the data that stand in for yours."
    )
    columns = ("Way", "Times as fast", "Time", "Client work", "Slow clients", "Even", "Worst group")
    return Table("ways", f"Ways to run it, on {len(outcomes[0].logs)} twins", columns, tuple(rows), note)


def size_figure(outcomes: Sequence[Outcome], verdict: Verdict, timed: bool) -> Figure | None:
    """Return the curve of time and of client work against cohort size."""
    sized = sorted((o for o in outcomes if o.way.size is not None), key=lambda o: o.way.size or 0)
    if len(sized) < 2:
        return None
    x = np.array([float(o.way.size or 0) for o in sized])
    unit = "seconds" if timed else "rounds"
    axis = {"label": "clients per round", "format": "integer"}
    views = []
    for name, values in (("Time", [o.seconds for o in sized]), ("Client work", [o.work for o in sized])):
        y = np.array([v.mean() for v in values])
        spread = np.array([v.std(ddof=1) if len(v) > 1 else 0.0 for v in values])
        views.append({"name": name, "x": axis, "series": [_series(name, 1, x, y, lo=y - spread, hi=y + spread)]})
    text = "The smallest cohort that is enough cannot be told."
    if verdict.knee is not None:
        text = f"Cohorts of {verdict.knee} are nearly as fast as the fastest size that was tried."
    text += " The band is one deviation over twins."
    return Figure("sizes", "How many clients", text, {"kind": "lines", "views": views, "y": {"label": unit, "min": 0}})


def twin_page(fit: Fit, learning: Learning, results: Results, found: Sequence[Change]) -> str:
    """Return the page of a twin."""
    return _page(
        f"A twin of {fit.record.name}", fit, [], compared(fit, learning, results), sentences(fit, learning, found)
    )


def advice_page(
    fit: Fit,
    learning: Learning,
    results: Results,
    found: Sequence[Change],
    outcomes: Sequence[Outcome],
    verdict: Verdict,
) -> str:
    """Return the page of an advice."""
    blocks = [card("sentences", "What to do", answer(verdict, fit)), card("table", table(fit, outcomes))]
    curve = size_figure(outcomes, verdict, fit.record.timed)
    figures = [*([] if curve is None else [curve]), *compared(fit, learning, results)]
    return _page(f"Advice for {fit.record.name}", fit, blocks, figures, sentences(fit, learning, found))


def answer(verdict: Verdict, fit: Fit) -> list[str]:
    """Return the advice in sentences."""
    lines = [verdict.headline]
    if verdict.best is not None:
        lines.append(f"To do so: {verdict.best.way.how}.")
        if verdict.best.way.how.startswith("fedcohort journal selector"):
            lines.append("The run may go on meanwhile. With --shadow 10 it is a shadow for ten rounds first.")
        lines.append(
            f"The slowest quarter of clients would then be {verdict.best.slowest.mean():.0%} of all participation, and "
            f"Jain's index of participation {verdict.best.even.mean():.2f}."
        )
    if verdict.promising is not None:
        mean, low, high = verdict.promising.interval()
        text = f"The most promising is {verdict.promising.way.name}, {mean:.2f} times as fast ({low:.2f} to {high:.2f})"
        lines.append(f"{text}; if you try it ({verdict.promising.way.how}), its journal tells more.")
    if verdict.knee is not None and verdict.knee != fit.record.cohort:
        lines.append(f"In rounds, cohorts of {verdict.knee} are nearly as fast as the fastest size that was tried.")
    if verdict.missing:
        lines.append(f"To tell more, record: {'; '.join(verdict.missing)}.")
    return lines


def _page(title: str, fit: Fit, blocks: list[Any], figures: list[Figure], texts: dict[str, list[str]]) -> str:
    blocks = [*blocks, *(card("figure", figure, 0) for figure in figures)]
    blocks += [card("sentences", heading, lines or ["Nothing."]) for heading, lines in texts.items()]
    record = fit.record
    facts = [(record.models, "round"), (len(record.names), "client"), (len(record.client), "request")]
    return build_page(title, facts, (), [Pane(title, blocks, {f.name: f for f in figures}, [])])
