"""What clients answered, kept by columns: one block for each report, however many clients it names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray, FloatArray, IntArray, freeze
from fedcohort.journal.codec import narrowest

_CLIENT, _STATUS, _KEPT, _METRIC = (np.dtype(code) for code in ("<i8", "i1", "?", "<f8"))
_HALF = np.dtype("<f4")  # what torch computed in single precision loses nothing by it
_MARK = "r1"  # what earlier versions wrote begins with a number, and has all columns in full
_ALIKE, _SHORT, _FULL = "=48"  # how a metric is stored: once for all clients, as 32-bit numbers, as they are


class ReplyRow(NamedTuple):
    """One recorded reply of a client to a cohort. A tuple, because there are as many as clients that train."""

    ticket: int
    client: int
    status: int
    kept: bool
    late: bool
    at: float
    metrics: Mapping[str, float | tuple[float, ...]]


@dataclass(frozen=True)
class ReplyBlock:
    """The replies of one report.

    Attributes
    ----------
    at : float
        When the report came, in seconds since 1970.
    late : bool
        Whether the round was closed already.
    clients : (r,) int array
    status : (r,) int8 array
    kept : (r,) bool array
    metrics : mapping of str to (r,) or (r, V) float array
        NaN for a client that gave no finite numbers.
    """

    ticket: int
    at: float
    late: bool
    clients: IntArray
    status: AnyArray
    kept: BoolArray
    metrics: Mapping[str, FloatArray]

    @classmethod
    def with_status(cls, ticket: int, at: float, clients: IntArray, status: int, *, late: bool = False) -> ReplyBlock:
        """Return a block of clients that share one status and reported nothing."""
        count = len(clients)
        return cls(ticket, at, late, clients, np.full(count, status, np.int8), np.zeros(count, np.bool_), {})

    @classmethod
    def join(cls, ticket: int, blocks: Sequence[ReplyBlock]) -> ReplyBlock:
        """Return several reports as one, in their order; NaN where one lacks a metric that another has."""
        if not blocks:
            return cls.with_status(ticket, 0.0, np.empty(0, np.int64), 0)
        widths = {name: column.shape[1:] for block in blocks for name, column in block.metrics.items()}
        metrics = {
            name: np.concatenate([b.metrics.get(name, np.full((len(b.clients), *width), np.nan)) for b in blocks])
            for name, width in widths.items()
        }
        clients, status, kept = (
            np.concatenate([getattr(block, column) for block in blocks]) for column in ("clients", "status", "kept")
        )
        return cls(ticket, max(block.at for block in blocks), False, clients, status, kept, metrics)

    def encode(self) -> bytes:
        """Return the columns as bytes: a line that names them, then one after the other.

        The line has a mark, the number of clients, the type of their indices, and for status and kept and each metric
        how it is stored, which is no less exact than it came. A metric of V numbers per client stands as ``name:V``,
        its rows one after the other.
        """
        narrow = narrowest(self.clients)
        words, body = [_MARK, str(len(self.clients)), narrow], [self.clients.astype(narrow).tobytes()]
        for column, dtype in ((self.status, _STATUS), (self.kept, _KEPT)):
            how, data = _encode_column(column.astype(dtype, copy=False))
            words.append(how)
            body.append(data)
        for name, column in self.metrics.items():
            how, data = _encode_column(column.astype(_METRIC, copy=False))
            words.append(how + (name if column.ndim == 1 else f"{name}:{column.shape[1]}"))
            body.append(data)
        return b"".join([" ".join(words).encode(), b"\n", *body])

    @classmethod
    def decode(cls, ticket: int, at: float, late: bool, data: bytes) -> ReplyBlock:
        """Return the block whose columns :meth:`encode` wrote, in this version or an earlier one."""
        head, _, _ = data.partition(b"\n")
        count, names, layouts = _read_head(head.decode().split(" "))
        found, offset = [], len(head) + 1
        for name, (how, stored, dtype) in zip(("", "", "", *names), layouts, strict=True):
            _, vector, width = name.partition(":")
            shape = (count, int(width)) if vector else (count,)
            values = np.frombuffer(data, stored, 1 if how == _ALIKE else math.prod(shape), offset)
            offset += values.nbytes
            whole = np.full(shape, values[0]) if how == _ALIKE else values.reshape(shape)
            found.append(freeze(whole.astype(dtype, copy=False)))
        clients, status, kept, *columns = found
        metrics = {name.partition(":")[0]: column for name, column in zip(names, columns, strict=True)}
        return cls(ticket, at, late, clients, status, kept, metrics)

    def rows(self) -> list[ReplyRow]:
        """Return the replies one by one, each with the numbers it has."""
        metrics: list[dict[str, float | tuple[float, ...]]] = [{} for _ in self.clients]
        for name, column in self.metrics.items():
            finite = np.isfinite(column) if column.ndim == 1 else np.isfinite(column).all(axis=1)
            for i, value in zip(np.flatnonzero(finite).tolist(), column[finite].tolist(), strict=True):
                metrics[i][name] = tuple(value) if column.ndim > 1 else value
        return [
            ReplyRow(self.ticket, client, status, kept, self.late, self.at, numbers)
            for client, status, kept, numbers in zip(
                self.clients.tolist(), self.status.tolist(), self.kept.tolist(), metrics, strict=True
            )
        ]


_Layout = tuple[str, np.dtype[Any], np.dtype[Any]]  # how a column is stored, its type in the file and in memory


def _read_head(words: list[str]) -> tuple[int, list[str], list[_Layout]]:
    """Return the number of clients, the names of the metrics, and how each column is stored."""
    if words[0] != _MARK:  # of an earlier version
        count, *names = words
        return int(count), names, [(_FULL, d, d) for d in (_CLIENT, _STATUS, _KEPT, *[_METRIC] * len(names))]
    _, count, narrow, status, kept, *named = words
    layouts: list[_Layout] = [(_FULL, np.dtype(narrow), _CLIENT), (status, _STATUS, _STATUS), (kept, _KEPT, _KEPT)]
    layouts += [(word[:1], _HALF if word.startswith(_SHORT) else _METRIC, _METRIC) for word in named]
    return int(count), [word[1:] for word in named], layouts


def _encode_column(column: AnyArray) -> tuple[str, bytes]:
    """Return how a column is stored, and its bytes: every bit of it can be had back."""
    data = column.tobytes()
    size = column.dtype.itemsize
    if column.size and data == data[:size] * column.size:
        return _ALIKE, data[:size]
    if column.dtype == _METRIC:
        with np.errstate(over="ignore"):
            short = column.astype(_HALF)
        if short.astype(_METRIC).tobytes() == data:
            return _SHORT, short.tobytes()
    return _FULL, data


def newest(blocks: Iterable[ReplyBlock]) -> list[ReplyRow]:
    """Return one row per ticket and client, in this order; of several the last, as when an answer came late."""
    found = {(row.ticket, row.client): row for block in blocks for row in block.rows()}
    return [found[key] for key in sorted(found)]
