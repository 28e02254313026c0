"""Archives of arrays (``.npz``) from somebody else: judged by what they say they hold before anything is read.

A few kilobytes of a zip file can say that they are terabytes. The directory of the file and the header in front of each
array tell both sizes, and reading these costs nothing.
"""

from __future__ import annotations

import math
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from fedcohort.core.arrays import AnyArray
from fedcohort.core.files import open_file

MAX_BYTES = 2 << 30
"""What an archive may hold in all, unpacked: twice the label counts of ten million clients with ten classes."""
DAMAGE = (ValueError, KeyError, TypeError, OverflowError, OSError, EOFError, RuntimeError, NotImplementedError,
          MemoryError, SyntaxError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error)  # fmt: skip
"""What numpy may raise when it reads a damaged archive or array."""


class ArchiveError(ValueError):
    """An archive is damaged, holds something else than plain arrays, or says that it holds too much."""


def array_shapes(path: Path, most: int = MAX_BYTES) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array of an archive, from the headers alone.

    Parameters
    ----------
    path : Path
    most : int
        Bytes it may hold in all, unpacked.

    Raises
    ------
    ArchiveError
        Also when arrays and directory contradict each other.
    FileNotFoundError
    """
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            total = sum(entry.file_size for entry in archive.infolist())
            if total > most:
                raise ArchiveError(f"it says that it holds {total / 2**30:.3g} GiB, where {most / 2**30:.3g} are read")
            return {entry.filename.removesuffix(".npy"): _shape(archive, entry) for entry in archive.infolist()}
    except (ArchiveError, FileNotFoundError):
        raise
    except DAMAGE as error:
        raise ArchiveError(f"it is no archive of arrays: {error or type(error).__name__}") from error


def _shape(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> tuple[int, ...]:
    with archive.open(entry) as file:
        version = npy.read_magic(file)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if read is None:
            raise ArchiveError(f"{entry.filename!r} is of an unknown version of the format")
        shape, _, dtype = read(file)
        told = math.prod(int(length) for length in shape) * dtype.itemsize
        if dtype.hasobject or min(shape, default=0) < 0:
            raise ArchiveError(f"{entry.filename!r} is no plain array")
        if told != entry.file_size - file.tell():
            held = entry.file_size - file.tell()
            raise ArchiveError(f"{entry.filename!r} says that it has {told} bytes, and has {held}")
    return tuple(int(length) for length in shape)


def read_arrays(path: Path, most: int = MAX_BYTES) -> dict[str, AnyArray]:
    """Return every array of an archive that :func:`array_shapes` accepts."""
    names = array_shapes(path, most)
    try:
        with open_file(path) as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except FileNotFoundError:
        raise
    except DAMAGE as error:
        raise ArchiveError(f"it is damaged: {error or type(error).__name__}") from error
