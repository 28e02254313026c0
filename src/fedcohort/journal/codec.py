"""Arrays and selector states as bytes and JSON, without pickle.

A state is a frozen dataclass of arrays and scalars. Between two events usually only the rows of one cohort change,
so states are stored as a base plus the rows that changed.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from fedcohort.core.arrays import AnyArray, IntArray, freeze
from fedcohort.core.errors import InputError, JournalError, SelectorError
from fedcohort.core.protocol import is_per_client

Scalar = int | float | bool | str | None
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # compared as bits, NaN equals NaN, and 0 is not -0


def pack(array: AnyArray) -> bytes:
    """Return an array as a JSON header line and its raw bytes."""
    contiguous = np.ascontiguousarray(array)
    header = f'["{contiguous.dtype.str}", {list(array.shape)}]'.encode()
    return header + b"\n" + contiguous.tobytes()


def pack_indices(array: IntArray) -> bytes:
    """Return indices of clients as :func:`pack` does, in as few bytes as the largest of them needs.

    >>> len(pack_indices(np.arange(10))), unpack(pack_indices(np.arange(3)))
    (31, array([0, 1, 2]))
    """
    narrow = narrowest(array)
    header = f'["<i8", {list(array.shape)}, "{narrow}"]'.encode()
    return header + b"\n" + array.astype(narrow).tobytes()


def narrowest(indices: IntArray) -> str:
    """Return the smallest type that holds indices, which are not negative."""
    largest = int(indices.max(initial=0))
    return next(kind for kind in ("<u1", "<u2", "<u4", "<i8") if largest <= np.iinfo(kind).max)


def unpack(data: bytes) -> AnyArray:
    """Return the read-only array that :func:`pack` or :func:`pack_indices` wrote.

    >>> unpack(pack(np.array([[1.5, 2.5]])))
    array([[1.5, 2.5]])
    """
    header, _, raw = data.partition(b"\n")
    dtype, shape, stored = _layout(header)
    return freeze(np.frombuffer(raw, dtype=stored).reshape(shape).astype(dtype))


@lru_cache(maxsize=256)  # a journal has very many cohorts, and few sizes of them
def _layout(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], np.dtype[Any]]:
    dtype, shape, *stored = json.loads(header)
    return np.dtype(dtype), tuple(shape), np.dtype(stored[0] if stored else dtype)


def pack_many(arrays: Mapping[str, AnyArray]) -> bytes:
    """Return several named arrays as one block of bytes."""
    bodies = {name: pack(np.asarray(array)) for name, array in arrays.items()}
    header = json.dumps([[name, len(body)] for name, body in bodies.items()]).encode()
    return header + b"\n" + b"".join(bodies.values())


def unpack_many(data: bytes) -> dict[str, AnyArray]:
    """Return the named arrays :func:`pack_many` wrote."""
    header, _, rest = data.partition(b"\n")
    found, at = {}, 0
    for name, length in json.loads(header):
        found[name] = unpack(rest[at : at + length])
        at += length
    return found


MOST_TEXT = 256 << 20
"""Bytes that names or attributes may have unpacked: 256 for each of a million clients."""
_SMALL = 1 << 20  # bytes that anything may unpack to
_RATIO = 100  # names and attributes of a real federation take at most a tenth of this


def compress(data: bytes) -> bytes:
    """Return bytes compressed, in little time."""
    return zlib.compress(data, 1)


def decompress(data: bytes, most: int, what: str, common: bytes = b"") -> bytes:
    """Return what :func:`compress` packed; :class:`JournalError` as soon as it turns out to be more than ``most``.

    ``common`` is the dictionary it was compressed with, if any.

    >>> decompress(compress(b"abc" * 1000), 10, "A name")
    Traceback (most recent call last):
        ...
    fedcohort.core.errors.JournalError: A name takes more than the 10 bytes that it may have unpacked.
    """
    # Never more than one byte beyond the limit is unpacked, however much the bytes claim to hold.
    unpacker = zlib.decompressobj(zdict=common)
    try:
        found = unpacker.decompress(data, max(most, 1))
        if len(found) > most or (not unpacker.eof and unpacker.decompress(unpacker.unconsumed_tail, 1)):
            raise JournalError(f"{what} takes more than the {most:,} bytes that it may have unpacked.")
    except zlib.error as error:
        raise JournalError(f"{what} cannot be unpacked: {error}.") from error
    if not unpacker.eof:
        raise JournalError(f"{what} cannot be unpacked: it is cut off.")
    return found


def decompress_json(data: bytes, what: str) -> Any:
    """Return JSON that was compressed; text that shrank a hundredfold is not that of a journal, but made to burst."""
    text = decompress(data, min(MOST_TEXT, max(_SMALL, _RATIO * len(data))), what)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise JournalError(f"{what} cannot be read: {error}.") from error


def as_json(value: Any, what: str) -> str:
    """Return JSON-like data as text; numpy's numbers are numbers.

    >>> as_json({"loss": np.float32(0.5), "count": np.int64(3)}, "The event 'mine'")
    '{"loss": 0.5, "count": 3}'
    """

    def number(item: Any) -> Any:
        if isinstance(item, np.generic) and not isinstance(item, np.void | np.datetime64 | np.timedelta64):
            return item.item()
        raise TypeError(f"a {type(item).__name__} is not JSON: {item!r:.80}")

    try:
        return json.dumps(value, default=number)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{what} must consist of strings, numbers, lists and mappings with string keys; {error}.",
            hint="convert it first; an array, for example, with .tolist()",
        ) from error


def state_fields(state: object) -> Iterator[tuple[str, AnyArray | Scalar]]:
    """Yield the fields of a state; anything but arrays and scalars is a selector's mistake."""
    if not dataclasses.is_dataclass(state) or isinstance(state, type):
        raise SelectorError(f"A selector's state must be a dataclass. Got {type(state).__name__}.")
    for f in dataclasses.fields(state):
        value = getattr(state, f.name)
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            raise SelectorError(f"The state field {type(state).__name__}.{f.name} holds Python objects, not numbers.")
        if isinstance(value, np.generic):
            value = value.item()
        if not isinstance(value, (np.ndarray, int, float, str, type(None))):
            raise SelectorError(
                f"The state field {type(state).__name__}.{f.name} must be an array or a scalar. "
                f"Got {type(value).__name__}."
            )
        yield f.name, value


