"""The journal: durable, checked, lockable, small."""

import contextlib
import dataclasses
import sqlite3
from functools import partial

import numpy as np
import pytest

from fedcohort import ClientTable, LabelCounts, Session, create
from fedcohort.core.clients import LabelFactor, LabelGram
from fedcohort.core.errors import JournalError
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.journal import ReplyBlock, read_journal
from fedcohort.journal.codec import changed_rows, pack, pack_many, unpack, unpack_many
from fedcohort.journal.opening import copy
from fedcohort.testing import ScriptedHost


@pytest.mark.parametrize("dtype", ["f8", "f4", "i8", "i2", "?", "u1"])
def test_arrays_survive(dtype):
    array = np.array([[0, 1], [2, 3]], dtype)
    back = unpack(pack(array))
    assert back.dtype == array.dtype and np.array_equal(back, array) and not back.flags.writeable
    many = unpack_many(pack_many({"a": array, "b": np.empty((0, 3))}))
    assert np.array_equal(many["a"], array) and many["b"].shape == (0, 3)


def test_changed_rows_compares_bits():
    old = np.array([[0.0, np.nan], [1.0, 2.0], [0.0, 0.0]])
    new = old.copy()
    assert len(changed_rows(old, new)) == 0
    new[2, 1] = -0.0
    assert changed_rows(old, new).tolist() == [2]
    assert changed_rows(old, new[:2]) is None
    assert changed_rows(np.empty((0, 4)), np.empty((0, 4))).tolist() == []


def test_an_existing_journal_is_never_overwritten(tmp_path):
    path = tmp_path / "j.sqlite"
    Session(create("uniform"), ClientTable(n=3), journal=path).close()
    with pytest.raises(JournalError):
        Session(create("uniform"), ClientTable(n=3), journal=path)


def test_a_missing_journal_or_folder(tmp_path):
    with pytest.raises(JournalError):
        Session.open(tmp_path / "none.sqlite")
    with pytest.raises(JournalError):
        Session(create("uniform"), ClientTable(n=3), journal=tmp_path / "a" / "j.sqlite")


