"""The rounds of a live federation: the loop that all hosts share, and the methods that a host must have.

A host sends the model to clients, returns their replies and tells the time. :mod:`fedcohort.hosts.round` decides what a
round is, which clients are asked again and when a run gives up. :func:`play` connects the two.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.errors import DuplicateReportError, InputError
from fedcohort.core.protocol import Answer, Cohort, Query, RoundReport, Status
from fedcohort.core.signals import Signal
from fedcohort.core.text import join_names, short_repr
from fedcohort.hosts import orders
from fedcohort.hosts.early_stop import Watch
from fedcohort.hosts.leases import Leases
from fedcohort.hosts.pace import Pace
from fedcohort.hosts.round import Attempts, Late, Policy, Reply, Round, Shortage, newest_late
from fedcohort.journal import CohortRow
from fedcohort.journal.events import CORRECTED, FAILURES, LATE_COUNTED, TIMES, TRIED
from fedcohort.session.resume import participations
from fedcohort.session.rules import Rules
from fedcohort.session.session import Session

log = logging.getLogger(__name__)
LOOK_EVERY = 0.25  # seconds between two checks of who is online, while nobody can be asked


@dataclass(frozen=True, eq=False)
class Online:
    """The clients that can be reached.

    Attributes
    ----------
    clients : names or indices
        The clients that are online now.
    busy : names or indices
        Those of them that still work on something else. They are asked only if no other client comes in time.
    """

    clients: Sequence[str] | IntArray
    busy: Sequence[str] | IntArray = ()


@dataclass(frozen=True, eq=False)
class Aggregation:
    """The result of averaging a round's replies; r clients answered, in the order of the cohort.

    Attributes
    ----------
    kept : (r,) bool array
        Whether each model is in the average, or would be if there were one.
    metrics : mapping of Signal to (r,) or (r, V) array
        What the session learns in addition to the statuses.
    error : str
        Why there is no new global model; empty if there is one.
    refused : mapping of str to str
        The clients whose replies cannot be used, each with the reason.
    corrections : mapping of str to sequence of str
        The clients whose replies were changed before they entered the average, each with the changes.
    late : sequence of Late
        The replies of ``round_.late`` that are in the average.
    """

    kept: BoolArray
    metrics: Mapping[Signal, FloatArray] = field(default_factory=dict)
    error: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    corrections: Mapping[str, Sequence[str]] = field(default_factory=dict)
    late: Sequence[Late] = ()


class Messenger(ABC):
    """Sends messages to the clients of a federation and receives their replies.

    Override :meth:`answer` for selectors that ask questions, and the ``on_`` methods to show or log what happens.
    """

    @abstractmethod
    def now(self) -> float:
        """Return the time in seconds on any clock."""

    @abstractmethod
    def online(self) -> Online:
        """Return the clients that can be reached now."""

    @abstractmethod
    def send(self, cohort: Cohort) -> Mapping[str, str]:
        """Ask a cohort to train the global model; return the clients that could not be sent a message, and why."""

    @abstractmethod
    def receive(self, until: float) -> Iterable[Reply]:
        """Return the replies of any cohort that have arrived since the last call.

        If there are none, wait for the first one, at most until the time ``until``. A reply that nobody was asked for,
        and a second one to the same question, has no effect; a warning is logged.
        """

    def answer(self, query: Query, available: IntArray) -> Answer:
        """Answer the question that a selector asks before it chooses among ``available``."""
        raise InputError(
            f"This host answers no questions. The selector asks {type(query).__name__}.",
            hint="choose a selector without queries, or override Host.answer",
        )

    def stop(self) -> str | None:
        """Return why the run ends before its last round, or None; called before each new round."""
        return None

    def absent(self) -> Sequence[str]:
        """Describe the clients that are connected but cannot take part, with the reasons."""
        return ()

    def on_waiting(self, shortage: Shortage, seconds: float) -> None:
        """Called repeatedly while nobody can be chosen, which has lasted ``seconds`` so far."""

    def on_ready(self) -> None:
        """Called when enough clients are online."""

    def on_rules(self, order: orders.Order) -> None:
        """Called when an operator's order has changed the rules."""

    def on_selector(self) -> None:
        """Called when another selector chooses from now on, because an operator has ordered it."""

    def on_chosen(self, cohort: Cohort, available: int) -> None:
        """Called when a cohort was chosen among ``available`` clients."""

    def on_late(self, reply: Reply, round_: int) -> None:
        """Called when a client has answered after ``round_`` was closed."""


