"""The page of the suite ``time``: a picture of the hours to the target, then all numbers. One file, no scripts."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import fedcohort
from fedcohort.report.render import render
from fedcohort.simulate.leaderboard.formats import Cell, Table, to_markdown
from fedcohort.simulate.leaderboard.rows import Arrivals
from fedcohort_bench.benchmark.page import PURPOSES, with_interval
from fedcohort_bench.benchmark.timed import ROUNDS, WAYS
from fedcohort_bench.benchmark.timed_scores import UNIFORM, TimeScores

_ARRIVALS = "Hours: median over seeds; a run that does not reach the target within the day counts as never."
_COLOURS = ("#8c959f", "#1f6feb", "#8250df")
_FIRST = ("uniform", "balanced", "fedcbs")  # drawn if they were run: the baseline, our default, its nearest rival


def page(scores: TimeScores, origin: str = "") -> str:
    """Return the page as HTML; ``origin`` names the version and the date, by default this version and today."""
    return render(
        "benchmark_time.html",
        package="fedcohort_bench",
        scores=scores,
        purpose=PURPOSES[scores.purpose],
        origin=origin or f"fedcohort {fedcohort.__version__}, {time.strftime('%Y-%m-%d')}",
        ways=WAYS,
        picture=draw(scores),
        tables=[ways(scores), selection(scores), *(_all_cells(scores, regime) for regime in scores.targets)],
    )


def ways(scores: TimeScores) -> Table:
    """Return how fast and how fair each way is with uniform selection."""
    rows = []
    for regime, target in scores.targets.items():
        for way in WAYS:
            cell = scores.find(regime, way, UNIFORM)
            faster = scores.faster(way, UNIFORM, than=(ROUNDS, UNIFORM), regimes=[regime])
            if cell is None or faster is None:
                continue
            rows.append(
                (
                    Cell(f"{regime}, {target:.0%}" if way == ROUNDS else ""),
                    Cell(way),
                    cell.median,
                    Cell("1") if way == ROUNDS else Cell(str(faster), faster.interval),
                    Cell(f"{cell.reached.mean():.0%}"),
                    with_interval(100 * cell.accuracy, "{:.1f}"),
                    with_interval(100 * cell.worst_group, "{:.1f}"),
                    Cell(f"{cell.jain.mean():.2f}"),
                )
            )
    head = ("availability, target", "way", "hours", "times as fast", "reached", "accuracy", "worst group", "Jain")
    return Table(
        "ways",
        "Uniform selection: simulated hours to the target, and who pays",
        head,
        tuple(rows),
        note=_ARRIVALS + (f" ± and brackets: 95% over {len(scores.seeds)} seeds." if len(scores.seeds) > 1 else ""),
        wrap=frozenset({1}),
    )


def selection(scores: TimeScores) -> Table:
    """Return how much faster each selector is than uniform selection in the same way."""
    rows = []
    for label in scores.labels:
        if label == UNIFORM:
            continue
        cells = [Cell(label)]
        for way in WAYS:
            faster = scores.faster(way, label, than=(way, UNIFORM))
            gain = scores.worst_group_gain(way, label)
            cells.append(Cell("–") if faster is None else Cell(str(faster), faster.interval))
            cells.append(Cell("–") if gain is None else Cell(f"{100 * gain:+.1f}"))
        first = scores.faster(ROUNDS, label, than=(ROUNDS, UNIFORM))
        rows.append(((0.0, 0.0) if first is None else (first.least, first.greatest), cells))
    rows.sort(key=lambda row: row[0], reverse=True)
    head = ["selector"]
    for way in WAYS:
        head += [way, "group"]
    return Table(
        "selection",
        "Selectors against uniform selection in the same way: times as fast, and points of the worst group",
        tuple(head),
        tuple(tuple(cells) for _, cells in rows),
        note="Means over all kinds of availability; geometric means for speeds, paired by seed, ≤ and ≥ where runs "
        "never reach the target. –: not run in this way, or nothing is known; most selectors cannot choose one client "
        "at a time.",
    )


def markdown(scores: TimeScores) -> str:
    """Return both tables as Markdown."""
    return "\n\n".join(map(to_markdown, (ways(scores), selection(scores)))) + "\n"


def _all_cells(scores: TimeScores, regime: str) -> Table:
    """Return all selectors in all ways under one kind of availability, fastest first."""
    cells = sorted((cell for cell in scores.cells if cell.regime == regime), key=lambda cell: cell.hours.mean())
    rows = tuple(
        (
            Cell(cell.label),
            Cell(cell.way),
            cell.median,
            Cell(f"{cell.reached.mean():.0%}"),
            with_interval(100 * cell.accuracy, "{:.1f}"),
            with_interval(100 * cell.worst_group, "{:.1f}"),
            Cell(f"{cell.jain.mean():.2f}"),
        )
        for cell in cells
    )
    head = ("selector", "way", "hours", "reached", "accuracy", "worst group", "Jain")
    title = f"{regime}: simulated hours to {scores.targets[regime]:.0%}, and how the day ends"
    return Table(regime, title, head, rows, note=_ARRIVALS)


def draw(scores: TimeScores) -> str:
    """Return hours to the target by availability, way and up to three selectors as SVG."""
    labels = [label for label in _FIRST if label in scores.labels]
    labels += [label for label in scores.labels if label not in labels]
    shown = dict(zip(labels, _COLOURS, strict=False))
    bars: dict[tuple[str, str, str], dict[str, Any] | None] = {}
    for key in itertools.product(scores.targets, WAYS, shown):
        cell = scores.find(*key)
        if cell is None:
            bars[key] = None
            continue
        hours = [arrival for arrival, _ in cell.journeys]
        arrivals = sorted(arrival for arrival in hours if arrival is not None)
        middle = Arrivals.of(hours).median
        never = not math.isfinite(middle)
        note = cell.median.text if len(arrivals) == len(hours) else f"{len(arrivals)} of {len(hours)} arrive"
        bars[key] = {"end": 24.0 if never else middle, "pale": never, "arrivals": arrivals, "note": note}
    values = {"regimes": scores.targets, "ways": WAYS, "shown": shown, "bars": bars}
    return render("hours.svg", package="fedcohort_bench", scores=scores, **values) + "\n"
