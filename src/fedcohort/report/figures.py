"""The figures of every comparison: data for a chart, and a sentence computed from that data.

A figure's ``spec`` is what the chart code in ``assets/kinds.js`` draws: a kind, axes, and one or several views. The
report, the dashboard and exported files draw the same spec.
"""

from __future__ import annotations

import base64
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedcohort.core.arrays import AnyArray, FloatArray, IntArray
from fedcohort.report.data import RunCurve, SelectorRuns, Setting
from fedcohort.report.figure import Figure
from fedcohort.report.tables import gini
from fedcohort.simulate.leaderboard import Leaderboard, SelectorRanking, ranking
from fedcohort.simulate.leaderboard.significance import LEVEL
from fedcohort.simulate.leaderboard.table import megabytes
from fedcohort.simulate.leaderboard.words import duration, names, number, percent, quantity
from fedcohort.simulate.metrics import Metric

POINTS = 400  # of a curve, at most
HEAT_COLUMNS = 250
HEAT_ROWS = 250


# -- helpers --------------------------------------------------------------------------------------------------------


def json_numbers(values: AnyArray, digits: int = 5) -> list[float | None]:
    """Return numbers for JSON: rounded to ``digits`` significant digits, None if not finite."""
    return [float(f"{v:.{digits}g}") if math.isfinite(v) else None for v in np.asarray(values, np.float64)]


def _pack_matrix(values: FloatArray) -> tuple[str, float]:
    """Return a matrix as base64 bytes scaled to 0..255, and the value of 255."""
    top = float(values.max(initial=0.0))
    # Rounded up, so that a client picked once in thousands of rounds does not look as if it was never picked.
    scaled = np.zeros(values.shape, np.uint8) if top <= 0 else np.ceil(values * (255 / top) - 1e-9).astype(np.uint8)
    return base64.b64encode(scaled.tobytes()).decode(), top or 1.0


def _thin(count: int) -> AnyArray:
    # A chart has fewer pixels than a run may have rounds, and the page must stay small enough to send.
    return np.unique(np.linspace(0, count - 1, min(count, POINTS)).round().astype(int))


def seed_band(curves: Sequence[tuple[FloatArray, FloatArray]], stepwise: bool) -> dict[str, list[float | None]] | None:
    """Return the mean and the mean +- standard deviation of several (x, y) curves, on a common grid.

    The grid ends where the shortest curve ends, so the mean is always over the same seeds. With ``stepwise``, a curve
    keeps its last value between points; otherwise only points that all curves share are used.
    """
    curves = [(x, y) for x, y in curves if len(x)]
    if not curves:
        return None
    grid, rows = _steps(curves) if stepwise else _at_common_points(curves)
    if not len(grid):
        return None
    mean = rows.mean(axis=0)
    band = {"x": json_numbers(grid, 6), "y": json_numbers(mean)}
    if len(rows) > 1:
        std = rows.std(axis=0, ddof=1)
        band |= {"lo": json_numbers(mean - std), "hi": json_numbers(mean + std)}
    return band


def _steps(curves: Sequence[tuple[FloatArray, FloatArray]]) -> tuple[FloatArray, FloatArray]:
    """Return an even grid, and each curve's last value before each point."""
    end = min(x[-1] for x, _ in curves)
    start = max(x[0] for x, _ in curves)
    grid = np.linspace(min(start, end), end, POINTS) if end > start else np.array([end])
    return grid, np.array([y[np.maximum(np.searchsorted(x, grid, side="right") - 1, 0)] for x, y in curves])


def _at_common_points(curves: Sequence[tuple[FloatArray, FloatArray]]) -> tuple[FloatArray, FloatArray]:
    """Return the points that all curves share, thinned, and the curves' values there."""
    common = functools.reduce(np.intersect1d, [x for x, _ in curves])
    grid = common[_thin(len(common))] if len(common) else common
    return grid, np.array([y[np.searchsorted(x, grid)] for x, y in curves])


def _series(group: SelectorRuns, data: Mapping[str, Any]) -> dict[str, Any]:
    return {"label": group.label, "color": group.color, "dash": group.dash, **data}


def trailing_mean(values: FloatArray, window: int) -> FloatArray:
    """Return the trailing mean over ``window`` entries, shorter at the beginning."""
    if window <= 1:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


