"""Replies that nobody asked for: unknown tickets, unknown clients, answers to others' tickets, answers sent twice."""

from __future__ import annotations

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import Status
from fedcohort.hosts.flow import FlowPolicy
from fedcohort.hosts.live import Online, play
from fedcohort.hosts.live_flow import play_flow
from fedcohort.hosts.round import FederationTimeoutError, Policy, Reply
from fedcohort.session import Session
from tests.hosts.scripted import TimedHost
from tests.hosts.test_live_flow import InProcess

NAMES = ["anna", "ben", "cem", "dora"]
STRAYS = {
    "a ticket that never was": Reply(99, "anna", content=1),
    "a negative ticket": Reply(-1, "anna", content=1),
    "a ticket beyond every integer": Reply(2**80, "anna", content=1),
    "a list as ticket": Reply([0], "anna", content=1),
    "a text as ticket": Reply("0", "anna", content=1),
    "a number with a fraction as ticket": Reply(0.5, "anna", content=1),
    "no ticket": Reply(None, "anna", content=1),
    "an unknown client": Reply(0, "mallory", content=1),
    "an unknown client and ticket": Reply(99, "mallory", content=1),
    "a list as client": Reply(0, ["anna"], content=1),
    "a table as client": Reply(0, {"name": "anna"}, content=1),
    "a number as client": Reply(0, 1, content=1),
    "no client": Reply(0, None, content=1),
    "a failure without a ticket": Reply(None, "anna", Status.FAILED),
}


class Flooded(TimedHost):
    """The federation of four, and one stray reply in everything that arrives."""

    def __init__(self, stray, **options):
        super().__init__(NAMES, **options)
        self.stray = stray

    def receive(self, until):
        return [self.stray(self), *super().receive(until), self.stray(self)]


def played(stray, **policy):
    session = Session("uniform", ClientTable(names=NAMES), seed=1)
    host = Flooded(stray)
    play(host, session, Policy(size=2, deadline=10.0, **policy), rounds=4)
    return host, session


@pytest.mark.parametrize("late", ["discard", "count"])
@pytest.mark.parametrize("stray", STRAYS)
def test_a_reply_nobody_asked_for_changes_nothing_and_is_logged(stray, late, caplog):
    plain = Session("uniform", ClientTable(names=NAMES), seed=1)
    quiet = TimedHost(NAMES)
    play(quiet, plain, Policy(size=2, deadline=10.0, late=late), rounds=4)
    host, session = played(lambda _: STRAYS[stray], late=late)
    assert host.cohorts() == quiet.cohorts()
    told = [[row._replace(at=0.0) for row in s.journal.replies()] for s in (session, plain)]
    assert told[0] == told[1]
    assert "is dropped" in caplog.text


@pytest.mark.parametrize("deadline", [10.0, "auto"])
def test_a_client_that_was_not_chosen_cannot_answer_for_the_cohort(deadline):
    def stray(host):
        cohort = next(event[2] for event in reversed(host.events) if event[0] == "send")
        return Reply(len(host.cohorts()) - 1, next(name for name in NAMES if name not in cohort), content=1e9)

    session = Session("uniform", ClientTable(names=NAMES), seed=1)

    class Late(Flooded):
        def receive(self, until):
            return super().receive(until) if self.events else TimedHost.receive(self, until)

    host = Late(stray)
    play(host, session, Policy(size=2, deadline=deadline), rounds=4)
    assert all(len(round_.in_order()) == 2 for round_ in host.rounds)
    assert all(reply.content < 10 for round_ in host.rounds for reply in round_.in_order())


def test_a_model_sent_again_does_not_count_as_a_late_one():
    first = []

    def again(host):
        first.extend(reply for round_ in host.rounds[:1] for reply in round_.in_order()[:1] if not first)
        return first[0] if first else Reply(None, "nobody")

    host, session = played(again, late="count")
    assert first and not any(round_.late for round_ in host.rounds)
    assert {reply.status for reply in session.journal.replies()} == {Status.OK}


