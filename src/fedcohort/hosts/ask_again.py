"""When to ask a client again that could not describe itself; the same on every host."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable

ASK_AGAIN_AFTER = 120.0  # seconds after a failed or unanswered description


class PostponedClients:
    """Clients whose description failed, each with the time when it may be asked again.

    >>> now = 0.0
    >>> postponed = PostponedClients(clock=lambda: now)
    >>> postponed.add("anna")
    >>> postponed.waits("anna"), postponed.waits("ben")
    (True, False)
    >>> now = 120.0
    >>> postponed.waits("anna")
    False
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[Hashable, float] = {}

    def add(self, client: Hashable) -> None:
        """Postpone the next question to a client."""
        self._until[client] = self._clock() + ASK_AGAIN_AFTER

    def waits(self, client: Hashable) -> bool:
        """Whether it is too early to ask the client again."""
        return self._clock() < self._until.get(client, -math.inf)
