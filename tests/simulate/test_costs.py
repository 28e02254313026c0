"""Cost accounting worked out by hand: a model of 100 parameters is 400 bytes."""

import numpy as np
import pytest

from fedcohort.core.signals import Signal
from fedcohort.simulate.rounds.costs import CostModel, RoundCost

TRAIN = np.array([30, 60, 10])
VALIDATION = np.array([3, 6, 1])
SAMPLES = np.array([20, 20, 10])  # what the usual local training goes through


def model():
    return CostModel(100, TRAIN, VALIDATION, SAMPLES, classes=10)


def test_work_of_a_loss_query_is_forward_passes():
    who = np.array([1, 2])
    # usual work: 3 passes for each of 20 and 10 samples
    np.testing.assert_allclose(model().loss_work(who, frozenset({Signal.LOSS})), [60 / 60, 10 / 30])
    both = frozenset({Signal.LOSS, Signal.VALIDATION_LOSS})
    np.testing.assert_allclose(model().loss_work(who, both), [66 / 60, 11 / 30])
    shared = frozenset({Signal.LOSS, Signal.ROBUST_LOSS, Signal.PSEUDO_LOSS})
    np.testing.assert_allclose(model().loss_work(who, shared), [60 / 60, 10 / 30])


def test_work_of_a_round_adds_what_the_report_needs():
    who = np.array([0, 1])
    assert model().round_work(who, None, frozenset(), False) == 1.0
    half = np.array([0.5, 2.0])
    np.testing.assert_allclose(model().round_work(who, half, frozenset(), False), half)
    np.testing.assert_allclose(
        model().round_work(who, None, frozenset({Signal.LOSS, Signal.LOSS_AFTER}), False), [1 + 60 / 60, 1 + 120 / 60]
    )
    np.testing.assert_allclose(
        model().round_work(who, None, frozenset({Signal.GRADIENT_DISTANCE}), False), [1 + 90 / 60, 1 + 180 / 60]
    )
    np.testing.assert_allclose(model().round_work(who, None, frozenset(), True), [1 + 90 / 60, 1 + 180 / 60])


def test_upload_of_numbers_gradients_and_variates():
    costs = model()
    assert costs.upload(frozenset(), 1) == 400
    assert costs.upload(frozenset({Signal.LOSS, Signal.VALIDATION_LOSS}), 1) == 416
    assert costs.upload(frozenset({Signal.DURATION, Signal.UPDATE_NORM, Signal.UPDATE_DISTANCE}), 1) == 400
    assert costs.upload(frozenset({Signal.GRADIENT_DISTANCE}), 1) == 800
    assert costs.upload(frozenset({Signal.GRADIENT_NORM}), 1) == 408
    assert costs.upload(frozenset(), 2) == 800


def test_a_signal_costs_what_it_says():
    costs = model()
    free = frozenset({Signal.OUTPUT_BIAS_UPDATE, Signal.UPDATE_SKETCH})  # taken from the update, which comes anyway
    assert costs.upload(free, 1) == 400
    assert costs.round_work(np.array([0]), None, free, False) == 1.0
    # one number, on the pass that the mean loss makes already
    assert costs.upload(frozenset({Signal.LOSS, Signal.LOSS_RMS}), 1) == 416
    both = frozenset({Signal.LOSS, Signal.LOSS_RMS})
    np.testing.assert_allclose(costs.loss_work(np.array([1]), both), costs.loss_work(np.array([1]), {Signal.LOSS}))
    assert (Signal.UPDATE_SKETCH.numbers(10), Signal.OUTPUT_BIAS_UPDATE.numbers(10), Signal.LOSS.numbers(10)) == (
        64,
        10,
        1,
    )


def test_a_round_of_three_of_whom_one_fails_and_one_has_the_model():
    cost = RoundCost()
    model().book_round(
        cost, 5.0, np.array([1.0, 2.0, 5.0]), uploads=2, holders=1, cohort=3, signals=frozenset({Signal.LOSS}), copies=1
    )
    assert cost.bytes_down == 2 * 400
    assert cost.bytes_up == 2 * 408
    assert (cost.seconds, cost.client_seconds) == (5.0, 8.0)
    assert cost.query_bytes_down == cost.query_bytes_up == 0


def test_a_query_lasts_as_long_as_its_slowest_client():
    cost = RoundCost()
    model().book_losses(cost, np.array([1.0, 4.0]), frozenset({Signal.LOSS, Signal.ROBUST_LOSS}))
    assert (cost.query_bytes_down, cost.query_bytes_up) == (2 * 400, 2 * 2 * 8)
    assert (cost.query_seconds, cost.query_client_seconds, cost.seconds) == (4.0, 5.0, 4.0)
    assert cost.bytes_down == cost.bytes_up == 0


def test_a_trial_is_paid_step_by_step():
    cost = RoundCost()
    evaluation = np.array([1.0, 2.0, 0.5])
    training = [np.array([10.0, 20.0]), np.array([5.0])]
    model().book_trial(cost, evaluation, training, copies=1)
    # current model to all three, each trial average to all three; members have the current model already
    assert cost.query_bytes_down == (3 + 3 + 3) * 400
    assert cost.query_bytes_up == 3 * 8 + (2 * 400 + 3 * 8) + (400 + 3 * 8)
    assert cost.query_seconds == pytest.approx(2 + (20 + 2) + (5 + 2))
    assert cost.query_client_seconds == pytest.approx(3.5 * 3 + 30 + 5)
