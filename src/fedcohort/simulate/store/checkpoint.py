"""Checkpoints: one ``.npz`` file per lock-step group and round, with arrays and some JSON, without pickle.

A checkpoint and the journals of its runs are one atomic step. Rows and journals are written first and the checkpoint
last. Rounds count once the checkpoint's file exists. It holds the :class:`~fedcohort.journal.Savepoint` of every run's
session. If the machine dies or the disk fills up before that, rows and journals are reset to the previous checkpoint. A
group without a checkpoint starts over.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.core.archives import DAMAGE
from fedcohort.core.arrays import AnyArray
from fedcohort.core.files import open_file
from fedcohort.simulate.store.parts import ResultsError
from fedcohort.simulate.store.writer import write_atomically

_SHARE = 0.05  # the most time spent on checkpoints, unless every round has one; large models are written less often
_NAME = re.compile(r"group-(\d+)-round-(\d+)\.npz")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """One lock-step group between two rounds.

    Attributes
    ----------
    round : int
        The next round to play.
    facts : dict
        Plain values that JSON can represent.
    arrays : dict of str to array
    """

    round: int
    facts: dict[str, Any]
    arrays: Mapping[str, AnyArray]

    def to_bytes(self) -> bytes:
        """Pack everything into the bytes of an ``.npz`` file."""
        buffer = io.BytesIO()
        # JSON inside the archive instead of beside it: one file appears at once, two could disagree after a crash.
        head = np.frombuffer(json.dumps({"round": self.round, "facts": self.facts}).encode(), np.uint8)
        np.savez(buffer, allow_pickle=False, **{"head.json": head}, **self.arrays)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "checkpoint") -> Checkpoint:
        """Unpack :meth:`to_bytes`."""
        try:
            # A pickle could run code of whoever wrote the file.
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                head = json.loads(arrays["head.json"].tobytes())
                return cls(
                    int(head["round"]), head["facts"], {key: arrays[key] for key in arrays.files if key != "head.json"}
                )
        except (*DAMAGE, RecursionError) as error:
            raise ResultsError(f"The checkpoint {source} is damaged: {error}.") from error


def save(folder: Path, group: int, data: bytes, round_: int) -> None:
    """Write a packed checkpoint, then remove the group's older ones. Only now do its rounds count."""
    write_atomically(folder / f"group-{group}-round-{round_}.npz", data)
    prune(folder, group)


def pause_after(took: float, pause: float) -> float:
    """Return how many seconds to wait before the next checkpoint.

    Parameters
    ----------
    took : float
        Seconds that the last checkpoint took.
    pause : float
        Configured seconds between two checkpoints; 0 means after every round.
    """
    # A large model takes long to write; rarer checkpoints keep the share of time, and lose more rounds in a crash.
    return max(pause, took / _SHARE) if pause else 0.0


def prune(folder: Path, group: int) -> None:
    """Remove all of the group's checkpoints except the last."""
    for path in list(_by_round(folder, group).values())[:-1]:
        path.unlink(missing_ok=True)


def _by_round(folder: Path, group: int) -> dict[int, Path]:
    """Return the group's checkpoints by round, ascending."""
    paths = folder.glob(f"group-{group}-round-*.npz")
    return dict(sorted((int(match[2]), path) for path in paths if (match := _NAME.fullmatch(path.name))))


def newest(folder: Path, group: int) -> Path | None:
    """Return the group's last checkpoint, or None if it has none."""
    return next(reversed(_by_round(folder, group).values()), None)


def all_newest(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the facts of the last checkpoint of each group that has one."""
    numbers = sorted({int(match[1]) for path in folder.glob("*.npz") if (match := _NAME.fullmatch(path.name))})
    return {number: read_facts(path) for number in numbers if (path := newest(folder, number)) is not None}


def has_ended(folder: Path, group: int, rounds: Mapping[str, int]) -> bool:
    """Whether all runs of the group have ended in its last checkpoint.

    Parameters
    ----------
    rounds : mapping of run id to int
        Planned rounds of each run. A run that has fewer and was not stopped has not ended.
    """
    path = newest(folder, group)
    return path is not None and not any(
        has_rounds_left(run, rounds[name]) for name, run in read_facts(path)["runs"].items()
    )


def has_rounds_left(run: Mapping[str, Any], rounds: int) -> bool:
    """Whether a run with these facts has not yet completed ``rounds`` rounds."""
    return bool(run["state"] == "running" or (run["state"] == "finished" and run["round"] < rounds))


def read_facts(path: Path) -> dict[str, Any]:
    """Return a checkpoint's facts without its arrays, which may be gigabytes of models."""
    try:
        with open_file(path) as file, np.load(file, allow_pickle=False) as arrays:
            facts: dict[str, Any] = json.loads(arrays["head.json"].tobytes())["facts"]
            return facts
    except (*DAMAGE, RecursionError) as error:
        raise ResultsError(f"The checkpoint {path} is damaged or cannot be read: {error}.") from error
