"""Which clients hold up a run, for simulated runs and live sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.protocol import Status

SLOW = 2.0  # a straggler takes this many times the usual duration
_MAX_LISTED = 8  # stragglers


class ClientTally:
    """How often each client was asked, how often it delivered nothing, and how long it took."""

    def __init__(self) -> None:
        self._asked = self._trouble = self._timed = np.zeros(0, np.int64)
        self._seconds = np.zeros(0)

    def add(self, clients: IntArray, delivered: BoolArray, seconds: FloatArray) -> None:
        """Count a cohort (k,); durations may be NaN."""
        if not len(clients):
            return
        n = max(len(self._asked), int(clients.max()) + 1)
        known = np.isfinite(seconds)
        self._asked = _add(self._asked, clients, n)
        self._trouble = _add(self._trouble, clients[~delivered], n)
        self._timed = _add(self._timed, clients[known], n)
        grown = np.pad(self._seconds, (0, n - len(self._seconds)))
        np.add.at(grown, clients[known], seconds[known])
        self._seconds = grown

    def stragglers(self, name: Callable[[int], str]) -> list[dict[str, Any]]:
        """Return a line for each client that failed to deliver or is slow, the worst first."""
        mean = self._seconds / np.where(self._timed > 0, self._timed, np.nan)
        timed = mean[np.isfinite(mean)]
        usual = float(np.median(timed)) if len(timed) else 0.0
        rows: list[dict[str, Any]] = []
        for client in np.flatnonzero(self._asked).tolist():
            seconds = float(mean[client]) if np.isfinite(mean[client]) else None
            slow = seconds / usual if seconds is not None and usual > 0 else None
            if self._trouble[client] or (slow or 0) > SLOW:
                rows.append(
                    {
                        "client": name(client),
                        "asked": int(self._asked[client]),
                        "trouble": int(self._trouble[client]),
                        "seconds": seconds,
                        "slow": slow,
                    }
                )
        rows.sort(key=lambda row: (-row["trouble"] / row["asked"], -(row["slow"] or 0)))
        return rows[:_MAX_LISTED]


def _add(counts: IntArray, clients: IntArray, n: int) -> IntArray:
    return np.asarray(np.pad(counts, (0, n - len(counts))) + np.bincount(clients, minlength=n))


def status_name(value: int) -> str:
    """Return the name of a client's status, in lower case."""
    try:
        return Status(int(value)).name.lower()
    except ValueError:
        return f"status {value}"
