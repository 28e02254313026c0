"""Astraea: Fed-CBS's Figure 3, passes through the federation, odd labels."""

import numpy as np
import pytest

from fedcohort import create
from fedcohort.core.clients import ClientTable, LabelCounts
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.session import Session

FIGURE_3 = [[5] * 6, [6, 6, 6, 6, 6, 0], [0, 0, 0, 10, 10, 10], [10, 10, 10, 0, 0, 0]]


def ask(session, size, available=None):
    """One round; returns the clients."""
    cohort = session.ask(RoundRequest(size=size, available=available))
    session.tell(RoundReport(cohort.ticket, cohort.clients))
    return cohort.clients.tolist()


def session_of(counts, seed=0, **params):
    return Session(create("astraea", **params), ClientTable(labels=LabelCounts(counts)), seed=seed)


@pytest.mark.parametrize("turns", [True, False])
def test_figure_3_of_fed_cbs(turns):
    """Greedy returns {C1, C2, C3}, whatever the seed, though {C1, C3, C4} is exactly balanced."""
    for seed in range(10):
        cohort = session_of(FIGURE_3, seed, turns=turns).ask(RoundRequest(size=3))
        assert cohort.clients.tolist() == [0, 1, 2]
        assert cohort.notes["divergence"] > 0
        assert cohort.score.argmin() == 3  # the one left out would have been worse in the last place
    best = np.array(FIGURE_3)[[0, 2, 3]].sum(axis=0)
    assert (best == best[0]).all()


def test_every_client_once_in_a_pass():
    rng = np.random.default_rng(1)
    session = session_of(rng.integers(0, 20, (12, 4)))
    for _ in range(3):
        seen = [c for _ in range(4) for c in ask(session, 3)]
        assert sorted(seen) == list(range(12))


def test_a_cohort_across_the_end_of_a_pass():
    session = session_of(np.random.default_rng(1).integers(0, 20, (5, 4)))
    counts = np.zeros(5)
    for rounds in range(1, 11):
        counts[ask(session, 3)] += 1
        assert counts.max() - counts.min() <= 2, rounds
    assert counts.sum() == 30


def test_without_turns_the_same_cohort_is_always_picked():
    session = session_of(np.random.default_rng(1).integers(0, 20, (12, 4)), turns=False)
    assert len({tuple(ask(session, 3)) for _ in range(5)}) == 1


def test_absent_clients_keep_their_turn():
    session = session_of([[1, 1], [2, 2], [3, 3]])
    assert sorted(ask(session, 2, [0, 1])) == [0, 1]
    (again,) = ask(session, 1, [0, 1])  # a new pass for those who are there
    assert sorted(ask(session, 2)) == sorted({0, 1, 2} - {again})


@pytest.mark.parametrize("counts", [[[0, 0]], [[3, 0], [0, 0], [3, 0]], [[1], [1]]])
def test_odd_labels(counts):
    session = session_of(counts)
    for _ in range(4):
        assert sorted(ask(session, len(counts))) == list(range(len(counts)))
