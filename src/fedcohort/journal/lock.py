"""What lies beside a journal: SQLite's companion, and a lock that also says how far the journal had come.

A session holds the lock for as long as it lives, and after each commit notes the journal's identity and number of
commits in it. Whoever opens the journal later can so tell that its newest commits are missing: because SQLite's
companion file was not copied along, was lost, or is damaged, which SQLite takes for the end of the file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

from fedcohort.core.errors import JournalError
from fedcohort.core.files import open_file, refuse_links

try:
    import fcntl
except ImportError:  # no advisory locks on this platform; SQLite still guards single writes
    fcntl = None  # type: ignore[assignment]

COMPANIONS = ("-wal", "-shm", "-journal")  # SQLite's own names
NEW = ".new"  # a journal that is being created
LOCK = ".lock"
_LONGEST_MARK = 256  # bytes
LIVE = ".live"  # what the process says that is at work on the journal; see fedcohort.journal.presence
ORDERS = ".orders"  # a folder of what an operator wants changed; see fedcohort.hosts.orders
_PROBED = 0.2  # seconds in which a lock that somebody only looked at is free again


def target(path: str | Path) -> Path:
    """Return the file a path leads to, through symbolic links, so that all names of a journal share one lock."""
    try:
        return Path(path).resolve()
    except (OSError, RuntimeError) as error:
        raise JournalError(f"The journal {path} cannot be reached: {error}.") from error


def companion(path: Path) -> Path:
    """Return where SQLite keeps the newest commits of a journal that is in use."""
    return path.with_name(path.name + "-wal")


def has_companion(path: Path) -> bool:
    """Whether that file is there and holds anything; an empty one is what a reader may leave behind."""
    try:
        return companion(path).stat().st_size > 0
    except OSError:
        return False


def remove(path: str | Path) -> None:
    """Delete a journal with all that lies beside it; the companion goes first, because alone it would be in the way."""
    file = target(path)
    for end in (*COMPANIONS, "", *(f"{NEW}{end}" for end in ("", *COMPANIONS)), LIVE, LOCK):
        file.with_name(file.name + end).unlink(missing_ok=True)
    shutil.rmtree(file.with_name(file.name + ORDERS), ignore_errors=True)  # which follows no link


@dataclass(frozen=True)
class Mark:
    """How far a journal has come at least.

    Parameters
    ----------
    id : str
        Which journal.
    """

    id: str
    commits: int

    def encode(self) -> bytes:
        """Return the line that stands in the lock file, always of the same length."""
        text = f"{self.id} {self.commits:020d}"
        return f"{text} {zlib.crc32(text.encode()):08x}\n".encode()

    @classmethod
    def decode(cls, data: bytes) -> Mark | None:
        """Return what :meth:`encode` wrote; None for anything else, as a lock file of an older version."""
        text, _, check = data.decode("ascii", "replace").removesuffix("\n").rpartition(" ")
        id_, _, commits = text.partition(" ")
        if not commits.isdecimal() or f"{zlib.crc32(text.encode()):08x}" != check:
            return None
        return cls(id_, int(commits))

    @classmethod
    def of(cls, path: Path) -> Mark | None:
        """Return the mark beside a journal, if there is one."""
        try:
            with open_file(_lock_file(path)) as file:
                return cls.decode(file.read(_LONGEST_MARK))
        except OSError:
            return None


class Lock:
    """The lock of a journal that is being written; it dies with its process.

    Parameters
    ----------
    path : the journal, as :func:`target` returns it
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
        """Note how far the journal has come."""
        with contextlib.suppress(OSError):  # a mark that lags behind says less, but nothing wrong
            if hasattr(os, "pwrite"):
                os.pwrite(self._file, mark.encode(), 0)
            else:  # Windows
                os.lseek(self._file, 0, os.SEEK_SET)
                os.write(self._file, mark.encode())
            if sync:
                os.fsync(self._file)

    def release(self) -> None:
        """Let go, also of what children made by fork have of it."""
        if self._held:
            if fcntl is not None:
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self.drop()

    def drop(self) -> None:
        """In a child made by fork: leave the lock to the parent alone."""
        if self._held:
            self._held = False
            os.close(self._file)


def try_lock(file: int) -> bool:
    """Lock an open file for this process alone; False when another has it for longer than :func:`is_locked` would."""
    end = time.monotonic() + _PROBED
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > end:
                return False
            time.sleep(0.005)


def is_held(path: Path) -> bool | None:
    """Whether a living process is at work on a journal; None where the system cannot tell.

    Parameters
    ----------
    path : the journal, as :func:`target` returns it
    """
    return is_locked(_lock_file(path))


def is_locked(file: Path) -> bool | None:
    """Whether a living process holds the lock of a file; False without one, None where the system cannot tell.

    To find out, the lock is shared for a moment; a writer that wants it alone tries for longer than that.
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
