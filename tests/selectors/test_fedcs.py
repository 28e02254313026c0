"""FedCS: against the greedy algorithm written out, with every client's upload and computing time."""

import numpy as np
import pytest

from fedcohort import create
from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import RoundReport, RoundRequest, Status
from fedcohort.core.signals import Signal
from fedcohort.selectors.baselines.fedcs import _expected_seconds, _round_ends
from fedcohort.session import Session


def greedy(seconds, upload, deadline):
    """Add the client that lengthens the round least, with T_CS = T_Agg = 0, the download counted with the computing."""
    left, chosen, elapsed = list(range(len(seconds))), [], 0.0
    while left:
        up = {k: upload * seconds[k] for k in left}
        compute = {k: (1 - upload) * seconds[k] for k in left}
        x = max(left, key=lambda k: 1 / (up[k] + max(0.0, compute[k] - elapsed) + 1e-12))
        left.remove(x)
        then = elapsed + up[x] + max(0.0, compute[x] - elapsed)
        if then < deadline:
            elapsed = then
            chosen.append(x)
    return chosen, elapsed


def timed(selector, seconds, seed=0):
    session = Session(selector, ClientTable(n=len(seconds)), seed=seed)
    for client, duration in enumerate(seconds):
        cohort = session.ask(RoundRequest(size=1, available=[client]))
        session.tell(RoundReport(cohort.ticket, [client], metrics={Signal.DURATION: [duration]}))
    return session


@pytest.mark.parametrize("upload", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("deadline", [0.6, 2.0, 7.0])
def test_against_the_greedy_algorithm(upload, deadline):
    for seed in range(5):
        seconds = np.random.default_rng(seed).uniform(0.1, 3.0, 9).tolist()
        session = timed(create("fedcs", deadline=deadline, upload=upload), seconds)
        cohort = session.ask(RoundRequest(size=9))
        expected, end = greedy(seconds, upload, deadline)
        assert cohort.clients.tolist() == (expected or [int(np.argmin(seconds))])
        if expected:
            assert cohort.notes["expected seconds"] == pytest.approx(end)


def test_hand_computed_ends():
    # Computing 1, 2, 3; upload 1, 2, 3: 0-1 compute, 1-2 up; 2-4 up; 4-7 up.
    assert _round_ends(np.array([2.0, 4.0, 6.0]), 0.5).tolist() == [2.0, 4.0, 7.0]
    assert _round_ends(np.array([2.0, 4.0, 6.0]), 0.0).tolist() == [2.0, 4.0, 6.0]
    assert _round_ends(np.zeros(2), 0.5).tolist() == [0.0, 0.0]


def test_without_a_deadline_the_fastest_of_the_random_set():
    session = timed(create("fedcs", asked=2.0), [float(i) for i in range(10)])
    sets = set()
    for _ in range(20):
        cohort = session.ask(RoundRequest(size=2))
        assert len(cohort.candidates) == 4
        assert cohort.clients.tolist() == sorted(cohort.candidates.tolist())[:2]
        sets.add(tuple(cohort.candidates.tolist()))
        session.tell(RoundReport(cohort.ticket, [], complete=True))
    assert len(sets) > 10


def test_asked_1_without_a_deadline_is_uniform_choice():
    session = timed(create("fedcs", asked=1.0), [1.0, 50.0, 2.0])
    assert {int(pick(session)) for _ in range(40)} == {0, 1, 2}


def pick(session):
    cohort = session.ask(RoundRequest(size=1))
    metrics = {Signal.DURATION: [[1.0, 50.0, 2.0][cohort.clients[0]]]}
    session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=metrics))
    return cohort.clients[0]


def test_new_clients_are_tried_and_failing_ones_are_given_up():
    session = Session(create("fedcs", asked=4.0), ClientTable(n=4), seed=0)
    picked = []
    for _ in range(6):
        cohort = session.ask(RoundRequest(size=1))
        client = int(cohort.clients[0])
        picked.append(client)
        if client == 3:
            session.tell(RoundReport(cohort.ticket, [3], status=[Status.FAILED]))
        else:
            session.tell(RoundReport(cohort.ticket, [client], metrics={Signal.DURATION: [client + 1.0]}))
    assert {0, 1, 2} <= set(picked)
    assert picked.count(3) <= 1
    assert picked[-1] == 0


def test_zero_durations_and_no_client_in_time():
    session = timed(create("fedcs", deadline=0.5), [0.0, 0.0, 0.0])
    assert session.ask(RoundRequest(size=3)).size == 3
    slow = timed(create("fedcs", deadline=0.5), [3.0, 2.0, 9.0])
    cohort = slow.ask(RoundRequest(size=3))
    assert cohort.clients.tolist() == [1]
    assert cohort.notes["did not fit"] == 2


def test_clients_never_asked_count_as_fast_and_failed_ones_as_slow():
    seconds, timed, asked = np.array([2.0, 7.0, 0.0, 0.0]), np.array([1.0, 2.0, 0.0, 0.0]), np.array([1.0, 2.0, 0.0, 4])
    assert _expected_seconds(seconds, timed, asked).tolist() == [2.0, 7.0, 0.0, 7.0]
    nothing = _expected_seconds(np.zeros(3), np.zeros(3), np.array([0.0, 2.0, 0.0]))
    assert nothing[1] > nothing[0] == nothing[2]
