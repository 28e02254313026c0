"""Messages out, replies in, never longer than a deadline.

``Grid.send_and_receive`` looks for replies every three seconds and cannot stop at the first k. Here replies are pulled
at short, growing intervals, each is matched to the name it was sent to, and what is still owed can be collected later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

log = logging.getLogger("flwr.fedcohort")
SHORTEST_PAUSE = 0.02
LONGEST_PAUSE = 1.0
_RESOLUTION = 0.05  # a pause is this share of the time waited so far, and so is the error of a measured duration
_LOST = frozenset({ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE})


class Reply(NamedTuple):
    """One reply: to whom the message went, what came back, and how long it took."""

    name: str
    message: Message
    seconds: float

    @property
    def error(self) -> str | None:
        """Why the client failed, or None."""
        if not self.message.has_error():
            return None
        reason = self.message.error.reason
        return reason if reason else f"error {self.message.error.code}"

    @property
    def vanished(self) -> bool:
        """Whether Flower reports that the node is gone."""
        return self.message.has_error() and self.message.error.code == ErrorCode.NODE_UNAVAILABLE

    @property
    def expired(self) -> bool:
        """Whether Flower reports that message or reply are past their time to live."""
        return self.message.has_error() and self.message.error.code in _LOST


@dataclass
class Outbox:
    """Messages that were sent and are not answered yet."""

    grid: Grid
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    waiting: dict[str, tuple[str, float]] = field(default_factory=dict)  # message id -> (name, when it was sent)

    def send(self, messages: Mapping[str, Message]) -> list[str]:
        """Push one message per name; return the names whose message the SuperLink did not take."""
        if not messages:
            return []
        outgoing = list(messages.values())
        now = self.clock()
        ids = list(self.grid.push_messages(outgoing))
        if len(ids) != len(outgoing):  # an in-memory grid leaves out what it refused
            taken = set(ids)
            ids = [m.metadata.message_id if m.metadata.message_id in taken else "" for m in outgoing]
        refused = []
        for name, message_id in zip(messages, ids, strict=True):
            if message_id:
                self.waiting[message_id] = (name, now)
            else:
                refused.append(name)
        return refused

    def pull(self) -> list[Reply]:
        """Return what has arrived by now."""
        if not self.waiting:
            return []
        arrived = []
        messages = list(self.grid.pull_messages(list(self.waiting)))
        now = self.clock()
        for message in messages:
            answered = message.metadata.reply_to_message_id
            sent = self.waiting.pop(answered, None)
            if sent is None:
                log.debug("a reply to the unknown message %s was dropped", answered)
                continue
            name, since = sent
            arrived.append(Reply(name, message, now - since))
        return arrived

    def gather(self, deadline: float, done: Callable[[Sequence[Reply]], bool] | None = None) -> list[Reply]:
        """Return the replies that arrive within ``deadline`` seconds, or until ``done`` says there are enough."""
        replies: list[Reply] = []
        end = self.clock() + deadline
        begun = self.clock()
        while True:
            news = self.pull()
            replies += news
            if not self.waiting or (news and done is not None and done(replies)):
                return replies
            left = end - self.clock()
            if left <= 0:
                return replies
            pause = _RESOLUTION * (self.clock() - begun)
            self.sleep(min(max(pause, SHORTEST_PAUSE), LONGEST_PAUSE, left))

    def owing(self) -> set[str]:
        """Return the names that have not answered."""
        return {name for name, _ in self.waiting.values()}


def exchange(
    grid: Grid,
    messages: Mapping[str, Message],
    deadline: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Reply]:
    """Send one message per name and return the replies of ``deadline`` seconds, by name."""
    outbox = Outbox(grid, clock, sleep)
    outbox.send(messages)
    return {reply.name: reply for reply in outbox.gather(deadline)}


def with_ttl(messages: Iterable[Message], seconds: float) -> None:
    """Let messages expire, so that a node that returns much later does not train a model nobody waits for."""
    for message in messages:
        message.metadata.ttl = seconds
