"""The picture of a diagnosis: components against a Gaussian (FedCor, Figs. 12, 13), and similarity (Fig. 9)."""

from __future__ import annotations

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.text import escape_html
from fedcohort.studies.diagnose import Diagnosis

_COMPONENTS = 3  # of the last look, to draw
_WIDTH, _HEIGHT, _EDGE = 240.0, 170.0, 34.0
_BAR, _LINE, _INK = "#8fb8de", "#b3261e", "#333333"


def diagnosis_svg(diagnosis: Diagnosis) -> str:
    """Return an SVG: components of the last look against a Gaussian of their variance, and the similarity of looks."""
    last = diagnosis.normality[-1]
    shown = min(_COMPONENTS, last.components.shape[1])
    panels = [_histogram(last.components[:, j], j, float(last.explained[j])) for j in range(shown)]
    panels.append(_similarity(diagnosis))
    width = len(panels) * (_WIDTH + _EDGE) + _EDGE
    parts = [
        f'<g transform="translate({_EDGE + i * (_WIDTH + _EDGE):.0f} {_EDGE:.0f})">{panel}</g>'
        for i, panel in enumerate(panels)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {_HEIGHT + 2.4 * _EDGE:.0f}" '
        f'width="{width:.0f}" font-family="sans-serif" font-size="11" fill="{_INK}">'
        f"<title>Normality and stationarity of loss changes</title>"
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _histogram(values: FloatArray, number: int, explained: float) -> str:
    spread = float(values.std(ddof=1)) or 1.0
    z = values / spread
    counts, edges = np.histogram(z, bins=np.linspace(-4, 4, 33))
    density = counts / (len(z) * (edges[1] - edges[0]))
    top = max(0.5, float(density.max())) * 1.05
    step = _WIDTH / len(density)
    bars = "".join(
        f'<rect x="{i * step:.1f}" y="{_HEIGHT * (1 - d / top):.1f}" width="{step - 0.5:.1f}" '
        f'height="{_HEIGHT * d / top:.1f}" fill="{_BAR}"/>'
        for i, d in enumerate(density.tolist())
    )
    at = np.linspace(-4, 4, 81)
    bell = np.exp(-(at**2) / 2) / np.sqrt(2 * np.pi)
    line = _polyline((at + 4) / 8, bell / top)
    return bars + line + _frame(f"component {number + 1}, {explained:.0%} of the variance", "-4", "4 deviations")


def _similarity(diagnosis: Diagnosis) -> str:
    rounds = diagnosis.rounds[1:]
    x = (rounds - rounds[0]) / max(1, int(rounds[-1] - rounds[0]))
    return _polyline(x, diagnosis.similarity) + _frame(
        "similarity of covariance to the previous look, 0 to 1", f"round {rounds[0]}", f"round {rounds[-1]}"
    )


def _polyline(x: FloatArray, y: FloatArray) -> str:
    points = " ".join(f"{_WIDTH * a:.1f},{_HEIGHT * (1 - b):.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))
    return f'<polyline points="{points}" fill="none" stroke="{_LINE}" stroke-width="1.8"/>'


def _frame(title: str, left: str, right: str) -> str:
    return (
        f'<path d="M0 0V{_HEIGHT:.0f}H{_WIDTH:.0f}" fill="none" stroke="{_INK}"/>'
        f'<text x="0" y="-10">{escape_html(title)}</text><text x="0" y="{_HEIGHT + 16:.0f}">{escape_html(left)}</text>'
        f'<text x="{_WIDTH:.0f}" y="{_HEIGHT + 16:.0f}" text-anchor="end">{escape_html(right)}</text>'
    )
