"""Scores as compact bytes, because they are the largest part of a journal.

A choice among 100 clients has a hundred scores in every round, each with several parts. A score keeps five digits, or
seven if five would make different scores equal. Its parts keep four digits, which is what explanations print. One part
is not stored if it is the score minus the other parts. Bytes of equal significance are stored together, because that
compresses well. If all candidates are recorded, their order follows from the scores.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedcohort.core.arrays import AnyArray, FloatArray
from fedcohort.core.errors import JournalError
from fedcohort.journal.codec import decompress, unpack_many

_MARK = b"s2\n"
_OLD_MARK = b"s1\n"  # of an earlier version; the one before that wrote a JSON list first
_PART, _SCORE = 10, 7  # low bits of the mantissa that are dropped; 13 or 16 of 23 remain
_COMMON = b', "wide": false, "rest": null, "names": ["score", "part:{"n": 100, "whole": true'  # zlib's dictionary
_NEAR = 2.0**-13  # the relative error that a part may have
_INTEGER = np.dtype("<i8")
_MOST_PARTS, _MOST_HEADER = (
    256,
    65_536,
)  # parts of a score and bytes of a header, to limit what a file makes us allocate


def pack_scores(arrays: Mapping[str, AnyArray]) -> bytes:
    """Return the arrays of :func:`fedcohort.session.explain.recorded_scores`, best first, as bytes."""
    client, rank = np.asarray(arrays["client"], np.int64), np.asarray(arrays["rank"], np.int64)
    whole = bool((rank == np.arange(1, len(rank) + 1)).all())
    order = np.argsort(client, kind="stable") if whole else np.arange(len(client))
    columns = [np.diff(client[order], prepend=0).astype("<i8")]
    if not whole:
        columns.append(rank.astype("<i8"))
    numbers = {name: values for name, values in arrays.items() if name not in ("client", "rank")}
    wide = not all(map(_fits, numbers.values()))
    ordered = {name: np.asarray(values, np.float64)[order] for name, values in numbers.items()}
    rest = None
    if wide:
        short = {name: values.astype("<f8") for name, values in ordered.items()}
    else:
        short = {n: _short_scores(v) if n == "score" else _shorten(v, _PART) for n, v in ordered.items()}
        rest = _rest(ordered, short)
    columns += [values for name, values in short.items() if name != rest]
    head = json.dumps({"n": len(client), "whole": whole, "wide": wide, "rest": rest, "names": list(numbers)}).encode()
    packer = zlib.compressobj(6, zdict=_COMMON)
    return _MARK + packer.compress(b"\n".join([head, b"".join(map(_planes, columns))])) + packer.flush()


def unpack_scores(data: bytes, clients: int) -> dict[str, AnyArray]:
    """Return the arrays that :func:`pack_scores`, of this version or an earlier one, packed; best first.

    Parameters
    ----------
    clients : int
        The number of clients in the federation, which limits the unpacked size.
    """
    if not data.startswith((_MARK, _OLD_MARK)):
        return unpack_many(data)
    most = _MOST_HEADER + 8 * (_MOST_PARTS + 3) * max(clients, 1)
    common = _COMMON if data.startswith(_MARK) else b""
    body = decompress(data[len(_MARK) :], most, "The scores of a cohort", common)
    try:
        return _read_scores(body)
    except (ValueError, KeyError, TypeError) as error:
        raise JournalError(f"The scores of a cohort cannot be read: {error}.") from error


def _read_scores(body: bytes) -> dict[str, AnyArray]:
    """Return the arrays in unpacked bytes, which the first line describes."""
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


def _read_planes(data: bytes, n: int, dtypes: Sequence[np.dtype[Any]]) -> list[AnyArray]:
    """Return the columns of ``n`` numbers that :func:`_planes` wrote one after another."""
    columns, start = [], 0
    for dtype in dtypes:
        size = n * dtype.itemsize
        planes = np.frombuffer(data, np.uint8, size, start).reshape(dtype.itemsize, n)
        columns.append(np.ascontiguousarray(planes.T).view(dtype).reshape(n))
        start += size
    return columns


def _fits(values: AnyArray) -> bool:
    """Whether the range of 32-bit numbers is large enough for these values."""
    size = np.abs(np.asarray(values, np.float64))
    size = size[np.isfinite(size) & (size > 0)]
    return not size.size or bool(size.max() < 1e38 and size.min() > 1e-37)


def _short_scores(values: FloatArray) -> AnyArray:
    """Return 32-bit numbers, rounded unless that makes different scores equal."""
    single, short = values.astype("<f4"), _shorten(values, _SCORE)
    return short if len(set(short.tolist())) == len(set(single.tolist())) else single


def _rest(exact: Mapping[str, FloatArray], short: Mapping[str, AnyArray]) -> str | None:
    """Return the name of a part that equals the score minus the other parts, to the precision of parts."""
    stored = {name: values.astype(np.float64) for name, values in short.items()}
    for name in stored:
        if name != "score" and "score" in stored:
            rest = _remainder({other: values for other, values in stored.items() if other != name})
            with np.errstate(invalid="ignore"):
                near = np.abs(rest - exact[name]) <= _NEAR * np.abs(exact[name])
            if (near | (rest == exact[name]) | (np.isnan(rest) & np.isnan(exact[name]))).all():
                return name
    return None


def _remainder(numbers: Mapping[str, FloatArray]) -> FloatArray:
    """Return the score minus its parts."""
    rest = numbers["score"].copy()
    with np.errstate(invalid="ignore"):
        for name, values in numbers.items():
            if name != "score":
                rest -= values
    return rest


def _shorten(values: FloatArray, dropped: int) -> AnyArray:
    """Return 32-bit numbers without the lowest bits of their mantissas, rounded."""
    short = values.astype("<f4")
    bits = short.view("<u4").copy()
    finite = np.isfinite(short)
    bits[finite] = (bits[finite] + np.uint32(1 << (dropped - 1))) & np.uint32(~((1 << dropped) - 1) & 0xFFFFFFFF)
    return bits.view("<f4")


def _planes(column: AnyArray) -> bytes:
    """Return the first bytes of all numbers, then their second bytes, and so on."""
    return np.ascontiguousarray(column).view(np.uint8).reshape(len(column), column.dtype.itemsize).T.tobytes()
