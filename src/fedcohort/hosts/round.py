"""What a round decides, on every host: how many clients to ask, which replies count, what to report.

Nothing here waits, sends a message or reads a clock. A host tells a :class:`Round` what happened, and the round decides
what follows. So the simulator, a live federation and a test with scripted arrivals all close rounds in the same way.
The simulator passes the arrivals of a whole cohort as arrays; :mod:`fedcohort.hosts.live` passes replies one by one.

A round knows its session and its cohort, but no other round. Several rounds may be open at once, each with the ticket
of its cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray, FloatArray, IntArray
from fedcohort.core.errors import FedcohortError, InputError, ParameterError
from fedcohort.core.params import Boolean, Constraint, Either, Interval, OneOf, Optional, check_values
from fedcohort.core.protocol import Answer, Cohort, Query, RoundReport, RoundRequest, Status
from fedcohort.core.signals import Signal
from fedcohort.core.text import join_names
from fedcohort.core.validate import input_error
from fedcohort.hosts.early_stop import EarlyStop
from fedcohort.hosts.pace import MAX_LEFT_OUT, Pace, Proposal, first_deadline
from fedcohort.journal.events import ABANDONED, FAILURES, PROPOSED, TIMES, TRIED
from fedcohort.session.session import Session

T = TypeVar("T")
_NAMED = 8  # how many clients an error names
_COUNT, _SECONDS = Interval(int, 1, None), Interval(float, 0, None, "neither")
DEADLINE = Optional(Either(_SECONDS, OneOf(("auto",))))
LATE_REPLIES = OneOf(("discard", "count"))
_NO_METRICS: Mapping[Signal, FloatArray] = {}
# Plain numbers, because NumPy compares members of an enumeration several times more slowly.
_OK, _INVALID, _LATE, _MISSING = (int(s) for s in (Status.OK, Status.INVALID, Status.LATE, Status.MISSING))


class RoundError(FedcohortError, RuntimeError):
    """A round gave no model in any of its tries."""


class FederationTimeoutError(FedcohortError, TimeoutError):
    """Too few clients came online in time."""

    __str__ = FedcohortError.__str__


@dataclass(frozen=True)
class Policy:
    """How a host runs its rounds.

    Parameters
    ----------
    size : int, None or callable
        How many models a round needs; None means one from every available client. A callable gets the number of
        clients online and returns such a number or None.
    spares : int
        How many extra clients are asked to train. The round closes with the first ``size`` valid models.
    deadline : float or "auto", optional
        Seconds after which a round closes with the models it has. With ``"auto"``, deadline and spares follow from how
        long clients have taken (:mod:`fedcohort.hosts.pace`): ``spares`` is the upper limit, and a round always waits
        for ``min_replies`` models. Default: wait for everybody.
    leave_out_slow : bool
        Whether an automatic deadline may leave out more than a fifth of the clients that ever answered, if models come
        faster without them. Then the clients that answer fastest can own the global model.
    query_deadline : float, optional
        Seconds that clients have to answer questions before the choice. Default: as ``deadline``.
    late : "discard" or "count"
        What happens to a valid model that arrives after its round was closed. It is recorded and left out, or it enters
        the average of the next round that closes, as an update of an older model (:class:`Late`).
    min_replies : int, optional
        With fewer valid models than this, a round gives no model and is tried again. With 0, every round counts. An
        automatic deadline aims at rounds with at least this many. Default: 1, and automatic deadlines aim at half of
        ``size``, because rounds with one or two models learn badly.
    tries : int
        How often a round is tried. A round without a model is tried with another cohort, without the clients that
        failed if there are enough others; after this many tries, the run ends with a :class:`RoundError`. An
        interrupted round is trained again; after this many interruptions, another cohort is chosen. A try does not
        count if it finds a new client to leave out and others of its cohort sent valid models.
    wait_for : int, optional
        How many clients must be online before a round. Default: 1; on Flower, as many as the wrapped strategy wants.
    patience : float
        Longest time to wait for clients, in seconds.
    early_stop : EarlyStop or mapping, optional
        When a run ends because a metric of the global model no longer improves. Default: after its last round.
    max_share : float, optional
        Largest share of a model's weight that one client may have, whatever size it claims. Default: limited only by
        the size it declared. A host of your own bounds the weights itself.
    max_update_norm : float, optional
        Longer updates are shortened to this Euclidean norm before they are used; only on Flower. Default: no limit.
    private : bool
        Whether noise for differential privacy is calibrated to exactly ``size`` models. Then no other number of models
        may be averaged.
    """

    size: int | Callable[[int], int | None] | None = None
    spares: int = 0
    deadline: float | Literal["auto"] | None = None
    leave_out_slow: bool = False
    query_deadline: float | None = None
    late: Literal["discard", "count"] = "discard"
    min_replies: int | None = None
    tries: int = 3
    wait_for: int | None = None
    patience: float = 600.0
    early_stop: EarlyStop | None = None
    max_share: float | None = None
    max_update_norm: float | None = None
    private: bool = False

    def __post_init__(self) -> None:
        constraints: dict[str, Constraint] = {
            "spares": Interval(int, 0, None),
            "deadline": DEADLINE,
            "leave_out_slow": Boolean(),
            "late": LATE_REPLIES,
            "min_replies": Optional(Interval(int, 0, None)),
            "tries": _COUNT,
            "wait_for": Optional(_COUNT),
            "patience": _SECONDS,
            "query_deadline": Optional(_SECONDS),
            "max_share": Optional(Interval(float, 0, 1, "right")),
            "max_update_norm": Optional(_SECONDS),
        }
        if not callable(self.size):
            constraints["size"] = Optional(_COUNT)
        check_values(self, constraints)
        if isinstance(self.early_stop, Mapping):  # in a job of FLARE, which is written as plain values
            object.__setattr__(self, "early_stop", EarlyStop(**self.early_stop))
        elif self.early_stop is not None and not isinstance(self.early_stop, EarlyStop):
            raise input_error("'early_stop'", "an EarlyStop", self.early_stop)
        if self.private and self.late == "count":
            raise ParameterError(
                "Late models cannot be counted under differential privacy: the noise is calibrated for the models of "
                "one round."
            )

    def size_for(self, online: int) -> int | None:
        """Return how many models a round needs when ``online`` clients can take part, or None for one from each."""
        return self.size(online) if callable(self.size) else self.size

    @property
    def fixed_deadline(self) -> float | None:
        """The deadline if it is the same in every round, else None."""
        return None if self.deadline == "auto" else self.deadline

    @property
    def enough_online(self) -> int:
        """How many clients must be online before a round."""
        return self.wait_for or 1

    @property
    def fewest(self) -> int:
        """The smallest number of valid models that gives a new global model."""
        return 1 if self.min_replies is None else self.min_replies


class _Closing(NamedTuple):
    """When a round closes, and the status of its clients by then."""

    status: AnyArray  # (k,) of Status
    seconds: float  # since the round began


def closing(
    seconds: FloatArray, status: AnyArray, *, deadline: float | None = None, enough: int | None = None
) -> _Closing:
    """Return when a round closes, and the status of each client by then.

    A round closes when everybody has answered, when ``enough`` valid models have arrived, or at the deadline, whichever
    comes first. A reply that arrives at exactly this time counts; a later one is LATE.

    Parameters
    ----------
    seconds : (k,) float array
        When each reply arrives, counted from the beginning of the round; infinity if it has not arrived.
    status : (k,) array of Status
        The status of each reply. MISSING stays MISSING.
    enough : int, optional
        How many valid models close the round. Default: all.

    Examples
    --------
    >>> arrivals, fine = np.array([3.0, 1.0, 2.0]), np.zeros(3, np.int8)
    >>> closing(arrivals, fine, deadline=2.5)
    _Closing(status=array([3, 0, 0], dtype=int8), seconds=2.5)
    >>> closing(arrivals, fine, enough=1).seconds
    1.0
    """
    end = float(seconds.max(initial=0.0))  # infinite while somebody has not answered
    if deadline is not None:
        end = min(end, deadline)
    # With as many as were asked, the last answer closes the round in any case.
    if enough is not None and enough < len(seconds):
        valid = seconds[status == _OK]
        if len(valid) >= enough:
            end = min(end, float(np.partition(valid, enough - 1)[enough - 1]))
    late = seconds > end  # not >=, or the reply that closes the round would be late
    if late.any():
        status = status.copy()
        status[late & (status != _MISSING)] = _LATE
    return _Closing(status, end)


class Reply(NamedTuple):
    """One client's reply in a round.

    Attributes
    ----------
    ticket : int
        The ticket of the cohort.
    status : Status
        OK; INVALID for a model that cannot be used; FAILED for an error; MISSING for a lost message.
    reason : str
        Why the status is not OK.
    seconds : float
        How long the client took, as measured by the host.
    content : object
        What the client sent, for the host's own use.
    """

    ticket: int
    client: str
    status: Status = Status.OK
    reason: str = ""
    seconds: float = 0.0
    content: Any = None


class Late(NamedTuple):
    """A valid reply to an earlier round that counts in this one.

    Attributes
    ----------
    staleness : int
        How many global models are newer than the one the client began with.
    times : float
        How often the selector counts the client, as it said when it chose the client's cohort (``Cohort.weights``).
    """

    reply: Reply
    staleness: int
    times: float = 1.0

    @property
    def discount(self) -> float:
        """A second factor for its weight, unless the aggregator discounts stale models itself."""
        return float(late_discount(np.array(self.staleness)))


def late_discount(staleness: AnyArray) -> FloatArray:
    """Return the factors for the weights of late models, as in FedBuff: 1 / sqrt(1 + staleness).

    >>> late_discount(np.array([0, 3]))
    array([1. , 0.5])
    """
    return np.asarray((1.0 + staleness) ** -0.5)


def newest_late(arrived: Iterable[T], client_of: Callable[[T], Hashable], answered: Container[Any] = ()) -> list[T]:
    """Return which late replies count: of each client the newest, and none of a client that ``answered`` in time.

    Parameters
    ----------
    arrived : iterable
        Late replies in the order in which they arrived.
    client_of : function
        The client of a reply.

    >>> newest_late(["anna 1", "ben 1", "anna 2", "cem 1"], lambda reply: reply.split()[0], {"cem"})
    ['ben 1', 'anna 2']
    """
    newest: dict[Hashable, T] = {}
    for reply in arrived:
        newest.pop(client_of(reply), None)  # so that the order stays that of the arrivals
        newest[client_of(reply)] = reply
    return [reply for client, reply in newest.items() if client not in answered]


class Round:
    """One round of a session: open it, choose a cohort, take its replies, finish it.

    Parameters
    ----------
    online : int, optional
        How many clients are online. Default: all clients of the session.
    pace : Pace, optional
        How long clients have taken; needed with ``deadline="auto"``.
    now : float
        The time on the clock of ``pace``.

    Attributes
    ----------
    begun : float
        When the cohort begins. Default: ``now``.
    proposal : Proposal
        Deadline and spares: those of the policy, or those that follow from earlier rounds.
    size : int or None
        How many models the round needs; None means one from every client.
    shortest : float
        How long the round lasts at least, even if everybody has answered; see :mod:`fedcohort.hosts.pace`.
    cohort : Cohort
        Set by :meth:`choose` or :meth:`resume`.
    seconds : (k,) float array
        When each reply arrived; infinity if it has not.
    status : (k,) int8 array of Status
        The status of each client so far.
    reasons : dict of str to str
        By client, why it has no valid model.
    replies : dict of str to Reply
        The replies that arrived one by one.
    late : list of Late
        Replies to earlier rounds that count in this one.
    """

    __slots__ = (
        "_failed", "_lasted", "_least", "_needed", "_pace", "_places", "_unreached", "begun", "cohort", "late",
        "policy", "proposal", "reasons", "replies", "request", "seconds", "session", "shortest", "size", "status",
    )  # fmt: skip

    def __init__(
        self, session: Session, policy: Policy, online: int | None = None, pace: Pace | None = None, now: float = 0.0
    ) -> None:
        if policy.deadline == "auto" and pace is None:
            raise ParameterError(
                "A round with deadline='auto' needs to know how long clients have taken.",
                hint="pass pace=Pace.of(session), the same one to every round of the session",
            )
        self.session = session
        self.policy = policy
        online = session.table.n if online is None else online
        self.size = policy.size_for(online)
        self.begun = now
        self._pace = pace if policy.deadline == "auto" else None
        self.proposal = Proposal(policy.fixed_deadline, policy.spares)
        self._least = self._needed = 0
        self.shortest = 0.0
        if self._pace is not None:
            size = max(online if self.size is None else min(self.size, online), 1)
            # A round waits for these models beyond its deadline. Otherwise a run would end when all clients become
            # slow, because none of its rounds would give a model.
            self._needed = size if policy.private else min(policy.fewest, size)
            # Many rounds of two or three models are often the fastest way to many models, but they are worth little.
            # So by default, a round should give half of its models.
            self._least = self._needed if policy.private or policy.min_replies else (size + 1) // 2
            spares = min(policy.spares, max(online - size, 0))
            self.proposal = self._pace.propose(
                now, size, spares, self._least, self._needed, leave_out_slow=policy.leave_out_slow
            )
            self.shortest = 0.0 if policy.leave_out_slow else self._pace.shortest_round(now)
        self._failed: BoolArray | None = None
        self._lasted = 0.0
        self.request: RoundRequest
        self.cohort: Cohort
        self.seconds: FloatArray
        self.status: AnyArray
        self.reasons: dict[str, str] = {}
        self.replies: dict[str, Reply] = {}
        self.late: list[Late] = []
        self._places: dict[str, int] = {}
        self._unreached: frozenset[str] = frozenset()

    # -- the choice ---------------------------------------------------------------------------------------------------

    def open(self, available: BoolArray | IntArray | Sequence[str] | None = None) -> Query | None:
        """Return the question that the selector asks before it chooses among ``available``, or None."""
        size = self.size
        if size is not None:
            # A session refuses requests for more clients than it has.
            size = min(size + self.proposal.spares, self.session.table.n)
        self.request = RoundRequest(size, available)
        return self.session.query(self.request)

    def choose(self, answer: Answer | None = None) -> Cohort:
        """Return the cohort; ``answer`` is the answer to the question of :meth:`open`."""
        cohort = self.session.ask(self.request, answer)
        # The strategy divides its noise by the expected size, so a smaller cohort would have less protection.
        if self.policy.private and cohort.size not in (0, self.size):
            why = f"the selector chose {cohort.size} clients, and the privacy noise is calibrated for {self.size}"
            self.session.abandon(cohort.ticket, why)
            self.session.commit()
            raise RoundError(
                f"In round {cohort.round} {why}.",
                hint="use a selector that takes as many as it is asked for, such as 'uniform'",
            )
        if self._pace is not None and cohort.size:
            self.session.note(PROPOSED, {"ticket": cohort.ticket, **self.proposal._asdict(), **self.left_out()})
        self._begin(cohort)
        return cohort

    def left_out(self) -> dict[str, int]:
        """Return how many clients the deadline leaves out, and of how many, if that is more than a fifth."""
        if self._pace is None or self.proposal.deadline is None or not self.policy.leave_out_slow:
            return {}
        slower, asked = self._pace.left_out(self.proposal.deadline)
        return {"left_out": slower, "asked": asked} if slower > MAX_LEFT_OUT * asked else {}

    def resume(self, cohort: Cohort) -> None:
        """Continue with a cohort that was chosen earlier and whose replies are still missing."""
        if self._pace is not None:
            for body in self.session.journal.events(PROPOSED):
                if body["ticket"] == cohort.ticket:
                    self.proposal = Proposal(body["deadline"], body["spares"])
        self._begin(cohort)

    def _begin(self, cohort: Cohort) -> None:
        self.cohort = cohort
        self.seconds = np.full(cohort.size, np.inf)
        self.status = np.full(cohort.size, _MISSING, np.int8)

    @property
    def enough(self) -> int:
        """How many valid models close the round; without spares, one from every client."""
        cohort, spares = self.cohort.size, self.proposal.spares
        if not spares or self.size is None:
            return cohort
        # A selector may choose fewer than it was asked for, and then the missing ones are missing spares.
        return min(cohort, max(self.size, cohort - spares))

    @property
    def deadline(self) -> float | None:
        """After how many seconds the round closes; an automatic deadline waits for the models that a round needs."""
        if self._pace is None:
            return self.proposal.deadline
        arrived = np.sort(self.seconds[(self.status == _OK) & (self.seconds < np.inf)])
        deadline = self.proposal.deadline
        if deadline is None and (first := first_deadline(arrived, self._least)) is not None:
            deadline = max(first, self.shortest)
        if deadline is None or len(arrived) < self._needed:
            return None
        return max(deadline, float(arrived[self._needed - 1])) if self._needed else deadline

    # -- which replies count ------------------------------------------------------------------------------------------

    def settle(self, seconds: FloatArray, status: AnyArray) -> float:
        """Take the arrivals of the whole cohort at once; return how long the round lasts.

        Parameters
        ----------
        seconds : (k,) float array
            When each reply arrives.
        status : (k,) array of Status
            The status of each reply.
        """
        self.seconds, self.status = seconds, status
        # Kept, because failures after the end of the round become LATE.
        self._failed = status != _OK
        self.status, self._lasted = self._closing()
        return self._lasted

    def _closing(self) -> _Closing:
        found = closing(self.seconds, self.status, deadline=self.deadline, enough=self.enough)
        if found.seconds >= self.shortest:
            return found
        return _Closing(closing(self.seconds, self.status, deadline=self.shortest).status, self.shortest)

    @property
    def closed_at(self) -> float:
        """When the round was closed, on the clock of ``begun``."""
        return self.begun + self._lasted

    @property
    def late_models(self) -> IntArray:
        """(l,) the places of valid models that arrived too late; only after :meth:`settle`."""
        late = self.status == _LATE
        return np.flatnonzero(late if self._failed is None else late & ~self._failed)

    def miss(self, reasons: Mapping[str, str]) -> None:
        """Record which clients could not be sent a message, and why."""
        self._unreached = frozenset(reasons)
        for client, reason in reasons.items():
            self._arrive(client, Status.MISSING, reason, 0.0)

    def receive(self, reply: Reply, seconds: float) -> None:
        """Take a reply that arrived ``seconds`` after the round began; a client's second reply is ignored."""
        if self._arrive(reply.client, reply.status, reply.reason, seconds):
            self.replies[reply.client] = reply

    def _arrive(self, client: str, status: Status, reason: str, seconds: float) -> bool:
        if not self._places:  # not before the first reply, because the simulator uses no names
            self._places = {name: place for place, name in enumerate(self.cohort.names)}
        place = self._places.get(client)
        if place is None:
            raise InputError(
                f"The client {client!r} is not in the cohort of ticket {self.cohort.ticket}.",
                hint=f"its clients are {', '.join(self.cohort.names[:_NAMED])}",
            )
        # A message may be delivered twice, and a client may send two. Only the first one can have closed the round.
        # The time says it, and not the status: a client that could not be reached is MISSING, like a silent one.
        if self.seconds[place] < np.inf:
            return False
        self.seconds[place], self.status[place] = seconds, status
        if status is not Status.OK:
            self.reasons[client] = reason
        return True

    def is_closed(self, seconds: float) -> bool:
        """Whether the round is over ``seconds`` after it began."""
        return self._closing().seconds <= seconds

    def close(self, seconds: float) -> None:
        """Set the reason of every client that has not answered."""
        self._lasted, deadline = seconds, self.deadline  # read before the end, from which it may follow
        in_time = deadline is None or seconds < deadline
        why = "the round was closed with enough others" if in_time else f"no answer within {deadline:g} s"
        for place in np.flatnonzero(self.seconds == np.inf).tolist():
            self.reasons[self.cohort.names[place]] = why

    @property
    def answered(self) -> BoolArray:
        """(k,) whether each client has answered, with a model or an error."""
        answered: BoolArray = self.status != _MISSING
        return answered

    def in_order(self) -> list[Reply]:
        """Return the replies that have arrived, in the order of the cohort."""
        answered = zip(self.cohort.names, self.answered, strict=True)
        return [self.replies[name] for name, has_answered in answered if has_answered]

    # -- the report -------------------------------------------------------------------------------------------------

    def invalidate(self, places: IntArray) -> None:
        """Mark replies as unusable that seemed valid when they arrived."""
        self.status = self.status.copy()  # it may be the array that was passed to settle
        self.status[places] = _INVALID

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Mark the replies of these clients as unusable, each for its reason."""
        if reasons:
            self.invalidate(np.array([self._places[client] for client in reasons], np.int64))
            self.reasons.update(reasons)

    def shortfall(self, models: int) -> str:
        """Return why this number of valid models must not be averaged, or an empty string if it may."""
        if self.policy.private and models != self.size:
            return f"{models} valid models came, but the privacy noise is calibrated for {self.size}"
        return "too few valid models" if models < self.policy.fewest else ""

    def report(
        self, kept: BoolArray, metrics: Mapping[Signal, FloatArray] = _NO_METRICS, *, complete: bool = True
    ) -> RoundReport:
        """Return the report about the r clients that have answered, in the order of the cohort.

        Parameters
        ----------
        kept : (r,) bool array
            Whether each model entered the average.
        metrics : mapping of Signal to (r,) or (r, V) array
        complete : bool
            Whether the round is over.
        """
        cohort, status = self.cohort, self.status
        clients = cohort.clients
        answered = self.answered
        if not answered.all():
            clients, status = clients[answered], status[answered]
        return RoundReport(cohort.ticket, clients, status=status, metrics=metrics, kept=kept, complete=complete)

    def finish(self, kept: BoolArray, metrics: Mapping[Signal, FloatArray] = _NO_METRICS, *, state: Any = None) -> None:
        """Tell the session how the round ended; the host's ``state`` is stored in the same transaction."""
        self._record_times()
        self.session.tell(self.report(kept, metrics), host=state)

    def _record_times(self) -> None:
        """Record how long the clients took, if automatic deadlines depend on it."""
        if self._pace is None:
            return
        arrived = self.seconds < np.inf
        failed = arrived & ((self.status != _OK) if self._failed is None else self._failed)
        closed = self.closed_at
        self._pace.observe(self.cohort.ticket, self.cohort.clients, self.begun, closed, self.seconds, failed)
        self.session.note(
            TIMES,
            {
                "ticket": self.cohort.ticket,
                "begun": self.begun,
                "closed": closed,
                "seconds": [at if at < np.inf else None for at in self.seconds.tolist()],
                "failed": np.flatnonzero(failed).tolist(),
            },
        )

    def abandon(self, why: str, metrics: Mapping[Signal, FloatArray] = _NO_METRICS) -> list[str]:
        """Tell the session that the round gave no model; its number goes to another cohort.

        Returns the clients that were reported as failed without an answer. They are reported explicitly, because
        absence has no effect in an abandoned cohort. If nobody answered, the clients are probably not the cause, and
        none is reported.
        """
        self._record_times()
        # Partial reports, because a complete one would close the cohort as a round that counts.
        kept = np.zeros(int(self.answered.sum()), np.bool_)
        self.session.tell(self.report(kept, metrics, complete=False))
        silent: list[str] = []
        if len(kept):
            missing = [self.cohort.names[place] for place in np.flatnonzero(~self.answered).tolist()]
            silent = [name for name in missing if name not in self._unreached]
        if silent:
            failed = [int(Status.FAILED)] * len(silent)
            self.session.tell(RoundReport(self.cohort.ticket, silent, status=failed, complete=False))
        self.session.abandon(self.cohort.ticket, why)
        return silent