# -- figures --------------------------------------------------------------------------------------------------------


def accuracy(setting: Setting, board: Leaderboard) -> Figure | None:
    """Accuracy, or the task's metric, over rounds, simulated seconds and bytes."""
    metric = board.metric
    axes: list[tuple[str, dict[str, str], Callable[[RunCurve], FloatArray], bool]] = [
        ("Rounds", {"label": "round", "format": "integer"}, lambda run: run.round.astype(float), False),
        ("Simulated time", {"label": "simulated time", "format": "seconds"}, lambda run: run.values["clock"], True),
        ("Bytes", {"label": "bytes sent and received", "format": "bytes"}, lambda run: run.total_bytes, True),
    ]
    views = []
    for name, axis, x_of, stepwise in axes:
        series = _bands(setting, lambda run, x_of=x_of: _evaluated(run, x_of(run), metric), stepwise)  # type: ignore[misc]
        longest = max((s["x"][-1] or 0.0 for s in series), default=0.0)
        if series and (longest > 0 or name == "Rounds"):  # without latency, there is no simulated time
            views.append({"name": name, "x": axis, "series": series})
    if not views:
        return None
    target = {"y": metric.natural(board.target), "label": f"target {metric.level(board.target)}"}
    marks = [] if math.isnan(board.target) else [target]
    return Figure(
        "accuracy" if metric.is_accuracy else "metric",
        f"Test {metric.name}",
        _accuracy_sentence(board) + _seeds(setting),
        {
            "kind": "lines",
            "views": views,
            "y": {"label": f"test {metric.name}", **({"format": "percent", "max": 1} if metric.share else {})},
            "marks": marks,
        },
    )


def _bands(
    setting: Setting, curve: Callable[[RunCurve], tuple[FloatArray, FloatArray]], stepwise: bool = False
) -> list[dict[str, Any]]:
    """Return the series of each selector, with its band over seeds."""
    bands = [(group, seed_band([curve(run) for run in group.runs], stepwise)) for group in setting.groups]
    return [_series(group, band) for group, band in bands if band is not None]


def _evaluated(run: RunCurve, x: FloatArray, metric: Metric) -> tuple[FloatArray, FloatArray]:
    """Return a run's metric against ``x`` in the rounds in which both are known."""
    known = np.isfinite(run.values["accuracy"]) & np.isfinite(x)
    return x[known], metric.natural(run.values["accuracy"][known])


def _seeds(setting: Setting) -> str:
    counts = sorted({len(group.runs) for group in setting.groups})
    if counts == [1]:
        return " One seed, so no band is shown."
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f" Bands show one standard deviation over {seeds} seeds."


def _accuracy_sentence(board: Leaderboard) -> str:
    """Say how many runs of each selector reach the target; the conclusion says what that means."""
    if math.isnan(board.target):
        return f"No selector has a terminal {board.metric.name}{'' if board.finished else ' yet'}."
    reached = [f"{row.label} {row.main.rounds.count} of {row.runs}" for row in board.rows]
    if all(row.main.rounds.count == row.runs for row in board.rows):
        return f"{board.so_far}Every run reaches {board.metric.level(board.target)}."
    if not any(row.main.rounds.count for row in board.rows):
        return f"{board.so_far}No run reaches {board.metric.level(board.target)}."
    return f"{board.so_far}Runs that reach {board.metric.level(board.target)}: {names(reached)}."


