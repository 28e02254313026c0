"""A model and what belongs to it after a round, in one safetensors file beside the journal.

The file is complete on disk before the journal names it, in the same transaction that closes the round. A crash between
the two leaves a file nobody names and a round that is trained again from the checkpoint before it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Container, Mapping
from io import FileIO
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedcohort.core.arrays import AnyArray
from fedcohort.core.errors import JournalError
from fedcohort.core.files import sync_folder

# What safetensors and NumPy both have; other types are kept as bytes.
_TYPES = frozenset(
    {"bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"}
)


class CheckpointFiles:
    """Checkpoint files of one journal.

    Parameters
    ----------
    folder : path
        Where they lie; made when missing.
    keep : int
        How many of the newest stay.
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        self.folder = Path(folder)
        self._folder = os.fspath(self.folder)
        self.keep = keep
        self._files: list[str] | None = None

    @staticmethod
    def name(rounds: int) -> str:
        """Return the file name of the checkpoint after ``rounds`` rounds."""
        return f"after-{rounds:06d}.safetensors"

    def exists(self, name: str) -> bool:
        """Whether the checkpoint is there."""
        return (self.folder / name).is_file()

    def write(self, rounds: int, tensors: Mapping[str, AnyArray], header: Mapping[str, str]) -> str:
        """Write the checkpoint after ``rounds`` rounds and return its name; it is durable when this returns."""
        # bfloat16, for example, which NumPy does not know; safetensors would refuse it.
        odd = {key: tensor for key, tensor in tensors.items() if not _has_type(tensor)}
        plain = {**tensors, **{key: np.frombuffer(tensor.tobytes(), np.uint8) for key, tensor in odd.items()}}
        described = {
            **header,
            "bytes": json.dumps({key: [tensor.dtype.str, tensor.shape] for key, tensor in odd.items()}),
            "rounds": str(rounds),
        }
        name = self.name(rounds)
        partial = self._path(f"{name}.partial")
        rest = memoryview(save(plain, described))
        with self._create(partial) as file:
            while rest:  # a single call may take less than all
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        # Under its name only when it is whole: the journal may name it, and a restart reads it.
        os.replace(partial, self._path(name))
        sync_folder(self._folder)
        return name

    def read(self, name: str, *formats: str) -> tuple[dict[str, str], dict[str, AnyArray]]:
        """Return the header and the tensors of a checkpoint in one of the ``formats``, of which the first is ours."""
        path = self.folder / name
        try:
            with safe_open(path, framework="numpy") as file:
                header: dict[str, str] = file.metadata() or {}
                tensors: dict[str, AnyArray] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise JournalError(
                f"The checkpoint {path}, which the journal names, cannot be read: {error}.",
                hint="bring the file back from a backup, or start a new journal",
            ) from error
        if header.get("format") not in formats:
            raise JournalError(f"The checkpoint {path} is in the format {header.get('format')!r}, not {formats[0]!r}.")
        for key, (dtype, shape) in json.loads(header.get("bytes", "{}")).items():
            tensors[key] = np.frombuffer(tensors[key].tobytes(), np.dtype(dtype)).reshape(shape)
        return header, tensors

    def _path(self, name: str) -> str:
        return f"{self._folder}{os.sep}{name}"

    def _create(self, path: str) -> FileIO:
        """Open a new file, in a new folder if need be."""
        try:
            return open(path, "wb", buffering=0)
        except FileNotFoundError:
            self.folder.mkdir(parents=True, exist_ok=True)
            return open(path, "wb", buffering=0)

    def prune(self, current: str, needed: Container[str] = ()) -> None:
        """Delete all but the newest ``keep`` checkpoints; the one the journal names and those ``needed`` stay."""
        if self._files is None:  # those of earlier runs with the same journal
            self._files = sorted(file.name for file in self.folder.glob("after-*.safetensors"))
        elif current not in self._files:
            self._files.append(current)
        for file in self._files[: -self.keep]:
            if file != current and file not in needed:
                self._files.remove(file)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path(file))


def _has_type(tensor: AnyArray) -> bool:
    """Whether a checkpoint can hold an array as it is."""
    return tensor.dtype.name in _TYPES and (tensor.dtype.isnative or tensor.dtype.itemsize == 1)
