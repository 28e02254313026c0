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

from fedcohort.core.arrays import AnyArray, FloatArray
from fedcohort.report.data import RunCurve, Setting
from fedcohort.report.figure import Figure
from fedcohort.report.tables import gini
from fedcohort.simulate.leaderboard import Leaderboard, ranking
from fedcohort.simulate.leaderboard.significance import LEVEL
from fedcohort.simulate.leaderboard.table import megabytes
from fedcohort.simulate.leaderboard.words import duration, names, number, percent, quantity

POINTS = 400  # of a curve, at most
HEAT_COLUMNS = 250
HEAT_ROWS = 250
ROUNDS = {"label": "round", "format": "integer"}


# -- helpers --------------------------------------------------------------------------------------------------------


def json_numbers(values: AnyArray, digits: int = 5) -> list[float | None]:
    """Return numbers for JSON: rounded to ``digits`` significant digits, None if not finite."""
    return [float(f"{v:.{digits}g}") if math.isfinite(v) else None for v in np.asarray(values, np.float64)]


def lines(name: str, title: str, sentence: str, views: Sequence[Any], y: Mapping[str, Any], **more: Any) -> Figure:
    """Return a figure of lines, with the y axis that its views share."""
    return Figure(name, title, sentence, {"kind": "lines", "views": views, "y": y, **more})


def _pack_matrix(values: FloatArray) -> tuple[str, float]:
    """Return a matrix as base64 bytes scaled to 0..255, and the value of 255."""
    top = float(values.max(initial=0.0))
    # Rounded up, so that a client picked once in thousands of rounds does not look as if it was never picked.
    scaled = np.zeros(values.shape, np.uint8) if top <= 0 else np.ceil(values * (255 / top) - 1e-9).astype(np.uint8)
    return base64.b64encode(scaled.tobytes()).decode(), top or 1.0


def thinned(count: int) -> AnyArray:
    """Return the places of at most ``POINTS`` of so many points, evenly spaced."""
    # A chart has fewer pixels than a run may have rounds, and the page must stay small enough to send.
    return np.unique(np.linspace(0, count - 1, min(count, POINTS)).round().astype(int))


def seed_band(curves: Sequence[tuple[FloatArray, FloatArray]], stepwise: bool) -> dict[str, list[float | None]] | None:
    """Return the mean and the mean +- standard deviation of several (x, y) curves, on a common grid.

    The grid ends where the shortest curve ends, so the mean is always over the same seeds. With ``stepwise``, the grid
    is even and a curve keeps its last value between points; otherwise only points that all curves share are used.
    """
    curves = [(x, y) for x, y in curves if len(x)]
    if not curves:
        return None
    if stepwise:
        start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
        # A curve may begin after another has ended; one point is then all they share.
        grid = np.linspace(min(start, end), end, POINTS) if end > start else np.array([end])
        rows = np.array([y[np.maximum(np.searchsorted(x, grid, side="right") - 1, 0)] for x, y in curves])
    else:
        # Seeds that stopped early, or were extended, are evaluated in other rounds.
        common = functools.reduce(np.intersect1d, [x for x, _ in curves])
        if not len(common):
            return None
        grid = common[thinned(len(common))]
        rows = np.array([y[np.searchsorted(x, grid)] for x, y in curves])
    mean = rows.mean(axis=0)
    band = {"x": json_numbers(grid, 6), "y": json_numbers(mean)}
    if len(rows) > 1:
        std = rows.std(axis=0, ddof=1)
        band |= {"lo": json_numbers(mean - std), "hi": json_numbers(mean + std)}
    return band


def _bands(
    setting: Setting, curve: Callable[[RunCurve], tuple[FloatArray, FloatArray]], stepwise: bool = False
) -> list[dict[str, Any]]:
    """Return the series of each selector, with its band over seeds."""
    bands = [(group, seed_band([curve(run) for run in group.runs], stepwise)) for group in setting.groups]
    return [{"label": g.label, "color": g.color, "dash": g.dash, **band} for g, band in bands if band is not None]


