"""Scores of a choice as bytes: most of a journal, so they are kept small.

A choice among 100 clients has a hundred scores, each with several parts, in every round. A score is kept with five
digits, or with seven where five would make different scores equal; its parts with four digits, which is what
explanations print. A part that is the rest of the score, what the other parts leave of it, is not kept. Bytes of like
significance stand together, because they compress well. Where all candidates are on record, their order follows from
the scores.
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
_BEFORE = b"s1\n"  # of an earlier version; one before that begins with the bracket of a JSON list
_PART, _SCORE, _EXACT = 10, 7, 0  # bits of a mantissa that are dropped: 13 or 16 of 23 stay
_COMMON = b', "wide": false, "rest": null, "names": ["score", "part:{"n": 100, "whole": true'  # of most headers
_NEAR = 2.0**-13  # the error that a part may have
_INTEGER = np.dtype("<i8")
_MOST_PARTS = 256  # of a score, and so many bytes of a header: what a file may make us allocate
_HEADER = 65_536


def pack_scores(arrays: Mapping[str, AnyArray]) -> bytes:
    """Return the arrays of :func:`fedcohort.session.explain.recorded_scores` as bytes."""
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
    """Return the arrays :func:`pack_scores` wrote, best first, or those of an earlier version.

    Parameters
    ----------
    clients : int
        How many the federation has, which limits what the bytes may unpack to.
    """
    if not data.startswith((_MARK, _BEFORE)):
        return unpack_many(data)
    most = _HEADER + 8 * (_MOST_PARTS + 3) * max(clients, 1)
    common = _COMMON if data.startswith(_MARK) else b""
    body = decompress(data[len(_MARK) :], most, "The scores of a cohort", common)
    try:
        return _read_scores(body)
    except (ValueError, KeyError, TypeError) as error:
        raise JournalError(f"The scores of a cohort cannot be read: {error}.") from error


def _read_scores(body: bytes) -> dict[str, AnyArray]:
    """Return the arrays that unpacked bytes hold; the first line says which."""
    head, _, planes = body.partition(b"\n")
    known = json.loads(head)
    n, whole, names = int(known["n"]), bool(known["whole"]), [str(name) for name in known["names"]]
    rest = known.get("rest")
    stored = [name for name in names if name != rest]
    integers = 1 if whole else 2  # clients, and their ranks unless these follow from the scores
    dtypes = [_INTEGER] * integers + [np.dtype("<f8" if known["wide"] else "<f4")] * len(stored)
    columns = _read_planes(planes, n, dtypes)
    numbers = {name: column.astype(np.float64) for name, column in zip(stored, columns[integers:], strict=True)}
    if rest is not None:
        numbers[rest] = _left_by(numbers)
    arrays: dict[str, AnyArray] = {"client": np.cumsum(columns[0])}
    arrays["rank"] = np.arange(1, n + 1) if whole else columns[1]
    arrays |= {name: numbers[name] for name in names}
    if not whole:
        return arrays
    best_first = np.argsort(-arrays["score"], kind="stable")
    return {name: values if name == "rank" else values[best_first] for name, values in arrays.items()}


def _read_planes(data: bytes, n: int, dtypes: Sequence[np.dtype[Any]]) -> list[AnyArray]:
    """Return the columns of ``n`` numbers that :func:`_planes` wrote one after the other."""
    found, at = [], 0
    for dtype in dtypes:
        size = n * dtype.itemsize
        planes = np.frombuffer(data, np.uint8, size, at).reshape(dtype.itemsize, n)
        found.append(np.ascontiguousarray(planes.T).view(dtype).reshape(n))
        at += size
    return found


def _fits(values: AnyArray) -> bool:
    """Whether 32-bit numbers can hold values of this size."""
    size = np.abs(np.asarray(values, np.float64))
    size = size[np.isfinite(size) & (size > 0)]
    return not size.size or bool(size.max() < 1e38 and size.min() > 1e-37)


def _short_scores(values: FloatArray) -> AnyArray:
    """Return 32-bit numbers with 16 bits of their mantissas, or with all where that makes different scores equal."""
    short, exact = (_shorten(values, dropped) for dropped in (_SCORE, _EXACT))
    return short if len(set(short.tolist())) == len(set(exact.tolist())) else exact


def _rest(exact: Mapping[str, FloatArray], short: Mapping[str, AnyArray]) -> str | None:
    """Return the name of a part that is what the others leave of the score, to the digits that a part is kept with."""
    kept = {name: values.astype(np.float64) for name, values in short.items()}
    for name in kept:
        if name != "score" and "score" in kept:
            left = _left_by({other: values for other, values in kept.items() if other != name})
            with np.errstate(invalid="ignore"):
                near = np.abs(left - exact[name]) <= _NEAR * np.abs(exact[name])
            if (near | (left == exact[name]) | (np.isnan(left) & np.isnan(exact[name]))).all():
                return name
    return None


def _left_by(numbers: Mapping[str, FloatArray]) -> FloatArray:
    """Return what the parts leave of the score."""
    left = numbers["score"].copy()
    with np.errstate(invalid="ignore"):
        for name, values in numbers.items():
            if name != "score":
                left -= values
    return left


def _shorten(values: FloatArray, dropped: int) -> AnyArray:
    """Return 32-bit numbers, rounded by that many bits of their mantissas."""
    short = values.astype("<f4")
    if not dropped:
        return short
    bits = short.view("<u4").copy()
    number = np.isfinite(short)
    bits[number] = (bits[number] + np.uint32(1 << (dropped - 1))) & np.uint32(~((1 << dropped) - 1) & 0xFFFFFFFF)
    return bits.view("<f4")


def _planes(column: AnyArray) -> bytes:
    """Return the first bytes of all numbers, then their second ones, and so on."""
    return np.ascontiguousarray(column).view(np.uint8).reshape(len(column), column.dtype.itemsize).T.tobytes()
