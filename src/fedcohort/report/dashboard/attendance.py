"""Which clients hold up a run, for simulated runs and live sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.protocol import Status

SLOW = 2.0  # a straggler takes this many times the usual duration
_MAX_LISTED = 8  # stragglers


def stragglers(
    clients: IntArray, delivered: BoolArray, seconds: FloatArray, name: Callable[[int], str]
) -> list[dict[str, Any]]:
    """Return a line for each client that failed to deliver or is slow, the worst first.

    Parameters
    ----------
    clients, delivered, seconds : (m,) arrays
        For every time that a client was asked, the client, whether it delivered, and its duration, which may be NaN.
    """
    n, known = int(clients.max(initial=-1)) + 1, np.isfinite(seconds)
    asked, trouble = np.bincount(clients, minlength=n), np.bincount(clients[~delivered], minlength=n)
    timed = np.bincount(clients[known], minlength=n)
    mean = np.bincount(clients[known], seconds[known], minlength=n) / np.where(timed > 0, timed, np.nan)
    usual = float(np.median(mean[timed > 0])) if timed.any() else 0.0
    rows: list[dict[str, Any]] = []
    for client in np.flatnonzero(asked).tolist():
        took = float(mean[client]) if timed[client] else None
        slow = took / usual if took is not None and usual > 0 else None
        if trouble[client] or (slow or 0) > SLOW:
            row = {"client": name(client), "asked": int(asked[client]), "trouble": int(trouble[client])}
            rows.append({**row, "seconds": took, "slow": slow})
    rows.sort(key=lambda row: (-row["trouble"] / row["asked"], -(row["slow"] or 0)))
    return rows[:_MAX_LISTED]


def status_name(value: int) -> str:
    """Return the name of a client's status, in lower case."""
    try:
        return Status(int(value)).name.lower()
    except ValueError:
        return f"status {value}"