def freeze_state(state: Any, n: int) -> Any:
    """Make the arrays of a state read-only, so that a selector that changes one in place is caught.

    Refuses fields per client that do not have a row for each of the ``n`` clients.
    """
    for _, value in state_fields(state):
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    for field in dataclasses.fields(state):
        if is_per_client(field):
            shape = np.shape(getattr(state, field.name))
            if not shape or shape[0] != n:
                raise SelectorError(
                    f"The state field {type(state).__name__}.{field.name} must have a row for each of the {n} clients. "
                    f"Got the shape {shape}."
                )
    return state


def encode_scalar(value: Scalar) -> str:
    """Return a scalar as JSON that keeps every bit of a float and tells int from float."""
    # JSON would write infinity and NaN as words that other readers refuse, and 1.0 could come back as 1.
    return json.dumps({"float": value.hex()} if isinstance(value, float) else value)


def decode_scalar(text: str) -> Scalar:
    """Return the scalar :func:`encode_scalar` wrote.

    >>> decode_scalar(encode_scalar(0.1)), decode_scalar(encode_scalar(float("inf")))
    (0.1, inf)
    """
    value: Any = json.loads(text)
    return float.fromhex(value["float"]) if isinstance(value, dict) else value


def changed_rows(old: AnyArray, new: AnyArray) -> IntArray | None:
    """Return the rows in which two arrays differ bit by bit, or None when they cannot be compared by rows."""
    if old.shape != new.shape or old.dtype != new.dtype or old.ndim == 0 or old.dtype.itemsize not in _BITS:
        return None
    bits = _BITS[old.dtype.itemsize]
    differ = np.ascontiguousarray(old).view(bits) != np.ascontiguousarray(new).view(bits)
    if differ.ndim > 1:
        differ = differ.reshape(len(differ), -1).any(axis=1)
    return np.flatnonzero(differ)
