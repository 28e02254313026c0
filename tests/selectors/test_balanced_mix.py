"""The mix of all data, and rates that balance it, by brute force."""

import numpy as np
import pytest

from fedcohort import LabelCounts
from fedcohort.core.clients import LabelGram
from fedcohort.selectors.numerics.class_balance import NOTHING
from fedcohort.selectors.ours.balanced.mix import balancing_rates, group_off_mix, mix_qcid
from tests.selectors.numerics.test_class_balance import imbalance, in_form


@pytest.mark.parametrize("form", ["counts", "factor", "gram"])
def test_rates_that_balance_the_federation_are_those_of_the_linear_system(form):
    rng = np.random.default_rng(4)
    counts = np.array([rng.multinomial(50, share) for share in rng.dirichlet([0.2, 0.2, 0.2, 0.05], size=40)], float)
    labels = in_form(form, counts)
    off = (counts - counts.sum(1, keepdims=True) / 4) / counts.sum()
    wanted = np.linalg.solve(40 * off @ off.T + 0.02 * np.eye(40), np.ones(40))
    found = balancing_rates(labels, counts.sum(1), 0.02)
    np.testing.assert_allclose(found, wanted / wanted.mean(), atol=2e-6)
    assert imbalance(found @ counts) < 0.2 * imbalance(counts.sum(0))


def test_rates_without_clients_samples_or_valid_products():
    assert balancing_rates(LabelCounts(np.zeros((0, 3))), np.zeros(0), 0.02).shape == (0,)
    assert balancing_rates(LabelCounts(np.zeros((2, 3))), np.zeros(2), 0.02).tolist() == [1.0, 1.0]
    impossible = LabelGram(np.array([[1.0, 90.0], [90.0, 1.0]]), 2)
    assert np.isfinite(balancing_rates(impossible, np.array([5.0, 9.0]), 0.02)).all()


@pytest.mark.parametrize("form", ["counts", "factor", "gram"])
def test_centred_labels_measure_the_distance_from_the_mix_of_all(form):
    rng = np.random.default_rng(2)
    counts = rng.integers(0, 40, (7, 5)) * np.array([9.0, 3.0, 1.0, 1.0, 1.0])
    mix = counts.sum(0) / counts.sum()
    sizes = counts.sum(1)
    group = group_off_mix(in_form(form, counts), sizes, np.arange(7), NOTHING)
    for position in (4, 1, 6):
        group.add(position)
        total = counts[group.members].sum(0)
        assert group.qcid() == pytest.approx(((total / total.sum() - mix) ** 2).sum(), rel=1e-9, abs=1e-12)
    for position in (0, 2, 3, 5):
        group.add(position)
    assert group.qcid() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("form", ["counts", "factor", "gram"])
def test_the_imbalance_of_all_clients_at_given_rates(form):
    counts = np.random.default_rng(3).integers(1, 40, (7, 5)).astype(float)
    rates = np.linspace(0.5, 1.5, 7)
    found = mix_qcid(in_form(form, counts), counts.sum(1), rates)
    assert found == pytest.approx(imbalance(rates @ counts), rel=1e-9)


def test_nothing_is_centred_without_samples():
    group = group_off_mix(LabelCounts(np.zeros((2, 3))), np.zeros(2), np.arange(2), NOTHING)
    assert group.qcid_with_each(np.empty(2)).tolist() == [pytest.approx(2 / 3)] * 2
