"""Journals on full disks, under several names, and in programs that are killed, forked or never close them."""

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedcohort import ClientTable, Session, create
from fedcohort.audit.verification import examine
from fedcohort.cli.app import app
from fedcohort.core.errors import JournalError
from fedcohort.core.protocol import RoundRequest
from fedcohort.journal import Journal, database, is_blank, read_journal
from fedcohort.journal.lock import Lock
from fedcohort.journal.opening import copy, snapshot
from fedcohort.report.dashboard.sessions import JournalItem
from fedcohort.report.exposition import exposition
from fedcohort.report.why import explain
from fedcohort.session.explain import explain_round
from fedcohort.testing import ScriptedHost

HOST = ScriptedHost()
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def played(path, rounds=6, **kwargs):
    session = Session(create("active-fl"), HOST.table, seed=3, signals=HOST.signals, journal=path, **kwargs)
    HOST.play(session, rounds)
    return session


def in_child(work):
    """Run ``work`` in a forked child; return what it printed as JSON."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, json.dumps(work()).encode())
        except BaseException as error:
            os.write(write, json.dumps(f"{type(error).__name__}: {error}").encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return json.loads(said) if said else None


def killed(path, rounds=6):
    """A journal whose process was killed."""

    def work():
        session = played(path, rounds)
        assert session.round == rounds
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(work) is None
    return path


# -- full disks -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def little_room(path, more):
    """Limit files to the size of the companion plus ``more`` bytes, so that a write fails as on a full disk."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(f"{path}-wal") + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def goes_on(session, path, expected):
    """Let the session finish what is pending and continue; its journal has the cohorts of an undisturbed one."""
    for cohort in session.pending:
        session.tell(HOST.report(cohort))
    HOST.play(session, len(expected) - session.round)
    session.close()
    with Session.open(path) as again:
        assert [tuple(c.clients.tolist()) for c in again.journal.cohorts()] == expected
    assert examine(path).valid


@pytest.mark.parametrize("more", [0, 30_000, 60_001])
def test_a_full_disk_is_an_error_and_loses_nothing(tmp_path, more):
    path = tmp_path / "j.sqlite"
    expected = HOST.play(HOST.session(create("active-fl"), seed=3), 30)
    session = played(path, 3)
    with little_room(path, more), pytest.raises(JournalError, match="could not be used"):
        HOST.play(session, 27)
    assert session.round < 30
    goes_on(session, path, expected)  # there is room again


@pytest.mark.parametrize("more", [0, 30_000])
def test_a_full_disk_leaves_no_hole_in_manual_mode(tmp_path, more):
    path = tmp_path / "j.sqlite"
    expected = HOST.play(HOST.session(create("active-fl"), seed=3), 20)
    session = played(path, 3, commit="manual")
    session.commit()
    HOST.play(session, 7)
    with little_room(path, more), pytest.raises(JournalError, match="has lost what was not committed"):
        session.commit()
    uses = (lambda: HOST.play(session, 1), session.commit, lambda: session.record(0, {"a": 1}), session.journal.last)
    for use in uses:
        with pytest.raises(JournalError, match=r"has lost what was not committed(.|\n)*Session.open"):
            use()
    session.close()
    with Session.open(path, commit="manual") as session:
        assert session.round == 3
        HOST.play(session, 17)
        session.commit()
        assert [tuple(c.clients.tolist()) for c in session.journal.cohorts()] == expected
    assert examine(path).valid


@pytest.mark.parametrize("which", ["the limit of SQLite", "the integers of its interface"])
def test_a_row_too_large_is_an_error_and_loses_nothing(tmp_path, monkeypatch, which):
    """The report of ten million clients would be too large. The limit is lowered, because rows of 2 GB take long."""
    path = tmp_path / "j.sqlite"
    expected = HOST.play(HOST.session(create("active-fl"), seed=3), 10)
    session = played(path, 3)
    base = session.journal.database
    usual = base.connection.getlimit(sqlite3.SQLITE_LIMIT_LENGTH)
    if which == "the limit of SQLite":
        base.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 300)
    else:
        monkeypatch.setattr(base, "append", too_large)
    with pytest.raises(JournalError, match=r"cannot hold so large a row(.|\n)*fewer clients"):
        HOST.play(session, 7)
    base.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, usual)
    monkeypatch.undo()
    goes_on(session, path, expected)


def too_large(*_):
    raise OverflowError("BLOB longer than INT_MAX bytes")


@pytest.mark.parametrize("commit", ["always", "manual"])
def test_an_interrupt_in_the_moment_of_a_commit_is_no_hole(tmp_path, monkeypatch, commit):
    """The commit is durable, but the session does not know it, so it must not continue."""
    path = tmp_path / "j.sqlite"
    expected = HOST.play(HOST.session(create("active-fl"), seed=3), 8)
    session = played(path, 3, commit=commit)
    session.commit()

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Lock, "mark", interrupted)
        with pytest.raises(KeyboardInterrupt):
            (HOST.play(session, 1), session.commit())
    with pytest.raises(JournalError, match=r"Session\.open"):
        HOST.play(session, 1)
    session.close()
    with Session.open(path) as session:
        for cohort in session.pending:
            session.tell(HOST.report(cohort))
        HOST.play(session, 8 - session.round)
        assert [tuple(c.clients.tolist()) for c in session.journal.cohorts()] == expected
    assert examine(path).valid


