"""How evenly clients took part, as a table of the report."""

from __future__ import annotations

import math

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.report.data import Setting
from fedcohort.simulate.leaderboard.formats import Cell, Table
from fedcohort.simulate.leaderboard.words import names
from fedcohort.simulate.metrics import Spread


def gini(counts: FloatArray) -> float:
    """Return the Gini coefficient: 0 if all clients were picked equally often, near 1 if one client did all the work.

    >>> round(gini(np.array([1.0, 1.0, 1.0, 1.0])), 6), gini(np.array([0.0, 0.0, 0.0, 4.0]))
    (0.0, 0.75)
    """
    ordered = np.sort(np.asarray(counts, np.float64))
    total = ordered.sum()
    if total <= 0:
        return math.nan
    n = len(ordered)
    return float(2 * (np.arange(1, n + 1) @ ordered) / (n * total) - (n + 1) / n)


def participation_table(setting: Setting) -> Table:
    """Return how evenly clients took part, and which clients never did."""
    n = setting.n_clients
    rows = []
    for group in setting.groups:
        counts = np.array([np.bincount(run.pick_client, minlength=n)[:n] for run in group.runs])
        evenness = Spread.of([gini(c.astype(float)) for c in counts])
        never = Spread.of([float((c == 0).sum()) for c in counts])
        left_out = np.flatnonzero(counts[0] == 0)
        rows.append(
            (
                Cell(group.label, color=group.color, dash=group.dash),
                Cell(f"{evenness.mean:.2f}", f"±{evenness.std:.2f}" if evenness.count > 1 else ""),
                Cell(f"{never.mean:.3g}", f"of {n}"),
                Cell(f"{counts.max(axis=1).mean():.3g}"),
                Cell(names([setting.client_name(int(c)) for c in left_out], 30), f"seed {group.runs[0].seed}"),
            )
        )
    return Table(
        "participation",
        "Who is left out",
        ("Selector", "Gini", "Never picked", "Most picks of one client", "Clients that were never picked"),
        tuple(rows),
        "Gini of participation: 0 if all clients are picked equally often, near 1 if one client does all the work.",
        frozenset({4}),
    )