class Host(Messenger):
    """Trains cohorts of a live federation and averages their models, for :func:`play`.

    Five methods do the work. The others have defaults; override :meth:`store` to save models.
    """

    @abstractmethod
    def combine(self, round_: Round) -> Aggregation:
        """Average the valid models among ``round_.in_order()`` into the next global model.

        ``round_.shortfall(n)`` says whether ``n`` valid models are too few.
        """

    def store(self, round_: Round, aggregation: Aggregation) -> Any:
        """Save the new global model; the returned value is stored with the round, as the session's ``host_state``."""
        return None

    def on_round(self, number: int, resumed: bool) -> None:
        """Called before round ``number``; ``resumed`` means that its cohort was interrupted."""

    def on_closed(self, round_: Round, aggregation: Aggregation) -> None:
        """Called when a round with a new model is recorded."""

    def on_abandoned(self, round_: Round, aggregation: Aggregation) -> None:
        """Called when a round without a new model is recorded; it will be tried again."""

    def on_unfinished(self, cohort: Cohort, why: str) -> None:
        """Called when an interrupted cohort is abandoned and another one will be chosen."""


def play(host: Host, session: Session, policy: Policy, rounds: int, leases: Leases | None = None) -> str | None:
    """Play rounds until the session has ``rounds``; return why the run ended earlier, or None.

    If an earlier run was interrupted, its cohort is trained again first. A session with ``commit="manual"`` is
    committed when a cohort is chosen and when its round is closed.

    Parameters
    ----------
    rounds : int
        The session's number of rounds, including those already recorded.
    leases : Leases, optional
        Shared with other runs of the federation: a client that works for one of them is not a candidate here.
    """
    return _RoundPlayer(host, session, policy, rounds, leases).play()


