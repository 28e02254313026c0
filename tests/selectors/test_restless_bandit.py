"""The restless bandit: states, transitions and scores by hand; it follows a chain that a stationary bandit cannot."""

import dataclasses

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import RoundReport, RoundRequest, Slate, Status
from fedcohort.core.signals import Signal
from fedcohort.selectors.baselines.restless_bandit import RestlessBandit, _next_distribution, _state_of
from fedcohort.session import Session

LOCAL = {"reward": "robust-change", "contexts": "last"}  # needs no answers before a round


def test_states_are_equally_likely_intervals():
    draws = np.random.default_rng(0).normal(3.0, 2.0, 4000)
    found = np.bincount([_state_of(d, 3.0, 4.0, 4) for d in draws], minlength=4) / 4000
    assert found == pytest.approx(np.full(4, 0.25), abs=0.03)
    assert _state_of(5.0, 1.0, 0.0, 2) == 1  # no spread yet: above the mean
    assert _state_of(7.0, 1.0, 1.0, 1) == 0


def test_the_chain_is_estimated_from_its_transitions():
    """From state 0: (3 + 1) / 6 and (1 + 1) / 6; uniform before anything is known."""
    transitions = np.array([[3.0, 1.0], [0.0, 9.0]])
    assert _next_distribution(transitions, 0) == pytest.approx([4 / 6, 2 / 6])
    assert _next_distribution(transitions, 1) == pytest.approx([1 / 11, 10 / 11])
    assert _next_distribution(transitions, -1) == pytest.approx([0.5, 0.5])


def test_the_score_is_the_expectation_over_the_next_state():
    """theta_0 = 2 and theta_1 = -1 (gram 1, moments 2 and -1); the next state is 0 with 3/4: theta = 5/4."""
    selector = RestlessBandit(context=("duration",), exploration=0.0, **LOCAL)
    table = ClientTable(n=3)
    state = dataclasses.replace(
        selector.init(table, np.random.default_rng(0)),
        gram=np.ones((2, 1, 1)),
        moment=np.array([[2.0], [-1.0]]),
        transitions=np.array([[2.0, 0.0], [0.0, 0.0]]),
        at=0,
        duration=np.array([1.0, 4.0, 2.0]),
        rounds=5,
    )
    slate = Slate(round=5, size=1, candidates=np.arange(3), clients=table)
    cohort, _ = selector.select(state, slate, None, np.random.default_rng(0))
    assert cohort.score == pytest.approx([1.25, 5.0, 2.5])
    assert cohort.clients.tolist() == [1]
    assert cohort.notes["chance of state 0"] == pytest.approx(0.75)


def test_learning_by_hand():
    """Rounds pay 1, then 3 (above the mean: state 1), then 0 (state 0): transitions 1 -> 1 -> 0."""
    selector = RestlessBandit(context=("duration",), ridge=1.0)
    state = selector.init(ClientTable(n=2), np.random.default_rng(0))
    x = np.array([[1.0], [2.0]])
    state = selector.learn(state, np.arange(4), x, np.array([1.0, 1.0]))
    assert state.at == 1  # the upper of two, with nothing to compare
    assert (state.pay_mean, state.pay_variance) == (1.0, 0.0)
    state = selector.learn(state, np.arange(4), x, np.array([3.0, 3.0]))
    assert state.at == 1
    assert (state.pay_mean, state.pay_variance) == (2.0, 1.0)
    state = selector.learn(state, np.arange(4), x, np.array([0.0, 0.0]))
    assert state.at == 0
    assert state.transitions.tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert state.gram[:, 0, 0].tolist() == [6.0, 11.0]  # 1 + 5 for each round in the state
    assert state.moment[:, 0].tolist() == [0.0, 12.0]  # (1 + 2) * 1 + (1 + 2) * 3
    assert selector.learn(state, np.arange(1), x[:0], np.empty(0)) is state


def reported(session, cohort, paid, duration):
    metrics = {
        Signal.ROBUST_LOSS: np.ones(cohort.size),
        Signal.ROBUST_LOSS_AFTER: 1 - paid,
        Signal.VALIDATION_LOSS: np.ones(cohort.size),
        Signal.DURATION: duration,
    }
    session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=metrics))


def test_exploring_rounds_grow_like_the_logarithm():
    session = Session(RestlessBandit(exploration=3.0, first_round="asked", **LOCAL), ClientTable(n=10), seed=1)
    rounds = []
    for t in range(100):
        cohort = session.ask(RoundRequest(size=2))
        if "reason" in cohort.notes:
            rounds.append(t)
        reported(session, cohort, np.full(2, 0.1), np.ones(2))
    assert len(rounds) == pytest.approx(3 * np.log(100), abs=1)
    assert np.diff(rounds)[-1] > 10


def test_two_states_separate_what_one_state_mixes():
    """Good rounds pay slow clients, bad ones fast clients, in turns: knowing the chain, the next is foreseen."""
    rng = np.random.default_rng(0)
    selector = RestlessBandit(context=("duration",), exploration=0.0, ridge=0.1, **LOCAL)
    state = selector.init(ClientTable(n=2), rng)
    for t in range(200):
        x = rng.uniform(0.5, 2.0, (4, 1))
        slope, level = (1.0, 1.0) if t % 2 else (-1.0, -1.0)
        state = selector.learn(state, np.arange(4), x, slope * x[:, 0] + level + 0.1 * rng.normal(size=4))
    ahead = _next_distribution(state.transitions, state.at)
    assert ahead[0] > 0.9  # the last round was a good one
    state = dataclasses.replace(state, rounds=200, duration=np.array([0.5, 2.0]))
    slate = Slate(round=200, size=1, candidates=np.arange(2), clients=ClientTable(n=2))
    assert selector.select(state, slate, None, rng)[0].clients.tolist() == [0]
    after_bad = dataclasses.replace(state, at=0)
    assert selector.select(after_bad, slate, None, rng)[0].clients.tolist() == [1]


def test_a_round_in_which_all_fail_teaches_nothing_about_the_chain():
    session = Session(RestlessBandit(first_round="asked", **LOCAL), ClientTable(n=4), seed=0)
    cohort = session.ask(RoundRequest(size=2))
    session.tell(RoundReport(cohort.ticket, cohort.clients, status=[Status.FAILED] * 2))
    assert session.state.at == -1
    assert session.state.heard == 0
