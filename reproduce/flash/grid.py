"""FLASH's Table 1 (selectors x aggregators) and Figure 3 (label noise x non-IIDness) on digits.

    python reproduce/flash/grid.py runs/flash-grid      # prints Markdown, writes figure3.svg into the folder

The paper's data are FEMNIST and CIFAR-10; digits run in minutes on two cores. All train with FLASH's robust loss, so
that rows differ in selection alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from fedcohort.simulate.leaderboard import leaderboards
from fedcohort.simulate.results import load
from fedcohort.simulate.runner import run_experiment

SELECTORS = ["uniform", "oort", "pyramidfl", "restless-bandit", "neural-bandit", "fedcor", "feel", "flash"]
AGGREGATORS = ["fedavg", "fedprox", "fedbio", "feddf", "fednova", "scaffold", "rhfl"]
LEVELS = [0.0, 0.15, 0.3, 0.45]
SHARES = [0.0, 0.3, 0.6, 0.9]
SEEDS = [100, 101, 102]


def base(name: str) -> dict:
    return {
        "name": name,
        "seeds": SEEDS,
        "data": {"name": "digits"},
        "model": {"name": "mlp"},
        "local": {"batch_size": 16, "steps": 10, "lr": 0.1, "loss": "robust"},
        "scenario": {
            "partition": {"name": "dominant-class", "clients": 50, "share": 0.0, "replacement": True},
            "latency": {"name": "shifted-exponential"},
            "validation": 0.1,
            "server_validation": 10,
        },
        "run": {"rounds": 60, "cohort": 10, "eval_every": 2},
    }


def table1(out: Path) -> None:
    table = base("flash-table-1")
    table["selectors"] = {
        f"{selector}+{aggregator}": {"name": selector, "aggregator": {"name": aggregator}}
        for selector in SELECTORS
        for aggregator in AGGREGATORS
    }
    table["run"]["baseline"] = "uniform+fedavg"
    table["settings"] = [
        {"name": "30% non-IID", "scenario": {"partition": {"share": 0.3}}},
        {"name": "15% noise", "scenario": {"noise": {"level": 0.15}}},
    ]
    run_experiment(table, out)
    for board in leaderboards(load(out)):
        ends = {row.label: 100 * row.terminal.mean for row in board.rows}
        print(f"\n{board.setting}\n\n| selector | {' | '.join(AGGREGATORS)} | average |")
        print("|---" * (len(AGGREGATORS) + 2) + "|")
        for selector in SELECTORS:
            cells = [ends[f"{selector}+{aggregator}"] for aggregator in AGGREGATORS]
            print(f"| {selector} | {' | '.join(f'{cell:.1f}' for cell in cells)} | {np.mean(cells):.1f} |")


def figure3(out: Path) -> None:
    table = base("flash-figure-3")
    table["selectors"] = {"uniform": {}, "flash": {}}
    table["settings"] = [
        {"name": f"{share:g}/{level:g}", "scenario": {"partition": {"share": share}, "noise": {"level": level}}}
        for share in SHARES
        for level in LEVELS
    ]
    run_experiment(table, out)
    gains = {}
    for board in leaderboards(load(out)):
        rows = {row.label: row for row in board.rows}
        gains[board.setting] = 100 * (rows["flash"].terminal.mean - rows["uniform"].terminal.mean)
    (out / "figure3.svg").write_text(heat_map(gains))
    print("\ngain of FLASH over uniform selection with the same loss, points\n")
    print(f"| share of non-IID clients | {' | '.join(f'noise {level:g}' for level in LEVELS)} |")
    print("|---" * (len(LEVELS) + 1) + "|")
    for share in SHARES:
        cells = [gains[f"{share:g}/{level:g}"] for level in LEVELS]
        print(f"| {share:g} | {' | '.join(f'{cell:+.1f}' for cell in cells)} |")


def heat_map(gains: dict[str, float]) -> str:
    """Blue for a gain, orange for a loss, full colour at four points."""
    cells = []
    for row, share in enumerate(SHARES):
        for column, level in enumerate(LEVELS):
            gain = gains[f"{share:g}/{level:g}"]
            strong = (120, 176, 232) if gain > 0 else (240, 160, 90)
            part = min(abs(gain) / 4, 1.0)
            colour = "#" + "".join(f"{round(255 + part * (c - 255)):02x}" for c in strong)
            x, y = 150 + 90 * column, 50 + 50 * row
            cells.append(f'<rect x="{x}" y="{y}" width="88" height="48" fill="{colour}"/>')
            cells.append(f'<text x="{x + 44}" y="{y + 30}" text-anchor="middle">{gain:+.1f}</text>')
    tops = "".join(
        f'<text x="{194 + 90 * i}" y="40" text-anchor="middle">{level:.0%}</text>' for i, level in enumerate(LEVELS)
    )
    sides = "".join(
        f'<text x="140" y="{80 + 50 * i}" text-anchor="end">{share:.0%}</text>' for i, share in enumerate(SHARES)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="530" height="280" font-family="sans-serif" font-size="14">'
        f'<rect width="530" height="280" fill="white"/><text x="330" y="18" text-anchor="middle">wrong labels</text>'
        f'<text x="10" y="18">non-IID clients</text>{tops}{sides}{"".join(cells)}</svg>'
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    table1(folder / "table1")
    figure3(folder / "figure3")
