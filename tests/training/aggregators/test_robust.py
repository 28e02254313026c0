"""Robust averages against values worked out by hand and by brute force; liars must not matter."""

import numpy as np
import pytest

from fedcohort.training.aggregators import Krum, Mean, Median, MultiKrum, TrimmedMean
from fedcohort.training.aggregators.robust import _krum_scores

from .problems import OLD, members

FIVE = np.array([[0.0, 5.0, 1.0], [1.0, 4.0, 1.0], [2.0, 3.0, 1.0], [3.0, 2.0, 1.0], [1e30, -1e30, 1.0]])


def combined(rule, models, **changes):
    k = len(models)
    changes = {"share": np.full(k, 1 / k), "steps": np.ones(k), "multiplicity": np.ones(k), **changes}
    return rule.combine(OLD, np.asarray(models), members(**changes))


def test_median_odd_and_even():
    np.testing.assert_allclose(combined(Median(), FIVE).model, [2.0, 3.0, 1.0])
    np.testing.assert_allclose(combined(Median(), FIVE[:4]).model, [1.5, 3.5, 1.0])
    np.testing.assert_allclose(combined(Median(), FIVE[:2]).model, [0.5, 4.5, 1.0])


def test_trimmed_mean_drops_the_same_number_at_both_ends():
    np.testing.assert_allclose(combined(TrimmedMean(beta=0.2), FIVE).model, [2.0, 3.0, 1.0])
    np.testing.assert_allclose(combined(TrimmedMean(beta=0.45), FIVE).model, [2.0, 3.0, 1.0])  # two at each end
    np.testing.assert_allclose(combined(TrimmedMean(beta=0.25), FIVE[:4]).model, [1.5, 3.5, 1.0])
    np.testing.assert_allclose(combined(TrimmedMean(beta=0.2), FIVE[:4]).model, FIVE[:4].mean(0))  # fewer than five
    np.testing.assert_allclose(combined(TrimmedMean(beta=0.0), FIVE[:4]).model, combined(Mean(), FIVE[:4]).model)


def test_trimming_a_tenth_of_thirty_drops_three():
    models = np.arange(30.0)[:, None] * np.ones(3)
    models[:3] -= 1e6
    np.testing.assert_allclose(combined(TrimmedMean(beta=0.1), models).model, np.arange(3, 27).mean() * np.ones(3))


def brute_scores(rows, liars):
    scores = []
    for i, row in enumerate(rows):
        others = sorted(float(((row - other) ** 2).sum()) for j, other in enumerate(rows) if j != i)
        scores.append(sum(others[: len(rows) - liars - 2]))
    return scores


@pytest.mark.parametrize("liars", [0, 1, 2])
def test_krum_scores_match_the_definition(liars):
    rows = np.random.default_rng(3).normal(size=(9, 6))
    np.testing.assert_allclose(_krum_scores(rows, liars), brute_scores(rows, liars), rtol=1e-10)


def test_krum_takes_the_model_closest_to_its_neighbours():
    # f = 1 of 5: sums over the two nearest. 0: 1+9, 1: 1+4, 3: 4+1 (to 4), 4: 1+9, 100: far
    line = np.array([[0.0], [1.0], [3.0], [4.0], [100.0]]) * np.ones(3)
    np.testing.assert_allclose(_krum_scores(line, 1) / 3, [10.0, 5.0, 5.0, 10.0, 96.0**2 + 97.0**2])
    result = combined(Krum(liars=0.2), line)
    np.testing.assert_allclose(result.model, line[1])  # a tie goes to the first
    np.testing.assert_array_equal(result.weights, [0, 1, 0, 0, 0])


def test_multi_krum_averages_the_best():
    line = np.array([[0.0], [1.0], [3.0], [4.0], [100.0]]) * np.ones(3)
    np.testing.assert_allclose(combined(MultiKrum(liars=0.2, averaged=2), line).model, 2.0 * np.ones(3))
    everybody_honest = combined(MultiKrum(liars=0.2), line)
    np.testing.assert_allclose(everybody_honest.model, 2.0 * np.ones(3))  # 0, 1, 3, 4
    np.testing.assert_allclose(everybody_honest.weights, [0.25, 0.25, 0.25, 0.25, 0.0])
    np.testing.assert_allclose(combined(MultiKrum(averaged=50), line).model, line.mean(0))


def test_krum_lowers_the_number_of_liars_in_a_small_cohort():
    # 0.4 of 5 would be two, but 2 f + 2 < 5 leaves one; of three models none
    line = np.array([[0.0], [1.0], [3.0], [4.0], [100.0]]) * np.ones(3)
    np.testing.assert_allclose(combined(Krum(liars=0.4), line).model, combined(Krum(liars=0.2), line).model)
    np.testing.assert_allclose(combined(Krum(liars=0.4), line[1:4]).model, line[2])


@pytest.mark.parametrize("rule", [Krum(), MultiKrum()])
@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_models_are_averaged(rule, count):
    np.testing.assert_allclose(combined(rule, FIVE[:count]).model, FIVE[:count].mean(0))


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(beta=0.3), Krum(liars=0.3), MultiKrum(liars=0.3)])
@pytest.mark.parametrize("lie", [50.0, -1e6, 3e38])
def test_three_liars_of_ten_do_not_move_the_model(rule, lie):
    torch = pytest.importorskip("torch")
    honest = OLD + np.random.default_rng(0).normal(scale=0.1, size=(7, 3))
    models = torch.tensor(np.vstack([np.full((3, 3), lie), honest]), dtype=torch.float32)
    crowd = members(share=np.full(10, 0.1), steps=np.ones(10), multiplicity=np.array([50.0] * 3 + [1.0] * 7))
    result = rule.combine(torch.tensor(OLD, dtype=torch.float32), models, crowd)
    assert (np.abs(result.model.numpy() - OLD) < 0.3).all()
    if isinstance(rule, (Krum, MultiKrum)):
        assert result.weights[:3].sum() == 0.0


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(), MultiKrum(), Krum()])
def test_order_does_not_matter(rule):
    models = np.random.default_rng(1).normal(size=(7, 3))
    turned = combined(rule, models[::-1]).model
    np.testing.assert_allclose(turned, combined(rule, models).model, rtol=1e-12)
