"""Estimators of label shares against what gradient descent really does to a bias."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcohort.selectors.numerics.label_shares import by_moments, by_relative_softmax, by_softmax, nearest_shares


def softmax(z):
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def one_step(rng, counts, classes, features=5, rate=0.1):
    """Bias update of one full-batch step of softmax regression, by finite differences of the loss, and predictions."""
    weights, bias = rng.normal(size=(features, classes)), rng.normal(size=classes)
    labels = np.repeat(np.arange(classes), counts)
    inputs = rng.normal(size=(len(labels), features)) + labels[:, None]

    def loss(b):
        p = softmax(inputs @ weights + b)
        return -np.log(p[np.arange(len(labels)), labels]).mean()

    h = 1e-5
    gradient = np.array([(loss(bias + h * e) - loss(bias - h * e)) / (2 * h) for e in np.eye(classes)])
    return -rate * gradient, softmax(inputs @ weights + bias)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 6))
def test_moments_are_exact_for_one_step(seed, classes):
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 30, classes)
    update, predictions = one_step(rng, counts, classes)
    shares = counts / counts.sum()
    assert np.allclose(nearest_shares(predictions.mean(axis=0) + update[None] / 0.1)[0], shares, atol=1e-6)


def test_untrained_model_needs_no_predictions():
    # At zero weights every prediction is 1 / B.
    counts = np.array([7, 0, 3])
    update = 0.5 * (counts / counts.sum() - 1 / 3)
    assert np.allclose(by_moments([update], 0.5)[0], [0.7, 0, 0.3])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8), st.floats(1e-3, 2))
def test_estimates_are_always_shares(update, scale):
    for found in (by_softmax([update], scale), by_moments([update], scale)):
        assert found.shape == (1, len(update)) and (found >= 0).all()
        assert found.sum() == pytest.approx(1.0)


def test_softmax_orders_classes_and_sharpens():
    update = np.array([[0.03, -0.01, 0.0]])
    cold, warm = by_softmax(update, 0.001)[0], by_softmax(update, 1.0)[0]
    assert np.argsort(cold).tolist() == np.argsort(warm).tolist() == [1, 2, 0]
    assert cold[0] > 0.999 and abs(warm - 1 / 3).max() < 0.02


def test_relative_softmax_is_independent_of_scale():
    rng = np.random.default_rng(3)
    updates = rng.normal(size=(6, 4))
    assert np.allclose(by_relative_softmax(updates, 0.5), by_relative_softmax(1e-6 * updates + 7.0, 0.5))
    assert np.allclose(by_relative_softmax(np.zeros((2, 4)), 0.5), 0.25)
    assert by_relative_softmax(np.empty((0, 4)), 0.5).shape == (0, 4)
    still = by_relative_softmax(np.vstack([updates, 1e-3 * updates[:1]]), 0.5)
    assert abs(still[-1] - 0.25).max() < 0.01  # moved little compared with the others: balanced
