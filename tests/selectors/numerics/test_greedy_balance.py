"""Greedy balance: divergences by hand, picks against a plain loop."""

import math

import numpy as np
import pytest

from fedcohort.selectors.numerics.greedy_balance import GreedyBalance, _largest_coincidence, divergence_from_uniform


def plain_divergence(masses):
    total = sum(masses)
    return sum(m / total * math.log(m / total * len(masses)) for m in masses if m > 0)


def test_divergences_by_hand():
    values = divergence_from_uniform(np.array([[1.0, 3.0], [2.0, 2.0], [5.0, 0.0], [0.0, 0.0]]))
    expected = [0.25 * math.log(0.5) + 0.75 * math.log(1.5), 0.0, math.log(2), math.log(2)]
    np.testing.assert_allclose(values, expected, atol=1e-15)


@pytest.mark.parametrize("seed", range(5))
def test_picks_of_a_plain_loop(seed):
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 20, (30, 5)).astype(float)
    group = GreedyBalance(rows, rng)
    group.grow(8, np.ones(30, np.bool_))
    chosen, total = [], np.zeros(5)
    for _ in range(8):
        values = {i: plain_divergence(total + rows[i]) for i in range(30) if i not in chosen}
        best = min(values, key=values.get)
        chosen.append(best)
        total += rows[best]
    assert group.members == chosen
    assert group.divergence == pytest.approx(plain_divergence(total), abs=1e-12)


def test_blocks_do_not_change_the_picks(monkeypatch):
    rows = np.random.default_rng(3).integers(0, 9, (50, 4)).astype(float)
    whole = GreedyBalance(rows, np.random.default_rng(0))
    whole.grow(10, np.ones(50, np.bool_))
    monkeypatch.setattr("fedcohort.selectors.numerics.greedy_balance._BLOCK", 7)
    blocked = GreedyBalance(rows, np.random.default_rng(0))
    blocked.grow(10, np.ones(50, np.bool_))
    assert blocked.members == whole.members


def test_allowed_rows_only_empty_rows_last_and_random_ties():
    rows = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [2.0, 2.0]])
    first = set()
    for seed in range(40):
        group = GreedyBalance(rows, np.random.default_rng(seed))
        group.grow(3, np.array([True, True, True, False]))
        assert group.members[-1] == 0
        first.add(group.members[0])
    assert first == {1, 2}


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_the_bound_holds_for_all_shares(classes):
    """No shares with a divergence at most d have a larger sum of squares; one large share attains it."""
    rng = np.random.default_rng(0)
    for concentration in (0.05, 0.5, 5.0, 100.0):
        shares = rng.dirichlet(np.full(classes, concentration), 300)
        for p, divergence in zip(shares, divergence_from_uniform(shares), strict=True):
            assert (p**2).sum() <= _largest_coincidence(divergence, classes) * (1 + 1e-9)
    extreme = np.array([0.7] + [0.3 / (classes - 1)] * (classes - 1))
    reached = divergence_from_uniform(extreme[None])[0]
    assert _largest_coincidence(reached, classes) == pytest.approx((extreme**2).sum(), rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_does_not_change_the_picks(monkeypatch, seed):
    rng = np.random.default_rng(seed)
    rows = np.vstack([rng.multinomial(40, p) for p in rng.dirichlet(np.full(5, 0.5), 400)]).astype(float)
    rows[::50] = 0.0
    every = GreedyBalance(rows, np.random.default_rng(0))
    every.grow(30, np.ones(400, np.bool_))
    monkeypatch.setattr("fedcohort.selectors.numerics.greedy_balance._BLOCK", 50)
    bounded = GreedyBalance(rows, np.random.default_rng(0))
    bounded.grow(30, np.ones(400, np.bool_))
    assert bounded.members == every.members
    tried = ~np.isnan(bounded.seen)
    assert tried.sum() < 400  # some were ruled out unseen
