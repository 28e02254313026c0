"""Files from somebody else: a pipe or a device that lies in a file's place must not be waited for."""

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
