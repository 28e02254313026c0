"""The model and the strategy's memory after a round, in one safetensors file beside the journal.

The file is complete on disk before the journal names it, in the same transaction that closes the round. A crash between
the two leaves a file nobody names and a round that is trained again from the checkpoint before it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedcohort.arrays import AnyArray
from fedcohort.errors import JournalError
from fedcohort.flower.inner import Memory

_FORMAT = "fedcohort-flower-1"


class Checkpoints:
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
        self.keep = keep
        self._files: list[str] | None = None

    @staticmethod
    def name(rounds: int) -> str:
        """Return the file name of the checkpoint after ``rounds`` rounds."""
        return f"round-{rounds:06d}.safetensors"

    def exists(self, name: str) -> bool:
        """Whether the checkpoint is there."""
        return (self.folder / name).is_file()

    def save(self, rounds: int, arrays: ArrayRecord, memory: Memory) -> str:
        """Write the checkpoint after ``rounds`` rounds and return its name; it is durable when this returns."""
        plain, state = memory.save()
        tensors = {f"model/{key}": array.numpy() for key, array in arrays.items()}
        tensors.update({f"strategy/{key}": array for key, array in state.items()})
        header = {
            "format": _FORMAT,
            # safetensors sorts its tensors; Flower's strategies and torch go by the order of the record.
            "model": json.dumps(list(arrays)),
            "strategy": json.dumps(plain),
            "rounds": str(rounds),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        name = self.name(rounds)
        partial = self.folder / f"{name}.partial"
        with partial.open("wb") as file:
            file.write(save({key: np.ascontiguousarray(value) for key, value in tensors.items()}, header))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.folder / name)
        _sync_folder(self.folder)
        return name

    def load(self, name: str, memory: Memory | None = None) -> ArrayRecord:
        """Return the model of a checkpoint and put the strategy's memory back."""
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
        if header.get("format") != _FORMAT:
            raise JournalError(f"The checkpoint {path} is in the format {header.get('format')!r}, not {_FORMAT!r}.")
        if memory is not None:
            prefix = "strategy/"
            state = {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}
            plain: dict[str, Any] = json.loads(header["strategy"])
            memory.restore(plain, state)
        return ArrayRecord({key: Array(tensors[f"model/{key}"]) for key in json.loads(header["model"])})

    def prune(self, current: str) -> None:
        """Delete all but the newest ``keep`` checkpoints; the one the journal names always stays."""
        if self._files is None:  # those of earlier runs with the same journal
            self._files = sorted(file.name for file in self.folder.glob("round-*.safetensors"))
        elif current not in self._files:
            self._files.append(current)
        while len(self._files) > self.keep and self._files[0] != current:
            (self.folder / self._files.pop(0)).unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make the new name durable as well; not every system lets a folder be opened."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
