"""Array types and the two helpers that keep arrays read-only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
AnyArray = NDArray[Any]


def read_only(array: ArrayLike, dtype: Any = None) -> AnyArray:
    """Return ``array`` as a read-only array that nobody else can write to, copying only when needed.

    >>> read_only([1, 2]).flags.writeable
    False
    """
    result = np.asarray(array, dtype=dtype)
    if result.flags.writeable:
        if result is array or result.base is not None:
            result = result.copy()
        result.flags.writeable = False
    return result


def sealed(array: AnyArray) -> AnyArray:
    """Mark an array that its maker gives away as read-only, without a copy."""
    array.flags.writeable = False
    return array
