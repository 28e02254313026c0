"""Check sizes against the machine's memory before anything is allocated."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from fedcohort.core.errors import InputError

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container
_HINT = "use fewer samples, clients, local steps, or runs in lock-step (run.lockstep)"


def memory_limit() -> int:
    """Return how many bytes of memory this process may use, at least as far as the system says."""
    limits = [sys.maxsize]
    with contextlib.suppress(ValueError, OSError, AttributeError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    # A container's files say "max" if it has no limit.
    for path in _LIMITS:
        with contextlib.suppress(ValueError, OSError):
            limits.append(int(Path(path).read_text()))
    # A container's limit may be far below the machine's memory, or absurdly high.
    return min(limits)


def check_memory(what: str, size: int) -> None:
    """Raise an error if ``size`` bytes exceed the memory.

    >>> check_memory("The test samples", 10**30)
    Traceback (most recent call last):
        ...
    fedcohort.core.errors.InputError: The test samples would need ... of memory, but this machine has ...
    """
    limit = memory_limit()
    if size > limit:
        raise InputError(
            f"{what} would need {_format_bytes(size)} of memory, but this machine has {_format_bytes(limit)}.",
            hint=_HINT,
        )


def _format_bytes(size: int) -> str:
    """Return a number of bytes with a suitable unit.

    >>> _format_bytes(3 * 10**9), _format_bytes(10**30)
    ('3 GB', '1e+12 EB')
    """
    value, unit = float(min(size, 10**60)), "bytes"  # a larger int may not fit into a float
    for larger in ("kB", "MB", "GB", "TB", "PB", "EB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Turn allocation errors of Python and torch into an :class:`InputError`."""
    try:
        yield
    except MemoryError as error:
        raise InputError(f"There is not enough memory: {error or 'none is left'}.", hint=_HINT) from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # torch's wording
            raise
        detail = str(error).partition("DefaultCPUAllocator: ")[2] or str(error)
        raise InputError(f"There is not enough memory: {detail}", hint=_HINT) from error
