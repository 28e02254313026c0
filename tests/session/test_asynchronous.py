"""Asynchronous sessions: one client at a time, a clock of models, staleness, and everything a session promises."""

import itertools
from contextlib import closing
from typing import ClassVar

import numpy as np
import pytest

from fedcohort.audit.choices import audit_journal
from fedcohort.audit.participation import prove_participation
from fedcohort.audit.replay import replay_journal
from fedcohort.core.clients import ClientTable, LabelCounts
from fedcohort.core.errors import InputError, JournalError, TicketError
from fedcohort.core.protocol import Cohort, RoundReport, RoundRequest, Selector, Status
from fedcohort.core.signals import Signal
from fedcohort.journal import read_journal
from fedcohort.selectors import Uniform
from fedcohort.session.rules import Rules
from fedcohort.session.session import Session
from fedcohort.testing import ScriptedHost


class Watching(Uniform):
    """Uniform selection that stores what it sees."""

    one_at_a_time = True
    slates: ClassVar[list] = []
    outcomes: ClassVar[list] = []

    @property
    def requires(self):
        return frozenset({Signal.STALENESS})

    def select(self, state, slate, answer, rng):
        self.slates.append(slate)
        return super().select(state, slate, answer, rng)

    def update(self, state, outcome):
        self.outcomes.append((outcome.round, outcome[Signal.STALENESS].tolist()))
        return state


@pytest.fixture
def watching():
    Watching.slates, Watching.outcomes = [], []
    return Watching()


def ask(session, **request):
    return session.ask(RoundRequest(1, **request))


def test_the_clock_is_the_number_of_models(watching):
    session = Session(watching, 6, asynchronous=True)
    first, second = ask(session), ask(session)
    session.tell(RoundReport(first.ticket, first.clients))
    session.advance([first.ticket])
    third = ask(session)
    assert [cohort.round for cohort in (first, second, third)] == [0, 0, 1]
    assert [slate.round for slate in watching.slates] == [0, 0, 1]
    assert [slate.busy.tolist() for slate in watching.slates] == [
        [],
        first.clients.tolist(),
        second.clients.tolist(),
    ]
    session.advance()
    session.tell(RoundReport(second.ticket, second.clients))
    session.tell(RoundReport(third.ticket, third.clients, status=[Status.FAILED]))
    assert watching.outcomes[:2] == [(0, [0.0]), (0, [2.0])]
    assert watching.outcomes[2][0] == 1 and np.isnan(watching.outcomes[2][1]).all()
    assert session.journal.replies(second.ticket)[0].metrics["staleness"] == 2


def test_choices_of_one_model_are_independent():
    picked = []
    for seed in range(200):
        session = Session("uniform", 50, seed=seed, asynchronous=True)
        cohort = ask(session)
        session.tell(RoundReport(cohort.ticket, cohort.clients))
        picked.append((cohort.clients[0], ask(session).clients[0]))
    same = sum(a == b for a, b in picked)
    assert same < 15  # one in fifty by chance; all, if a round had only one stream


def test_sessions_with_rounds_do_not_change(watching):
    session = Session(watching, 6)
    cohort = session.ask(2)
    session.tell(cohort)
    assert watching.slates[0].busy is None and watching.outcomes == [(0, [0.0, 0.0])]
    with pytest.raises(InputError, match="asynchronous=True"):
        session.advance()


def test_nonsense_is_refused(tmp_path):
    with pytest.raises(InputError):
        Session("oort", 5, asynchronous=True)
    with pytest.raises(InputError):
        Session("uniform", 5, asynchronous=True, shadows={"oort": "oort"})
    session = Session("uniform", 5, asynchronous=True, journal=tmp_path / "a.sqlite")
    for size in (2, None):
        with pytest.raises(InputError):
            session.ask(size)
    cohort = ask(session)
    for ticket in (cohort.ticket, 7):
        with pytest.raises(TicketError):
            session.advance([ticket])
    with pytest.raises(InputError):
        session.change_selector("oort")
    with pytest.raises(InputError):
        session.add_shadow("oort", "oort")
    assert session.round == 0
    session.close()
    with pytest.raises(JournalError, match="asynchronous=False"):
        Session.open_or_create(tmp_path / "a.sqlite", "uniform", 5)
    Session.open_or_create(tmp_path / "a.sqlite", "uniform", 5, asynchronous=True).close()


def test_an_abandoned_client_is_free_and_no_model_is_lost(tmp_path):
    session = Session("uniform", 3, asynchronous=True, journal=tmp_path / "a.sqlite")
    cohorts = [ask(session) for _ in range(3)]
    assert ask(session).size == 0
    session.abandon(cohorts[1].ticket, "it is gone")
    session.advance()
    again = ask(session)
    assert again.clients.tolist() == cohorts[1].clients.tolist() and again.round == 1
    session.close()
    with Session.open(tmp_path / "a.sqlite") as resumed:
        assert resumed.round == 1 and len(resumed.pending) == 3


