"""Optimisers at the server, two rounds each worked out by hand."""

import numpy as np
import pytest

from fedcohort.training.aggregators import AGGREGATORS, FedAdam, FedAvgM, FedYogi

from .problems import MODELS, OLD, members

BY_SIZE = 0.25 * MODELS[0] + 0.75 * MODELS[1] - OLD  # [-0.5, 0.5, 0]
BY_COUNT = MODELS.mean(0) - OLD  # [0, 0, 1]


def two_rounds(rule):
    memory = rule.memory(10, OLD)
    first = rule.combine(OLD, MODELS, members(), memory)
    second = rule.combine(first.model, MODELS, members(), memory)
    np.testing.assert_allclose(first.weights, [0.25, 0.75] if rule.weighting == "size" else [0.5, 0.5])
    return first.model, second.model, memory


def test_fedavgm_two_rounds():
    first, second, memory = two_rounds(FedAvgM(beta=0.5, global_rate=2.0))
    np.testing.assert_allclose(first, OLD + 2.0 * BY_SIZE, atol=1e-12)  # [0, 2, 1]
    # the mean is [0.5, 1.5, 1]: the new update is [0.5, -0.5, 0], and half of the first [-0.5, 0.5, 0] is added
    np.testing.assert_allclose(memory.first, [0.25, -0.25, 0.0], atol=1e-12)
    np.testing.assert_allclose(second, [0.5, 1.5, 1.0])


def test_fedavgm_without_momentum_is_the_mean_by_size():
    mean = AGGREGATORS.create("fedavg").combine(OLD, MODELS, members()).model
    np.testing.assert_allclose(two_rounds(FedAvgM(beta=0.0))[0], mean)
    equal = two_rounds(FedAvgM(beta=0.0, weighting="count"))[0]
    np.testing.assert_allclose(equal, OLD + BY_COUNT)


def test_fedadam_two_rounds():
    rule = FedAdam(global_rate=0.1, beta1=0.5, beta2=0.75, tau=1.0, weighting="count")
    first, second, memory = two_rounds(rule)
    # update [0, 0, 1]; m = [0, 0, 1/2]; v = 3/4 tau^2 + 1/4 [0, 0, 1] = [3/4, 3/4, 1]
    np.testing.assert_allclose(first, OLD + 0.1 * np.array([0.0, 0.0, 0.5 / (1.0 + 1.0)]))  # third: 1.025
    # update [0, 0, 0.975]; m = 1/4 + 0.4875; v = 3/4 + 0.975^2 / 4
    m, v = 0.25 + 0.4875, 0.75 + 0.975**2 / 4
    np.testing.assert_allclose(memory.first, [0.0, 0.0, m])
    np.testing.assert_allclose(memory.second, [0.5625, 0.5625, v])
    np.testing.assert_allclose(second[2], 1.025 + 0.1 * m / (v**0.5 + 1.0))


def test_fedyogi_two_rounds():
    rule = FedYogi(global_rate=0.1, beta1=0.5, beta2=0.75, tau=0.5, weighting="count")
    first, second, memory = two_rounds(rule)
    # v = 1/4 at first; the square 1 is larger, so it grows by 1/4 of 1; squares of 0 change nothing
    np.testing.assert_allclose(first[2], 1.0 + 0.1 * 0.5 / (0.5**0.5 + 0.5))
    update = 2.0 - first[2]
    assert update**2 > 0.5
    np.testing.assert_allclose(memory.second, [0.25, 0.25, 0.5 + update**2 / 4])
    np.testing.assert_allclose(second[2], first[2] + 0.1 * (0.25 + update / 2) / (memory.second[2] ** 0.5 + 0.5))


def test_yogi_shrinks_slower_than_adam_when_updates_vanish():
    adam, yogi = FedAdam(beta2=0.5, tau=1.0), FedYogi(beta2=0.5, tau=1.0)
    small = OLD + 0.1
    seconds = []
    for rule in (adam, yogi):
        memory = rule.memory(10, OLD)
        rule.combine(OLD, np.stack([small, small]), members(), memory)
        seconds.append(memory.second[0])
    np.testing.assert_allclose(seconds, [0.5 + 0.5 * 0.01, 1.0 - 0.5 * 0.01])


@pytest.mark.parametrize("rule", [FedAdam(), FedYogi()])
def test_a_coordinate_that_no_client_moves_stays(rule):
    first, second, _ = two_rounds(rule)
    np.testing.assert_allclose([first[2], second[2]], OLD[2])  # by size the third coordinate's mean is the old value


@pytest.mark.parametrize("rule", [FedAvgM(), FedAdam(), FedYogi()])
def test_momentum_continues_when_updates_stop(rule):
    memory = rule.memory(10, OLD)
    moved = rule.combine(OLD, MODELS, members(), memory).model
    further = rule.combine(moved, np.stack([moved, moved]), members(), memory).model
    np.testing.assert_array_equal(np.sign(further - moved)[:2], np.sign(BY_SIZE)[:2])
