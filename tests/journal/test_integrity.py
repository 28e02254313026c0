"""Journals that are not as they were written: flipped bits, changed rows; and the command verify."""

import json
import os
import random
import shutil
import signal
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedcohort import ClientTable, Session, Signal, Status, create
from fedcohort.cli.app import app
from fedcohort.core.errors import JournalError
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.journal import Journal, read_journal
from fedcohort.journal.maintenance import tables
from fedcohort.session.rules import Rules
from fedcohort.testing import ScriptedHost

HOST = ScriptedHost()
TABLE = ClientTable(names=["a", "b", "c"], sizes=[1, 2, 3])
NAMES = [f"clinic-{i}" for i in range(9)]
FILES = ("", "-wal", ".lock")


def a_round(session: Session) -> tuple[str, ...]:
    """One round with a failure; the report depends only on the round."""
    cohort = session.ask(RoundRequest(size=3))
    loss = 1.0 + cohort.clients + 0.25 * cohort.round
    status = [Status.FAILED if i == cohort.round % 5 else Status.OK for i in range(cohort.size)]
    session.tell(RoundReport(cohort.ticket, cohort.clients, status, {Signal.LOSS: loss}), host={"model": cohort.round})
    session.record(cohort.round, {"accuracy": 0.1 * cohort.round, "loss": 2.0})
    return cohort.names


def written(path: Path, rounds: int = 12) -> Session:
    """A session with shadows, rules, attributes, members that come and go, partial, failed and late reports."""
    table = ClientTable(names=NAMES[:8], sizes=range(10, 18))
    rules = Rules(blocked=(NAMES[5],), max_participations=40)
    session = Session(create("active-fl"), table, seed=4, journal=path, shadows={"u": create("uniform")}, rules=rules)
    for round_ in range(rounds):
        if round_ == 2:
            session.join(ClientTable(names=NAMES[8:], sizes=[30]))
        if round_ == 3:
            session.leave([NAMES[1]])
            session.set_attributes({NAMES[2]: {"battery": 0.5}})
        if round_ == 4:
            cohort = session.ask(RoundRequest(size=2, available=[0, 2, 3, 4]))
            session.tell(RoundReport(cohort.ticket, cohort.clients[:1], metrics={Signal.LOSS: [0.5]}, complete=False))
            session.abandon(cohort.ticket, "the power failed")
            session.rejoin([NAMES[1]])
        a_round(session)
    return session


def contents(journal: Journal) -> str:
    """Everything that can be read from a journal, as text."""
    rows = journal.cohorts()
    table, active = journal.table()
    return repr(
        [
            journal.meta(),
            [journal.state(name) for name in ("", "u")],
            rows,
            [journal.scores(row.ticket) for row in rows],
            [journal.cohorts(round_=row.round) for row in rows],
            [journal.replies(row.ticket) for row in rows],
            [journal.candidates(row.ticket, table.n).tolist() for row in rows],
            [journal.exclusions(row.ticket) for row in rows],
            [table.names, table.sizes.tolist(), active.tolist(), journal.attributes()],
            tables(journal),
        ]
    )


