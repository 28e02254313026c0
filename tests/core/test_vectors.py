"""Signals from updates and gradients, against their definitions, for arrays and tensors."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from fedcohort.core.errors import SignalError
from fedcohort.core.signals import SIGNALS, Signal, VectorOf, vectors_of
from fedcohort.core.vectors import OutputLayer, needs_output_layer, output_layer, vector_signal

ROWS = np.random.default_rng(0).normal(size=(5, 70_000))  # more than two chunks of a sketch
SOUND = np.array([True, True, False, True, True])


@pytest.mark.parametrize("take", ["norm", "distance", "weighted-distance", "output-bias", "output-norm", "sketch"])
def test_arrays_and_tensors_give_the_same_values(take: str) -> None:
    how = VectorOf("update", take)  # type: ignore[arg-type]
    samples, layer = np.array([1.0, 5.0, 100.0, 0.0, 2.0]), OutputLayer(slice(7, 10), slice(4, 10))
    ours = vector_signal(how, ROWS, SOUND, layer, samples)
    theirs = vector_signal(how, torch.as_tensor(ROWS), SOUND, layer, samples)
    assert isinstance(theirs, torch.Tensor)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-10, atol=1e-10)
    single = vector_signal(how, torch.as_tensor(ROWS, dtype=torch.float32), SOUND, layer, samples)
    np.testing.assert_allclose(ours, single.numpy(), rtol=1e-3, atol=1e-3)


def test_by_hand() -> None:
    layer = OutputLayer(slice(1, 2), slice(0, 2))
    three = np.array([[7.0, 3.0, 4.0]])
    how, last = VectorOf("update", "output-norm"), OutputLayer(slice(2, 3), slice(1, 3))
    np.testing.assert_allclose(vector_signal(how, three, np.ones(1, bool), last), [5.0])
    rows = np.array([[3.0, 4.0], [0.0, 0.0], [9.0, 9.0]])
    valid = np.array([True, True, False])
    np.testing.assert_allclose(vector_signal(VectorOf("update", "norm"), rows, valid, None), [5, 0, np.sqrt(162)])
    # the mean of the valid rows is (1.5, 2)
    distances = vector_signal(VectorOf("gradient", "distance"), rows, valid, None)
    np.testing.assert_allclose(distances, [2.5, 2.5, np.hypot(7.5, 7)])
    assert np.isnan(vector_signal(VectorOf("gradient", "distance"), rows, np.zeros(3, bool), None)).all()
    np.testing.assert_array_equal(vector_signal(VectorOf("update", "output-bias"), rows, valid, layer), rows[:, 1:])


def test_the_weighted_mean_by_hand() -> None:
    rows = np.array([[3.0, 4.0], [0.0, 0.0], [9.0, 9.0]])
    valid, how = np.array([True, True, False]), VectorOf("gradient", "weighted-distance")
    # the first of the valid rows has four times the weight: (2.4, 3.2)
    distances = vector_signal(how, rows, valid, None, np.array([40.0, 10.0, 500.0]))
    np.testing.assert_allclose(distances, [1, 4, np.hypot(6.6, 5.8)])
    equal, plain = VectorOf("gradient", "weighted-distance"), VectorOf("gradient", "distance")
    np.testing.assert_allclose(
        vector_signal(equal, rows, valid, None, np.full(3, 7.0)), vector_signal(plain, rows, valid, None)
    )
    np.testing.assert_allclose(
        vector_signal(equal, rows, valid, None, np.zeros(3)), vector_signal(plain, rows, valid, None)
    )
    assert np.isnan(vector_signal(how, rows, np.zeros(3, bool), None, np.ones(3))).all()


def test_a_sketch_keeps_lengths_distances_and_angles() -> None:
    """Ratios of squared lengths have mean 1 and deviation at most sqrt(2 / 64) = 0.18; 600 of them, here."""
    how = VectorOf("update", "sketch")
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(600, 500)) * rng.exponential(size=500)
    sketch = vector_signal(how, rows, np.ones(600, bool), None)
    assert sketch.shape == (600, 64)
    # The projection is linear; this is its matrix of signs.
    signs = vector_signal(how, np.eye(500), np.ones(500, bool), None) * 8
    assert set(np.unique(signs)) == {-1.0, 1.0}
    np.testing.assert_allclose(sketch, rows @ signs / 8, rtol=1e-9, atol=1e-9)
    gram = signs @ signs.T / 64
    off = gram[~np.eye(500, dtype=bool)]
    assert abs(off.mean()) < 0.002 and off.std() == pytest.approx(1 / 8, rel=0.03)
    ratio = (sketch**2).sum(1) / (rows**2).sum(1)
    assert abs(ratio.mean() - 1) < 0.15 and ratio.std() < 0.22
    apart = ((sketch[:300] - sketch[300:]) ** 2).sum(1) / ((rows[:300] - rows[300:]) ** 2).sum(1)
    assert abs(apart.mean() - 1) < 0.15


def test_a_sketch_is_the_same_in_every_process() -> None:
    code = (
        "import numpy as np; from fedcohort.core.signals import Signal;"
        "from fedcohort.core.vectors import vector_signal; rows = np.arange(40_000.0)[None];"
        "import sys; assert 'torch' not in sys.modules;"
        "print(vector_signal(Signal.UPDATE_SKETCH.how, rows, np.ones(1, bool), None)[0, :3].tolist())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    here = vector_signal(Signal.UPDATE_SKETCH.how, np.arange(40_000.0)[None], np.ones(1, bool), None)[0, :3].tolist()
    assert out.strip() == str(here)


def test_the_output_bias_is_found() -> None:
    shapes = {"a.weight": (5, 4), "a.bias": (5,), "norm.weight": (5,), "b.weight": (3, 5), "b.bias": (3,), "mean": (5,)}
    assert output_layer(shapes, classes=3).bias == output_layer(shapes).bias == slice(45, 48)
    assert output_layer({"kernel": (4, 3), "bias": (3,)}) == (
        slice(12, 15),
        slice(0, 15),
    )  # keras, flax
    with pytest.raises(SignalError, match=r"'output-bias-update' .* b\.bias \(3,\), mean \(5,\).*\(7,\)"):
        output_layer(shapes, classes=7)
    with pytest.raises(SignalError):
        output_layer({"weight": (3, 4), "scale": (2,)})
    assert needs_output_layer(frozenset(SIGNALS)) and not needs_output_layer(frozenset(vectors_of(SIGNALS, "gradient")))
