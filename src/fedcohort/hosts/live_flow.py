"""A live federation without rounds: the loop in which clients answer one by one, and the methods that a host must have.

:mod:`fedcohort.hosts.flow` decides who is asked and when a model is due. This loop waits, and gives up on clients that
do not answer. Every choice and every answer is recorded before the next one, so an interrupted run continues with the
same choices. Clients that were at work get the same model again.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.errors import InputError
from fedcohort.core.protocol import Cohort, Status
from fedcohort.core.signals import Signal
from fedcohort.hosts.flow import BufferedAnswer, Flow, FlowPolicy
from fedcohort.hosts.leases import Leases
from fedcohort.hosts.live import LOOK_EVERY, Aggregation, Messenger, Player
from fedcohort.hosts.round import Policy, Reply, RoundError, Shortage
from fedcohort.hosts.silence import Silence
from fedcohort.journal.events import TIMES
from fedcohort.session.session import Session


class FlowHost(Messenger):
    """Trains clients that answer one by one, and averages their models, for :func:`play_flow`.

    A cohort is one client, and its ``round`` is the number of the model that it is sent.
    """

    @abstractmethod
    def resume(self, flow: Flow) -> None:
        """Load what the record names: the waiting answers, and the models that clients at work began with."""

    @abstractmethod
    def take(self, cohort: Cohort, reply: Reply) -> tuple[Mapping[Signal, FloatArray], Sequence[str]]:
        """Keep a valid answer for the next model; once this returns, it must survive a crash.

        Returns what the session learns, in (1,) or (1, V) arrays by signal, and the changes made to the answer.
        """

    @abstractmethod
    def make_model(self, answers: Sequence[tuple[BufferedAnswer, int]]) -> Aggregation:
        """Make the next global model from answers, each with its staleness."""

    @abstractmethod
    def store_model(self) -> None:
        """Save the newest model; :meth:`state` names it from now on."""

    @abstractmethod
    def state(self) -> Mapping[str, Any] | None:
        """Return the state to store with every event, which names the newest model."""

    def on_failed(self, cohort: Cohort, reason: str) -> None:
        """Called when a client gave no valid answer."""

    def on_model(self, number: int, models: int, aggregation: Aggregation) -> None:
        """Called when model ``number``, made from ``models`` answers, is recorded."""

    def on_no_model(self, aggregation: Aggregation) -> None:
        """Called when the answers gave no model."""


def play_flow(
    host: FlowHost,
    session: Session,
    policy: Policy,
    flow_policy: FlowPolicy,
    models: int,
    leases: Leases | None = None,
) -> str | None:
    """Play until the session has ``models`` models; return why the run ended earlier, or None.

    Parameters
    ----------
    session : Session
        An asynchronous session.
    policy : Policy
        Five of its fields are used: ``deadline``, the time one client has; ``wait_for``, how many clients must be
        online before another is asked; ``patience``, how long the run waits while nobody can be asked; ``tries``, how
        often in a row the answers may give no model; ``early_stop``.
    models : int
        The session's number of models, including those already recorded.
    leases : Leases, optional
        Shared with other runs of the federation.
    """
    return _FlowPlayer(host, session, policy, flow_policy, models, leases).play()


class _FlowPlayer(Player):
    """One call of :func:`play_flow`."""

    host: FlowHost

    def __init__(
        self,
        host: FlowHost,
        session: Session,
        policy: Policy,
        flow_policy: FlowPolicy,
        models: int,
        leases: Leases | None,
    ) -> None:
        super().__init__(host, session, policy, models, leases)
        self.flow = Flow(session, flow_policy, host.now())
        self.silence = Silence.of(session, policy.deadline)
        self.begun: dict[int, float] = {}  # by ticket, of clients that have not answered
        self.idle_since: float | None = None  # since when nobody is at work or can be asked
        self.failed_attempts = 0
        self.stop: str | None = None  # why the run ends before its last model

    def play(self) -> str | None:
        host, flow = self.host, self.flow
        if self.session.round >= self.rounds:
            return None
        host.resume(flow)
        if (why := self._stops_early()) is not None:
            return why
        self._look()
        # Interrupted with the earlier run. They get the same model again, so that the choices stay the same.
        for cohort in flow.at_work:
            self._send(cohort)
        while not self._proceed():
            # There is nothing to do until then, unless a client answers.
            until = min(map(self._ends, flow.at_work), default=math.inf)
            if not flow.lacks_clients:
                until = min(until, flow.due_at)
            now = host.now()
            if flow.free:  # whoever could take the place may come online without a message
                until = min(until, now + LOOK_EVERY)
            for reply in host.receive(max(until, now)):
                self._take(reply)
                # After each answer, because it may make a model due, and the next choice depends on what it brought.
                if self._proceed():
                    return self.stop
            self._write_off()
        return self.stop

    @property
    def _is_over(self) -> bool:
        return self.stop is not None or self.session.round >= self.rounds

    def _proceed(self) -> bool:
        """Make the models that are due and fill the free places; return whether the run is over."""
        while not self._is_over and self.flow.is_due(self.host.now()):
            self._advance()
            self.stop = self._stops_early()
        if not self._is_over:
            self.stop = self._fill()
        self.session.commit()  # events after the last choice
        return self._is_over

    # -- the choice ---------------------------------------------------------------------------------------------------

    def _fill(self) -> str | None:
        """Ask clients until no place is free; return why the selector ends the run, or None."""
        host, flow, session = self.host, self.flow, self.session
        while flow.free:
            busy = self._look()
            online = np.zeros(session.table.n, np.bool_)
            online[self.online] = True
            online &= session.active
            free = online & ~flow.busy
            free[busy] = False
            failed = free & flow.passed_over
            available = free & ~failed
            resting = available & self.silence.resting(host.now(), len(free))
            # Whoever is left alone is asked all the same if nobody else is at work or can be asked.
            alone = bool(resting.any()) and not flow.at_work and bool((available == resting).all())
            available = self.silence.first_of(resting) if alone else available & ~resting
            query = flow.open(available)
            count, wait_for = int(online.sum()), self.policy.enough_online
            if flow.excluded or not available.any() or count < wait_for:
                names = session.table.names_of
                others, failures = names(np.flatnonzero(online & ~free)), names(np.flatnonzero(failed))
                self._wait(Shortage(count, wait_for, 0, 1, others, flow.excluded or (), failures))
                return None
            self.idle_since = None
            host.on_ready()
            cohort = flow.choose(None if query is None else host.answer(query, np.flatnonzero(available)))
            session.commit()
            if cohort.size and (why := self._lease(cohort)):
                # Another run was faster; the client counts as never chosen, and somebody else may be free.
                flow.abandon(cohort.ticket, why)
            elif cohort.size:
                host.on_chosen(cohort, int(available.sum()))
                self._send(cohort)
            if cohort.stop is not None or not cohort.size:
                return cohort.stop
        return None

    def _wait(self, shortage: Shortage) -> None:
        """Handle a moment in which nobody can be asked; raise an error if nobody has been at work for too long."""
        host, now = self.host, self.host.now()
        if self.flow.at_work:
            self.idle_since = None
            return
        self.idle_since = now if self.idle_since is None else self.idle_since
        if now - self.idle_since > self.policy.patience:
            raise shortage.error(self.session.round, self.policy.patience, self._absent())
        host.on_waiting(shortage, now - self.idle_since)

    def _send(self, cohort: Cohort) -> None:
        self.begun[cohort.ticket] = self.host.now()
        self.silence.ask(int(cohort.clients[0]))
        unsent = self.host.send(cohort)
        # An unsent message ends at once, or the place would wait for an answer that cannot come.
        for reason in unsent.values():
            self._fail(cohort, Status.MISSING, reason)
            self._release(cohort)

    # -- answers ------------------------------------------------------------------------------------------------------

    def _take(self, reply: Reply) -> None:
        at_work = (cohort for cohort in self.flow.at_work if cohort.ticket == reply.ticket)
        cohort = next(at_work, None)
        if cohort is None or reply.client not in cohort.names:
            for late, row in self._take_late([reply]):
                self._answered(row.ticket, int(row.clients[0]), late.status, late.seconds)
            return
        self._release(cohort)
        self._answered(cohort.ticket, int(cohort.clients[0]), reply.status, reply.seconds)
        if reply.status is not Status.OK:
            self._fail(cohort, reply.status, reply.reason)
            return
        metrics, corrections = self.host.take(cohort, reply)
        if corrections:
            self._note_corrections(cohort.round, {reply.client: corrections})
        try:
            self.flow.receive(cohort.ticket, Status.OK, metrics, state=self.host.state())
        except InputError as error:  # something that only the session can check, such as a vector's width
            self._fail(cohort, Status.INVALID, str(error))
            return

    def _answered(self, ticket: int, client: int, status: Status, seconds: float) -> None:
        """Note that a client is not silent, and how long it took if automatic deadlines depend on it."""
        if ticket in self.begun:  # it was sent by this process, whose clock is the same for every host
            seconds = self.host.now() - self.begun.pop(ticket)
        timed = status is Status.OK
        self.silence.answered(client, seconds if timed else None)
        if timed and self.policy.deadline == "auto":
            self.session.note(TIMES, {"ticket": ticket, "places": [0], "seconds": [seconds], "failed": []})

    def _fail(self, cohort: Cohort, status: Status, reason: str) -> None:
        """Free the place of a client without a valid answer."""
        self._note_failures(cohort.round, cohort.ticket, dict.fromkeys(cohort.names, reason))
        self.flow.receive(cohort.ticket, status, state=self.host.state())
        self.host.on_failed(cohort, reason)

    def _write_off(self) -> None:
        """Free the places of clients that have missed their deadline."""
        now = self.host.now()
        for cohort in self.flow.at_work:
            if self._ends(cohort) <= now:
                lasted = now - self.begun[cohort.ticket]
                rest = self.silence.add(int(cohort.clients[0]), now, lasted)
                self._fail(cohort, Status.MISSING, f"no answer within {lasted:g} s; it is left alone for {rest:g} s")

    def _ends(self, cohort: Cohort) -> float:
        """Return when a client at work has missed its deadline, given what is known about all of them by now."""
        deadline = self.silence.deadline_for(int(cohort.clients[0]))
        return math.inf if deadline is None else self.begun[cohort.ticket] + deadline

    def _release(self, cohort: Cohort) -> None:
        if self.leases is not None:
            self.leases.release(cohort.names)

    # -- models -------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        host, flow, session = self.host, self.flow, self.session
        answers = list(flow.waiting)
        aggregation = host.make_model([(answer, flow.staleness(answer)) for answer in answers])
        # The answers that the host refuses count as failures: three of one client, and it is passed over.
        kept = aggregation.kept.tolist()
        refused = {answer.ticket for answer, keep in zip(answers, kept, strict=True) if not keep}
        flow.discard(refused)
        # The session has recorded these answers as valid, so what is wrong with them is recorded as a correction.
        corrections = {name: [f"its answer is left out: {why}"] for name, why in aggregation.refused.items()}
        for name, texts in aggregation.corrections.items():
            corrections.setdefault(name, []).extend(texts)
        if corrections:
            self._note_corrections(session.round, corrections)
        if aggregation.error:
            host.on_no_model(aggregation)
            if not refused:  # no single answer is to blame, so all are dropped
                flow.discard({answer.ticket for answer in answers})
                self.failed_attempts += 1
            if self.failed_attempts >= self.policy.tries:
                raise RoundError(
                    f"The answers gave no model {self.failed_attempts} times in a row: {aggregation.error}.",
                    hint="fix the strategy and start the run again: it continues with this model",
                )
            return
        self.failed_attempts = 0
        # Stored before it is recorded: after a crash between the two, the same answers make the same model again.
        host.store_model()
        number = session.round
        flow.advance(host.now(), state=host.state())
        host.on_model(number, len(answers) - len(refused), aggregation)
