"""The low-rank process against dense N x N computations written out from the paper."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedcohort.selectors.papers.fedcor import choice, process


def dense_log_likelihood(x, changes, weights, noise):
    """Eq. 17 with scipy's multivariate normal over the clients that answered."""
    total = 0.0
    for t, weight in enumerate(weights):
        seen = ~np.isnan(changes[:, t])
        if seen.any():
            rows = x[seen]
            covariance = rows @ rows.T + noise**2 * np.eye(len(rows))
            total += weight * stats.multivariate_normal(np.zeros(len(rows)), covariance).logpdf(changes[seen, t])
    return total


def dense_algorithm_1(x, p, alpha, *, candidates, size, noise):
    """Algorithm 1 with the full covariance: predict, take all posterior means, update mean and covariance."""
    mean, covariance = np.zeros(len(x)), x @ x.T
    left, picked = list(candidates), []
    for _ in range(size):
        best, best_value, best_mean = -1, np.inf, mean
        for k in left:
            predicted = mean[k] - alpha[k] * np.sqrt(max(covariance[k, k], 0.0))
            posterior = mean + covariance[:, k] / (covariance[k, k] + noise**2) * (predicted - mean[k])
            value = p @ posterior
            if value < best_value:
                best, best_value, best_mean = k, value, posterior
        column = covariance[:, best].copy()
        covariance = covariance - np.outer(column, column) / (column[best] + noise**2)
        mean = best_mean
        picked.append(best)
        left.remove(best)
    return picked, -(p @ mean)


def correlations(embedding):
    unit = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    return unit @ unit.T


def random_case(seed, n, d):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) * rng.uniform(0.1, 1.0, size=(n, 1)) + 0.2
    p = rng.dirichlet(np.ones(n))
    alpha = 0.95 ** rng.integers(0, 6, n)
    return x, p, alpha, rng


def test_samples_that_share_their_clients_are_one_group():
    changes = np.ones((5, 4))
    changes[0, 1] = changes[0, 3] = np.nan
    groups = process._group_samples(changes, np.array([1.0, 1.0, 0.0, 0.5]))
    assert [(g.rows is None, g.changes.shape, g.weights.tolist()) for g in groups] == [
        (True, (5, 1), [1.0]),
        (False, (4, 2), [1.0, 0.5]),
    ]


def gradient_of(embedding, groups, noise):
    """The gradient of the likelihood that a step of the fit climbs, (N, d)."""
    blocks = process._blocks(embedding, groups, np.float64)
    factors = process._factors(np.sum([block.sums() for block in blocks], axis=0), groups, noise)
    return np.concatenate([block.gradient(factors).T.copy() for block in blocks])


@pytest.mark.parametrize("missing", [False, True])
def test_gradient_matches_finite_differences(missing):
    x, _, _, rng = random_case(2, 9, 3)
    changes = rng.normal(size=(9, 4))
    if missing:
        changes[rng.random((9, 4)) < 0.4] = np.nan
    weights = np.array([1.0, 0.9, 0.81, 0.1])
    groups = process._group_samples(changes, weights)
    gradient = gradient_of(x, groups, 0.2)
    step = 1e-6
    for i in range(9):
        for j in range(3):
            up, down = x.copy(), x.copy()
            up[i, j] += step
            down[i, j] -= step
            slope = dense_log_likelihood(up, changes, weights, 0.2) - dense_log_likelihood(down, changes, weights, 0.2)
            assert gradient[i, j] == pytest.approx(slope / (2 * step), rel=2e-5, abs=2e-5)


def test_one_adam_step_by_hand():
    x, _, _, rng = random_case(3, 6, 2)
    changes, weights = rng.normal(size=(6, 2)), np.array([1.0, 0.5])
    slope = gradient_of(x, process._group_samples(changes, weights), 0.1)
    fitted = process.fit_embedding(x, changes, weights, noise=0.1, learning_rate=0.01, steps=1)
    assert np.allclose(fitted - x, 0.01 * np.sign(slope), atol=1e-8)  # the first step of Adam has length lr


def test_a_fitted_embedding_has_the_memory_layout_of_a_loaded_one():
    """Otherwise products round differently after a restart, and cohorts diverge."""
    x, _, _, rng = random_case(3, 6, 2)
    fitted = process.fit_embedding(x, rng.normal(size=(6, 2)), np.ones(2), noise=0.1, learning_rate=0.01, steps=3)
    assert fitted.flags.c_contiguous and fitted.dtype == np.float64


