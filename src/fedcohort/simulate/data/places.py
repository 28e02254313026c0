"""Where datasets are on disk, and how to download them."""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
import tempfile
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path

from fedcohort.core.errors import DataError

log = logging.getLogger(__name__)

ENVIRONMENT = "FEDCOHORT_DATA"
_BLOCK = 1 << 20
MAX_BLOCKS = 1 << 12  # 4 GiB
_TIMEOUT_S = 60


@dataclass(frozen=True)
class Resource:
    """A published file: its name, its address and its checksum.

    Attributes
    ----------
    sum : str
        ``md5:...`` or ``sha256:...`` of the file, or ``unpacked-sha256:...`` of the contents of a ``.gz``, which does
        not depend on how it was compressed.
    """

    name: str
    url: str
    sum: str


def _named(folder: str | os.PathLike[str] | None) -> list[Path]:
    """Return the folders that the user names, the argument and FEDCOHORT_DATA."""
    return [Path(place).expanduser() for place in (folder, os.environ.get(ENVIRONMENT)) if place]


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return ((Path(base) if base else Path.home() / ".cache") / "fedcohort").expanduser()


def folders(folder: str | os.PathLike[str] | None) -> list[Path]:
    """Return the folders to search: the argument, FEDCOHORT_DATA, ``data`` here and one level up, the user's cache."""
    return list(dict.fromkeys([*_named(folder), Path.cwd() / "data", Path.cwd().parent / "data", _cache()]))


def download_folder(folder: str | os.PathLike[str] | None) -> Path:
    """Return the folder for downloads: the argument, FEDCOHORT_DATA, or the user's cache."""
    return next(iter(_named(folder)), _cache())


def fetch(resource: Resource, folder: Path) -> Path:
    """Download a file, verify its checksum and move it into place. A file that is already there and correct is kept."""
    target = folder / resource.name
    try:
        if target.is_file() and _sum(target, resource.sum) == resource.sum:
            return target
        folder.mkdir(parents=True, exist_ok=True)
        # In the same folder, because a move is atomic only within one file system.
        handle, temporary = tempfile.mkstemp(prefix=f".{resource.name}.", dir=folder)
    except OSError as error:
        raise DataError(f"The folder {folder} cannot be written to: {error}.", hint="name another folder") from error
    try:
        log.info("downloading %s", resource.url)
        # Never under its own name: a download that breaks off would look like the file.
        with os.fdopen(handle, "wb") as file, urllib.request.urlopen(resource.url, timeout=_TIMEOUT_S) as answer:
            while block := answer.read(_BLOCK):
                file.write(block)
        if (actual := _sum(Path(temporary), resource.sum)) != resource.sum:
            raise DataError(
                f"The download of {resource.url} has the checksum {actual}, not {resource.sum}.",
                hint="try again, or put the file into a data folder by hand",
            )
        os.chmod(temporary, 0o644)  # mkstemp makes it readable only for the owner
        os.replace(temporary, target)
    except urllib.error.URLError as error:
        raise DataError(
            f"{resource.url} cannot be downloaded: {error.reason}.",
            hint="is this machine online? Otherwise fetch the file elsewhere and put it into a data folder",
        ) from error
    except OSError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{resource.url} cannot be downloaded to {target}: {error}.") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def _sum(path: Path, like: str) -> str:
    """Return the checksum of a file, of the same kind as ``like``."""
    kind = like.partition(":")[0]
    name = kind.removeprefix("unpacked-")
    digest = hashlib.new(name, usedforsecurity=False)
    # In blocks and with a limit, because a small .gz may unpack to more than the memory.
    try:
        with gzip.open(path, "rb") if name != kind else open(path, "rb") as file:
            for _ in range(MAX_BLOCKS):
                if not (block := file.read(_BLOCK)):
                    return f"{kind}:{digest.hexdigest()}"
                digest.update(block)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        return f"{kind}: none, {error}"
    return f"{kind}: none, it unpacks to more than {MAX_BLOCKS * _BLOCK >> 30} GiB"
