"""The page of the suite ``time``: a picture of the hours to the target, then all numbers. One file, no scripts."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import fedcohort
from fedcohort.report.render import render
from fedcohort.simulate.leaderboard.formats import Cell, Table
from fedcohort.simulate.leaderboard.rows import Arrivals
from fedcohort_bench.benchmark.page import PURPOSES
from fedcohort_bench.benchmark.timed import WAYS
from fedcohort_bench.benchmark.timed_scores import ARRIVALS, TimeCell, TimeScores, selection, ways, with_interval

_COLOURS = ("#8c959f", "#1f6feb", "#8250df")
_FIRST = ("uniform", "balanced", "fedcbs")  # drawn if they were run: the baseline, our default, its nearest rival
_LEFT, _WIDTH, _BAR, _GAP, _TOP = 150, 560, 11, 10, 64
_DAY = 24.0


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
        tables=[ways(scores), selection(scores), *(every(scores, regime) for regime in scores.targets)],
    )


def every(scores: TimeScores, regime: str) -> Table:
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
    return Table(regime, title, head, rows, note=ARRIVALS)


def draw(scores: TimeScores) -> str:
    """Return hours to the target by availability, way and up to three selectors as SVG."""
    labels = [label for label in _FIRST if label in scores.labels]
    labels += [label for label in scores.labels if label not in labels]
    shown = dict(zip(labels, _COLOURS, strict=False))
    parts: list[str] = []
    y = _TOP
    for regime, target in scores.targets.items():
        parts.append(f'<text x="16" y="{y + 4}" font-weight="600">{regime}, target {target:.0%}</text>')
        y += 14
        for way in WAYS:
            parts.append(f'<text x="16" y="{y + 7 + 5 * len(shown)}">{way}</text>')
            for label, colour in shown.items():
                cell = scores.find(regime, way, label)
                if cell is not None:
                    parts += _bar(cell, y, colour)
                y += _BAR + 1
            y += _GAP
        y += 12
    width, height = _LEFT + _WIDTH + 80, y + 26
    axis = [
        f'<line x1="{_x(h)}" x2="{_x(h)}" y1="{_TOP - 6}" y2="{y - 8}" stroke="#d0d7de"/>'
        f'<text x="{_x(h)}" y="{y + 8}" text-anchor="middle">{h:g} h</text>'
        for h in (0.0, 6.0, 12.0, 18.0, 24.0)
    ]
    title = f"Simulated hours to the target, {scores.data}: median and each of {len(scores.seeds)} seeds"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{title}" font-family="system-ui, sans-serif" font-size="13" fill="#1f2328">',
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="16" y="26" font-size="15" font-weight="600">{title}</text>',
        *_legend(shown),
    ]
    return "\n".join([*head, *axis, *parts, "</svg>", ""])


def _legend(shown: Mapping[str, str]) -> list[str]:
    return [
        f'<rect x="{16 + 150 * i}" y="36" width="12" height="12" fill="{colour}"/>'
        f'<text x="{33 + 150 * i}" y="47">{label}</text>'
        for i, (label, colour) in enumerate(shown.items())
    ]


def _bar(cell: TimeCell, y: int, colour: str) -> list[str]:
    """Return the median as a bar, pale to the end of the day if most runs never arrive, and each run as a dot."""
    arrivals = [hours for hours, _ in cell.journeys if hours is not None]
    middle = Arrivals.of([hours for hours, _ in cell.journeys]).median
    end, pale = (_x(middle), "") if math.isfinite(middle) else (_x(_DAY), ' fill-opacity="0.25"')
    parts = [f'<rect x="{_x(0)}" y="{y}" width="{end - _x(0):.1f}" height="{_BAR}" fill="{colour}"{pale}/>']
    parts += [f'<circle cx="{_x(hours)}" cy="{y + _BAR / 2}" r="2" fill="#1f2328"/>' for hours in sorted(arrivals)]
    seeds = len(cell.hours)
    note = cell.median.text if len(arrivals) == seeds else f"{len(arrivals)} of {seeds} arrive"
    last = max([end, *map(_x, arrivals)])
    parts.append(f'<text x="{last + 6:.1f}" y="{y + _BAR - 1}" font-size="11">{note}</text>')
    return parts


def _x(hours: float) -> float:
    return round(_LEFT + (_WIDTH - 60) * hours / _DAY, 1)
