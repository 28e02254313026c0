"""The live feed: one JSON line per run and round, for the dashboard, long before the next checkpoint."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedcohort.simulate.listener import Listener
from fedcohort.simulate.results import RunInfo

_FLUSH_SECONDS = 0.5
_BYTES = ("bytes_down", "bytes_up", "query_bytes_down", "query_bytes_up")
_NUMBERS = ("accuracy", "loss", "qcid", "clock", "seconds", *_BYTES)
_LISTS = ("cohort", "statuses", "durations")


class LiveFeed(Listener):
    """Appends rounds to ``live.jsonl`` in an experiment's directory.

    Lines are flushed with the first round that ends half a second or more after the last flush. A resumed experiment
    goes on in the same file; a round that is made again is written again, and readers take one line per run and round.
    """

    def __init__(self, out: Path) -> None:
        self._path = out / "live.jsonl"
        self._file: IO[str] | None = None
        self._flush_due = 0.0

    def on_start(self, runs: Sequence[RunInfo], rounds_done: int, rounds_total: int) -> None:
        """Open the feed."""
        self._file = self._path.open("a")

    def on_round(self, run: RunInfo, row: Mapping[str, Any]) -> None:
        """Append a line."""
        assert self._file is not None
        line: dict[str, Any] = {"run": run.id, "round": int(row["round"])}
        line |= {name: _number(row.get(name)) for name in _NUMBERS}
        line |= {name: np.asarray(row[name]).tolist() for name in _LISTS if row.get(name) is not None}
        self._file.write(json.dumps(line) + "\n")
        now = time.monotonic()
        if now >= self._flush_due:
            self._file.flush()
            self._flush_due = now + _FLUSH_SECONDS

    def on_end(self, state: str) -> None:
        """Close the feed."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _number(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
