"""REFL: forecasts counted by hand, the order of picks, and holding off."""

from itertools import pairwise

import numpy as np
import pytest

from fedcohort import create
from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.session import Session


def play(session, available, size=1):
    cohort = session.ask(RoundRequest(size=size, available=available))
    session.tell(RoundReport(cohort.ticket, cohort.clients))
    return cohort


def test_forecasts_against_a_plain_count():
    n, memory = 6, 20
    rng = np.random.default_rng(7)
    session = Session(create("refl", hold_off=0, memory=memory), ClientTable(n=n), seed=0)
    history = []
    for _ in range(40):
        there = rng.random(n) < np.linspace(0.2, 0.95, n)
        there[5] = True
        history.append(there)
        cohort = play(session, np.flatnonzero(there))
        forecast = []
        for client in cohort.candidates.tolist():
            stayed = left = 0.0
            for before, now in pairwise(history):
                if before[client]:
                    stayed, left = stayed * (1 - 1 / memory), left * (1 - 1 / memory)
                    stayed, left = stayed + now[client], left + (not now[client])
            forecast.append((1 + stayed) / (2 + stayed + left))
        np.testing.assert_allclose(cohort.parts["forecast"], forecast)
        assert forecast[cohort.candidates.tolist().index(cohort.clients[0])] == pytest.approx(min(forecast))


def test_clients_that_leave_soonest_come_first():
    session = Session(create("refl", hold_off=0), ClientTable(n=4), seed=0)
    for t in range(12):
        cohort = play(session, [0, 1, 2, 3] if t % 3 == 0 else [0, 1, 2] if t % 3 == 1 else [0, 1])
    cohort = play(session, [0, 1, 2, 3], size=2)
    assert cohort.clients.tolist() == [3, 2]  # 3 never stays, 2 every second time


def test_holding_off_makes_turns_and_yields_if_too_few_are_available():
    session = Session(create("refl", hold_off=3), ClientTable(n=8), seed=0)
    everybody = list(range(8))
    rounds = [set(play(session, everybody, size=2).clients.tolist()) for _ in range(8)]
    for first in range(5):
        assert len(set.union(*rounds[first : first + 4])) == 8
    alone = play(session, sorted(rounds[-1] | rounds[-2]), size=2)
    assert set(alone.clients.tolist()) == rounds[-2]  # both hold off; those that are free sooner come
    assert alone.notes["holding off"] == 4


def test_equal_forecasts_are_drawn_at_random():
    firsts = set()
    for seed in range(30):
        firsts.add(int(play(Session(create("refl"), ClientTable(n=5), seed=seed), None).clients[0]))
    assert firsts == {0, 1, 2, 3, 4}
