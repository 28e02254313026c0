"""Check the sizes that untrusted archives of arrays (``.npz``) and Parquet tables claim before reading any data.

A few kilobytes of zip file can unpack to terabytes. The zip directory and the header of each array both state a size,
and reading those is cheap. So does the footer of a Parquet file.
"""

from __future__ import annotations

import math
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from fedcohort.core.arrays import AnyArray
from fedcohort.core.files import open_file

MAX_BYTES = 2 << 30
"""Largest total size of an archive, unpacked: twice the label counts of ten million clients with ten classes."""
DAMAGE = (ValueError, KeyError, TypeError, OverflowError, OSError, EOFError, RuntimeError, NotImplementedError,
          MemoryError, SyntaxError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error)  # fmt: skip
"""Errors that numpy may raise when it reads a damaged archive or array."""


class ArchiveError(ValueError):
    """An archive is damaged, too large, or holds anything but plain arrays."""


def array_shapes(path: Path, most: int = MAX_BYTES) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array in an archive; only headers are read.

    Parameters
    ----------
    most : int
        Largest total size in bytes, unpacked.

    Raises
    ------
    ArchiveError
        Also if the arrays and the directory contradict each other.
    FileNotFoundError
    """
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            total = sum(entry.file_size for entry in archive.infolist())
            if total > most:
                raise ArchiveError(f"it claims to hold {total / 2**30:.3g} GiB, more than {most / 2**30:.3g}")
            return {entry.filename.removesuffix(".npy"): _shape(archive, entry) for entry in archive.infolist()}
    except (ArchiveError, FileNotFoundError):
        raise
    except DAMAGE as error:
        raise ArchiveError(f"it is not an archive of arrays: {error or type(error).__name__}") from error


def _shape(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> tuple[int, ...]:
    with archive.open(entry) as file:
        version = npy.read_magic(file)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if read is None:
            raise ArchiveError(f"{entry.filename!r} has an unknown version of the format")
        shape, _, dtype = read(file)
        # A product of NumPy integers could overflow if an attacker chose the shape.
        claimed = math.prod(int(length) for length in shape) * dtype.itemsize
        if dtype.hasobject or min(shape, default=0) < 0:
            raise ArchiveError(f"{entry.filename!r} is not a plain array")
        actual = entry.file_size - file.tell()
        if claimed != actual:
            raise ArchiveError(f"{entry.filename!r} claims to have {claimed} bytes but has {actual}")
    return tuple(int(length) for length in shape)


def read_arrays(path: Path, most: int = MAX_BYTES) -> dict[str, AnyArray]:
    """Return the arrays of an archive, after the checks of :func:`array_shapes`."""
    names = array_shapes(path, most)
    try:
        with open_file(path) as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except FileNotFoundError:
        raise
    except DAMAGE as error:
        raise ArchiveError(f"it is damaged: {error or type(error).__name__}") from error


def check_parquet(metadata: Any, most: int = MAX_BYTES) -> None:
    """Refuse a Parquet file whose ``metadata`` claim more than ``most`` bytes, at eight bytes for each value.

    Raises
    ------
    ArchiveError
    """
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    columns = [group.column(j) for group in groups for j in range(group.num_columns)]
    # Lists have more values than rows; long texts more bytes than values.
    total = max(8 * sum(c.num_values for c in columns), sum(c.total_uncompressed_size for c in columns))
    if total > most:
        raise ArchiveError(
            f"it claims to hold {total / 2**30:.3g} GiB in {metadata.num_rows:,} rows, more than {most / 2**30:.3g} GiB"
        )
