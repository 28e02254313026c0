"""One draw per arm against its distribution."""

import numpy as np
from scipy import stats

from fedcohort.selectors.numerics.thompson import beta_draws


def test_draws_have_their_distribution():
    rng = np.random.default_rng(0)
    alpha, beta = np.repeat([1.0, 3.0], 4000), np.repeat([1.0, 7.0], 4000)
    draws = beta_draws(alpha, beta, rng)
    assert stats.kstest(draws[:4000], "uniform").pvalue > 1e-3
    assert stats.kstest(draws[4000:], stats.beta(3, 7).cdf).pvalue > 1e-3
