"""Scores of a choice as bytes: most of a journal, so they are kept small.

A choice among 100 clients has a hundred scores, each with several parts, in every round. A score is kept as a 32-bit
number (seven digits), its parts with four digits, which is what explanations print; bytes of like significance stand
together, because they compress well. Where all candidates are on record, their order follows from the scores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from fedcohort.core.arrays import AnyArray, FloatArray
from fedcohort.core.errors import JournalError
from fedcohort.journal.codec import compress, decompress, unpack_many

_MARK = b"s1\n"  # scores of earlier versions begin with the bracket of a JSON list
_DROPPED = 10  # bits of a part's mantissa: 13 stay, an error below 1 in 16,000
_MOST_PARTS = 256
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
    wide = not all(_fits(values) for values in numbers.values())
    for name, values in numbers.items():
        ordered = np.asarray(values, np.float64)[order]
        columns.append(ordered.astype("<f8") if wide else _shorten(ordered, exact=name == "score"))
    head = json.dumps({"n": len(client), "whole": whole, "wide": wide, "names": list(numbers)}).encode()
    return _MARK + compress(b"\n".join([head, b"".join(map(_planes, columns))]))


def unpack_scores(data: bytes, clients: int) -> dict[str, AnyArray]:
    """Return the arrays :func:`pack_scores` wrote, best first, or those of an earlier version.

    Parameters
    ----------
    clients : int
        How many the federation has, which limits what the bytes may unpack to.
    """
    if not data.startswith(_MARK):
        return unpack_many(data)
    body = decompress(data[len(_MARK) :], _HEADER + 8 * (_MOST_PARTS + 3) * max(clients, 1), "The scores of a cohort")
    head, _, rest = body.partition(b"\n")
    try:
        known = json.loads(head)
        n, whole, names = int(known["n"]), bool(known["whole"]), [str(name) for name in known["names"]]
        kind = np.dtype("<f8" if known["wide"] else "<f4")
        whole_numbers = np.dtype("<i8")
        dtypes = [whole_numbers] * (1 if whole else 2) + [kind] * len(names)
        found, at = [], 0
        for dtype in dtypes:
            size = n * dtype.itemsize
            planes = np.frombuffer(rest, np.uint8, size, at).reshape(dtype.itemsize, n)
            found.append(np.ascontiguousarray(planes.T).view(dtype).reshape(n))
            at += size
    except (ValueError, KeyError, TypeError) as error:
        raise JournalError(f"The scores of a cohort cannot be read: {error}.") from error
    arrays: dict[str, AnyArray] = {"client": np.cumsum(found[0])}
    arrays["rank"] = np.arange(1, n + 1) if whole else found[1]
    arrays |= {name: values.astype(np.float64) for name, values in zip(names, found[1 if whole else 2 :], strict=True)}
    if not whole:
        return arrays
    best_first = np.argsort(-arrays["score"], kind="stable")
    return {name: values if name == "rank" else values[best_first] for name, values in arrays.items()}


def _fits(values: AnyArray) -> bool:
    """Whether 32-bit numbers can hold values of this size."""
    size = np.abs(np.asarray(values, np.float64))
    size = size[np.isfinite(size) & (size > 0)]
    return not size.size or bool(size.max() < 1e38 and size.min() > 1e-37)


def _shorten(values: FloatArray, *, exact: bool) -> AnyArray:
    """Return 32-bit numbers; of a part rounded to 13 bits of its mantissa."""
    short = values.astype("<f4")
    if exact:
        return short
    bits = short.view("<u4").copy()
    number = np.isfinite(short)
    bits[number] = (bits[number] + np.uint32(1 << (_DROPPED - 1))) & np.uint32(~((1 << _DROPPED) - 1) & 0xFFFFFFFF)
    return bits.view("<f4")


def _planes(column: AnyArray) -> bytes:
    """Return the first bytes of all numbers, then their second ones, and so on."""
    return np.ascontiguousarray(column).view(np.uint8).reshape(len(column), column.dtype.itemsize).T.tobytes()