def test_a_full_disk_during_creation_leaves_nothing(tmp_path):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(JournalError):
            played(tmp_path / "j.sqlite", 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.glob("*.sqlite*[!k]"))  # at most the lock file
    played(tmp_path / "j.sqlite", 2).close()


# -- copies and companions --------------------------------------------------------------------------------------------


@needs_fork
def test_the_file_alone_of_a_journal_in_use_is_refused(tmp_path):
    path = killed(tmp_path / "j.sqlite")
    alone = tmp_path / "copy" / "j.sqlite"
    alone.parent.mkdir()
    shutil.copy(path, alone)
    for opened in (Session.open, read_journal, lambda p: explain(p, 0), read_journal):
        with pytest.raises(JournalError, match=r"j\.sqlite-wal.* missing") as caught:
            opened(alone)
        assert "journal copy" in caught.value.hint and "journal recover" in caught.value.hint
    assert not examine(alone).valid
    shutil.copy(f"{path}-wal", alone.parent)  # with its companion it is complete
    with Session.open(alone) as session:
        assert session.round == 6
    done = CliRunner().invoke(app, ["journal", "copy", str(path), str(tmp_path / "whole.sqlite")])
    assert "has 6 rounds" in done.output
    with Session.open(tmp_path / "whole.sqlite") as session:
        assert session.round == 6
    with pytest.raises(JournalError, match="exists"):
        copy(path, alone)


