"""A journal that is ahead of its host's files returns to the state in which they were written."""

import numpy as np
import pytest

from fedcohort import ClientTable, Session, create
from fedcohort.core.errors import JournalError
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.journal import Savepoint
from fedcohort.testing import ScriptedHost

HOST = ScriptedHost(n=20)


def start(path, selector="fedcm-ts", **options):
    shadows = {"afl": create("active-fl")}
    return Session(create(selector), HOST.table, seed=9, signals=HOST.signals, shadows=shadows, journal=path, **options)


def told(session):
    journal = session.journal
    cohorts = [(c.ticket, c.round, c.clients.tolist(), c.told_at is None) for c in journal.cohorts()]
    replies = [(r.ticket, r.client, r.status, r.metrics) for r in journal.replies()]
    states = {name: {k: np.asarray(v).tolist() for k, v in journal.state(name).items()} for name in ("", "afl")}
    scores = [repr(journal.scores(row[0])) for row in cohorts]
    return cohorts, replies, repr(states), scores, journal.metrics(), journal.events("note"), session.host_state


@pytest.mark.parametrize("selector", ["fedcm-ts", "fedcor", "oort"])
@pytest.mark.parametrize("commit", ["always", "manual"])
def test_a_journal_goes_back_and_on_as_if_nothing_had_been(tmp_path, selector, commit):
    path = tmp_path / "j.sqlite"
    session = start(path, selector, commit=commit)
    HOST.play(session, 5)
    session.note("note", {"kept": True})
    at = Savepoint.from_bytes(session.savepoint().to_bytes())
    before = told(session)
    ahead = HOST.play(session, 4)
    session.record(7, {"accuracy": 0.5})
    session.note("note", {"kept": False})
    after = told(session)
    session.commit()
    session.close()
    session = Session.open(path, commit=commit, at=at)
    assert told(session) == before
    assert HOST.play(session, 4) == ahead
    session.record(7, {"accuracy": 0.5})
    session.note("note", {"kept": False})
    assert told(session) == after
    session.close()


def test_standing_where_it_stood_changes_nothing(tmp_path):
    path = tmp_path / "j.sqlite"
    with start(path) as session:
        HOST.play(session, 3)
        at = session.savepoint()
    with Session.open(path, at=at) as session:
        assert session.round == 3


def test_pending_cohorts_are_pending_again(tmp_path):
    path = tmp_path / "j.sqlite"
    with start(path) as session:
        HOST.play(session, 2)
        request = RoundRequest(size=4)
        cohort = session.ask(request, HOST.answer(session.query(request), session.round))
        at = session.savepoint()
        session.tell(HOST.report(cohort), host={"model": 3})
    with Session.open(path, at=at) as session:
        (pending,) = session.pending
        assert pending.clients.tolist() == cohort.clients.tolist()
        assert session.host_state is None


def test_what_cannot_be_taken_back_is_refused(tmp_path):
    path = tmp_path / "j.sqlite"
    with start(path) as session:
        HOST.play(session, 2)
        at = session.savepoint()
        session.leave([3])
        HOST.play(session, 1)
    with pytest.raises(JournalError, match="'leave'"):
        Session.open(path, at=at)
    with Session.open(path) as session:
        later = session.savepoint()
    start(tmp_path / "other.sqlite").close()
    with pytest.raises(JournalError):
        Session.open(tmp_path / "other.sqlite", at=later)
    audited = Session(create("uniform"), ClientTable(n=5), journal=tmp_path / "audited.sqlite", audit=True)
    at = audited.savepoint()
    cohort = audited.ask(RoundRequest(size=2))
    audited.tell(RoundReport(cohort.ticket, cohort.clients))
    audited.close()
    with pytest.raises(JournalError):
        Session.open(tmp_path / "audited.sqlite", at=at)
