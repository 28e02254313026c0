"""Rows on their way into the result files, kept in memory between two checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray, FloatArray, IntArray
from fedcohort.simulate.store.results import arrow, clients_schema, rounds_schema

if TYPE_CHECKING:
    import pyarrow as pa


class RowBuffer:
    """Collects rows and hands them over as two Arrow tables."""

    def __init__(self) -> None:
        self._rounds: list[Mapping[str, Any]] = []
        self._clients: list[
            tuple[str, int, IntArray, AnyArray, BoolArray, FloatArray, FloatArray | None, FloatArray]
        ] = []

    def __len__(self) -> int:
        return len(self._rounds)

    def add_round(self, row: Mapping[str, Any]) -> None:
        """Add a run's round: one value per column of ``rounds``, None for null."""
        self._rounds.append(row)

    def add_clients(
        self,
        run: str,
        round_: int,
        clients: IntArray,
        *,
        status: AnyArray,
        kept: BoolArray,
        seconds: FloatArray,
        loss: FloatArray | None,
        weight: FloatArray,
    ) -> None:
        """Add the cohort of a run's round, one entry per client (k,); NaN losses become null."""
        self._clients.append((run, round_, clients, status, kept, seconds, loss, weight))

    def drain(self) -> tuple[pa.Table, pa.Table]:
        """Return the tables of everything added since the last time, and start anew."""
        tables = self._rounds_table(), self._clients_table()
        self._rounds, self._clients = [], []
        return tables

    def _rounds_table(self) -> pa.Table:
        pa = arrow()
        schema = rounds_schema()
        if not self._rounds:
            return schema.empty_table()
        columns = []
        for field in schema:
            values = [row[field.name] for row in self._rounds]
            if field.name == "run":
                columns.append(pa.array(values, pa.string()).dictionary_encode().cast(field.type))
            elif field.name in ("cohort", "kept"):
                columns.append(_lists(values, field.type))
            else:
                columns.append(pa.array(values, field.type))
        return pa.Table.from_arrays(columns, schema=schema)

    def _clients_table(self) -> pa.Table:
        pa = arrow()
        schema = clients_schema()
        if not self._clients:
            return schema.empty_table()
        lengths = [len(entry[2]) for entry in self._clients]
        losses = [np.full(n, np.nan) if e[6] is None else e[6] for e, n in zip(self._clients, lengths, strict=True)]
        runs = np.repeat(np.arange(len(self._clients)), lengths)
        names = pa.array([entry[0] for entry in self._clients], pa.string()).dictionary_encode()
        arrays = [
            names.take(pa.array(runs)).cast(schema.field("run").type),
            pa.array(np.repeat([entry[1] for entry in self._clients], lengths), pa.int32()),
            *(
                pa.array(np.concatenate([entry[i] for entry in self._clients]), schema.field(name).type)
                for i, name in ((2, "client"), (3, "status"), (4, "kept"), (5, "seconds"))
            ),
            pa.array(np.concatenate(losses).astype(np.float32), pa.float32(), from_pandas=True),
            pa.array(np.concatenate([entry[7] for entry in self._clients]), pa.float32()),
        ]
        return pa.Table.from_arrays(arrays, schema=schema)


def _lists(values: list[AnyArray], kind: pa.DataType) -> pa.Array:
    """Build a column of lists from one array per row."""
    pa = arrow()
    offsets = np.concatenate([[0], np.cumsum([len(v) for v in values])]).astype(np.int32)
    flat = np.concatenate(values) if values else np.zeros(0)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, kind.value_type))
