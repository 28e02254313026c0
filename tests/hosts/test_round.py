"""Rounds played by a script, without training and messages, on a clock that is a number."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcohort.audit.choices import audit_journal
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError, ParameterError
from fedcohort.core.protocol import Answer, Cohort, Losses, Selector, Status
from fedcohort.core.signals import Signal
from fedcohort.hosts.live import Aggregation, play
from fedcohort.hosts.orders import Order, give
from fedcohort.hosts.round import FederationTimeoutError, Policy, Reply, Round, RoundError, closing
from fedcohort.selectors import Uniform
from fedcohort.session import Session
from fedcohort.session.rules import Rules

from .scripted import TimedHost, in_time, reports_of

OK, FAILED, INVALID, LATE, MISSING = Status.OK, Status.FAILED, Status.INVALID, Status.LATE, Status.MISSING
NAMES = [f"c{i}" for i in range(6)]


@dataclasses.dataclass(frozen=True)
class Nothing:
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class First(Selector[Nothing]):
    """Takes the first candidates, and asks and stops if a test says so."""

    asks: bool = False
    stop_at: int | None = None
    weighs: bool = False
    name = "first"

    @property
    def requires(self) -> frozenset[Signal]:
        return frozenset({Losses.needs}) if self.asks else frozenset()

    def init(self, clients: Any, rng: Any) -> Nothing:
        return Nothing()

    def query(self, state: Any, slate: Any, rng: Any) -> Losses | None:
        return Losses(slate.candidates) if self.asks else None

    def select(self, state: Any, slate: Any, answer: Any, rng: Any) -> tuple[Cohort, Nothing]:
        if self.stop_at is not None and slate.round >= self.stop_at:
            return Cohort(slate.candidates[:0], stop="enough is enough"), state
        order = slate.candidates if answer is None else slate.candidates[np.argsort(-answer[Signal.LOSS])]
        chosen = order[: slate.size]
        return Cohort(chosen, weights=1.0 + chosen if self.weighs else None), state

    def update(self, state: Any, outcome: Any) -> Nothing:
        return state


def session_of(selector: Selector[Any] | None = None, **given: Any) -> Session:
    return Session(selector or First(), ClientTable(names=NAMES), **given)


def statuses(session: Session, ticket: int = 0) -> dict[str, Status]:
    return {session.table.name(reply.client): Status(reply.status) for reply in session.journal.replies(ticket)}


# -- when a round closes -----------------------------------------------------------------------------------------------


def by_hand(seconds: list[float], status: list[int], deadline: float | None, enough: int) -> tuple[list[int], float]:
    """Go through the arrivals one by one, like a host that waits."""
    end = max(seconds, default=0.0)
    valid = 0
    for at, what in sorted(zip(seconds, status, strict=True)):
        valid += what == OK
        if valid >= enough:
            end = at
            break
    end = min(end, end if deadline is None else deadline)
    return [LATE if at > end and what != MISSING else what for at, what in zip(seconds, status, strict=True)], end


@settings(max_examples=300, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from([0.0, 1.0, 2.0, 2.5, 4.0, float("inf")]), st.sampled_from([OK, FAILED, INVALID])),
        max_size=8,
    ),
    deadline=st.sampled_from([None, 0.5, 2.0, 3.0]),
    spares=st.integers(0, 3),
)
def test_a_round_closes_as_somebody_who_waits_would_close_it(arrivals: Any, deadline: Any, spares: int) -> None:
    arrivals = [(at, MISSING if at == float("inf") else what) for at, what in arrivals]
    seconds, status = [at for at, _ in arrivals], [int(what) for _, what in arrivals]
    enough = max(len(arrivals) - spares, 1)
    before = np.array(status, np.int8)
    found = closing(np.array(seconds, float), before, deadline=deadline, enough=enough)
    assert (found.status.tolist(), found.seconds) == by_hand(seconds, status, deadline, enough)
    assert before.tolist() == status


def test_a_reply_at_the_very_deadline_counts() -> None:
    found = closing(np.array([2.0, 2.0 + 1e-9]), np.zeros(2, np.int8), deadline=2.0)
    assert found.status.tolist() == [OK, LATE] and found.seconds == 2.0


# -- rounds of a live host ---------------------------------------------------------------------------------------------


def test_without_a_deadline_everybody_is_waited_for() -> None:
    host = TimedHost(NAMES, lambda cohort, name: (float(name[1:]) * 100, OK))
    with session_of() as session:
        assert play(host, session, Policy(size=6), rounds=2) is None
        assert session.round == 2 and host.time == 1000.0
        assert set(statuses(session).values()) == {OK}


def test_spares_close_a_round_with_the_first_valid_models() -> None:
    """Four models are needed and six clients are asked: a failure does not count, and the slowest client is late."""
    arrivals = {
        "c0": (1.0, FAILED),
        "c1": (9.0, OK),
        "c2": (2.0, OK),
        "c3": (2.0, OK),
        "c4": (3.0, OK),
        "c5": (5.0, OK),
    }
    host = TimedHost(NAMES, lambda cohort, name: arrivals[name])
    with session_of() as session:
        play(host, session, Policy(size=4, spares=2), rounds=1)
        assert host.time == 5.0
        assert statuses(session) == {"c0": FAILED, "c1": MISSING, "c2": OK, "c3": OK, "c4": OK, "c5": OK}
        assert host.rounds[0].reasons == {"c0": "c0 is FAILED", "c1": "the round was closed with enough others"}


def test_a_deadline_closes_a_round_and_late_replies_are_recorded_as_such() -> None:
    host = TimedHost(NAMES, lambda cohort, name: (12.0 if name == "c1" and cohort.round == 0 else 4.0, OK))
    with session_of() as session:
        play(host, session, Policy(size=3, deadline=10.0), rounds=2)
        assert host.rounds[0].reasons == {"c1": "no answer within 10 s"}
        assert ("late", "c1", 0) in host.events
        assert statuses(session, 0) == {"c0": OK, "c1": LATE, "c2": OK}
        assert set(statuses(session, 1).values()) == {OK}  # a late reply does not count as one of the next round


def test_the_clock_may_round() -> None:
    """0.1 + 0.7 is less than 0.8, which must not prolong a round beyond its deadline."""
    host = TimedHost(NAMES, lambda cohort, name: None if name == "c0" else (0.1, OK))
    host.time = 0.1
    with session_of() as session:
        play(host, session, Policy(size=2, deadline=0.7), rounds=3)
        assert session.round == 3


def test_a_round_without_a_model_is_tried_without_those_who_failed() -> None:
    host = TimedHost(NAMES, lambda cohort, name: (1.0, FAILED if name == "c1" else OK))
    with session_of() as session:
        play(host, session, Policy(size=2, min_replies=2), rounds=2)
        # The second round may choose the client that failed before.
        assert host.cohorts() == [("c0", "c1"), ("c0", "c2"), ("c0", "c1"), ("c0", "c2")]
        assert [row.round for row in session.journal.cohorts()] == [0, 0, 1, 1]
        assert statuses(session, 0) == {"c0": OK, "c1": FAILED}


def test_who_failed_is_asked_again_where_the_others_are_too_few() -> None:
    failing = iter([FAILED, OK])
    host = TimedHost(["c0", "c1"], lambda cohort, name: (1.0, next(failing) if name == "c1" else OK))
    with session_of() as session:
        play(host, session, Policy(size=2, min_replies=2), rounds=1)
        assert host.cohorts() == [("c0", "c1"), ("c0", "c1")]


def test_too_few_replies_end_the_run_after_some_tries() -> None:
    host = TimedHost(["c0", "c1"], lambda cohort, name: (1.0, INVALID))
    with session_of() as session:
        with pytest.raises(RoundError, match=r"Round 0 .* 4 tries.*c0: c0 is INVALID.*too few valid models"):
            play(host, session, Policy(size=2, tries=4), rounds=1)
        assert len(host.cohorts()) == 4 and session.round == 0 and not session.pending


def test_a_try_that_names_somebody_new_does_not_count() -> None:
    """Five clients fail, one after the other; the sixth is still found with two tries."""
    host = TimedHost(NAMES, lambda cohort, name: (1.0, OK if name in ("c0", "c5") else FAILED))
    with session_of() as session:
        play(host, session, Policy(size=2, min_replies=2, tries=2), rounds=1)
        assert host.cohorts()[-1] == ("c0", "c5") and len(host.cohorts()) == 5


def test_who_was_silent_counts_as_failed_when_a_round_is_abandoned_but_only_if_somebody_answered() -> None:
    host = TimedHost(NAMES, lambda cohort, name: None if name == "c1" and cohort.ticket == 0 else (1.0, OK))
    with session_of() as session:
        play(host, session, Policy(size=2, min_replies=2, deadline=5.0), rounds=1)
        assert statuses(session, 0) == {"c0": OK, "c1": FAILED}
    host = TimedHost(NAMES, lambda cohort, name: None if cohort.ticket == 0 else (1.0, OK))
    with session_of() as session:
        play(host, session, Policy(size=2, deadline=5.0), rounds=1)
        assert statuses(session, 0) == {"c0": MISSING, "c1": MISSING}


def test_who_could_not_be_reached_is_missing() -> None:
    host = TimedHost(NAMES)
    host.unreachable = {"c1": "its line is dead"}
    with session_of() as session:
        play(host, session, Policy(size=3), rounds=1)
        assert statuses(session) == {"c0": OK, "c1": MISSING, "c2": OK}
        assert "its line is dead" in session.explain(0).failures["c1"]


def test_a_selector_ends_the_run() -> None:
    host = TimedHost(NAMES)
    with session_of(First(stop_at=2)) as session:
        assert play(host, session, Policy(size=2), rounds=10) == "enough is enough"
        assert len(host.cohorts()) == 2


def test_a_round_with_an_empty_cohort_passes_without_a_message() -> None:
    class Alone(TimedHost):
        def online(self) -> Any:
            return dataclasses.replace(super().online(), clients=np.arange(6))

    host = Alone(NAMES)
    with session_of(rules=Rules(max_participations=1)) as session:
        # Everybody takes part once. Then the rules admit nobody, and the run waits until its patience ends.
        with pytest.raises(FederationTimeoutError, match="rules"):
            play(host, session, Policy(size=6, patience=3.0), rounds=3)
        assert session.round == 1
    with session_of(First(stop_at=0)) as session:
        assert play(host, session, Policy(size=2), rounds=1) == "enough is enough"


def test_questions_are_answered_before_the_choice() -> None:
    class Knows(TimedHost):
        def answer(self, query: Any, available: Any) -> Answer:
            assert available.tolist() == list(range(6))
            return Answer(query, {Signal.LOSS: query.clients.astype(float)})

    host = Knows(NAMES)
    with session_of(First(asks=True), signals={Losses.needs}) as session:
        play(host, session, Policy(size=2), rounds=1)
        assert host.cohorts() == [("c5", "c4")]
    with session_of(First(asks=True), signals={Losses.needs}) as session:
        with pytest.raises(InputError, match="answers no questions"):
            play(TimedHost(NAMES), session, Policy(size=2), rounds=1)
        assert session.round == 0 and not session.pending


@pytest.mark.parametrize("method", ["online", "send", "receive", "combine", "store"])
def test_a_host_that_raises_leaves_a_journal_that_goes_on(method: str, tmp_path: Path) -> None:
    class Broken(TimedHost):
        pass

    def fail(self: Any, *_: Any) -> Any:
        raise RuntimeError("out of order")

    setattr(Broken, method, fail)
    with session_of(journal=tmp_path / "j") as session, pytest.raises(RuntimeError, match="out of order"):
        play(Broken(NAMES), session, Policy(size=2), rounds=2)
    with Session.open(tmp_path / "j", First()) as session:
        host = TimedHost(NAMES)
        play(host, session, Policy(size=2), rounds=2)
        assert session.round == 2 and not session.pending
        assert host.cohorts() == [("c0", "c1")] * 2
        assert [row.round for row in session.journal.cohorts()] == [0, 1]


def test_a_cohort_that_is_cut_off_too_often_is_chosen_anew(tmp_path: Path) -> None:
    class Cut(TimedHost):
        def receive(self, until: float) -> Any:
            if self.on_the_way:
                raise KeyboardInterrupt
            return super().receive(until)

    session_of(journal=tmp_path / "j").close()
    for _ in range(3):
        with Session.open(tmp_path / "j", First()) as session, pytest.raises(KeyboardInterrupt):
            play(Cut(NAMES), session, Policy(size=2), rounds=1)
    with Session.open(tmp_path / "j", First()) as session:
        host = TimedHost(NAMES[2:])
        play(host, session, Policy(size=2), rounds=1)
        assert host.cohorts() == [("c2", "c3")]
        (body,) = session.journal.events("abandoned")
        assert body["reason"] == "not finished in 3 tries"


def test_who_failed_before_a_restart_is_left_out_after_it(tmp_path: Path) -> None:
    session_of(journal=tmp_path / "j").close()
    with Session.open(tmp_path / "j", First()) as session, pytest.raises(RoundError):
        play(TimedHost(["c0", "c1"], lambda *_: (1.0, FAILED)), session, Policy(size=2, tries=1), rounds=1)
    with Session.open(tmp_path / "j", First()) as session:
        host = TimedHost(NAMES)
        play(host, session, Policy(size=2), rounds=1)
        assert host.cohorts() == [("c2", "c3")]


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_it_waits_for_clients_and_gives_up_after_its_patience() -> None:
    host = TimedHost(lambda now: NAMES if now >= 7 else NAMES[:3])
    with session_of() as session:
        play(host, session, Policy(size=2, wait_for=5), rounds=1)
        assert 8.0 <= host.time <= 8.5
        assert ("waiting", "3 of 5 clients have been online") in host.events
    with session_of() as session:
        with pytest.raises(FederationTimeoutError, match="3 of 5 clients have been online for 4 s in round 0"):
            play(TimedHost(NAMES[:3]), session, Policy(size=2, wait_for=5, patience=4.0), rounds=1)
        assert session.round == 0


def test_who_is_busy_is_asked_when_nobody_else_comes() -> None:
    host = TimedHost(["c0", "c1"])
    host.busy = ["c0"]
    with session_of() as session:
        play(host, session, Policy(size=1), rounds=1)
        assert host.cohorts() == [("c1",)]
        host.busy = ["c0", "c1"]
        play(host, session, Policy(size=1, patience=30.0), rounds=2)
        assert host.cohorts()[1:] == [("c0",)] and host.time >= 30


def test_a_share_of_those_who_are_online_is_asked() -> None:
    host = TimedHost(NAMES)
    with session_of() as session:
        play(host, session, Policy(size=lambda online: online // 2), rounds=1)
        assert host.cohorts() == [("c0", "c1", "c2")]


def test_an_operators_order_holds_from_the_next_round_on(tmp_path: Path) -> None:
    class Ordered(TimedHost):
        def on_closed(self, round_: Round, aggregation: Aggregation) -> None:
            if round_.cohort.round == 0:
                give(tmp_path / "j", Order(block=["c0"]))

    host = Ordered(NAMES)
    with session_of(journal=tmp_path / "j") as session:
        play(host, session, Policy(size=2), rounds=2)
    assert host.cohorts() == [("c0", "c1"), ("c1", "c2")]


# -- differential privacy ----------------------------------------------------------------------------------------------


def test_noise_for_so_many_models_is_never_added_to_fewer() -> None:
    host = TimedHost(NAMES, lambda cohort, name: (1.0, FAILED if name == "c1" else OK))
    with session_of() as session:
        play(host, session, Policy(size=3, private=True), rounds=1)
        assert host.cohorts() == [("c0", "c1", "c2"), ("c0", "c2", "c3")]
        assert ("abandoned", 0, "2 valid models came, but the privacy noise is calibrated for 3") in host.events
    with (
        session_of() as session,
        pytest.raises(FederationTimeoutError, match=r"2 clients could be chosen.*calibrated for 3"),
    ):
        play(TimedHost(NAMES[:2]), session, Policy(size=3, private=True, patience=2.0), rounds=1)


# -- the round by itself -----------------------------------------------------------------------------------------------


def test_rounds_of_one_client_may_be_open_at_the_same_time() -> None:
    """Several rounds are open at once, and every reply goes to the round of its ticket."""
    policy = Policy(size=1)
    with session_of(Uniform()) as session:
        training: dict[int, Round] = {}
        seen: list[str] = []

        def begin() -> None:
            round_ = Round(session, policy)
            round_.open()
            training[round_.choose().ticket] = round_

        for _ in range(3):
            begin()
        for turn in range(20):
            ticket = list(training)[turn * 7 % 3]
            round_ = training.pop(ticket)
            (name,) = round_.cohort.names
            round_.receive(Reply(ticket, name), float(turn))
            assert round_.is_closed(float(turn))
            round_.finish(np.array([True]))
            seen.append(name)
            begin()  # another client takes its place while the others continue
            assert len({n for r in training.values() for n in r.cohort.names}) == 3
        assert len(session.pending) == 3 and session.round == 23 and set(seen) == set(NAMES)


def test_a_second_reply_of_a_client_is_ignored_and_one_of_a_stranger_refused() -> None:
    with session_of() as session:
        round_ = Round(session, Policy(size=2))
        round_.open()
        ticket = round_.choose().ticket
        round_.receive(Reply(ticket, "c0"), 1.0)
        round_.receive(Reply(ticket, "c0", FAILED, "no"), 2.0)
        assert round_.status.tolist() == [OK, MISSING] and not round_.reasons
        with pytest.raises(InputError, match="'c5' is not in the cohort"):
            round_.receive(Reply(ticket, "c5"), 2.0)


@pytest.mark.parametrize(
    "wrong",
    [{"size": 0}, {"size": 2.5}, {"spares": -1}, {"deadline": 0.0}, {"deadline": float("nan")}, {"min_replies": -1},
     {"tries": 0}, {"wait_for": 0}, {"patience": -1.0}],
    ids=str,
)  # fmt: skip
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ParameterError, match=f"{name!r}.*{value}"):
        Policy(**wrong)


# -- late models -------------------------------------------------------------------------------------------------------


class Summing(TimedHost):
    """Adds up whose models are in each average, late ones with their staleness."""

    def combine(self, round_: Round) -> Aggregation:
        found = super().combine(round_)
        self.events.append(
            (
                "average",
                round_.cohort.round,
                [(one.reply.client, one.reply.ticket, one.staleness, one.times) for one in round_.late],
            )
        )
        return dataclasses.replace(found, late=round_.late)


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("late", ["discard", "count"])
def test_a_late_model_counts_in_the_next_round_that_closes_if_it_is_to(late: Any, weighs: bool, tmp_path: Path) -> None:
    slow = {("c1", 0): 12.0, ("c2", 0): 100.0, ("c3", 0): 25.0}

    def script(cohort: Cohort, name: str) -> tuple[float, Status]:
        return slow.get((name, cohort.ticket), 1.0), OK

    def online(now: float) -> list[str]:  # clients at work are not asked
        return [name for name in NAMES if now >= slow.get((name, 0), 0.0) or now == 0.0]

    with session_of(First(weighs=weighs), journal=tmp_path / "j", audit=True) as session:
        host = Summing(online, script)
        play(host, session, Policy(size=6, deadline=10.0, late=late), rounds=20)
        notes, status = session.journal.events("late-counted"), statuses(session)
    averages = {number: found for kind, number, found in (e for e in host.events if e[0] == "average") if found}
    # Round 0 lasts ten seconds, each later one a second: round 2 closes at 12 s, round 15 at 25 s.
    expected = {2: [("c1", 0, 2, 2.0 if weighs else 1.0)], 15: [("c3", 0, 15, 4.0 if weighs else 1.0)]}
    assert averages == (expected if late == "count" else {})
    assert [(note["round"], note["clients"]) for note in notes] == [
        (number, {client: {"ticket": ticket, "staleness": stale}})
        for number, ((client, ticket, stale, _),) in (expected.items() if late == "count" else ())
    ]
    assert status["c1"] is LATE and status["c2"] is MISSING
    assert audit_journal(tmp_path / "j", First(weighs=weighs)).problem is None


def test_a_late_model_of_a_client_that_has_answered_again_is_left_out() -> None:
    def script(cohort: Cohort, name: str) -> tuple[float, Status]:
        return (12.0 if (name, cohort.ticket) == ("c1", 0) else 3.0), OK

    with session_of() as session:
        host = Summing(NAMES, script)
        play(host, session, Policy(size=6, deadline=10.0, late="count"), rounds=4)
        assert not session.journal.events("late-counted")
    assert [event[2] for event in host.events if event[0] == "average"] == [[]] * 4


def test_late_models_cannot_be_counted_under_differential_privacy() -> None:
    with pytest.raises(ParameterError, match="differential privacy"):
        Policy(size=4, private=True, late="count")


# -- one rule for both -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spares", [0, 2])
@pytest.mark.parametrize("deadline", [None, 12.0])
def test_arrivals_one_by_one_and_at_once_give_the_same_reports(
    spares: int, deadline: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(size=4, spares=spares, deadline=deadline, min_replies=0)
    draw = np.random.default_rng(5)
    seconds, failed = draw.uniform(1, 19, (30, 6)).round(1), draw.random((30, 6)) < 0.2

    def script(cohort: Cohort, name: str) -> tuple[float, Status]:
        client = NAMES.index(name)
        return seconds[cohort.round, client], FAILED if failed[cohort.round, client] else OK

    def at_once(session: Session) -> None:
        for number in range(30):
            round_ = Round(session, policy)
            round_.open()
            clients = round_.choose().clients
            round_.settle(seconds[number, clients], np.where(failed[number, clients], FAILED, OK).astype(np.int8))
            round_.finish(round_.status == OK)

    with session_of(Uniform(), seed=3) as session, session_of(Uniform(), seed=3) as twin:
        live = reports_of(lambda: play(TimedHost(NAMES, script), session, policy, rounds=30), monkeypatch)
        simulated = reports_of(lambda: at_once(twin), monkeypatch)
    closed = [report for report in live if report[3] is not None]  # the others are about late replies
    assert closed == [in_time(report) for report in simulated]
    assert (len(closed) < len(live)) == (spares > 0 or deadline is not None)
