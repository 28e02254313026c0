"""Shapley values from permutations against the definition: a sum over all coalitions."""

import itertools
from math import comb

import numpy as np
import pytest

from fedcohort.selectors.baselines.greedyfed import _TRUNCATION, _gtg_shapley


def by_definition(utility, members):
    """The formula of the GreedyFed paper, coalition by coalition."""
    values = np.zeros(members)
    for k in range(members):
        others = [i for i in range(members) if i != k]
        for size in range(members):
            for chosen in itertools.combinations(others, size):
                without = np.isin(np.arange(members), chosen)
                having = without | (np.arange(members) == k)
                gain = float(utility(having[None])[0] - utility(without[None])[0])
                values[k] += gain / comb(members - 1, size) / members
    return values


def game(members, seed):
    """A quadratic loss of the average of the coalition's models, by size."""
    rng = np.random.default_rng(seed)
    models, sizes = rng.normal(size=(members, 3)) + np.array([1, 0, 0]), rng.integers(1, 9, members)

    def utility(coalitions):
        values = []
        for row in coalitions:
            average = np.average(models[row], axis=0, weights=sizes[row]) if row.any() else np.full(3, 2.0)
            values.append(-float((average**2).sum()))
        return np.array(values)

    return utility


@pytest.mark.parametrize("members", [1, 2, 3, 5, 7, 8, 9])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_estimate_is_near_the_definition(members, seed):
    utility = game(members, seed)
    values = _gtg_shapley(utility, members, np.random.default_rng(seed))
    exact = by_definition(utility, members)
    np.testing.assert_allclose(values, exact, atol=1e-9 if members <= 7 else 0.25 * np.abs(exact).mean())
    ends = utility(np.array([np.ones(members, bool), np.zeros(members, bool)]))
    assert values.sum() == pytest.approx(ends[0] - ends[1], abs=2 * _TRUNCATION)


def test_no_coalition_is_evaluated_twice_and_truncation_saves_the_rest():
    seen = []
    utility = game(9, 3)

    def counted(coalitions):
        seen.extend(row.tobytes() for row in coalitions)
        return utility(coalitions)

    _gtg_shapley(counted, 9, np.random.default_rng(0))
    assert len(seen) == len(set(seen)) <= 2**9
    seen.clear()

    def first_is_all(coalitions):
        seen.extend(row.tobytes() for row in coalitions)
        return coalitions[:, 0] * 1.0

    values = _gtg_shapley(first_is_all, 9, np.random.default_rng(0))
    np.testing.assert_allclose(values, np.eye(9)[0])
    assert len(seen) < 2**8


def test_values_are_zero_in_a_round_that_changes_little():
    asked = []

    def utility(coalitions):
        asked.append(len(coalitions))
        return np.where(coalitions.all(axis=1), _TRUNCATION / 2, 0.0)

    np.testing.assert_array_equal(_gtg_shapley(utility, 4, np.random.default_rng(0)), np.zeros(4))
    assert asked == [2]


def test_no_members_and_one_member():
    assert len(_gtg_shapley(game(1, 0), 0, np.random.default_rng(0))) == 0
    utility = game(1, 0)
    (value,) = _gtg_shapley(utility, 1, np.random.default_rng(0))
    assert value == pytest.approx(utility(np.array([[True]]))[0] - utility(np.array([[False]]))[0])
