"""A federation over a week as a self-contained SVG."""

from __future__ import annotations

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.report import palette
from fedcohort.scenario.devices import DAY
from fedcohort.scenario.week import FederationWeek

_LEFT, _WIDTH, _ROW, _CURVE, _HISTOGRAM, _BINS = 60, 840, 6, 120, 110, 40


def week_svg(week: FederationWeek) -> str:
    """Return the picture: how many clients are on, which ones, and log-scale histograms of both speeds."""
    sessions_at = _CURVE + 50
    histograms_at = sessions_at + _ROW * len(week.shown) + 60
    height = histograms_at + _HISTOGRAM + 40
    parts = [_days(sessions_at + _ROW * len(week.shown)), _curve(week, 20), _sessions(week, sessions_at)]
    half = (_WIDTH - 60) / 2
    parts.append(_histogram(week.speeds, "samples per second", _LEFT, half, histograms_at))
    parts.append(_histogram(week.bandwidths, "bytes per second", _LEFT + half + 60, half, histograms_at))
    label = f"Which of {week.clients:,} clients are on during a week"
    style = f"<style>{palette.css()}text{{font:12px system-ui,sans-serif;fill:var(--ink)}}</style>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" '
        f'viewBox="0 0 {_LEFT + _WIDTH + 20} {height}">{style}{"".join(parts)}</svg>'
    )


def _x(time: float) -> float:
    return _LEFT + _WIDTH * time / (7 * DAY)


def _days(bottom: float) -> str:
    lines = []
    for day in range(8):
        x = _x(day * DAY)
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="20" y2="{bottom}" stroke="var(--grid)"/>')
        if day < 7:
            lines.append(f'<text x="{x + 4:.1f}" y="{bottom + 16}">day {day + 1}</text>')
    return "".join(lines)


def _curve(week: FederationWeek, top: float) -> str:
    most = max(int(week.available.max()), 1)
    points = " ".join(
        f"{_x(time):.1f},{top + _CURVE * (1 - count / most):.1f}"
        for time, count in zip(week.times.tolist(), week.available.tolist(), strict=True)
    )
    return (
        f'<text x="4" y="{top + 10}">{most:,}</text><text x="4" y="{top + _CURVE}">0 on</text>'
        f'<polyline points="{points}" fill="none" stroke="var(--s1)" stroke-width="1.5"/>'
    )


def _sessions(week: FederationWeek, top: float) -> str:
    """Draw a row per client, with a bar for each time it is on."""
    step = float(week.times[1] - week.times[0])
    parts = [f'<text x="4" y="{top + 10}">clients</text>']
    for row, on in enumerate(week.on):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], on.astype(np.int8), [0]])))
        y = top + _ROW * row
        parts += [
            f'<rect x="{_x(a * step):.1f}" y="{y}" width="{_x(b * step) - _x(a * step):.1f}" height="{_ROW - 1}" '
            'fill="var(--heat1)"/>'
            for a, b in edges.reshape(-1, 2).tolist()
        ]
    return "".join(parts)


def _histogram(values: FloatArray, unit: str, left: float, width: float, top: float) -> str:
    logs = np.log10(values)
    low, high = float(logs.min()), float(logs.max())
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    counts, _ = np.histogram(logs, bins=_BINS, range=(low, high))
    bar = width / _BINS
    bars = "".join(
        f'<rect x="{left + i * bar:.1f}" y="{top + _HISTOGRAM * (1 - count / counts.max()):.1f}" width="{bar - 1:.1f}" '
        f'height="{_HISTOGRAM * count / counts.max():.1f}" fill="var(--s0)"/>'
        for i, count in enumerate(counts.tolist())
    )
    foot = top + _HISTOGRAM + 16
    return (
        f'{bars}<text x="{left:.1f}" y="{foot}">{10**low:,.3g}</text>'
        f'<text x="{left + width / 2:.1f}" y="{foot}" text-anchor="middle">{unit}</text>'
        f'<text x="{left + width:.1f}" y="{foot}" text-anchor="end">{10**high:,.3g}</text>'
    )
