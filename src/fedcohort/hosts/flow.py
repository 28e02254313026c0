"""A flow of clients instead of rounds: as soon as a client answers or fails, another one takes its place.

Nothing here waits, sends a message or reads a clock. A host tells a :class:`Flow` what happened, and the flow decides
what follows, as a :class:`~fedcohort.hosts.round.Round` does for rounds: how many clients may be asked now, which
answers the next global model consists of, and when it is due. It needs an asynchronous session, in which every cohort
is one client and the round is the number of the newest model.

Three policies differ only in when a model is due: after every answer (FedAsync), after several (FedBuff), or at fixed
times (semi-synchronous). How many answers one client may give is limited. Answers that are not
used yet are recorded with each report, so a flow that is killed between any two events continues where it was.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedcohort.core import rng as streams
from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.errors import InputError
from fedcohort.core.params import Interval, Optional, check_values
from fedcohort.core.protocol import Answer, Cohort, Query, RoundReport, RoundRequest, Status
from fedcohort.core.signals import Signal
from fedcohort.core.text import join_names
from fedcohort.journal.events import WAITED
from fedcohort.session.session import Session

_COUNT = Interval(int, 1, None)
_NO_METRICS: Mapping[Signal, FloatArray] = {}
_BUFFER, _SINCE, _FAILURES = "buffer", "since", "failures"  # keys of the state that is stored with the session
_BATCHES = "flow"  # the random stream for the batches of a ticket
_NAMED = 8  # how many clients an entry of the journal names
_NOBODY = np.empty(0, np.int64)
_TRIES = 3  # a client that fails this often is passed over until the next model


def batch_seed(seed: int, ticket: int) -> int:
    """Return the seed of a ticket's local training, so that a client that trains one model twice gets other batches."""
    return int(streams.stream(seed, _BATCHES, ticket).integers(1 << 62))


@dataclass(frozen=True)
class FlowPolicy:
    """How a flow runs.

    Parameters
    ----------
    busy : int
        How many clients work at the same time.
    buffer : int
        How many valid answers make a new global model: 1 is FedAsync, more is FedBuff.
    period : float, optional
        Seconds between two models, instead of a number of answers. A model without any answers waits for the first.
    max_answers : int
        How many of as many successive answers as clients are online may be one client's: 2 is twice an even share. A
        client that has given them is not asked, and if only such clients are free, the place waits. A number as large
        as the federation sets no limit.
    min_clients : int
        A model needs answers of at least this many different clients, so that the share of each can be limited. While
        too few have answered, only others are asked.
    """

    busy: int
    buffer: int = 1
    period: float | None = None
    max_answers: int = 2
    min_clients: int = 1

    def __post_init__(self) -> None:
        period = Optional(Interval(float, 0, None, "neither"))
        counts = dict.fromkeys(("busy", "buffer", "max_answers", "min_clients"), _COUNT)
        check_values(self, {**counts, "period": period})


class BufferedAnswer(NamedTuple):
    """A valid answer that waits for the next global model.

    Attributes
    ----------
    version : int
        The number of the model that the client began with.
    """

    ticket: int
    client: int
    version: int


