"""Checks the path of a journal."""

from __future__ import annotations

from pathlib import Path

from fedcohort.core.validate import path as check_path
from fedcohort.core.validate import refuse


def place(journal: str | Path) -> Path:
    """Return the path of a journal; InputError if it cannot be the path of a file.

    >>> place(".")
    Traceback (most recent call last):
        ...
    fedcohort.core.errors.InputError: 'journal' must be the path of a file. Got '.'.
    """
    path = check_path(journal, "'journal'")
    if not path.name:
        raise refuse("'journal'", "the path of a file", journal)
    return path