def copied(path: Path, to: Path) -> Path:
    """A copy of a journal and the files next to it."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    for end in FILES:
        if Path(f"{path}{end}").exists():
            shutil.copy(f"{path}{end}", to)
    return to / path.name


def flips(path: Path, end: str, count: int, seed: int, folder: Path) -> Counter[str]:
    """Flip single bits of one of a journal's files; return how often each was ``damaged``, ``harmless`` or ``SILENT``.

    Harmless means that everything reads as before and the session goes on with the same cohorts.
    """
    with closing(read_journal(copied(path, folder))) as journal:
        expected = contents(journal)
    with Session.open(folder / path.name) as session:
        following = [a_round(session) for _ in range(2)]
    size = os.path.getsize(f"{path}{end}")
    rng = random.Random(seed)
    found: Counter[str] = Counter()
    for bit in sorted(rng.sample(range(8 * size), count)):
        file = copied(path, folder)
        with open(f"{file}{end}", "r+b") as damaged:
            damaged.seek(bit // 8)
            byte = damaged.read(1)[0] ^ (1 << bit % 8)
            damaged.seek(bit // 8)
            damaged.write(bytes([byte]))
        try:
            with closing(read_journal(file)) as journal:
                same = contents(journal) == expected
            with Session.open(file) as session:
                same &= [a_round(session) for _ in range(2)] == following
        except JournalError:
            found["refused"] += 1
        else:
            found["harmless" if same else f"SILENT at bit {bit}"] += 1
    return found


# -- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("end", "count"), [("", 40), ("-wal", 40), (".lock", 10)])
def test_a_flipped_bit_is_noticed_or_changes_nothing(tmp_path, end, count):
    path = tmp_path / "j.sqlite"
    if end == "":
        written(path).close()
    else:
        child = os.fork()
        if child == 0:
            session = written(path)
            assert session.round == 12
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
    found = flips(path, end, count, 1, tmp_path / "copy")
    assert sum(found.values()) == count and set(found) <= {"refused", "harmless"}, found
    assert end == ".lock" or found["refused"] > 0


@pytest.mark.slow
def test_six_hundred_flipped_bits(tmp_path):
    path = tmp_path / "j.sqlite"
    written(path, 60).close()
    found = flips(path, "", 600, 2, tmp_path / "copy")
    print(dict(found))
    assert sum(found.values()) == 600 and set(found) <= {"refused", "harmless"}, found


# -- verify -----------------------------------------------------------------------------------------------------------


def verified(path, *options):
    done = CliRunner().invoke(app, ["journal", "verify", str(path), *options])
    return done.exit_code, done.output


def test_verify_says_what_it_found(tmp_path):
    path = tmp_path / "j.sqlite"
    with Session(create("active-fl"), TABLE, seed=4, journal=path) as session:
        for round_ in range(5):
            cohort = session.ask(RoundRequest(size=2))
            session.tell(RoundReport(cohort.ticket, cohort.clients, metrics={Signal.LOSS: 1.0 + cohort.clients}))
            if round_ == 2:
                session.change_selector(create("active-fl", alpha1=0.5))
                session.join(ClientTable(names=["d"], sizes=[4]))
        code, said = verified(path)  # while it is in use
        assert code == 0 and "in use" in said
    code, said = verified(path)
    assert code == 0 and "all 5 cohorts and the selector's state follow from seed and reports" in said
    code, said = verified(path, "--format", "json", "--no-replay")
    found = json.loads(said)
    assert code == 0 and found["valid"] and found["version"] == 5 and not found["in_use"]
    assert [check["check"] for check in found["checks"]] == ["file", "rows", "events", "order"]
    with closing(Journal.open(path)) as journal, journal.event():
        journal.database.change("cohorts", (3,), clients=journal.database.fetch("SELECT clients FROM cohorts")[0][0])
    code, said = verified(path)
    assert code == 1 and "Round 3 does not follow from its seed and inputs" in said and "something is WRONG" in said


def test_verify_names_the_row_that_was_changed(tmp_path):
    path = tmp_path / "j.sqlite"
    with HOST.session(create("active-fl"), journal=path) as session:
        HOST.play(session, 6)
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE cohorts SET round = 7 WHERE ticket = 2")
        db.execute("DELETE FROM replies WHERE id = 4")
        db.commit()
    code, said = verified(path)
    assert code == 1
    assert "the row of cohorts with ticket 2 is not as it was written" in said
    assert "replies lacks rows as they were written: 1" in said
    with pytest.raises(JournalError, match="row of cohorts with ticket 2"):
        Session.open(path)


def test_verify_finds_what_cannot_be_read_although_the_chain_holds(tmp_path):
    path = tmp_path / "j.sqlite"
    written(path, 4).close()
    with closing(Journal.open(path)) as journal, journal.event():
        journal.database.change("cohorts", (2,), clients=b"\0")
    code, said = verified(path)
    assert code == 1 and "contents WRONG  cannot be read" in said


def test_verify_says_what_cannot_be_replayed(tmp_path):
    HOST.play(HOST.session(create("power-of-choice"), journal=tmp_path / "a"), 2)
    code, said = verified(tmp_path / "a")
    assert code == 0 and "not possible: PowerOfChoice asks clients before it chooses" in said
    Session(create("power-of-choice"), HOST.table, signals=HOST.signals, journal=tmp_path / "b", audit=True).close()
    with Session.open(tmp_path / "b") as session:
        HOST.play(session, 2)
    code, said = verified(tmp_path / "b")
    assert code == 0 and "all 2 cohorts follow from the seed" in said
    written(tmp_path / "c").close()
    code, said = verified(tmp_path / "c")
    assert code == 0 and "rules    ok     held in every round" in said and "attributes that clients report" in said
