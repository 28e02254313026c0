"""PyramidFL: the cohorts of Oort, and work that fills the time until the slowest returns."""

import numpy as np
import pytest

from fedcohort import create
from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.core.signals import Signal
from fedcohort.session import Session
from fedcohort.testing import ScriptedHost


def play(session, seconds_of, size):
    """One round in which a client takes its seconds times the work it was given."""
    cohort = session.ask(RoundRequest(size=size))
    seconds = np.array([seconds_of[c] for c in cohort.clients]) * cohort.work
    metrics = {Signal.LOSS_RMS: np.ones(cohort.size), Signal.DURATION: seconds}
    session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=metrics))
    return dict(zip(cohort.clients.tolist(), cohort.work.tolist(), strict=True)), seconds


def test_work_by_hand_makes_all_clients_return_together():
    session = Session(create("pyramidfl", blacklist=None), ClientTable(sizes=[5, 5, 5]), seed=0)
    seconds_of = {0: 2.0, 1: 3.0, 2: 12.0}
    first, _ = play(session, seconds_of, 3)
    assert first == {0: 1.0, 1: 1.0, 2: 1.0}
    for _ in range(3):  # durations are of the usual work, so a stretched round changes nothing
        work, seconds = play(session, seconds_of, 3)
        assert work == {0: 6.0, 1: 4.0, 2: 1.0}
        assert seconds.tolist() == [12.0, 12.0, 12.0]


def test_extra_work_is_bounded():
    session = Session(create("pyramidfl", most_extra=0.5), ClientTable(sizes=[5, 5]), seed=0)
    play(session, {0: 1.0, 1: 100.0}, 2)
    work, _ = play(session, {0: 1.0, 1: 100.0}, 2)
    assert work == {0: 1.5, 1: 1.0}


@pytest.mark.parametrize("seconds", [0.0, 4.0])
def test_zero_and_equal_durations_and_one_client_mean_the_usual_work(seconds):
    for n in (1, 3):
        session = Session(create("pyramidfl"), ClientTable(sizes=[5] * n), seed=0)
        for _ in range(3):
            work, _ = play(session, dict.fromkeys(range(n), seconds), n)
            assert set(work.values()) == {1.0}


def test_cohorts_are_those_of_oort_while_durations_are_of_the_usual_work():
    host = ScriptedHost()
    ours = host.play(host.session(create("pyramidfl", most_extra=0.0), seed=3), 30)
    assert ours == host.play(host.session(create("oort"), seed=3), 30)