class _Turns:
    """The newest answers of each client, and who has given enough of them for now.

    Whoever has just answered is often the only client that is free, and then it is chosen by every selector. So one
    fast client could give every answer. With n clients online, those at work included, no client gives more than a
    number m of any n successive answers: it is asked again only if it gave fewer than m of the newest n - 1.

    This never stops a flow. If everybody who may be asked had given m of the newest n - 1 answers while nobody is at
    work, these would be m n answers, more than n - 1. So somebody is at work whenever a place waits, and with m = 2 at
    least half of the n clients are.

    Parameters
    ----------
    most : int
        How many of as many successive answers as clients are online may be one client's.

    Examples
    --------
    >>> turns = _Turns(most=2)
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


class Flow:
    """Clients that work one by one for an asynchronous session.

    Parameters
    ----------
    session : Session
        An asynchronous session; the flow continues from its record.
    now : float, optional
        The time on any clock; only ``period`` depends on it. Default: when the newest model was made.

    Attributes
    ----------
    waiting : list of BufferedAnswer
        The answers for the next model, in the order of arrival.
    excluded : tuple of str or None
        After :meth:`open`, why none of the clients available may be asked; None if somebody may.

    Examples
    --------
    >>> session = Session("uniform", clients=10, seed=1, asynchronous=True)
    >>> flow = Flow(session, FlowPolicy(busy=3, buffer=2))
    >>> first = [flow.choose() for _ in range(flow.free)]
    >>> flow.receive(first[1].ticket, Status.OK), flow.free
    (True, 1)
    >>> flow.receive(first[0].ticket, Status.FAILED), flow.is_due(0.0)
    (False, False)
    >>> flow.receive(first[2].ticket, Status.OK), flow.is_due(0.0)
    (True, True)
    >>> [one.ticket for one in flow.advance(0.0)], session.round
    ([1, 2], 1)
    """

    def __init__(self, session: Session, policy: FlowPolicy, now: float | None = None) -> None:
        if not session.asynchronous:
            raise InputError("A flow needs an asynchronous session.", hint="Session(..., asynchronous=True)")
        self.session = session
        self.policy = policy
        self._busy: BoolArray = np.zeros(session.table.n, np.bool_)
        self._at_work: dict[int, Cohort] = {}
        for cohort in session.pending:
            self._begin(cohort)
        stored = session.host_state if isinstance(session.host_state, Mapping) else {}
        self.waiting = [BufferedAnswer(*map(int, row)) for row in stored.get(_BUFFER, ())]
        since = float(stored.get(_SINCE, now or 0.0))
        # When the newest model was made; the clock of another process may have started later.
        self._since = since if now is None else min(since, now)
        self._failures = {int(client): int(count) for client, count in stored.get(_FAILURES, ())}
        self._turns = _Turns(policy.max_answers)
        for block in session.journal.reply_blocks():
            if not block.late and block.status[0] == Status.OK:
                self._turns.add(int(block.clients[0]))
        waits = session.journal.events(WAITED)
        self._waited = int(waits[-1]["ticket"]) if waits else -1  # the newest ticket whose place had to wait
        self._opened: RoundRequest | None = None  # by `open`, for the next choice
        self.excluded: tuple[str, ...] | None = None

    def _begin(self, cohort: Cohort) -> None:
        self._at_work[cohort.ticket] = cohort
        self.busy[cohort.clients] = True

    # -- the choice ---------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> BoolArray:
        """(N,) whether each client is at work."""
        if (joined := self.session.table.n - len(self._busy)) > 0:
            self._busy = np.append(self._busy, np.zeros(joined, np.bool_))
        return self._busy

    @property
    def passed_over(self) -> BoolArray:
        """(N,) whether each client has failed three times since the newest model; such clients are asked last."""
        clients: BoolArray = np.zeros(self.session.table.n, np.bool_)
        clients[[client for client, count in self._failures.items() if count >= _TRIES]] = True
        return clients

    @property
    def free(self) -> int:
        """How many more clients may start to work."""
        return max(self.policy.busy - len(self._at_work), 0)

    @property
    def at_work(self) -> tuple[Cohort, ...]:
        """The clients at work, each a cohort of one, in the order in which they began."""
        return tuple(self._at_work.values())

    def open(self, available: BoolArray | None = None) -> Query | None:
        """Return the question that the selector asks before it chooses one of ``available`` (N,), or None.

        Then ``excluded`` says whether anybody may be asked.
        """
        self._opened = self._request(available)
        return None if self.excluded else self.session.query(self._opened)

    def _request(self, available: BoolArray | None) -> RoundRequest:
        """Return the request for the next client, and set ``excluded``."""
        if any(count >= _TRIES for count in self._failures.values()):
            online = np.ones(self.session.table.n, np.bool_) if available is None else available
            others = online & ~self.passed_over
            if (others & ~self.busy).any():
                available = others
        # The same array as the caller's whenever nobody is left out, because sessions recognise one they have seen.
        request, self.excluded = RoundRequest(1, available), None
        eligible = self.session.eligibility(request)
        if eligible is not None and not len(eligible.allowed):
            self.excluded = eligible.reasons or None
            return request
        free = self.session.active & ~self.busy if available is None else available & ~self.busy
        if eligible is not None:
            free = np.isin(np.arange(len(free)), eligible.allowed)
        present = int(free.sum()) + len(self._at_work)
        enough = max(self.policy.buffer, self.policy.min_clients)
        if self.lacks_clients and len(self.waiting) >= enough:
            answered = np.unique([answer.client for answer in self.waiting])
            free[answered] = False
            names, needed = self.session.table.names_of(answered[:_NAMED]), self.policy.min_clients
            self.excluded = (
                None if free.any() else (f"a model needs {needed} clients, and only {join_names(names)} answered",)
            )
            return RoundRequest(1, free)
        over = self._turns.over(present)
        over = over[free[over]]
        if not len(over):
            return request
        free[over] = False
        if not free.any():
            self._wait(over, present)
        return RoundRequest(1, free)

    def _wait(self, over: IntArray, online: int) -> None:
        """Note that a place waits, once for each ticket, because only clients are free that have had their turns."""
        names, most = self.session.table.names_of(over[:_NAMED]), self.policy.max_answers
        more = f" and {len(over) - _NAMED} more" if len(over) > _NAMED else ""
        self.excluded = (f"{', '.join(names)}{more} gave {most} of the last {online - 1} answers",)
        ticket = self.session.journal.last()[1] + 1
        if ticket > self._waited:
            self._waited = ticket
            body = {"ticket": ticket, "round": self.session.round, "clients": list(names), "count": len(over)}
            self.session.note(WAITED, {**body, "online": online, "at_work": len(self._at_work)})

    def choose(self, answer: Answer | None = None, *, available: BoolArray | None = None) -> Cohort:
        """Return the next client as a cohort of one.

        It is empty if the selector ends the run, if nobody is available, or if only clients are free that have given
        as many of the newest answers as they may: then the place waits until another client has answered.

        ``answer`` is the answer to the question of :meth:`open`. A selector without questions needs only ``available``.
        """
        request = self._request(available) if self._opened is None else self._opened
        self._opened = None
        if self.excluded:
            return Cohort(np.empty(0, np.int64), notes={"reason": self.excluded[0]})
        cohort = self.session.ask(request, answer)
        if cohort.size:
            self._begin(cohort)
        return cohort

    # -- answers ------------------------------------------------------------------------------------------------------

    def receive(
        self,
        ticket: int,
        status: Status,
        metrics: Mapping[Signal, Any] = _NO_METRICS,
        *,
        state: Mapping[str, Any] | None = None,
    ) -> bool:
        """Tell the session how a client's work ended; return whether its answer waits for the next model.

        Parameters
        ----------
        metrics : mapping of Signal to (1,) or (1, V) array
        state : mapping, optional
            The host's state, stored in the same transaction.
        """
        cohort = self._at_work.get(ticket)
        if cohort is None:
            raise InputError(
                f"No client is working on ticket {ticket}.",
                hint=f"tickets at work: {', '.join(map(str, self._at_work)) or 'none'}",
            )
        # Changes are made in copies, which replace the originals once the session has recorded them.
        waiting, failures = list(self.waiting), dict(self._failures)
        client, valid = int(cohort.clients[0]), status is Status.OK
        if valid:
            waiting.append(BufferedAnswer(ticket, client, cohort.round))
            # Only consecutive failures count.
            failures.pop(client, None)
        else:
            failures[client] = failures.get(client, 0) + 1
        report = RoundReport(ticket, cohort.clients, status=[int(status)], metrics=metrics)
        self.session.tell(report, host=self._host_state(waiting, self._since, failures, state))
        self._end(cohort)
        if valid:
            # Not when it is sent: a client that fails has given nothing.
            self._turns.add(client)
        self.waiting, self._failures = waiting, failures
        return valid

    def abandon(self, ticket: int, reason: str) -> None:
        """Release a client that was chosen but cannot be asked; it counts as never chosen."""
        self.session.abandon(ticket, reason)
        self._end(self._at_work[ticket])

    def _end(self, cohort: Cohort) -> None:
        del self._at_work[cohort.ticket]
        self.busy[cohort.clients] = False

    def discard(self, tickets: Container[int]) -> None:
        """Drop waiting answers that no model can use; they count as failures. The next event records this."""
        for answer in self.waiting:
            if answer.ticket in tickets:
                self._failures[answer.client] = self._failures.get(answer.client, 0) + 1
        self.waiting = [answer for answer in self.waiting if answer.ticket not in tickets]

    def staleness(self, answer: BufferedAnswer) -> int:
        """Return how many models are newer than the one that an answer began with."""
        return self.session.round - answer.version

    # -- models -------------------------------------------------------------------------------------------------------

    @property
    def due_at(self) -> float:
        """When the next model is due; infinity without a period, when the number of answers decides."""
        return math.inf if self.policy.period is None else self._since + self.policy.period

    @property
    def lacks_clients(self) -> bool:
        """Whether answers of other clients are needed for a model, whenever it is due."""
        return len({answer.client for answer in self.waiting}) < self.policy.min_clients

    def is_due(self, now: float) -> bool:
        """Whether it is time for a new global model."""
        if self.lacks_clients:
            return False
        return now >= self.due_at if self.policy.period is not None else len(self.waiting) >= self.policy.buffer

    def advance(self, now: float, *, state: Mapping[str, Any] | None = None) -> list[BufferedAnswer]:
        """Tell the session that the waiting answers have become a new model, and return them.

        With a period, the next model is due at the next multiple of the period.
        """
        used, since = self.waiting, now
        if self.policy.period is not None:
            since = self.due_at + math.floor((now - self.due_at) / self.policy.period) * self.policy.period
        self.session.advance([answer.ticket for answer in used], host=self._host_state([], since, {}, state))
        self.waiting, self._since, self._failures = [], since, {}
        return used

    @staticmethod
    def _host_state(
        waiting: list[BufferedAnswer], since: float, failures: Mapping[int, int], state: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        stored: dict[str, Any] = {**(state or {}), _BUFFER: [list(answer) for answer in waiting], _SINCE: since}
        return {**stored, _FAILURES: [list(item) for item in failures.items()]} if failures else stored
