"""The files next to a journal: SQLite's companion, and a lock file that also counts the links of the chain.

A session holds the lock as long as it lives. After each commit, it writes the journal's identity and number of links
to the lock file. So whoever opens the journal later can tell whether its newest commits are missing: SQLite's companion
file may have been lost, left behind by a copy, or damaged, and SQLite treats damage as the end of the file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import zlib
from pathlib import Path
from typing import NamedTuple

from fedcohort.core.errors import JournalError
from fedcohort.core.files import open_file, refuse_links
from fedcohort.core.validate import input_error
from fedcohort.core.validate import path as check_path

try:
    import fcntl
except ImportError:  # no advisory locks on this platform; SQLite still guards single writes
    fcntl = None  # type: ignore[assignment]

COMPANIONS = ("-wal", "-shm", "-journal")  # SQLite's own names
NEW = ".new"  # a journal that is being created
LOCK = ".lock"
_MAX_MARK = 256  # bytes
LIVE = ".live"  # heartbeats of the process that writes the journal; see fedcohort.journal.presence
ORDERS = ".orders"  # a folder of an operator's orders; see fedcohort.hosts.orders
_PATIENCE = 0.2  # seconds; long enough for is_locked() in another process to let go of the lock


def check_journal_path(journal: str | Path) -> Path:
    """Return the path of a journal; InputError if it cannot be the path of a file.

    >>> check_journal_path(".")
    Traceback (most recent call last):
        ...
    fedcohort.core.errors.InputError: 'journal' must be the path of a file. Got '.'.
    """
    path = check_path(journal, "'journal'")
    if not path.name:
        raise input_error("'journal'", "the path of a file", journal)
    return path


def target(path: str | Path) -> Path:
    """Return the file that a path leads to, with links resolved, so that all paths of a journal share one lock."""
    try:
        return Path(path).resolve()
    except (OSError, RuntimeError) as error:
        raise JournalError(f"The journal {path} cannot be reached: {error}.") from error


def companion(path: Path) -> Path:
    """Return the file in which SQLite keeps the newest commits of a journal in use."""
    return path.with_name(path.name + "-wal")


def has_companion(path: Path) -> bool:
    """Whether the companion exists and is not empty; a reader may leave an empty one behind."""
    try:
        return companion(path).stat().st_size > 0
    except OSError:
        return False


def remove(path: str | Path) -> None:
    """Delete a journal and the files next to it."""
    file = target(path)
    # The companion first: without a journal, it would keep a new one from being created.
    for end in (*COMPANIONS, "", *(f"{NEW}{end}" for end in ("", *COMPANIONS)), LIVE, LOCK):
        file.with_name(file.name + end).unlink(missing_ok=True)
    shutil.rmtree(file.with_name(file.name + ORDERS), ignore_errors=True)  # it follows no links


class Mark(NamedTuple):
    """The identity of a journal (:attr:`Head.id`), and how many links its chain has at least."""

    id: str
    links: int

    def encode(self) -> bytes:
        """Return the line for the lock file; its length is always the same."""
        text = f"{self.id} {self.links:020d}"
        return f"{text} {zlib.crc32(text.encode()):08x}\n".encode()

    @classmethod
    def decode(cls, data: bytes) -> Mark | None:
        """Return what :meth:`encode` wrote; None for anything else."""
        text, _, check = data.decode("ascii", "replace").removesuffix("\n").rpartition(" ")
        id_, _, links = text.partition(" ")
        if not links.isdecimal() or f"{zlib.crc32(text.encode()):08x}" != check:
            return None
        return cls(id_, int(links))

    @classmethod
    def of(cls, path: Path) -> Mark | None:
        """Return the mark in a journal's lock file, if there is one."""
        try:
            with open_file(_lock_file(path)) as file:
                return cls.decode(file.read(_MAX_MARK))
        except OSError:
            return None


class Lock:
    """The lock of a journal that is being written; the system releases it when the process dies.

    Parameters
    ----------
    path : the journal, as returned by :func:`target`
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = refuse_links(str(_lock_file(path)), os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise JournalError(
                f"The journal {path} cannot be written: {error.strerror or error} ({_lock_file(path)}).",
                hint="a session needs a folder it can write to; reading is possible with read_journal(path)",
            ) from error
        if fcntl is not None and not try_lock(self._file):
            os.close(self._file)
            raise JournalError(
                f"The journal {path} is in use by another process.",
                hint="stop the other session first; reading is possible at any time with read_journal(path)",
            )
        self._held = True

    def mark(self, mark: Mark, *, sync: bool = False) -> None:
        """Write a mark to the lock file."""
        # On a full disk the session must go on; the next mark may fit.
        with contextlib.suppress(OSError):  # an outdated mark is still true: it says "at least"
            if hasattr(os, "pwrite"):
                os.pwrite(self._file, mark.encode(), 0)
            else:  # Windows
                os.lseek(self._file, 0, os.SEEK_SET)
                os.write(self._file, mark.encode())
            if sync:
                os.fsync(self._file)

    def release(self) -> None:
        """Release the lock, also for forked children."""
        if self._held:
            if fcntl is not None:
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self.drop()

    def drop(self) -> None:
        """Close the lock file in a forked child; the parent keeps the lock."""
        if self._held:
            self._held = False
            os.close(self._file)


def try_lock(file: int) -> bool:
    """Lock an open file exclusively; False if another process holds it for longer than :func:`is_locked` does."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > end:
                return False
            time.sleep(0.005)


def is_held(path: Path) -> bool | None:
    """Whether a living process is writing the journal at :func:`target`; None if the system cannot tell."""
    return is_locked(_lock_file(path))


def is_locked(file: Path) -> bool | None:
    """Whether a living process holds a lock file; False if there is none, None if the system cannot tell.

    The test takes a shared lock for a moment. A writer that needs the lock keeps trying for longer than that.
    """
    if fcntl is None:
        return None
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(handle, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(handle)
    return False


def _lock_file(path: Path) -> Path:
    return path.with_name(path.name + LOCK)
