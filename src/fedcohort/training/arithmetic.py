"""Operations that NumPy and torch spell differently. torch is never imported here."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from fedcohort.core.arrays import AnyArray, FloatArray
from fedcohort.core.errors import InputError


def namespace(array: Any) -> Any:
    """Return the module whose functions accept ``array``: numpy or torch."""
    if isinstance(array, np.ndarray):
        return np
    # By name, because importing torch takes long, and a host without it must not need it.
    if type(array).__module__.partition(".")[0] == "torch":
        return sys.modules["torch"]  # imported already, because the tensor exists
    raise InputError(f"Models' outputs must be a NumPy array or a torch tensor. Got {type(array).__name__}.")


def zeros(like: Any, rows: int | None = None) -> Any:
    """Return zeros (P,), or (rows, P), of the same library, type and device as the vector ``like`` (P,)."""
    shape = (len(like),) if rows is None else (rows, len(like))
    return np.zeros(shape, like.dtype) if isinstance(like, np.ndarray) else like.new_zeros(shape)


def as_like(values: Any, like: Any) -> Any:
    """Return ``values`` as an array of the same library, type and device as ``like``."""
    if isinstance(like, np.ndarray):
        return np.asarray(values, like.dtype)
    return like.new_tensor(values) if isinstance(values, np.ndarray) else values.to(like)


def to_numpy(values: Any) -> AnyArray:
    """Return ``values`` as a NumPy array on the host."""
    return values if isinstance(values, np.ndarray) else np.asarray(values.detach().cpu())


def doubles(values: Any) -> Any:
    """Return ``values`` in double precision."""
    return values.astype(np.float64) if isinstance(values, np.ndarray) else values.double()


def ascending(models: Any) -> Any:
    """Return models (k, P) with each coordinate sorted across the models."""
    return np.sort(models, axis=0) if isinstance(models, np.ndarray) else models.sort(dim=0).values


def softmax(logits: Any) -> Any:
    """Return probabilities over the last axis.

    >>> softmax(np.array([[0.0, np.log(3.0)]])).round(6)
    array([[0.25, 0.75]])
    """
    if not isinstance(logits, np.ndarray):
        return logits.softmax(dim=-1)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def average(weights: FloatArray, rows: Any, start: Any = 0.0) -> Any:
    """Return ``start`` plus the sum of ``weights`` (k,) times ``rows`` (k, ...) over k."""
    result = start
    # One row after another instead of a matrix product, so that the sum is the same on every machine.
    for weight, row in zip(weights.tolist(), rows, strict=True):
        result = result + weight * row
    return result