@needs_fork
@pytest.mark.parametrize("left", ["nothing", "half", "one bit flipped"])
def test_commits_that_are_gone_are_missed(tmp_path, left):
    """SQLite treats this damage as the end of the companion, and does not report it."""
    path = killed(tmp_path / "j.sqlite")
    wal = Path(f"{path}-wal")
    data = wal.read_bytes()
    if left == "nothing":
        wal.unlink()
    else:
        wal.write_bytes(
            data[: len(data) // 2] if left == "half" else data[:100_000] + bytes([data[100_000] ^ 1]) + data[100_001:]
        )
    for opened in (Session.open, read_journal):
        with pytest.raises(JournalError, match=r"newest \d+ of 13\b"):
            opened(path)
    done = CliRunner().invoke(app, ["journal", "recover", str(path)])
    assert done.exit_code == 0 and re.search(r"round \d+", done.output)
    again = CliRunner().invoke(app, ["journal", "recover", str(path)])
    assert again.exit_code == 0 and "nothing was changed" in again.output
    expected = HOST.play(HOST.session(create("active-fl"), seed=3), 8)
    with Session.open(path) as session:
        assert session.journal.events("recovered") == [{"round": session.round}]
        for cohort in session.pending:
            session.tell(HOST.report(cohort))
        HOST.play(session, 8 - session.round)
        assert [tuple(c.clients.tolist()) for c in session.journal.cohorts()] == expected
    assert examine(path).valid


def test_an_older_copy_in_the_place_of_a_journal_is_noticed(tmp_path):
    path = tmp_path / "j.sqlite"
    played(path).close()
    old = path.read_bytes()
    with Session.open(path) as session:
        HOST.play(session, 2)
    path.write_bytes(old)
    with pytest.raises(JournalError, match="an older copy"):
        Session.open(path)


@needs_fork
def test_the_file_itself_is_brought_up_to_date_regularly(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "CHECKPOINT_SECONDS", -1.0)
    path = killed(tmp_path / "j.sqlite")
    alone = tmp_path / "alone.sqlite"
    shutil.copy(path, alone)
    with closing(Journal.open(alone, accept_loss=True)) as journal:
        assert journal.last() == (5, 5)


@needs_fork
def test_a_companion_without_its_journal_is_not_overwritten(tmp_path):
    path = killed(tmp_path / "j.sqlite")
    path.rename(tmp_path / "moved.sqlite")
    with pytest.raises(JournalError, match=r"j\.sqlite-wal"):
        played(path)


def test_a_program_that_ends_without_closing_leaves_a_closed_journal(tmp_path):
    script = (
        "import sys; from fedcohort import *; from fedcohort.testing import ScriptedHost\n"
        "host = ScriptedHost()\n"
        "kept = host.session(create('uniform'), journal=sys.argv[1]); host.play(kept, 4)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "j.sqlite")], check=True)
    shutil.copy(tmp_path / "j.sqlite", tmp_path / "alone.sqlite")
    with closing(read_journal(tmp_path / "alone.sqlite")) as journal:
        assert journal.last() == (3, 3)
    found = examine(tmp_path / "alone.sqlite")
    assert found.valid and found.head is not None and not found.head.in_use


def test_a_snapshot_of_a_journal_in_use_is_whole(tmp_path):
    with played(tmp_path / "j.sqlite", commit="manual") as session:
        session.commit()
        HOST.play(session, 1)
        (tmp_path / "copy.sqlite").write_bytes(snapshot(tmp_path / "j.sqlite"))
    with Session.open(tmp_path / "copy.sqlite", commit="manual") as session:
        assert session.round == 6


# -- names, forks, folders --------------------------------------------------------------------------------------------


def test_a_symbolic_link_has_the_lock_of_its_target(tmp_path):
    path, link = tmp_path / "j.sqlite", tmp_path / "there" / "link.sqlite"
    link.parent.mkdir()
    link.symlink_to(path)
    assert is_blank(link)
    with played(link):  # also through a link whose target does not exist yet
        assert path.exists() and link.is_symlink()
        with pytest.raises(JournalError, match="in use"):
            Session.open(path)
    with Session.open(path):
        with pytest.raises(JournalError, match="in use"):
            Session.open(link)
        assert len(read_journal(link).cohorts()) == 6
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(JournalError):
        Session.open(loop)


@needs_fork
@pytest.mark.parametrize("commit", ["always", "manual"])
def test_a_forked_child_cannot_write(tmp_path, commit):
    path = tmp_path / "j.sqlite"
    expected = HOST.play(HOST.session(create("active-fl"), seed=3), 9)
    session = played(path, commit=commit)
    session.commit()

    def child():
        said = []
        for use in (lambda: HOST.play(session, 1), lambda: session.record(0, {"a": 1}), session.journal.last):
            with contextlib.suppress(JournalError):
                use()
                said.append("wrote")
        with closing(read_journal(path)) as journal:
            said.append(journal.last()[0])
        session.close()
        return said

    assert in_child(child) == [5]
    assert "belongs to the parent" in in_child(lambda: HOST.play(session, 1))
    HOST.play(session, 3)
    session.commit()
    session.close()
    with Session.open(path) as session:
        assert [tuple(c.clients.tolist()) for c in session.journal.cohorts()] == expected


@needs_fork
def test_a_child_that_lives_longer_does_not_hold_the_lock(tmp_path):
    session = played(tmp_path / "j.sqlite")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent has continued
        os._exit(0)
    session.close()
    with Session.open(tmp_path / "j.sqlite") as session:
        assert session.round == 6
    os.close(write)
    os.waitpid(child, 0)


@pytest.fixture
def readable():
    """A folder that other users can reach."""
    folder = Path(tempfile.mkdtemp(prefix="fedcohort-test-"))
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def unprivileged(work):
    """Run ``work`` as a user who cannot write to read-only folders."""

    def lowered():
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        return work()

    return in_child(lowered)


@needs_fork
@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_read_only_folder_is_read(readable, how):
    path = readable / "j.sqlite"
    played(path).close() if how == "closed" else killed(path)
    Path(f"{path}-shm").unlink(missing_ok=True)
    path.chmod(0o666)
    Path(f"{path}.lock").unlink()
    readable.chmod(0o555)
    before = sorted(file.name for file in readable.iterdir())

    def look():
        with closing(read_journal(path)) as journal:
            why = explain_round(journal, 2).reason
        shown = JournalItem(path, "j")
        shown.poll()
        scraped = 'rounds_total{journal="j"} 6' in exposition({"j": path})
        return [why, scraped, shown.overview()["done"], examine(path).valid]

    assert unprivileged(look) == ["Round 2: 3 of 12 candidates were picked.", True, 6, True]
    assert "a session needs a folder it can write to" in unprivileged(lambda: Session.open(path) and None)
    assert sorted(file.name for file in readable.iterdir()) == before


@needs_fork
def test_a_read_only_file_is_read_and_not_continued(readable):
    path = readable / "j.sqlite"
    played(path).close()
    path.chmod(0o444)
    readable.chmod(0o777)
    assert unprivileged(lambda: closing(read_journal(path)).__enter__().last()[0]) == 5
    assert "is read-only" in unprivileged(lambda: Session.open(path) and None)
    path.chmod(0o000)
    assert "Permission denied" in unprivileged(lambda: read_journal(path) and None)


def test_a_folder_is_no_journal(tmp_path):
    for opened in (Session.open, read_journal):
        with pytest.raises(JournalError, match="not a file"):
            opened(tmp_path)


@needs_fork
def test_a_kill_during_creation_leaves_nothing_in_the_way(tmp_path, die_after):
    """Killed at every eightieth line of Python while the journal is created; after that, it can be created again."""
    cut = 0
    for lines in range(1, 100_000, 80):
        path = tmp_path / f"{lines}.sqlite"

        def work(path=path, lines=lines):
            die_after(lines)
            session = Session(create("uniform"), ClientTable(n=9), journal=path)
            sys.settrace(None)
            session.close()
            return "whole"

        whole = in_child(work) == "whole"
        cut += not path.exists()
        if not whole and path.exists():
            assert examine(path).valid
        with Session.open_or_create(path, create("uniform"), ClientTable(n=9)) as session:
            session.ask(RoundRequest(size=1))
        assert sorted(file.name for file in tmp_path.glob(f"{lines}.*")) == [path.name, f"{path.name}.lock"]
        if whole:
            break
    assert cut > 3
