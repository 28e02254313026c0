"""The live feed: each round of each run, and why it was chosen, for the dashboard, long before the next checkpoint."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedcohort.core.files import refuse_links
from fedcohort.journal import Journal
from fedcohort.journal.live import LiveRounds
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.store.results import RunInfo
from fedcohort.simulate.store.writer import disk_errors

_FLUSH_SECONDS = 0.5
_BYTES = ("bytes_down", "bytes_up", "query_bytes_down", "query_bytes_up")
_NUMBERS = ("accuracy", "metric", "loss", "qcid", "clock", "seconds", *_BYTES)
_LISTS = ("cohort", "statuses", "durations")


class LiveFeed(Listener):
    """Appends rounds to ``live.jsonl`` in an experiment's directory, and makes them explainable in ``live.sqlite``.

    Lines are written with the first round that ends half a second or more after the last time, and never before the
    round's scores can be read. A resumed experiment goes on in the same file; a round that is made again is written
    again, and readers take one line per run and round.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._file: IO[str] | None = None
        self._lines: list[str] = []
        self._flush_due = 0.0
        self._rounds: LiveRounds | None = None
        self._journals: Mapping[str, Journal] = {}

    def on_start(self, runs: Sequence[RunInfo], rounds_done: int, rounds_total: int) -> None:
        """Open the feed; a line that an earlier process could not finish stays a line of its own."""
        with disk_errors(self._out / "live.jsonl"):
            place = self._out / "live.jsonl"
            self._file = open(place, "a+", errors="replace", opener=refuse_links)  # noqa: SIM115  # for as long as the run
            end = self._file.tell()
            self._file.seek(max(end - 1, 0))
            if end and self._file.read() != "\n":
                self._file.write("\n")
                self._file.flush()

    def follow(self, journals: Mapping[str, Journal]) -> None:
        """Say whose rounds are being made, so that their scores can be read before the next checkpoint."""
        self._flush()
        self._journals = journals
        with self._errors():
            if self._rounds is not None:
                self._rounds.close()
            self._rounds = LiveRounds(self._out / "live.sqlite")

    def durable(self) -> None:
        """Say that all journals have been committed."""
        self._flush()
        if self._rounds is not None:
            with self._errors():
                self._rounds.forget()

    def on_round(self, run: RunInfo, row: Mapping[str, Any]) -> None:
        """Take a line."""
        line: dict[str, Any] = {"run": run.id, "round": int(row["round"])}
        line |= {name: _number(row.get(name)) for name in _NUMBERS}
        line |= {name: np.asarray(row[name]).tolist() for name in _LISTS if row.get(name) is not None}
        self._lines.append(json.dumps(line) + "\n")
        now = time.monotonic()
        if now >= self._flush_due:
            self._flush()
            self._flush_due = now + _FLUSH_SECONDS

    def _flush(self) -> None:
        if not self._lines or self._file is None:
            return
        with self._errors():
            if self._rounds is not None:
                self._rounds.publish(self._journals)
            self._file.writelines(self._lines)
            self._file.flush()
        self._lines.clear()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        with disk_errors(self._out / "live.sqlite"):
            try:
                yield
            except sqlite3.OperationalError as error:
                full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
                raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error

    def on_end(self, state: str) -> None:
        """Close the feed; of an experiment that failed, as far as that is possible."""
        self._journals = {}
        failed = contextlib.suppress(OSError, sqlite3.Error) if state == "failed" else contextlib.nullcontext()
        with failed:
            if self._rounds is not None:
                self._rounds.close()
                self._rounds = None
            self._flush()
        if self._file is not None:
            with contextlib.suppress(OSError):  # what could not be written is in memory still
                self._file.close()
            self._file = None


def _number(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
