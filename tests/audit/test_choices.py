"""Honest journals are confirmed, and every manipulation is found."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedcohort import ClientTable, Cohort, LabelCounts, Session, Signal, Slate, Status, create
from fedcohort.audit.choices import audit_journal, receipt
from fedcohort.audit.verification import examine
from fedcohort.cli.app import app
from fedcohort.core.clients import LabelGram, LabelGramRows
from fedcohort.core.errors import JournalError
from fedcohort.core.protocol import Answer, RoundReport, RoundRequest
from fedcohort.journal import Journal, read_journal
from fedcohort.journal.chain import read_head
from fedcohort.journal.codec import pack
from fedcohort.journal.maintenance import prune
from fedcohort.journal.signing import generate, read_public
from fedcohort.selectors import FedCBS
from fedcohort.session.rules import Rules
from tests.forge import forge

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
        session.note("mine", {"ticket": cohort.ticket, "text": "as it was"})
        session.record(round_, {"accuracy": 0.1 * round_})
    session.close()
    return kept


@pytest.mark.parametrize(
    "selector", ["fedcbs", "uniform", "power-of-choice", "active-fl", "fedcm-ts", "flash-advantage"]
)
def test_honest_journals_are_confirmed(tmp_path: Path, selector: str) -> None:
    path = tmp_path / "run.sqlite"
    kept = play(path, selector)
    found = audit_journal(path, seed=3, receipts=dict.fromkeys(kept, "kept"))
    assert found.problem is None and found.confirmed and found.rounds == 13
    assert len(set(kept)) == 12
    assert sum(found.picked.values()) >= 40 and found.candidate["c0"] <= 13


CHANGES = [
    ("UPDATE cohorts SET clients = ? WHERE ticket = 5", (pack(np.array([0, 3, 5, 6])),)),
    ("UPDATE replies SET data = (SELECT data FROM replies WHERE id = 1) WHERE id = 6", ()),
    ("UPDATE replies SET late = 1 WHERE id = 8", ()),
    ("UPDATE replies SET at = at + 1 WHERE id = 5", ()),
    ("DELETE FROM candidates WHERE ticket = 7", ()),
    ("UPDATE answers SET data = (SELECT data FROM answers WHERE ticket = 2) WHERE ticket = 3", ()),
    ("UPDATE versions SET data = X'5b5b5d2c5b5d5d0a' WHERE id = 2", ()),
    ("UPDATE meta SET value = '4' WHERE key = 'seed'", ()),
    ("UPDATE meta SET value = '1.0' WHERE key = 'created'", ()),
    ("UPDATE meta SET value = 'null' WHERE key = 'shadows'", ()),
    ("DELETE FROM cohorts WHERE ticket = 8", ()),
    ("INSERT INTO cohorts SELECT salt, 13, 99, asked_at, wanted, n_candidates, clients, weights, work, notes, stop "
     "FROM cohorts WHERE ticket = 11", ()),
    ("UPDATE cohorts SET notes = '[]' WHERE ticket = 4", ()),
    ("UPDATE cohorts SET asked_at = asked_at - 3600 WHERE ticket = 4", ()),
    ("UPDATE closed SET at = at + 1 WHERE ticket = 4", ()),
    ("UPDATE cohorts SET stop = 'enough' WHERE ticket = 4", ()),
    ("UPDATE metrics SET value = 0.99 WHERE round = 7", ()),
    ("INSERT INTO metrics VALUES (X'', 7, 'f1', 0.9)", ()),
    ("DELETE FROM metrics WHERE round = 7", ()),
    ("UPDATE scores SET arrays = NULL WHERE ticket = 3", ()),
    ("DELETE FROM scores WHERE ticket = 3", ()),
    ("UPDATE scores SET note = 'fine' WHERE ticket = 3", ()),
    ("UPDATE events SET at = at - 86400 WHERE kind = 'mine'", ()),
    ("UPDATE events SET body = replace(body, 'nobody came', 'the disk was full')", ()),
    ("DELETE FROM events WHERE kind = 'abandoned'", ()),
    ("INSERT INTO events SELECT salt, 999, at, kind, body FROM events LIMIT 1", ()),
    ("UPDATE facts SET data = '14' WHERE name = 'classes'", ()),
]  # fmt: skip


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A journal, and the commitments that clients kept."""
    path = tmp_path_factory.mktemp("honest") / "run.sqlite"
    kept = play(path, "power-of-choice")
    with closing(read_journal(path)) as record:
        return path, [*kept, read_head(record.database.connection).link.hex()]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change[0][:50])
