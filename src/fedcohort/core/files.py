"""Files in folders that others can write to: no pipe is waited for, and nothing is written through a symbolic link.

What is written appears whole or not at all.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_file(path: Path) -> BinaryIO:
    """Open a file to read; OSError for what only stands in a file's place and might never end."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _check_is_file(os.fstat(handle).st_mode, path)
    except OSError:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def _check_is_file(mode: int, path: Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))


def read_file(path: Path) -> bytes:
    """Return what a file holds; OSError also for one that is larger than the memory.

    >>> read_file(Path("/dev/zero"))  # doctest: +SKIP
    Traceback (most recent call last):
        ...
    OSError: [Errno 22] it is a pipe or a device, not a file: '/dev/zero'
    """
    with open_file(path) as file:
        try:
            return file.read()
        except MemoryError:
            raise OSError(errno.EFBIG, "it is larger than the memory", str(path)) from None


def refuse_links(path: str, flags: int) -> int:
    """Open a file, but not through a symbolic link in its place; for the ``opener`` of :func:`open`.

    A link that somebody put where a program keeps a file of its own would let it write into any file of its user.
    """
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link, and nothing is written through one", path) from None
        raise


def write_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file whole or not at all: beside its place, then moved there.

    A disk that is full, or a kill, leaves what was there before. A file keeps its mode; a symbolic link is replaced,
    and what it names stays as it is: resolve the path first where a link is to be followed.

    Parameters
    ----------
    path : Path
    data : bytes
    durable : bool
        Wait for the disk. What need not outlive a loss of power can do without.

    Raises
    ------
    OSError
        It names ``path``.
    """
    try:
        mode = path.lstat().st_mode if os.path.lexists(path) else None
        if mode is not None and stat.S_ISLNK(mode):
            mode = None
        if mode is not None:
            _check_is_file(mode, path)
        beside = path.with_name(f".{path.name[:60]}.tmp")  # a name may be as long as the system allows
        beside.unlink(missing_ok=True)  # of a process that was killed, or a link that somebody put there
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        handle = os.open(beside, flags, 0o666)  # less the umask
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(handle)
            if mode is not None:
                beside.chmod(stat.S_IMODE(mode))
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        if durable:
            _sync(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _sync(folder: Path) -> None:
    """Make durable which files a folder has, where the system knows how."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