def ranks(setting: Setting, board: Leaderboard, all_boards: Sequence[Leaderboard] = ()) -> Figure | None:
    """Mean ranks of all selectors, the critical difference, and which selectors cannot be told apart."""
    views, sentences = [], []
    several = len(all_boards) > 1
    for name, boards in (("This setting", [board]), ("All settings", list(all_boards) if several else [])):
        order = ranking(boards)
        if order is None:
            continue
        places = {label: i for i, label in enumerate(order.labels)}
        views.append(
            {
                "name": name,
                "x": {"label": "mean rank, 1 is best"},
                "labels": list(order.labels),
                "ranks": json_numbers(np.array(order.ranks)),
                "colors": [setting.line_styles[label][0] for label in order.labels],
                "difference": json_numbers(np.array([order.difference]))[0],
                "alike": [[places[group[0]], places[group[-1]]] for group in order.alike],
                "p": [json_numbers(np.array([order.p.get((a, b), 1.0) for b in order.labels])) for a in order.labels],
            }
        )
        sentences.append(_rank_sentence(order, f"in {name.lower()}" if several else ""))
    if not views:
        return None
    about = (
        f" Ranks are by terminal {board.metric.name}; a bar joins selectors that cannot be told apart (Friedman, then "
        "Nemenyi at 5%), which also depends on the others. Ranks ask who wins more often, the leaderboard by how "
        f"much: cite the leaderboard for a comparison with {board.baseline}, and this figure for a comparison of all."
    )
    spec = {"kind": "ranks", "views": views, "y": {"label": ""}}
    return Figure("ranks", "All against all", board.so_far + " ".join(sentences) + about, spec)


def _rank_sentence(order: SelectorRanking, where: str) -> str:
    blocks = quantity(order.blocks, order.over) + (f" {where}" if where and order.over == "seed" else "")
    p = "p < 0.001" if order.friedman < 0.001 else f"p = {order.friedman:.3f}"
    best = order.labels[0]
    if order.friedman >= LEVEL:
        return f"Over {blocks}, the selectors cannot be told apart (Friedman, {p})."
    worse = [label for label in order.labels[1:] if order.differ(best, label)]
    text = f"{best} has the best mean rank over {blocks} ({number(order.ranks[0])} of {len(order.labels)}; "
    text += f"Friedman, {p})"
    if not worse:
        return f"{text}, but no other differs from it by the critical difference of {number(order.difference)}."
    alike = [label for label in order.labels[1:] if label not in worse]
    text += f"; it is better than {names(worse)} by the critical difference of {number(order.difference)} or more"
    return f"{text}, and cannot be told apart from {names(alike)}." if alike else f"{text}."


def loss(setting: Setting, board: Leaderboard) -> Figure | None:
    """Test loss over rounds."""
    series = _bands(setting, _losses)
    if not series:
        return None
    views = [{"name": "Rounds", "x": {"label": "round", "format": "integer"}, "series": series}]
    spec = {"kind": "lines", "views": views, "y": {"label": "test loss"}}
    return Figure("loss", "Test loss", board.so_far + "Lines are means over seeds." + _seeds(setting), spec)


def _losses(run: RunCurve) -> tuple[FloatArray, FloatArray]:
    rounds, values = run.evaluations("loss")
    return rounds.astype(float), values


