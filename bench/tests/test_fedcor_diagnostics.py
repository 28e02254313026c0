"""Normality and stationarity of loss changes against direct computations."""

from __future__ import annotations

import numpy as np
import pytest

from fedcohort.core.errors import InputError
from fedcohort_bench import diagnostics


def gaussian(seed, samples, clients, rank):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(samples, rank)) @ rng.normal(size=(rank, clients)) + rng.normal(size=clients)


def test_similarity_is_the_cosine_of_the_covariance_matrices():
    first, second = gaussian(1, 50, 8, 3), gaussian(2, 70, 8, 4)
    a, b = np.cov(first, rowvar=False), np.cov(second, rowvar=False)
    cosine = np.trace(a.T @ b) / np.sqrt(np.trace(a.T @ a) * np.trace(b.T @ b))
    assert diagnostics.covariance_similarity(first, second) == pytest.approx(cosine)
    assert diagnostics.covariance_similarity(first, 7 * first) == pytest.approx(1.0)


def test_clients_that_did_not_answer_are_left_out():
    first, second = gaussian(1, 50, 8, 3), gaussian(2, 70, 8, 4)
    holes = second.copy()
    holes[3, 6] = np.nan
    rest = [0, 1, 2, 3, 4, 5, 7]
    assert diagnostics.covariance_similarity(first, holes) == pytest.approx(
        diagnostics.covariance_similarity(first[:, rest], second[:, rest])
    )


def test_stationarity_compares_neighbours():
    sets = [gaussian(seed, 40, 6, 2) for seed in (1, 1, 2)]
    found = diagnostics.stationarity(sets)
    assert found[0] == pytest.approx(1.0)
    assert found[1] == pytest.approx(diagnostics.covariance_similarity(sets[1], sets[2]))
    assert 0 <= found[1] < 1


def test_components_are_the_principal_ones():
    changes = gaussian(4, 300, 30, 3)
    report = diagnostics.normality(changes, components=10)
    assert report.components.shape == (300, 3)  # no more than there are
    assert report.explained.sum() == pytest.approx(1.0)
    values = np.sort(np.linalg.eigvalsh(np.cov(changes, rowvar=False)))[::-1][:3]
    assert np.allclose(report.components.var(axis=0, ddof=1), values)


def test_gaussian_samples_pass_and_skewed_ones_do_not():
    changes = gaussian(5, 1000, 30, 3)
    good = diagnostics.normality(changes)
    assert (good.p_value > 0.01).all()
    assert (good.distance < 0.06).all()
    rng = np.random.default_rng(6)
    bad = diagnostics.normality(rng.exponential(size=(1000, 1)) @ rng.normal(size=(1, 30)))
    assert bad.p_value[0] < 1e-10
    assert abs(bad.skewness[0]) > 1
    assert bad.excess_kurtosis[0] > 2
    assert bad.distance[0] > 0.1


def test_too_few_samples_are_refused():
    with pytest.raises(InputError, match="At least 8"):
        diagnostics.normality(np.ones((3, 4)))
    with pytest.raises(InputError, match="same clients"):
        diagnostics.covariance_similarity(np.ones((5, 4)), np.ones((5, 3)))
    with pytest.raises(InputError, match="one row"):
        diagnostics.normality(np.ones(4))


def test_constant_losses_have_no_component():
    report = diagnostics.normality(np.ones((20, 4)))
    assert report.components.shape == (20, 0)
    assert len(report.p_value) == 0
