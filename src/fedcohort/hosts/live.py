"""The rounds of a live federation: the loop that every host shares, and what a host must be able to do for it.

A host reaches clients: it sends them the model, hands over their replies and knows the time. What a round is, who is
asked again and when a run gives up is decided in :mod:`fedcohort.hosts.round`. :func:`play` puts the two together.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.errors import InputError
from fedcohort.core.protocol import Answer, Cohort, Query, RoundReport, Status
from fedcohort.core.signals import Signal
from fedcohort.hosts import orders
from fedcohort.hosts.leases import Leases
from fedcohort.hosts.pace import Pace
from fedcohort.hosts.round import RETRIED, Attempts, Late, Policy, Reply, Round, Shortage
from fedcohort.journal.events import CORRECTED, FAILURES, LATE_COUNTED, TIMES
from fedcohort.session.resume import participations
from fedcohort.session.rules import Rules
from fedcohort.session.session import Session

LOOK_EVERY = 0.25  # seconds between two looks at the clients online, while nobody can be asked


@dataclass(frozen=True, eq=False)
class Online:
    """Who can be reached.

    Attributes
    ----------
    clients : names or indices
        The clients that are online now.
    busy : names or indices
        Those of them that still work on something else; they are asked only if nobody else comes in time.
    """

    clients: Sequence[str] | IntArray
    busy: Sequence[str] | IntArray = ()


@dataclass(frozen=True, eq=False)
class Aggregation:
    """What a host made of the replies to a round; r clients answered, in the order of the cohort.

    Attributes
    ----------
    kept : (r,) bool array
        Whose model is in the average, or would be if there were one.
    metrics : mapping of Signal to (r,) or (r, V) array
        What the session learns beside the statuses.
    error : str
        Why there is no new global model; empty when there is one.
    refused : mapping of str to str
        Clients whose reply turned out to be unusable, and why.
    corrections : mapping of str to sequence of str
        Clients whose reply was changed before it entered the average, and how.
    late : sequence of Late
        Of ``round_.late``, the replies that are in the average.
    """

    kept: BoolArray
    metrics: Mapping[Signal, FloatArray] = field(default_factory=dict)
    error: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    corrections: Mapping[str, Sequence[str]] = field(default_factory=dict)
    late: Sequence[Late] = ()


class Messenger(ABC):
    """Reaches the clients of a federation.

    Override :meth:`answer` for selectors that ask questions, and the ``on_`` methods to show or log what happens.
    """

    @abstractmethod
    def now(self) -> float:
        """Return the time in seconds, from any beginning."""

    @abstractmethod
    def online(self) -> Online:
        """Return the clients that can be reached now."""

    @abstractmethod
    def send(self, cohort: Cohort) -> Mapping[str, str]:
        """Ask a cohort to train the global model; return whom no message could be sent to, and why."""

    @abstractmethod
    def receive(self, until: float) -> Iterable[Reply]:
        """Return the replies that have come since the last call, of any cohort.

        Without any it waits for the first one, at most until the time ``until``.
        """

    def answer(self, query: Query, available: IntArray) -> Answer:
        """Answer what a selector wants to know before it chooses among ``available``."""
        raise InputError(
            f"This host answers no questions. The selector asks {type(query).__name__}.",
            hint="choose a selector without queries, or override Host.answer",
        )

    def absent(self) -> Sequence[str]:
        """Return in words which clients are connected and cannot take part, and why."""
        return ()

    def on_waiting(self, shortage: Shortage, seconds: float) -> None:
        """Called now and then while nobody can be chosen, for ``seconds`` so far."""

    def on_ready(self) -> None:
        """Called when enough clients are there."""

    def on_rules(self, order: orders.Order) -> None:
        """Called when an operator's order has changed the rules."""

    def on_chosen(self, cohort: Cohort, available: int) -> None:
        """Called when a cohort is chosen among so many."""

    def on_late(self, reply: Reply, round_: int) -> None:
        """Called when somebody has answered after ``round_`` was closed."""


