"""TiFL: tiers, probabilities and credits by hand."""

import numpy as np
import pytest

from fedcohort import create
from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import RoundReport, RoundRequest, Status
from fedcohort.core.signals import Signal
from fedcohort.selectors.baselines.tifl import _by_rank
from fedcohort.session import Session


def tell(session, cohort, seconds, losses=None):
    metrics = {Signal.DURATION: [seconds[c] for c in cohort.clients.tolist()]}
    if losses is not None:
        metrics[Signal.LOSS] = [losses[c] for c in cohort.clients.tolist()]
    session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=metrics))


def profiled(selector, seconds, losses=None, seed=0):
    session = Session(selector, ClientTable(n=len(seconds)), seed=seed)
    tell(session, session.ask(RoundRequest(size=len(seconds))), seconds, losses)
    return session


def test_tiers_by_hand():
    selector = create("tifl", tiers=5)
    seconds = [4.0, 1.0, 10.0, 2.0, 9.0, 3.0, 6.0, 5.0, 8.0, 7.0]
    session = profiled(selector, seconds, [1.0] * 10)
    assert selector.tiers_of(session.state).tolist() == [(int(s) - 1) // 2 for s in seconds]
    equal = profiled(selector, [3.0] * 6, [1.0] * 6)
    assert len(set(selector.tiers_of(equal.state).tolist())) == 1
    zero = profiled(selector, [0.0] * 6, [0.0] * 6)
    assert zero.ask(RoundRequest(size=3)).size == 3
    one = profiled(selector, [2.0], [1.0])
    assert one.ask(RoundRequest(size=1)).clients.tolist() == [0]


def test_probabilities_by_hand():
    assert (_by_rank(np.array([0.5, 2.0, 1.0, 4.0])) * 10).tolist() == pytest.approx([1, 3, 2, 4])
    assert (_by_rank(np.array([1.0, 1.0, 2.0])) * 6).tolist() == pytest.approx([1.5, 1.5, 3])
    assert (_by_rank(np.array([np.nan, 1.0])) * 3).tolist() == pytest.approx([1, 2])
    assert _by_rank(np.zeros(4)).tolist() == [0.25] * 4


def test_every_client_is_timed_once_and_then_cohorts_are_of_one_tier():
    seconds = [float(10 ** (c // 4)) for c in range(12)]
    session = Session(create("tifl", tiers=3, adaptive=False), ClientTable(n=12), seed=1)
    seen = []
    for _ in range(3):
        cohort = session.ask(RoundRequest(size=4))
        seen += cohort.clients.tolist()
        tell(session, cohort, seconds)
    assert sorted(seen) == list(range(12))
    for _ in range(20):
        cohort = session.ask(RoundRequest(size=3))
        assert len({c // 4 for c in cohort.clients.tolist()}) == 1
        assert cohort.notes["tier"] == cohort.clients[0] // 4 + 1
        tell(session, cohort, seconds)


def test_credits_are_spent_and_renewed():
    seconds = [1.0, 1.0, 5.0, 5.0, 9.0, 9.0]
    session = profiled(create("tifl", tiers=3, credits=2, adaptive=False), seconds)
    for _ in range(2):  # 6 + 4 + 2 rounds, then again
        tiers = []
        for _ in range(12):
            cohort = session.ask(RoundRequest(size=1))
            tiers.append(cohort.notes["tier"])
            tell(session, cohort, seconds)
        assert [tiers.count(t) for t in (1, 2, 3)] == [6, 4, 2]
    unlimited = profiled(create("tifl", tiers=3, credits=None, adaptive=False), seconds)
    drawn = []
    for _ in range(300):
        cohort = unlimited.ask(RoundRequest(size=1))
        assert "credits left" not in cohort.notes
        drawn.append(cohort.notes["tier"])
        tell(unlimited, cohort, seconds)
    assert all(70 < drawn.count(t) < 130 for t in (1, 2, 3))


def test_probabilities_change_when_the_last_tier_has_not_improved():
    """Two tiers, I = 4: compared before rounds 4, 8, 12; the first comparison has no earlier losses."""
    seconds = [1.0, 1.0, 9.0, 9.0]
    for improves in (False, True):
        selector = create("tifl", tiers=2, interval=4, credits=None)
        session = profiled(selector, seconds, [2.0, 2.0, 3.0, 3.0])
        for t in range(12):
            cohort = session.ask(RoundRequest(size=2))
            fall = 0.1 * (t + 1) if improves else 0.0
            tell(session, cohort, seconds, [2.0 - fall, 2.0 - fall, 3.0 - fall, 3.0 - fall])
            if t < 8:
                assert session.state.chance.tolist() == [0.5, 0.5]
        expected = [0.5, 0.5] if improves else [1 / 3, 2 / 3]
        assert session.state.chance.tolist() == pytest.approx(expected)


def test_small_tiers_are_filled_up_from_the_nearest():
    seconds = [1.0, 2.0, 3.0, 40.0, 50.0, 60.0]
    session = profiled(create("tifl", tiers=6, adaptive=False), seconds)
    for _ in range(30):
        cohort = session.ask(RoundRequest(size=3))
        drawn = cohort.notes["tier"] - 1
        assert cohort.clients[0] == drawn
        distance = sorted(abs(c - drawn) for c in cohort.clients.tolist())
        assert distance == sorted(abs(c - drawn) for c in range(6))[:3]
        tell(session, cohort, seconds)


def test_tiers_without_candidates_are_not_drawn():
    session = profiled(create("tifl", tiers=2, credits=1, adaptive=False), [1.0, 1.0, 9.0, 9.0])
    for _ in range(10):
        cohort = session.ask(RoundRequest(size=1, available=[2, 3]))
        assert cohort.notes["tier"] == 2
        tell(session, cohort, [1.0, 1.0, 9.0, 9.0])


def test_clients_without_durations_are_slow_and_new_clients_are_timed():
    session = Session(create("tifl", tiers=2, profile=2, adaptive=False), ClientTable(n=4), seed=0)
    seconds = [1.0, 2.0, 3.0, 0.0, 1.0]
    for _ in range(2):
        cohort = session.ask(RoundRequest(size=4))
        status = [Status.MISSING if c == 3 else Status.OK for c in cohort.clients.tolist()]
        metrics = {Signal.DURATION: [seconds[c] for c in cohort.clients.tolist()]}
        session.tell(RoundReport(cohort.ticket, cohort.clients, status=status, metrics=metrics))
    assert session.ask(RoundRequest(size=1)).notes["never timed"] == 0
    assert session.selector.tiers_of(session.state)[3] == 1
    session.join(ClientTable(n=1))
    cohort = session.ask(RoundRequest(size=2))
    assert cohort.clients[0] == 4
    assert cohort.size == 2
