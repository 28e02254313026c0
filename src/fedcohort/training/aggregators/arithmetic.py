"""The few operations that NumPy and torch spell differently; torch itself is never imported."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedcohort.core.arrays import AnyArray, FloatArray


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
    """Return models (k, P) with every coordinate sorted over the k."""
    return np.sort(models, axis=0) if isinstance(models, np.ndarray) else models.sort(dim=0).values


def sign(values: Any) -> Any:
    """Return -1, 0 or 1 for every number."""
    return np.sign(values) if isinstance(values, np.ndarray) else values.sign()


def softmax(logits: Any) -> Any:
    """Return probabilities over the last axis.

    >>> softmax(np.array([[0.0, np.log(3.0)]])).round(6)
    array([[0.25, 0.75]])
    """
    if not isinstance(logits, np.ndarray):
        return logits.softmax(dim=-1)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def average(weights: FloatArray, rows: Any) -> Any:
    """Return the sum of ``weights`` (k,) times ``rows`` (k, ...) over k."""
    result = 0.0
    for weight, row in zip(weights.tolist(), rows, strict=True):
        result = result + weight * row
    return result
