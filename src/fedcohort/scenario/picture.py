"""A federation as text: which classes each client has."""

from __future__ import annotations

import numpy as np

from fedcohort.core.arrays import IntArray
from fedcohort.core.errors import InputError
from fedcohort.scenario.federation import Federation

_SHADES = " ░▒▓█"


def text_picture(federation: Federation, *, limit: int = 40, true: bool = False) -> str:
    """Return a line per client and a column per class, darker where more of the client's samples are.

    At most ``limit`` clients are shown, evenly spaced. With ``true``, the labels are those of the dataset instead of
    those that the clients see.

    >>> print(text_picture(Federation.of([[0, 1, 2, 3], [4, 5]], labels=[0, 0, 0, 1, 2, 2], classes=3)))
    client  classes 0 to 2
    0       |▓░ |  4 samples
    1       |  █|  2 samples
    """
    shown = _spaced_clients(len(federation), limit)
    counts = federation.label_counts(part="all", true=true)[shown]
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    # rounded up: anything above zero shows
    levels = np.minimum(np.ceil(shares * (len(_SHADES) - 1)).astype(int), len(_SHADES) - 1)
    names = [federation.names[k] for k in shown]
    width = max(6, *(len(name) for name in names))
    digits = len(f"{int(counts.sum(axis=1).max(initial=0)):,}")
    lines = [f"{'client':<{width}}  classes 0 to {federation.classes - 1}"]
    for k, (name, row) in enumerate(zip(names, levels, strict=True)):
        cells = "".join(_SHADES[level] for level in row)
        rate = float(federation.noise_rate[shown[k]])
        noise = f", {rate:.0%} wrong labels" if rate else ""
        lines.append(f"{name:<{width}}  |{cells}|  {int(counts[k].sum()):>{digits},} samples{noise}")
    if len(shown) < len(federation):
        lines.append(f"({len(shown):,} of {len(federation):,} clients)")
    return "\n".join(lines)


def _spaced_clients(clients: int, limit: int) -> IntArray:
    if limit < 1:
        raise InputError(f"The 'limit' of a picture must be at least 1. Got {limit}.")
    if clients <= limit:
        return np.arange(clients)
    return np.linspace(0, clients - 1, limit).round().astype(np.int64)
