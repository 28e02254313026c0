"""Optimal client sampling: the closed form against a search, its conditions, and unbiased weights."""

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import Slate
from fedcohort.selectors.baselines.gradnorm import GradNorm, _NormState
from fedcohort.selectors.numerics.sampling import inclusion_probabilities as probabilities
from fedcohort.selectors.numerics.sampling import systematic_sample


def brute_force(u, m):
    """Minimise sum u_i^2 / p_i over 0 < p_i <= 1 with sum m: p_i = min(1, c u_i), c found by bisection."""
    low, high = 0.0, 1e9
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if np.minimum(1.0, c * u).sum() < m else (low, c)
    return np.minimum(1.0, high * u)


def test_by_hand():
    """u = 1, 1, 2, 8 and m = 2: with l = 4, 2 * 8 > 12; with l = 3, 1 * 2 <= 4: the largest is certain."""
    assert probabilities(np.array([1.0, 8.0, 1.0, 2.0]), 2) == pytest.approx([0.25, 1.0, 0.25, 0.5])


@pytest.mark.parametrize("m", [1, 3, 6, 10, 11, 12])
def test_the_closed_form_is_the_optimum(m):
    for seed in range(30):
        u = np.random.default_rng(seed).lognormal(sigma=2.0, size=12)
        chance = probabilities(u, m)
        assert chance.sum() == pytest.approx(m)
        assert chance.max() <= 1.0
        assert chance == pytest.approx(brute_force(u, m), rel=1e-6)


def test_utilities_all_zero_or_equal_are_uniform():
    assert probabilities(np.zeros(5), 2) == pytest.approx(np.full(5, 0.4))
    assert probabilities(np.full(5, 3.0), 2) == pytest.approx(np.full(5, 0.4))
    assert probabilities(np.array([0.0, 0, 1, 1]), 3) == pytest.approx([0.5, 0.5, 1, 1])
    assert probabilities(np.array([5.0]), 1) == pytest.approx([1.0])


def test_systematic_draws_have_a_fixed_size_and_the_given_probabilities():
    chance = probabilities(np.array([0.1, 0.5, 1, 1, 2, 3, 30.0]), 3)
    rng = np.random.default_rng(0)
    hits = np.zeros(7)
    for _ in range(4000):
        drawn = systematic_sample(chance, rng)
        assert len(drawn) == len(set(drawn.tolist())) == 3
        hits[drawn] += 1
    assert hits / 4000 == pytest.approx(chance, abs=0.03)


def test_weights_keep_the_sum_unbiased():
    """The sum over the cohort of w_i U_i / p_i is that over all clients, on average; its variance is the one noted."""
    rng = np.random.default_rng(1)
    sizes = np.array([5.0, 5, 10, 20, 30, 30])
    norm = np.array([1.0, 8, 2, 1, 4, 0.5])
    share = sizes / sizes.sum()
    slate = Slate(round=4, size=3, candidates=np.arange(6), clients=ClientTable(sizes=sizes))
    state = _NormState(norm)
    sums = []
    for _ in range(4000):
        cohort, _ = GradNorm().select(state, slate, None, rng)
        sums.append((cohort.weights * share[cohort.clients] * norm[cohort.clients]).sum())
    assert np.mean(sums) == pytest.approx((share * norm).sum(), rel=0.02)
    assert cohort.notes["variance against uniform"] < 0.5
    assert cohort.notes["certain"] == int((cohort.score == 1).sum())


def test_a_client_with_a_zero_update_can_still_be_drawn():
    slate = Slate(round=4, size=1, candidates=np.arange(4), clients=ClientTable(sizes=np.ones(4)))
    cohort, _ = GradNorm(floor=0.2).select(_NormState(np.array([0.0, 1, 1, 2])), slate, None, np.random.default_rng(0))
    assert cohort.score == pytest.approx(np.array([0.2, 1, 1, 2]) / 4.2)
    unheard = _NormState(np.array([np.nan, 1, 1, 4]))
    cohort, _ = GradNorm().select(unheard, slate, None, np.random.default_rng(0))
    assert cohort.score == pytest.approx(np.array([2.0, 1, 1, 4]) / 8)  # the mean norm of the others
