"""Write an experiment's directory, which :mod:`fedcohort.simulate.store.results` describes and reads.

Files appear completely or not at all: each is written under a temporary name and then moved into place.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcohort.core.arrays import AnyArray
from fedcohort.core.files import read_file, refuse_links, write_file
from fedcohort.journal.lock import try_lock
from fedcohort.simulate.arrow import arrow
from fedcohort.simulate.store.facts import FederationFacts
from fedcohort.simulate.store.parts import (
    COVERS,
    ResultsError,
    next_part,
    part_bytes,
    part_files,
    read_part,
    read_parts,
    run_codes,
    run_names,
)
from fedcohort.simulate.store.results import FOLDERS, FORMAT_VERSION, RunInfo, is_partial_creation

if TYPE_CHECKING:
    import pyarrow as pa

WORKERS_SECONDS = 60


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of the file system into a clear :class:`ResultsError`."""
    try:
        yield
    except ResultsError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResultsError(
                f"The disk is full: {path} could not be written. Everything written earlier is intact.",
                hint="free some space, then continue with --resume",
            ) from error
        raise ResultsError(
            f"{path} could not be written: {error.strerror or error}.", hint="name a folder of your own with --out"
        ) from error


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file of an experiment; see :func:`fedcohort.core.files.write_file`."""
    with disk_errors(path):
        write_file(path, data, durable=durable)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Write JSON atomically; NaN is an error."""

    def plain(value: Any) -> Any:  # tolist also makes one number of NumPy's a plain one
        return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else str(value)

    write_atomically(
        path, (json.dumps(value, indent=1, allow_nan=False, default=plain) + "\n").encode(), durable=durable
    )


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to an experiment's directory, until this process ends or dies."""
    try:
        import fcntl  # noqa: F401
    except ImportError:  # Windows has no such locks
        yield
        return
    with disk_errors(folder / ".lock"):
        handle = refuse_links(str(folder / ".lock"), os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK)
    with os.fdopen(handle, "a"):
        if not try_lock(handle):
            raise ResultsError(
                f"Another process is working on the experiment in {folder}.", hint="wait for it, or stop it first"
            )
        _wait_for_workers(folder)
        yield


@contextmanager
def share_lock(folder: Path) -> Iterator[None]:
    """Mark this process as a worker of the process that holds the lock, which it may outlive by a round."""
    import fcntl

    # Shared by all workers and not the driver's own lock: a worker may still write a journal when the driver is dead.
    with open(folder / ".workers", "a", opener=refuse_links) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _wait_for_workers(folder: Path) -> None:
    """Wait until the workers of an earlier process that was killed have ended."""
    import fcntl

    if not (folder / ".workers").exists():
        return
    with open(folder / ".workers", "a", opener=refuse_links) as file:
        for _ in range(WORKERS_SECONDS * 10 + 1):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                time.sleep(0.1)
    raise ResultsError(
        f"Processes of an earlier run are still working on the experiment in {folder}.",
        hint="wait for them, or end them: python -m fedcohort.simulate.processes",
    )


def _digest(config: bytes) -> str:
    return hashlib.sha256(config).hexdigest()


def check_continuable(path: Path, meta: Mapping[str, Any]) -> None:
    """Refuse an experiment whose configuration has changed since its runs began."""
    file = path / "config.toml"
    try:
        digest = _digest(read_file(file))
    except OSError as error:
        raise ResultsError(f"{file} cannot be read: {error.strerror or error}.") from error
    if digest not in meta.get("config", ()):
        raise ResultsError(
            f"{file} was changed after the experiment began, so its runs would no longer be comparable.",
            hint="restore it; to add seeds, rounds or selectors use 'fedcohort extend', and for a new experiment "
            "'fedcohort run'",
        )


