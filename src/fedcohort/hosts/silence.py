r"""How long a client of a flow has time to answer, and how long one that did not answer is left alone.

A silent client holds its place until its deadline. If it were asked again at once, ten silent clients could hold three
places nearly all the time. So after s deadlines in a row, a client with the deadline d is not asked for
:math:`4 d\, 2^{s-1}` seconds: it costs at most a fifth of a place, then a ninth, and so on. Any answer, also a late
one, ends this. A client that comes back has to wait about as long as it was away. After a restart nobody is left alone,
because the clients may have been mended too, but the next silence counts as one more.

With ``deadline="auto"``, a client has three times as long as the longest of its newest three answers took, and twice as
long after each silence. One that has never answered has three times as long as nine in ten of the others took, each
counted once, or a minute as long as fewer than four fifths of the clients asked have ever answered. So clients that
answer at once do not shorten the time of others. A deadline that was too short costs one answer: it arrives late, and
from then on its time is known.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import numpy as np

from fedcohort.core.arrays import BoolArray
from fedcohort.core.protocol import Status
from fedcohort.journal.events import TIMES
from fedcohort.session.session import Session

_REST = 4.0  # deadlines that a client is left alone after its first silence
_FACTOR, _SHARE, _NEWEST = 3.0, 0.9, 3
_KNOWN = 0.8  # the share of clients that must have answered before others are judged by them
_FIRST, _LEAST = 60.0, 1.0  # seconds: before anybody has answered, and the shortest deadline
_MAX_DOUBLINGS = 20


class Silence:
    """What a flow knows about the answers and silences of its clients.

    Parameters
    ----------
    deadline : float or "auto", optional
        Seconds that one client has. None: clients are waited for without an end.

    Examples
    --------
    >>> silence = Silence("auto")
    >>> silence.ask(0)
    >>> silence.ask(1)
    >>> silence.deadline_for(0)
    60.0
    >>> silence.answered(0, 2.0)
    >>> silence.deadline_for(0), silence.deadline_for(1)
    (6.0, 60.0)
    >>> silence.add(1, now=60.0, deadline=60.0)
    240.0
    >>> silence.resting(now=100.0, n=3), silence.resting(now=300.0, n=3)
    (array([False,  True, False]), array([False, False, False]))
    """

    def __init__(self, deadline: float | Literal["auto"] | None) -> None:
        self._deadline = deadline
        self._asked: set[int] = set()
        self._times: dict[int, deque[float]] = {}  # by client, the newest
        self._usual: float | None = None  # what nine in ten took; None until it is computed again
        self._count: dict[int, int] = {}  # by client, deadlines missed in a row
        self._until: dict[int, float] = {}  # by client, when it may be asked again

    @classmethod
    def of(cls, session: Session, deadline: float | Literal["auto"] | None) -> Silence:
        """Read what a session's journal says about earlier answers."""
        silence = cls(deadline)
        clients = {}
        for block in session.journal.reply_blocks():
            clients[block.ticket] = client = int(block.clients[0])
            if block.status[0] == Status.MISSING and not block.late:
                silence._count[client] = silence._count.get(client, 0) + 1
            else:
                silence._count.pop(client, None)
        silence._asked = set(clients.values())
        for body in session.journal.events(TIMES):
            if body["ticket"] in clients:
                silence._remember(clients[body["ticket"]], body["seconds"][0])
        return silence

    def ask(self, client: int) -> None:
        """Note that a client is asked."""
        self._asked.add(client)

    def deadline_for(self, client: int) -> float | None:
        """Return how many seconds a client has to answer; None for as long as it needs."""
        if self._deadline != "auto":
            return self._deadline
        doubled = 2.0 ** min(self._count.get(client, 0), _MAX_DOUBLINGS)
        if client in self._times:
            usual = max(self._times[client])
        elif len(self._times) >= _KNOWN * len(self._asked) > 0:
            if self._usual is None:
                newest = [times[-1] for times in self._times.values()]
                self._usual = float(np.quantile(newest, _SHARE, method="higher"))
            usual = self._usual
        else:
            return _FIRST * doubled
        return max(_FACTOR * usual, _LEAST) * doubled

    def answered(self, client: int, seconds: float | None = None) -> None:
        """Note that a client has answered, in time or late; ``seconds`` is None if its time says nothing."""
        self._count.pop(client, None)
        self._until.pop(client, None)
        if seconds is not None:
            self._remember(client, seconds)

    def _remember(self, client: int, seconds: float) -> None:
        self._times.setdefault(client, deque(maxlen=_NEWEST)).append(seconds)
        self._usual = None

    def add(self, client: int, now: float, deadline: float) -> float:
        """Note that a client has missed its deadline; return for how many seconds it is left alone."""
        count = self._count[client] = self._count.get(client, 0) + 1
        rest = _REST * deadline * 2.0 ** min(count - 1, _MAX_DOUBLINGS)
        self._until[client] = now + rest
        return rest

    def resting(self, now: float, n: int) -> BoolArray:
        """(n,) whether each client is left alone."""
        resting: BoolArray = np.zeros(n, np.bool_)
        resting[[client for client, until in self._until.items() if until > now]] = True
        return resting

    def first_of(self, clients: BoolArray) -> BoolArray:
        """Return only the one of ``clients`` that may be asked again first."""
        first: BoolArray = np.zeros(len(clients), np.bool_)
        first[min(np.flatnonzero(clients).tolist(), key=lambda client: self._until.get(client, 0.0))] = True
        return first
