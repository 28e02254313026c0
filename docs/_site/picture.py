"""The picture of the benchmark: every selector's mean gain and worst setting on every dataset, from the stored scores.

Run ``PYTHONPATH=docs python -m _site.picture`` after the scores have changed; a test compares the file with them.
"""

from __future__ import annotations

import math
from pathlib import Path

from fedcohort.core.text import escape_html
from fedcohort_bench.benchmark.run import read_scores

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "img" / "benchmark.svg"
_LABEL, _PANEL, _ROW, _TOP = 220, 190, 20, 64
_LEAST, _MOST = -6.0, 8.0  # points; bars and marks are cut off beyond these


def stored_scores(folder: Path) -> list[Path]:
    """Return the files with scores of the benchmark; the suite "time" has its own picture."""
    return sorted(path for path in folder.glob("benchmark_*.json") if path.name != "benchmark_time.json")


def draw(folder: Path) -> str:
    """Return the picture of all scores in a folder as SVG."""
    boards = [read_scores(path) for path in stored_scores(folder)]
    boards.sort(key=lambda scores: -len(scores.settings) * scores.rounds)
    by_label = [{line.label: line for line in scores.lines} for scores in boards]
    labels = sorted(
        {label for lines in by_label for label in lines},
        key=lambda label: -sum(lines[label].mean for lines in by_label if label in lines),
    )
    width, height = _LABEL + _PANEL * len(boards) + 20, _TOP + _ROW * len(labels) + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#1f2328">',
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        '<text x="16" y="26" font-size="15" font-weight="600">Gain over uniform selection, points of accuracy</text>',
    ]
    for column, scores in enumerate(boards):
        left = _LABEL + column * _PANEL
        zero = left + _place(0.0)
        parts.append(f'<text x="{left + 8}" y="52" font-weight="600">{escape_html(scores.data)}</text>')
        parts.append(f'<line x1="{zero}" x2="{zero}" y1="{_TOP}" y2="{height - 40}" stroke="#8c959f"/>')
        for row, label in enumerate(labels):
            line = by_label[column].get(label)
            if line is None:
                continue
            y = _TOP + row * _ROW + 4
            end, low = left + _place(line.mean), left + _place(line.worst[1])
            colour = "#1f6feb" if line.mean > 0 else "#bc4c00"
            parts.append(
                f'<rect x="{min(zero, end)}" y="{y}" width="{abs(end - zero):.1f}" height="11" fill="{colour}"/>'
            )
            parts.append(f'<line x1="{low}" x2="{low}" y1="{y - 2}" y2="{y + 13}" stroke="#1f2328" stroke-width="2"/>')
            parts.append(f'<text x="{left + _PANEL - 12}" y="{y + 10}" text-anchor="end">{line.mean:+.1f}</text>')
    for row, label in enumerate(labels):
        parts.append(f'<text x="16" y="{_TOP + row * _ROW + 14}">{escape_html(label)}</text>')
    parts.append(
        f'<text x="16" y="{height - 16}">Bar and number: mean over all settings. Black mark: the worst setting, '
        f"cut off at {_LEAST:g} points.</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def _place(value: float) -> float:
    share = (min(max(value, _LEAST), _MOST) - _LEAST) / (_MOST - _LEAST)
    return round(8 + share * (_PANEL - 64), 1) if math.isfinite(value) else 0.0


if __name__ == "__main__":
    PICTURE.write_text(draw(ROOT / "bench" / "results"), encoding="utf-8")
