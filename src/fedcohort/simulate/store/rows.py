"""Rows on their way into ``rounds/``, kept in memory between two checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcohort.simulate.arrow import arrow
from fedcohort.simulate.store.parts import rounds_schema

if TYPE_CHECKING:
    import pyarrow as pa


class RowBuffer:
    """Collects the rows of rounds and hands them over as an Arrow table."""

    def __init__(self) -> None:
        self._rows: list[Mapping[str, Any]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a run's round: one value per column of ``rounds``, None for null."""
        self._rows.append(row)

    def drain(self) -> pa.Table:
        """Return the table of everything added since the last time, and start anew."""
        pa, schema = arrow(), rounds_schema()
        rows, self._rows = self._rows, []
        if not rows:
            return schema.empty_table()
        columns = []
        for field in schema:
            values = [row[field.name] for row in rows]
            if field.name == "run":
                # Each run's name once, and a number in every row.
                columns.append(pa.array(values, pa.string()).dictionary_encode().cast(field.type))
            elif pa.types.is_list(field.type):
                offsets = np.concatenate([[0], np.cumsum([len(value) for value in values])]).astype(np.int32)
                items = pa.array(np.concatenate(values), field.type.value_type)
                columns.append(pa.ListArray.from_arrays(pa.array(offsets), items))
            else:
                columns.append(pa.array(values, field.type))
        return pa.Table.from_arrays(columns, schema=schema)