@dataclass
class Attempts:
    """How often the next round was tried, which clients the next try leaves out, and when to give up.

    A try without a model does not count if it finds another client to leave out and has valid models of others.
    """

    session: Session
    policy: Policy
    left_out: set[str] = field(default_factory=set)
    failed_attempts: int = 0

    @classmethod
    def of(cls, session: Session, policy: Policy) -> Attempts:
        """Read from the journal which clients failed in earlier tries of this round."""
        events = session.journal.events
        tried = {body["ticket"] for body in events(ABANDONED) if body["round"] == session.round}
        failed = {name for body in events(FAILURES) if body["ticket"] in tried for name in body["failures"]}
        return cls(session, policy, failed)

    def succeed(self) -> None:
        """Start again from zero after a round that gave a model."""
        self.left_out.clear()
        self.failed_attempts = 0

    def fail(self, round_: Round, valid: int) -> None:
        """Count a round without a model that had ``valid`` valid models; raise an error after too many tries."""
        # One more client to leave out is progress: the same cohort cannot fail forever.
        narrowed = valid > 0 and not self.left_out.issuperset(round_.reasons)
        self.left_out.update(round_.reasons)
        self.failed_attempts += not narrowed
        if self.failed_attempts >= self.policy.tries:
            cohort, events = round_.cohort, self.session.journal.events
            failures = [body["failures"] for body in events(FAILURES) if body["ticket"] == cohort.ticket]
            why = [f"{name}: {reason}" for reasons in failures for name, reason in reasons.items()][:_NAMED]
            why += [body["reason"] for body in events(ABANDONED) if body["ticket"] == cohort.ticket]
            raise RoundError(
                f"Round {cohort.round} gave no model in {self.policy.tries} tries. The last time: {'; '.join(why)}.",
                hint="fix the clients or the strategy and start the run again: it continues with this round",
            )

    def reason_to_give_up(self, cohort: Cohort) -> str:
        """Return that an interrupted cohort has had all its tries, or an empty string if it has not."""
        # Counted in the journal, so that a server that crashes in every try does not try forever.
        tries = 1 + sum(body["ticket"] == cohort.ticket for body in self.session.journal.events(TRIED))
        return f"not finished in {tries} tries" if tries >= self.policy.tries else ""

    def candidates(self, online: IntArray, busy: IntArray) -> Shortage | IntArray:
        """Return the clients that can be asked now, or why there are too few.

        Parameters
        ----------
        online, busy : int arrays
            The clients that are online, and those of them that still work on something else.
        """
        size = self.policy.size_for(len(online))
        free = online if not len(busy) else online[~np.isin(online, busy)]
        if self.left_out:
            table = self.session.table
            failed = table.indices([name for name in self.left_out if name in table])
            others, _ = self._count_admitted(online[~np.isin(online, failed)])
            # A small federation must continue with the clients it has.
            if others >= (size or max(self.policy.fewest, 1)):
                free = free[~np.isin(free, failed)]
        admitted, excluded = self._count_admitted(free)
        pending = bool(self.session.pending)
        # Privacy noise needs exactly `size` clients, but none if a cohort is already chosen and pending.
        needed = size if self.policy.private and size is not None and not pending else 1
        if len(online) >= self.policy.enough_online and admitted >= needed:
            return free
        return Shortage(
            len(online), self.policy.enough_online, admitted, needed, self.session.table.names_of(busy), excluded
        )

    def _count_admitted(self, clients: IntArray) -> tuple[int, tuple[str, ...]]:
        """Return how many of ``clients`` the rules admit, and why they exclude others."""
        session = self.session
        # A pending cohort was admitted when it was chosen, and rules may have changed since.
        if session.rules is not None and not session.pending and len(clients):
            eligible = session.eligibility(RoundRequest(1, clients))
            if eligible is not None:
                return len(eligible.allowed), eligible.reasons
        return len(clients), ()


