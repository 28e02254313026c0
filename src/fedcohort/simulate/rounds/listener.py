"""How progress bars, dashboards and trackers watch an experiment."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedcohort.simulate.store.results import RunInfo


class Listener:
    """Watches an experiment. Override what is of interest; nothing here slows the rounds down by itself."""

    def on_start(self, runs: Sequence[RunInfo], rounds_done: int, rounds_total: int) -> None:
        """Take note of all runs before the first round."""

    def on_round(self, run: RunInfo, row: Mapping[str, Any]) -> None:
        """Take a run's round: its row of ``rounds``."""

    def on_end(self, state: str) -> None:
        """Take note that nothing more comes: finished, interrupted or failed."""


class Deadline(Listener):
    """Asks to stop when a time has come.

    Parameters
    ----------
    stop : callable
        ``stop`` of the simulation.
    until : float
        By ``time.monotonic``.
    """

    def __init__(self, stop: Callable[[], None], until: float) -> None:
        self._stop, self._until = stop, until

    def on_round(self, run: RunInfo, row: Mapping[str, Any]) -> None:
        """Look at the clock."""
        if time.monotonic() >= self._until:
            self._stop()
