"""Read and write files safely in folders that others can write to.

Reading never blocks on a pipe, writing never follows a symbolic link, and a file is written whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading; a pipe or device, which might never end, raises OSError."""
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
    """Return the contents of a file; one that is larger than the memory raises OSError.

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
    """Open a file unless its path is a symbolic link; pass this as the ``opener`` of :func:`open`.

    Otherwise an attacker could put a link where a program keeps its file, and make the program overwrite any file its
    user may write to.
    """
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed", path) from None
        raise


def write_file(path: Path, data: bytes, *, durable: bool = True, mode: int | None = None) -> None:
    """Write a file whole or not at all, by writing a temporary file and renaming it.

    If the disk is full or the process is killed, the old file stays. A symbolic link is replaced and its target stays
    untouched; to follow a link, resolve the path first.

    Parameters
    ----------
    durable : bool
        Wait until the data are on disk. A file that may be lost in a power failure does not need this.
    mode : int, optional
        The file's permissions, from the first byte on. Default: those of the existing file, or of any new file.

    Raises
    ------
    OSError
        Naming ``path``.
    """
    try:
        # lstat, so that a link is seen as one.
        before = path.lstat().st_mode if os.path.lexists(path) else None
        if before is not None and not stat.S_ISLNK(before):
            _check_is_file(before, path)
            mode = stat.S_IMODE(before) if mode is None else mode
        # The name may already be as long as the system allows.
        temporary = path.with_name(f".{path.name[:60]}.tmp")
        temporary.unlink(missing_ok=True)  # left by a process that was killed, or a link planted there
        try:
            _write_new(temporary, data, durable, mode)
            # The data are on disk before the name points to them: a power failure leaves the old file or the new one.
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if durable:
            sync_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _write_new(path: Path, data: bytes, durable: bool, mode: int | None) -> None:
    """Write a file that must not exist yet."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags, 0o666 if mode is None else mode)  # minus the umask
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        if durable:
            os.fsync(handle)
    if mode is not None:
        path.chmod(mode)  # the umask may have removed some bits


def sync_folder(folder: str | Path) -> None:
    """Make new names in a folder durable, if the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
