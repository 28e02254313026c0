"""How a run stands: whether anybody is at work on its journal, what is waited for, how it ended.

The lock tells who lives: the system takes it from a process that dies, however it dies. What only the process itself
can know, it says in a small file beside the journal, written anew every few seconds (:class:`Presence`): that it is
alive although a round lasts for hours, whom it waits for, who is online.
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
from typing import Any, Literal

from fedcohort.core.files import open_file
from fedcohort.journal.database import Seal
from fedcohort.journal.events import ENDED, PLANNED
from fedcohort.journal.lock import LIVE, is_held, target
from fedcohort.journal.schema import ERRORS
from fedcohort.journal.store import Journal

BEAT_SECONDS = 5.0  # between two writings of the file
MOST_OFFLINE = 1_000  # clients named in the file; beyond, those are that went last
_DEAD_AFTER = 4 * BEAT_SECONDS  # where there is no lock to ask
_MOST_BYTES = 1 << 22  # read of the file: anybody who can write to the folder could put a larger one there

State = Literal["running", "waiting", "finished", "failed", "stopped", "killed"]
STATES: tuple[State, ...] = ("running", "waiting", "finished", "failed", "stopped", "killed")


@dataclass(frozen=True)
class Presence:
    """What a process says about the run it is at work on.

    Attributes
    ----------
    state : "running", "waiting" or "failed"
        The last of a run that ended before it had a journal.
    since : float
        Since when, in seconds since 1970.
    why : str
        What is waited for, or why it failed.
    at : float
        When this was written.
    generation : int
        Which opening of the journal it is about; 0 before there is one.
    planned : int or None
        How many rounds the run is to have.
    online : int or None
        How many clients can take part; None before anybody looked.
    offline : mapping of str to float
        By name, since when members are not online; those that went last first, at most :data:`MOST_OFFLINE`.
    offline_count : int
        How many there are in all.
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
        """Return the last heartbeat beside a journal; None if there is none, or none that can be read."""
        try:
            with open_file(_file(journal)) as file:
                body = json.loads(file.read(_MOST_BYTES))
            return cls._from_json(body)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return None

    @classmethod
    def _from_json(cls, body: Mapping[str, Any]) -> Presence | None:
        offline = {str(name): float(since) for name, since in body["offline"].items()}
        numbers = [float(body["since"]), float(body["at"]), *offline.values()]
        if body["state"] not in ("running", "waiting", "failed") or not all(map(math.isfinite, numbers)):
            return None
        return cls(
            state=str(body["state"]),
            since=float(body["since"]),
            why=str(body["why"]),
            at=float(body["at"]),
            generation=int(body["generation"]),
            planned=None if body["planned"] is None else int(body["planned"]),
            online=None if body["online"] is None else int(body["online"]),
            offline=offline,
            offline_count=int(body["offline_count"]),
            host=str(body["host"]),
        )

    def write(self, journal: Path) -> None:
        """Write it beside the journal, in place of the one before; a link that lies there is not followed."""
        file = _file(journal)
        # A random name: a link that somebody planted under a known one would be written through.
        new = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as written:
                json.dump(asdict(self), written)
            os.replace(new, file)
        except BaseException:
            new.unlink(missing_ok=True)
            raise

    @staticmethod
    def remove(journal: Path) -> None:
        """Remove the file beside the journal."""
        with contextlib.suppress(OSError):
            _file(journal).unlink(missing_ok=True)

    @property
    def is_fresh(self) -> bool:
        """Whether it was written a moment ago."""
        return abs(time.time() - self.at) < _DEAD_AFTER  # of either sign: clocks of machines differ


def _file(journal: str | Path) -> Path:
    path = target(journal)
    return path.with_name(path.name + LIVE)


@dataclass(frozen=True)
class RunState:
    """How a run stands.

    Attributes
    ----------
    state : one of :data:`STATES`
        ``stopped``: nobody is at work on it, and its journal was closed; ``killed``: it was not.
    why : str
        What is waited for, or how it ended.
    since : float or None
        Since when it waits.
    presence : Presence or None
        The last heartbeat of the process that works on it, or did until it was killed.
    """

    state: State
    why: str = ""
    since: float | None = None
    presence: Presence | None = None


def planned_rounds(journal: Journal) -> int | None:
    """Return how many rounds the host has planned, if it recorded that."""
    plans = journal.events(PLANNED)
    return int(plans[-1]["rounds"]) if plans else None


def _ending(journal: Journal) -> tuple[State, str] | None:
    """Return how a run ended and why, or None if no end is on record."""
    ends = journal.events(ENDED)[-1:]
    if ends and ends[0]["ticket"] == journal.last()[1]:
        return ("failed" if ends[0]["state"] == "failed" else "finished"), str(ends[0]["reason"])
    last = journal.cohorts(after=journal.last()[1] - 1)[-1:]
    return ("finished", str(last[0].stop)) if last and last[0].stop is not None else None


def run_state(journal: Journal) -> RunState:
    """Return how the run of a journal stands now."""
    if journal.path is None:
        return RunState(*(_ending(journal) or ("running", "")))
    last = _heartbeat(journal, journal.path)
    alive = _is_alive(journal.path, last)
    if alive and last is not None:
        return RunState("waiting" if last.state == "waiting" else "running", last.why, last.since, last)
    end = _ending(journal)
    if end is not None:
        return RunState(*end)
    if alive:
        return RunState("running")
    # The journal is closed before its lock is let go; so this, read after the lock was free, is how it was left.
    seal = _seal(journal)
    if seal is None or not seal.in_use:
        return RunState("stopped")
    if _is_alive(journal.path, last):  # another process has begun to work on it meanwhile
        return RunState("running")
    return RunState(
        "killed",
        "the process that wrote the journal ended without closing it; start the run again and it continues",
        None,
        last,
    )


def _heartbeat(journal: Journal, path: Path) -> Presence | None:
    """Return the last heartbeat about this opening of the journal, if there is one."""
    seal, last = _seal(journal), Presence.of(path)
    # Another generation is of an earlier process, or of one that has not opened the journal yet.
    return last if last is not None and seal is not None and last.generation == seal.generation else None


def run_state_before(path: Path) -> RunState | None:
    """Return how a run stands that has no journal yet, because it waits for its first clients; None without one."""
    last = Presence.of(path)
    if last is None:
        return None
    if last.state == "failed":
        return RunState("failed", last.why, last.since, last)
    if last.is_fresh:
        return RunState("waiting", last.why, last.since, last)
    return RunState("killed", "the process that waited for clients is gone", None, last)


def _is_alive(path: Path, last: Presence | None) -> bool:
    held = is_held(target(path))
    if held is None or (not held and last is not None and last.host != platform.node()):
        # No locks here, or perhaps none that other machines see.
        return last is not None and last.is_fresh
    return held


def _seal(journal: Journal) -> Seal | None:
    try:
        return Seal.read(journal.database.connection)
    except ERRORS:  # one of an earlier version has none
        return None
