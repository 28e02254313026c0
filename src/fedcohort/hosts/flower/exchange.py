"""Send messages and collect replies, at most until a deadline.

``Grid.send_and_receive`` checks for replies every three seconds and cannot stop at the first k. Here, replies are
pulled at short, growing intervals and matched to the client that each message was sent to. Replies that are still
missing can be collected later.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedcohort.core.text import OneLine, shorten

log = logging.getLogger("flwr.fedcohort")
log.addFilter(OneLine())  # all modules of this package use this logger, and quote what clients wrote
SHORTEST_PAUSE = 0.02  # seconds; each check is a call to the SuperLink
LONGEST_PAUSE = 1.0  # seconds by which a pause may prolong a round
_RESOLUTION = 0.05  # a pause, and so the error of a measured duration, is this share of the time waited so far
_RAISED = re.compile(r"^<class '(?:\w+\.)*(\w+)'>:<'(.*)'>$", re.DOTALL)  # how Flower writes an error of a ClientApp
_EXPIRED = frozenset({ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE})


class GridReply(NamedTuple):
    """One reply: the client's name, what it sent, and how long it took."""

    name: str
    message: Message
    seconds: float

    @property
    def error(self) -> str | None:
        """Why the client failed, or None."""
        if not self.message.has_error():
            return None
        reason = self.message.error.reason
        return shorten(_RAISED.sub(r"\1: \2", reason)) if reason else f"error {self.message.error.code}"

    @property
    def vanished(self) -> bool:
        """Whether Flower reports that the node is gone."""
        return self.message.has_error() and self.message.error.code == ErrorCode.NODE_UNAVAILABLE

    @property
    def expired(self) -> bool:
        """Whether Flower reports that the message or the reply has expired."""
        return self.message.has_error() and self.message.error.code in _EXPIRED


@dataclass
class Outbox:
    """Messages that were sent and have not been answered yet."""

    grid: Grid
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    waiting: dict[str, tuple[str, float]] = field(default_factory=dict)  # message id -> (name, when it was sent)
    _pause_first: bool = False  # whether replies were pulled before, so that a pause is due

    def send(self, messages: Mapping[str, Message]) -> list[str]:
        """Push one message per name; return the names whose message the SuperLink did not accept."""
        if not messages:
            return []
        outgoing = list(messages.values())
        now = self.clock()
        ids = list(self.grid.push_messages(outgoing))
        if len(ids) != len(outgoing):  # an in-memory grid leaves out the messages that it refused
            accepted = set(ids)
            ids = [m.metadata.message_id if m.metadata.message_id in accepted else "" for m in outgoing]
        refused = []
        for name, message_id in zip(messages, ids, strict=True):
            if message_id:
                self.waiting[message_id] = (name, now)
            else:
                refused.append(name)
        return refused

    def pull(self) -> list[GridReply]:
        """Return the replies that have arrived."""
        if not self.waiting:
            return []
        replies = []
        messages = list(self.grid.pull_messages(list(self.waiting)))
        now = self.clock()
        for message in messages:
            message_id = message.metadata.reply_to_message_id
            sent = self.waiting.pop(message_id, None)
            if sent is None:  # a grid may deliver a reply twice
                log.debug("a reply to the unknown message %s was dropped", message_id)
                continue
            name, since = sent
            replies.append(GridReply(name, message, now - since))
        return replies

    def receive(self, until: float) -> list[GridReply]:
        """Return the replies that have arrived; if there are none, wait for one until the time ``until``."""
        begun = max((since for _, since in self.waiting.values()), default=until)
        while True:
            if self._pause_first:
                now = self.clock()
                # Longer and longer: each check is a call to the SuperLink, and a late one prolongs a round by as much.
                pause = min(max(_RESOLUTION * (now - begun), SHORTEST_PAUSE), LONGEST_PAUSE, until - now)
                if pause > 0:
                    self.sleep(pause)
            replies = self.pull()
            self._pause_first = True
            if replies or not self.waiting or self.clock() >= until:
                return replies

    def gather(self, seconds: float) -> list[GridReply]:
        """Return the replies that arrive within ``seconds``."""
        until = self.clock() + seconds
        replies = self.receive(until)
        while self.waiting and self.clock() < until:
            replies += self.receive(until)
        return replies

    def unanswered(self) -> set[str]:
        """Return the names of the clients that have not answered."""
        return {name for name, _ in self.waiting.values()}


@dataclass(frozen=True)
class _OutstandingReply:
    """Messages that were not answered in time; their clients are busy until they answer or the messages expire.

    Attributes
    ----------
    nodes : mapping of str to int
        The node of each client; a client that has restarted since then owes nothing.
    ticket : int or None
        The ticket of a cohort that trains; None for questions and evaluations.
    """

    outbox: Outbox
    nodes: Mapping[str, int]
    ticket: int | None = None


@dataclass
class OutstandingReplies:
    """All answers that clients still owe.

    Attributes
    ----------
    working : dict of str to int
        The clients that train and are waited for, with their nodes; only used without rounds.
    """

    open: list[_OutstandingReply] = field(default_factory=list)
    working: dict[str, int] = field(default_factory=dict)

    def add(self, outbox: Outbox, nodes: Mapping[str, int], ticket: int | None = None) -> None:
        """Add the clients of an outbox that have not answered, if any."""
        if outbox.waiting:
            unanswered = outbox.unanswered()
            self.open.append(
                _OutstandingReply(outbox, {n: node for n, node in nodes.items() if n in unanswered}, ticket)
            )

    def busy(self, name: str, node: int) -> bool:
        """Whether a client still owes an answer."""
        return self.working.get(name) == node or any(
            overdue.nodes.get(name) == node and name in overdue.outbox.unanswered() for overdue in self.open
        )

    def collect(self) -> list[tuple[_OutstandingReply, GridReply]]:
        """Return the answers that have arrived since the last call, and forget what is settled."""
        replies = [(overdue, reply) for overdue in self.open for reply in overdue.outbox.pull()]
        self.open = [overdue for overdue in self.open if overdue.outbox.waiting]
        return replies


def exchange(
    outbox: Outbox, messages: Mapping[str, Message], deadline: float, outstanding: OutstandingReplies
) -> dict[str, GridReply]:
    """Send one message per name and return the replies within ``deadline`` seconds, by name; the rest stays open."""
    for message in messages.values():  # a node that returns much later must not answer what nobody asks any more
        message.metadata.ttl = 2 * deadline
    outbox.send(messages)
    replies = {reply.name: reply for reply in outbox.gather(deadline)}
    outstanding.add(outbox, {name: message.metadata.dst_node_id for name, message in messages.items()})
    return replies