def test_what_was_changed_is_refused_or_found_by_receipts(
    tmp_path: Path, honest: tuple[Path, list[str]], change: tuple[str, tuple[Any, ...]]
) -> None:
    """With an SQL editor, or also with a new chain for everything."""
    edited, forged = (Path(shutil.copy(honest[0], tmp_path / name)) for name in ("edited", "forged"))
    with sqlite3.connect(edited) as db:
        db.execute(*change)
    with pytest.raises(JournalError):
        audit_journal(edited)
    assert not examine(edited).valid
    found = audit_journal(forge(forged, change), receipts=dict.fromkeys(honest[1], "kept"))
    assert found.wrong and not found.confirmed


@pytest.mark.parametrize(("change", "said"), [
    (CHANGES[0], "Round 5 does not follow"),
    (CHANGES[4], "does not follow"),
    (CHANGES[5], "does not follow"),
    (CHANGES[7], "Round 0 does not follow"),
    (CHANGES[10], "does not fit the others"),
])  # fmt: skip
def test_what_does_not_follow_is_found_without_receipts(
    tmp_path: Path, honest: tuple[Path, list[str]], change: tuple[str, tuple[Any, ...]], said: str
) -> None:
    found = audit_journal(forge(Path(shutil.copy(honest[0], tmp_path)), change))
    assert found.wrong and said in str(found.problem)


@pytest.mark.parametrize("column", ["added", "removed", "link", "generation"])
def test_a_changed_link_is_refused(tmp_path: Path, honest: tuple[Path, list[str]], column: str) -> None:
    for statement in (f"UPDATE chain SET {column} = X'00' WHERE id = 9", "DELETE FROM chain WHERE id = 9"):
        path = Path(shutil.copy(honest[0], tmp_path))
        with sqlite3.connect(path) as db:
            db.execute(statement)
        with pytest.raises(JournalError):
            read_journal(path)


def test_the_seed_cannot_be_replaced_by_a_later_link(tmp_path: Path, honest: tuple[Path, list[str]]) -> None:
    path = Path(shutil.copy(honest[0], tmp_path))
    with closing(Journal.open(path)) as record, record.event():
        record.set_meta("seed", 3)
    found = audit_journal(path)
    assert found.wrong and "'seed' was changed" in str(found.problem)