def balance(setting: Setting) -> Figure | None:
    """Class imbalance of the cohort's pooled labels per round."""
    # The imbalance of single cohorts jumps; a 25th of the run is about what the eye would smooth.
    window = max(1, setting.rounds // 25)
    series, means = [], []
    for group in setting.groups:
        curves = [
            (x.astype(float), trailing_mean(y, window)) for x, y in (run.evaluations("qcid") for run in group.runs)
        ]
        band = seed_band(curves, False)
        if band is not None:
            if "lo" in band:  # an imbalance is never negative, but the mean minus the deviation may be
                band["lo"] = [None if v is None else max(0.0, v) for v in band["lo"]]
            series.append(_series(group, band))
            known = np.concatenate([run.evaluations("qcid")[1] for run in group.runs])
            means.append(f"{group.label} {number(float(known.mean()))}")
    if not series:
        return None
    sentence = f"Mean class imbalance (QCID) of a cohort: {names(means)}; 0 is perfectly balanced."
    if window > 1:
        sentence += f" Lines are trailing means over {window} rounds."
    views = [{"name": "Rounds", "x": {"label": "round", "format": "integer"}, "series": series}]
    spec = {"kind": "lines", "views": views, "y": {"label": "class imbalance of the cohort (QCID)", "min": 0}}
    return Figure("balance", "Class balance of the cohorts", sentence, spec)


def picks(setting: Setting) -> Figure | None:
    """Heat map of picks, clients by rounds, one view per selector."""
    n, rounds = setting.n_clients, setting.rounds
    if n == 0:
        return None
    x_step, y_step = -(-rounds // HEAT_COLUMNS), -(-n // HEAT_ROWS)
    cols, rows = -(-rounds // x_step), -(-n // y_step)
    views: list[dict[str, Any]] = []
    for group in setting.groups:
        # A picture of several seeds at once would average clients that have nothing in common but their number.
        run = group.runs[0]  # each seed has its own clients, so seeds are not averaged here
        grid = np.zeros((rows, cols))
        np.add.at(grid, (run.pick_client // y_step, run.pick_round // x_step), 1.0 / (x_step * y_step))
        cells, top = _pack_matrix(grid)
        views.append(
            {
                "name": group.label,
                "rows": rows,
                "cols": cols,
                "cells": cells,
                "max": top,
                "x0": 0,
                "xstep": x_step,
                "ystep": y_step,
                "x": {"label": "round", "format": "integer"},
                **({"names": list(setting.names)} if setting.names is not None and y_step == 1 else {}),
            }
        )
    sentence = "A horizontal streak is a client that is picked again and again."
    if any(len(group.runs) > 1 for group in setting.groups):
        sentence += " The first seed is shown; each has its own clients."
    return Figure(
        "picks",
        "Who was picked, round by round",
        sentence,
        {
            "kind": "heat",
            "views": views,
            "y": {"label": "client", "item": "client", "format": "integer"},
            "value": {"label": "share of rounds picked", "format": "percent"},
        },
    )


def participation(setting: Setting) -> Figure | None:
    """How often clients were picked, most often first."""
    n = setting.n_clients
    if n == 0:
        return None
    series, spread = [], []
    index = _thin(n)
    for group in setting.groups:
        per_seed = [np.sort(np.bincount(run.pick_client, minlength=n)[:n])[::-1] for run in group.runs]
        mean = np.mean(per_seed, axis=0)
        series.append(_series(group, {"x": (index + 1).tolist(), "y": json_numbers(mean[index])}))
        evenness = float(np.mean([gini(counts.astype(float)) for counts in per_seed]))
        spread += [] if math.isnan(evenness) else [f"{group.label} {evenness:.2f}"]
    if not spread:
        return None
    sentence = (
        f"A flat line means that the work is shared evenly. Gini coefficient: {names(spread)}; 0 is perfectly even."
    )
    views = [
        {"name": "Clients", "x": {"label": "clients, most often picked first", "format": "integer"}, "series": series}
    ]
    spec = {"kind": "lines", "views": views, "y": {"label": "times picked", "min": 0}}
    return Figure("participation", "How often each client was picked", sentence, spec)


def scenario(setting: Setting) -> Figure | None:
    """The federation: samples by class and client."""
    facts = setting.federation()
    if facts is None:
        return None
    counts = np.asarray(facts.label_counts, np.float64)
    if not counts.shape[1]:  # the task has no classes
        return None
    # Clients are sorted by main class, the most one-sided first, so that skew shows as blocks.
    order = np.lexsort((-counts.max(axis=1), counts.argmax(axis=1)))
    if len(order) > 1000:
        order = order[np.linspace(0, len(order) - 1, 1000).astype(int)]
    cells, top = _pack_matrix(np.ascontiguousarray(counts[order].T))
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    present = (counts > 0).sum(axis=1)
    sentence = f"{quantity(len(counts), 'client')}, {quantity(counts.shape[1], 'class', 'classes')}. "
    sentence += _holdings(present, share.max(axis=1), facts.sizes)
    if float(facts.noise_rate.max(initial=0)) > 0:
        sentence += f" On average {percent(float(facts.noise_rate.mean()), 0)} of a client's labels are wrong."
    if len(setting.federations) > 1:
        sentence += f" The figure shows one of {len(setting.federations)} federations; each seed has its own."
    view = {
        "name": "scenario",
        "rows": counts.shape[1],
        "cols": len(order),
        "cells": cells,
        "max": top,
        "x0": 0,
        "xstep": 1,
        "names": [f"class {c}" for c in range(counts.shape[1])],
        "xnames": [str(int(c)) for c in order],
        "x": {"label": "clients, sorted by main class", "format": "integer"},
        "xitem": "client",
    }
    spec = {
        "kind": "heat",
        "views": [view],
        "y": {"label": "", "item": "class"},
        "value": {"label": "samples", "format": "integer"},
    }
    return Figure("scenario", "The federation: classes by client", sentence, spec)


def _holdings(classes: IntArray, largest: FloatArray, sizes: FloatArray) -> str:
    """Say how many samples and classes clients hold, and how large the share of their main class is."""
    least, most, few, many = (float(value) for value in (sizes.min(), sizes.max(), classes.min(), classes.max()))
    if few == many == 1 and least == most:
        return f"Every client holds {quantity(most, 'sample')} of a single class."
    amount = number(most) if least == most else f"{number(least)} to {number(most)}"
    kinds = number(many) if few == many else f"{number(few)} to {number(many)}"
    text = f"A client holds {amount} {'sample' if most == 1 else 'samples'}"
    if many == 1:
        return f"{text} of a single class."
    main = percent(float(np.median(largest)), 0)
    return f"{text} of {kinds} classes; for half of the clients, one class makes up {main} or more."


def cost(setting: Setting, board: Leaderboard) -> Figure | None:
    """Simulated seconds, client compute and bytes, split into training and queries."""
    kinds: list[tuple[str, str, str, Callable[[RunCurve], tuple[float, float]]]] = [
        ("Simulated time", "seconds", "simulated time", _seconds_split),
        ("Client compute", "seconds", "compute time summed over clients", _compute_split),
        ("Bytes", "bytes", "bytes sent and received", _bytes_split),
    ]
    views: list[dict[str, Any]] = []
    for name, unit, label, split in kinds:
        rows = []
        for group in setting.groups:
            parts = np.mean([split(run) for run in group.runs], axis=0)
            rows.append({"label": group.label, "color": group.color, "parts": json_numbers(parts)})
        views.append({"name": name, "x": {"label": label, "format": unit}, "rows": rows})
    spending = _question_sentence(views[2]["rows"]) + _duration_sentence(setting, views[0]["rows"])
    # Without latency there are no seconds, and an empty chart would look as if everything were free.
    views = [view for view in views if any(sum(row["parts"]) > 0 for row in view["rows"])]
    if not views:
        return None
    spec = {"kind": "bars", "views": views, "parts": ["training", "queries"]}
    return Figure("cost", "Cost: training and queries", board.so_far + spending, spec)


def _question_sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say how much each selector spends on queries, in bytes and as a share of its bytes."""
    asked = [
        f"{row['label']} {megabytes(row['parts'][1] / 1e6)} MB ({percent(row['parts'][1] / sum(row['parts']))})"
        for row in rows
        if row["parts"][1] > 0
    ]
    if not asked:
        return "No selector asked clients anything before choosing, so every byte went into training."
    return f"Queries before choosing, and their share of the traffic: {names(asked)}."


def _duration_sentence(setting: Setting, rows: Sequence[Mapping[str, Any]]) -> str:
    """Say how long a round takes with each selector."""
    rounds = {group.label: float(np.mean([len(run.round) for run in group.runs])) for group in setting.groups}
    spent = [
        f"{row['label']} {duration(sum(row['parts']) / rounds[row['label']])}" for row in rows if sum(row["parts"])
    ]
    return f" A round takes: {names(spent)}." if spent else ""


def _total(run: RunCurve, *columns: str) -> float:
    return float(sum(np.nansum(run.values[name]) for name in columns))


def _seconds_split(run: RunCurve) -> tuple[float, float]:
    queries = _total(run, "query_seconds")
    return _total(run, "seconds") - queries, queries


def _compute_split(run: RunCurve) -> tuple[float, float]:
    return _total(run, "client_seconds"), _total(run, "query_client_seconds")


def _bytes_split(run: RunCurve) -> tuple[float, float]:
    return _total(run, "bytes_down", "bytes_up"), _total(run, "query_bytes_down", "query_bytes_up")


def general_figures(setting: Setting, board: Leaderboard, all_boards: Sequence[Leaderboard] = ()) -> list[Figure]:
    """Return the figures that every setting has, in reading order, without those that have no data.

    ``all_boards`` are the leaderboards of all settings, for sentences about all of them.
    """
    figures = [
        accuracy(setting, board),
        ranks(setting, board, all_boards),
        loss(setting, board),
        balance(setting),
        picks(setting),
        participation(setting),
        cost(setting, board),
        scenario(setting),
    ]
    return [figure for figure in figures if figure is not None]
