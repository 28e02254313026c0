"""A selector on trial: a shadow for some rounds, then the session's selector, whatever happens in between."""

import dataclasses
from contextlib import closing

import pytest

from fedcohort.audit.choices import audit_journal
from fedcohort.audit.replay import replay_journal
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import FedcohortError, InputError, SignalError
from fedcohort.core.protocol import RoundReport, Status
from fedcohort.core.signals import Signal
from fedcohort.hosts import orders
from fedcohort.hosts.orders import Order
from fedcohort.journal import read_journal
from fedcohort.selectors import Uniform
from fedcohort.session.session import Session

SIGNALS = (Signal.LOSS_RMS, Signal.DURATION)


def started(path=None, selector="uniform", n=12, **options):
    return Session(selector, ClientTable(sizes=range(1, n + 1)), seed=4, signals=SIGNALS, journal=path, **options)


def play(session, rounds, *, answers=SIGNALS):
    cohorts = []
    for _ in range(rounds):
        cohort = session.ask(3)
        metrics = dict.fromkeys(answers, 1.0 + cohort.clients)
        session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=metrics))
        cohorts.append(cohort.clients.tolist())
    return cohorts


def shadow_events(session):
    return [(body["name"], body["what"], body["round"]) for body in session.journal.events("shadow")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Breaking(Uniform):
    """Breaks in one of its functions from round 5 on, or when it starts to choose."""

    where: str = "update"

    def init(self, clients, rng):
        if self.where == "init":
            raise ValueError("broken in init")
        return super().init(clients, rng)

    def update(self, state, outcome):
        if self.where == "update" and outcome.round == 5:
            raise ValueError("broken in update")
        return super().update(state, outcome)

    def select(self, state, slate, answer, rng):
        if self.where == "select" and slate.round == 5:
            raise ValueError("broken in select")
        return super().select(state, slate, answer, rng)


def test_the_shadow_chooses_after_its_rounds_and_its_picks_are_on_record(tmp_path):
    with started(tmp_path / "j", audit=True) as session:
        play(session, 3)
        session.try_selector("oort", 10, order="o1")
        assert session.trial_signals >= {Signal.LOSS_RMS}
        play(session, 9)
        assert session.selector.name == "uniform" and list(session.shadows) == ["oort on trial"]
        play(session, 1)
        assert session.selector.name == "oort" and not session.shadows and not session.trial_signals
        play(session, 4)
        (change,) = session.journal.events("selector")
        assert (change["round"], change["order"], change["to"]["name"]) == (13, "o1", "oort")
        assert shadow_events(session) == [("oort on trial", "added", 3), ("oort on trial", "removed", 13)]
        picked = [
            row.round for row in session.journal.cohorts() if "oort on trial" in session.journal.scores(row.ticket)
        ]
        assert picked == list(range(3, 13))
    with closing(read_journal(tmp_path / "j")) as record:
        assert audit_journal(tmp_path / "j").problem is None
        assert replay_journal(record).problem is None


def test_a_watched_shadow_never_chooses(tmp_path):
    with started(tmp_path / "j") as session:
        session.try_selector("oort", 4, watch=True)
        play(session, 6)
        assert session.selector.name == "uniform" and not session.shadows
        assert shadow_events(session) == [("oort on trial", "added", 0), ("oort on trial", "removed", 4)]


@pytest.mark.parametrize("where", ["update", "select"])
def test_a_shadow_that_fails_does_not_take_over(where, tmp_path):
    with started(tmp_path / "j") as session:
        session.try_selector(Breaking(where=where), 10)
        play(session, 14)
        assert session.selector.name == "uniform" and not session.shadows
        assert shadow_events(session)[-1][1] == "failed" and shadow_events(session)[-1][2] in (5, 6)


def test_what_cannot_be_tried_changes_nothing(tmp_path):
    with started(tmp_path / "j") as session:
        play(session, 2)
        for selector, rounds in ((Breaking(where="init"), 3), ("fedcbs", 3), ("oort", 0), ("oort", True)):
            with pytest.raises(FedcohortError):
                session.try_selector(selector, rounds)
        assert not session.shadows and not session.journal.events("shadow")


def test_the_newest_order_counts(tmp_path):
    with started(tmp_path / "j") as session:
        session.try_selector("oort", 5)
        play(session, 2)
        session.try_selector("size-weighted", 5)
        play(session, 4)
        assert session.selector.name == "uniform" and list(session.shadows) == ["size-weighted on trial"]
        session.change_selector("fedcompass")
        play(session, 8)
        assert session.selector.name == "fedcompass" and not session.shadows
        session.try_selector("oort", 3)
        session.try_selector("oort", 6)  # the same again begins anew
        play(session, 4)
        assert session.selector.name == "fedcompass"
        play(session, 2)
        assert session.selector.name == "oort"


def test_a_restart_at_any_moment_makes_the_same_cohorts(tmp_path):
    with started(tmp_path / "whole") as session:
        session.try_selector("oort", 4)
        whole = play(session, 8)
    started(tmp_path / "parts").close()
    parts = []
    for number in range(8):
        with Session.open(tmp_path / "parts") as session:
            if number == 0:
                session.try_selector("oort", 4)
            cohort = session.ask(3)
        with Session.open(tmp_path / "parts") as session:  # killed while the cohort trains
            assert session.selector.name == ("uniform" if number < 4 else "oort")
            metrics = dict.fromkeys(SIGNALS, 1.0 + cohort.clients)
            session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=metrics))
            parts.append(cohort.clients.tolist())
    assert parts == whole


