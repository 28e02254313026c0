"""How many cores this process may use, and how many of them others leave free."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_QUOTAS = ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us")  # of a container: version 2, version 1
_PERIOD = "/sys/fs/cgroup/cpu/cpu.cfs_period_us"
_WINDOW = 0.2  # seconds; the kernel counts busy time in steps of 0.01 s


def usable_cores() -> int:
    """Return how many cores this process may use, which the container and OMP_NUM_THREADS may limit."""
    cores = own_cores()
    for path in _QUOTAS:
        with contextlib.suppress(OSError, ValueError):  # "max" means no quota
            quota, *period = Path(path).read_text().split()
            share = int(quota) / int(period[0] if period else Path(_PERIOD).read_text())
            cores = min(cores, int(share)) if share > 0 else cores
    # Whoever sets this has other work for the other cores, for example further experiments.
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if limit.isdecimal() and int(limit):
        cores = min(cores, int(limit))
    return max(1, cores)


def free_cores() -> int:
    """Return how many of :func:`usable_cores` other processes leave free, but at least one.

    Threads on a busy core make the others wait for them at the end of each batch. So this is for work whose result does
    not depend on the number of threads.
    """
    return max(1, min(usable_cores(), round(own_cores() - busy_cores())))


def own_cores() -> int:
    """Return how many cores the system gives this process, whatever else limits it."""
    return len(_own_cores()) or os.cpu_count() or 1


def busy_cores() -> float:
    """Return how many of this process's cores others keep busy."""
    return _others.busy_cores()


# taskset, a batch system or a container may leave this process some of the machine's cores.
def _own_cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _read_sample() -> tuple[float, float] | None:
    """Return the time, and the seconds for which other processes have used our cores; None if the system has no count.

    The one-minute load average would not do: it still counts the experiment that this process has just finished.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        busy = 0
        for line in Path("/proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in _own_cores():
                user, nice, system, _, _, *interrupts = map(int, fields[:8])
                busy += user + nice + system + sum(interrupts)
        return time.monotonic(), busy / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])
    return None


class _Others:
    """What other processes do on our cores, since the last time that somebody asked."""

    def __init__(self) -> None:
        self._last = _read_sample()
        self._busy = 0.0

    def busy_cores(self) -> float:
        """Return how many cores they keep busy."""
        now = _read_sample()
        if now is not None and self._last is not None and now[0] - self._last[0] >= _WINDOW:
            self._busy = max(0.0, (now[1] - self._last[1]) / (now[0] - self._last[0]))
            self._last = now
        return self._busy


# Between this import and the first experiment, torch is imported: long enough to see what others do.
_others = _Others()
