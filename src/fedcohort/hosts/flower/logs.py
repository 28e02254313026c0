"""The log of a live run: each event is a line of text for people, and a set of fields for machines.

``CohortStrategy(json_log=PATH)`` writes the fields as JSON, one object per line, which log shippers can read::

    {"time": "2026-03-01T12:00:00.125+00:00", "level": "info", "event": "selected", "round": 12, ...}

Rounds are counted from 0, as in the journal.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedcohort.core.errors import InputError
from fedcohort.core.protocol import Cohort

log = logging.getLogger("flwr.fedcohort")
_FIELDS = "fedcohort"


def say(event: str, message: str, *values: object, level: int = logging.INFO, **fields: Any) -> None:
    """Log a message with the name of the event and its fields, for :class:`_JsonLines`."""
    if log.isEnabledFor(level):
        log.log(level, message, *values, extra={_FIELDS: {"event": event, **fields}})


def log_failures(cohort: Cohort, reasons: Mapping[str, str]) -> None:
    """Log which clients of a cohort returned no valid model, and why."""
    for name, reason in reasons.items():
        say(
            "client-failed", "\t> %s: %s", name, reason,
            round=cohort.round, ticket=cohort.ticket, client=name, reason=reason,
        )  # fmt: skip


def log_corrections(round_: int, corrections: Mapping[str, Sequence[str]]) -> None:
    """Log the changes made to replies."""
    for name, texts in corrections.items():
        for text in texts:
            say("corrected", "\t> %s: %s", name, text, level=logging.WARNING, round=round_, client=name, reason=text)


class _JsonLines(logging.Formatter):
    """Formats a log record as one JSON object: time, level, event, message and the event's fields.

    >>> record = logging.LogRecord("flwr.fedcohort", logging.INFO, "", 0, "round %d", (3,), None)
    >>> record.created = 0.0
    >>> _JsonLines().format(record)
    '{"time": "1970-01-01T00:00:00.000+00:00", "level": "info", "event": "message", "message": "round 3"}'
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": "message",
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Onward(logging.Handler):
    """Passes to the parent's handlers what the logger would have passed by itself."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger.getEffectiveLevel())
        self._parent = logger.parent if logger.propagate else None

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the record on."""
        if self._parent is not None:
            self._parent.callHandlers(record)


class _Tap:
    """Lets files receive every record of a logger from INFO on, while other handlers see what its level admits."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._files: list[logging.Handler] = []
        self._undo = contextlib.ExitStack()

    def add(self, file: logging.Handler) -> None:
        """Add a file; several runs of one process may have one at the same time."""
        if not self._files:
            self._open()
        self._files.append(file)
        self._logger.addHandler(file)

    def remove(self, file: logging.Handler) -> None:
        """Remove a file; after the last one, the logger is as it was before."""
        self._logger.removeHandler(file)
        self._files.remove(file)
        if not self._files:
            self._undo.close()

    def _open(self) -> None:
        logger, undo = self._logger, self._undo
        onward = _Onward(logger)
        for handler in logger.handlers:
            shown = lambda record: record.levelno >= onward.level  # noqa: E731
            handler.addFilter(shown)
            undo.callback(handler.removeFilter, shown)
        logger.addHandler(onward)
        undo.callback(logger.removeHandler, onward)
        undo.callback(setattr, logger, "propagate", logger.propagate)
        undo.callback(logger.setLevel, logger.level)
        logger.propagate = False
        logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))


_TAPS = tuple(map(_Tap, ("flwr.fedcohort", "fedcohort")))  # the loggers of live runs and of sessions
_TAPPING = threading.Lock()


@contextlib.contextmanager
def also_log_to(path: Path | None) -> Iterator[None]:
    """Also append the log of a run to ``path``, as JSON lines, whatever the levels of the loggers."""
    if path is None:
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise InputError(f"The log {path} cannot be written: {error.strerror or error}.") from error
    handler.setFormatter(_JsonLines())
    handler.setLevel(logging.INFO)
    with _TAPPING:
        for tap in _TAPS:
            tap.add(handler)
    try:
        yield
    finally:
        with _TAPPING:
            for tap in _TAPS:
                tap.remove(handler)
        handler.close()
