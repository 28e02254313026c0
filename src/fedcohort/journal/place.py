"""Checks the path of a journal."""

from __future__ import annotations

from pathlib import Path, PurePath

from fedcohort.core.errors import JournalError
from fedcohort.core.text import short_repr


def place(journal: str | Path) -> Path:
    """Return the path of a journal; :class:`JournalError` if it cannot be the path of a file.

    >>> place("")
    Traceback (most recent call last):
        ...
    fedcohort.core.errors.JournalError: A journal must be the path of a file. Got ''.
    """
    if not isinstance(journal, (str, PurePath)) or not Path(journal).name or "\0" in str(journal):
        raise JournalError(f"A journal must be the path of a file. Got {short_repr(journal)}.")
    try:
        Path(journal).exists()
    except OSError as error:
        raise JournalError(f"There can be no journal at {short_repr(str(journal))}: {error.strerror}.") from error
    return Path(journal)
