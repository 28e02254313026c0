"""Is there room? Sizes that no machine could hold become a sentence before anything is allocated."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fedcohort.core.errors import InputError

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container
_HINT = "take fewer samples, clients, local steps, or runs in lock-step (run.lockstep)"


def memory_limit() -> int | None:
    """Return how many bytes of memory this process may have at most, or None where the system does not say."""
    found = []
    with contextlib.suppress(ValueError, OSError, AttributeError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _LIMITS:
        with contextlib.suppress(ValueError, OSError):
            found.append(int(Path(path).read_text()))
    return min(found, default=None)


def check_memory(what: str, size: int, hint: str = _HINT) -> None:
    """Refuse what needs more bytes than there is memory.

    >>> check_memory("The test samples", 10**30)
    Traceback (most recent call last):
        ...
    fedcohort.core.errors.InputError: The test samples would take ... of memory, and this machine has ...
    """
    there = memory_limit()
    if there is not None and size > there:
        raise InputError(
            f"{what} would take {format_bytes(size)} of memory, and this machine has {format_bytes(there)}.", hint=hint
        )


def format_bytes(size: int) -> str:
    """Return a number of bytes in words.

    >>> format_bytes(3 * 10**9), format_bytes(10**30)
    ('3 GB', '1e+12 EB')
    """
    value, unit = float(min(size, 10**60)), "bytes"
    for larger in ("kB", "MB", "GB", "TB", "PB", "EB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Turn the allocators' own errors into a sentence."""
    try:
        yield
    except MemoryError as error:
        raise InputError(f"There is not enough memory: {error or 'none is left'}.", hint=_HINT) from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # how torch says it
            raise
        said = str(error).partition("DefaultCPUAllocator: ")[2] or str(error)
        raise InputError(f"There is not enough memory: {said}", hint=_HINT) from error
