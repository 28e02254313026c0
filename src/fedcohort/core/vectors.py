"""Compute the signals that :class:`VectorOf` declares from clients' updates and gradients.

Rows are NumPy arrays (on a Flower server) or torch tensors on any device (in the simulator). The code works on both
without importing torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray, FloatArray, freeze
from fedcohort.core.errors import SignalError
from fedcohort.core.signals import SIGNALS, SKETCH_WIDTH, Signal, VectorOf

_SKETCH_SEED = 20_260_101  # never changed, so that sketches of different versions can be compared
_CHUNK = 1 << 15  # parameters projected at once; their signs are 2 MiB


class OutputLayer(NamedTuple):
    """Where a model's output layer is in a flat vector of its arrays."""

    bias: slice
    whole: slice  # weights and bias


def vector_signal(
    how: VectorOf, rows: Any, valid: BoolArray, output: OutputLayer | None, samples: FloatArray | None = None
) -> Any:
    """Return the values of a signal, computed from one vector per client.

    Parameters
    ----------
    rows : (m, P) array or tensor
        One vector per client.
    valid : (m,) bool array
        Which clients' vectors count in the cohort's mean.
    output : OutputLayer or None
        Where the output layer is, from :func:`output_layer`; only signals of the output layer use it.
    samples : (m,) float array or None
        How many samples each client has; only weighted signals use it.

    Returns
    -------
    (m,) or (m, V) array or tensor
    """
    match how.take:
        case "norm":
            return _norm(rows)
        case "distance":
            return _distance(rows, valid)
        case "weighted-distance":
            assert samples is not None
            return _distance(rows, valid, samples)
        case "output-bias":
            assert output is not None
            return rows[:, output.bias]
        case "output-norm":
            assert output is not None
            return _norm(rows[:, output.whole])
        case "sketch":
            return _sketch(rows)


def output_layer(shapes: Mapping[str, Sequence[int]], classes: int | None = None) -> OutputLayer:
    """Return where the output layer is in a flat vector of a model's arrays.

    Its bias is the last array of shape (classes,). If the number of classes is unknown, it is the last one-dimensional
    array that directly follows a matrix with as many rows or columns, as the bias of a dense layer follows its weights.
    Such a matrix directly before the bias is the layer's weights.

    Parameters
    ----------
    shapes : mapping of str to shape
        The model's floating-point arrays, in the order of the flat vector.
    classes : int, optional
        Number of classes.

    Examples
    --------
    >>> output_layer({"0.weight": (5, 4), "0.bias": (5,), "2.weight": (3, 5), "2.bias": (3,)}, classes=3)
    OutputLayer(bias=slice(40, 43, None), whole=slice(25, 43, None))
    """
    layer = None
    start = 0
    before: Sequence[int] = ()
    for shape in shapes.values():
        size = math.prod(shape)
        # torch keeps a dense layer's weights as (out, in), Keras as (in, out).
        follows = len(before) == 2 and size in before
        if len(shape) == 1 and (size == classes if classes is not None else follows):
            weights = math.prod(before) if follows else 0
            layer = OutputLayer(slice(start, start + size), slice(start - weights, start + size))
        start, before = start + size, shape
    if layer is None:
        signal = next(s for s in SIGNALS if needs_output_layer({s}))
        expected = f"of shape ({classes},)" if classes is not None else "that is the bias of a dense layer"
        raise SignalError(
            f"The signal '{signal}' ({signal.meaning}) needs a model whose output layer has a bias. Among the arrays "
            f"{', '.join(f'{name} {tuple(shape)}' for name, shape in shapes.items())} there is none {expected}.",
            hint="give the model's last layer a bias, or use a selector that does not need one",
        )
    return layer


def needs_output_layer(signals: Set[Signal]) -> bool:
    """Whether one of ``signals`` is taken from the output layer, which is found by its bias."""
    return any(isinstance(s.how, VectorOf) and s.how.take in ("output-bias", "output-norm") for s in signals)


def _norm(rows: Any) -> Any:
    return np.linalg.norm(rows, axis=1) if isinstance(rows, np.ndarray) else rows.norm(dim=1)


def _distance(rows: Any, valid: BoolArray, samples: FloatArray | None = None) -> Any:
    """Return each row's distance to the mean of the ``valid`` rows, weighted by ``samples`` if there are any."""
    if not valid.any():
        return _norm(rows) * math.nan
    counted = rows if valid.all() else rows[valid]
    if samples is None or samples[valid].sum() <= 0:
        return _norm(rows - counted.mean(axis=0))
    weights = samples[valid] / samples[valid].sum()
    mean = (weights.astype(rows.dtype) if isinstance(rows, np.ndarray) else rows.new_tensor(weights)) @ counted
    return _norm(rows - mean)


def _sketch(rows: Any) -> Any:
    """Project to SKETCH_WIDTH numbers: x -> S x / sqrt(width) with random signs S, the same in every process.

    By Johnson and Lindenstrauss, squared lengths and distances are kept up to a factor with mean 1 and deviation of at
    most sqrt(2 / width), and inner products likewise.
    """
    total: Any = 0.0
    for start in range(0, rows.shape[1], _CHUNK):
        part = rows[:, start : start + _CHUNK]
        signs = _signs(start // _CHUNK)[: part.shape[1]]
        total = total + part @ (signs.astype(part.dtype) if isinstance(rows, np.ndarray) else rows.new_tensor(signs))
    return total / math.sqrt(SKETCH_WIDTH)


@lru_cache(maxsize=64)  # enough for 2 million parameters; larger models draw their signs again each time
def _signs(chunk: int) -> AnyArray:
    """(_CHUNK, SKETCH_WIDTH) int8 signs of one chunk of parameters: one random word of 64 bits for each parameter."""
    words = np.random.Philox(key=[_SKETCH_SEED, chunk]).random_raw(_CHUNK).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8).reshape(_CHUNK, 8), axis=1)
    return freeze(1 - 2 * bits.astype(np.int8))
