"""The parts of a session one by one: members, rules, shadows, stateful selectors, pending cohorts, the journal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedcohort import ClientTable, Cohort, Selector, Session, Signal, Status, create
from fedcohort.core.errors import InputError, TicketError
from fedcohort.core.protocol import RoundRequest, Slate
from fedcohort.journal import Journal, ReplyBlock
from fedcohort.session.members import Membership
from fedcohort.session.pending import PendingCohorts
from fedcohort.session.recorder import EventRecorder
from fedcohort.session.referee import Referee
from fedcohort.session.resume import next_round, participations, referee_from
from fedcohort.session.rules import Rules
from fedcohort.session.shadows import Shadows
from fedcohort.session.stateful import StatefulSelector
from fedcohort.session.turn import Turn

TABLE = ClientTable(names=["anna", "ben", "cem", "dora"], sizes=[1, 2, 3, 4])
EVERYBODY = np.arange(4)


class Raises(type(create("uniform"))):  # type: ignore[misc]
    """A selector whose methods all fail."""

    def select(self, *_: Any) -> Any:
        raise ZeroDivisionError("select")

    def update(self, *_: Any) -> Any:
        raise ZeroDivisionError("update")

    def grow(self, *_: Any) -> Any:
        raise ZeroDivisionError("grow")


def running(selector: Selector[Any] | str, name: str = "") -> StatefulSelector:
    return StatefulSelector.initial(create(selector) if isinstance(selector, str) else selector, TABLE, 1, name)


def replies(clients: Any, **metrics: Any) -> ReplyBlock:
    block = ReplyBlock.with_status(0, 0.0, np.asarray(clients), Status.OK)
    columns = {name.replace("_", "-"): np.asarray(values, float) for name, values in metrics.items()}
    return ReplyBlock(0, 0.0, False, block.clients, block.status, np.ones(len(clients), bool), columns)


# -- members ----------------------------------------------------------------------------------------------------------


def test_members_are_replaced_not_changed():
    members = Membership.of(TABLE)
    after, indices = members.change(["ben"], member=False)
    assert indices.tolist() == [1] and members.active.all() and after.active.tolist() == [True, False, True, True]
    more = after.join(ClientTable(names=["eva"], sizes=[5]))
    assert more.table.names[-1] == "eva" and more.active.tolist() == [True, False, True, True, True]
    assert more.candidates(RoundRequest(2), np.array([0])).tolist() == [2, 3, 4]


def test_members_refuse_a_name_twice_and_facts_about_others():
    members = Membership.of(TABLE)
    with pytest.raises(InputError, match="'ben'"):
        members.join(ClientTable(names=["ben"], sizes=[5]))
    with pytest.raises(InputError):
        members.with_facts(ClientTable(names=["x", "ben", "cem", "dora"], sizes=[1, 2, 3, 4]))


# -- rules ------------------------------------------------------------------------------------------------------------


def test_a_referee_excludes_demands_and_counts():
    referee = Referee(Rules(blocked=("anna",), pinned=("dora",), max_participations=1), TABLE)
    found = referee.eligibility(0, 0, EVERYBODY)
    assert found.allowed.tolist() == [1, 2, 3] and found.demanded.tolist() == [3]
    assert found.reasons[found.codes[0] - 1] == "it is blocked"
    assert [part.tolist() if hasattr(part, "tolist") else part for part in found.remaining(2)] == [[1, 2], 1]
    cohort = referee.apply(Cohort([1]), found, 2, np.random.default_rng(0))
    assert cohort.clients.tolist() == [3, 1]
    referee.ledger.count_cohort(0, cohort.clients)
    assert referee.eligibility(1, 1, EVERYBODY).allowed.tolist() == [2]


def test_a_referee_knows_attributes_and_newcomers():
    referee = Referee(Rules(eligible="battery >= 30"), TABLE)
    referee.set_attributes({"cem": {"battery": 80}, "ben": {"battery": 10}})
    assert referee.eligibility(0, 0, EVERYBODY).allowed.tolist() == [2]
    referee.set_table(TABLE.with_clients(ClientTable(names=["eva"], sizes=[5])), 3)
    assert referee.ledger.n == 5 and referee.ledger.joined.tolist() == [0, 0, 0, 0, 3]


# -- stateful selectors -----------------------------------------------------------------------------------------------


def test_a_stateful_selector_is_immutable():
    before = running("oort")
    cohort = Cohort([0, 2], round=0, ticket=0)
    after = before.learn(cohort, replies([0, 2], loss_rms=[1.0, 2.0], duration=[1.0, 1.0]))
    assert after is not before and after.selector is before.selector
    again = before.learn(cohort, replies([0, 2], loss_rms=[1.0, 2.0], duration=[1.0, 1.0]))
    assert repr(after.state) == repr(again.state) != repr(before.state)
    assert before.missing_signals(replies([0, 2])) is not None
    grown = after.grow(TABLE.with_clients(ClientTable(names=["eva"], sizes=[5])), 1)
    assert grown.granted.n == 5 and after.granted.n == 4


# -- shadows ----------------------------------------------------------------------------------------------------------


def test_a_failing_shadow_is_named_and_dropped():
    shadows = Shadows({"good": running("uniform", "good"), "bad": running(Raises(), "bad")})
    picks = shadows.choose(Turn(1), Slate(0, 2, EVERYBODY, TABLE), None)
    assert len(picks["good"].picked) == 2 and not picks["good"].failed
    assert picks["bad"].failed and picks["bad"].note == "failed: select"
    assert set(shadows.after(picks).running) == {"good"}
    after, failed = shadows.learn(Cohort([0]), replies([0]))
    assert set(after.running) == {"good"} and failed == {"bad": "failed: update"}
    after, failed = shadows.try_each(lambda s: s.grow(TABLE.with_clients(ClientTable(names=["e"], sizes=[1])), 1))
    assert set(after.running) == {"good"} and failed == {"bad": "failed: grow"}
    assert set(shadows.running) == {"good", "bad"}


def test_a_shadow_without_its_signals_is_blind_until_it_learns_again():
    shadows = Shadows({"oort": running("oort", "oort")})
    blind, failed = shadows.learn(Cohort([0]), replies([0]))
    assert "loss-rms" in blind.blind["oort"] and not failed
    assert blind.choose(Turn(1), Slate(0, 1, EVERYBODY, TABLE), None)["oort"].note == blind.blind["oort"]
    seeing, _ = blind.learn(Cohort([0]), replies([0], loss_rms=[1.0], duration=[1.0]))
    assert not seeing.blind


def test_shadows_dropped_at_opening_leave_the_others_on_record(tmp_path):
    three = {name: create("uniform") for name in ("a", "b", "c")}
    with Session(create("uniform"), TABLE, journal=tmp_path / "j", shadows=three):
        pass
    with Session.open(tmp_path / "j", shadows={name: three[name] for name in ("b", "c")}) as session:
        assert set(session.shadows) == {"b", "c"}
    with Session.open(tmp_path / "j") as session:
        assert set(session.shadows) == {"b", "c"}


def test_shadows_that_fail_together_are_all_dropped(tmp_path):
    with Session(create("uniform"), TABLE, journal=tmp_path / "j", shadows={"x": Raises(), "y": Raises()}) as session:
        session.ask(RoundRequest(1))
        assert not session.shadows and session.journal.meta()["shadows"] == {}


# -- turns and pending cohorts ----------------------------------------------------------------------------------------


def test_every_attempt_at_a_round_draws_other_numbers():
    turn = Turn(7)
    draws = {float(t.stream("selection").random()) for t in (turn, turn.following(), turn.at_round(0, 1))}
    assert len(draws) == 3
    assert turn.stream("selection").random() == Turn(7).stream("selection").random() != turn.stream("query").random()


def test_pending_cohorts_name_who_is_missing():
    pending = PendingCohorts()
    pending.add(Cohort([4, 1, 3], ticket=2))
    (missing,) = pending.get(2).closing_replies([])
    assert missing.clients.tolist() == [4, 1, 3] and set(missing.status.tolist()) == {Status.MISSING}
    news, missing = pending.get(2).closing_replies([replies([1])])
    assert news.clients.tolist() == [1] and missing.clients.tolist() == [4, 3]
    with pytest.raises(TicketError, match=r"Ticket 5 is not pending. Pending: 2\."):
        pending.get(5)
    pending.remove(2)
    assert pending.find(2) is None and pending.training.tolist() == []


# -- the journal ------------------------------------------------------------------------------------------------------


def journal() -> Journal:
    meta = {"seed": 0, "selector": None, "shadows": {}, "signals": None, "rules": None, "host": None, "audit": False}
    made = Journal.create(None, meta)
    EventRecorder(made).record_creation(Membership.of(TABLE), [], None)
    return made


def asked(recorder: EventRecorder, turn: Turn, clients: list[int]) -> Cohort:
    cohort = Cohort(clients, round=turn.round, ticket=turn.ticket)
    primary = running("uniform")
    nothing: dict[str, Any] = {"answer": None, "scores": None, "picks": {}, "eligibility": None}
    recorder.record_cohort(cohort, len(clients), EVERYBODY, 4, primary=primary, shadows=Shadows(), **nothing)
    return cohort


def test_a_journal_is_enough_to_continue():
    recorder = EventRecorder(journal())
    first = asked(recorder, Turn(0), [0, 2])
    second = asked(recorder, Turn(0).following(), [2])
    closing = {"primary": running("uniform"), "shadows": Shadows(), "failed": {}, "turn": Turn(0, 2, 0, 2)}
    recorder.record_close(first, [replies([0, 2])], {"model": 1}, **closing)
    recorder.record_close(second, [], None, **closing, abandoned="tired")
    assert next_round(recorder.journal) == (1, 1)
    assert Turn.from_journal(recorder.journal, 0) == Turn(0, 1, 1, 2)
    assert participations(recorder.journal) == {"anna": 1, "ben": 0, "cem": 1, "dora": 0}
    assert referee_from(Rules(max_participations=1), recorder.journal).eligibility(
        1, 2, EVERYBODY
    ).allowed.tolist() == [
        1,
        3,
    ]
    assert recorder.journal.meta()["host"] == {"model": 1}
    assert PendingCohorts.from_journal(recorder.journal, TABLE).tickets == ()


def test_an_event_is_recorded_completely_or_not_at_all():
    recorder = EventRecorder(journal())
    turn = Turn(0)
    cohort = asked(recorder, turn, [0])

    file = recorder.journal
    before = file.cohorts(), file.events("abandoned"), file.replies()
    closing = {"primary": running("uniform"), "shadows": Shadows(), "failed": {}, "turn": turn.following()}
    with pytest.raises(InputError):
        recorder.record_close(cohort, [replies([0])], {"no JSON": object()}, **closing)
    after = file.cohorts(), file.events("abandoned"), file.replies()
    assert repr(before) == repr(after)


def test_the_journal_recognises_forgotten_names():
    session = Session(create("uniform"), TABLE)
    stand_in = session.forget("ben", block=True)
    recorder = EventRecorder(session.journal)
    assert recorder.blocked_names(["anna", "ben"]) == {"ben": stand_in}
    assert Signal.SIZES in session.table.signals
