"""The table and the picture of docs/performance.md, from bench/results/peers.json."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

PICTURE = Path(__file__).resolve().parents[3] / "docs" / "img" / "peers.svg"
WORKS = ("W1", "W3", "W2")
OURS = {"fedcohort": "fedcohort, an experiment", "engine": "fedcohort, its engine alone"}


def rates(kept: dict[str, Any], work: str, side: str, way: str) -> list[float]:
    """Return rounds per second for each turn; ``way`` is clock or processor."""
    return [turn["rates"][side][way] for turn in kept[work]["turns"] if side in turn["rates"]]


def ratios(kept: dict[str, Any], work: str, peer: str, way: str) -> list[float]:
    """Return how many times as fast an experiment was, for each turn."""
    both = [turn["rates"] for turn in kept[work]["turns"] if peer in turn["rates"]]
    return [turn["fedcohort"][way] / turn[peer][way] for turn in both]


def spread(values: list[float], digits: int = 1) -> str:
    """Return the median with the smallest and the largest."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def by_speed(kept: dict[str, Any], work: str) -> list[str]:
    """Return the sides that were timed, ours first, then the fastest peers."""
    peers = {side for turn in kept[work]["turns"] for side in turn["rates"]} - set(OURS)
    return [*OURS, *sorted(peers, key=lambda peer: statistics.median(ratios(kept, work, peer, "clock")))]


def rows(kept: dict[str, Any]) -> list[str]:
    """Return the table as Markdown."""
    lines = []
    for work in (work for work in WORKS if kept.get(work, {}).get("turns")):
        head = "rounds/s | faster by | per processor second | faster by | accuracy | memory, MiB | lines"
        lines += [f"| {work} | {head} |", "|---" * 8 + "|"]
        for side in by_speed(kept, work):
            cells = [OURS.get(side, side)]
            for way in ("clock", "processor"):
                cells.append(f"{statistics.median(rates(kept, work, side, way)):.3g}")
                cells.append("" if side in OURS else spread(ratios(kept, work, side, way)))
            facts = kept[work]["sides"][side]
            cells += [f"{100 * facts['accuracy']:.1f}%", f"{facts['memory']:,.0f}", str(facts["lines"])]
            lines.append(f"| {' | '.join(cells)} |")
        turns = kept[work]["turns"]
        said = []
        for way, what in (("clock", "on the clock of all cores"), ("processor", "in processor time of one")):
            speed = statistics.median(turn["sgemm"][way] for turn in turns) / 1e9
            said.append(f"{speed:.0f} GFLOP/s {what}, of which the engine reaches "
                        f"{spread([turn['share'][way] for turn in turns], 2)}")  # fmt: skip
        low, high = (function(value for turn in turns for value in turn["load"]) for function in (min, max))
        lines += ["", f"{len(turns)} turns, load average {low:.1f} to {high:.1f}. sgemm: {'; '.join(said)}.", ""]
    return lines


def picture(kept: dict[str, Any]) -> str:
    """Return a bar chart of rounds per second on the clock, with a panel for each workload."""
    parts, top = [], 24
    for work in (work for work in WORKS if kept.get(work, {}).get("turns")):
        sides = [side for side in by_speed(kept, work) if side != "engine"]
        medians = {side: statistics.median(rates(kept, work, side, "clock")) for side in sides}
        scale = 420 / max(medians.values())
        parts.append(f'<text x="8" y="{top}" font-weight="bold">{work}, rounds per second</text>')
        for name, rate in sorted(medians.items(), key=lambda item: -item[1]):
            top += 22
            width = scale * rate
            colour = "#0b6e4f" if name in OURS else "#9aa5b1"
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