@pytest.mark.parametrize("selector", ["uniform", "balanced", "fedcbs", "power-of-choice", "active-fl"])
def test_it_continues_after_a_kill_between_any_two_events(tmp_path, selector):
    """The journal is copied after every event, as a kill would leave it. Each copy continues with the same choices."""
    host, chosen = ScriptedHost(), Session(selector, ScriptedHost().table, signals=ScriptedHost().signals).selector
    options = {"seed": 4, "signals": host.signals, "asynchronous": True, "shadows": {"uniform": "uniform"}}
    whole = Session(chosen, host.table, **options, journal=tmp_path / "whole.sqlite")
    expected = host.play_one_by_one(lambda: whole, 36)
    path = tmp_path / "cut.sqlite"
    Session(chosen, host.table, **options, journal=path).close()
    found = host.play_one_by_one(lambda: Session.open(path, chosen), 36, reopen=True)
    assert found == expected
    with closing(read_journal(path)) as ours, closing(read_journal(tmp_path / "whole.sqlite")) as theirs:
        for a, b in itertools.zip_longest(ours.cohorts(), theirs.cohorts()):
            assert (a.round, a.clients.tolist()) == (b.round, b.clients.tolist())
            ours_say, theirs_say = ours.scores(a.ticket), theirs.scores(b.ticket)
            assert ours_say["uniform"][0].tolist() == theirs_say["uniform"][0].tolist()


def test_rules_hold(tmp_path):
    host = ScriptedHost()
    rules = Rules(blocked=["3"], min_separation=2, max_participations=4)
    session = Session(
        "uniform", host.table, seed=1, rules=rules, signals=host.signals, asynchronous=True,
        journal=tmp_path / "a.sqlite",
    )  # fmt: skip
    trace = host.play_one_by_one(lambda: session, 60)
    assert trace and all(client != 3 for _, client in trace)
    assert max(sum(client == c for _, client in trace) for c in range(12)) <= 4
    with closing(read_journal(tmp_path / "a.sqlite")) as journal:
        assert prove_participation(journal).holds


@pytest.mark.parametrize("audit", [False, True])
def test_the_journal_can_be_replayed(tmp_path, audit):
    host, path = ScriptedHost(), tmp_path / "a.sqlite"
    selector = Session("balanced", host.table, signals=host.signals).selector
    session = Session(selector, host.table, seed=3, signals=host.signals, asynchronous=True, journal=path, audit=audit)
    trace = host.play_one_by_one(lambda: session, 40)
    if audit:
        found = audit_journal(path)
        assert found.problem is None and found.draws == len(trace)
    else:
        with closing(read_journal(path)) as journal:
            found = replay_journal(journal)
        assert found.problem is None and found.rounds > 10


def test_a_choice_is_explained():
    host = ScriptedHost()
    session = Session("fedcbs", host.table, seed=1, asynchronous=True)
    cohorts = [ask(session) for _ in range(4)]
    for cohort in cohorts:
        why = session.explain(0, int(cohort.clients[0]))
        assert why.picked and why.ticket == cohort.ticket and "was picked in round 0" in why.reason
    other = next(c for c in range(12) if c not in [int(cohort.clients[0]) for cohort in cohorts])
    assert not session.explain(0, other).picked


def test_the_next_client_balances_those_at_work():
    """How unevenly the four classes are spread over the clients at work, of 40 clients with one class each."""
    labels = LabelCounts(np.repeat(np.eye(4, dtype=int) * 20, 10, axis=0))
    uneven = {}
    for name in ("uniform", "fedcbs", "balanced"):
        session = Session(name, ClientTable(labels=labels), seed=2, asynchronous=True)
        draw, at_work, found = np.random.default_rng(0), [], []
        for _ in range(200):
            if len(at_work) == 8:
                cohort = at_work.pop(int(draw.integers(8)))
                session.tell(RoundReport(cohort.ticket, cohort.clients))
            at_work.append(ask(session))
            found.append(np.ptp(np.bincount([int(c.clients[0]) // 10 for c in at_work], minlength=4)))
        uneven[name] = np.mean(found[20:])
    assert max(uneven["balanced"], uneven["fedcbs"]) < 0.2 and uneven["uniform"] > 2, uneven


def test_a_custom_selector_declares_one_at_a_time():
    class Mine(Uniform):
        one_at_a_time = False

    assert not Selector.one_at_a_time
    with pytest.raises(InputError):  # the hint names selectors that can
        Session(Mine(), 3, asynchronous=True)
    assert isinstance(ask(Session(Uniform(), 3, asynchronous=True)), Cohort)
