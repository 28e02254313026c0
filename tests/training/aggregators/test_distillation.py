"""FedDF and RHFL on one sample and three classes, worked out by hand."""

import numpy as np
import pytest

from fedcohort.core.signals import Signal
from fedcohort.training.aggregators import FedDf, Rhfl
from fedcohort.training.aggregators.distillation import _confidences, _distil
from fedcohort.training.arithmetic import softmax

from .problems import MODELS, OLD, LinearServer, members

LOG = np.log(np.array([1.0, 2.0, 5.0]))  # softmax: 1/8, 2/8, 5/8


def one(**more):
    """A server with the single sample x = 1, whose logits are the model itself."""
    return LinearServer(inputs=((1.0,),), classes=(0,), **more)


def divergence(targets, model, server):
    student = softmax(server.logits(model[None]))[0]
    return float((targets * np.log(targets / student)).sum(1).mean())


def test_first_step_of_adam_has_the_length_of_the_rate():
    # the student's probabilities are 1/3 each, the targets 1/8, 2/8, 5/8: the gradient is +, +, -
    result = _distil(np.zeros(3), softmax(LOG[None]), one(), steps=1, batch_size=8, rate=0.25)
    np.testing.assert_allclose(result, [-0.25, -0.25, 0.25], rtol=1e-6)


def test_two_steps_of_adam_along_a_cosine():
    targets, server = softmax(LOG[None]), one()
    first = server.gradient(np.zeros(3), targets, np.array([0]))
    np.testing.assert_allclose(first, 1 / 3 - np.array([1, 2, 5]) / 8)
    after = -0.25 * np.sign(first)
    second = server.gradient(after, targets, np.array([0]))
    mean = (0.9 * 0.1 * first + 0.1 * second) / (1 - 0.9**2)
    square = (0.999 * 0.001 * first**2 + 0.001 * second**2) / (1 - 0.999**2)
    want = after - 0.25 / 2 * mean / np.sqrt(square)  # halfway down the cosine
    np.testing.assert_allclose(_distil(np.zeros(3), targets, server, steps=2, batch_size=8, rate=0.25), want, rtol=1e-6)


def test_many_steps_reach_the_teacher():
    targets = softmax(LOG[None])
    result = _distil(np.zeros(3), targets, one(), steps=400, batch_size=8, rate=0.1)
    np.testing.assert_allclose(softmax(result[None]), targets, atol=1e-3)


def test_distillation_agrees_with_adam_of_torch():
    torch = pytest.importorskip("torch")
    server, targets = LinearServer(), softmax(np.array([[0.3, 0.1, -2.0], [1.0, 0.0, 0.5]]))
    model = torch.tensor(OLD, requires_grad=True)
    adam = torch.optim.Adam([model], lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 7)
    inputs = torch.tensor(np.array(server.inputs))
    for _ in range(7):
        adam.zero_grad()
        torch.nn.functional.cross_entropy(model * inputs, torch.tensor(targets)).backward()
        adam.step()
        schedule.step()
    got = _distil(OLD, targets, server, steps=7, batch_size=8, rate=0.03)
    np.testing.assert_allclose(got, model.detach().numpy(), rtol=1e-9)


def test_feddf_starts_at_the_mean_by_size_and_learns_the_mean_logits():
    server = one()
    start = 0.25 * MODELS[0] + 0.75 * MODELS[1]
    np.testing.assert_allclose(FedDf(steps=0).combine(OLD, MODELS, members(), None, server).model, start)
    teacher = softmax(MODELS.mean(0)[None])  # both models count once in the ensemble
    want = _distil(start, teacher, server, steps=3, batch_size=128, rate=0.1)
    result = FedDf(steps=3, rate=0.1).combine(OLD, MODELS, members(), None, server)
    np.testing.assert_allclose(result.model, want)
    np.testing.assert_allclose(result.weights, [0.25, 0.75])
    assert divergence(teacher, result.model, server) < divergence(teacher, start, server)
    often = FedDf(steps=3, rate=0.1).combine(OLD, MODELS, members(multiplicity=(3.0, 1.0)), None, server)
    teacher = softmax((0.75 * MODELS[0] + 0.25 * MODELS[1])[None])
    want = _distil(MODELS.mean(0), teacher, server, steps=3, batch_size=128, rate=0.1)
    np.testing.assert_allclose(often.model, want)


