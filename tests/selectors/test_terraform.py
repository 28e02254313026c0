"""Terraform: the split against all splits, and its cohorts by hand."""

import itertools

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import RoundReport, RoundRequest, Status
from fedcohort.core.signals import Signal
from fedcohort.selectors.baselines.terraform import Terraform, split_index
from fedcohort.session.session import Session


@pytest.mark.parametrize("k", [2, 3, 4, 5, 8, 13, 40])
def test_the_split_has_the_least_variance_between_the_quartiles(k):
    for seed in range(20):
        values = np.sort(np.random.default_rng(seed).lognormal(size=k))
        cost = {
            s: s * values[:s].var() + (k - s) * values[s:].var()
            for s in range(1, k)
            if np.ceil(k / 4) <= s <= max(1, np.floor(3 * k / 4))
        }
        found = split_index(values)
        assert cost[found] == pytest.approx(min(cost.values()), abs=1e-9)


def test_equal_and_huge_numbers():
    assert split_index(np.ones(8)) == 2
    assert split_index(np.zeros(4)) == 1
    assert split_index(np.array([1e-300, 1e100])) == 1


def test_hard_clients_train_again_until_few_are_left():
    session = Session(Terraform(threshold=2), ClientTable(n=30), seed=3)
    difficulty = np.random.default_rng(0).lognormal(size=30)
    sizes, before = [], None
    for _ in range(30):
        cohort = session.ask(RoundRequest(size=12))
        sizes.append(len(cohort))
        change = difficulty[cohort.clients]
        if len(cohort) < 12:
            assert sorted(cohort.clients) == sorted(before)
        order = np.sort(change)
        least = order[split_index(order)]
        before = [c for c in cohort.clients if difficulty[c] >= least]
        session.tell(RoundReport(cohort.ticket, cohort.clients, metrics={Signal.OUTPUT_UPDATE_NORM: change}))
    assert max(sizes) == 12 and min(sizes) >= 2
    for one, next_ in itertools.pairwise(sizes):
        assert next_ == 12 or one / 4 <= next_ <= 3 * one / 4
    assert sizes.count(12) >= 6


def test_the_choice_is_deterministic_once_a_cohort_is_drawn():
    cohorts = []
    for seed in (0, 1):
        session = Session(Terraform(), ClientTable(n=6), seed=seed)
        everybody = session.ask(RoundRequest(size=6))
        change = np.array([1.0, 5.0, 2.0, 9.0, 8.0, 1.5])[everybody.clients]
        session.tell(RoundReport(everybody.ticket, everybody.clients, metrics={Signal.OUTPUT_UPDATE_NORM: change}))
        cohorts.append(session.ask(RoundRequest(size=6)).names)
    assert cohorts[0] == cohorts[1] == ("3", "4", "1")


def test_clients_that_fail_are_not_hard():
    session = Session(Terraform(threshold=1), ClientTable(n=4), seed=0)
    cohort = session.ask(RoundRequest(size=4))
    status = [Status.FAILED, Status.OK, Status.OK, Status.OK]
    change = np.array([np.nan, 1.0, 2.0, 9.0])
    session.tell(RoundReport(cohort.ticket, cohort.clients, status=status, metrics={Signal.OUTPUT_UPDATE_NORM: change}))
    assert cohort.clients[0] not in session.ask(RoundRequest(size=4)).clients
