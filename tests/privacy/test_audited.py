"""Journals that are what they say, and every way of changing one that must be found out."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedcohort import (
    Answer,
    ClientTable,
    Cohort,
    LabelCounts,
    LabelGram,
    RoundReport,
    RoundRequest,
    Session,
    Signal,
    Slate,
    Status,
    create,
)
from fedcohort.cli.app import app
from fedcohort.clients import LabelGramRows
from fedcohort.errors import JournalError
from fedcohort.journal.codec import pack
from fedcohort.journal.database import Seal
from fedcohort.journal.schema import TABLES
from fedcohort.privacy.audited import verify
from fedcohort.selectors import FedCBS

COUNTS = np.random.default_rng(0).integers(0, 20, (14, 4))


def play(path: Path, selector: str = "fedcbs", seed: int = 3) -> list[str]:
    """A session with everything in it: queries, partial, failed and late reports, join, leave, return, restart."""
    rng = np.random.default_rng(1)
    gram = COUNTS @ COUNTS.T
    names = [f"c{i}" for i in range(14)]
    sizes = COUNTS.sum(axis=1)
    table = ClientTable(names=names[:12], sizes=sizes[:12], labels=LabelGram(gram[:12, :12], 4))
    session = Session(create(selector), table, seed=seed, journal=path, audit=True)
    kept = []
    for round_ in range(12):
        if round_ == 4:
            rows = LabelGramRows(gram[12:], 4)
            session.join(ClientTable(names=names[12:], sizes=sizes[12:], labels=rows))
        if round_ == 5:
            session.leave(["c1", "c2"])
        if round_ == 6:
            session.update_facts(ClientTable(names=names, sizes=sizes + 1, labels=LabelGram(gram, 4)))
            question = session.query(RoundRequest(size=3))
            losses = None if question is None else Answer(question, {Signal.LOSS: rng.random(len(question.clients))})
            given_up = session.ask(RoundRequest(size=3), losses)
            session.tell(RoundReport(given_up.ticket, given_up.clients[:1], status=[Status.FAILED], complete=False))
            session.abandon(given_up.ticket, "nobody came")
        if round_ == 7:
            session.rejoin(["c2"])
            session.close()
            session = Session.open(path)
        available = None if round_ % 3 else rng.choice(session.table.n, 9, replace=False)
        request = RoundRequest(size=4, available=available)
        query = session.query(request)
        answer = None
        if query is not None:
            answer = Answer(query, {Signal.LOSS: rng.random(len(query.clients))})
        cohort = session.ask(request, answer)
        kept.append(session.journal.commitment or "")
        metrics = {s: rng.random((cohort.size, *(() if s.width is None else (4,)))) for s in session.requires}
        metrics = {s: v for s, v in metrics.items() if s is not Signal.KEPT}
        if round_ == 2:
            first = {s: v[:2] for s, v in metrics.items()}
            session.tell(RoundReport(cohort.ticket, cohort.clients[:2], metrics=first, complete=False))
            session.tell(
                RoundReport(cohort.ticket, cohort.clients[2:3], metrics={s: v[2:3] for s, v in metrics.items()})
            )
            session.tell(RoundReport(cohort.ticket, cohort.clients[3:], complete=True))  # late
            continue
        status = [Status.OK] * cohort.size
        if round_ == 3:
            status[0] = Status.FAILED
        session.tell(RoundReport(cohort.ticket, cohort.clients, status=status, metrics=metrics))
    session.close()
    return kept


@pytest.mark.parametrize("selector", ["fedcbs", "uniform", "power-of-choice", "active-fl", "fedcm-ts", "flash"])
def test_honest_journals_are_confirmed(tmp_path: Path, selector: str) -> None:
    path = tmp_path / "run.sqlite"
    kept = play(path, selector)
    found = verify(path, seed=3, receipts=dict.fromkeys(kept, "kept"))
    assert found.problem is None and found.confirmed and found.rounds == 13
    assert len(set(kept)) == 12
    assert sum(found.picked.values()) >= 40 and found.candidate["c0"] <= 13


def tampered(tmp_path: Path, *statements: tuple[str, tuple[Any, ...]]) -> Path:
    path, copy = tmp_path / "run.sqlite", tmp_path / "copy.sqlite"
    play(path)
    shutil.copy(path, copy)
    with sqlite3.connect(copy) as db:
        for statement, arguments in statements:
            db.execute(statement, arguments)
        _resealed(db)
    return copy


def _resealed(db: sqlite3.Connection) -> None:
    """Whoever changes a journal on purpose makes its checksums fit; they are no secret."""
    tables = {}
    for name, table in TABLES.items():
        rows = db.execute(f"SELECT {table.names} FROM {name}").fetchall()
        db.execute(f"DELETE FROM {name}")
        db.executemany(table.insert, [(*row, table.sum(row)) for row in rows])
        tables[name] = (len(rows), sum(table.sum(row) for row in rows) % (1 << 64))
    dataclasses.replace(Seal.read(db), tables=tables).write(db)


def test_a_changed_cohort_breaks_the_chain(tmp_path: Path) -> None:
    path = tampered(tmp_path, ("UPDATE cohorts SET clients = ? WHERE ticket = 5", (pack(np.array([0, 3, 5, 6])),)))
    found = verify(path)
    assert not found.confirmed and found.rounds == 5
    assert "Round 5 was changed" in str(found.problem)


def test_changed_reports_candidates_and_answers_break_the_chain(tmp_path: Path) -> None:
    for change in (
        ("UPDATE replies SET data = (SELECT data FROM replies WHERE id = 1) WHERE id = 6", ()),
        ("UPDATE replies SET late = 1 WHERE id = 8", ()),
        ("UPDATE cohorts SET candidates = NULL WHERE ticket = 6", ()),
        ("UPDATE chain SET data = X'5b5d0a' WHERE kind = 'table' AND id > 5", ()),
        ("DELETE FROM chain WHERE id = 9", ()),
        ("UPDATE meta SET value = '4' WHERE key = 'seed'", ()),
        ("DELETE FROM cohorts WHERE ticket = 8", ()),
    ):
        folder = tmp_path / str(abs(hash(change)))
        folder.mkdir()
        path = tampered(folder, change)
        assert not verify(path).confirmed, change


def test_a_server_that_chains_what_it_likes_is_found_by_recomputing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain is whole, but the cohort is not what seed and inputs give: colluders were picked on purpose."""
    path = tmp_path / "run.sqlite"
    table = ClientTable(names=[f"c{i}" for i in range(14)], labels=LabelCounts(COUNTS))
    honest = FedCBS.select

    def colluding(self: FedCBS, state: Any, slate: Slate, answer: Answer | None, rng: np.random.Generator) -> Any:
        cohort, state = honest(self, state, slate, answer, rng)
        return (Cohort([11, 12, 13]) if slate.round == 4 else cohort), state

    with monkeypatch.context() as server:
        server.setattr(FedCBS, "select", colluding)
        session = Session(FedCBS(), table, seed=3, journal=path, audit=True)
        for _ in range(6):
            cohort = session.ask(RoundRequest(size=3))
            session.tell(RoundReport(cohort.ticket, cohort.clients))
        session.close()
    found = verify(path)
    assert not found.confirmed and found.rounds == 4
    assert "Round 4 does not follow" in str(found.problem)


