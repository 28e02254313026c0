"""The rates that balance a federation, and the mix that these give, by brute force."""

import numpy as np
import pytest

from fedcohort import LabelCounts
from fedcohort.core.clients import LabelGram
from fedcohort.selectors.numerics.class_balance import NOTHING
from fedcohort.selectors.ours.goals import aim_of, balancing_rates, group_with_aim
from tests.selectors.numerics.test_class_balance import imbalance, in_form


@pytest.mark.parametrize("form", ["counts", "factor", "gram"])
def test_rates_that_balance_the_federation_are_those_of_the_linear_system(form):
    rng = np.random.default_rng(4)
    counts = np.array([rng.multinomial(50, share) for share in rng.dirichlet([0.2, 0.2, 0.2, 0.05], size=40)], float)
    off = (counts - counts.sum(1, keepdims=True) / 4) / counts.sum()
    stiffness = 0.005 + 2 * (1 - 1 / 4) / counts.sum()  # five negligible imbalances, and twice the sampling error
    weights = counts.sum(1) / counts.sum()  # the samples stay as many: a Lagrange multiplier
    system = np.block([[40 * off @ off.T + stiffness * np.eye(40), weights[:, None]], [weights, np.zeros(1)]])
    wanted = np.linalg.solve(system, [stiffness] * 40 + [1.0])[:40]
    found = balancing_rates(in_form(form, counts), counts.sum(1), 4.0)
    wanted = np.clip(wanted / wanted.mean(), 1 / 4, 4)
    left = max(imbalance(wanted @ counts), 1e-3) / imbalance(counts.sum(0))
    np.testing.assert_allclose(found, 1 + (1 - left**3) * (wanted - 1), atol=1e-5)
    assert imbalance(found @ counts) < 0.3 * imbalance(counts.sum(0))


def test_rates_that_hardly_help_stay_near_1():
    """Every writer has more digits than letters; they differ a little."""
    mixes = np.random.default_rng(0).dirichlet(np.repeat([20.0, 2.0], [5, 15]), 30)
    assert np.abs(balancing_rates(LabelCounts(650 * mixes), np.full(30, 650.0), 4.0) - 1).max() < 0.5  # without: 3


def test_rates_without_clients_samples_or_valid_products():
    assert balancing_rates(LabelCounts(np.zeros((0, 3))), np.zeros(0), 4.0).shape == (0,)
    assert balancing_rates(LabelCounts(np.zeros((2, 3))), np.zeros(2), 4.0).tolist() == [1.0, 1.0]
    impossible = LabelGram(np.array([[1.0, 90.0], [90.0, 1.0]]), 2)
    assert np.isfinite(balancing_rates(impossible, np.array([5.0, 9.0]), 4.0)).all()


@pytest.mark.parametrize("form", ["counts", "factor", "gram"])
def test_groups_measure_the_distance_from_the_mix_at_these_rates(form):
    rng = np.random.default_rng(2)
    counts = rng.integers(0, 40, (7, 5)) * np.array([9.0, 3.0, 1.0, 1.0, 1.0])
    rates, sizes, labels = np.linspace(0.25, 2.0, 7), counts.sum(1), in_form(form, counts)
    mix = rates @ counts / (rates @ sizes)
    group = group_with_aim(labels, sizes, rates, aim_of(labels, sizes, rates), np.arange(7), NOTHING)
    for position in (4, 1, 6, 0):
        group.add(position)
        total = counts[group.members].sum(0)
        assert group.qcid() == pytest.approx(((total / total.sum() - mix) ** 2).sum(), rel=1e-9, abs=1e-12)


def test_without_samples_there_is_no_aim():
    labels, nothing = LabelCounts(np.zeros((2, 3))), np.zeros(2)
    aim = aim_of(labels, nothing, np.ones(2))
    group = group_with_aim(labels, nothing, np.ones(2), aim, np.arange(2), NOTHING)
    assert group.qcid_with_each(np.empty(2)).tolist() == [pytest.approx(2 / 3)] * 2
