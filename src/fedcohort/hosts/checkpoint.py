"""The model after a round, and what belongs to it, in one safetensors file next to the journal.

The file is complete on disk before the transaction that closes the round names it in the journal. After a crash between
the two, the file stays unused and the round is trained again from the previous checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedcohort.core.arrays import AnyArray
from fedcohort.core.errors import JournalError
from fedcohort.core.files import sync_folder
from fedcohort.core.version import __version__

# The types that both safetensors and NumPy have; arrays of other types are stored as bytes.
_TYPES = frozenset(
    {"bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"}
)


class CheckpointFiles:
    """The checkpoint files of one journal.

    Parameters
    ----------
    folder : path
        Their folder; it is created if it does not exist.
    keep : int
        How many of the newest files to keep.
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self._files: list[str] | None = None

    @staticmethod
    def name(rounds: int) -> str:
        """Return the file name of the checkpoint after ``rounds`` rounds."""
        return f"after-{rounds:06d}.safetensors"

    def exists(self, name: str) -> bool:
        """Whether the checkpoint exists."""
        return (self.folder / name).is_file()

    def write(self, rounds: int, tensors: Mapping[str, AnyArray], header: Mapping[str, str]) -> str:
        """Write the checkpoint after ``rounds`` rounds and return its name; it is durable when this returns."""
        # Such as bfloat16, which NumPy does not have and safetensors would refuse.
        unsupported = {
            key: tensor
            for key, tensor in tensors.items()
            if tensor.dtype.name not in _TYPES or not (tensor.dtype.isnative or tensor.dtype.itemsize == 1)
        }
        as_bytes = {key: np.frombuffer(tensor.tobytes(), np.uint8) for key, tensor in unsupported.items()}
        metadata = {
            **header,
            "bytes": json.dumps({key: [tensor.dtype.str, tensor.shape] for key, tensor in unsupported.items()}),
            "rounds": str(rounds),
        }
        name = self.name(rounds)
        partial = self.folder / f"{name}.partial"
        rest = memoryview(save({**tensors, **as_bytes}, metadata))
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb", buffering=0) as file:
            while rest:  # one call may write only a part
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        # The file gets its name only when it is complete.
        os.replace(partial, self.folder / name)
        sync_folder(self.folder)
        return name

    def read(self, name: str, expected: str) -> tuple[dict[str, str], dict[str, AnyArray]]:
        """Return the header and the tensors of a checkpoint in the ``expected`` format."""
        path = self.folder / name
        try:
            with safe_open(path, framework="numpy") as file:
                header: dict[str, str] = file.metadata() or {}
                tensors: dict[str, AnyArray] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise JournalError(
                f"The checkpoint {path}, which the journal names, cannot be read: {error}.",
                hint="restore the file from a backup, or start a new journal",
            ) from error
        if header.get("format") != expected:
            raise JournalError(
                f"The checkpoint {path} has format {header.get('format')!r}; this fedcohort ({__version__}) needs "
                f"{expected!r}.",
                hint="continue with the version of fedcohort that wrote it, or start a new journal",
            )
        for key, (dtype, shape) in json.loads(header["bytes"]).items():
            tensors[key] = np.frombuffer(tensors[key].tobytes(), np.dtype(dtype)).reshape(shape)
        return header, tensors

    def prune(self, current: str, needed: Container[str] = ()) -> None:
        """Delete all but the newest ``keep`` checkpoints, the ``current`` one and those ``needed``."""
        if self._files is None:  # includes files of earlier runs with the same journal
            self._files = sorted(file.name for file in self.folder.glob("after-*.safetensors"))
        elif current not in self._files:
            self._files.append(current)
        for file in self._files[: -self.keep]:
            if file != current and file not in needed:
                self._files.remove(file)
                (self.folder / file).unlink(missing_ok=True)
