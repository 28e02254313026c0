"""The figure of a sweep: a selector's terminal score against a parameter, and the best value.

The best of several values looks too good on the seeds that it was chosen by. So the first half of the seeds chooses it,
and the other half judges it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcohort.report.data import SelectorRuns, Setting
from fedcohort.report.figure import Figure
from fedcohort.report.figures import json_numbers
from fedcohort.simulate.leaderboard import Leaderboard, LeaderRow
from fedcohort.simulate.leaderboard.words import names

_LOGARITHMIC = 50  # ratio of the largest to the smallest value above which the axis is logarithmic


@dataclass(frozen=True)
class Sweep:
    """One selector's parameter.

    Attributes
    ----------
    lines : (value, label) pairs in ascending order, by the values of the other swept parameters
    """

    selector: str
    parameter: str
    lines: Mapping[str, Sequence[tuple[float, str]]]


def _find_sweeps(groups: Sequence[SelectorRuns]) -> list[Sweep]:
    """Return every parameter that has several numbers as values among the runs of one selector."""
    sweeps = []
    for selector in dict.fromkeys(group.selector for group in groups):
        params = {group.label: group.runs[0].params for group in groups if group.selector == selector}
        varied = [
            key
            for key in dict.fromkeys(key for values in params.values() for key in values)
            if len({json.dumps(values.get(key), sort_keys=True, default=str) for values in params.values()}) > 1
        ]
        for key in varied:
            lines = _lines(selector, params, key, [other for other in varied if other != key])
            if lines:
                sweeps.append(Sweep(selector, key, lines))
    return sweeps


def _lines(
    selector: str, params: Mapping[str, Mapping[str, Any]], key: str, others: Sequence[str]
) -> dict[str, list[tuple[float, str]]]:
    """Return the values of a parameter with their labels, one line per combination of the other parameters."""
    lines: dict[str, list[tuple[float, str]]] = {}
    for label, values in params.items():
        value = values.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            rest = ", ".join(f"{other}={values.get(other)}" for other in others)
            lines.setdefault(rest or selector, []).append((float(value), label))
    return {rest: sorted(points) for rest, points in lines.items() if len({v for v, _ in points}) > 1}


def sweep(setting: Setting, board: Leaderboard) -> Figure | None:
    """Where selectors end against the values of swept parameters, or None if nothing was swept."""
    rows = {row.label: row for row in board.rows}
    views, sentences = [], []
    for swept in _find_sweeps(setting.groups):
        views.append(_view(swept, rows, board))
        sentences.append(_sentence(swept, rows, board))
    if not views:
        return None
    metric = board.metric
    y: dict[str, Any] = {"label": f"terminal {metric.name}", **({"format": "percent"} if metric.share else {})}
    base = board.base.terminal.mean
    marks = [] if math.isnan(base) else [{"y": float(metric.natural(base)), "label": board.baseline}]
    return Figure(
        "sweep",
        "Sweep: score against parameter",
        board.so_far + " ".join(sentences),
        {"kind": "lines", "views": views, "y": y, "marks": marks},
    )


def _view(swept: Sweep, rows: Mapping[str, LeaderRow], board: Leaderboard) -> dict[str, Any]:
    """Return the view of one parameter."""
    values = np.array([value for points in swept.lines.values() for value, _ in points])
    log = bool(values.min() > 0 and values.max() / values.min() > _LOGARITHMIC)
    series = []
    for number, (rest, points) in enumerate(swept.lines.items()):
        ends = [rows[label].terminal for _, label in points]
        means, stds = board.metric.natural(np.array([end.mean for end in ends])), np.array([end.std for end in ends])
        x = np.array([math.log10(value) if log else value for value, _ in points])
        line: dict[str, Any] = {"label": rest, "color": 1 + number % 8, "dash": number // 8 % 3}
        line |= {"x": json_numbers(x), "y": json_numbers(means)}
        if max(rows[label].runs for _, label in points) > 1:
            line |= {"lo": json_numbers(means - stds), "hi": json_numbers(means + stds)}
        series.append(line)
    x_label = f"log10 of {swept.parameter}" if log else swept.parameter
    return {"name": f"{swept.selector} {swept.parameter}", "x": {"label": x_label}, "series": series}


def _sentence(swept: Sweep, rows: Mapping[str, LeaderRow], board: Leaderboard) -> str:
    """Say which value is best on the first half of the seeds, and where it ends on the other half."""
    labels = {label: (value, rest) for rest, points in swept.lines.items() for value, label in points}
    whole = [label for label in labels if not rows[label].lost]
    if not whole:
        return f"With {swept.selector}, every value of {swept.parameter} lost a run."
    seeds = sorted(set.intersection(*({seed.seed for seed in rows[label].seeds} for label in whole)))
    ends = _ends(rows, (*whole, board.baseline))
    complete = [label for label in whole if not any(math.isnan(ends[label][seed]) for seed in seeds)]
    if not complete or not seeds:
        return f"With {swept.selector}, no value of {swept.parameter} has a result in every seed yet."
    # The best of many values looks too good on the seeds that chose it, so others judge it.
    half = max(1, len(seeds) // 2)
    best = max(complete, key=lambda label: _mean(ends[label], seeds[:half]))
    value, rest = labels[best]
    setting = f"With {swept.selector}, {swept.parameter} {value:g}" + (f" ({rest})" if len(swept.lines) > 1 else "")
    base = None if best == board.baseline else ends[board.baseline]
    return f"{setting} {_judge(ends[best], base, seeds[:half], seeds[half:], board)}"


def _ends(rows: Mapping[str, LeaderRow], labels: Sequence[str]) -> dict[str, dict[int, float]]:
    """Return where each label ends, by seed."""
    return {label: {seed.seed: seed.terminal for seed in rows[label].seeds} for label in labels}


def _judge(
    ends: Mapping[int, float],
    base: Mapping[int, float] | None,
    tuning: Sequence[int],
    others: Sequence[int],
    board: Leaderboard,
) -> str:
    """Say where the best value ends on the seeds that chose it and on the others; ``base`` is the baseline."""
    metric = board.metric
    best = metric.value(_mean(ends, tuning))
    if not others:
        return f"ends best, at {best}; there is no other seed to confirm it on."
    text = (
        f"is best on {_seeds(tuning)} ({best}). On {_seeds(others)}, not used to choose it, it ends at "
        f"{metric.value(_mean(ends, others))}"
    )
    if base is None or any(seed not in base for seed in others):
        return f"{text}."
    return f"{text} and {board.baseline} at {metric.value(_mean(base, others))}."


def _mean(ends: Mapping[int, float], seeds: Sequence[int]) -> float:
    return float(np.mean([ends[seed] for seed in seeds]))


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {names([str(seed) for seed in seeds])}"
