"""The table of rounds on disk: its columns, and its parts as Parquet files with a digest each."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcohort.core.archives import check_parquet
from fedcohort.core.arrays import AnyArray
from fedcohort.core.errors import FedcohortError
from fedcohort.core.files import read_file
from fedcohort.simulate.arrow import arrow

if TYPE_CHECKING:
    import pyarrow as pa

COVERS = b"fedcohort.parts"
_PART = re.compile(r"part-(\d{5,})\.parquet")
_DIGEST = "fedcohort.sha256"
_BLANK = "0" * 64
_RESTORE = "restore it from a copy, or run the experiment again with another --out"


class ResultsError(FedcohortError, OSError):
    """An experiment's directory is missing, empty, half-written, foreign, of another format, or cannot be written."""

    __str__ = FedcohortError.__str__


def rounds_schema() -> pa.Schema:
    """Return the columns of ``rounds/``, which has one row per run and round."""
    pa = arrow()
    text = pa.dictionary(pa.int32(), pa.string())
    columns = [("run", text), ("round", pa.int32()), ("accuracy", pa.float32()), ("loss", pa.float32())]
    columns += [("metric", pa.float64())]  # for a task that is not judged by accuracy; config.toml names the metric
    columns += [(name, pa.float64()) for name in ("qcid", "seconds", "clock")]
    columns += [(name, pa.int64()) for name in ("bytes_down", "bytes_up", "query_bytes_down", "query_bytes_up")]
    columns += [(name, pa.float64()) for name in ("client_seconds", "query_client_seconds", "query_seconds")]
    columns += [("available", pa.int32()), ("selection_seconds", pa.float64())]
    # A value for each client of the cohort, in the order of the journal's cohort:
    columns += [(name, pa.list_(pa.float32())) for name in ("durations", "weights")]
    # In asynchronous runs, the tickets of the answers that make up the model; the weights are theirs.
    columns += [("answers", pa.list_(pa.int32()))]
    # For evaluated rounds, what the accuracy hides; groups are in the order of federation-KEY.npz:
    columns += [("groups", pa.list_(pa.float32()))]
    columns += [(name, pa.float32()) for name in ("worst_group", "worst_tenth", "client_spread", "jain")]
    columns += [("longest_absence", pa.int32()), ("asked", pa.int64())]
    columns += [(name, pa.float32()) for name in ("macro_f1", "worst_recall")]
    return pa.schema(columns)


def to_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return a run's rounds, each with a value for every column and None for null, as a table."""
    pa, schema = arrow(), rounds_schema()
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


def part_files(folder: Path) -> dict[int, Path]:
    """Return the part files of a table by number, ascending."""
    files = {int(m[1]): p for p in folder.glob("part-*.parquet") if (m := _PART.fullmatch(p.name))}
    return dict(sorted(files.items()))


def next_part(folder: Path) -> int:
    """Return the first number that no part has, or had before parts were merged into the first."""
    parts = part_files(folder)
    covered = _parts_covered(read_part(parts[0])) if 0 in parts else 0
    return max(covered, 1 + max(parts, default=-1))


def _parts_covered(table: pa.Table) -> int:
    """Return how many parts were merged into part 0; 0 if none were."""
    return int((table.schema.metadata or {}).get(COVERS, b"0"))


def run_names(table: pa.Table) -> list[str]:
    """Return the names of the runs in a table."""
    column = table.column("run").unify_dictionaries()
    return column.chunk(0).dictionary.to_pylist() if column.num_chunks else []


def run_codes(table: pa.Table) -> AnyArray:
    """Return, for each row, the position of its run in :func:`run_names`."""
    column = table.column("run").unify_dictionaries()
    codes = [chunk.indices.to_numpy(zero_copy_only=False) for chunk in column.chunks]
    return np.concatenate(codes) if codes else np.zeros(0, np.int64)


def part_bytes(table: pa.Table) -> bytes:
    """Return a table as a Parquet file with a digest of its other bytes, which :func:`read_part` checks."""
    pa = arrow()
    sink = pa.BufferOutputStream()
    with pa.parquet.ParquetWriter(sink, table.schema, compression="zstd") as file:
        file.write_table(table)
        file.add_key_value_metadata({_DIGEST: _BLANK})
    # The digest is computed with zeros in its place and then replaces them, so no offset in the file changes.
    data: bytes = sink.getvalue().to_pybytes()
    head, _, tail = data.rpartition(_BLANK.encode())
    return head + hashlib.sha256(data).hexdigest().encode() + tail


def read_part(path: Path) -> pa.Table:
    """Read a part, or raise :class:`ResultsError` if it is damaged."""
    pa = arrow()
    try:
        data = read_file(path)
        file = pa.parquet.ParquetFile(pa.BufferReader(data))
        digest = (file.metadata.metadata or {}).get(_DIGEST.encode())
        if digest is None or hashlib.sha256(data.replace(digest, _BLANK.encode())).hexdigest() != digest.decode():
            raise ValueError("it was changed after it was written")
        check_parquet(file.metadata)
        # Threads that Arrow starts may abort the process when it ends.
        return file.read(use_threads=False)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise ResultsError(f"{path} is damaged: {str(error).rstrip('.')}.", hint=_RESTORE) from error


def read_parts(parts: Mapping[int, Path], read: Callable[[Path], pa.Table] = read_part) -> pa.Table:
    """Read the parts in order. After an interrupted compaction, part 0 already holds some of the others."""
    pa, schema = arrow(), rounds_schema()
    tables, covered = [], 0
    for part, path in parts.items():
        if 0 < part < covered:
            continue
        table = read(path)
        if part == 0:
            covered = _parts_covered(table)
        for column in schema:  # what was not measured when the part was written is null
            if column.name not in table.column_names:
                table = table.append_column(column, pa.nulls(len(table), column.type))
        tables.append(table.select(schema.names).replace_schema_metadata(None))
    return pa.concat_tables(tables)