def test_another_seed_or_another_journal_is_found_by_what_was_kept(tmp_path: Path) -> None:
    kept = play(tmp_path / "a.sqlite", seed=3)
    play(tmp_path / "b.sqlite", seed=4)
    assert "not 3, which was agreed on" in str(verify(tmp_path / "b.sqlite", seed=3).problem)
    swapped = verify(tmp_path / "b.sqlite", receipts={kept[5]: "client c4"})
    assert not swapped.confirmed and "client c4" in str(swapped.problem)


def test_a_cohort_outside_the_chain(tmp_path: Path) -> None:
    path = tampered(
        tmp_path,
        (
            "INSERT INTO cohorts SELECT 0, 13, 99, asked_at, told_at, wanted, n_candidates, candidates, clients, "
            "weights, work, notes, stop FROM cohorts WHERE ticket = 11",
            (),
        ),
    )
    assert "Round 99 is on record but not in the chain" in str(verify(path).problem)


def test_command(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    kept = play(path)
    (tmp_path / "kept.txt").write_text("".join(f"{c} round {i}\n" for i, c in enumerate(kept)))
    run = CliRunner().invoke(app, ["audit", str(path), "--receipts", str(tmp_path / "kept.txt"), "--client", "c3"])
    assert run.exit_code == 0 and "confirmed: 13 rounds" in run.stdout and "c3: candidate in" in run.stdout
    machine = CliRunner().invoke(app, ["audit", str(path), "--seed", "9", "--format", "json"])
    assert machine.exit_code == 1
    assert json.loads(machine.stdout)["confirmed"] is False
    plain = tmp_path / "plain.sqlite"
    Session(create("uniform"), ClientTable(n=4), journal=plain).close()
    with pytest.raises(JournalError, match="without a chain"):
        verify(plain)


def test_a_chain_costs_nothing_when_nobody_wants_it(tmp_path: Path) -> None:
    session = Session(create("uniform"), ClientTable(n=4), journal=tmp_path / "run.sqlite")
    session.ask(RoundRequest(size=2))
    assert session.journal.commitment is None
    session.close()
    with sqlite3.connect(tmp_path / "run.sqlite") as db:
        assert db.execute("SELECT COUNT(*) FROM chain").fetchone() == (0,)


def test_an_event_that_fails_leaves_the_chain_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    session = Session(create("uniform"), ClientTable(n=6), seed=1, journal=path, audit=True)
    cohort = session.ask(RoundRequest(size=2))
    before = session.journal.commitment

    def fail() -> None:
        with session.journal.event():
            session.journal.close_cohort(cohort.ticket)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert session.journal.commitment == before
    session.tell(RoundReport(cohort.ticket, cohort.clients))
    session.close()
    assert verify(path).confirmed
