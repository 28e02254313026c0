"""Files in folders that others can write to: no pipe is waited for, and nothing is written through a symbolic link."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_file(path: Path) -> BinaryIO:
    """Open a file to read; OSError for what only stands in a file's place and might never end."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
    return os.fdopen(handle, "rb")


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


def no_links(path: str, flags: int) -> int:
    """Open a file, but not through a symbolic link in its place; for the ``opener`` of :func:`open`.

    A link that somebody put where a program keeps a file of its own would let it write into any file of its user.
    """
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link, and nothing is written through one", path) from None
        raise
