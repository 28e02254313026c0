"""Apache Arrow, which reads and writes tables: datasets of users, and results as Parquet files."""

from __future__ import annotations

from typing import Any

from fedcohort.core.errors import needs_extra


def arrow() -> Any:
    """Return pyarrow, or raise an error that names the extra to install."""
    with needs_extra("Tables and results need pyarrow.", "sim"):
        import pyarrow
        import pyarrow.csv
        import pyarrow.parquet
    return pyarrow
