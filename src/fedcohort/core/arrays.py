"""Define array types and two helpers that make arrays read-only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
AnyArray = NDArray[Any]


def read_only(array: ArrayLike, dtype: Any = None) -> AnyArray:
    """Return ``array`` as a read-only array that no other reference can write to, copying only if needed.

    >>> read_only([1, 2]).flags.writeable
    False
    """
    result = np.asarray(array, dtype=dtype)
    if result.flags.writeable:
        # The caller has another reference to it, or to the memory it is a view of.
        if result is array or result.base is not None:
            result = result.copy()
        result.flags.writeable = False
    return result


def freeze(array: AnyArray) -> AnyArray:
    """Make an array read-only in place and return it.

    This does not copy, so it is only safe for an array that its creator does not keep writing to.
    """
    array.flags.writeable = False
    return array