def test_one_model_is_its_own_teacher():
    alone = members(share=(0.2,), steps=(3.0,), multiplicity=(1.0,))
    for rule in (FedDf(rate=1.0), Rhfl(rate=1.0)):
        np.testing.assert_array_equal(rule.combine(OLD, MODELS[:1], alone, None, one()).model, MODELS[0])


def test_confidences_by_hand():
    # Q P: 2 / 2 = 1 and (4 - 1) / 1 = 3; shares 1/4 and 3/4; softmax of eta times that
    got = _confidences(np.array([4.0, 4.0]), np.array([2.0, 1.0]), impact=2.0)
    powers = np.exp([0.5, 1.5])
    np.testing.assert_allclose(got, powers / powers.sum())
    np.testing.assert_allclose(_confidences(np.array([4.0, 4.0]), np.array([2.0, 1.0]), impact=0.0), [0.5, 0.5])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([1.0, 1.0], [2.0, 3.0]),  # losses rose
        ([1.0, 1.0], [1.0, 1.0]),
        ([0.0, 0.0], [0.0, 0.0]),
        ([np.nan, np.nan], [np.nan, np.nan]),  # clients without samples
    ],
)
def test_without_any_drop_in_loss_confidences_are_equal(before, after):
    np.testing.assert_allclose(_confidences(np.array(before), np.array(after), 0.5), [0.5, 0.5])


def test_extreme_losses_keep_confidences_finite():
    got = _confidences(np.array([1.0, 1e30, 1.0]), np.array([0.0, 1.0, np.nan]), 0.5)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got.sum(), 1.0)
    assert got[1] > got[2]


def test_rhfl_uses_confidences_in_mean_and_distillation():
    server, rule = LinearServer(), Rhfl(steps=3, rate=0.1, impact=2.0)
    metrics = {Signal.ROBUST_LOSS: np.array([4.0, 4.0]), Signal.ROBUST_LOSS_AFTER: np.array([2.0, 1.0])}
    assert rule.requires == metrics.keys()
    weights = _confidences(*metrics.values(), impact=2.0)
    targets = weights[0] * softmax(server.logits(MODELS)[0]) + weights[1] * softmax(server.logits(MODELS)[1])
    want = _distil(weights @ MODELS, targets, server, steps=3, batch_size=128, rate=0.1)
    result = rule.combine(OLD, MODELS, members(metrics=metrics), None, server)
    np.testing.assert_allclose(result.model, want)
    np.testing.assert_allclose(result.weights, weights)


def test_rhfl_without_losses_has_equal_confidences():
    result = Rhfl(steps=0).combine(OLD, MODELS, members(), None, one())
    np.testing.assert_allclose(result.model, MODELS.mean(0))


def test_the_gradient_of_the_mixture_is_that_of_the_weighted_divergences():
    """The sum of W_k KL(p_k || q) and the cross-entropy with the mixture have the same gradient."""
    server, weights, model = one(), np.array([0.3, 0.7]), np.array([0.2, -0.4, 0.1])
    teachers = softmax(server.logits(MODELS))

    def loss(w):
        return sum(weight * divergence(teacher, w, server) for weight, teacher in zip(weights, teachers, strict=True))

    numeric = [(loss(model + 1e-6 * e) - loss(model - 1e-6 * e)) / 2e-6 for e in np.eye(3)]
    mixture = weights[0] * teachers[0] + weights[1] * teachers[1]
    np.testing.assert_allclose(server.gradient(model, mixture, np.array([0])), numeric, atol=1e-8)