def test_a_server_that_chains_other_cohorts_is_found_by_recomputing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain is intact, but a cohort does not follow from seed and inputs: colluders were picked on purpose."""
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
    found = audit_journal(path)
    assert not found.confirmed and found.rounds == 4
    assert "Round 4 does not follow" in str(found.problem)


def test_another_seed_or_journal_is_found_by_receipts(tmp_path: Path) -> None:
    kept = play(tmp_path / "a.sqlite", seed=3)
    play(tmp_path / "b.sqlite", seed=4)
    assert "3 was agreed on" in str(audit_journal(tmp_path / "b.sqlite", seed=3).problem)
    swapped = audit_journal(tmp_path / "b.sqlite", receipts={kept[5]: "client c4"})
    assert not swapped.confirmed and "client c4" in str(swapped.problem)


def test_command(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    kept = play(path)
    (tmp_path / "kept.txt").write_text("".join(f"{c} round {i}\n" for i, c in enumerate(kept)))
    run = CliRunner().invoke(
        app, ["journal", "audit", str(path), "--receipts", str(tmp_path / "kept.txt"), "--client", "c3"]
    )
    assert run.exit_code == 0 and "c3: candidate in" in run.stdout
    assert "confirmed: 13 draws, 1 abandoned, 12 kept; 13 follow" in run.stdout
    machine = CliRunner().invoke(app, ["journal", "audit", str(path), "--seed", "9", "--format", "json"])
    assert machine.exit_code == 1
    assert json.loads(machine.stdout)["confirmed"] is False
    plain = tmp_path / "plain.sqlite"
    Session(create("uniform"), ClientTable(n=4), journal=plain).close()
    with pytest.raises(JournalError, match="without audit=True"):
        audit_journal(plain)


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
    assert audit_journal(path).confirmed


# -- a server that influences cohorts ----------------------------------------------------------------------------------


def asked(session: Session, size: int = 3) -> Cohort:
    return session.ask(RoundRequest(size=size))


def test_a_server_that_draws_until_it_likes_the_cohort_is_not_confirmed(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    with Session(create("uniform"), ClientTable(n=12), seed=1, journal=path, audit=True) as session:
        for _ in range(5):
            while not {0, 1} <= set((cohort := asked(session)).clients.tolist()):
                session.abandon(cohort.ticket, "the network was slow")
            session.tell(RoundReport(cohort.ticket, cohort.clients))
    found = audit_journal(path)
    assert found.kept == 5 and found.draws == found.abandoned + 5 and found.unexplained == found.abandoned > 5
    assert not found.confirmed and f"Of {found.draws} draws {found.abandoned} were abandoned" in str(found.problem)
    assert "the network was slow" in str(found.problem)
    run = CliRunner().invoke(app, ["journal", "audit", str(path)])
    assert run.exit_code == 1 and run.stdout.startswith("NOT confirmed")


def test_failures_that_the_server_makes_up_do_not_explain_more_draws_than_were_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    with Session(create("uniform"), ClientTable(n=12), seed=1, journal=path, audit=True) as session:
        for _ in range(3):
            for _ in range(2):
                cohort = asked(session)
                report = RoundReport(cohort.ticket, cohort.clients[:1], status=[Status.FAILED], complete=False)
                session.tell(report)
                session.abandon(cohort.ticket, "it failed")
            cohort = asked(session)
            session.tell(RoundReport(cohort.ticket, cohort.clients))
    found = audit_journal(path)
    assert (found.draws, found.abandoned, found.unexplained) == (9, 6, 0) and not found.confirmed


def test_a_few_abandoned_draws_get_a_remark(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    with Session(create("uniform"), ClientTable(n=12), seed=1, journal=path, audit=True) as session:
        session.abandon(asked(session).ticket, "the server was moved")
        for _ in range(12):
            cohort = asked(session)
            session.tell(RoundReport(cohort.ticket, cohort.clients))
    found = audit_journal(path)
    assert found.word == "confirmed with remarks" and "1 of 13 draws" in found.remarks[0]
    machine = CliRunner().invoke(app, ["journal", "audit", str(path), "--format", "json"])
    assert machine.exit_code == 3 and json.loads(machine.stdout)["unexplained"] == 1


OWN = """
from dataclasses import dataclass
from fedcohort import Cohort
from fedcohort.selectors import Uniform


@dataclass(frozen=True, kw_only=True)
class Friends(Uniform):
    "Its friends."

    def select(self, state, slate, answer, rng):
        return Cohort(slate.candidates[: slate.size]), state
