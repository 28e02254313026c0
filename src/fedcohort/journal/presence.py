"""The state of a run: whether a process is working on it, what it is waiting for, how it ended.

The lock shows whether the process is alive, because the system releases it when the process dies. What only the process
itself knows, it writes to a small file next to the journal every few seconds (:class:`Presence`): that it is alive
during a round that takes hours, what it is waiting for, which clients are online.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from fedcohort.core.files import open_file
from fedcohort.journal.chain import read_head
from fedcohort.journal.events import ENDED, PLANNED
from fedcohort.journal.lock import LIVE, is_held, target
from fedcohort.journal.store import Journal

BEAT_SECONDS = 5.0  # between two heartbeats
MAX_OFFLINE = 1_000  # clients named in the file: those that went offline last
_DEAD_AFTER = 4 * BEAT_SECONDS  # on systems without locks
_MAX_BYTES = 1 << 22  # to read of the file, because anyone who can write to the folder could replace it by a huge one

State = Literal["running", "waiting", "finished", "failed", "stopped", "killed"]
STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True)
class Presence:
    """A heartbeat: what a process says about the run it is working on.

    Attributes
    ----------
    state : "running", "waiting" or "failed"
        "failed" for a run that failed before it had a journal.
    since : float
        When this state began, in seconds since 1970.
    why : str
        What the run is waiting for, or why it failed.
    at : float
        When this was written.
    generation : int
        The number of the journal's opening; 0 before there is a journal.
    planned : int or None
        The number of rounds that the run will have.
    online : int or None
        How many clients can take part; None if not known yet.
    offline : mapping of str to float
        By name, when members went offline; the latest first, at most :data:`MAX_OFFLINE`.
    offline_count : int
        The number of all members that are offline.
    """

    state: str
    since: float
    why: str = ""
    at: float = 0.0
    generation: int = 0
    planned: int | None = None
    online: int | None = None
    offline: Mapping[str, float] = field(default_factory=dict)
    offline_count: int = 0
    host: str = field(default_factory=platform.node)

    @classmethod
    def of(cls, journal: str | Path) -> Presence | None:
        """Return the last heartbeat of a journal; None if there is none, or it cannot be read."""
        try:
            with open_file(_file(journal)) as file:
                body = json.loads(file.read(_MAX_BYTES))
            kinds = {"since": float, "at": float, "generation": int, "offline_count": int}
            found: dict[str, Any] = {key: kinds.get(key, str)(body[key]) for key in (*kinds, "state", "why", "host")}
            for key in ("planned", "online"):
                found[key] = None if body[key] is None else int(body[key])
            offline = {str(name): float(since) for name, since in body["offline"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return None
        known = found["state"] in ("running", "waiting", "failed")
        finite = all(map(math.isfinite, (found["since"], found["at"], *offline.values())))
        return cls(**found, offline=offline) if known and finite else None

    def write(self, journal: Path) -> None:
        """Write it next to the journal, replacing the last one; a link in its place is not followed."""
        file = _file(journal)
        # A random name, because a link planted under a known name would be written through.
        new = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(asdict(self), stream)
            os.replace(new, file)
        except BaseException:
            new.unlink(missing_ok=True)
            raise

    @staticmethod
    def remove(journal: Path) -> None:
        """Delete the heartbeat of a journal."""
        with contextlib.suppress(OSError):
            _file(journal).unlink(missing_ok=True)

    @property
    def is_fresh(self) -> bool:
        """Whether it was written a few seconds ago."""
        # Two machines, two clocks: neither side is right.
        return abs(time.time() - self.at) < _DEAD_AFTER  # the other machine's clock may be ahead


def _file(journal: str | Path) -> Path:
    path = target(journal)
    return path.with_name(path.name + LIVE)


class RunState(NamedTuple):
    """The state of a run.

    Attributes
    ----------
    state : one of :data:`STATES`
        No process works on a run that is "stopped" or "killed"; if it is "killed", its journal was not closed.
    why : str
        What the run is waiting for, or how it ended.
    since : float or None
        When it began to wait.
    presence : Presence or None
        The last heartbeat of the process that works on it, or of the one that was killed.
    """

    state: State
    why: str = ""
    since: float | None = None
    presence: Presence | None = None


def planned_rounds(journal: Journal) -> int | None:
    """Return the planned number of rounds, if the host recorded it."""
    plans = journal.events(PLANNED)
    return int(plans[-1]["rounds"]) if plans else None


def _ending(journal: Journal) -> RunState | None:
    """Return how a run ended, or None if the journal records no end."""
    last_ticket = journal.last()[1]
    ends = journal.events(ENDED)
    if ends and ends[-1]["ticket"] == last_ticket:
        return RunState("failed" if ends[-1]["state"] == "failed" else "finished", str(ends[-1]["reason"]))
    cohorts = journal.cohorts(after=last_ticket - 1)
    return RunState("finished", str(cohorts[-1].stop)) if cohorts and cohorts[-1].stop is not None else None


def run_state(journal: Journal) -> RunState:
    """Return the current state of a journal's run."""
    if journal.path is None:
        return _ending(journal) or RunState("running")
    heartbeat = Presence.of(journal.path)
    # Another generation belongs to an earlier process, or to one that has not opened the journal yet.
    if heartbeat is not None and heartbeat.generation != read_head(journal.database.connection).generation:
        heartbeat = None
    alive = _is_alive(journal.path, heartbeat)
    if alive and heartbeat is not None:
        state: State = "waiting" if heartbeat.state == "waiting" else "running"
        return RunState(state, heartbeat.why, heartbeat.since, heartbeat)
    end = _ending(journal)
    if end is not None:
        return end
    if alive:
        return RunState("running")
    # A process closes the journal before it releases the lock. The lock was free, so this is the last link.
    if not read_head(journal.database.connection).in_use:
        return RunState("stopped")
    if _is_alive(journal.path, heartbeat):  # another process has opened it in the meantime
        return RunState("running")
    return RunState(
        "killed",
        "the process that wrote the journal ended without closing it; start the run again and it continues",
        None,
        heartbeat,
    )


def run_state_before(path: Path) -> RunState | None:
    """Return the state of a run without a journal, which waits for its first clients; None if there is no run."""
    heartbeat = Presence.of(path)
    if heartbeat is None:
        return None
    if heartbeat.state == "failed":
        return RunState("failed", heartbeat.why, heartbeat.since, heartbeat)
    if heartbeat.is_fresh:
        return RunState("waiting", heartbeat.why, heartbeat.since, heartbeat)
    return RunState("killed", "the process that waited for clients is gone", None, heartbeat)


def _is_alive(path: Path, heartbeat: Presence | None) -> bool:
    held = is_held(target(path))
    if held is None or (not held and heartbeat is not None and heartbeat.host != platform.node()):
        # This system has no locks, or the process runs on another machine whose lock we may not see.
        return heartbeat is not None and heartbeat.is_fresh
    return held
