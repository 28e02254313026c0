"""Journals of older versions are refused, and nothing in them is changed."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedcohort import Session
from fedcohort.audit import choices
from fedcohort.audit.verification import examine
from fedcohort.core.errors import JournalError
from fedcohort.journal import SCHEMA_VERSION, read_journal
from fedcohort.journal.decisions import Decisions

WAYS: dict[str, Callable[[Path], Any]] = {
    "continue": Session.open,
    "continue or create": lambda path: Session.open_or_create(path, "balanced", 10),
    "read": read_journal,
    "read rounds": lambda path: Decisions(path, path.parent).cohorts,
    "verify": examine,
    "audit": choices.audit_journal,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_journal_of_0_2_is_refused_and_left_as_it_was(tmp_path: Path, way: str) -> None:
    path = tmp_path / "balanced.sqlite"
    before = gzip.decompress((Path(__file__).parent / "version-0.2" / "balanced.sqlite.gz").read_bytes())
    path.write_bytes(before)
    with pytest.raises(JournalError, match=rf"format 3\b.*format {SCHEMA_VERSION}\b") as refused:
        WAYS[way](path)
    assert "the version of fedcohort that wrote it" in str(refused.value.hint)
    assert path.read_bytes() == before