@dataclass(frozen=True)
class Shortage:
    """Why no cohort can be chosen now.

    Attributes
    ----------
    online, wait_for : int
        How many clients can take part, and how many must be.
    admitted, needed : int
        How many could be chosen, and how many must be.
    busy : tuple of str
        The clients that still work on something else.
    excluded : tuple of str
        Why the rules exclude clients.
    failed : tuple of str
        The clients that failed too often since the newest model. They are asked again after the next one.
    """

    online: int
    wait_for: int
    admitted: int
    needed: int
    busy: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()

    def describe(self, seconds: float | None = None, absent: Sequence[str] = ()) -> str:
        """Return the shortage in words.

        Parameters
        ----------
        seconds : float, optional
            How long it has lasted.
        absent : sequence of str
            Which clients are connected but cannot take part, and why.
        """
        duration = "" if seconds is None else f" for {seconds:.0f} s"
        if self.online < self.wait_for:
            online = f"{self.online} of {self.wait_for} clients have been online"
            shortage = online if self.online else "nobody has been available"
            return f"{shortage}{duration}{': ' if absent else ''}{'; '.join(absent)}"
        rules = f" ({'; '.join(self.excluded[:3])})" if self.excluded else ""
        if self.needed > 1 and self.admitted:
            clients = "1 client" if self.admitted == 1 else f"{self.admitted} clients"
            at_work = f"; still at work: {join_names(self.busy)}" if self.busy else ""
            noise = f"and the privacy noise is calibrated for {self.needed}"
            return f"{clients} could be chosen{rules}, {noise}{',' if duration else ''}{duration}{at_work}"
        if rules:
            return f"the rules have admitted nobody{rules}{duration}"
        if self.failed:
            return f"all clients that are free have failed repeatedly{duration}: {join_names(self.failed)}"
        return f"all clients online have been busy with something else{duration}: {join_names(self.busy)}"

    def error(self, round_: int, seconds: float, absent: Sequence[str] = ()) -> FederationTimeoutError:
        """Return the error for a run that has waited too long before ``round_``."""
        text = self.describe(seconds, absent)
        hint = "start more clients and run it again: it continues with this round"
        if self.needed > 1 and self.online >= self.wait_for:
            hint = (
                f"differential privacy needs {self.needed} clients in every round: start more clients or ease the "
                "rules, and run it again; it continues with this round"
            )
        return FederationTimeoutError(f"{text[0].upper()}{text[1:]} in round {round_}.", hint=hint)
