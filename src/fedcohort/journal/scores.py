"""Scores as compact bytes, because they are the largest part of a journal.

A choice among 100 clients has a hundred scores in every round, each with several parts. A score keeps five digits, or
seven if five would make different scores equal. Its parts keep four digits, which is what explanations print. One part
is not stored if it is the score minus the other parts. Bytes of equal significance are stored together, because that
compresses well. If all candidates are recorded, their order follows from the scores.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedcohort.core.arrays import AnyArray, FloatArray
from fedcohort.core.errors import JournalError
from fedcohort.journal.codec import decompress

_MARK = b"s2\n"
_PART, _SCORE = 10, 7  # low bits of the mantissa that are dropped; 13 or 16 of 23 remain
_COMMON = b', "wide": false, "rest": null, "names": ["score", "part:{"n": 100, "whole": true'  # zlib's dictionary
_NEAR = 2.0**-13  # the relative error that a part may have
_INTEGER = np.dtype("<i8")
_MAX_PARTS, _MAX_HEADER = 256, 65_536  # of a score and of a header: they limit what a file makes us allocate


def pack_scores(arrays: Mapping[str, AnyArray]) -> bytes:
    """Return the arrays of :func:`fedcohort.session.explain.recorded_scores`, best first, as bytes."""
    client, rank = np.asarray(arrays["client"], np.int64), np.asarray(arrays["rank"], np.int64)
    names = tuple(name for name in arrays if name not in ("client", "rank"))
    values = np.empty((len(names), len(client)))
    for row, name in zip(values, names, strict=True):
        row[:] = arrays[name]
    whole = bool((rank == np.arange(1, len(rank) + 1)).all())
    if whole:  # ranks follow from the scores, so clients can be in the order that compresses best
        order = np.argsort(client, kind="stable")
        client, values = client[order], values[:, order]
    steps = client.copy()
    steps[1:] -= client[:-1]
    columns = [steps] if whole else [steps, rank]
    size = np.abs(values)
    size = size[np.isfinite(size) & (size > 0)]
    # 32-bit numbers cannot hold values of any size.
    wide, rest = bool(size.size and (size.max() >= 1e38 or size.min() <= 1e-37)), None
    if wide:
        columns += list(values)
    else:
        short = _shorten(values, names)
        rest = _rest(values, short.astype(np.float64), names)
        columns += [short[i] for i in range(len(names)) if i != rest]
    head = _header(len(client), whole, wide, None if rest is None else names[rest], names)
    packer = zlib.compressobj(6, zdict=_COMMON)
    return _MARK + packer.compress(head + b"".join(map(_planes, columns))) + packer.flush()


@functools.lru_cache(maxsize=64)
def _header(n: int, whole: bool, wide: bool, rest: str | None, names: tuple[str, ...]) -> bytes:
    """Return the line that says what follows; most rounds of a session have the same one."""
    return json.dumps({"n": n, "whole": whole, "wide": wide, "rest": rest, "names": names}).encode() + b"\n"


def unpack_scores(data: bytes, clients: int) -> dict[str, AnyArray]:
    """Return the arrays that :func:`pack_scores` packed, best first.

    Parameters
    ----------
    clients : int
        The number of clients in the federation, which limits the unpacked size.
    """
    most = _MAX_HEADER + 8 * (_MAX_PARTS + 3) * max(clients, 1)
    body = decompress(data.removeprefix(_MARK), most, "The scores of a cohort", _COMMON)
    try:
        line, _, planes = body.partition(b"\n")
        head = json.loads(line)
        n, whole, names = int(head["n"]), bool(head["whole"]), [str(name) for name in head["names"]]
        rest = head.get("rest")
        stored = [name for name in names if name != rest]
        integers = 1 if whole else 2  # clients, and their ranks unless these follow from the scores
        dtypes = [_INTEGER] * integers + [np.dtype("<f8" if head["wide"] else "<f4")] * len(stored)
        columns = _read_planes(planes, n, dtypes)
        numbers = {name: column.astype(np.float64) for name, column in zip(stored, columns[integers:], strict=True)}
        if rest is not None:
            numbers[rest] = _remainder(numbers)
        arrays: dict[str, AnyArray] = {"client": np.cumsum(columns[0])}
        arrays["rank"] = np.arange(1, n + 1) if whole else columns[1]
        arrays |= {name: numbers[name] for name in names}
        if not whole:
            return arrays
        best_first = np.argsort(-arrays["score"], kind="stable")
        return {name: values if name == "rank" else values[best_first] for name, values in arrays.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise JournalError(f"The scores of a cohort cannot be read: {error}.") from error


def _read_planes(data: bytes, n: int, dtypes: Sequence[np.dtype[Any]]) -> list[AnyArray]:
    """Return the columns of ``n`` numbers that :func:`_planes` wrote one after another."""
    columns, start = [], 0
    for dtype in dtypes:
        size = n * dtype.itemsize
        planes = np.frombuffer(data, np.uint8, size, start).reshape(dtype.itemsize, n)
        columns.append(np.ascontiguousarray(planes.T).view(dtype).reshape(n))
        start += size
    return columns


def _shorten(values: FloatArray, names: tuple[str, ...]) -> AnyArray:
    """Return 32-bit numbers, each row rounded to the bits that its name calls for."""
    exact = values.astype("<f4")
    bits = exact.view("<u4")
    half, mask = _rounding(names)
    short = np.where(np.isfinite(exact), (bits + half) & mask, bits).view("<f4")
    score = names.index("score") if "score" in names else None
    if score is not None and len(set(short[score].tolist())) != len(set(exact[score].tolist())):
        short[score] = exact[score]  # rounding would make different scores equal
    return short


@functools.lru_cache(maxsize=64)
def _rounding(names: tuple[str, ...]) -> tuple[AnyArray, AnyArray]:
    """Return what to add to the bits of each row's numbers (rows, 1), and which bits to keep, to round them."""
    bit = np.array([[1 << (_SCORE if name == "score" else _PART)] for name in names], np.uint32).reshape(-1, 1)
    return bit >> 1, ~(bit - np.uint32(1))


def _rest(exact: FloatArray, short: FloatArray, names: Sequence[str]) -> int | None:
    """Return the row of a part that equals the score minus the other parts, to the precision of parts."""
    if "score" not in names:
        return None
    for row, name in enumerate(names):
        if name == "score":
            continue
        rest = _remainder({other: short[i] for i, other in enumerate(names) if i != row})
        with np.errstate(invalid="ignore"):
            near = np.abs(rest - exact[row]) <= _NEAR * np.abs(exact[row])
        if near.all() or (near | (rest == exact[row]) | (np.isnan(rest) & np.isnan(exact[row]))).all():
            return row
    return None


def _remainder(numbers: Mapping[str, FloatArray]) -> FloatArray:
    """Return the score minus its parts."""
    rest = numbers["score"].copy()
    with np.errstate(invalid="ignore"):
        for name, values in numbers.items():
            if name != "score":
                rest -= values
    return rest


def _planes(column: AnyArray) -> bytes:
    """Return the first bytes of all numbers, then their second bytes, and so on."""
    return np.ascontiguousarray(column).view(np.uint8).reshape(len(column), column.dtype.itemsize).T.tobytes()
