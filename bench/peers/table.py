"""The table and the picture of docs/performance.md, from bench/results/peers.json."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "img" / "peers.svg"
WORKS = ("W1", "W2", "W3")
OURS, ENGINE = "fedcohort", "engine"


def ratios(one: dict[str, Any], peer: str) -> list[float]:
    """Return how many times as fast we were, turn by turn."""
    return [ours / theirs for ours, theirs in zip(one["rates"][OURS], one["rates"][peer], strict=True)]


def ours(kept: dict[str, Any], work: str, side: str, what: str) -> list[float]:
    """Return all values of one of our sides in a workload, over the peers it stood beside."""
    found = []
    for one in kept[work].values():
        value = one["rates"][side] if what == "rates" else one[what][side]
        found += value if isinstance(value, list) else [value]
    return found


def rows(kept: dict[str, Any]) -> list[str]:
    """Return Markdown."""
    lines = []
    for work in (work for work in WORKS if work in kept):
        lines += [f"| {work} | rounds/s | fedcohort is faster by | accuracy | memory, MiB | lines |", "|---" * 6 + "|"]
        for side, name in ((OURS, "fedcohort, an experiment"), (ENGINE, "fedcohort, its engine alone")):
            rate = statistics.median(ours(kept, work, side, "rates"))
            score, memory = (statistics.median(ours(kept, work, side, what)) for what in ("accuracy", "memory"))
            count = ours(kept, work, side, "lines")[0]
            lines.append(f"| {name} | {rate:.3g} | | {100 * score:.1f}% | {memory:,.0f} | {count} |")
        by_speed = sorted(kept[work].items(), key=lambda item: -statistics.median(item[1]["rates"][item[0]]))
        for peer, one in by_speed:
            found = ratios(one, peer)
            spread = f"{statistics.median(found):.1f} ({min(found):.1f} to {max(found):.1f})"
            rate = statistics.median(one["rates"][peer])
            score, memory, count = one["accuracy"][peer], one["memory"][peer], one["lines"][peer]
            lines.append(f"| {peer} | {rate:.3g} | {spread} | {100 * score:.1f}% | {memory:,.0f} | {count} |")
        shares = [share for one in kept[work].values() for share in one["share"]]
        speeds = [speed / 1e9 for one in kept[work].values() for speed in one["sgemm"]]
        lines += [
            "",
            f"sgemm {statistics.median(speeds):.0f} GFLOP/s; the engine reaches {statistics.median(shares):.2f} of it "
            f"({min(shares):.2f} to {max(shares):.2f}).",
            "",
        ]
    return lines


def picture(kept: dict[str, Any]) -> str:
    """Return rounds a second as bars, a panel for each workload, logarithmic."""
    parts, top = [], 24
    for work in (work for work in WORKS if work in kept):
        rates = {OURS: statistics.median(ours(kept, work, OURS, "rates"))}
        rates |= {peer: statistics.median(one["rates"][peer]) for peer, one in kept[work].items()}
        low = 10 ** math.floor(math.log10(min(rates.values())))
        scale = 420 / math.log10(1.3 * max(rates.values()) / low)
        parts.append(f'<text x="8" y="{top}" font-weight="bold">{work}, rounds per second</text>')
        for name, rate in sorted(rates.items(), key=lambda item: -item[1]):
            top += 22
            width = scale * math.log10(rate / low)
            colour = "#0b6e4f" if name == OURS else "#9aa5b1"
            parts.append(f'<text x="84" y="{top + 12}" text-anchor="end">{escape(name)}</text>')
            parts.append(f'<rect x="92" y="{top}" width="{width:.0f}" height="16" fill="{colour}"/>')
            parts.append(f'<text x="{98 + width:.0f}" y="{top + 12}">{rate:.3g}</text>')
        top += 44
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 {top - 12}" font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def write(kept: dict[str, Any]) -> None:
    """Print the table, write the picture."""
    print("\n".join(rows(kept)))
    PICTURE.write_text(picture(kept))
