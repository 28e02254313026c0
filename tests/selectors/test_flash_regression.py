"""The incremental ridge system against the whole history, and the posterior draw's moments."""

import numpy as np

from fedcohort.selectors.papers.flash.regression import add_observations, posterior_draw, solution


def test_increments_equal_the_whole_history():
    rng = np.random.default_rng(0)
    gram, moment = 0.7 * np.eye(4), np.zeros(4)
    xs, rs = [], []
    for _ in range(30):
        x, r = rng.normal(size=(rng.integers(0, 6), 4)), None
        r = x @ [1.0, -2.0, 0.0, 0.5] + rng.normal(size=len(x))
        gram, moment = add_observations(gram, moment, x, r)
        xs.append(x)
        rs.append(r)
    history, rewards = np.concatenate(xs), np.concatenate(rs)
    expected = np.linalg.inv(history.T @ history + 0.7 * np.eye(4)) @ history.T @ rewards
    np.testing.assert_allclose(solution(gram, moment), expected, rtol=1e-10)


def test_draws_have_mean_theta_and_covariance_scaled_inverse_gram():
    rng = np.random.default_rng(1)
    root = rng.normal(size=(3, 3))
    gram = root @ root.T + np.eye(3)
    mean = np.array([1.0, -1.0, 0.3])
    draws = np.array([posterior_draw(gram, mean, 1.7, rng) for _ in range(20_000)])
    covariance = 1.7**2 * np.linalg.inv(gram)
    spread = np.sqrt(np.diag(covariance) / len(draws))
    assert (np.abs(draws.mean(0) - mean) < 4 * spread).all()
    np.testing.assert_allclose(np.cov(draws.T), covariance, atol=0.03 * np.abs(covariance).max())


def test_no_exploration_is_the_mean():
    mean = np.array([0.2, 0.4])
    assert posterior_draw(np.eye(2), mean, 0.0, np.random.default_rng(0)).tolist() == mean.tolist()
