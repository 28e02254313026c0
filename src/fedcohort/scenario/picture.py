"""A federation as text: which classes each client has."""

from __future__ import annotations

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.scenario.federation import Federation

SHADES = " ░▒▓█"


def text_picture(federation: Federation, *, limit: int = 40) -> str:
    """Return a line per client and a column per class, which is darker the more of the client's samples are in it.

    At most ``limit`` clients are shown, evenly spaced. The labels are those that the clients see.

    >>> print(text_picture(Federation.of([[0, 1, 2, 3], [4, 5]], labels=[0, 0, 0, 1, 2, 2], classes=3)))
    client  classes 0 to 2
    0       |▓░ |  4 samples
    1       |  █|  2 samples
    """
    shown = spaced_clients(len(federation), limit)
    counts = federation.label_counts(part="all")[shown]
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    levels = shade_levels(shares)
    names = [federation.names[k] for k in shown]
    width = max(6, *(len(name) for name in names))
    digits = len(f"{int(counts.sum(axis=1).max(initial=0)):,}")
    lines = [f"{'client':<{width}}  classes 0 to {federation.classes - 1}"]
    for k, (name, row) in enumerate(zip(names, levels, strict=True)):
        cells = "".join(SHADES[level] for level in row)
        rate = float(federation.noise_rate[shown[k]])
        noise = f", {rate:.0%} wrong labels" if rate else ""
        lines.append(f"{name:<{width}}  |{cells}|  {int(counts[k].sum()):>{digits},} samples{noise}")
    if len(shown) < len(federation):
        lines.append(f"({len(shown):,} of {len(federation):,} clients)")
    return "\n".join(lines)


def shade_levels(shares: FloatArray) -> IntArray:
    """Return an index of ``SHADES`` for each share, rounded up so that any share above zero is visible."""
    return np.minimum(np.ceil(shares * (len(SHADES) - 1)).astype(np.int64), len(SHADES) - 1)


def spaced_clients(clients: int, limit: int) -> IntArray:
    """Return at most ``limit`` of the clients, evenly spaced."""
    return np.linspace(0, clients - 1, min(limit, clients)).round().astype(np.int64)
