"""A live run says every few seconds that it is alive, whom it waits for and who is online; see `journal.presence`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from fedcohort.core.text import natural, shorten
from fedcohort.hosts.flower.roster import Card
from fedcohort.journal.presence import BEAT_SECONDS, MOST_OFFLINE, Presence
from fedcohort.session.session import Session

log = logging.getLogger("flwr.fedcohort")


class Pulse:
    """What a run says about itself beside its journal, for as long as it lasts.

    A thread writes it, so that it is said while a strategy averages or a server evaluates for an hour. Who is online is
    looked at by the run's own thread, whenever it sleeps.

    Parameters
    ----------
    journal : Path or None
        Without a journal nothing is said.
    planned : int
        Rounds the run is to have.
    clock : callable
        Of the run.
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
        """Begin; only when no other process is at work on the journal."""
        if self._journal is not None:
            if session is None:
                self._journal.parent.mkdir(parents=True, exist_ok=True)
            else:
                self._generation = session.journal.database.seal.generation
            self._write()
            self._thread.start()

    def stop(self, failed: BaseException | None) -> None:
        """End; only of a run that failed before it had a journal something stays, because nothing else tells why."""
        self._over.set()
        if self._journal is None or not self._thread.is_alive():
            return
        self._thread.join()
        if failed is not None and not self._generation:
            self._state, self._since = "failed", time.time()
            self._why = shorten(str(failed) or type(failed).__name__)
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
            # Those that went last come first: they are what an operator looks for.
            newest = sorted(self._offline.items(), key=lambda item: (-item[1], natural(item[0])))[:MOST_OFFLINE]
            said = Presence(
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
                said.write(self._journal)
            except OSError as error:
                if not self._warned:
                    self._warned = True
                    log.warning("no status can be written beside the journal: %s", error)

    # -- what the run says --------------------------------------------------------------------------------------------

    def attach(self, session: Session) -> None:
        """Say which opening of the journal this is about."""
        if self._journal is not None:
            with self._lock:
                self._generation = session.journal.database.seal.generation
            self._write()

    def waiting(self, why: str) -> None:
        """The run waits for something."""
        self._say("waiting", why)

    def running(self) -> None:
        """The run continues."""
        self._say("running", "")

    def _say(self, state: str, why: str) -> None:
        if (state, why) == (self._state, self._why):
            return
        with self._lock:
            news = state != self._state
            self._since = time.time() if news else self._since
            self._state, self._why = state, why
        if news:
            self._write()

    def update_online(self, online: Mapping[str, Card], session: Session | None) -> None:
        """Take over who can take part, and who of the members cannot."""
        changes = -1 if session is None else session.changes
        if self._journal is None or (online is self._online and changes == self._changes):
            return
        self._online, self._changes = online, changes
        if session is not None:
            members = zip(session.table.names, session.active.tolist(), strict=True)
            self._members = frozenset(name for name, active in members if active)
        self._count_out(set())

    def look(self, nodes: Callable[[], Iterable[int]]) -> None:
        """See now and then who is still connected, while the run sleeps; what it goes by does not change."""
        if self._journal is None or self._online is None or self._clock() - self._looked < BEAT_SECONDS:
            return
        self._looked = self._clock()
        try:
            found = set(nodes())
        except Exception as error:  # the run itself will ask again, and knows what to do
            log.debug("who is online cannot be seen now: %s", error)
            return
        self._count_out({name for name, card in self._online.items() if card.node not in found})

    def _count_out(self, gone: set[str]) -> None:
        """Note who is offline: members that are not online, and those who are gone since the run looked."""
        now = time.time()
        with self._lock:
            there = set(self._online or ()) - gone
            self._count = len(there)
            self._ever |= there
            away = (self._members | gone) - there
            # Of somebody who has not been there since the run began nothing else is known.
            self._offline = {name: self._offline.get(name, now if name in self._ever else self._begun) for name in away}
        self._write()