class ExperimentWriter:
    """Writes an experiment's directory.

    Parameters
    ----------
    path : Path
        A directory that :meth:`create` returned, or one to resume.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._next = next_part(self.path / "rounds")

    @classmethod
    def create(cls, path: Path) -> ExperimentWriter:
        """Create the directory of a new experiment, which :meth:`begin` completes.

        A directory that is not empty is refused, unless it only holds files of a creation that was interrupted. These
        are removed.
        """
        if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not is_partial_creation(path))):
            raise ResultsError(
                f"{path} already exists and is not empty.",
                hint="choose another --out, or continue that experiment with --resume",
            )
        with disk_errors(path):
            # Folders before any file: this tells an interrupted creation from a folder of somebody else.
            for folder in FOLDERS:
                (path / folder).mkdir(parents=True, exist_ok=True)
            for file in path.iterdir():
                if file.is_file():
                    file.unlink()
        return cls(path)

    def begin(self, config: str, meta: Mapping[str, Any]) -> None:
        """Write config.toml and then meta.json, which completes the creation."""
        write_atomically(self.path / "config.toml", config.encode())
        write_json(self.path / "meta.json", {"format": FORMAT_VERSION, **meta, "config": [_digest(config.encode())]})

    def tidy(self) -> None:
        """Remove temporary files of an earlier process that died."""
        for folder in (self.path, *(self.path / name for name in FOLDERS)):
            for file in folder.glob(".*.tmp"):
                file.unlink(missing_ok=True)

    def extend(self, config: str, baseline: str, command: str) -> None:
        """Replace the configuration by one with more runs or rounds."""
        meta = json.loads((self.path / "meta.json").read_text())
        old = _digest((self.path / "config.toml").read_bytes())
        meta |= {"config": [old, _digest(config.encode())], "baseline": baseline}
        meta["command"] = " && ".join(text for text in (meta.get("command", ""), command) if text)
        # meta.json comes first and has both digests, so that it matches whichever configuration a crash leaves.
        write_json(self.path / "meta.json", meta)
        write_atomically(self.path / "config.toml", config.encode())

    def status(self, *, durable: bool = True, **values: Any) -> None:
        """Replace status.json."""
        write_json(self.path / "status.json", values, durable=durable)

    def runs(self, runs: Sequence[RunInfo], *, durable: bool = True) -> None:
        """Replace runs.json."""
        write_json(self.path / "runs.json", [vars(run) for run in runs], durable=durable)

    def has_federation(self, key: str) -> bool:
        """Whether a federation's facts have been written."""
        return (self.path / f"federation-{key}.npz").exists()

    def federation(self, key: str, facts: FederationFacts) -> None:
        """Write one federation's facts."""
        arrays: dict[str, AnyArray] = {
            "label_counts": facts.label_counts,
            "true_counts": facts.true_counts,
            "sizes": facts.sizes,
            "noise_rate": facts.noise_rate,
        }
        if facts.names is not None:
            arrays["names"] = np.array(facts.names)
        if facts.groups is not None:
            arrays |= {"groups": facts.groups, "group_names": np.array(facts.group_names)}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **arrays)
        write_atomically(self.path / f"federation-{key}.npz", buffer.getvalue())

    def append(self, rounds: pa.Table) -> None:
        """Write another part of the table of rounds."""
        if len(rounds):
            self._write(self._next, rounds)
            self._next += 1

    def _write(self, part: int, table: pa.Table) -> None:
        write_atomically(self.path / "rounds" / f"part-{part:05d}.parquet", part_bytes(table))

    def forget(self, resume_at: Mapping[str, int]) -> None:
        """Remove the rows of rounds that resumed runs are going to repeat.

        Parameters
        ----------
        resume_at : mapping of run id to the round it continues with
        """
        pa = arrow()
        for part, path in part_files(self.path / "rounds").items():
            table = read_part(path)
            first = np.array([resume_at.get(name, np.iinfo(np.int32).max) for name in run_names(table)], np.int64)
            keep = table.column("round").to_numpy() < first[run_codes(table)] if len(table) else []
            # A part that loses nothing is not written again: a crash while resuming must not cost what was whole.
            if len(table) and not np.all(keep):
                self._write(part, table.filter(pa.array(keep)))

    def compact(self) -> None:
        """Merge all parts into one. An interruption does no harm."""
        parts = part_files(self.path / "rounds")
        if len(parts) < 2:
            return
        table = read_parts(parts).replace_schema_metadata({COVERS: str(max(parts) + 1).encode()})
        # Once part 0 says how many parts it covers, readers skip those that are still there.
        self._write(0, table.unify_dictionaries().combine_chunks())
        for part, path in parts.items():
            if part:
                path.unlink()
