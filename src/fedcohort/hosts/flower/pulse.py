"""Writes every few seconds that a live run is alive, what it waits for and who is online; see `journal.presence`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from fedcohort.core.text import natural
from fedcohort.hosts.flower.roster import Card
from fedcohort.journal.presence import BEAT_SECONDS, MAX_OFFLINE, Presence
from fedcohort.session.session import Session

log = logging.getLogger("flwr.fedcohort")


class Pulse:
    """The status of a run, in a file next to its journal, for as long as the run lasts.

    A separate thread writes it, so that it also appears while a strategy averages or a server evaluates for an hour.
    The run's own thread checks who is online whenever it sleeps.

    Parameters
    ----------
    journal : Path or None
        Without a journal, nothing is written.
    planned : int
        Planned number of rounds.
    clock : callable
        The clock of the run.
    """

    def __init__(self, journal: Path | None, planned: int, clock: Callable[[], float]) -> None:
        self._journal = journal
        self._planned = planned
        self._clock = clock
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._begun = time.time()
        self._state, self._since, self._why = "running", self._begun, ""
        self._generation = 0
        self._online: Mapping[str, Card] | None = None
        self._members: frozenset[str] = frozenset()
        self._changes = -1  # of the session's members, as last seen
        self._count = 0
        self._ever: set[str] = set()
        self._offline: dict[str, float] = {}
        self._looked = clock()
        self._warned = False
        self._thread = threading.Thread(target=self._beat, name="fedcohort-pulse", daemon=True)

    def start(self, session: Session | None) -> None:
        """Start writing; no other process may have the journal open."""
        if self._journal is not None:
            if session is None:
                self._journal.parent.mkdir(parents=True, exist_ok=True)
            else:
                self._generation = session.journal.generation
            self._write()
            self._thread.start()

    def stop(self, failed: str | None) -> None:
        """Stop writing, and remove the file unless the run failed before it had a journal to say why."""
        self._over.set()
        if self._journal is None or not self._thread.is_alive():
            return
        self._thread.join()
        if failed is not None and not self._generation:
            self._state, self._since = "failed", time.time()
            self._why = failed
            self._write()
        else:
            Presence.remove(self._journal)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            self._write()

    def _write(self) -> None:
        if self._journal is None:
            return
        with self._lock:
            # The newest come first, because an operator looks for these.
            newest = sorted(self._offline.items(), key=lambda item: (-item[1], natural(item[0])))[:MAX_OFFLINE]
            presence = Presence(
                state=self._state,
                since=self._since,
                why=self._why,
                at=time.time(),
                generation=self._generation,
                planned=self._planned,
                online=None if self._online is None else self._count,
                offline=dict(newest),
                offline_count=len(self._offline),
            )
            try:
                presence.write(self._journal)
            except OSError as error:
                if not self._warned:
                    self._warned = True
                    log.warning("no status can be written next to the journal: %s", error)

    # -- news from the run --------------------------------------------------------------------------------------------

    def attach(self, session: Session) -> None:
        """Add which opening of the journal this status belongs to."""
        if self._journal is not None:
            with self._lock:
                self._generation = session.journal.generation
            self._write()

    def waiting(self, why: str) -> None:
        """Set the status of a run that waits for something."""
        self._set_state("waiting", why)

    def running(self) -> None:
        """Set the status of a run that continues."""
        self._set_state("running", "")

    def _set_state(self, state: str, why: str) -> None:
        if (state, why) == (self._state, self._why):
            return
        with self._lock:
            is_new = state != self._state
            self._since = time.time() if is_new else self._since
            self._state, self._why = state, why
        if is_new:
            self._write()

    def update_online(self, online: Mapping[str, Card], session: Session | None) -> None:
        """Update which clients can take part and which members are offline."""
        changes = -1 if session is None else session.changes
        if self._journal is None or (online is self._online and changes == self._changes):
            return
        self._online, self._changes = online, changes
        if session is not None:
            members = zip(session.table.names, session.active.tolist(), strict=True)
            self._members = frozenset(name for name, active in members if active)
        self._set_offline(set())

    def look(self, nodes: Callable[[], Iterable[int]]) -> None:
        """Check every few seconds who is still connected, only for the status."""
        if self._journal is None or self._online is None or self._clock() - self._looked < BEAT_SECONDS:
            return
        self._looked = self._clock()
        try:
            connected = set(nodes())
        except Exception as error:  # the run will ask again and handle the error
            log.debug("who is online cannot be seen now: %s", error)
            return
        self._set_offline({name for name, card in self._online.items() if card.node not in connected})

    def _set_offline(self, gone: set[str]) -> None:
        """Set who is offline: members that are not online, and clients that are gone since the run last checked."""
        now = time.time()
        with self._lock:
            online = set(self._online or ()) - gone
            self._count = len(online)
            self._ever |= online
            offline = (self._members | gone) - online
            # A client that was never online in this run counts as offline since the run began.
            self._offline = {
                name: self._offline.get(name, now if name in self._ever else self._begun) for name in offline
            }
        self._write()