def trailing_mean(values: FloatArray, window: int) -> FloatArray:
    """Return the trailing mean over ``window`` entries, shorter at the beginning."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


# -- figures --------------------------------------------------------------------------------------------------------


def accuracy(setting: Setting, board: Leaderboard) -> Figure | None:
    """Accuracy, or the task's metric, over rounds, simulated seconds and bytes."""
    metric = board.metric
    axes: list[tuple[str, dict[str, str], Callable[[RunCurve], FloatArray], bool]] = [
        ("Rounds", ROUNDS, lambda run: run.round.astype(float), False),
        ("Simulated time", {"label": "simulated time", "format": "seconds"}, lambda run: run.values["clock"], True),
        ("Bytes", {"label": "bytes sent and received", "format": "bytes"}, lambda run: run.total_bytes, True),
    ]

    def evaluated(run: RunCurve, x_of: Callable[[RunCurve], FloatArray]) -> tuple[FloatArray, FloatArray]:
        x, y = x_of(run), run.values["accuracy"]
        known = np.isfinite(x) & np.isfinite(y)
        return x[known], metric.natural(y[known])

    views = []
    for name, axis, x_of, stepwise in axes:
        series = _bands(setting, functools.partial(evaluated, x_of=x_of), stepwise)
        longest = max((s["x"][-1] or 0.0 for s in series), default=0.0)
        if series and (longest > 0 or name == "Rounds"):  # without latency, there is no simulated time
            views.append({"name": name, "x": axis, "series": series})
    if not views:
        return None
    level, marks = metric.level(board.target), []
    reached = [(row.label, row.main.rounds.count, row.runs) for row in board.rows]
    if math.isnan(board.target):
        text = f"No selector has a terminal {metric.name}{'' if board.finished else ' yet'}."
    else:
        marks = [{"y": metric.natural(board.target), "label": f"target {level}"}]
        if all(count == runs for _, count, runs in reached):
            text = f"{board.so_far}Every run reaches {level}."
        elif not any(count for _, count, _ in reached):
            text = f"{board.so_far}No run reaches {level}."
        else:  # the conclusion says what that means
            each = names([f"{label} {count} of {runs}" for label, count, runs in reached])
            text = f"{board.so_far}Runs that reach {level}: {each}."
    y = {"label": f"test {metric.name}", **({"format": "percent", "max": 1} if metric.share else {})}
    key = "accuracy" if metric.is_accuracy else "metric"
    return lines(key, f"Test {metric.name}", text + _seeds(setting), views, y, marks=marks)


def _seeds(setting: Setting) -> str:
    counts = sorted({len(group.runs) for group in setting.groups})
    if counts == [1]:
        return " One seed, so no band is shown."
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f" Bands show one standard deviation over {seeds} seeds."


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
        blocks = quantity(order.blocks, order.over) + (
            f" in {name.lower()}" if several and order.over == "seed" else ""
        )
        p = "p < 0.001" if order.friedman < 0.001 else f"p = {order.friedman:.3f}"
        if order.friedman >= LEVEL:
            sentences.append(f"Over {blocks}, the selectors cannot be told apart (Friedman, {p}).")
            continue
        best, *others = order.labels
        worse = [label for label in others if order.differ(best, label)]
        alike = [label for label in others if label not in worse]
        text = f"{best} has the best mean rank over {blocks} ({number(order.ranks[0])} of {len(order.labels)}; "
        text += f"Friedman, {p})"
        if not worse:
            text += f", but no other differs from it by the critical difference of {number(order.difference)}"
        else:
            text += (
                f"; it is better than {names(worse)} by the critical difference of {number(order.difference)} or more"
            )
            text += f", and cannot be told apart from {names(alike)}" if alike else ""
        sentences.append(f"{text}.")
    if not views:
        return None
    about = (
        f" Ranks are by terminal {board.metric.name}; a bar joins selectors that cannot be told apart (Friedman, then "
        "Nemenyi at 5%), which also depends on the others. Ranks ask who wins more often, the leaderboard by how "
        f"much: cite the leaderboard for a comparison with {board.baseline}, and this figure for a comparison of all."
    )
    spec = {"kind": "ranks", "views": views, "y": {"label": ""}}
    return Figure("ranks", "All against all", board.so_far + " ".join(sentences) + about, spec)


def loss(setting: Setting, board: Leaderboard) -> Figure | None:
    """Test loss over rounds."""
    series = _bands(setting, lambda run: run.evaluations("loss"))
    views = [{"name": "Rounds", "x": ROUNDS, "series": series}]
    text = board.so_far + "Lines are means over seeds." + _seeds(setting)
    return lines("loss", "Test loss", text, views, {"label": "test loss"}) if series else None


