"""A live federation without rounds: the loop in which clients answer one by one, and what a host must do for it.

Who is asked and when a model is due is decided in :mod:`fedcohort.hosts.flow`; this loop waits, and gives up on clients
that stay silent. Every choice and every answer is on record before the next one, so that a run that was cut off goes on
with the same choices: clients that were at work are sent the same model again.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray
from fedcohort.core.errors import InputError, ParameterError
from fedcohort.core.protocol import Cohort, Status
from fedcohort.core.signals import Signal
from fedcohort.hosts.flow import Answered, Flow, FlowPolicy
from fedcohort.hosts.leases import Leases
from fedcohort.hosts.live import LOOK_EVERY, Aggregation, Messenger, Player
from fedcohort.hosts.round import Policy, Reply, RoundError, Shortage
from fedcohort.session.session import Session


@dataclass(frozen=True, eq=False)
class Taken:
    """What a host learned from one sound answer.

    Attributes
    ----------
    metrics : mapping of Signal to (1,) or (1, V) array
        What the session learns.
    corrections : sequence of str
        How the answer was changed.
    """

    metrics: Mapping[Signal, FloatArray] = field(default_factory=dict)
    corrections: Sequence[str] = ()


class FlowHost(Messenger):
    """Reaches clients that answer one by one, for :func:`play_flow`.

    A cohort is one client here, and its ``round`` is the model it is sent.
    """

    @abstractmethod
    def resume(self, flow: Flow) -> None:
        """Take up what is on record: the answers that wait, and the models that clients at work began with."""

    @abstractmethod
    def take(self, cohort: Cohort, reply: Reply) -> Taken:
        """Keep a sound answer until a model is made of it; it must survive a crash when this returns."""

    @abstractmethod
    def make_model(self, answers: Sequence[tuple[Answered, int]]) -> Aggregation:
        """Make the next global model of answers, each with its staleness."""

    @abstractmethod
    def store_model(self) -> None:
        """Save the model that was just made; :meth:`state` names it from now on."""

    @abstractmethod
    def state(self) -> Mapping[str, Any] | None:
        """Return what is stored with every event: where the newest model is."""

    def on_failed(self, cohort: Cohort, reason: str) -> None:
        """Called when a client gave no sound answer."""

    def on_model(self, number: int, models: int, made: Aggregation) -> None:
        """Called when model ``number``, made of so many answers, is on record."""

    def on_no_model(self, made: Aggregation) -> None:
        """Called when no model could be made of the answers."""


def play_flow(
    host: FlowHost,
    session: Session,
    policy: Policy,
    flow_policy: FlowPolicy,
    models: int,
    leases: Leases | None = None,
) -> str | None:
    """Play until the session has so many ``models``; return why the selector ended the run earlier, or None.

    Parameters
    ----------
    session : Session
        One that is asynchronous.
    policy : Policy
        Of which ``deadline``, ``patience`` and ``tries`` count: how long one client has, how long the run waits while
        nobody can be asked, and how often in a row answers may bring no model.
    models : int
        Of the session in all, those already on record included.
    leases : Leases, optional
        Shared with other runs of the federation.
    """
    return _FlowPlayer(host, session, policy, flow_policy, models, leases).play()


class _FlowPlayer(Player):
    """One call of :func:`play_flow`."""

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
        if policy.deadline == "auto":
            raise ParameterError(
                "A deadline of 'auto' closes rounds, which a flow has none of.", hint="give a client so many seconds"
            )
        self.deadline = policy.deadline
        self.host = host
        self.flow = Flow(session, flow_policy, host.now())
        self.deadlines: dict[int, float] = {}  # by ticket
        self.idle_since: float | None = None  # since when nobody works and nobody can be asked
        self.fruitless = 0

    def play(self) -> str | None:
        host, flow = self.host, self.flow
        if self.session.round >= self.rounds:
            return None
        # Clients that were at work when the run was cut off are sent the same model again, below.
        host.resume(flow)
        self._look()
        for cohort in flow.at_work:
            self._send(cohort)
        while True:
            stop = self._go_on()
            if stop is not None or self.session.round >= self.rounds:
                return stop
            for reply in host.receive(self._next_look()):
                self._take(reply)
                stop = self._go_on()
                if stop is not None or self.session.round >= self.rounds:
                    return stop
            self._write_off()

    def _go_on(self) -> str | None:
        """Make the models that are due and fill the free places; return why the selector ends the run, or None."""
        while self.flow.is_due(self.host.now()) and self.session.round < self.rounds:
            self._advance()
        stop = self._fill() if self.session.round < self.rounds else None
        self.session.commit()  # what no choice followed upon
        return stop

    def _next_look(self) -> float:
        """Return until when nothing happens unless somebody answers."""
        now = self.host.now()
        moments = [min(self.deadlines.values(), default=math.inf)]
        if self.flow.waiting:
            moments.append(self.flow.due_at)
        if self.flow.free:
            moments.append(now + LOOK_EVERY)
        return max(min(moments), now)

    # -- whom to ask --------------------------------------------------------------------------------------------------

    def _fill(self) -> str | None:
        host, flow, session = self.host, self.flow, self.session
        while flow.free:
            available = self._available()
            if isinstance(available, Shortage):
                self._wait(available)
                return None
            self.idle_since = None
            host.on_ready()
            query = flow.open(available)
            cohort = flow.choose(None if query is None else host.answer(query, np.flatnonzero(available)))
            session.commit()
            if cohort.size and (why := self._lease(cohort)):
                flow.abandon(cohort.ticket, why)
            elif cohort.size:
                host.on_chosen(cohort, int(available.sum()))
                self._send(cohort)
            if cohort.stop is not None or not cohort.size:
                return cohort.stop
        return None

    def _available(self) -> BoolArray | Shortage:
        """(N,) who can be asked now, or why nobody can."""
        flow, session = self.flow, self.session
        busy = self._look()
        there = np.zeros(session.table.n, np.bool_)
        there[self.online] = True
        there &= session.active
        free = there & ~flow.busy
        free[busy] = False
        failed = free & flow.passed_over
        found = free & ~failed
        # None: somebody is left whom the rules admit.
        excluded = flow.exclusions(found) if found.any() else ()
        if excluded is None:
            return found
        names = session.table.names_of
        return Shortage(
            int(there.sum()), 1, 0, 1, names(np.flatnonzero(there & ~free)), excluded, names(np.flatnonzero(failed))
        )

    def _wait(self, shortage: Shortage) -> None:
        """Take note that nobody can be asked; when nobody is at work either, not for longer than patience."""
        host, now = self.host, self.host.now()
        if self.flow.at_work:
            self.idle_since = None
            return
        self.idle_since = now if self.idle_since is None else self.idle_since
        if now - self.idle_since > self.policy.patience:
            raise shortage.error(self.session.round, self.policy.patience, host.absent())
        host.on_waiting(shortage, now - self.idle_since)

    def _send(self, cohort: Cohort) -> None:
        begun = self.host.now()
        unsent = self.host.send(cohort)
        if self.deadline is not None:
            self.deadlines[cohort.ticket] = begun + self.deadline
        for reason in unsent.values():
            self._fail(cohort, Status.MISSING, reason)
            self._release(cohort)

    # -- what comes back ----------------------------------------------------------------------------------------------

    def _take(self, reply: Reply) -> None:
        cohort = next((one for one in self.flow.at_work if one.ticket == reply.ticket), None)
        if cohort is None:
            self._take_late([reply])
            return
        self._release(cohort)
        if reply.status is not Status.OK:
            self._fail(cohort, reply.status, reply.reason)
            return
        taken = self.host.take(cohort, reply)
        if taken.corrections:
            self._note_corrections(cohort.round, {reply.client: taken.corrections})
        try:
            self.flow.receive(cohort.ticket, Status.OK, taken.metrics, state=self.host.state())
        except InputError as error:  # numbers that only the session can judge, such as a vector of another width
            self._fail(cohort, Status.INVALID, str(error))
            return
        self.deadlines.pop(cohort.ticket, None)

    def _fail(self, cohort: Cohort, status: Status, reason: str) -> None:
        """Free the place of a client that brings no sound answer."""
        self.deadlines.pop(cohort.ticket, None)
        self._note_failures(cohort.round, cohort.ticket, dict.fromkeys(cohort.names, reason))
        self.flow.receive(cohort.ticket, status, state=self.host.state())
        self.host.on_failed(cohort, reason)

    def _write_off(self) -> None:
        """Free the places of clients whose time is over."""
        now = self.host.now()
        for cohort in self.flow.at_work:
            if self.deadlines.get(cohort.ticket, math.inf) <= now:
                self._fail(cohort, Status.MISSING, f"no answer within {self.deadline:g} s")

    def _release(self, cohort: Cohort) -> None:
        if self.leases is not None:
            self.leases.release(cohort.names)

    # -- models -------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        host, flow, session = self.host, self.flow, self.session
        answers = list(flow.waiting)
        made = host.make_model([(one, flow.staleness(one)) for one in answers])
        refused = {one.ticket for one, kept in zip(answers, made.kept.tolist(), strict=True) if not kept}
        flow.discard(refused)
        # The session has taken them for sound; that no model was made of them is on record beside it.
        corrections = {name: [f"its answer is left out: {why}"] for name, why in made.refused.items()}
        for name, texts in made.corrections.items():
            corrections.setdefault(name, []).extend(texts)
        if corrections:
            self._note_corrections(session.round, corrections)
        if made.error:
            host.on_no_model(made)
            if not refused:  # nobody is to blame: other answers may do better
                flow.discard({one.ticket for one in answers})
                self.fruitless += 1
            if self.fruitless >= self.policy.tries:
                raise RoundError(
                    f"The answers gave no model {self.fruitless} times in a row: {made.error}.",
                    hint="fix the strategy and start the run again: it continues with this model",
                )
            return
        self.fruitless = 0
        host.store_model()
        number = session.round
        flow.advance(host.now(), state=host.state())
        host.on_model(number, len(answers) - len(refused), made)
