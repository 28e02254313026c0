"""Journals written by older versions: checked before anything is changed, and audited by what they hold."""

from __future__ import annotations

import gzip
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedcohort import Session
from fedcohort.audit.verification import examine
from fedcohort.cli.app import app
from fedcohort.core.errors import JournalError
from fedcohort.core.protocol import RoundRequest
from fedcohort.journal import SCHEMA_VERSION, read_journal
from fedcohort.selectors import Balanced

KEPT = Path(__file__).parent


def old(folder: Path, name: str, version: str = "0.1") -> Path:
    path = folder / f"{name}.sqlite"
    path.write_bytes(gzip.decompress((KEPT / f"version-{version}" / f"{name}.sqlite.gz").read_bytes()))
    return path


@pytest.mark.parametrize("given", [None, Balanced()])
def test_a_selector_whose_rule_is_another_now_says_so(tmp_path: Path, given: Balanced | None) -> None:
    path = old(tmp_path, "balanced", "0.2")
    with pytest.raises(JournalError, match=r"'balanced' of another version.*absent"):
        Session.open(path, given)
    assert examine(path).sound
    with closing(read_journal(path)) as journal:
        assert len(journal.cohorts()) == 5


@pytest.mark.parametrize("name", ["flash"])
@pytest.mark.parametrize("words", [[], ["prune", "--keep", "1"], ["recover"], ["forget"], ["abandon"]])
def test_a_journal_that_cannot_go_on_is_left_as_it_was(tmp_path: Path, name: str, words: list[str]) -> None:
    path = old(tmp_path, name)
    before = path.read_bytes()
    if words:
        more = ["c3"] if words == ["forget"] else []
        done = CliRunner().invoke(app, ["journal", words[0], str(path), *words[1:], *more])
        assert done.exit_code == 1 or "nothing was changed" in done.output
    else:
        with pytest.raises(JournalError, match=r"continue it with fedcohort 0\.1\.0"):
            Session.open(path)
    assert path.read_bytes() == before
    assert not (tmp_path / f"{path.name}.new").exists()
    with closing(read_journal(path)) as journal:
        assert len(journal.cohorts()) == 5


@pytest.mark.parametrize("name", ["active-fl", "uniform", "fedacs"])
def test_a_journal_that_can_go_on_is_brought_to_this_version(tmp_path: Path, name: str) -> None:
    path = old(tmp_path, name)
    with Session.open(path) as session:
        assert session.round == 5 and session.ask(RoundRequest(3)).size == 3
    found = examine(path)
    assert found.version == SCHEMA_VERSION and found.sound
    assert not (tmp_path / f"{path.name}.new").exists()


def test_an_upgrade_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = old(tmp_path, "uniform")
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "replace", fail)
        with pytest.raises(JournalError, match="No space left"):
            Session.open(path)
    assert path.read_bytes() == before and not (tmp_path / f"{path.name}.new").exists()
    Session.open(path).close()


def test_a_reader_keeps_what_it_reads(tmp_path: Path) -> None:
    path = old(tmp_path, "uniform")
    with closing(read_journal(path)) as reader:
        Session.open(path).close()
        assert len(reader.cohorts()) == 5
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_an_honest_journal_is_not_called_wrong(tmp_path: Path) -> None:
    """The selector has changed since then, so replaying gives other cohorts."""
    path = old(tmp_path, "active-fl")
    done = CliRunner().invoke(app, ["journal", "verify", str(path)])
    assert done.exit_code == 0, done.output
    assert "cannot be checked: made by version 0.1.0" in " ".join(done.output.split())


@pytest.mark.parametrize("name", ["uniform", "fedacs"])
def test_one_whose_rule_is_the_same_is_checked(tmp_path: Path, name: str) -> None:
    assert {f.check: f.sound for f in examine(old(tmp_path, name)).findings}["replay"] is True