def balance(setting: Setting) -> Figure | None:
    """Class imbalance of the cohort's pooled labels per round."""
    # The imbalance of single cohorts jumps; a 25th of the run is about what the eye would smooth.
    window = max(1, setting.rounds // 25)

    def smooth(run: RunCurve) -> tuple[FloatArray, FloatArray]:
        x, y = run.evaluations("qcid")
        return x, trailing_mean(y, window)

    series = _bands(setting, smooth)
    if not series:
        return None
    for band in series:
        if "lo" in band:  # an imbalance is never negative, but the mean minus the deviation may be
            band["lo"] = [None if v is None else max(0.0, v) for v in band["lo"]]
    means = []
    for group in setting.groups:
        known = np.concatenate([run.evaluations("qcid")[1] for run in group.runs])
        means += [f"{group.label} {number(float(known.mean()))}"] if len(known) else []
    sentence = f"Mean class imbalance (QCID) of a cohort: {names(means)}; 0 is perfectly balanced."
    if window > 1:
        sentence += f" Lines are trailing means over {window} rounds."
    views = [{"name": "Rounds", "x": ROUNDS, "series": series}]
    y = {"label": "class imbalance of the cohort (QCID)", "min": 0}
    return lines("balance", "Class balance of the cohorts", sentence, views, y)


def picks(setting: Setting) -> Figure | None:
    """Heat map of picks, clients by rounds, one view per selector."""
    n, rounds = setting.n_clients, setting.rounds
    if n == 0:
        return None
    x_step, y_step = -(-rounds // HEAT_COLUMNS), -(-n // HEAT_ROWS)
    cols, rows = -(-rounds // x_step), -(-n // y_step)
    shape: dict[str, Any] = {"rows": rows, "cols": cols, "x0": 0, "xstep": x_step, "ystep": y_step, "x": ROUNDS}
    if setting.names is not None and y_step == 1:
        shape["names"] = list(setting.names)
    views: list[dict[str, Any]] = []
    for group in setting.groups:
        # A picture of several seeds at once would average clients that have nothing in common but their number.
        run = group.runs[0]
        grid = np.zeros((rows, cols))
        np.add.at(grid, (run.pick_client // y_step, run.pick_round // x_step), 1.0 / (x_step * y_step))
        cells, top = _pack_matrix(grid)
        views.append({"name": group.label, "cells": cells, "max": top, **shape})
    sentence = "A horizontal streak is a client that is picked again and again."
    if any(len(group.runs) > 1 for group in setting.groups):
        sentence += " The first seed is shown; each has its own clients."
    y = {"label": "client", "item": "client", "format": "integer"}
    value = {"label": "share of rounds picked", "format": "percent"}
    spec = {"kind": "heat", "views": views, "y": y, "value": value}
    return Figure("picks", "Who was picked, round by round", sentence, spec)


def participation(setting: Setting) -> Figure | None:
    """How often clients were picked, most often first."""
    n = setting.n_clients
    if n == 0:
        return None
    series, spread = [], []
    index = thinned(n)
    for group in setting.groups:
        per_seed = [np.sort(np.bincount(run.pick_client, minlength=n)[:n])[::-1] for run in group.runs]
        y = json_numbers(np.mean(per_seed, axis=0)[index])
        style = {"label": group.label, "color": group.color, "dash": group.dash}
        series.append({**style, "x": (index + 1).tolist(), "y": y})
        evenness = float(np.mean([gini(counts.astype(float)) for counts in per_seed]))
        # A run without a journal has no picks, and so no coefficient.
        spread += [] if math.isnan(evenness) else [f"{group.label} {evenness:.2f}"]
    if not spread:
        return None
    text = f"A flat line means that the work is shared evenly. Gini coefficient: {names(spread)}; 0 is perfectly even."
    x = {"label": "clients, most often picked first", "format": "integer"}
    views = [{"name": "Clients", "x": x, "series": series}]
    return lines("participation", "How often each client was picked", text, views, {"label": "times picked", "min": 0})


def scenario(setting: Setting) -> Figure | None:
    """The federation: samples by class and client."""
    facts = setting.federation()
    if facts is None:
        return None
    counts = np.asarray(facts.label_counts, np.float64)
    classes = counts.shape[1]
    if not classes:  # the task has no classes
        return None
    # Clients are sorted by main class, the most one-sided first, so that skew shows as blocks.
    order = np.lexsort((-counts.max(axis=1), counts.argmax(axis=1)))
    if len(order) > 1000:
        # More columns than pixels would be averaged by the browser, and the page grows with them.
        order = order[np.linspace(0, len(order) - 1, 1000).astype(int)]
    cells, top = _pack_matrix(np.ascontiguousarray(counts[order].T))

    # How many samples and classes clients hold, and how large the share of their main class is.
    present, share = (counts > 0).sum(axis=1), counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    least, most, few, many = (float(v) for v in (facts.sizes.min(), facts.sizes.max(), present.min(), present.max()))
    amount = number(most) if least == most else f"{number(least)} to {number(most)}"
    text = f"{quantity(len(counts), 'client')}, {quantity(classes, 'class', 'classes')}. "
    if few == many == 1 and least == most:
        text += f"Every client holds {quantity(most, 'sample')} of a single class."
    else:
        text += f"A client holds {amount} {'sample' if most == 1 else 'samples'} of "
        kinds = number(many) if few == many else f"{number(few)} to {number(many)}"
        main = percent(float(np.median(share.max(axis=1))), 0)
        half = f"{kinds} classes; for half of the clients, one class makes up {main} or more."
        text += "a single class." if many == 1 else half
    if float(facts.noise_rate.max(initial=0)) > 0:
        text += f" On average {percent(float(facts.noise_rate.mean()), 0)} of a client's labels are wrong."
    if len(setting.federations) > 1:
        text += f" The figure shows one of {len(setting.federations)} federations; each seed has its own."
    view = {
        "name": "scenario",
        "rows": classes,
        "cols": len(order),
        "cells": cells,
        "max": top,
        "x0": 0,
        "xstep": 1,
        "names": [f"class {c}" for c in range(classes)],
        "xnames": [str(int(c)) for c in order],
        "x": {"label": "clients, sorted by main class", "format": "integer"},
        "xitem": "client",
    }
    axes = {"y": {"label": "", "item": "class"}, "value": {"label": "samples", "format": "integer"}}
    return Figure("scenario", "The federation: classes by client", text, {"kind": "heat", "views": [view], **axes})


def cost(setting: Setting, board: Leaderboard) -> Figure | None:
    """Simulated seconds, client compute and bytes, split into training and queries."""

    def total(run: RunCurve, *columns: str) -> float:
        return float(sum(np.nansum(run.values[name]) for name in columns))

    def split(run: RunCurve) -> list[list[float]]:
        queries = total(run, "query_seconds")
        sent = [total(run, f"{before}bytes_down", f"{before}bytes_up") for before in ("", "query_")]
        return [
            [total(run, "seconds") - queries, queries],
            [total(run, "client_seconds"), total(run, "query_client_seconds")],
            sent,
        ]

    kinds = (
        ("Simulated time", "seconds", "simulated time"),
        ("Client compute", "seconds", "compute time summed over clients"),
        ("Bytes", "bytes", "bytes sent and received"),
    )
    spent = {group.label: np.mean([split(run) for run in group.runs], axis=0) for group in setting.groups}
    colors = setting.line_styles
    views = [
        {
            "name": name,
            "x": {"label": label, "format": unit},
            "rows": [{"label": k, "color": colors[k][0], "parts": json_numbers(v[i])} for k, v in spent.items()],
        }
        for i, (name, unit, label) in enumerate(kinds)
        # Without latency there are no seconds, and an empty chart would look as if everything were free.
        if any(parts[i].sum() > 0 for parts in spent.values())
    ]
    if not views:
        return None
    asked = [
        f"{label} {megabytes(queries / 1e6)} MB ({percent(queries / (training + queries))})"
        for label, (_, _, (training, queries)) in spent.items()
        if queries > 0
    ]
    text = (
        f"Queries before choosing, and their share of the traffic: {names(asked)}."
        if asked
        else "No selector asked clients anything before choosing, so every byte went into training."
    )
    rounds = {group.label: float(np.mean([len(run.round) for run in group.runs])) for group in setting.groups}
    lasts = [f"{label} {duration(v[0].sum() / rounds[label])}" for label, v in spent.items() if v[0].sum()]
    text += f" A round takes: {names(lasts)}." if lasts else ""
    spec = {"kind": "bars", "views": views, "parts": ["training", "queries"]}
    return Figure("cost", "Cost: training and queries", board.so_far + text, spec)


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
