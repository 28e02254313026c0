"""The neural bandit: gradients against differences, scores by hand, what it can learn that a line cannot."""

import dataclasses

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import ParameterError
from fedcohort.core.protocol import RoundReport, RoundRequest, Slate
from fedcohort.core.signals import Signal
from fedcohort.selectors.baselines.neural_bandit import (
    NeuralBandit,
    _forward,
    _gradients,
    _network_input,
    _train_network,
)
from fedcohort.session import Session

LOCAL = {"reward": "robust-change", "contexts": "last"}  # needs no answers before a round


def test_gradients_are_those_of_the_loss():
    rng = np.random.default_rng(0)
    first, second, theta = rng.normal(size=(5, 4)), rng.normal(size=(5, 5)), rng.normal(size=5)
    x, r = rng.normal(size=(9, 4)), rng.normal(size=9)
    _, by_first, by_second = _gradients(first, second, theta, x, r)
    for weights, gradient, which in ((first, by_first, 0), (second, by_second, 1)):
        for at in np.ndindex(weights.shape):
            step = np.zeros(weights.shape)
            step[at] = 1e-6
            pair = [first, second]
            losses = []
            for sign in (1, -1):
                moved = list(pair)
                moved[which] = weights + sign * step
                losses.append(_gradients(*moved, theta, x, r)[0])
            assert gradient[at] == pytest.approx((losses[0] - losses[1]) / 2e-6, abs=1e-6)


def test_the_network_by_hand():
    """W_1 x = (1, -1), so the hidden layer is (1, 0); W_2 times it is (2, 3)."""
    layers = _forward(np.array([[1.0, 0], [-1, 0]]), np.array([[2.0, 5], [3, 5]]), np.array([[1.0, 0]]))
    assert layers.hidden.tolist() == [[1.0, 0.0]]
    assert layers.features.tolist() == [[2.0, 3.0]]


def test_the_score_is_promise_and_width():
    """With A = 4 I and b = (4, 0), theta is (1, 0); phi = (2, 3) promises 2 and is sqrt(13 / 4) wide."""
    selector = NeuralBandit(context=("duration",), width=2, exploration=0.5)
    state = selector.init(ClientTable(n=1), np.random.default_rng(0))
    scale = np.sqrt(2)  # the input is (1, 1) / sqrt 2
    state = dataclasses.replace(
        state,
        first=np.array([[scale, 0], [-scale, 0]]),
        second=np.array([[2.0, 5], [3, 5]]),
        gram=4 * np.eye(2),
        moment=np.array([4.0, 0]),
        rounds=1,
    )
    slate = Slate(round=3, size=1, candidates=np.arange(1), clients=ClientTable(n=1))
    cohort, _ = selector.select(state, slate, None, np.random.default_rng(0))
    assert cohort.parts["promise"] == pytest.approx([2.0])
    assert cohort.parts["exploration"] == pytest.approx([0.5 * np.sqrt(13 / 4)])
    assert cohort.score == pytest.approx([2 + 0.5 * np.sqrt(13 / 4)])


def test_training_lowers_the_loss_and_large_rewards_do_not_break_it():
    rng = np.random.default_rng(1)
    first, second, theta = rng.normal(size=(16, 5)) * 0.6, rng.normal(size=(16, 16)) * 0.35, rng.normal(size=16)
    x = _network_input(rng.normal(size=(80, 4)))
    r = np.abs(x[:, 0])  # no linear function
    before = _gradients(first, second, theta, x, r)[0]
    after = _gradients(*_train_network(first, second, theta, x, r, 200, 0.1), theta, x, r)[0]
    assert after < 0.3 * before
    wild = _train_network(first, second, theta, x, np.full(80, 100.0), 200, 0.1)
    assert np.isfinite(wild[0]).all()
    assert np.isfinite(wild[1]).all()


def play(selector, rounds, paying, n=12, size=3, seed=2):
    """Rewards depend on the duration: clients with ``paying(duration)`` are fitted, the others are not."""
    session = Session(selector, ClientTable(n=n), seed=seed)
    duration = np.linspace(0.2, 3.0, n)
    picks = []
    for _ in range(rounds):
        cohort = session.ask(RoundRequest(size=size))
        good = paying(duration[cohort.clients])
        metrics = {
            Signal.ROBUST_LOSS: np.ones(cohort.size),
            Signal.ROBUST_LOSS_AFTER: np.where(good, 0.2, 1.0),
            Signal.VALIDATION_LOSS: np.ones(cohort.size),
            Signal.DURATION: duration[cohort.clients],
        }
        session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=metrics))
        picks.append(paying(duration[cohort.clients]).mean())
    return np.array(picks), session


def test_it_learns_that_middling_durations_pay():
    """Only middling durations pay, which no linear function of the duration says."""
    selector = NeuralBandit(context=("duration",), reward="robust-change", exploration=0.1, interval=1)
    picks, session = play(selector, 120, lambda d: (d > 1.0) & (d < 2.2))
    assert picks[-40:].mean() > 0.8
    assert session.state.stored == 12 + 119 * 3


def test_the_memory_is_a_ring():
    _, session = play(NeuralBandit(memory=20, first_round="asked", **LOCAL), 10, lambda d: d > 1)
    assert session.state.inputs.shape == (20, 5)
    assert session.state.stored == 30
    assert (np.abs(session.state.inputs).sum(axis=1) > 0).all()


def test_the_first_round_has_all_clients_or_as_many_as_asked():
    for first_round, size in (("all", 9), ("asked", 2)):
        session = Session(NeuralBandit(first_round=first_round, **LOCAL), ClientTable(n=9))
        assert session.ask(RoundRequest(size=2)).size == size
    with pytest.raises(ParameterError, match=r"'context'.*repeats"):
        NeuralBandit(context=("duration", "duration"))
