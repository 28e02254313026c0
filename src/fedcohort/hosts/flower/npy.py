"""Reads the entries of Flower's arrays without a copy: an Array holds the bytes of a .npy file.

``Array.numpy()`` trusts the header: it allocates whatever the header claims, reads any type, and opens archives. Here,
type, shape and length in the header are checked first, and bytes that do not match it are never read. Replies usually
have the same layout as the model that was sent. So its header is parsed once, and a reply that begins with the same
bytes has the same type, order and shape.

NumPy has no bfloat16. Libraries that have it write its entries as ``V2``, two bytes each, and so does this module;
:func:`numbers` reads them and :func:`convert` makes them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from flwr.app import Array
from flwr.common.constant import SType

from fedcohort.core.arrays import AnyArray

_MAGIC = b"\x93NUMPY"  # then version, length of the header, a header of that length, the entries
_LENGTH_BYTES = {b"\x01\x00": 2, b"\x02\x00": 4, b"\x03\x00": 4}  # by version of the format
BFLOAT16: np.dtype[Any] = np.dtype("V2")  # two bytes that NumPy cannot compute with
_NUMBERS = r"[<>|=]?[biufc]\d{1,2}|[<|]V2"
_LONGEST_HEADER = 1024  # NumPy's header for an array of numbers has about 128 bytes
# Only what NumPy writes for numbers; Python's literal parser could be attacked with deep nesting.
_HEADER = re.compile(
    rf"\{{'descr': '({_NUMBERS})', 'fortran_order': (True|False), "
    r"'shape': \(((?:\d{1,18}, ?){0,32}(?:\d{1,18})?)\), ?\}[ ]*\n?",
    re.ASCII,
)


@lru_cache(maxsize=4096)  # the same arrays are sent in every round
def _fields(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool] | None:
    """Return the type and shape in a header and whether the order is C; None if it is not an array of numbers."""
    match = _HEADER.fullmatch(header.decode("latin1"))
    if match is None:
        return None
    try:
        dtype = np.dtype(match[1])
    except TypeError:
        return None
    shape = tuple(int(n) for n in match[3].replace(" ", "").split(",") if n)
    return dtype, shape, match[2] == "False" or len(shape) < 2


@dataclass(frozen=True)
class Layout:
    """How an array's bytes are laid out.

    Attributes
    ----------
    header : bytes
        All bytes before the entries.
    rowwise : bool
        Whether the entries are in C order.
    length : int
        Number of bytes, with the header.
    """

    header: bytes
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    rowwise: bool
    length: int

    @classmethod
    def of(cls, array: Array) -> Layout:
        """Return the layout of an array of numbers; raise ValueError if its bytes are not those of one."""
        data = array.data
        if array.stype != SType.NUMPY:
            raise ValueError(f"it is serialised as {str(array.stype)[:40]!r}, not as {SType.NUMPY!r}")
        if not isinstance(data, bytes) or data[:6] != _MAGIC:
            raise ValueError("the bytes are not those of a .npy file")
        width = _LENGTH_BYTES.get(data[6:8], 0)
        length = int.from_bytes(data[8 : 8 + width], "little")
        begin = 8 + width + length
        fields = _fields(data[8 + width : begin]) if length <= _LONGEST_HEADER else None
        if fields is None:
            raise ValueError("its header is not that of an array of numbers")
        dtype, shape, rowwise = fields
        # Python's integers cannot overflow, whatever shape a header claims.
        total = begin + dtype.itemsize * math.prod(shape)
        if total != len(data):
            raise ValueError(f"its header does not match its {len(data)} bytes")
        return cls(data[:begin], dtype, shape, rowwise, total)

    def entries(self, array: Array) -> AnyArray | None:
        """Return the entries of an array in memory order as one vector, or None if it has another layout."""
        data = array.data
        if len(data) != self.length or array.stype != SType.NUMPY or not data.startswith(self.header):
            return None
        return np.frombuffer(data, self.dtype, offset=len(self.header))

    def read(self, array: Array) -> AnyArray:
        """Return an array of this layout, read-only and without a copy."""
        flat = np.frombuffer(array.data, self.dtype, offset=len(self.header))
        return flat.reshape(self.shape) if self.rowwise else flat.reshape(self.shape[::-1]).T


def as_numpy(array: Array) -> AnyArray:
    """Return an array in C order, read-only and without a copy if possible."""
    try:
        values = Layout.of(array).read(array)
    except ValueError:  # of an unusual type; the server's own, so it can be trusted
        values = array.numpy()
    # Not ascontiguousarray, which adds a dimension to an array without any.
    return np.asarray(values, order="C")


def to_array(values: AnyArray, dtype: str | None = None) -> Array:
    """Return entries as Flower's Array; ``dtype`` is the name of its type, if that is not NumPy's name."""
    array = Array(values)
    if dtype is None and values.dtype == BFLOAT16:
        dtype = "bfloat16"
    return array if dtype is None else Array(dtype, array.shape, array.stype, array.data)


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether entries of a type are floating-point numbers."""
    return dtype.kind == "f" or dtype == BFLOAT16


def numbers(values: AnyArray) -> AnyArray:
    """Return entries in a type that NumPy computes with: bfloat16 as float32, all others as they are."""
    if values.dtype != BFLOAT16:
        return values
    return np.asarray(np.left_shift(values.view(np.uint16).astype(np.uint32), 16)).view(np.float32)


def convert(values: AnyArray, dtype: np.dtype[Any]) -> AnyArray:
    """Convert entries to another type of numbers; bfloat16 is rounded to nearest, ties to even."""
    values = np.asarray(numbers(values))  # from arrays without dimensions, NumPy computes scalars
    if dtype != BFLOAT16:
        return values.astype(dtype)
    single = values.astype(np.float32)
    bits = single.view(np.uint32)
    # Adding half a unit of the last place, minus one, plus its parity, rounds to nearest, ties to even.
    upper = np.asarray((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    # Rounding a NaN could carry into its exponent and make it infinity.
    return np.where(np.isnan(single), 0x7FC0, upper).astype(np.uint16).view(BFLOAT16)
