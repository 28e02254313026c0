"""How progress bars, dashboards and trackers watch an experiment."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from fedcohort.simulate.store.results import RunInfo

_LINE_SECONDS = 10.0


class Listener:
    """Watches an experiment. Override what is of interest; nothing here slows the rounds down by itself."""

    def on_start(self, runs: Sequence[RunInfo], rounds_done: int, rounds_total: int) -> None:
        """Take note of all runs before the first round."""

    def on_round(self, run: RunInfo, row: Mapping[str, Any]) -> None:
        """Take a run's round: its row of ``rounds``, with ``statuses`` and ``durations`` of the cohort where known."""

    def on_end(self, state: str) -> None:
        """Take note that nothing more comes: finished, interrupted or failed."""


class LineProgress(Listener):
    """A line every ten seconds; for places without a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._done = self._first = self._total = 0
        self._began = self._due = 0.0

    def on_start(self, runs: Sequence[RunInfo], rounds_done: int, rounds_total: int) -> None:
        """Begin to count."""
        self._done = self._first = rounds_done
        self._total = rounds_total
        self._began = time.monotonic()
        self._due = self._began + _LINE_SECONDS

    def on_round(self, run: RunInfo, row: Mapping[str, Any]) -> None:
        """Count; say where it stands now and then."""
        self._done += 1
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _LINE_SECONDS
            pace = (self._done - self._first) / max(now - self._began, 1e-9)
            left = (self._total - self._done) / max(pace, 1e-9)
            line = f"{self._done:,} of {self._total:,} rounds, {pace:.3g} a second, about {left:.0f} s left"
            print(line, file=self._stream or sys.stderr, flush=True)


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