def test_fit_recovers_the_correlations_of_a_known_embedding():
    rng = np.random.default_rng(4)
    truth = rng.normal(size=(60, 3)) / np.sqrt(3)
    changes = truth @ rng.normal(size=(3, 80)) + 0.01 * rng.normal(size=(60, 80))
    start = rng.normal(size=(60, 3)) / np.sqrt(3)
    fitted = process.fit_embedding(start, changes, np.ones(80), noise=0.01, learning_rate=0.01, steps=600)
    upper = np.triu_indices(60, 1)
    found, wanted = correlations(fitted)[upper], correlations(truth)[upper]
    assert np.corrcoef(found, wanted)[0, 1] > 0.9
    assert np.corrcoef(correlations(start)[upper], wanted)[0, 1] < 0.3  # it did not start there
    before, after = (dense_log_likelihood(x, changes, np.ones(80), 0.01) for x in (start, fitted))
    assert after > before


def test_fit_with_missing_answers_recovers_them_too():
    rng = np.random.default_rng(5)
    truth = rng.normal(size=(40, 2)) / np.sqrt(2)
    changes = truth @ rng.normal(size=(2, 120)) + 0.05 * rng.normal(size=(40, 120))
    changes[rng.random(changes.shape) < 0.5] = np.nan
    start = rng.normal(size=(40, 2)) / np.sqrt(2)
    fitted = process.fit_embedding(start, changes, np.ones(120), noise=0.05, learning_rate=0.01, steps=300)
    upper = np.triu_indices(40, 1)
    assert np.corrcoef(correlations(fitted)[upper], correlations(truth)[upper])[0, 1] > 0.9


def test_fit_leaves_its_start_and_unseen_clients_alone():
    x, _, _, rng = random_case(6, 8, 3)
    changes = rng.normal(size=(8, 3))
    changes[5] = np.nan
    before = x.copy()
    fitted = process.fit_embedding(x, changes, np.ones(3), noise=0.1, learning_rate=0.01, steps=20)
    assert np.array_equal(x, before)
    assert np.array_equal(fitted[5], x[5])
    assert not np.any(fitted[[0, 1, 2, 3, 4, 6, 7]] == x[[0, 1, 2, 3, 4, 6, 7]])
    nothing = np.full((8, 2), np.nan)
    assert np.array_equal(process.fit_embedding(x, nothing, np.ones(2), noise=0.1, learning_rate=1.0, steps=9), x)


@pytest.mark.parametrize(
    ("n", "d", "size", "noise"),
    [
        (7, 3, 3, 1e-2),
        (60, 5, 20, 1e-2),
        (120, 15, 40, 1e-1),
        (300, 15, 30, 1e-2),
        (300, 15, 12, 1e-3),
        (9, 15, 9, 1e-2),
    ],
)
def test_projection_picks_what_the_dense_posterior_picks(n, d, size, noise):
    for seed in range(2):
        x, p, alpha, rng = random_case(seed, n, d)
        candidates = np.sort(rng.choice(n, max(size, int(0.7 * n)), replace=False))
        greedy = choice.pick_by_expected_drop(x[candidates], p @ x, alpha[candidates], size, noise)
        picked, drop = dense_algorithm_1(x, p, alpha, candidates=candidates.tolist(), size=size, noise=noise)
        assert candidates[greedy.picks].tolist() == picked
        assert greedy.drop[greedy.picks].sum() == pytest.approx(drop, rel=1e-6)


def test_blocks_do_not_change_the_picks(monkeypatch):
    x, p, alpha, _ = random_case(7, 300, 15)
    whole = choice.pick_by_expected_drop(x, p @ x, alpha, 40, 1e-2)
    monkeypatch.setattr(choice, "_BLOCK", 64)
    parts = choice.pick_by_expected_drop(x, p @ x, alpha, 40, 1e-2)
    assert np.array_equal(whole.picks, parts.picks)
    assert np.allclose(whole.drop, parts.drop, rtol=1e-9, atol=1e-15)


