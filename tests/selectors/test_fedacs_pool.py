"""Repeated argmax of Beta draws against the literal loop of FedACS, Algorithm 1."""

import numpy as np
import pytest
from scipy import stats

from fedcohort.selectors.papers.fedacs.pool import repeated_argmax


def literal(alpha, beta, size, rng):
    """Algorithm 1, lines 3 to 10."""
    left = np.arange(len(alpha))
    taken = []
    for _ in range(size):
        winner = int(np.argmax(rng.beta(alpha[left], beta[left])))
        taken.append(int(left[winner]))
        left = np.concatenate([left[:winner], left[winner + 1 :]])
    return taken


CASES = {
    "nobody known": (np.ones(12), np.ones(12)),
    "few groups": (np.repeat([1.0, 4.0, 9.0], 8), np.repeat([1.0, 6.0, 1.0], 8)),
    "all different": (np.arange(1.0, 31), np.arange(30.0, 0, -1)),
    "one giant": (np.append(np.full(15, 2.0), 4000.0), np.append(np.full(15, 2.0), 1.0)),
    "hopeless ones": (np.append(np.full(10, 1.0), [30.0, 40.0]), np.append(np.full(10, 500.0), [10.0, 10.0])),
    "many": (1.0 + np.arange(40) % 7, 1.0 + np.arange(40) % 5),
}


@pytest.mark.parametrize("first_block", [1, 32])
@pytest.mark.parametrize("case", CASES)
def test_same_distribution_as_the_literal_loop(case, first_block, monkeypatch):
    monkeypatch.setattr("fedcohort.selectors.papers.fedacs.pool._FIRST_BLOCK", first_block)
    alpha, beta = CASES[case]
    n, size, runs = len(alpha), max(2, int(0.4 * len(alpha))), 1000
    rng, other = np.random.default_rng(1), np.random.default_rng(2)
    member = np.zeros((2, n))
    place = np.zeros((2, n, size))
    for _ in range(runs):
        for row, taken in enumerate((repeated_argmax(alpha, beta, size, rng), literal(alpha, beta, size, other))):
            assert len(set(taken)) == size
            member[row, taken] += 1
            place[row, taken, np.arange(size)] += 1
    # Pool membership, client by client, and the whole table of arms by step. Cells that are never reached are pooled.
    table = np.stack([place[0].ravel(), place[1].ravel()])
    common = table.sum(0) >= 20
    table = np.concatenate([table[:, common], table[:, ~common].sum(1, keepdims=True) + 1], axis=1)
    assert stats.chi2_contingency(table).pvalue > 1e-4
    spread = np.sqrt(np.maximum(member.sum(0) * (1 - member.sum(0) / (2 * runs)), 1))
    assert np.abs((member[0] - member[1]) / spread).max() < 4.5


def test_long_pools_cross_many_blocks():
    """2,000 arms in blocks, conditional steps and doublings: the mean strength of each tenth of the pool must agree."""
    rng = np.random.default_rng(0)
    wins = rng.integers(0, 40, 2000)
    alpha, beta = wins + 1.0, 41.0 - wins
    strength = alpha / (alpha + beta)
    ours = np.array([strength[repeated_argmax(alpha, beta, 800, rng)] for _ in range(12)]).reshape(12, 10, 80).mean(2)
    theirs = np.array([strength[literal(alpha, beta, 800, rng)] for _ in range(6)]).reshape(6, 10, 80).mean(2)
    error = np.sqrt(ours.var(0, ddof=1) / 12 + theirs.var(0, ddof=1) / 6)
    assert (np.abs(ours.mean(0) - theirs.mean(0)) < 5 * error + 1e-4).all()


def test_sizes_at_the_edges():
    rng = np.random.default_rng(0)
    assert repeated_argmax(np.ones(5), np.ones(5), 0, rng).shape == (0,)
    assert sorted(repeated_argmax(np.ones(5), np.ones(5), 5, rng)) == [0, 1, 2, 3, 4]
    assert repeated_argmax(np.ones(1), np.ones(1), 1, rng).tolist() == [0]


def test_extreme_posteriors_give_valid_pools():
    alpha = np.array([1e12, 1e8, 1.0, 1.0, 1e6, 1.0])
    beta = np.array([1.0, 1e8, 1e12, 1.0, 1.0, 1e6])
    rng = np.random.default_rng(0)
    for _ in range(50):
        taken = repeated_argmax(alpha, beta, 6, rng).tolist()
        assert sorted(taken) == list(range(6))
        assert taken[0] == 0  # 1 - 1e-12 against 1 - 1e-6
        assert taken[-1] == 2
