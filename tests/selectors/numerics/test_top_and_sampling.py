"""top_k against a full sort; weighted sampling against enumeration."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedcohort.core.top import top_k
from fedcohort.selectors.numerics.sampling import beta_draws, log_choice, softmax_sample, weighted_sample

values = st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 2.0, 3.0, np.nan]), min_size=1, max_size=30)


@given(values, st.integers(0, 40), st.booleans())
def test_top_k_is_the_top_of_a_sort(scores, k, random):
    scores = np.array(scores)
    chosen = top_k(scores, k, np.random.default_rng(0) if random else None)
    clean = np.where(np.isnan(scores), -np.inf, scores)
    assert len(set(chosen.tolist())) == len(chosen) == min(k, len(scores))
    assert clean[chosen].tolist() == sorted(clean.tolist(), reverse=True)[:k]


@pytest.mark.parametrize("k", [1, 7, 100, 5000, 39_990])
@pytest.mark.parametrize("heap", ["none", "low", "middle", "high", "all", "few above", "infinite"])
def test_top_k_of_many_with_a_heap_of_equals(heap, k):
    """Large arrays go by a sampled guess, wherever most of the scores lie."""
    rng = np.random.default_rng(5)
    scores = rng.normal(size=40_000)
    where = rng.random(40_000) < 0.99
    value = {"low": -9.0, "middle": 0.3, "high": 9.0, "few above": np.sort(scores)[-20], "infinite": -np.inf}.get(heap)
    if heap == "all":
        scores[:] = 1.0
    elif value is not None:
        scores[where] = value
    for generator in (None, rng):
        chosen = top_k(scores, k, generator)
        assert len(np.unique(chosen)) == k
        assert scores[chosen].tolist() == np.sort(scores)[::-1][:k].tolist()


@pytest.mark.parametrize("scores", [[1.0, 1.0, 1.0, 0.0], [2.0, 1.0, 1.0, 1.0, 0.5], [5.0, 0.0, 0.0, 0.0]])
def test_ties_are_broken_evenly(scores):
    scores = np.array(scores)
    counts = np.zeros(len(scores))
    rng = np.random.default_rng(1)
    for _ in range(3000):
        counts[top_k(scores, 2, rng)] += 1
    boundary = np.sort(scores)[-2]
    tied = counts[scores == boundary]
    assert (np.abs(tied - tied.mean()) < 5 * np.sqrt(tied.mean())).all()


@pytest.mark.parametrize("how", ["weights", "logits"])
def test_sampling_has_the_distribution_of_drawing_one_by_one(how):
    weights = np.array([0.5, 1.0, 2.0, 4.0])
    rng = np.random.default_rng(2)
    draws = 20_000
    counts = dict.fromkeys(itertools.permutations(range(4), 2), 0)
    for _ in range(draws):
        pair = weighted_sample(weights, 2, rng) if how == "weights" else softmax_sample(np.log(weights), 2, rng)
        counts[tuple(pair.tolist())] += 1
    statistic = 0.0
    for (a, b), seen in counts.items():
        expected = draws * weights[a] / weights.sum() * weights[b] / (weights.sum() - weights[a])
        statistic += (seen - expected) ** 2 / expected
    assert statistic < 31.3  # chi-square with 11 degrees of freedom, p = 0.001


def test_zero_weights_come_last():
    rng = np.random.default_rng(3)
    chosen = weighted_sample(np.array([0.0, 3.0, 0.0, 1.0]), 3, rng)
    assert set(chosen[:2].tolist()) == {1, 3} and chosen[2] in (0, 2)


@pytest.mark.parametrize("n", [1, 5, 1024, 5000])
def test_log_choice_is_the_inverse_of_the_distribution_function(n):
    rng = np.random.default_rng(n)
    logits = rng.normal(0, 3, n) + 700
    share = np.exp(logits - logits.max())
    share /= share.sum()
    below = np.cumsum(share)
    for uniform in (0.0, *rng.random(40), 1 - 2**-53):
        position, log_probability = log_choice(logits, uniform)
        assert below[position] - share[position] - 1e-12 <= uniform <= below[position] + 1e-12
        assert log_probability == pytest.approx(np.log(share[position]))


def test_beta_draws_have_their_distribution():
    rng = np.random.default_rng(0)
    alpha, beta = np.repeat([1.0, 3.0], 4000), np.repeat([1.0, 7.0], 4000)
    draws = beta_draws(alpha, beta, rng)
    assert stats.kstest(draws[:4000], "uniform").pvalue > 1e-3
    assert stats.kstest(draws[4000:], stats.beta(3, 7).cdf).pvalue > 1e-3
