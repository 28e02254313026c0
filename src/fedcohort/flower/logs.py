"""What happens in a live run, said once: a line for people, the same with its fields for machines.

Every line of the log that says something about the run carries named fields. ``CohortStrategy(json_log=PATH)`` writes
them as JSON, one object a line, which log shippers read as they are::

    {"time": "2026-03-01T12:00:00.125+00:00", "level": "info", "event": "selected", "round": 12, ...}

Rounds are counted from 0, as in the journal.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedcohort.errors import InputError

log = logging.getLogger("flwr.fedcohort")
_FIELDS = "fedcohort"
_WRITERS = ("flwr.fedcohort", "fedcohort")  # the loggers of live runs and of sessions


def say(event: str, message: str, *values: object, level: int = logging.INFO, **fields: Any) -> None:
    """Log a message, with the name of what happened and its fields for :class:`JsonLines`."""
    if log.isEnabledFor(level):
        log.log(level, message, *values, extra={_FIELDS: {"event": event, **fields}})


class JsonLines(logging.Formatter):
    """A line of the log as one JSON object: time, level, event, message and the event's own fields.

    >>> record = logging.LogRecord("flwr.fedcohort", logging.INFO, "", 0, "round %d", (3,), None)
    >>> record.created = 0.0
    >>> JsonLines().format(record)
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


@contextlib.contextmanager
def written_to(path: Path | None) -> Iterator[None]:
    """Write the log of a run to ``path`` as well, as JSON lines; what is there already stays."""
    if path is None:
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise InputError(f"The log {path} cannot be written: {error.strerror or error}.") from error
    handler.setFormatter(JsonLines())
    handler.setLevel(logging.INFO)
    loggers = [logging.getLogger(name) for name in _WRITERS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()
