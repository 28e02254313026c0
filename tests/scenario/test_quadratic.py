import numpy as np
import pytest
from scipy.optimize import linprog

from fedcohort.scenario.quadratic import quadratic_sizes


@pytest.mark.parametrize("seed", range(12))
def test_same_solution_as_a_dense_solver(seed):
    quadprog = pytest.importorskip("quadprog")
    rng = np.random.default_rng(seed)
    clients = int(rng.choice([20, 40, 100]))
    fractions = rng.dirichlet(np.full(10, rng.choice([0.005, 0.02, 0.1, 1.0])), size=clients).T
    counts = rng.integers(100, 6000, 10).astype(float) if seed % 2 else np.full(10, 6000.0)
    sizes = quadratic_sizes(fractions, counts, 1.0)
    constraints = np.vstack([fractions, np.eye(clients)]).T
    try:
        expected = quadprog.solve_qp(
            np.eye(clients), np.zeros(clients), constraints, np.concatenate([counts, np.ones(clients)]), 10
        )[0]
    except ValueError:
        expected = None
    assert (sizes is None) == (expected is None)
    if sizes is not None:
        assert np.abs(sizes - expected).max() < 1e-5
        assert np.abs(fractions @ sizes - counts).max() < 1e-6


def test_floor_that_binds_for_many_clients():
    quadprog = pytest.importorskip("quadprog")
    rng = np.random.default_rng(5)
    fractions = rng.dirichlet(np.full(4, 0.3), size=60).T
    counts = np.array([900.0, 500.0, 300.0, 200.0])
    for least in (3.0, 6.0, 10.0):
        sizes = quadratic_sizes(fractions, counts, least)
        constraints = np.vstack([fractions, np.eye(60)]).T
        bounds = np.concatenate([counts, np.full(60, least)])
        expected = quadprog.solve_qp(np.eye(60), np.zeros(60), constraints, bounds, 4)[0]
        assert np.abs(sizes - expected).max() < 1e-6
    assert (sizes < least + 1e-9).sum() > 5


def test_none_exactly_if_a_linear_programme_is_infeasible():
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(40):
        clients = int(rng.integers(10, 40))
        fractions = rng.dirichlet(np.full(10, 0.05), size=clients).T
        counts = np.full(10, 500.0)
        feasible = linprog(np.zeros(clients), A_eq=fractions, b_eq=counts, bounds=(1, None)).status == 0
        assert (quadratic_sizes(fractions, counts, 1.0) is not None) == feasible
        seen.add(feasible)
    assert seen == {True, False}


def test_many_clients_are_solved_quickly():
    rng = np.random.default_rng(1)
    fractions = rng.dirichlet(np.full(10, 0.1), size=50_000).T
    counts = rng.integers(400_000, 600_000, 10).astype(float)
    sizes = quadratic_sizes(fractions, counts, 1.0)
    assert np.abs(fractions @ sizes - counts).max() < 1e-6
    assert sizes.min() >= 1.0


def test_a_class_that_no_client_holds():
    fractions = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    assert quadratic_sizes(fractions, np.array([3.0, 4.0, 0.0])) == pytest.approx(np.array([3.0, 4.0]))
    assert quadratic_sizes(fractions, np.array([3.0, 4.0, 1.0])) is None
    assert quadratic_sizes(fractions, np.zeros(3)) is None
