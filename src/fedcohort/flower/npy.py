"""Reading the entries of Flower's arrays where they lie: an Array holds the bytes of a .npy file.

``Array.numpy()`` parses the header and copies the entries. All replies of a round are laid out like the model that was
sent, so its header, parsed once, vouches for every reply that begins with the same bytes: same type, same order, same
shape. Whatever begins otherwise is read by NumPy.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from flwr.app import Array
from flwr.common.constant import SType

from fedcohort.arrays import AnyArray

_NPY_1 = b"\x93NUMPY\x01\x00"  # then two bytes of length, a header of that length, the entries


@lru_cache(maxsize=4096)  # a federation sends models of the same arrays round after round
def _fields(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool] | None:
    """Return type, shape and whether the order is C of a header, or None when it is none or holds objects."""
    try:
        fields: dict[str, Any] = ast.literal_eval(header[10:].decode("latin1"))
        dtype, shape = np.dtype(fields["descr"]), tuple(int(n) for n in fields["shape"])
        columnwise = bool(fields["fortran_order"])
    except (SyntaxError, ValueError, TypeError, KeyError):
        return None
    return None if dtype.hasobject else (dtype, shape, not columnwise or len(shape) < 2)


@dataclass(frozen=True)
class Layout:
    """How an array's bytes are laid out.

    Attributes
    ----------
    header : bytes
        All that stands before the entries.
    dtype : dtype
    shape : tuple of int
    rowwise : bool
        Whether the entries follow each other in C order.
    length : int
        Bytes in all.
    """

    header: bytes
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    rowwise: bool
    length: int

    @classmethod
    def of(cls, array: Array) -> Layout | None:
        """Return the layout of an array, or None when only NumPy can read it."""
        data = array.data
        if array.stype != SType.NUMPY or not data.startswith(_NPY_1):
            return None
        begin = 10 + int.from_bytes(data[8:10], "little")
        header = data[:begin]
        fields = _fields(header)
        if fields is None:
            return None
        dtype, shape, rowwise = fields
        length = begin + dtype.itemsize * math.prod(shape)
        return cls(header, dtype, shape, rowwise, length) if length == len(data) else None

    def entries(self, array: Array) -> AnyArray | None:
        """Return the entries of an array in memory order as one vector, or None when it is laid out otherwise."""
        data = array.data
        if len(data) != self.length or array.stype != SType.NUMPY or not data.startswith(self.header):
            return None
        return np.frombuffer(data, self.dtype, offset=len(self.header))


def viewed(array: Array) -> AnyArray:
    """Return an array in C order, read-only and without a copy where its bytes allow it."""
    layout = Layout.of(array)
    if layout is None or not layout.rowwise:
        return np.ascontiguousarray(array.numpy())
    return np.frombuffer(array.data, layout.dtype, offset=len(layout.header)).reshape(layout.shape)
