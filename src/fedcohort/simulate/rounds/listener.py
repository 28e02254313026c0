"""How progress bars, dashboards and trackers watch an experiment."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedcohort.simulate.store.results import RunInfo


class Listener:
    """Watches an experiment. Override the methods you need."""

    def on_start(self, runs: Sequence[RunInfo], rounds_done: int, rounds_total: int) -> None:
        """Called with all runs before the first round."""

    def on_round(self, run: RunInfo, row: Mapping[str, Any]) -> None:
        """Called after each round of a run, with its row of ``rounds``."""

    def on_end(self, state: str) -> None:
        """Called at the end, with "finished", "interrupted" or "failed"."""


class Deadline(Listener):
    """Stops a simulation at a given time.

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
        """Stop if the time is up."""
        if time.monotonic() >= self._until:
            self._stop()
