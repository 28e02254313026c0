"""What `balanced` promises, in the federations that broke it: sizes, lone classes, small and large cohorts, absence."""

import numpy as np
import pytest

from fedcohort import ClientTable, LabelCounts, Session
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.selectors import Balanced

SLACK = 3.0


def sizes_over_three_orders(n, rng):
    sizes = rng.permutation(np.rint(3 * 10 ** np.linspace(0, 3, n)).astype(int))
    return np.array(
        [rng.multinomial(size, mix) for size, mix in zip(sizes, rng.dirichlet(np.full(10, 0.3), n), strict=True)]
    )


def one_class_with_twice_the_samples(n, rng):
    counts = np.array([rng.multinomial(100, mix) for mix in rng.dirichlet(np.full(10, 1.0), n)])
    lone = rng.permutation(n)[: n // 10]
    counts[lone] = 0
    counts[lone, rng.integers(0, 10, len(lone))] = 200
    return counts


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("available", [1.0, 0.6, 0.3])
@pytest.mark.parametrize(("n", "k"), [(40, 2), (40, 20), (30, 5)])
@pytest.mark.parametrize("world", [sizes_over_three_orders, one_class_with_twice_the_samples])
def test_share_and_coverage(world, n, k, available, seed):
    rng = np.random.default_rng(seed)
    session = Session(Balanced(slack=SLACK), ClientTable(labels=LabelCounts(world(n, rng))), seed=seed)
    rates = session.state.rates
    total = rates.sum()
    picked, waits, longest = np.zeros(n), np.zeros(n), np.zeros(n)
    for _ in range(10 * n // k):
        there = np.sort(rng.permutation(n)[: max(k, round(available * n))])
        cohort = session.ask(RoundRequest(size=k, available=there))
        session.tell(RoundReport(cohort.ticket, cohort.clients))
        picked[cohort.clients] += 1
        waits[there] += 1  # an absence counts while it could have come
        waits[cohort.clients] = 0
        longest = np.maximum(longest, waits)
        lead = picked / rates - picked.sum() / total
        if available == 1.0:  # what the page proves
            assert (lead < SLACK + 1 / rates).all()
            assert (lead >= -(2 * SLACK + (n + k) / total)).all()
        elif available * n >= 2 * k:  # there is a choice: no client takes the turns of absent ones
            assert (lead < 2 * SLACK).all()
    assert (longest <= (3 * SLACK + (n + k) / total + 1 / rates) * total / k).all()
    assert picked.min() > 0
