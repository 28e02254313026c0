"""RBCS-F: estimates against ridge regression, the choice against all subsets, the guarantee over rounds."""

from itertools import combinations

import numpy as np
import pytest

from fedcohort import create
from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import RoundReport, RoundRequest, Status
from fedcohort.core.signals import Signal
from fedcohort.selectors.baselines import rbcs_f
from fedcohort.selectors.baselines.rbcs_f import _quickest_fair
from fedcohort.session import Session


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_the_choice_is_the_best_of_all_subsets(size):
    rng = np.random.default_rng(size)
    for _ in range(60):
        cost, owed = rng.exponential(2.0, 7), rng.integers(0, 4, 7).astype(float)
        found = _quickest_fair(cost, owed, size, rng)

        def value(group, cost=cost, owed=owed):
            return cost[list(group)].max() - owed[list(group)].sum()

        assert len(set(found.tolist())) == size
        assert value(found) == pytest.approx(min(value(group) for group in combinations(range(7), size)))


def test_blocks_do_not_change_the_choice(monkeypatch):
    rng = np.random.default_rng(1)
    cost, owed = rng.random(300), 0.1 * rng.random(300)
    whole = _quickest_fair(cost, owed, 12, np.random.default_rng(0))
    monkeypatch.setattr(rbcs_f, "_BLOCK", 7)
    assert _quickest_fair(cost, owed, 12, np.random.default_rng(0)).tolist() == whole.tolist()


def test_estimates_and_queues_against_a_plain_form():
    n, m, fairness, speed, alpha, ridge = 5, 2, 0.6, 1.5, 0.3, 0.2
    selector = create("rbcs-f", fairness=fairness, speed=speed, exploration=alpha, ridge=ridge)
    session = Session(selector, ClientTable(n=n), seed=4)
    rng = np.random.default_rng(2)
    rows, queue, before = {i: [] for i in range(n)}, np.zeros(n), set()
    for _ in range(25):
        everything = [tau for seen in rows.values() for _, tau in seen]
        scale = np.mean(everything) if everything else 1.0
        bound, estimate = np.zeros(n), np.zeros(n)
        for i, seen in rows.items():
            x = np.array([c for c, _ in seen]).reshape(-1, 2)
            h = ridge * np.eye(2) + x.T @ x
            theta = np.linalg.solve(h, x.T @ np.array([tau for _, tau in seen]))
            c = np.array([1.0, float(i in before)])
            estimate[i] = theta @ c / scale
            bound[i] = max(estimate[i] - alpha * np.sqrt(c @ np.linalg.solve(h, c)), 0.0)
        cohort = session.ask(RoundRequest(size=m))
        np.testing.assert_allclose(cohort.score, queue - speed * bound, atol=1e-9)
        np.testing.assert_allclose(cohort.parts["expected duration"], estimate, atol=1e-9)
        picked = cohort.clients.tolist()
        best = min(speed * bound[list(g)].max() - queue[list(g)].sum() for g in combinations(range(n), m))
        assert speed * bound[picked].max() - queue[picked].sum() == pytest.approx(best, abs=1e-9)
        seconds = (cohort.clients + 1.0) * rng.uniform(0.8, 1.2, m)
        session.tell(RoundReport(cohort.ticket, cohort.clients, metrics={Signal.DURATION: seconds}))
        for i, tau in zip(picked, seconds.tolist(), strict=True):
            rows[i].append(((1.0, float(i in before)), tau))
        queue = np.maximum(queue + fairness * m / n - np.isin(np.arange(n), picked), 0.0)
        before = set(picked)


def test_slow_clients_get_what_they_are_owed_and_fast_ones_the_rest():
    n, m, rounds = 20, 4, 400
    counts = {}
    for fairness in (0.0, 0.5, 1.0):
        session = Session(create("rbcs-f", fairness=fairness), ClientTable(n=n), seed=3)
        counts[fairness] = np.zeros(n)
        for _ in range(rounds):
            cohort = session.ask(RoundRequest(size=m))
            seconds = np.where(cohort.clients < 10, 1.0, 6.0)
            session.tell(RoundReport(cohort.ticket, cohort.clients, metrics={Signal.DURATION: seconds}))
            counts[fairness][cohort.clients] += 1
    guaranteed = m / n * rounds
    assert (counts[0.5] >= 0.5 * guaranteed - 15).all()
    assert counts[0.5][:10].mean() > 1.3 * counts[0.5][10:].mean()
    assert (counts[1.0] >= guaranteed - 15).all()
    assert counts[0.0][10:].max() < 0.2 * guaranteed


def test_zero_durations_and_failures():
    session = Session(create("rbcs-f"), ClientTable(n=4), seed=3)
    for _ in range(10):
        cohort = session.ask(RoundRequest(size=2))
        session.tell(RoundReport(cohort.ticket, cohort.clients, metrics={Signal.DURATION: [0.0, 0.0]}))
    assert np.isfinite(session.ask(RoundRequest(size=2)).score).all()

    session = Session(create("rbcs-f", fairness=0.2, exploration=0.0), ClientTable(n=6), seed=3)
    failures = 0
    for _ in range(60):
        cohort = session.ask(RoundRequest(size=2))
        failed = cohort.clients == 5
        failures += int(failed.any())
        seconds = np.where(cohort.clients == 0, 8.0, 1.0 + 0.1 * cohort.clients)
        session.tell(
            RoundReport(
                cohort.ticket,
                cohort.clients,
                status=np.where(failed, Status.FAILED, Status.OK).tolist(),
                metrics={Signal.DURATION: seconds},
            )
        )
    assert 0 < failures < 20  # two of six a round would be twenty
