"""DELTA: Eq. 11 against a search for the least variance, the practical rule by hand, and its limits."""

import numpy as np
import pytest
from scipy.optimize import minimize

from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import RoundReport, RoundRequest, Slate, Status
from fedcohort.core.signals import Signal
from fedcohort.selectors.baselines.delta import Delta, _DeltaState, _shared_mass
from fedcohort.session.session import Session


def test_equation_11_has_the_least_variance():
    """Phi is a sum of d_i^2 / p_i; no other probabilities make it smaller."""
    zeta = np.array([0.3, 2.0, 1.0, 0.1, 4.0])
    sigma = 0.2 * (zeta**2).mean()
    ours = _shared_mass(np.full(5, 0.2), zeta, 0.2)
    phi = lambda logits: float(((zeta**2 + sigma) / (np.exp(logits) / np.exp(logits).sum())).sum())  # noqa: E731
    found = minimize(phi, np.zeros(5), tol=1e-12).x
    np.testing.assert_allclose(ours, np.exp(found) / np.exp(found).sum(), rtol=1e-3)
    assert phi(np.log(ours)) <= phi(found) * (1 + 1e-9)


def test_three_rounds_by_hand():
    """The paper's practical form, with all probabilities in a plain list."""
    n, variance, seed = 6, 0.3, 5
    rng = np.random.default_rng(0)
    session = Session(Delta(local_variance=variance), ClientTable(sizes=np.full(n, 10)), seed=seed)
    p = [1 / n] * n
    for _ in range(3):
        cohort = session.ask(RoundRequest(size=3))
        np.testing.assert_allclose(cohort.score, np.minimum(1.0, 3 * np.array(p)), rtol=1e-9)
        np.testing.assert_allclose(cohort.weights, 1 / cohort.score[cohort.clients])
        zeta = rng.uniform(1.0, 2.0, 3)
        session.tell(RoundReport(cohort.ticket, cohort.clients, metrics={Signal.UPDATE_DISTANCE: zeta}))
        mean_square = sum(z**2 for z in zeta) / 3
        d = [(z**2 + variance * mean_square) ** 0.5 for z in zeta]
        together = 1 - sum(p[i] for i in range(n) if i not in cohort.clients)
        for client, own in zip(cohort.clients.tolist(), d, strict=True):
            p[client] = own / sum(d) * together
    assert sum(p) == pytest.approx(1.0)
    assert max(p) - min(p) > 0.01


def test_failed_clients_keep_their_probability():
    session = Session(Delta(), ClientTable(sizes=np.full(3, 10)), seed=0)
    cohort = session.ask(RoundRequest(size=3))
    status = [Status.OK, Status.FAILED, Status.OK]
    zeta = np.array([1.0, np.nan, 3.0])
    session.tell(RoundReport(cohort.ticket, cohort.clients, status=status, metrics={Signal.UPDATE_DISTANCE: zeta}))
    after = session.ask(RoundRequest(size=1)).score
    assert after[cohort.clients[1]] == pytest.approx(1 / 3)
    assert after[cohort.clients[2]] > 1 / 3 > after[cohort.clients[0]]


def test_every_client_can_still_be_drawn():
    mass = np.ones(4)
    for _ in range(200):
        mass = _shared_mass(mass, np.array([0.0, 0.0, 1.0, 1.0]), 0.0)
    assert mass.min() > 1e-7
    assert mass.sum() == pytest.approx(4.0)
    np.testing.assert_allclose(_shared_mass(np.ones(3), np.zeros(3), 0.1), np.ones(3))
    assert np.isfinite(_shared_mass(np.ones(2), np.array([1e300, 1.0]), 0.1)).all()


def test_weights_keep_the_sum_unbiased():
    rng = np.random.default_rng(1)
    mass = np.array([0.2, 3.0, 1.0, 0.5, 0.3, 1.0])
    update = np.array([1.0, 8.0, 2.0, 1.0, 4.0, 0.5])
    slate = Slate(round=4, size=3, candidates=np.arange(6), clients=ClientTable(sizes=np.ones(6)))
    sums = []
    for _ in range(4000):
        cohort, _ = Delta().select(_DeltaState(mass), slate, None, rng)
        sums.append((cohort.weights * update[cohort.clients]).sum())
    assert np.mean(sums) == pytest.approx(update.sum(), rel=0.02)
