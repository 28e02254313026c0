"""Fed-cucb: bound, decaying means and greedy additions against a plain form of the algorithm."""

import math

import numpy as np
import pytest

from fedcohort import create
from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.core.signals import Signal
from fedcohort.selectors.numerics.label_shares import by_relative_softmax
from fedcohort.session import Session


def divergence(shares):
    total = sum(shares)
    return sum(s / total * math.log(s / total * len(shares)) for s in shares if s > 0)


def tell(session, cohort, updates):
    metrics = {Signal.OUTPUT_BIAS_UPDATE: np.asarray(updates, float)}
    session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=metrics))


def test_every_client_is_seen_once_first():
    session = Session(create("fed-cucb"), ClientTable(n=7), seed=2)
    seen = []
    for _ in range(3):
        cohort = session.ask(RoundRequest(size=2))
        seen += cohort.clients.tolist()
        tell(session, cohort, np.eye(3)[cohort.clients % 3])
    assert len(set(seen)) == 6
    last = session.ask(RoundRequest(size=3))
    assert last.clients[0] == next(iter(set(range(7)) - set(seen)))
    assert last.notes["never seen"] == 1


def test_against_a_plain_form():
    """Twelve rounds with everything recomputed from the reports in the paper's own terms."""
    n, classes, alpha, rho = 5, 3, 0.2, 0.99
    rng = np.random.default_rng(0)
    session = Session(create("fed-cucb"), ClientTable(n=n), seed=2)
    cohort = session.ask(RoundRequest(size=n))
    estimates = {client: [] for client in range(n)}
    for t in range(2, 14):
        updates = rng.normal(size=(len(cohort), classes))
        for client, shares in zip(cohort.clients.tolist(), by_relative_softmax(updates, 0.5), strict=True):
            estimates[client].append(shares)
        tell(session, cohort, updates)
        mean, bound = {}, {}
        for client, seen in estimates.items():
            weights = [rho ** (len(seen) - 1 - j) for j in range(len(seen))]
            mean[client] = sum(w * s for w, s in zip(weights, seen, strict=True)) / sum(weights)
            reward = sum(w / divergence(s) for w, s in zip(weights, seen, strict=True)) / sum(weights)
            bound[client] = reward + alpha * math.sqrt(3 * math.log(t) / (2 * len(seen)))
        picks = [max(bound, key=bound.get)]
        while len(picks) < 3:
            total = sum(mean[c] for c in picks)
            rest = {c: divergence(total + mean[c]) for c in range(n) if c not in picks}
            picks.append(min(rest, key=rest.get))
        cohort = session.ask(RoundRequest(size=3))
        assert cohort.clients.tolist() == picks
        parts = cohort.parts
        np.testing.assert_allclose(parts["reward"] + parts["exploration"], [bound[c] for c in range(n)])
        final = divergence(sum(mean[c] for c in picks))
        np.testing.assert_allclose(cohort.score[picks], -final)
        assert (
            cohort.score <= cohort.score[picks[0]] + 1e-12
        ).all()  # no other client in the last one's place is better


@pytest.mark.parametrize("update", [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [1e30, 0.0, -1e30]])
def test_zero_and_extreme_updates(update):
    session = Session(create("fed-cucb"), ClientTable(n=4), seed=2)
    for _ in range(4):
        cohort = session.ask(RoundRequest(size=4))
        tell(session, cohort, [update] * 4)
        assert np.isfinite(session.state.reward).all()
    assert np.isfinite(session.ask(RoundRequest(size=1)).score).all()
