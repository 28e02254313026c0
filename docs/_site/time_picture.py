"""The picture of the suite "time": hours to the target by availability and way, from the stored scores.

Run ``PYTHONPATH=src:docs python -m _site.time_picture`` after the scores have changed; a test compares the file with
them.
"""

from __future__ import annotations

import math
from pathlib import Path

from fedcohort.studies.benchmark.run import read_time_scores
from fedcohort.studies.benchmark.scores import half_interval
from fedcohort.studies.benchmark.timed import WAYS
from fedcohort.studies.benchmark.timed_scores import TimeCell

ROOT = Path(__file__).parents[2]
SCORES = ROOT / "bench" / "results" / "benchmark_time.json"
PICTURE = ROOT / "docs" / "img" / "time.svg"
_SHOWN = {"uniform": "#8c959f", "balanced": "#1f6feb", "fedcbs": "#8250df"}
_LEFT, _WIDTH, _BAR, _GAP, _TOP = 150, 560, 11, 10, 64
_DAY = 24.0


def draw(path: Path) -> str:
    """Return the picture of stored scores as SVG."""
    scores = read_time_scores(path)
    parts: list[str] = []
    y = _TOP
    for regime, target in scores.targets.items():
        parts.append(f'<text x="16" y="{y + 4}" font-weight="600">{regime}, target {target:.0%}</text>')
        y += 14
        for way in WAYS:
            cells = [(label, scores.find(regime, way, label)) for label in _SHOWN]
            parts.append(f'<text x="16" y="{y + 22}">{way}</text>')
            for label, cell in cells:
                if cell is not None:
                    parts += _bar(cell, y, _SHOWN[label])
                y += _BAR + 1
            y += _GAP
        y += 12
    width, height = _LEFT + _WIDTH + 80, y + 26
    axis = [
        f'<line x1="{_x(h)}" x2="{_x(h)}" y1="{_TOP - 6}" y2="{y - 8}" stroke="#d0d7de"/>'
        f'<text x="{_x(h)}" y="{y + 8}" text-anchor="middle">{h:g} h</text>'
        for h in (0.0, 6.0, 12.0, 18.0, 24.0)
    ]
    seeds = len(scores.seeds)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#1f2328">',
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="16" y="26" font-size="15" font-weight="600">Simulated hours to the target, {scores.data}, mean of '
        f"{seeds} seeds with 95% intervals</text>",
        *(
            f'<rect x="{16 + 110 * i}" y="36" width="12" height="12" fill="{colour}"/>'
            f'<text x="{33 + 110 * i}" y="47">{label}</text>'
            for i, (label, colour) in enumerate(_SHOWN.items())
        ),
    ]
    return "\n".join([*head, *axis, *parts, "</svg>", ""])


def _bar(cell: TimeCell, y: int, colour: str) -> list[str]:
    mean, half = float(cell.hours.mean()), half_interval(cell.hours)
    found = [f'<rect x="{_x(0)}" y="{y}" width="{_x(mean) - _x(0):.1f}" height="{_BAR}" fill="{colour}"/>']
    if not math.isnan(half):
        low, high = _x(max(mean - half, 0.0)), _x(min(mean + half, _DAY))
        middle = y + _BAR / 2
        found.append(f'<line x1="{low}" x2="{high}" y1="{middle}" y2="{middle}" stroke="#1f2328"/>')
    share = cell.reached.mean()
    note = f"{mean:.1f}" + ("" if share == 1 else f" ({share:.0%} reach it)")
    end = _x(mean) if math.isnan(half) else max(_x(mean), _x(min(mean + half, _DAY)))
    found.append(f'<text x="{end + 5:.1f}" y="{y + _BAR - 1}" font-size="11">{note}</text>')
    return found


def _x(hours: float) -> float:
    return round(_LEFT + (_WIDTH - 60) * hours / _DAY, 1)


if __name__ == "__main__":
    PICTURE.write_text(draw(SCORES), encoding="utf-8")