class Host(Messenger):
    """Reaches the clients of a federation and averages their models, for :func:`play`.

    Five methods do the work. The others have defaults: override :meth:`store` to save models.
    """

    @abstractmethod
    def combine(self, round_: Round) -> Aggregation:
        """Average the sound models among ``round_.in_order()`` into the next global model.

        ``round_.shortfall(n)`` says whether ``n`` sound models are too few.
        """

    def store(self, round_: Round, aggregation: Aggregation) -> Any:
        """Save the new global model; what is returned is stored with the round, as the session's ``host_state``."""
        return None

    def on_round(self, number: int, again: bool) -> None:
        """Called before round ``number``; ``again``: with a cohort that was chosen before the run was cut off."""

    def on_closed(self, round_: Round, aggregation: Aggregation) -> None:
        """Called when a round with a new model is on record."""

    def on_abandoned(self, round_: Round, aggregation: Aggregation) -> None:
        """Called when a round without a new model is on record; it is tried again."""

    def on_unfinished(self, cohort: Cohort, why: str) -> None:
        """Called when an interrupted cohort is abandoned and another one chosen."""


def play(host: Host, session: Session, policy: Policy, rounds: int, leases: Leases | None = None) -> str | None:
    """Play rounds until the session has ``rounds``; return why the selector ended the run earlier, or None.

    A cohort that was cut off by the end of an earlier run is trained again first. A session that commits by hand is
    committed when a cohort is chosen and when its round is closed.

    Parameters
    ----------
    rounds : int
        Of the session in all, those already on record included.
    leases : Leases, optional
        Shared with other runs of the federation: a client that works for one of them is no candidate here.
    """
    return _RoundPlayer(host, session, policy, rounds, leases).play()


class Player:
    """What rounds and flows of a live federation share: who can be asked, leases, orders, late replies.

    Parameters
    ----------
    rounds : int
        Of the session in all, those already on record included.
    """

    def __init__(
        self, messenger: Messenger, session: Session, policy: Policy, rounds: int, leases: Leases | None
    ) -> None:
        self.leases = leases
        self._messenger = messenger
        self.session = session
        self.policy = policy
        self.rounds = rounds
        self.online: IntArray = np.empty(0, np.int64)
        self.written_off: set[tuple[int, str]] = set()  # by ticket, the clients reported as failed without an answer

    def _lease(self, cohort: Cohort) -> str:
        """Lease a cohort; return who of it works for another run, or an empty text."""
        taken = {} if self.leases is None else self.leases.take(cohort.names)
        return "; ".join(f"{name} works for {run}" for name, run in taken.items())

    def _look(self) -> IntArray:
        """See which clients are online and what an operator has ordered; return those that are busy."""
        found = self._messenger.online()
        self.online = self._free(found.clients)
        taken = orders.take(self.session, self._check_feasible)
        for order in taken:
            self._messenger.on_rules(order)
        if taken:  # an order may block clients or let them in again
            found = self._messenger.online()
            self.online = self._free(found.clients)
        return self._indices(found.busy)

    def _free(self, clients: Sequence[str] | IntArray) -> IntArray:
        """Return those of the clients that work for no other run."""
        found = self._indices(clients)
        elsewhere = {} if self.leases is None else self.leases.elsewhere()
        table = self.session.table
        taken = [table.index(name) for name in elsewhere if name in table]
        return found[~np.isin(found, taken)] if taken else found

    def _indices(self, clients: Sequence[str] | IntArray) -> IntArray:
        # An array is passed on as it is: the session recognises one that it was given before.
        return clients if isinstance(clients, np.ndarray) else self.session.table.indices(clients)

    def _check_feasible(self, session: Session, rules: Rules) -> None:
        """Refuse rules that the clients there are cannot keep."""
        size = self.policy.size_for(len(self.online))
        if size is not None:
            spent = dict.fromkeys(session.table.names_of(self.online), 0) | participations(session.journal)
            rules.check_feasible(spent, size, self.rounds - session.round)

    def _take_late(self, replies: Iterable[Reply]) -> None:
        """Put replies on record that came after their round was closed."""
        for reply in replies:
            if self.leases is not None:
                self.leases.release([reply.client])
            if reply.status not in (Status.OK, Status.INVALID):
                continue  # it is free again, and brought nothing
            if (reply.ticket, reply.client) not in self.written_off:
                self.session.tell(RoundReport(reply.ticket, [reply.client]))
            row = self.session.journal.cohorts(after=reply.ticket - 1)[0]
            why = f"answered after {reply.seconds:.1f} s, when the round was closed"
            self._note_failures(row.round, reply.ticket, {reply.client: why})
            self._messenger.on_late(reply, row.round)

    def _note_failures(self, round_: int, ticket: int, reasons: Mapping[str, str]) -> None:
        self.session.note(FAILURES, {"round": round_, "ticket": ticket, "failures": dict(reasons)})

    def _note_corrections(self, round_: int, corrections: Mapping[str, Sequence[str]]) -> None:
        texts = {client: list(found) for client, found in corrections.items()}
        self.session.note(CORRECTED, {"round": round_, "corrections": texts})


