"""FedCM-UCB and FedCM-TS: traces computed by hand from Algorithms 2 and 3, and through the session."""

import math
from fractions import Fraction

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import RoundReport, RoundRequest, Slate, Status
from fedcohort.core.signals import Signal
from fedcohort.selectors.papers.fedcm.selector import FedCmTs, FedCmUcb, _ThompsonState, _UcbState
from fedcohort.session import Session

# Ten rounds of a federation of three: the clients asked, and those of them that were kept.
ROUNDS = [
    ((0, 1), (0,)),
    ((1, 2), (1, 2)),
    ((0, 2), ()),
    ((0, 1), (0, 1)),
    ((2,), (2,)),
    ((0, 1, 2), (1,)),
    ((1, 2), (1,)),
    ((0,), ()),
    ((0, 2), (2,)),
    ((1, 2), (1, 2)),
]


def outcome(session, cohort, kept, status=None):
    kept_mask = np.isin(cohort.clients, kept)
    session.tell(RoundReport(cohort.ticket, cohort.clients, status=status, kept=kept_mask))


def ask(session, clients):
    cohort = session.ask(RoundRequest(size=len(clients), available=list(clients)))
    assert sorted(cohort.clients.tolist()) == sorted(clients)
    return cohort


def test_ucb_trace_by_hand():
    session = Session(FedCmUcb(), ClientTable(n=3), seed=0)
    start = session.state.mean.copy()
    assert set(start.tolist()) <= {0.0, 1.0}
    # With a_k = 1 and mu_k drawn at the start, mu_k is (mu_0 + times kept) / (1 + times asked).
    asked_so_far, kept_so_far = [0, 0, 0], [0, 0, 0]
    for t, (asked, kept) in enumerate(ROUNDS, start=1):
        cohort = ask(session, asked)
        for position, client in enumerate(sorted(asked)):
            mean = Fraction(int(start[client]) + kept_so_far[client], 1 + asked_so_far[client])
            bound = float(mean) + math.sqrt(3 * math.log(t) / (2 * (1 + asked_so_far[client])))
            assert cohort.score[position] == pytest.approx(bound, rel=1e-12)
            assert cohort.parts["estimate"][position] + cohort.parts["exploration"][position] == cohort.score[position]
        outcome(session, cohort, kept)
        for client in asked:
            asked_so_far[client] += 1
            kept_so_far[client] += client in kept
    assert session.state.pulls.tolist() == [7, 7, 8]
    np.testing.assert_allclose(session.state.mean, [(start[0] + 2) / 7, (start[1] + 5) / 7, (start[2] + 4) / 8])


def test_ucb_picks_the_largest_bounds():
    state = _UcbState(mean=np.array([0.2, 0.6, 0.5, 1.0]), pulls=np.array([4.0, 16.0, 9.0, 400.0]))
    t = 11
    bounds = [m + math.sqrt(3 * math.log(t) / (2 * a)) for m, a in zip(state.mean, state.pulls, strict=True)]
    slate = Slate(round=t - 1, size=2, candidates=np.arange(4), clients=ClientTable(n=4))
    cohort, after = FedCmUcb().select(state, slate, None, np.random.default_rng(0))
    assert cohort.clients.tolist() == np.argsort(bounds)[::-1][:2].tolist()
    assert after is state


def test_ucb_first_round_takes_those_that_drew_one_and_breaks_ties_at_random():
    picks = np.zeros(40)
    for seed in range(300):
        session = Session(FedCmUcb(), ClientTable(n=40), seed=seed)
        cohort = session.ask(RoundRequest(size=5))
        assert (session.state.mean[cohort.clients] == 1).all()
        picks[cohort.clients] += 1
    assert picks.min() > 10 and picks.max() < 80  # 37.5 on average, standard deviation about 6


def test_beta_trace_by_hand():
    session = Session(FedCmTs(), ClientTable(n=3), seed=0)
    alpha, beta = [1, 1, 1], [1, 1, 1]
    for asked, kept in ROUNDS:
        cohort = ask(session, asked)
        for position, client in enumerate(sorted(asked)):
            assert cohort.parts["estimate"][position] == pytest.approx(alpha[client] / (alpha[client] + beta[client]))
            assert 0 < cohort.score[position] < 1
        outcome(session, cohort, kept)
        for client in asked:
            alpha[client] += client in kept
            beta[client] += client not in kept
        assert session.state.kept.tolist() == alpha
        assert session.state.dropped.tolist() == beta
    assert (alpha, beta) == ([3, 6, 5], [5, 2, 4])


def test_thompson_picks_with_the_probability_of_the_largest_draw():
    # P(Beta(2, 1) > Beta(1, 1)) = 2/3.
    state = _ThompsonState(kept=np.array([2.0, 1.0]), dropped=np.array([1.0, 1.0]))
    slate = Slate(round=3, size=1, candidates=np.arange(2), clients=ClientTable(n=2))
    rng = np.random.default_rng(1)
    first = sum(int(FedCmTs().select(state, slate, None, rng)[0].clients[0]) == 0 for _ in range(6000))
    assert abs(first / 6000 - 2 / 3) < 4 * math.sqrt(2 / 9 / 6000)


@pytest.mark.parametrize("selector", [FedCmUcb(), FedCmTs()])
def test_a_failed_client_counts_as_not_kept(selector):
    session = Session(selector, ClientTable(n=2), seed=1)
    start = session.state
    cohort = ask(session, (0, 1))
    order = cohort.clients.tolist()
    outcome(session, cohort, (0, 1), status=[Status.FAILED if c == 1 else Status.OK for c in order])
    if isinstance(selector, FedCmTs):
        assert session.state.kept.tolist() == [2, 1] and session.state.dropped.tolist() == [1, 2]
    else:
        assert session.state.mean.tolist() == [(start.mean[0] + 1) / 2, start.mean[1] / 2]
    assert selector.requires == {Signal.KEPT}


@pytest.mark.parametrize("selector", [FedCmUcb(), FedCmTs()])
def test_learns_which_clients_are_kept(selector):
    good = np.arange(30) < 6
    session = Session(selector, ClientTable(n=30), seed=4)
    rng = np.random.default_rng(0)
    late = []
    for t in range(250):
        cohort = session.ask(RoundRequest(size=6))
        kept = rng.random(6) < np.where(good[cohort.clients], 0.9, 0.1)
        session.tell(RoundReport(cohort.ticket, cohort.clients, kept=kept))
        if t >= 150:
            late.append(good[cohort.clients].mean())
    assert np.mean(late) > 0.5  # 0.2 by chance


def test_new_clients_start_like_the_others():
    session = Session(FedCmTs(), ClientTable(n=2), seed=0)
    outcome(session, ask(session, (0, 1)), (0,))
    session.join(ClientTable(n=2))
    assert session.state.kept.tolist() == [2, 1, 1, 1] and session.state.dropped.tolist() == [1, 2, 1, 1]
