"""Each round of each run as it ends, and why it was chosen, for the dashboard, long before the next checkpoint."""

from __future__ import annotations

import contextlib
import errno
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedcohort.journal import Journal
from fedcohort.journal.live import LiveRounds
from fedcohort.simulate.store.results import LIVE
from fedcohort.simulate.store.writer import disk_errors

_FLUSH_SECONDS = 0.5  # all rounds in between are one transaction


class LiveFeed:
    """Writes ``live.sqlite``, the rounds since the last checkpoint; ``with`` removes it at the end.

    Rounds are written with the first one that ends half a second or more after the last time.

    Parameters
    ----------
    out : the experiment's directory
    journals : by run id; their newest rounds are not durable yet
    group : number of the lock-step group in a process of its own, which has a file of its own
    """

    def __init__(self, out: Path, journals: Mapping[str, Journal], group: int | None = None) -> None:
        self._path = out / (LIVE if group is None else f"live-{group}.sqlite")
        self._rows: list[str] = []
        self._flush_due = 0.0
        with self._errors():
            self._rounds = LiveRounds(self._path, journals)

    def __enter__(self) -> LiveFeed:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Of an experiment that failed, what failed first counts: an error in closing would hide it.
        hides = () if kind is None else (OSError, sqlite3.Error)
        with contextlib.suppress(*hides), self._errors():
            self._rounds.close()

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row of ``rounds``."""
        self._rows.append(_encode(row))
        now = time.monotonic()
        if now >= self._flush_due:
            with self._errors():
                self._rounds.publish(self._rows)
            self._rows.clear()
            self._flush_due = now + _FLUSH_SECONDS

    def clear(self) -> None:
        """Drop everything: the experiment's directory has it now."""
        self._rows.clear()
        self.forget(self.mark())

    def mark(self) -> dict[str, int]:
        """Return what has been written so far, for :meth:`forget`."""
        with self._errors():
            return self._rounds.mark()

    def forget(self, upto: Mapping[str, int]) -> None:
        """Drop what had been written at a :meth:`mark`: the experiment's directory has it now."""
        with self._errors():
            self._rounds.forget(upto)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        with disk_errors(self._path):
            try:
                yield
            except sqlite3.OperationalError as error:
                full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
                raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error


_encode = json.JSONEncoder(default=lambda value: value.tolist()).encode  # arrays as lists
