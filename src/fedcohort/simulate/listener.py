"""How progress bars, dashboards and trackers watch an experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedcohort.simulate.results import RunInfo


class Listener:
    """Watches an experiment. Override what is of interest; nothing here slows the rounds down by itself."""

    def on_start(self, runs: Sequence[RunInfo], rounds_done: int, rounds_total: int) -> None:
        """Take note of all runs before the first round."""

    def on_round(self, run: RunInfo, row: Mapping[str, Any]) -> None:
        """Take a run's round: its row of ``rounds``, with ``statuses`` and ``durations`` of the cohort where known."""

    def on_end(self, state: str) -> None:
        """Take note that nothing more comes: finished, interrupted or failed."""
