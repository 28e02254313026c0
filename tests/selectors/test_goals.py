"""The rates that balance a federation, by brute force."""

import numpy as np
import pytest

from fedcohort import LabelCounts
from fedcohort.core.clients import LabelGram
from fedcohort.selectors.ours.goals import balancing_rates
from tests.selectors.numerics.test_class_balance import imbalance, in_form


@pytest.mark.parametrize("form", ["counts", "factor", "gram"])
def test_rates_that_balance_the_federation_are_those_of_the_linear_system(form):
    rng = np.random.default_rng(4)
    counts = np.array([rng.multinomial(50, share) for share in rng.dirichlet([0.2, 0.2, 0.2, 0.05], size=40)], float)
    off = (counts - counts.sum(1, keepdims=True) / 4) / counts.sum()
    stiffness = (1 - 1 / 4) / 50  # the sampling error of one client's counts
    wanted = np.linalg.solve(40 * off @ off.T + stiffness * np.eye(40), np.ones(40))
    found = balancing_rates(in_form(form, counts), counts.sum(1))
    np.testing.assert_allclose(found, np.clip(wanted / wanted.mean(), 0.05, 20), atol=2e-6)
    assert imbalance(found @ counts) < 0.2 * imbalance(counts.sum(0))


def test_rates_without_clients_samples_or_valid_products():
    assert balancing_rates(LabelCounts(np.zeros((0, 3))), np.zeros(0)).shape == (0,)
    assert balancing_rates(LabelCounts(np.zeros((2, 3))), np.zeros(2)).tolist() == [1.0, 1.0]
    impossible = LabelGram(np.array([[1.0, 90.0], [90.0, 1.0]]), 2)
    assert np.isfinite(balancing_rates(impossible, np.array([5.0, 9.0]))).all()