def test_a_loop_that_is_started_as_it_was_begun_goes_on_as_ordered(tmp_path):
    def begun():
        return Session.open_or_create(
            tmp_path / "j", "uniform", ClientTable(sizes=range(1, 13)), seed=4, signals=SIGNALS, shadows={"own": "refl"}
        )

    with begun() as session:
        play(session, 2)
        orders.give(tmp_path / "j", Order(selector="oort", trial=3))
        orders.take(session)
    for rounds, name in ((1, "uniform"), (2, "oort"), (1, "oort")):
        with begun() as session:
            play(session, rounds)
            assert session.selector.name == name and "own" in session.shadows
    with begun() as session:
        orders.give(tmp_path / "j", Order(selector="size-weighted"))
        orders.take(session)
    with begun() as session:
        assert session.selector.name == "size-weighted" and list(session.shadows) == ["own"]
    with pytest.raises(FedcohortError):  # neither what it was begun with nor what was ordered
        Session.open(tmp_path / "j", "e3cs")


def test_without_rounds_models_are_counted_and_earlier_clients_may_not_have_reported(tmp_path):
    with started(tmp_path / "j", asynchronous=True) as session:
        session.try_selector("oort-async", 2)
        at_work = [session.ask(1) for _ in range(3)]
        session.advance()
        session.advance()
        assert session.selector.name == "oort-async"
        at_work.append(session.ask(1))
        for cohort in at_work[:3]:  # asked by the first selector, which needs no losses
            session.tell(RoundReport(cohort.ticket, cohort.clients))
            assert session.journal.replies(cohort.ticket)[0].status == Status.OK
        with pytest.raises(SignalError):
            session.tell(RoundReport(at_work[3].ticket, at_work[3].clients))
    with Session.open(tmp_path / "j") as session:
        metrics = {Signal.LOSS_RMS: [1.0], Signal.DURATION: [2.0]}
        session.tell(RoundReport(at_work[3].ticket, at_work[3].clients, metrics=metrics))
        assert not session.pending
        with pytest.raises(InputError):
            session.try_selector("oort", 3)  # cannot choose one client at a time


def test_a_forgotten_client_with_the_selectors_name_does_not_end_the_trial():
    session = Session(
        "uniform", ClientTable(names=["oort", "b", "c", "d"], sizes=[1, 2, 3, 4]), seed=4, signals=SIGNALS
    )
    session.try_selector("oort", 3)
    session.forget("oort")
    play(session, 3)
    assert session.selector.name == "oort"


def test_an_order_is_carried_out_once(tmp_path):
    path = tmp_path / "j"
    with started(path) as session:
        orders.give(path, Order(selector="oort", trial=2, id="a"))
        orders.give(path, Order(selector="no-such", id="b"))
        orders.give(path, Order(selector="fedcbs", id="c"))  # needs labels, which are not on record
        orders.give(path, Order(selector="never-imported.py:Nobody", id="d"))
        assert [order.id for order in orders.take(session)] == ["a"]
        refused = {body["order"]: body["reason"] for body in session.journal.events("order-refused")}
        assert refused.keys() == {"b", "c", "d"} and "imported" in refused["d"]
        play(session, 2)
        assert session.selector.name == "oort"
        # A kill between the change and the deletion of its file.
        orders.give(path, Order(selector="oort", trial=2, id="a"))
        assert orders.take(session) == [] and not session.shadows and not orders.waiting(path)


@pytest.mark.parametrize(
    "text",
    [
        '{"selector": 3}',
        '{"selector": "oort", "trial": -1}',
        '{"selector": "oort", "trial": true}',
        '{"selector": "oort", "watch": 1}',
        '{"selector": "oort", "block": ["1"]}',
    ],
)
def test_an_order_that_makes_no_sense_is_ignored(text, tmp_path):
    path = tmp_path / "j"
    with started(path) as session:
        orders.give(path, Order(selector="oort"))
        (file,) = path.with_name("j.orders").iterdir()
        file.write_text(text)
        assert orders.take(session) == [] and session.selector.name == "uniform"
