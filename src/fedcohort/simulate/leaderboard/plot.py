"""The figure of a paper: curves with intervals, time to the target, the worst group, and who takes part."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcohort.core.arrays import AnyArray, IntArray
from fedcohort.core.errors import needs_extra
from fedcohort.simulate.leaderboard.numbers import RunNumbers
from fedcohort.simulate.leaderboard.significance import half_interval
from fedcohort.simulate.leaderboard.table import Leaderboard

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(board: Leaderboard, runs: Sequence[RunNumbers], picks: Mapping[str, Sequence[IntArray]]) -> Figure:
    """Return a figure of one setting.

    Parameters
    ----------
    runs : sequence of RunNumbers
        All runs of the setting.
    picks : mapping of label to arrays (N,)
        For each run of a selector, how often each client was picked.
    """
    with needs_extra("Plots need matplotlib.", "notebook"):
        from matplotlib.figure import Figure
    metric = board.metric
    figure = Figure(figsize=(8, 6), layout="constrained")
    (curves, arrivals), (worst, turns) = figure.subplots(2, 2)
    for place, row in enumerate(board.rows):
        style: dict[str, Any] = {"color": f"C{place % 10}"}
        ours = [run for run in runs if run.label == row.label]
        for axes, column in ((curves, "accuracy"), (worst, "worst_group")):
            rounds, values = _at_common_rounds(ours, column)
            if len(rounds):
                middle = metric.natural(values.mean(axis=0))
                half = np.array([half_interval(values[:, i]) for i in range(len(rounds))])
                axes.plot(rounds + 1, middle, label=row.label, **style)
                axes.fill_between(rounds + 1, middle - half, middle + half, alpha=0.2, linewidth=0, **style)
        reached = [seed.seconds_to[-1] if board.timed else seed.rounds_to[-1] for seed in row.seeds]
        known = [float(arrival) for arrival in reached if arrival is not None]
        arrivals.plot(known, [place] * len(known), "o", alpha=0.5, **style)
        item = row.main.seconds if board.timed else row.main.rounds
        if math.isfinite(item.median):
            arrivals.plot([item.median], [place], "|", markersize=18, markeredgewidth=3, **style)
        counts = [np.sort(run)[::-1] for run in picks.get(row.label, ())]
        if counts:
            turns.plot(np.arange(1, len(counts[0]) + 1), np.mean(counts, axis=0), **style)
    # Runs that never arrive have no dot, so the label says how many do.
    names = [f"{row.label} ({row.main.rounds.count} of {row.runs})" for row in board.rows]
    arrivals.set_yticks(range(len(names)), names)
    arrivals.set_ylim(len(names) - 0.5, -0.5)  # the first on top, as in the table
    unit = "seconds" if board.timed else "rounds"
    curves.set(xlabel="round", ylabel=f"test {metric.name}")
    arrivals.set(xlabel=f"{unit} to {metric.level(board.target)}; bar: median")
    if not any(row.main.rounds.count for row in board.rows):
        arrivals.text(0.5, 0.5, "no run arrives", transform=arrivals.transAxes, ha="center")
        arrivals.set_xticks([])
    worst.set(xlabel="round", ylabel="accuracy of the worst group")
    turns.set(xlabel="clients, most often picked first", ylabel="times picked")
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        if axes is not arrivals and not axes.has_data():
            axes.remove()
    figure.legend(*curves.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    return figure


def _at_common_rounds(runs: Sequence[RunNumbers], column: str) -> tuple[IntArray, AnyArray]:
    """Return the rounds in which a column is known for all runs, and its values (runs, rounds) there."""
    known = [np.isfinite(run.values[column]) for run in runs]
    each = [run.round[there] for run, there in zip(runs, known, strict=True)]
    # A mean over other runs in every round would jump where a run ends.
    rounds = functools.reduce(np.intersect1d, each) if each else np.zeros(0, np.int64)
    values = [run.values[column][there & np.isin(run.round, rounds)] for run, there in zip(runs, known, strict=True)]
    return rounds, np.array(values)