"""


def test_a_custom_selector_must_be_named_and_gets_a_remark(tmp_path: Path) -> None:
    (tmp_path / "friends.py").write_text(OWN)
    code = (
        "from fedcohort import *\n"
        "s = Session('uniform', 12, seed=1, journal='run.sqlite', audit=True)\n"
        "s.tell(s.ask(3)); s.change_selector('friends.py:Friends'); s.tell(s.ask(3)); s.close()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    found = audit_journal(tmp_path / "run.sqlite")
    assert not found.confirmed and "From round 1 on" in str(found.problem) and "friends.py:Friends" in found.problem
    own = f"{tmp_path}/friends.py:Friends"
    trusted = CliRunner().invoke(app, ["journal", "audit", str(tmp_path / "run.sqlite"), "--selector", own])
    assert trusted.exit_code == 3 and "'Friends' chose, in place of 'uniform'" in trusted.stdout
    assert "not one of fedcohort's" in " ".join(trusted.stdout.split())


def test_a_change_of_selector_gets_a_remark(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    with Session(create("uniform"), ClientTable(n=12, sizes=range(1, 13)), seed=1, journal=path, audit=True) as session:
        for name in ("uniform", "size-weighted"):
            if session.round:
                session.change_selector(create(name))
            cohort = asked(session)
            session.tell(RoundReport(cohort.ticket, cohort.clients))
    assert audit_journal(path).remarks == ("From round 1 on 'size-weighted' chose, in place of 'uniform'.",)


def test_rules_that_leave_nobody_else_are_not_confirmed(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    names = [f"c{i}" for i in range(12)]
    with Session(create("uniform"), ClientTable(names=names), seed=1, journal=path, audit=True) as session:
        session.set_rules(Rules(blocked=tuple(names[3:])))
        for _ in range(6):
            cohort = asked(session)
            session.tell(RoundReport(cohort.ticket, cohort.clients))
    found = audit_journal(path)
    assert not found.confirmed and "In 6 of 6 draws the rules left no more clients" in str(found.problem)
    assert found.excluded["c7"] == 6 and "c0" not in found.excluded
    assert any("They excluded 9 of 12" in remark and "c7 (6)" in remark for remark in found.remarks)


def test_rules_that_pin_all_clients_are_not_confirmed(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    names = [f"c{i}" for i in range(12)]
    rules = Rules(pinned=("c1", "c2", "c3"))
    with Session(create("uniform"), ClientTable(names=names), journal=path, audit=True, rules=rules) as session:
        for _ in range(4):
            cohort = asked(session)
            session.tell(RoundReport(cohort.ticket, cohort.clients))
    assert "demanded all that were picked" in str(audit_journal(path).problem)


def test_rules_that_treat_all_alike_get_no_remark(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    rules = Rules(min_separation=3, max_participations=9)
    with Session(create("uniform"), ClientTable(n=12), journal=path, audit=True, rules=rules) as session:
        for _ in range(6):
            cohort = asked(session)
            session.tell(RoundReport(cohort.ticket, cohort.clients))
    found = audit_journal(path)
    assert found.word == "confirmed" and sum(found.excluded.values()) > 0


def test_a_server_that_lets_rounds_pass_until_it_likes_the_next_is_not_confirmed(tmp_path: Path) -> None:
    """A draw depends on the round's number, and a server can let a round pass by saying that nobody is available."""
    path = tmp_path / "run.sqlite"
    with Session(create("uniform"), ClientTable(n=12), seed=1, journal=path, audit=True) as session:
        for _ in range(3):
            for _ in range(2):
                assert session.ask(RoundRequest(size=3, available=[])).size == 0
            cohort = asked(session)
            session.tell(RoundReport(cohort.ticket, cohort.clients))
    assert "6 rounds passed without a cohort, and 3 had one" in str(audit_journal(path).problem)


