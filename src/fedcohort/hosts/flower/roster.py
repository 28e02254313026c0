"""Maps temporary node ids to lasting names.

A SuperNode gets a new random node id with every start, so journals use names. Every new node is asked once to describe
itself. A ClientApp without fedcohort cannot answer, and takes part under a name derived from its node id.

A node keeps the name under which it first took part. Otherwise, it could escape every limit by renaming itself.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedcohort.core.signals import Signal
from fedcohort.core.text import natural
from fedcohort.hosts.ask_again import ASK_AGAIN_AFTER, PostponedClients
from fedcohort.hosts.flower.exchange import GridReply, Outbox
from fedcohort.hosts.flower.wire import DESCRIBE
from fedcohort.hosts.wire import RECORD, VERSION, Description, normal_form

log = logging.getLogger("flwr.fedcohort")
_NOT_OURS = re.compile(r"No query function registered|Invalid message type")  # Flower's errors for such a ClientApp


@dataclass(frozen=True)
class Card:
    """One client that is online.

    Parameters
    ----------
    name : str
        Its name in session and journal.
    node : int
        Flower's current node id.
    description : Description
        How the client described itself.
    answers : bool
        Whether its ClientApp uses fedcohort.
    registered : bool
        Whether the SuperLink binds the name to the node's key.
    """

    name: str
    node: int
    description: Description
    answers: bool
    registered: bool = False

    def lacks(self, required: Iterable[Signal], sealed: bool) -> list[Signal]:
        """Return the required signals that this client cannot supply."""
        return sorted(frozenset(required) - self.description.known_signals(sealed))


class Roster:
    """The clients that are online now, kept up to date by :meth:`refresh`."""

    def __init__(
        self,
        grid: Grid,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._grid = grid
        self._clock = clock
        self._outbox = Outbox(grid, clock, sleep)
        self._seen: set[int] = set()  # the keys of `_registered`, because comparing two sets is fast
        self._registered: dict[int, str] = {}  # the names under which nodes were registered with the SuperLink
        self._cards: dict[int, Card] = {}
        self._unfit = PostponedClients(clock)
        self._described: dict[int, float] = {}  # node id -> when it was last asked
        self.describe_every: float | None = None
        self._due = math.inf  # when a node must be asked again
        self._by_name: dict[str, int] = {}
        self._names: dict[int, str] = {}  # the first name of every node id, even while it is offline
        self._renamed: set[int] = set()  # nodes with a warning about another name
        self._sorted: dict[str, Card] | None = None  # cache of `online`
        self.version = 0  # increased whenever `online` changes

    @classmethod
    def of(cls, grid: Grid, clock: Callable[[], float], sleep: Callable[[float], None]) -> Roster:
        """Return the roster of a grid, so that consecutive strategies on one grid ask every node only once."""
        # Stored on the grid, so that it lives as long.
        roster = vars(grid).get("_fedcohort_roster") or cls(grid, clock, sleep)
        vars(grid)["_fedcohort_roster"] = roster
        return roster

    @property
    def online(self) -> dict[str, Card]:
        """The clients that are online, by name, in natural order of the names."""
        if self._sorted is None:
            self._sorted = {name: self._cards[self._by_name[name]] for name in sorted(self._by_name, key=natural)}
        return self._sorted

    @property
    def unanswered(self) -> int:
        """How many nodes have been asked for a description and have not answered."""
        return len(self._outbox.waiting)

    @property
    def silent(self) -> list[str]:
        """The nodes that have not described themselves, by registered name or node id."""
        nodes = sorted(int(node) for node in self._outbox.unanswered())
        return [self._registered.get(node) or f"node {node}" for node in nodes]

    @property
    def nodes(self) -> int:
        """How many nodes are online, named or not."""
        return len(self._registered)

    def refresh(self) -> None:
        """Check who is online, ask new nodes to describe themselves, and read the answers so far. Does not wait."""
        nodes = self._grid.get_node_ids()
        ids = nodes if isinstance(nodes, set) else set(nodes)
        # Ids take one short call. Names and descriptions are requested only if the ids change.
        if ids != self._seen:
            self._look_up_names()
        elif len(self._cards) == len(ids) and not self._outbox.waiting and self._clock() < self._due:
            return
        now = self._clock()
        # A node that is gone, or whose app hung, is asked anew when it is back.
        for message_id, (asked_node, sent) in list(self._outbox.waiting.items()):
            if int(asked_node) not in self._registered or now - sent > ASK_AGAIN_AFTER:
                del self._outbox.waiting[message_id]
        self._ask_newcomers(now)
        for reply in self._outbox.pull():
            self._read(int(reply.name), reply)

    def _look_up_names(self) -> None:
        """Ask the grid for the names under which its nodes were registered, and forget nodes that are gone."""
        self._registered = {int(n.node_id): normal_form(n.name or "") for n in self._grid.get_nodes()}
        self._seen = set(self._registered)
        names = set(self._registered.values())
        # A node that only called itself by a name gives way to the one that is registered under it.
        gone = [
            node
            for node, card in self._cards.items()
            if node not in self._registered or (not card.registered and card.name in names)
        ]
        for node in gone:
            if node in self._cards:  # forgetting one node may also forget another
                self._forget(node)

    def _ask_newcomers(self, now: float) -> None:
        pending, every = {int(node) for node in self._outbox.unanswered()}, self.describe_every or math.inf
        newcomers = [
            node
            for node in self._registered
            if node not in pending
            and (now - self._described.get(node, now) >= every if node in self._cards else not self._unfit.waits(node))
        ]
        self._described.update(dict.fromkeys(newcomers, now))
        if self.describe_every is not None:
            self._due = min(self._described.values(), default=now) + self.describe_every
        question = RecordDict({RECORD: ConfigRecord({"version": VERSION})})
        self._outbox.send(
            {str(n): Message(question, dst_node_id=n, message_type=DESCRIBE, ttl=ASK_AGAIN_AFTER) for n in newcomers}
        )

    def _bump_version(self) -> None:
        self._sorted = None
        self.version += 1

    def _forget(self, node: int) -> None:
        self._bump_version()
        self._described.pop(node, None)
        card = self._cards.pop(node)
        if self._by_name.get(card.name) == node:
            del self._by_name[card.name]
            # An earlier node with this name may still be online, so it is asked again.
            for other in [n for n, c in self._cards.items() if c.name == card.name]:
                del self._cards[other]

    def _read(self, node: int, reply: GridReply) -> None:
        """Read how a node describes itself."""
        if node not in self._registered or reply.vanished or reply.expired:
            return
        described = self._description_in(node, reply)
        if described is None:
            return
        description, answers = described
        # A registered name is bound to the node's key; a name that a client gives itself is not.
        name = self._registered[node]
        registered = bool(name)
        if not registered:
            called = description.name or f"node-{node}"
            name = self._names.get(node, called)  # the first one that it took part under
            if called != name and node not in self._renamed:
                self._renamed.add(node)
                log.warning("node %d now calls itself %r; it stays %r as long as this run lasts", node, called, name)
            if name in self._registered.values():
                if not self._unfit.waits(node):
                    log.warning("node %d is left out: it calls itself %r, the name of a registered node", node, name)
                self._unfit.add(node)
                if node in self._cards:
                    self._forget(node)
                return
        rival = self._by_name.get(name, node)
        if rival != node:
            if node in self._cards:
                return  # a node that came later has the name now
            log.warning(
                "node %d answers to the name %r, so node %d is treated as its earlier connection and ignored",
                node, name, rival,
            )  # fmt: skip
        card = Card(name, node, description, answers, registered)
        if self._cards.get(node) == card and self._by_name.get(name) == node:
            return
        self._bump_version()
        self._cards[node] = card
        self._by_name[name] = node
        self._names[node] = name

    def _description_in(self, node: int, reply: GridReply) -> tuple[Description, bool] | None:
        """Return a node's description and whether its ClientApp uses fedcohort, or None if it cannot be used."""
        if reply.error is None:
            try:
                return Description.from_record(reply.message.content.config_records.get(RECORD, {})), True
            except ValueError as error:
                log.warning("node %d described itself in a way that cannot be read: %s", node, error)
                self._unfit.add(node)
                return None
        if node in self._cards:
            return None  # its earlier description still holds
        if _NOT_OURS.search(reply.error) is not None:
            return Description(""), False
        log.warning("node %d could not describe itself and is left out for now: %s", node, reply.error)
        self._unfit.add(node)
        return None
