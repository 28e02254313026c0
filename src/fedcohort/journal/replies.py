"""What clients answered, kept by columns: one block for each report, however many clients it names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray, FloatArray, IntArray, freeze

_CLIENT, _STATUS, _KEPT, _METRIC = (np.dtype(code) for code in ("<i8", "i1", "?", "<f8"))


def _column_types(columns: Sequence[Any]) -> Iterator[tuple[Any, np.dtype[Any]]]:
    """Yield columns in the order they are stored, each with the type it is stored in."""
    return zip(columns, chain((_CLIENT, _STATUS, _KEPT), repeat(_METRIC)))  # noqa: B905  # the types never end


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
        """Return a block of clients that share one status and brought nothing."""
        count = len(clients)
        return cls(ticket, at, late, clients, np.full(count, status, np.int8), np.zeros(count, np.bool_), {})

    def encode(self) -> bytes:
        """Return the columns as bytes: a line with their length and the metrics' names, then one after the other.

        A metric of V numbers per client stands as ``name:V`` in that line, its rows one after the other.
        """
        named = (name if column.ndim == 1 else f"{name}:{column.shape[1]}" for name, column in self.metrics.items())
        head = " ".join([str(len(self.clients)), *named])
        columns = (self.clients, self.status, self.kept, *self.metrics.values())
        return b"".join([head.encode(), b"\n", *(c.astype(d, copy=False).tobytes() for c, d in _column_types(columns))])

    @classmethod
    def decode(cls, ticket: int, at: float, late: bool, data: bytes) -> ReplyBlock:
        """Return the block whose columns :meth:`encode` wrote."""
        head, _, _ = data.partition(b"\n")
        count, *names = head.decode().split(" ")
        found, offset = [], len(head) + 1
        for name, dtype in _column_types(("", "", "", *names)):
            _, vector, width = name.partition(":")
            shape = (int(count), int(width)) if vector else (int(count),)
            found.append(freeze(np.frombuffer(data, dtype, math.prod(shape), offset).reshape(shape)))
            offset += found[-1].nbytes
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


def newest(blocks: Iterable[ReplyBlock]) -> list[ReplyRow]:
    """Return one row per ticket and client, in this order; of several the last, as when an answer came late."""
    found = {(row.ticket, row.client): row for block in blocks for row in block.rows()}
    return [found[key] for key in sorted(found)]
