"""What clients answered, stored by columns: one block for each report, however many clients it covers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray, FloatArray, IntArray, freeze
from fedcohort.core.errors import JournalError
from fedcohort.journal.codec import narrowest

_CLIENT, _STATUS, _KEPT, _METRIC = (np.dtype(code) for code in ("<i8", "i1", "?", "<f8"))
_SINGLE = np.dtype("<f4")  # exact for what torch computed in single precision
_MARK = "r1"  # the format of a block
_MAX_EQUAL = 1 << 27  # numbers that one stored number may stand for; it limits what a file makes us allocate
_SAME, _SHORT, _FULL = "=48"  # how a column is stored: one value for all clients, as 32-bit numbers, as it is


class ReplyRow(NamedTuple):
    """One client's recorded reply to a cohort. A tuple for speed: there is one for each client that trains."""

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
        Whether the round was already closed.
    clients : (r,) int array
    status : (r,) int8 array
    kept : (r,) bool array
    metrics : mapping of str to (r,) or (r, V) float array
        NaN for a client that reported no finite numbers.
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
        """Return a block of clients that all have one status and reported nothing."""
        count = len(clients)
        return cls(ticket, at, late, clients, np.full(count, status, np.int8), np.zeros(count, np.bool_), {})

    @classmethod
    def join(cls, ticket: int, blocks: Sequence[ReplyBlock]) -> ReplyBlock:
        """Return several reports as one, in this order; NaN where a report lacks a metric that another has."""
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
        """Return the columns as bytes, without loss: a line that describes them, then one after the other.

        The line consists of a mark, the number of clients, the type of their indices, and how the status, kept and
        each metric are stored. A metric with V numbers per client is called ``name:V`` and stored row by row.
        """
        narrow = narrowest(self.clients)
        status, status_data = _encode_column(self.status.astype(_STATUS, copy=False))
        kept, kept_data = _encode_column(self.kept.astype(_KEPT, copy=False))
        words = [_MARK, str(len(self.clients)), narrow, status, kept]
        body = [self.clients.astype(narrow).tobytes(), status_data, kept_data]
        with np.errstate(over="ignore"):
            for name, column in self.metrics.items():
                form, data = _encode_column(column.astype(_METRIC, copy=False))
                words.append(form + (name if column.ndim == 1 else f"{name}:{column.shape[1]}"))
                body.append(data)
        return b"".join([" ".join(words).encode(), b"\n", *body])

    @classmethod
    def decode(cls, ticket: int, at: float, late: bool, data: bytes) -> ReplyBlock:
        """Return the block whose columns :meth:`encode` wrote."""
        head, _, _ = data.partition(b"\n")
        _, number, narrow, status_form, kept_form, *words = head.decode().split(" ")
        count, names = int(number), [word[1:] for word in words]
        # How each column is stored, and its type on disk and in memory.
        layouts = [(_FULL, np.dtype(narrow), _CLIENT), (status_form, _STATUS, _STATUS), (kept_form, _KEPT, _KEPT)]
        layouts += [(word[:1], _SINGLE if word.startswith(_SHORT) else _METRIC, _METRIC) for word in words]
        columns, offset = [], len(head) + 1
        for name, (form, stored, dtype) in zip(("", "", "", *names), layouts, strict=True):
            _, vector, width = name.partition(":")
            shape = (count, int(width)) if vector else (count,)
            if form == _SAME and math.prod(shape) > _MAX_EQUAL:
                raise JournalError(f"A reply to ticket {ticket} claims {math.prod(shape):,} equal numbers.")
            values = np.frombuffer(data, stored, 1 if form == _SAME else math.prod(shape), offset)
            offset += values.nbytes
            column = np.full(shape, values[0]) if form == _SAME else values.reshape(shape)
            columns.append(freeze(column.astype(dtype, copy=False)))
        clients, status, kept, *numbers = columns
        metrics = {name.partition(":")[0]: column for name, column in zip(names, numbers, strict=True)}
        return cls(ticket, at, late, clients, status, kept, metrics)

    def rows(self) -> list[ReplyRow]:
        """Return the replies one by one, each with its finite metrics."""
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


def _encode_column(column: AnyArray) -> tuple[str, bytes]:
    """Return how a column is stored, and its bytes, from which every bit can be restored."""
    data = column.tobytes()
    size = column.dtype.itemsize
    if column.size and data == data[:size] * column.size:
        return _SAME, data[:size]
    if column.dtype == _METRIC:
        short = column.astype(_SINGLE)
        if short.astype(_METRIC).tobytes() == data:
            return _SHORT, short.tobytes()
    return _FULL, data


def newest(blocks: Iterable[ReplyBlock]) -> list[ReplyRow]:
    """Return the last row of each ticket and client, sorted; a late answer replaces the missing one."""
    rows = {(row.ticket, row.client): row for block in blocks for row in block.rows()}
    return [rows[key] for key in sorted(rows)]
