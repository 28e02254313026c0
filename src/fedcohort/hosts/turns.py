"""Who gave the newest answers of a flow, and who has given enough of them for now.

Whoever has just answered is often the only client that is free, and then it is chosen by every selector. So one fast
client could give every answer. With n clients online, those at work included, no client gives more than a number m of
any n successive answers: it is asked again only if it gave fewer than m of the newest n - 1.

This never stops a flow. If everybody who may be asked had given m of the newest n - 1 answers while nobody is at work,
these would be m n answers, more than n - 1. So somebody is at work whenever a place waits, and with m = 2 at least half
of the n clients are.
"""

from __future__ import annotations

import numpy as np

from fedcohort.core.arrays import IntArray

_NOBODY = np.empty(0, np.int64)


class Turns:
    """The newest answers of each client.

    Parameters
    ----------
    most : int
        How many of as many successive answers as clients are online may be one client's.

    Examples
    --------
    >>> turns = Turns(most=2)
    >>> for client in (4, 4, 1):
    ...     turns.add(client)
    >>> turns.over(online=4), turns.over(online=3)
    (array([4]), array([], dtype=int64))
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._answers = 0
        self._numbers: dict[int, list[int]] = {}  # by client, the numbers of its newest answers, at most `most`
        self._since = _NOBODY  # (clients,) the number of each client's answer that was `most` answers ago, or -1
        self._newest = -1  # the largest of these

    def add(self, client: int) -> None:
        """Count a valid answer."""
        numbers = self._numbers.setdefault(client, [])
        numbers.append(self._answers)
        self._answers += 1
        if len(numbers) < self._most:
            return
        if client >= len(self._since):
            room = np.full(max(client + 1, 2 * len(self._since)) - len(self._since), -1)
            self._since = np.concatenate([self._since, room])
        self._since[client] = numbers[-self._most]
        self._newest = max(self._newest, numbers[-self._most])
        del numbers[: 1 - self._most or None]

    def over(self, online: int) -> IntArray:
        """Return the clients that may not be asked while ``online`` clients are free or at work."""
        first = max(self._answers - online + 1, 0)
        # Most of the time there are none, and a federation may have a million clients.
        return _NOBODY if self._newest < first else np.flatnonzero(self._since >= first)
