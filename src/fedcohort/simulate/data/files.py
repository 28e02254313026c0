"""Read the file formats of datasets. A damaged or unexpected file raises DataError.

Nothing here runs code from a file. NumPy archives are read without pickles. CIFAR's Python batches are pickles, so they
are read with an unpickler that accepts only arrays, bytes, strings, numbers, lists and dicts.
"""

from __future__ import annotations

import gzip
import io
import math
import pickle
import struct
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedcohort.core.archives import DAMAGE, MAX_BYTES, array_shapes
from fedcohort.core.arrays import AnyArray
from fedcohort.core.errors import DataError

# Errors that the standard readers raise on damaged files.
_DAMAGE = (*DAMAGE, IndexError, AttributeError, tarfile.TarError, pickle.UnpicklingError)


@contextmanager
def file_errors(path: Path, kind: str) -> Iterator[None]:
    """Turn any error of a damaged file into a DataError that names the file and the problem."""
    try:
        yield
    except DataError:
        raise
    except _DAMAGE as error:
        detail = str(error) or type(error).__name__
        raise DataError(
            f"The file {path} cannot be read as {kind}: {detail}.",
            hint="the file is truncated, damaged or in another format; fetch it again",
        ) from error


def content_error(path: Path, problem: str) -> DataError:
    """Return the error for a readable file with the wrong content."""
    return DataError(f"The file {path} has unexpected content: {problem}.", hint="fetch it again")


def read_npz(path: Path, keys: Sequence[str]) -> dict[str, AnyArray]:
    """Return the named arrays of a NumPy archive."""
    with file_errors(path, "a NumPy archive"):
        # Reads only headers, and refuses what claims to be far larger than any of these datasets.
        names = array_shapes(path)
        missing = [key for key in keys if key not in names]
        if missing:
            raise content_error(path, f"it has no array {missing[0]!r}, only {', '.join(names) or 'none'}")
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in keys}


def read_idx(path: Path, dimensions: int) -> AnyArray:
    """Return the array of an idx file of unsigned bytes (MNIST's format), compressed or not.

    The header is two zero bytes, the type (8: unsigned byte), the number of dimensions, and the length of each as a
    big-endian 32-bit integer.
    """
    with file_errors(path, "an idx file"):
        # By its first bytes, because its name may be wrong.
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else open(path, "rb") as file:
            head = file.read(4)
            if head != bytes([0, 0, 8, dimensions]):
                raise content_error(
                    path, f"an idx file of {dimensions}-dimensional bytes does not begin with {head.hex(' ')}"
                )
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            body = file.read(math.prod(shape) + 1)  # a small .gz may unpack to more than the memory
        if len(body) != math.prod(shape):
            more = " or more" if len(body) > math.prod(shape) else ""
            raise content_error(
                path, f"its header promises {math.prod(shape):,} bytes for {shape}, but there are {len(body):,}{more}"
            )
        return np.frombuffer(body, dtype=np.uint8).reshape(shape)


def read_delta(path: Path) -> tuple[AnyArray, AnyArray]:
    """Return images (n, H, W, 3) and labels (n,) of an archive of two-dimensional differences.

    ``d`` (3, n, H, W) holds the planes G, R - G and B - G, each as differences along rows and columns, modulo 256.
    """
    arrays = read_npz(path, ["d", "y"])
    planes, labels = arrays["d"], arrays["y"]
    if planes.ndim != 4 or planes.dtype != np.uint8 or planes.shape[:2] != (3, *labels.shape):
        raise content_error(
            path, f"it must hold d (3, n, H, W) uint8 and y (n,), but it has {planes.shape} and {labels.shape}"
        )
    # Bytes wrap around in sums as they did in differences, so the sums are exact.
    planes[1:] += planes[0]
    np.add.accumulate(planes, axis=2, out=planes)
    np.add.accumulate(planes, axis=3, out=planes)
    return np.ascontiguousarray(planes[[1, 0, 2]].transpose(1, 2, 3, 0)), labels  # green is first in the file


class _ArrayUnpickler(pickle.Unpickler):
    """Builds only arrays and plain containers. Any other name in the pickle is an error.

    A pickle is a program, and the usual unpickler runs any function that it names. CIFAR's batches are published in no
    other Python format, so this reads them and allows only the names that NumPy's arrays need.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return _empty_array
        if module == "numpy" and name == "ndarray":
            return np.ndarray
        if module == "numpy" and name == "dtype":
            return np.dtype
        if module == "_codecs" and name == "encode":
            return _latin_bytes
        raise pickle.UnpicklingError(f"it names {module}.{name}, which arrays do not need")


def _empty_array(kind: type, shape: tuple[int, ...], dtype: Any) -> AnyArray:
    if kind is not np.ndarray:
        raise pickle.UnpicklingError(f"it builds a {kind!r} where an array should be")
    return np.empty(shape, dtype=np.dtype(dtype.decode() if isinstance(dtype, bytes) else dtype))


def _latin_bytes(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):  # other codecs decompress, or worse
        raise pickle.UnpicklingError(f"it needs the codec {encoding!r}")
    return text.encode("latin-1")


def read_pickled_arrays(content: bytes) -> dict[str, Any]:
    """Return the table in a ``.npy`` file that ``np.save`` wrote from a dict of arrays."""
    file = io.BytesIO(content)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("it is not a NumPy file of version 1.0")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if shape != () or dtype != np.dtype(object):
        raise ValueError(f"it must hold one object, but it holds {shape} of {dtype}")
    array = _ArrayUnpickler(file).load()
    table = array.item() if isinstance(array, np.ndarray) and array.shape == () else array
    if not isinstance(table, dict):
        raise ValueError(f"it must hold a table, but it holds a {type(table).__name__}")
    return table


def read_cifar_batch(path: Path, member: str | None) -> tuple[AnyArray, AnyArray]:
    """Return images (n, 32, 32, 3) and labels (n,) of one of CIFAR's Python batches.

    Parameters
    ----------
    path : Path
        The batch, or the tar archive that contains it.
    member : str or None
        Name of the file in the archive; None means that ``path`` is the batch.
    """
    with file_errors(path, "a CIFAR python batch"):
        if member is None:
            with open(path, "rb") as file:
                return _parse_batch(path, file)
        # Read from within: unpacking 170 MB beside it would surprise whoever owns the folder.
        with tarfile.open(path, "r:*") as archive:
            inner = archive.extractfile(member)
            if inner is None:
                raise content_error(path, f"it has no file {member}")
            return _parse_batch(path, io.BytesIO(inner.read(MAX_BYTES)))


def _parse_batch(path: Path, file: IO[bytes]) -> tuple[AnyArray, AnyArray]:
    # Python 2 wrote these files, so their keys and texts are bytes.
    batch = _ArrayUnpickler(file, encoding="bytes").load()
    if not isinstance(batch, dict):
        raise content_error(path, "it holds no table")
    named = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
    if "data" not in named or "labels" not in named:
        raise content_error(path, f"it has no 'data' and 'labels', only {', '.join(map(str, named))}")
    data, labels = np.asarray(named["data"]), np.asarray(named["labels"])
    if data.ndim != 2 or data.shape[1] != 3072 or data.dtype != np.uint8 or labels.shape != (len(data),):
        raise content_error(
            path, f"data must be (n, 3072) uint8 with n labels, but it is {data.shape} {data.dtype}, {labels.shape}"
        )
    return np.ascontiguousarray(data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), labels