def test_a_late_model_sent_twice_counts_once():
    host = TimedHost(NAMES, lambda cohort, name: (12.0, Status.OK) if name == "anna" else (1.0, Status.OK))
    receive = host.receive

    def twice(until):
        return [copy for reply in receive(until) for copy in (reply, reply)]

    host.receive = twice
    session = Session("uniform", ClientTable(names=NAMES), seed=1)
    play(host, session, Policy(size=4, deadline=9.0, late="count"), rounds=4)
    late = [(round_.cohort.round, one.reply.ticket) for round_ in host.rounds for one in round_.late]
    assert late == [(1, 0), (2, 1), (3, 2)]


def test_an_answer_to_an_interrupted_cohort_does_not_close_its_round(tmp_path):
    table, journal = ClientTable(names=NAMES), tmp_path / "journal.sqlite"

    class Stopped(TimedHost):
        def receive(self, until):
            if self.events:
                raise KeyboardInterrupt
            return super().receive(until)

    policy = Policy(size=3, deadline=10.0)
    with Session("uniform", table, seed=1, journal=journal) as session, pytest.raises(KeyboardInterrupt):
        play(Stopped(NAMES), session, policy, rounds=1)
    with Session.open(journal, "uniform") as session:
        host = Flooded(lambda _: Reply(0, session.pending[0].names[0] if session.pending else "nobody", content=5))
        host.script = lambda cohort, name: (3.0, Status.OK)
        play(host, session, policy, rounds=1)
        assert len(host.rounds[0].in_order()) == 3
        assert [reply.status for reply in session.journal.replies()] == [Status.OK] * 3


def test_an_answer_to_a_cohort_that_was_given_up_is_dropped():
    host = TimedHost(NAMES, lambda cohort, name: (25.0, Status.OK) if cohort.ticket == 0 else (1.0, Status.OK))
    session = Session("uniform", ClientTable(names=NAMES), seed=1)
    play(host, session, Policy(size=2, deadline=9.0), rounds=20)
    assert session.round == 20 and session.journal.cohorts()[0].round == 0


def test_strangers_who_are_online_are_left_out_and_named_when_nobody_else_comes():
    host = TimedHost(["mallory", *NAMES, "trudy"])
    session = Session("uniform", ClientTable(names=NAMES), seed=1)
    play(host, session, Policy(size=4, deadline=10.0), rounds=2)
    assert [sorted(cohort) for cohort in host.cohorts()] == [NAMES, NAMES]
    host = TimedHost(["mallory"])
    with pytest.raises(FederationTimeoutError, match="mallory"):
        play(host, session, Policy(size=4, deadline=10.0, patience=5.0), rounds=3)


@pytest.mark.parametrize("stray", STRAYS)
def test_without_rounds_a_reply_nobody_asked_for_changes_nothing_and_is_logged(stray, caplog):
    class Stray(InProcess):
        def receive(self, until):
            return [STRAYS[stray], *super().receive(until), STRAYS[stray]]

    hosts = [kind(NAMES) for kind in (InProcess, Stray)]
    for host in hosts:
        session = Session("uniform", ClientTable(names=NAMES), seed=1, asynchronous=True)
        play_flow(host, session, Policy(deadline=30.0), FlowPolicy(busy=3, buffer=2), 12)
    assert hosts[0].models == hosts[1].models and hosts[0].dispatched == hosts[1].dispatched
    assert "is dropped" in caplog.text


def test_without_rounds_nobody_answers_anothers_ticket():
    class Thief(InProcess):
        """Dora answers for whoever is at work before they can."""

        def receive(self, until):
            others = [cohort for cohort in self.flow.at_work if cohort.names != ("dora",)]
            return [*(Reply(cohort.ticket, "dora", content=1e9) for cohort in others), *super().receive(until)]

        def online(self):
            return Online(self.names)

    host = Thief(NAMES)
    session = Session("uniform", ClientTable(names=NAMES), seed=1, asynchronous=True)
    play_flow(host, session, Policy(deadline=30.0), FlowPolicy(busy=3, buffer=2), 12)
    assert max(host.models) < 100 and np.isfinite(host.models).all()