def test_blocks_do_not_change_the_fit(monkeypatch):
    x, _, _, rng = random_case(11, 200, 4)
    changes = rng.normal(size=(200, 5))
    changes[rng.random((200, 5)) < 0.3] = np.nan
    changes[:, 0] = rng.normal(size=200)
    options = {"noise": 0.1, "learning_rate": 0.01, "steps": 20}
    whole = process.fit_embedding(x, changes, np.ones(5), **options)
    monkeypatch.setattr(process, "_BLOCK", 64)
    assert np.allclose(process.fit_embedding(x, changes, np.ones(5), **options), whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_very_many_clients_are_fitted_in_single_precision_and_end_where_double_does(monkeypatch, missing):
    rng = np.random.default_rng(12)
    changes = 0.1 * rng.normal(size=(3000, 5)) @ rng.normal(size=(5, 6)) + 0.01 * rng.normal(size=(3000, 6))
    changes[rng.random(changes.shape) < missing] = np.nan
    start = rng.normal(size=(3000, 5)) / np.sqrt(5)
    options = {"noise": 0.01, "learning_rate": 0.01, "steps": 50}
    double = process.fit_embedding(start, changes, np.ones(6), **options)
    monkeypatch.setattr(process, "_MANY", 3000)
    single = process.fit_embedding(start, changes, np.ones(6), **options)
    assert single.dtype == np.float64
    assert np.array_equal(single, single.astype(np.float32))  # it was single precision
    error = np.abs(single - double)
    assert np.sqrt(np.mean(error**2)) < 1e-5  # of embeddings of length 1
    assert error.max() < 0.02  # two steps: where a gradient is zero but for rounding, its sign may be the other
    changes[7, 0] = 1e12  # its square is no number in single precision
    extreme = process.fit_embedding(start, changes, np.ones(6), **options)
    assert np.isfinite(extreme).all()
    assert not np.array_equal(extreme, extreme.astype(np.float32))


@pytest.mark.parametrize("seed", range(5))
def test_lemma_2_for_two_picks(seed):
    """Eqs. 12 and 13, in correlations; they have no noise, so almost none is given."""
    x, p, alpha, _ = random_case(seed, 40, 6)
    covariance = x @ x.T
    sigma = np.sqrt(np.diag(covariance))
    r = covariance / np.outer(sigma, sigma)
    single = r.T @ (p * sigma)
    first = int(np.argmax(alpha * single))
    with np.errstate(divide="ignore", invalid="ignore"):
        pair = alpha * (single - r[first] * single[first]) / np.sqrt(1 - r[first] ** 2)
    pair[first] = -np.inf
    second = int(np.argmax(pair))
    greedy = choice.pick_by_expected_drop(x, p @ x, alpha, 2, 1e-7)
    assert greedy.picks.tolist() == [first, second]
    assert greedy.drop[first] == pytest.approx(alpha[first] * single[first])
    assert greedy.drop[second] == pytest.approx(pair[second])


def test_twins_are_not_picked_together():
    rng = np.random.default_rng(8)
    kinds = np.repeat(np.arange(5), 4)
    x = np.eye(5)[kinds] + 0.01 * rng.normal(size=(20, 5))
    greedy = choice.pick_by_expected_drop(x, x.mean(axis=0), 1.0, 5, 1e-2)
    assert sorted(kinds[greedy.picks]) == [0, 1, 2, 3, 4]


def test_edges_of_picking():
    x, p, alpha, _ = random_case(9, 6, 2)
    assert sorted(choice.pick_by_expected_drop(x, p @ x, alpha, 6, 1e-2).picks) == [0, 1, 2, 3, 4, 5]
    assert choice.pick_by_expected_drop(x[:1], p @ x, 1.0, 1, 1e-2).picks.tolist() == [0]
    assert choice.pick_by_expected_drop(x, p @ x, alpha, 0, 1e-2).picks.tolist() == []
    equal = choice.pick_by_expected_drop(np.ones((5, 3)), np.ones(3), 1.0, 3, 1e-2)
    assert len(set(equal.picks.tolist())) == 3
    nothing = choice.pick_by_expected_drop(np.zeros((5, 3)), np.zeros(3), 1.0, 3, 1e-2)
    assert len(set(nothing.picks.tolist())) == 3
    assert np.isfinite(nothing.drop).all()


def test_inputs_are_not_written_to():
    x, p, alpha, _ = random_case(10, 30, 4)
    direction = p @ x
    for array in (x, direction, alpha):
        array.flags.writeable = False
    choice.pick_by_expected_drop(x, direction, alpha, 5, 1e-2)
