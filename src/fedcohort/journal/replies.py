"""What clients answered, kept by columns: one block for each report, however many clients it names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedcohort.arrays import AnyArray, BoolArray, FloatArray, IntArray
from fedcohort.journal.codec import pack_many, unpack_many

_METRIC = "metric:"


class ReplyRow(NamedTuple):
    """One recorded reply of a client to a cohort. A tuple, because there are as many as clients that train."""

    ticket: int
    client: int
    status: int
    kept: bool
    late: bool
    at: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class ReplyBlock:
    """The replies of one report.

    Attributes
    ----------
    ticket : int
    at : float
        When the report came, in seconds since 1970.
    late : bool
        Whether the round was closed already.
    clients : (r,) int array
    status : (r,) int8 array
    kept : (r,) bool array
    metrics : mapping of str to (r,) float array
        NaN for a client that gave no finite number.
    """

    ticket: int
    at: float
    late: bool
    clients: IntArray
    status: AnyArray
    kept: BoolArray
    metrics: Mapping[str, FloatArray]

    @classmethod
    def alike(cls, ticket: int, at: float, clients: IntArray, status: int, *, late: bool = False) -> ReplyBlock:
        """Return a block of clients that share one status and brought nothing."""
        count = len(clients)
        return cls(ticket, at, late, clients, np.full(count, status, np.int8), np.zeros(count, np.bool_), {})

    def encoded(self) -> bytes:
        """Return the columns as bytes."""
        columns = {"client": self.clients, "status": self.status, "kept": self.kept}
        return pack_many(columns | {_METRIC + name: column for name, column in self.metrics.items()})

    @classmethod
    def decoded(cls, ticket: int, at: float, late: bool, data: bytes) -> ReplyBlock:
        """Return the block whose columns :meth:`encoded` wrote."""
        columns = unpack_many(data)
        clients, status, kept = columns.pop("client"), columns.pop("status"), columns.pop("kept")
        metrics = {name.removeprefix(_METRIC): column for name, column in columns.items()}
        return cls(ticket, at, late, clients, status, kept, metrics)

    def rows(self) -> list[ReplyRow]:
        """Return the replies one by one, each with the numbers it has."""
        metrics: list[dict[str, float]] = [{} for _ in self.clients]
        for name, column in self.metrics.items():
            finite = np.isfinite(column)
            for i, value in zip(np.flatnonzero(finite).tolist(), column[finite].tolist(), strict=True):
                metrics[i][name] = value
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