def test_a_damaged_journal_is_an_error(tmp_path):
    path = tmp_path / "j.sqlite"
    host = ScriptedHost()
    with host.session(create("active-fl"), journal=path) as session:
        host.play(session, 30)
    data = bytearray(path.read_bytes())
    data[200 : len(data) // 2] = bytes(len(data) // 2 - 200)
    path.write_bytes(data)
    with pytest.raises(JournalError):
        Session.open(path)
    path.write_bytes(b"this is no database" * 100)
    with pytest.raises(JournalError):
        Session.open(path)
    with pytest.raises(JournalError):
        Session(create("uniform"), ClientTable(n=3), journal=path)


def test_a_declaration_that_is_no_text_is_an_error(tmp_path):
    path = tmp_path / "j.sqlite"
    Session(create("uniform"), ClientTable(n=3), journal=path).close()
    data = path.read_bytes()
    assert b"CREATE TABLE" in data
    path.write_bytes(data.replace(b"CREATE TABLE", b"CREATE \xf3ABLE", 1))  # SQLite's own message quotes it
    for read in (Session.open, read_journal, partial(copy, to=tmp_path / "copy.sqlite")):
        with pytest.raises(JournalError):
            read(path)
    with pytest.raises(JournalError):
        Session(create("uniform"), ClientTable(n=3), journal=path)


def test_another_schema_and_a_foreign_database_are_errors(tmp_path):
    path = tmp_path / "j.sqlite"
    Session(create("uniform"), ClientTable(n=3), journal=path).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(JournalError, match=r"format 99\b"):
        Session.open(path)
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 1")
    for opened in (Session.open, read_journal):
        with pytest.raises(JournalError, match=r"format 1\b"):
            opened(path)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE t (x)")
    with pytest.raises(JournalError):
        Session.open(other)


def test_two_sessions_cannot_write_one_journal(tmp_path):
    path = tmp_path / "j.sqlite"
    with Session(create("uniform"), ClientTable(n=3), journal=path) as session:
        with pytest.raises(JournalError):
            Session.open(path)
        session.ask(RoundRequest(size=1))
        assert len(read_journal(path).cohorts()) == 1  # reading is always possible
    with Session.open(path) as session:
        assert session.round == 1


def test_another_selector_cannot_continue(tmp_path):
    path = tmp_path / "j.sqlite"
    Session(create("power-of-choice", d=7), ClientTable(sizes=[1] * 9), journal=path).close()
    with pytest.raises(JournalError):
        Session.open(path, create("power-of-choice", d=8))
    with Session.open(path) as session:
        assert session.selector.d == 7


def test_open_or_create_survives_a_cut_off_creation(tmp_path):
    path = tmp_path / "j.sqlite"
    sqlite3.connect(path).execute("PRAGMA journal_mode = WAL")  # what is left by a kill at the first instruction
    with Session.open_or_create(path, create("uniform"), ClientTable(n=4)) as session:
        session.ask(RoundRequest(size=1))
    with Session.open_or_create(path, create("uniform"), ClientTable(n=4)) as session:
        assert session.round == 1 and len(session.pending) == 1


@pytest.mark.parametrize(
    "labels",
    [LabelCounts([[1, 2], [3, 4]]), LabelFactor([[1.0, 2.0], [3.0, -4.0]], 2), LabelGram([[5.0, 1.0], [1.0, 9.0]], 2)],
)
def test_every_label_form_survives(tmp_path, labels):
    path = tmp_path / "j.sqlite"
    table = ClientTable(names=["a", "b"], sizes=[3, 7], labels=labels)
    Session(create("uniform"), table, journal=path).close()
    with Session.open(path) as session:
        assert type(session.table.labels) is type(labels)
        assert session.table.names == ("a", "b") and session.table.signals == table.signals


def test_partial_reports_membership_and_host_state_survive(tmp_path):
    path = tmp_path / "j.sqlite"
    with Session(create("uniform"), ClientTable(names=list("abcd")), journal=path, seed=5) as session:
        cohort = session.ask(RoundRequest(size=2))
        session.tell(RoundReport(cohort.ticket, [cohort.names[0]], complete=False))
        session.leave([n for n in "abcd" if n not in cohort.names][:1])
    with Session.open(path) as session:
        (pending,) = session.pending
        assert pending.names == cohort.names
        assert session.active.sum() == 3
        session.tell(RoundReport(pending.ticket, [pending.names[1]]), host={"checkpoint": "model-1"})
    with Session.open(path) as session:
        assert session.host_state == {"checkpoint": "model-1"} and not session.pending


def test_manual_commit_drops_what_was_not_committed(tmp_path):
    path = tmp_path / "j.sqlite"
    host = ScriptedHost()
    session = Session(create("active-fl"), host.table, signals=host.signals, journal=path, commit="manual")
    first = host.play(session, 4)
    session.commit()
    rest = host.play(session, 3)
    session.close()
    with Session.open(path, commit="manual") as session:
        assert session.round == 4
        assert host.play(session, 3) == rest
        assert [tuple(c.clients.tolist()) for c in session.journal.cohorts()] == first + rest


def test_states_are_saved_by_rows(tmp_path):
    """At a size at which whole states would cost too much, a round writes only what it changed."""
    path = tmp_path / "j.sqlite"
    host = ScriptedHost(n=50_000)
    with host.session(create("active-fl"), journal=path) as session:
        before = path.stat().st_size + (tmp_path / "j.sqlite-wal").stat().st_size
        host.play(session, 20, size=10)
        after = path.stat().st_size + (tmp_path / "j.sqlite-wal").stat().st_size
        valuation = session.state.valuation
    assert (after - before) / 20 < 0.5 * valuation.nbytes
    with Session.open(path) as session:
        assert np.array_equal(session.state.valuation, valuation, equal_nan=True)
        host.play(session, 5, size=10)


def test_changed_rows_of_an_event_that_failed_leave_no_trace(tmp_path):
    """The failed event wrote the whole array; the rows that it deleted are back and must be deleted again."""
    path = tmp_path / "j.sqlite"
    first = np.zeros(50_000)
    second = np.where(np.arange(50_000) == 7, 1.0, first)
    with ScriptedHost(n=4).session(create("uniform"), journal=path) as session:
        journal = session.journal
        for values in (first, second):
            with journal.event():
                journal.save_fields("shadow", [("values", values)])
        assert journal.database.fetch("SELECT COUNT(*) FROM deltas") == [(1,)]
        with pytest.raises(TypeError), journal.event():
            journal.save_fields("shadow", [("values", second + 1), ("bad", object())])
        with journal.event():
            journal.save_fields("shadow", [("values", second + 2)])
        assert journal.database.fetch("SELECT COUNT(*) FROM deltas") == [(0,)]
    with contextlib.closing(read_journal(path)) as record:
        assert np.array_equal(record.state("shadow")["values"], second + 2)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_block_of_replies_keeps_every_bit(count):
    rng = np.random.default_rng(count)
    loss = rng.normal(size=count)
    loss[::2] = np.nan
    rows = rng.normal(size=(count, 64))
    rows[1::2, 3] = np.nan
    block = ReplyBlock(
        3,
        12.5,
        True,
        rng.integers(0, 1 << 40, count),
        rng.integers(0, 5, count).astype(np.int8),
        rng.random(count) < 0.5,
        {"loss": loss, "update-sketch": rows, "update-norm": np.nextafter(rng.random(count), 1)},
    )
    again = ReplyBlock.decode(3, 12.5, True, block.encode())
    for name in ("clients", "status", "kept"):
        found = getattr(again, name)
        np.testing.assert_array_equal(found, getattr(block, name))
        assert found.dtype == getattr(block, name).dtype and not found.flags.writeable
    assert again.metrics.keys() == block.metrics.keys()
    assert all(again.metrics[name].tobytes() == block.metrics[name].tobytes() for name in block.metrics)
    assert all(again.metrics[name].shape == block.metrics[name].shape for name in block.metrics)
    assert [set(row.metrics) for row in again.rows()] == [
        {"update-norm", "update-sketch"} if np.isnan(value) else {"loss", "update-norm"} for value in loss
    ]
    for place, row in enumerate(again.rows()[::2]):
        assert row.metrics["update-sketch"] == tuple(rows[2 * place].tolist())


@pytest.mark.parametrize(
    "column", [np.zeros(10), np.full(10, np.nan), np.arange(10) / 4, np.arange(10) / 3, [-0.0, 0.0] * 5]
)
def test_columns_of_replies_that_need_few_bytes_keep_every_bit(column):
    block = ReplyBlock(
        3, 12.5, False, np.arange(10), np.zeros(10, np.int8), np.ones(10, bool), {"loss": np.array(column)}
    )
    again = ReplyBlock.decode(3, 12.5, False, block.encode())
    assert again.metrics["loss"].tobytes() == block.metrics["loss"].tobytes()
    np.testing.assert_array_equal(again.status, block.status)
    np.testing.assert_array_equal(again.kept, block.kept)
    wide = ReplyBlock(3, 12.5, False, np.arange(10) << 40, block.status, block.kept, block.metrics)
    assert len(block.encode()) < len(wide.encode())


def test_partial_reports_survive_a_restart_between_them(tmp_path):
    """A report in two parts, with a restart in between, out of order and without one client, equals a single report."""
    found = []
    for name, parts in (("whole", 1), ("parts", 2)):
        path = tmp_path / name
        with Session(create("active-fl"), ClientTable(sizes=[3, 1, 4, 1, 5, 9]), seed=2, journal=path) as session:
            cohort = session.ask(RoundRequest(size=5))
            order = cohort.clients[[3, 0, 4, 1]]
            loss = order + 0.25
            if parts == 2:
                session.tell(RoundReport(cohort.ticket, order[:3], metrics={"loss": loss[:3]}, complete=False))
        with Session.open(path) as session:
            rest = slice(3, None) if parts == 2 else slice(None)
            session.tell(RoundReport(cohort.ticket, order[rest], metrics={"loss": loss[rest]}))
            rows = [(r.client, r.status, r.kept, r.metrics) for r in session.journal.replies(cohort.ticket)]
            found.append((rows, session.state))
    (rows, state), (others, other) = found
    assert rows == others and [r[0] for r in rows] == sorted(cohort.clients.tolist())
    assert {r[0]: r[3] for r in rows} == {**{int(c): {"loss": c + 0.25} for c in order}, int(cohort.clients[2]): {}}
    for field in dataclasses.fields(state):
        np.testing.assert_array_equal(getattr(state, field.name), getattr(other, field.name))


def test_a_selector_without_scores_still_says_whom_it_picked(tmp_path):
    with Session(create("uniform"), ClientTable(n=9), journal=tmp_path / "j") as session:
        cohort = session.ask(RoundRequest(size=3))
        picked, arrays, note = session.journal.scores(cohort.ticket)[""]
    assert picked.tolist() == cohort.clients.tolist() and arrays == {} and note is None
