"""E3CS: the allocation against a search for alpha, the weights against a plain form of the algorithm."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq

from fedcohort import create
from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import RoundReport, RoundRequest, Status
from fedcohort.selectors.baselines.e3cs import _allocate
from fedcohort.session import Session


def plain(weights, k, sigma):
    """Return p as the paper defines it, alpha found by a root search."""
    count = len(weights)
    free = k - count * sigma
    p = [sigma + free * w / sum(weights) for w in weights]
    if max(p) <= 1:
        return p, [False] * count

    def excess(alpha):
        return alpha * free - sum(min(w, (1 - sigma) * alpha) for w in weights)

    alpha = brentq(excess, 1e-12 * max(weights), sum(weights) / free, xtol=1e-15, rtol=1e-14)
    capped = [min(w, (1 - sigma) * alpha) for w in weights]
    return [sigma + free * w / sum(capped) for w in capped], [w > (1 - sigma) * alpha * (1 + 1e-9) for w in weights]


@pytest.mark.parametrize("fairness", [0.0, 0.3, 0.8])
def test_allocation_against_a_root_search(fairness):
    rng = np.random.default_rng(3)
    for _ in range(40):
        count = int(rng.integers(3, 9))
        k = int(rng.integers(1, count))
        weights = np.exp(rng.normal(0, 2, count))
        p, full = _allocate(weights, k, fairness * k / count)
        expected, capped = plain(weights.tolist(), k, fairness * k / count)
        np.testing.assert_allclose(p, expected, rtol=1e-6, atol=1e-9)
        assert full.tolist() == capped
        assert p.sum() == pytest.approx(k)
        assert p.min() >= fairness * k / count - 1e-12
        assert p.max() <= 1 + 1e-9


def test_allocation_by_hand_and_at_the_ends():
    # Half of the cohort of 2 as quota: 0.25 each of four; 1 is left and goes by weight 3 : 1 : 1 : 1.
    p, full = _allocate(np.array([3.0, 1.0, 1.0, 1.0]), 2, 0.25)
    assert p.tolist() == pytest.approx([0.75, 5 / 12, 5 / 12, 5 / 12])
    assert not full.any()
    assert _allocate(np.array([5.0, 1.0]), 2, 0.0)[0].tolist() == [1.0, 1.0]
    assert _allocate(np.array([5.0, 1.0, 1.0]), 1, 1 / 3)[0].tolist() == pytest.approx([1 / 3] * 3)
    p, full = _allocate(np.array([1.0, 0.0, 0.0, 0.0]), 2, 0.0)  # only one has any weight
    assert p.tolist() == pytest.approx([1.0, 1 / 3, 1 / 3, 1 / 3])


def test_weights_against_a_plain_form():
    n, k, eta, fairness = 6, 2, 0.5, 0.4
    session = Session(create("e3cs", fairness=fairness, rate=eta), ClientTable(n=n), seed=5)
    sigma, weights = fairness * k / n, [1.0] * n
    rng = np.random.default_rng(0)
    for _ in range(40):
        p, full = plain(weights, k, sigma)
        cohort = session.ask(RoundRequest(size=k))
        np.testing.assert_allclose(cohort.score, p, rtol=1e-6)
        ok = rng.random(k) < np.where(cohort.clients < 3, 0.9, 0.2)
        session.tell(RoundReport(cohort.ticket, cohort.clients, status=np.where(ok, Status.OK, Status.FAILED).tolist()))
        for client, success in zip(cohort.clients.tolist(), ok.tolist(), strict=True):
            if success and not full[client]:
                weights[client] *= math.exp((k - n * sigma) * eta / n / p[client])
    assert cohort.score[:3].min() > cohort.score[3:].max()


def test_failing_clients_are_drawn_at_their_quota():
    session = Session(create("e3cs", fairness=0.5), ClientTable(n=10), seed=1)
    counts = np.zeros(10)
    for t in range(600):
        cohort = session.ask(RoundRequest(size=3))
        status = [Status.LATE if c >= 6 else Status.OK for c in cohort.clients.tolist()]
        session.tell(RoundReport(cohort.ticket, cohort.clients, status=status))
        if t >= 200:
            counts[cohort.clients] += 1
    assert session.ask(RoundRequest(size=3)).score[6:] == pytest.approx([0.15] * 4, abs=0.01)
    assert (counts[6:] > 0.1 * 400).all()
    assert counts[:6].mean() > 2 * counts[6:].mean()


def test_the_increasing_quota_makes_all_probabilities_equal():
    session = Session(create("e3cs", fairness=0.0, until=5), ClientTable(n=4), seed=1)
    for t in range(7):
        cohort = session.ask(RoundRequest(size=1))
        session.tell(RoundReport(cohort.ticket, cohort.clients, status=[0 if cohort.clients[0] == 2 else 1]))
        if t >= 5:
            assert cohort.score.tolist() == [0.25] * 4


def test_no_client_ever_finishes_or_all_always_do():
    for status in (Status.MISSING, Status.OK):
        session = Session(create("e3cs", fairness=0.0), ClientTable(n=5), seed=1)
        for _ in range(300):
            cohort = session.ask(RoundRequest(size=2))
            assert np.isfinite(cohort.score).all()
            session.tell(RoundReport(cohort.ticket, cohort.clients, status=[status] * 2))
        assert np.isfinite(session.state.weight).all()
        if status is Status.MISSING:
            assert cohort.score.tolist() == pytest.approx([0.4] * 5)