class Player:
    """What rounds and flows of a live federation share: who can be asked, leases, orders, late replies.

    Parameters
    ----------
    rounds : int
        The session's number of rounds, including those already recorded.
    """

    def __init__(self, host: Messenger, session: Session, policy: Policy, rounds: int, leases: Leases | None) -> None:
        self.host = host
        self.leases = leases
        self.session = session
        self.policy = policy
        self.rounds = rounds
        self.watch = Watch(session, policy.early_stop)
        self._selector = session.selector  # that the host knows
        self.online: IntArray = np.empty(0, np.int64)
        self.written_off: set[tuple[int, str]] = set()  # tickets and clients reported as failed without an answer
        self._strangers: list[str] = []  # names that were online and that the session does not know

    def _lease(self, cohort: Cohort) -> str:
        """Lease a cohort; return which of its clients work for other runs, or an empty string."""
        elsewhere = {} if self.leases is None else self.leases.take(cohort.names)
        return "; ".join(f"{name} works for {run}" for name, run in elsewhere.items())

    def _stops_early(self) -> str | None:
        """Return why the run ends before its last round, or None."""
        stop = self.host.stop()
        if stop is None and self.policy.early_stop is not None:
            self.session.commit()  # numbers that the host has recorded since the last round
            stop = self.watch.reason()
        return stop

    def _look(self) -> IntArray:
        """Update who is online and carry out the operator's orders; return the clients that are busy."""
        reachable = self.host.online()
        self.online = self._free(reachable.clients)
        carried_out = orders.take(self.session, self._check_feasible)
        for order in carried_out:
            if order.selector is None:
                self.host.on_rules(order)
        if self.session.selector is not self._selector:
            self._selector = self.session.selector
            self.host.on_selector()
        if carried_out:  # an order may block clients or unblock them, and names may become known by it
            reachable = self.host.online()
            self.online = self._free(reachable.clients)
        return self._indices(reachable.busy)

    def _free(self, clients: Sequence[str] | IntArray) -> IntArray:
        """Return those of the clients that work for no other run."""
        indices = self._indices(clients)
        elsewhere = {} if self.leases is None else self.leases.elsewhere()
        table = self.session.table
        leased = [table.index(name) for name in elsewhere if name in table]
        return indices[~np.isin(indices, leased)] if leased else indices

    def _absent(self) -> list[str]:
        """Describe the clients that cannot take part, those that work for other runs included."""
        absent = list(self.host.absent())
        if self._strangers:
            absent.append(f"{join_names(self._strangers)} unknown to the session")
        if self.leases is None:
            return absent
        runs: dict[str, list[str]] = {}
        for name, run in self.leases.elsewhere().items():
            if name in self.session.table:
                runs.setdefault(run, []).append(name)
        return absent + [f"{join_names(names)} leased to {run} in {self.leases.path}" for run, names in runs.items()]

    def _indices(self, clients: Sequence[str] | IntArray) -> IntArray:
        # An array is not copied, because the session recognises one that it has seen before.
        if isinstance(clients, np.ndarray):
            return clients
        # Whoever can reach a host may call itself anything, so strangers are left out; they do not end a run.
        table = self.session.table
        known = [name for name in clients if name in table]
        if len(known) < len(clients):
            self._strangers = [name for name in clients if name not in table]
        return table.indices(known)

    def _check_feasible(self, session: Session, rules: Rules) -> None:
        """Refuse rules that the clients online cannot satisfy."""
        size = self.policy.size_for(len(self.online))
        if size is not None:
            spent = dict.fromkeys(session.table.names_of(self.online), 0) | participations(session.journal)
            rules.check_feasible(spent, size, self.rounds - session.round)

    def _take_late(self, replies: Iterable[Reply]) -> list[tuple[Reply, CohortRow]]:
        """Record replies that arrived after their round was closed; return them with their cohorts.

        Clients may send anything at any time, so replies that nobody was asked for are dropped here.
        """
        taken = []
        for reply in replies:
            cohort = self._asked_cohort(reply)
            if cohort is None:
                _drop(reply, "nobody has asked it for this")
                continue
            valid = reply.status in (Status.OK, Status.INVALID)
            if (reply.ticket, reply.client) in self.written_off:
                self.written_off.discard((reply.ticket, reply.client))
            elif valid:
                try:
                    self.session.tell(RoundReport(reply.ticket, [reply.client]))
                except DuplicateReportError:
                    _drop(reply, "it has answered before")
                    continue
            if self.leases is not None:
                self.leases.release([reply.client])
            taken.append((reply, cohort))
            if valid:
                why = f"answered after {reply.seconds:.1f} s, when the round was closed"
                self._note_failures(cohort.round, reply.ticket, {reply.client: why})
                self.host.on_late(reply, cohort.round)
        return taken

    def _asked_cohort(self, reply: Reply) -> CohortRow | None:
        """Return the closed cohort that a reply belongs to, or None if its client was not asked."""
        ticket, client, session = reply.ticket, reply.client, self.session
        if not isinstance(ticket, int) or not isinstance(client, str) or client not in session.table:
            return None
        # A cohort that is still open will be sent its messages again: the answer to the earlier ones is not needed.
        if not 0 <= ticket < 2**63 or any(cohort.ticket == ticket for cohort in session.pending):  # SQLite's integers
            return None
        # From the journal, because an answer may come to a cohort of an earlier process.
        rows = session.journal.cohorts(ticket=ticket)
        return rows[0] if rows and session.table.index(client) in rows[0].clients else None

    def _note_failures(self, round_: int, ticket: int, reasons: Mapping[str, str]) -> None:
        self.session.note(FAILURES, {"round": round_, "ticket": ticket, "failures": dict(reasons)})

    def _note_corrections(self, round_: int, corrections: Mapping[str, Sequence[str]]) -> None:
        as_lists = {client: list(texts) for client, texts in corrections.items()}
        self.session.note(CORRECTED, {"round": round_, "corrections": as_lists})