def test_absent_clients_and_corrected_metrics_get_a_remark(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    with Session(create("uniform"), ClientTable(n=12), seed=1, journal=path, audit=True) as session:
        for round_ in range(4):
            cohort = session.ask(RoundRequest(size=3, available=[0, 1, 2]))
            session.tell(RoundReport(cohort.ticket, cohort.clients))
            session.record(round_, {"accuracy": 0.5})
        session.record(0, {"accuracy": 0.9})
    found = audit_journal(path)
    assert found.remarks == (
        "In 4 of 4 draws no more clients were available than asked for.",
        "Metrics of the model that were recorded again later: 1.",
    )


# -- removed parts leave their digest ----------------------------------------------------------------------------------


def test_pruning_and_forgetting_leave_the_chain_intact(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    kept = dict.fromkeys(play(path), "kept")
    with closing(Journal.open(path)) as record:
        prune(record, 3)
    pruned = audit_journal(path, receipts=kept)
    assert not pruned.confirmed and not pruned.wrong and "pruned. The chain itself holds" in str(pruned.problem)
    with Session.open(path) as session:
        session.forget("c3")
        cohort = asked(session)
        kept[session.journal.commitment or ""] = "after"
        session.tell(RoundReport(cohort.ticket, cohort.clients))
    gone = audit_journal(path, receipts=kept)
    assert not gone.confirmed and not gone.wrong and "clients were forgotten and details" in str(gone.problem)
    assert {f.check: f.valid for f in examine(path).findings}["replay"] is None
    assert audit_journal(forge(path, CHANGES[16]), receipts=kept).wrong


def test_parts_that_vanish_without_an_event_are_found(tmp_path: Path) -> None:
    """Rows are deleted as by pruning, but without an event."""
    for table in ("metrics", "scores", "cohorts"):
        path = tmp_path / f"{table}.sqlite"
        play(path)
        with closing(Journal.open(path)) as record, record.event():
            record.database.delete(table, "round = 3" if table != "scores" else "ticket = 3", ())
        found = audit_journal(path)
        assert found.wrong and "no event says" in str(found.problem)


# -- signatures --------------------------------------------------------------------------------------------------------


def test_a_signed_journal_shows_its_signer(tmp_path: Path) -> None:
    runner = CliRunner()
    for name in ("operator.key", "other.key"):
        assert runner.invoke(app, ["journal", "keygen", str(tmp_path / name)]).exit_code == 0
    key, path = tmp_path / "operator.key", tmp_path / "run.sqlite"
    assert key.stat().st_mode & 0o077 == 0
    assert "never overwritten" in str(runner.invoke(app, ["journal", "keygen", str(key)]).exception)
    table = ClientTable(names=["anna", "ben", "cem"])
    receipts = tmp_path / "kept.txt"
    with Session(create("uniform"), table, journal=path, audit=True, sign=key) as session:
        cohort = asked(session, 2)
        receipts.write_text(f"{receipt(session.journal, cohort.ticket, cohort.round)}\n")
        session.tell(RoundReport(cohort.ticket, cohort.clients))
    with pytest.raises(JournalError):
        Session.open(path)
    with pytest.raises(JournalError):
        Session.open(path, sign=tmp_path / "other.key")
    with Session.open(path, sign=key) as session:
        session.abandon(asked(session, 2).ticket, "no time")
    done = runner.invoke(app, ["journal", "forget", str(path), "anna", "--sign", str(key)])
    assert done.exit_code == 0, done.output

    def audit(name: str) -> str:
        public = str(tmp_path / f"{name}.pub")
        return runner.invoke(
            app, ["journal", "audit", str(path), "--public", public, "--receipts", str(receipts)]
        ).stdout

    assert "The chain itself holds" in " ".join(audit("operator.key").split())
    assert "not with" in " ".join(audit("other.key").split())


def test_a_rewritten_journal_cannot_be_signed_by_somebody_else(tmp_path: Path) -> None:
    """An attacker can chain a changed journal again, but cannot forge the signature or the receipts."""
    key, path = tmp_path / "operator.key", tmp_path / "run.sqlite"
    generate(key)
    with Session(create("uniform"), ClientTable(n=6), seed=1, journal=path, audit=True, sign=key) as session:
        cohort = asked(session)
        first = session.journal.commitment or ""
        session.tell(RoundReport(cohort.ticket, cohort.clients))
    public = read_public(key.with_name("operator.key.pub"))
    assert audit_journal(path, public=public, receipts={first: "anna"}).word == "confirmed"
    forge(path, ("UPDATE closed SET at = at + 1", ()))
    assert audit_journal(path).word == "NOT confirmed"
    assert audit_journal(path, public=public).wrong
