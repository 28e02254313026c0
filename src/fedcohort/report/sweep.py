"""The figure of a sweep: a selector's terminal score against a parameter, and the best value.

The best of several values looks too good on the seeds that it was chosen by. So the first half of the seeds chooses it,
and the other half judges it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedcohort.report.data import SelectorRuns, Setting
from fedcohort.report.figure import Figure
from fedcohort.report.figures import json_numbers
from fedcohort.report.figures import lines as lines_figure
from fedcohort.simulate.leaderboard import Leaderboard, LeaderRow
from fedcohort.simulate.leaderboard.words import names

_LOGARITHMIC = 50  # ratio of the largest to the smallest value above which the axis is logarithmic


# The values of a parameter with their labels, ascending, by the values of the other parameters that were swept.
_Points = Mapping[str, Sequence[tuple[float, str]]]


def _find_sweeps(groups: Sequence[SelectorRuns]) -> Iterator[tuple[str, str, _Points]]:
    """Yield selector, parameter and points of every parameter with several numbers among the runs of a selector."""
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
                yield selector, key, lines


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
    rows, metric = {row.label: row for row in board.rows}, board.metric
    views, sentences = [], []
    for selector, parameter, lines in _find_sweeps(setting.groups):
        values = np.array([value for points in lines.values() for value, _ in points])
        log = bool(values.min() > 0 and values.max() / values.min() > _LOGARITHMIC)
        series = []
        for number, (rest, points) in enumerate(lines.items()):
            ends = [rows[label].terminal for _, label in points]
            means, stds = metric.natural(np.array([end.mean for end in ends])), np.array([end.std for end in ends])
            x = np.array([math.log10(value) if log else value for value, _ in points])
            line: dict[str, Any] = {"label": rest, "color": 1 + number % 8, "dash": number // 8 % 3}
            line |= {"x": json_numbers(x), "y": json_numbers(means)}
            if max(rows[label].runs for _, label in points) > 1:
                line |= {"lo": json_numbers(means - stds), "hi": json_numbers(means + stds)}
            series.append(line)
        axis = {"label": f"log10 of {parameter}" if log else parameter}
        views.append({"name": f"{selector} {parameter}", "x": axis, "series": series})
        sentences.append(f"With {selector}, {_sentence(parameter, lines, rows, board)}")
    if not views:
        return None
    y = {"label": f"terminal {metric.name}", **({"format": "percent"} if metric.share else {})}
    base = board.base.terminal.mean
    marks = [] if math.isnan(base) else [{"y": float(metric.natural(base)), "label": board.baseline}]
    text = board.so_far + " ".join(sentences)
    return lines_figure("sweep", "Sweep: score against parameter", text, views, y, marks=marks)


def _sentence(parameter: str, lines: _Points, rows: Mapping[str, LeaderRow], board: Leaderboard) -> str:
    """Say which value is best on the first half of the seeds, and where it ends on the other half."""
    labels = {label: (value, rest) for rest, points in lines.items() for value, label in points}
    whole = [label for label in labels if not rows[label].lost]
    if not whole:
        return f"every value of {parameter} lost a run."
    seeds = sorted(set.intersection(*({seed.seed for seed in rows[label].seeds} for label in whole)))
    ends = {label: {seed.seed: seed.terminal for seed in rows[label].seeds} for label in (*whole, board.baseline)}
    complete = [label for label in whole if not any(math.isnan(ends[label][seed]) for seed in seeds)]
    if not complete or not seeds:
        return f"no value of {parameter} has a result in every seed yet."

    def mean(label: str, some: Sequence[int]) -> float:
        return float(np.mean([ends[label].get(seed, math.nan) for seed in some]))

    # The best of many values looks too good on the seeds that chose it, so others judge it.
    half = max(1, len(seeds) // 2)
    tuning, others = seeds[:half], seeds[half:]
    best = max(complete, key=lambda label: mean(label, tuning))
    value, rest = labels[best]
    chosen = f"{parameter} {value:g}" + (f" ({rest})" if len(lines) > 1 else "")
    there = board.metric.value(mean(best, tuning))
    if not others:
        return f"{chosen} ends best, at {there}; there is no other seed to confirm it on."
    first, second = (f"seed{'s' * (len(some) > 1)} {names([str(seed) for seed in some])}" for some in (tuning, others))
    text = (
        f"{chosen} is best on {first} ({there}). On {second}, not used to choose it, it ends at "
        f"{board.metric.value(mean(best, others))}"
    )
    base = mean(board.baseline, others)
    known = best != board.baseline and not math.isnan(base)
    return text + (f" and {board.baseline} at {board.metric.value(base)}." if known else ".")
