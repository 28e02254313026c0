"""Arrays and selector states as bytes and JSON, without pickle.

A state is a frozen dataclass of arrays and scalars. Between two events, usually only the rows of one cohort change. So
a journal stores each state once as a whole, and after that the rows that change.
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
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # as bits, NaN equals NaN, and 0.0 is not -0.0
_INDEX_TYPES = (("<u1", 0xFF), ("<u2", 0xFFFF), ("<u4", 0xFFFF_FFFF))  # with the largest index they hold


def pack(array: AnyArray) -> bytes:
    """Return an array as bytes: a line of JSON with its type and shape, then its contents."""
    contiguous = np.ascontiguousarray(array)
    header = f'["{contiguous.dtype.str}", {list(array.shape)}]'.encode()
    return header + b"\n" + contiguous.tobytes()


def pack_indices(array: IntArray) -> bytes:
    """Return indices of clients as :func:`pack` does, in the smallest type that holds the largest of them.

    >>> len(pack_indices(np.arange(10))), unpack(pack_indices(np.arange(3)))
    (31, array([0, 1, 2]))
    """
    narrow = narrowest(array)
    header = f'["<i8", {list(array.shape)}, "{narrow}"]'.encode()
    return header + b"\n" + array.astype(narrow).tobytes()


def narrowest(indices: IntArray) -> str:
    """Return the smallest type that holds all indices; none is negative."""
    largest = int(indices.max(initial=0))
    for kind, limit in _INDEX_TYPES:
        if largest <= limit:
            return kind
    return "<i8"


def unpack(data: bytes) -> AnyArray:
    """Return the array that :func:`pack` or :func:`pack_indices` wrote, read-only.

    >>> unpack(pack(np.array([[1.5, 2.5]])))
    array([[1.5, 2.5]])
    """
    header, _, raw = data.partition(b"\n")
    dtype, shape, stored = _layout(header)
    return freeze(np.frombuffer(raw, dtype=stored).reshape(shape).astype(dtype))


@lru_cache(maxsize=256)  # a journal has many cohorts, but few sizes of cohorts
def _layout(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], np.dtype[Any]]:
    dtype, shape, *stored = json.loads(header)
    if stored and dtype != "<i8":  # one byte for each entry could name a type of a gigabyte
        raise JournalError(f"Only indices are stored in a smaller type than their own. Got {dtype!r}.")
    return np.dtype(dtype), tuple(shape), np.dtype(stored[0] if stored else dtype)


def pack_many(arrays: Mapping[str, AnyArray]) -> bytes:
    """Return several named arrays as one block of bytes."""
    bodies = {name: pack(np.asarray(array)) for name, array in arrays.items()}
    header = json.dumps([[name, len(body)] for name, body in bodies.items()]).encode()
    return header + b"\n" + b"".join(bodies.values())


def unpack_many(data: bytes) -> dict[str, AnyArray]:
    """Return the named arrays that :func:`pack_many` wrote."""
    header, _, rest = data.partition(b"\n")
    arrays, start = {}, 0
    for name, length in json.loads(header):
        arrays[name] = unpack(rest[start : start + length])
        start += length
    return arrays


_MAX_TEXT = 256 << 20  # bytes of unpacked names or attributes: 256 for each of a million clients
_SMALL = 1 << 20  # bytes to which any text may unpack
_RATIO = 100  # how many times larger text may become; names and attributes of real federations need a tenth of it


def compress(data: bytes) -> bytes:
    """Return compressed bytes, quickly rather than as few as possible."""
    return zlib.compress(data, 1)


def decompress(data: bytes, most: int, what: str, common: bytes = b"") -> bytes:
    """Return what :func:`compress` packed; :class:`JournalError` if that is more than ``most`` bytes.

    ``common`` is zlib's dictionary for these bytes, if any.

    >>> decompress(compress(b"abc" * 1000), 10, "A name")
    Traceback (most recent call last):
        ...
    fedcohort.core.errors.JournalError: A name takes more than the 10 bytes allowed after unpacking.
    """
    # Unpack at most one byte beyond the limit, however much the data hold.
    unpacker = zlib.decompressobj(zdict=common)
    try:
        unpacked = unpacker.decompress(data, max(most, 1))
        if len(unpacked) > most or (not unpacker.eof and unpacker.decompress(unpacker.unconsumed_tail, 1)):
            raise JournalError(f"{what} takes more than the {most:,} bytes allowed after unpacking.")
    except zlib.error as error:
        raise JournalError(f"{what} cannot be unpacked: {error}.") from error
    if not unpacker.eof:
        raise JournalError(f"{what} cannot be unpacked: it is cut off.")
    return unpacked


def decompress_json(data: bytes, what: str) -> Any:
    """Return compressed JSON. Text that grows a hundredfold is refused: it was made to exhaust the memory."""
    text = decompress(data, min(_MAX_TEXT, max(_SMALL, _RATIO * len(data))), what)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise JournalError(f"{what} cannot be read: {error}.") from error


def _plain_number(item: Any) -> Any:
    if isinstance(item, np.generic) and not isinstance(item, np.void | np.datetime64 | np.timedelta64):
        return item.item()
    raise TypeError(f"a {type(item).__name__} is not JSON: {item!r:.80}")


_encode_json = json.JSONEncoder(default=_plain_number).encode


def as_json(value: Any, what: str) -> str:
    """Return data as JSON; NumPy's numbers become plain numbers.

    >>> as_json({"loss": np.float32(0.5), "count": np.int64(3)}, "The event 'mine'")
    '{"loss": 0.5, "count": 3}'
    """
    try:
        return _encode_json(value)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{what} must consist of strings, numbers, lists and mappings with string keys; {error}.",
            hint="convert it first; an array, for example, with .tolist()",
        ) from error


def state_fields(state: object) -> Iterator[tuple[str, AnyArray | Scalar]]:
    """Yield the name and value of each field of a state; :class:`SelectorError` unless it is an array or a scalar."""
    if not dataclasses.is_dataclass(state) or isinstance(state, type):
        raise SelectorError(f"A selector's state must be a dataclass. Got {type(state).__name__}.")
    for name, _ in _layout_of(type(state)):
        value = getattr(state, name)
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            raise SelectorError(f"The state field {type(state).__name__}.{name} holds Python objects, not numbers.")
        if isinstance(value, np.generic):
            value = value.item()
        if not isinstance(value, (np.ndarray, int, float, str, type(None))):
            raise SelectorError(
                f"The state field {type(state).__name__}.{name} must be an array or a scalar. "
                f"Got {type(value).__name__}."
            )
        yield name, value


@lru_cache(maxsize=256)  # a session checks its state several times in every round
def _layout_of(kind: type) -> tuple[tuple[str, bool], ...]:
    """Return the name of each field of a class of states, and whether it has a row for each client."""
    return tuple((field.name, is_per_client(field)) for field in dataclasses.fields(kind))


def freeze_state(state: Any, n: int) -> Any:
    """Make the arrays of a state read-only and return the state. A selector that changes one in place then fails.

    A field per client that does not have a row for each of the ``n`` clients is an error.
    """
    for _, value in state_fields(state):
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    for name, per_client in _layout_of(state.__class__):
        if per_client:
            shape = np.shape(getattr(state, name))
            if not shape or shape[0] != n:
                raise SelectorError(
                    f"The state field {type(state).__name__}.{name} must have a row for each of the {n} clients. "
                    f"Got the shape {shape}."
                )
    return state


def encode_scalar(value: Scalar) -> str:
    """Return a scalar as JSON that keeps every bit of a float."""
    # Plain JSON has no infinity and no NaN, and some readers turn 1.0 into 1.
    return json.dumps({"float": value.hex()} if isinstance(value, float) else value)


def decode_scalar(text: str) -> Scalar:
    """Return the scalar that :func:`encode_scalar` wrote.

    >>> decode_scalar(encode_scalar(0.1)), decode_scalar(encode_scalar(float("inf")))
    (0.1, inf)
    """
    value: Any = json.loads(text)
    return float.fromhex(value["float"]) if isinstance(value, dict) else value


def changed_rows(old: AnyArray, new: AnyArray) -> IntArray | None:
    """Return the rows in which any bit differs, or None if the arrays cannot be compared row by row."""
    if old.shape != new.shape or old.dtype != new.dtype or old.ndim == 0 or old.dtype.itemsize not in _BITS:
        return None
    bits = _BITS[old.dtype.itemsize]
    differ = np.ascontiguousarray(old).view(bits) != np.ascontiguousarray(new).view(bits)
    if differ.ndim > 1:
        differ = differ.any(axis=tuple(range(1, differ.ndim)))
    return np.flatnonzero(differ)
