"""FedBiO on quadratics, for which direction, hyper-gradient and weights have closed forms."""

import dataclasses

import numpy as np
import pytest

from fedcohort.training.aggregators import FedAvg, FedBio
from fedcohort.training.aggregators.fedbio import _Cleaning, _sigmoid

from .problems import MODELS, OLD, LinearServer, members


class Quadratic(LinearServer):
    """f(w) = 1/2 (w - goal)' H (w - goal), H diagonal."""

    def __init__(self, curvature, goal):
        super().__init__()
        self.curvature, self.goal = np.array(curvature), np.array(goal)

    def gradient(self, model, targets, places):
        assert targets.shape == (2, 3)
        assert places.tolist() == [0, 1]
        return self.curvature * (model - self.goal)


BOWL = Quadratic([1.0, 2.0, 0.5], [2.0, 0.0, 4.0])  # the goal is the first client's model
SLOPE = BOWL.gradient(OLD, np.zeros((2, 3)), np.arange(2))  # [-1, 2, -1.5]


def test_sigmoid_does_not_overflow():
    np.testing.assert_allclose(_sigmoid(np.array([0.0, np.log(3.0), -1e4, 1e4])), [0.5, 0.75, 0.0, 1.0])


def test_the_first_round_by_hand():
    rule = FedBio(tau=0.5, upper_rate=2.0)
    memory = rule.memory(10, OLD)
    clients = members(rates=np.array([2.0, 0.5]))
    result = rule.combine(OLD, MODELS, clients, memory, BOWL)
    np.testing.assert_allclose(memory.direction, 0.5 * SLOPE)  # u = tau grad f
    gradients = np.array([(OLD - MODELS[0]) / 2.0, (OLD - MODELS[1]) / 0.5])
    share = np.array([0.25, 0.75])
    along = gradients @ (0.5 * SLOPE)
    hyper = -share * 0.5 * (along - share @ along)  # 1 - sigmoid(0) = 1/2
    np.testing.assert_allclose(memory.upper[:2], -2.0 * hyper)
    np.testing.assert_array_equal(memory.upper[2:], 0.0)
    weights = share * _sigmoid(memory.upper[:2])
    weights /= weights.sum()
    np.testing.assert_allclose(result.weights, weights)
    np.testing.assert_allclose(result.model, weights @ MODELS)
    assert result.weights[0] > 0.25  # the client that pulls where the server wants to go


def test_the_hyper_gradient_is_the_derivative_of_the_loss_one_newton_step_ahead():
    """With u = H^-1 grad f it is d/dx of grad f . w after a Newton step of g = sum_k a_k g_k: by differences."""
    share, gradients = np.array([0.25, 0.75]), np.array([[1.0, -2.0, 0.5], [0.3, 0.4, -1.0]])
    x, rates = np.array([0.4, -0.3]), np.array([2.0, 0.5])

    def ahead(x):
        a = share * _sigmoid(x)
        return SLOPE @ (OLD - (a / a.sum()) @ gradients / BOWL.curvature)

    rule = FedBio(tau=0.5, upper_rate=1.0)
    memory = rule.memory(10, OLD)
    memory.upper[:2] = x
    memory.direction = SLOPE / BOWL.curvature  # solves H u = grad f, so a step of u changes nothing
    rule.combine(OLD, OLD - gradients * rates[:, None], members(rates=rates), memory, BOWL)
    np.testing.assert_allclose(memory.direction, SLOPE / BOWL.curvature, rtol=1e-9)
    numeric = [(ahead(x + 1e-6 * e) - ahead(x - 1e-6 * e)) / 2e-6 for e in np.eye(2)]
    np.testing.assert_allclose(memory.upper[:2], x - numeric, atol=1e-7)


def test_two_answers_of_a_client_both_move_its_upper_variable():
    rule = FedBio(tau=0.5, upper_rate=2.0)
    apart, together = rule.memory(10, OLD), rule.memory(10, OLD)
    rule.combine(OLD, MODELS, members(share=(0.2, 0.2)), apart, BOWL)
    twice = dataclasses.replace(members(share=(0.2, 0.2)), clients=np.array([4, 4]))
    rule.combine(OLD, MODELS, twice, together, BOWL)
    np.testing.assert_allclose(together.upper[4], apart.upper.sum())
    assert apart.upper[0] != 0.0


def test_the_direction_tends_to_the_solution_of_the_linear_system():
    rule = FedBio(tau=0.5, upper_rate=0.0)
    memory = rule.memory(10, OLD)
    for _ in range(60):
        rule.combine(OLD, MODELS, members(), memory, BOWL)
    np.testing.assert_allclose(memory.direction, SLOPE / BOWL.curvature, rtol=1e-4)


def test_a_direction_worse_than_zero_restarts():
    rule = FedBio(tau=0.1)
    memory = rule.memory(10, OLD)
    memory.direction = 1e6 * np.ones(3)
    rule.combine(OLD, MODELS, members(), memory, BOWL)
    np.testing.assert_allclose(memory.direction, 0.1 * SLOPE)
    memory.direction = np.full(3, np.inf)
    rule.combine(OLD, MODELS, members(), memory, BOWL)
    np.testing.assert_allclose(memory.direction, 0.1 * SLOPE)


def test_without_an_upper_rate_it_is_the_mean_by_size():
    rule = FedBio(upper_rate=0.0)
    result = rule.combine(OLD, MODELS, members(), rule.memory(10, OLD), BOWL)
    np.testing.assert_allclose(result.model, FedAvg().combine(OLD, MODELS, members()).model)


def test_a_client_that_pulls_the_wrong_way_loses_weight():
    rule = FedBio(upper_rate=5.0)
    memory, model = rule.memory(10, OLD), OLD
    for _ in range(40):
        down = model - 0.1 * BOWL.gradient(model, np.zeros((2, 3)), np.arange(2))
        models = np.stack([down, 2 * model - down])  # one helps, one undoes it
        result = rule.combine(model, models, members(share=(0.5, 0.5)), memory, BOWL)
        model = result.model
    assert result.weights[0] > 0.9
    np.testing.assert_allclose(model, BOWL.goal, atol=1.0)


def test_a_client_without_steps_causes_no_division_by_zero():
    rule = FedBio()
    memory = rule.memory(10, OLD)
    result = rule.combine(OLD, np.stack([OLD, MODELS[1]]), members(rates=np.array([0.0, 0.5])), memory, BOWL)
    assert np.isfinite(result.model).all()
    assert np.isfinite(memory.upper).all()


def test_the_memory_of_another_aggregator_is_refused():
    with pytest.raises(ValueError, match="memory"):
        FedBio().combine(OLD, MODELS, members(), object(), BOWL)
    assert isinstance(FedBio().memory(3, OLD), _Cleaning)
