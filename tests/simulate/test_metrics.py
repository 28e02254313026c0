"""Metrics of the papers on curves small enough to see the answer."""

import math

import numpy as np
import pytest

from fedcohort.simulate.metrics import Curve, Spread, imbalance, relative_improvement


def test_rounds_to_target_counts_rounds_of_training():
    curve = Curve([0, 1, 2, 3], [0.1, 0.7, 0.6, 0.8])
    assert curve.rounds_to(0.1) == 1
    assert curve.rounds_to(0.65) == 2
    assert curve.rounds_to(0.7) == 2
    assert curve.rounds_to(0.75) == 4
    assert curve.rounds_to(0.9) is None


def test_rounds_that_were_not_evaluated_do_not_count():
    curve = Curve([0, 1, 2], [math.nan, 0.5, math.nan])
    assert curve.rounds_to(0.5) == 2
    assert curve.best == 0.5


def test_terminal_accuracy_is_the_mean_of_the_last_fifty_rounds():
    accuracy = np.concatenate([np.zeros(50), np.ones(50)])
    assert Curve(np.arange(100), accuracy).terminal() == 1.0
    assert Curve(np.arange(100), accuracy).terminal(last=100) == 0.5
    every_ten = Curve(np.arange(9, 100, 10), np.arange(10) / 10)
    assert every_ten.terminal() == pytest.approx(np.mean([0.5, 0.6, 0.7, 0.8, 0.9]))


def test_early_stop_accuracy_is_the_best_or_that_of_a_stopping_rule():
    curve = Curve([0, 1, 2, 3], [0.1, 0.7, 0.6, 0.8])
    assert curve.early_stop() == 0.8
    assert curve.early_stop(stopped=3) == 0.6


def test_an_empty_curve_has_no_numbers():
    curve = Curve([], [])
    assert math.isnan(curve.best) and math.isnan(curve.terminal())
    assert curve.rounds_to(0.0) is None


def test_figures_of_fedacs_tables():
    assert relative_improvement(0.721, 0.684, 0.740) == pytest.approx(0.655, abs=0.01)
    assert relative_improvement(0.648, 0.697, 0.740) == pytest.approx(-1.122, abs=0.02)


def test_without_a_loss_there_is_no_improvement():
    assert math.isnan(relative_improvement(0.6, 0.5, 0.5))


def test_spread_uses_the_sample_deviation_and_skips_missing_values():
    spread = Spread.of([1.0, None, 3.0, math.nan])
    assert (spread.mean, spread.std, spread.count) == (2.0, pytest.approx(math.sqrt(2)), 2)
    assert Spread.of([5.0]) == Spread(5.0, 0.0, 1)
    assert Spread.of([]).count == 0


def test_imbalance_follows_its_definition():
    counts = np.array([3.0, 1.0, 0.0])
    by_hand = (3 / 4 - 1 / 3) ** 2 + (1 / 4 - 1 / 3) ** 2 + (1 / 3) ** 2
    assert imbalance(counts) == pytest.approx(by_hand)
    assert math.isnan(imbalance(np.zeros(3)))