class _RoundPlayer(Player):
    """One call of :func:`play`."""

    host: Host

    def __init__(self, host: Host, session: Session, policy: Policy, rounds: int, leases: Leases | None) -> None:
        super().__init__(host, session, policy, rounds, leases)
        self.attempts = Attempts.of(session, policy)
        self.pace = Pace.of(session, host.now()) if policy.deadline == "auto" else None
        self._leaves_out = False  # whether the newest deadline leaves out a part of the federation
        # Late replies that will count, each with its round and how often the selector counts the client.
        self.late: list[tuple[Reply, int, float]] = []

    def play(self) -> str | None:
        while True:
            round_ = self._resume_unfinished()
            if round_ is None:
                if self.session.round >= self.rounds:
                    return None
                if (why := self._stops_early()) is not None:
                    return why
                self.host.on_round(self.session.round, resumed=False)
                round_ = self._choose_round()
            if round_.cohort.size:
                self._train(round_)
            if round_.cohort.stop is not None:
                return round_.cohort.stop

    # -- the choice ---------------------------------------------------------------------------------------------------

    def _resume_unfinished(self) -> Round | None:
        """Return the round that an earlier run did not finish, if any; abandon cohorts that were tried too often."""
        session = self.session
        while session.pending:
            cohort = session.pending[0]
            self._look()
            why = self._mismatch(cohort) or self.attempts.reason_to_give_up(cohort)
            if not why:
                self._wait()
                why = self._mismatch(cohort) or self._lease(cohort)  # again, because clients may have left
            if not why:
                self.host.on_round(cohort.round, resumed=True)
                session.note(TRIED, {"ticket": cohort.ticket})
                session.commit()
                round_ = self._round()
                round_.resume(cohort)
                return round_
            self._give_up(cohort, why)
        return None

    def _mismatch(self, cohort: Cohort) -> str:
        """Return why an interrupted cohort does not fit the privacy noise, or an empty string if it does."""
        if not self.policy.private:
            return ""
        size = self.policy.size_for(len(self.online))
        if cohort.size != size:
            return f"it has {cohort.size} clients, and the noise is calibrated for {size}"
        online = set(self.session.table.names_of(self.online))
        gone = [name for name in cohort.names if name not in online]
        return f"{join_names(gone)} not online, and the noise is calibrated for {size} clients" if gone else ""

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
                left_out = round_.left_out()
                if left_out and not self._leaves_out:  # one warning until it changes
                    log.warning(
                        "the deadline of %.3g s leaves out %d of the %d clients asked so far, which take longer",
                        round_.proposal.deadline, left_out["left_out"], left_out["asked"],
                    )  # fmt: skip
                self._leaves_out = bool(left_out)
                return round_
            self._give_up(cohort, why)

    def _give_up(self, cohort: Cohort, why: str) -> None:
        """Abandon a cohort that cannot train."""
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
            # A late answer frees its client, which the run may be waiting for.
            self._take_late(host.receive(until))
            busy = self._look()
            candidates = self.attempts.candidates(self.online, busy)
            now = host.now()
            if isinstance(candidates, Shortage) and now > begun + self.policy.patience:
                # A busy client is better than none: it may have forgotten its work, and then nobody else would come.
                if len(busy):
                    candidates = self.attempts.candidates(self.online, busy[:0])
                if isinstance(candidates, Shortage):
                    raise candidates.error(session.round, self.policy.patience, self._absent())
            if not isinstance(candidates, Shortage):
                host.on_ready()
                return candidates
            host.on_waiting(candidates, now - begun)
            until = now + LOOK_EVERY

    # -- one round ----------------------------------------------------------------------------------------------------

    def _train(self, round_: Round) -> None:
        cohort = round_.cohort
        self._gather(round_)
        if self.leases is not None:  # clients that are still at work stay leased
            self.leases.release(name for name, at in zip(cohort.names, round_.seconds, strict=True) if at < math.inf)
        # A client with a valid reply in this round counts only once, with the new reply.
        valid = {name for name, reply in round_.replies.items() if reply.status is Status.OK}
        counting = newest_late(self.late, _client_of, valid)
        round_.late = [Late(reply, cohort.round - n, times) for reply, n, times in counting]
        aggregation = self.host.combine(round_)
        round_.refuse(aggregation.refused)
        if round_.reasons:
            self._note_failures(cohort.round, cohort.ticket, round_.reasons)
        if aggregation.corrections:
            self._note_corrections(cohort.round, aggregation.corrections)
        if not aggregation.error:
            self._finish(round_, aggregation)
            return
        silent = round_.abandon(aggregation.error, aggregation.metrics)
        # The session has closed their entries as FAILED, so a late answer would be their second report.
        self.written_off.update((cohort.ticket, client) for client in silent)
        self.session.commit()
        self.host.on_abandoned(round_, aggregation)
        self.attempts.fail(round_, int(aggregation.kept.sum()))

    def _finish(self, round_: Round, aggregation: Aggregation) -> None:
        """Store the new model and close the round."""
        host, session, cohort = self.host, self.session, round_.cohort
        # Only here: a round without a model leaves the late ones for its next try.
        self.late = []
        if aggregation.late:
            clients = {
                late.reply.client: {"ticket": late.reply.ticket, "staleness": late.staleness}
                for late in aggregation.late
            }
            session.note(LATE_COUNTED, {"round": cohort.round, "ticket": cohort.ticket, "clients": clients})
        # The model is stored first, then named in the round's transaction. So after a crash, the round is either
        # complete or trained again.
        round_.finish(aggregation.kept, aggregation.metrics, state=host.store(round_, aggregation))
        session.commit()
        self.attempts.succeed()
        host.on_closed(round_, aggregation)

    def _gather(self, round_: Round) -> None:
        """Send a round's messages and take replies until the round closes."""
        host, ticket = self.host, round_.cohort.ticket
        round_.miss(host.send(round_.cohort))
        begun = host.now()
        if self.pace is not None:
            round_.begun = self.pace.time(begun)

        def elapsed(deadline: float | None) -> float:
            # A host does not wait beyond the deadline, so replies returned after it had arrived by then.
            now = host.now()
            return deadline if deadline is not None and now >= begun + deadline else now - begun

        names = frozenset(round_.cohort.names)
        while not round_.is_closed(elapsed(round_.deadline)):
            deadline = round_.deadline
            lasts = round_.shortest if round_.answered.all() else deadline
            replies = list(host.receive(math.inf if lasts is None else begun + lasts))
            arrived = elapsed(deadline)
            others = []
            for reply in replies:
                if reply.ticket == ticket and isinstance(reply.client, str) and reply.client in names:
                    round_.receive(reply, arrived)
                else:
                    others.append(reply)
            self._take_late(others)
        round_.close(elapsed(round_.deadline))

    def _take_late(self, replies: Iterable[Reply]) -> list[tuple[Reply, CohortRow]]:
        taken = super()._take_late(replies)
        for reply, row in taken:
            (places,) = np.nonzero(row.clients == self.session.table.index(reply.client))
            if self.pace is not None:  # automatic deadlines depend on how long it took
                at, seconds, failed = places.tolist(), [reply.seconds], [0] if reply.status is not Status.OK else []
                self.pace.correct(reply.ticket, at, np.array(seconds), np.array([bool(failed)]))
                body = {"ticket": reply.ticket, "places": at, "seconds": seconds, "failed": failed}
                self.session.note(TIMES, body)
            if self.policy.late == "count" and reply.status is Status.OK:
                counted = 1.0 if row.weights is None else float(row.weights[places].item())
                self.late = newest_late([*self.late, (reply, row.round, counted)], _client_of)
        return taken


def _drop(reply: Reply, why: str) -> None:
    log.warning("a reply of %s to ticket %s is dropped: %s", short_repr(reply.client), short_repr(reply.ticket), why)


def _client_of(late: tuple[Reply, int, float]) -> str:
    return late[0].client
