"""Label shares by a softmax of bias updates."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcohort.selectors.numerics.label_shares import by_relative_softmax, by_softmax


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8), st.floats(1e-3, 2))
def test_estimates_are_always_shares(update, scale):
    found = by_softmax([update], scale)
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
