"""Damaged journals: refused with a clear error, or nothing in them is different."""

import contextlib
import shutil
import sqlite3
import tempfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcohort import ClientTable, LabelCounts, Session, create
from fedcohort.core.errors import FedcohortError
from fedcohort.journal import read_journal
from fedcohort.session.explain import explain_round
from fedcohort.session.rules import Rules
from fedcohort.testing import ScriptedHost
from tests.snapshot import differences, session_state

from .budget import tried, tries
from .odd import damaged
from .sessions import MEMORY

LOT = st.integers(0, 2**31 - 1)
HOST = ScriptedHost(n=8)
NAME = "run.sqlite"


def made(folder: Path) -> dict[str, tuple[dict[str, bytes], dict]]:
    """Return journals by kind: their files, and the session each of them is."""
    found = {}
    table = ClientTable(names=list("abcdefgh"), sizes=HOST.table.sizes, labels=LabelCounts(HOST.table.label_counts))
    for kind, name, audit in (("closed", "fedcbs", False), ("live", "oort", False), ("audited", "balanced", True)):
        path = folder / kind / NAME
        path.parent.mkdir()
        shadows, rules = {"watcher": create("size-weighted")}, Rules(max_participations=9, blocked=("a",))
        session = Session(
            create(name), table, seed=3, signals=HOST.signals, journal=path, shadows=shadows, rules=rules, audit=audit
        )
        HOST.play(session, 4)
        session.leave(["b"])
        session.record(1, {"accuracy": 0.5})
        session.note("mine", {"x": 1})
        HOST.play(session, 2)
        if kind != "live":
            session.close()
        files = {file.name: file.read_bytes() for file in path.parent.iterdir() if not file.name.endswith("-shm")}
        session.close()
        with Session.open(path) as again:
            found[kind] = (files, session_state(again))
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return made(tmp_path_factory.mktemp("journals"))


def look(path: Path) -> dict:
    """Read all of a journal, go on with it, and return what the session is."""
    with contextlib.closing(read_journal(path)) as journal:
        table, _ = journal.table()
        journal.metrics(), journal.attributes(), journal.replies(), journal.reply_blocks()
        for row in journal.cohorts():
            journal.scores(row.ticket), journal.exclusions(row.ticket)
            explain_round(journal, row.round, table.names[0])
    with Session.open(path) as session:
        found = session_state(session)
        HOST.play(session, 1)
        return found


@tries("journal", of=2)
@given(lot=LOT)
def test_bytes(files, lot):
    """Some bytes of one of the files are others, are gone or are new."""
    r = Random(lot)
    tried("journal")
    kind = r.choice(list(files))
    whole, expected = files[kind]
    folder = Path(tempfile.mkdtemp(dir=MEMORY))
    spoilt = r.choice(list(whole))
    for name, data in whole.items():
        (folder / name).write_bytes(damaged(r, data) if name == spoilt else data)
    try:
        assert not differences(expected, look(folder / NAME)), f"{spoilt} of a {kind} journal was taken for whole"
    except FedcohortError as error:
        if len(str(error)) < 10:
            raise
    finally:
        shutil.rmtree(folder)


@tries("journal", of=2)
@given(lot=LOT)
def test_cells(files, lot):
    """A hand that knows SQLite changes a value, deletes a row or doubles one; the file itself is valid."""
    r = Random(lot)
    tried("journal")
    whole, expected = files[r.choice(["closed", "audited"])]
    folder = Path(tempfile.mkdtemp(dir=MEMORY))
    for name, data in whole.items():
        (folder / name).write_bytes(data)
    try:
        with contextlib.closing(sqlite3.connect(folder / NAME)) as db:
            tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            table = r.choice(tables)
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            rows = db.execute(f"SELECT * FROM {table}").fetchall()
            if not rows:
                return
            row = r.choice(rows)
            where = " AND ".join(f"{column} IS ?" for column in columns)
            if r.random() < 0.2:
                db.execute(f"DELETE FROM {table} WHERE {where}", row)
            else:
                at = r.randrange(len(columns))
                old = row[at]
                new = r.choice(
                    [None, 0, -1, 2**62, 1.5, float("inf"), "", "x", "{}", "[]", b"", b"\x00" * 40, r.randbytes(20)]
                )
                if isinstance(old, (bytes, str)) and old and r.random() < 0.6:
                    raw = damaged(r, old if isinstance(old, bytes) else old.encode())
                    new = raw if isinstance(old, bytes) else raw.decode("utf-8", "replace")
                with contextlib.suppress(sqlite3.Error):
                    db.execute(f"UPDATE {table} SET {columns[at]} = ? WHERE {where}", (new, *row))
            db.commit()
        assert not differences(expected, look(folder / NAME)), f"a change of {table} was not seen"
    except FedcohortError as error:
        if len(str(error)) < 10:
            raise
    finally:
        shutil.rmtree(folder)