class _RoundPlayer(Player):
    """One call of :func:`play`."""

    def __init__(self, host: Host, session: Session, policy: Policy, rounds: int, leases: Leases | None) -> None:
        super().__init__(host, session, policy, rounds, leases)
        self.host = host
        # From the journal, so that a restart neither forgets who failed nor forgives it.
        self.attempts = Attempts.of(session, policy)
        self.pace = Pace.of(session, host.now()) if policy.deadline == "auto" else None
        self.late: list[tuple[Reply, int]] = []  # that will count, each with the round it is of

    def play(self) -> str | None:
        while True:
            round_ = self._resume_unfinished()
            if round_ is None:
                if self.session.round >= self.rounds:
                    return None
                self.host.on_round(self.session.round, again=False)
                round_ = self._choose_round()
            if round_.cohort.size:
                self._train(round_)
            if round_.cohort.stop is not None:
                return round_.cohort.stop

    # -- whom to ask --------------------------------------------------------------------------------------------------

    def _resume_unfinished(self) -> Round | None:
        """Return the round that an earlier run did not finish; one that was tried too often is abandoned."""
        host, session, attempts = self.host, self.session, self.attempts
        while session.pending:
            cohort = session.pending[0]
            self._look()
            why = self._unusable(cohort) or attempts.reason_to_give_up(cohort)
            if not why:
                self._wait()
                why = self._unusable(cohort) or self._lease(cohort)  # somebody may have left meanwhile
            if not why:
                host.on_round(cohort.round, again=True)
                session.note(RETRIED, {"ticket": cohort.ticket})
                session.commit()
                round_ = self._round()
                round_.resume(cohort)
                return round_
            host.on_unfinished(cohort, why)
            session.abandon(cohort.ticket, why)
            session.commit()
        return None

    def _unusable(self, cohort: Cohort) -> str:
        if not self.policy.private:
            return ""
        names = set(self.session.table.names_of(self.online))
        return self.attempts.unusable(cohort, names, self.policy.size_for(len(self.online)))

    def _choose_round(self) -> Round:
        while True:
            available = self._wait()
            round_ = self._round()
            query = round_.open(available)
            cohort = round_.choose(None if query is None else self.host.answer(query, available))
            self.session.commit()
            why = self._lease(cohort)
            if not why:
                self.host.on_chosen(cohort, len(available))
                return round_
            self.host.on_unfinished(cohort, why)
            self.session.abandon(cohort.ticket, why)
            self.session.commit()

    def _round(self) -> Round:
        now = 0.0 if self.pace is None else self.pace.time(self.host.now())
        return Round(self.session, self.policy, len(self.online), self.pace, now)

    def _wait(self) -> IntArray:
        """Wait until enough clients can be asked, and return them."""
        host, session = self.host, self.session
        begun = until = host.now()
        while True:
            # Late answers free their clients, who may be what the run waits for.
            self._take_late(host.receive(until))
            busy = self._look()
            found = self.attempts.candidates(self.online, busy)
            now = host.now()
            if isinstance(found, Shortage) and now > begun + self.policy.patience:
                # A slow client is better than none.
                found = self.attempts.candidates(self.online, busy[:0]) if len(busy) else found
                if isinstance(found, Shortage):
                    raise found.error(session.round, self.policy.patience, host.absent())
            if not isinstance(found, Shortage):
                host.on_ready()
                return found
            host.on_waiting(found, now - begun)
            until = now + LOOK_EVERY

    # -- one round ----------------------------------------------------------------------------------------------------

    def _train(self, round_: Round) -> None:
        cohort = round_.cohort
        self._gather(round_)
        if self.leases is not None:  # who is still at work stays leased
            self.leases.release(name for name, at in zip(cohort.names, round_.seconds, strict=True) if at < math.inf)
        # Who has answered again since counts once, with what is new.
        sound = {name for name, reply in round_.replies.items() if reply.status is Status.OK}
        round_.late = [Late(reply, cohort.round - n) for reply, n in self.late if reply.client not in sound]
        made = self.host.combine(round_)
        round_.refuse(made.refused)
        if round_.reasons:
            self._note_failures(cohort.round, cohort.ticket, round_.reasons)
        if made.corrections:
            self._note_corrections(cohort.round, made.corrections)
        if made.error:
            self._abandon(round_, made)
        else:
            self._finish(round_, made)

    def _abandon(self, round_: Round, made: Aggregation) -> None:
        """Put on record that no model came of a round; it is tried again, or ends the run."""
        silent = round_.abandon(made.error, made.metrics)
        self.written_off.update((round_.cohort.ticket, client) for client in silent)
        self.session.commit()
        self.host.on_abandoned(round_, made)
        self.attempts.fail(round_, int(made.kept.sum()))

    def _finish(self, round_: Round, made: Aggregation) -> None:
        """Store the new model and close the round with it."""
        host, session, cohort = self.host, self.session, round_.cohort
        self.late = []
        if made.late:
            clients = {one.reply.client: {"ticket": one.reply.ticket, "staleness": one.staleness} for one in made.late}
            session.note(LATE_COUNTED, {"round": cohort.round, "ticket": cohort.ticket, "clients": clients})
        # The model is stored first and named in the round's own transaction: after a crash the round is either wholly
        # there or is trained again.
        round_.finish(made.kept, made.metrics, state=host.store(round_, made))
        session.commit()
        self.attempts.succeed()
        host.on_closed(round_, made)

    def _gather(self, round_: Round) -> None:
        """Send a round's messages and take replies until it closes."""
        host, ticket = self.host, round_.cohort.ticket
        round_.miss(host.send(round_.cohort))
        begun = host.now()
        if self.pace is not None:
            round_.begun = self.pace.time(begun)

        def elapsed(deadline: float | None) -> float:
            # What is handed over after the deadline was there at the deadline: the host waits no longer.
            now = host.now()
            return deadline if deadline is not None and now >= begun + deadline else now - begun

        while not round_.is_closed(elapsed(round_.deadline)):
            deadline = round_.deadline
            replies = list(host.receive(math.inf if deadline is None else begun + deadline))
            arrived = elapsed(deadline)
            for reply in replies:
                if reply.ticket == ticket:
                    round_.receive(reply, arrived)
            self._take_late(reply for reply in replies if reply.ticket != ticket)
        round_.close(elapsed(round_.deadline))

    def _take_late(self, replies: Iterable[Reply]) -> None:
        found = list(replies)
        for reply in found:
            if self.pace is not None:
                self._time_late(reply)
            if self.policy.late == "count" and reply.status is Status.OK:
                row = self.session.journal.cohorts(after=reply.ticket - 1)[0]
                # Of several answers of one client, the newest counts.
                self.late = [(one, n) for one, n in self.late if one.client != reply.client] + [(reply, row.round)]
        super()._take_late(found)

    def _time_late(self, reply: Reply) -> None:
        """Put on record how long a late client took, because deadlines follow from it."""
        assert self.pace is not None
        row = self.session.journal.cohorts(after=reply.ticket - 1)[0]
        places = np.flatnonzero(row.clients == self.session.table.index(reply.client)).tolist()
        failed = reply.status is not Status.OK
        self.pace.correct(reply.ticket, places, np.array([reply.seconds]), np.array([failed]))
        body = {"ticket": reply.ticket, "places": places, "seconds": [reply.seconds], "failed": [0] if failed else []}
        self.session.note(TIMES, body)
