"""FEEL: the distribution against numerical minimisation, the weights against enumeration of all ordered draws."""

from itertools import permutations

import numpy as np
import pytest
from scipy.optimize import minimize

from fedcohort import create
from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.core.signals import Signal
from fedcohort.selectors.baselines.feel import _optimal_distribution, _raj_weights
from fedcohort.session import Session


@pytest.mark.parametrize("rho", [0.1, 0.5, 0.9, 0.999])
def test_the_distribution_minimises_the_objective(rho):
    rng = np.random.default_rng(4)
    a, t = rng.uniform(0.2, 3.0, 6), rng.uniform(0.1, 5.0, 6)
    share, time = a / a.sum(), t / t.mean()

    def objective(p):
        return rho * p @ time + (1 - rho) * (share**2 / p).sum()

    ours = _optimal_distribution(a, t, rho)
    assert ours.sum() == pytest.approx(1.0, abs=1e-12)
    start = np.full(6, 1 / 6)
    found = minimize(objective, start, bounds=[(1e-6, 1)] * 6, constraints={"type": "eq", "fun": lambda p: p.sum() - 1},
                     method="SLSQP", options={"ftol": 1e-14, "maxiter": 500})  # fmt: skip
    assert objective(ours) <= found.fun + 1e-9
    # Stationarity: the derivative is the same for all, -lambda.
    slopes = rho * time - (1 - rho) * share**2 / ours**2
    np.testing.assert_allclose(slopes, slopes[0], rtol=1e-6, atol=1e-8)


def test_special_cases_of_the_distribution():
    a = np.array([1.0, 3.0])
    assert _optimal_distribution(a, np.array([5.0, 1.0]), 0.0).tolist() == [0.25, 0.75]
    assert _optimal_distribution(a, np.zeros(2), 0.5).tolist() == [0.25, 0.75]
    np.testing.assert_allclose(_optimal_distribution(a, np.full(2, 7.0), 0.5), [0.25, 0.75])
    np.testing.assert_allclose(_optimal_distribution(np.zeros(2), np.full(2, 7.0), 0.5), [0.5, 0.5])
    np.testing.assert_allclose(_optimal_distribution(np.array([0.0, 2.0]), np.array([1.0, 9.0]), 0.5), [0.0, 1.0])
    assert _optimal_distribution(np.ones(1), np.ones(1), 0.5).tolist() == [1.0]
    slow = _optimal_distribution(np.ones(3), np.array([1.0, 1.0, 50.0]), 0.9)
    assert slow[2] < slow[0] == slow[1]


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e300])
def test_extreme_numbers_give_a_distribution(scale):
    for a, t in (
        ([1.0, scale, 1.0], [1.0, 1.0, 2.0]),
        ([1.0, 1.0, 1.0], [1.0, scale, 2.0]),
        ([scale] * 3, [scale] * 3),
    ):
        p = _optimal_distribution(np.array(a), np.array(t), 0.5)
        assert np.isfinite(p).all()
        assert p.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("m", [1, 2, 3])
def test_weights_make_the_sum_unbiased(m):
    p, y = np.array([0.1, 0.2, 0.3, 0.4]), np.array([7.0, -3.0, 2.0, 5.0])
    mean = 0.0
    for order in permutations(range(4), m):
        chance, left = 1.0, 1.0
        for i in order:
            chance *= p[i] / left
            left -= p[i]
        mean += chance * (_raj_weights(p[list(order)]) @ y[list(order)])
    assert mean == pytest.approx(y.sum(), rel=1e-12)


def test_draws_follow_importance_and_time():
    session = Session(create("feel", rho=0.5), ClientTable(sizes=[10, 10, 30]), seed=0)
    cohort = session.ask(RoundRequest(size=3))
    assert cohort.weights.tolist() == [1, 1, 1]  # all clients: a plain average
    norms, seconds = {0: 2.0, 1: 2.0, 2: 1.0}, {0: 1.0, 1: 8.0, 2: 2.0}
    metrics = {
        Signal.GRADIENT_NORM: [norms[c] for c in cohort.clients.tolist()],
        Signal.DURATION: [seconds[c] for c in cohort.clients.tolist()],
    }
    session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=metrics))
    cohort = session.ask(RoundRequest(size=2))
    expected = _optimal_distribution(np.array([20.0, 20.0, 30.0]), np.array([1.0, 8.0, 2.0]), 0.5)
    np.testing.assert_allclose(cohort.score, expected)
    np.testing.assert_allclose(cohort.weights, _raj_weights(expected[cohort.clients]))


def test_unknown_clients_count_as_the_mean_and_a_norm_of_zero_is_not_for_ever():
    session = Session(create("feel", rho=0.0, importance="update-norm"), ClientTable(sizes=[1, 1, 1]), seed=0)
    cohort = session.ask(RoundRequest(size=2, available=[0, 1]))
    metrics = {Signal.UPDATE_NORM: [0.0 if c == 0 else 4.0 for c in cohort.clients.tolist()]}
    session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=metrics))
    score = session.ask(RoundRequest(size=1)).score
    np.testing.assert_allclose(score, np.array([0.02, 4.0, 2.0]) / 6.02)


def test_all_norms_zero_draw_by_size():
    session = Session(create("feel"), ClientTable(sizes=[1, 3]), seed=0)
    cohort = session.ask(RoundRequest(size=2))
    session.tell(
        RoundReport(cohort.ticket, [0, 1], metrics={Signal.GRADIENT_NORM: [0.0, 0.0], Signal.DURATION: [0.0, 0.0]})
    )
    assert session.ask(RoundRequest(size=1)).score.tolist() == [0.25, 0.75]
