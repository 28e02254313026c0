"""A small host with scripted facts that can answer every query and report every signal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import ClientTable, LabelCounts
from fedcohort.core.protocol import Answer, Cohort, Losses, Query, RoundReport, RoundRequest, Selector, Status
from fedcohort.core.signals import QUERY_SIGNALS, LossOf, Signal
from fedcohort.session.session import Session

Trace = list[tuple[int, ...]]  # the cohort of each round


@dataclass(frozen=True)
class ScriptedHost:
    """A federation of ``n`` clients whose facts and replies follow from ``seed``.

    Parameters
    ----------
    seed : int
        The seed of the facts (sizes, labels, losses), not of the session.
    order : (n,) int array, optional
        Relabels the clients: client i of this host has the facts of client ``order[i]``.
    loss : callable, optional
        ``loss(round, facts_index) -> float``, instead of the default loss.
    """

    n: int = 12
    seed: int = 0
    order: IntArray | None = None
    loss: Callable[[int, IntArray], FloatArray] | None = None
    classes: int = 4
    facts: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        counts = rng.integers(1, 40, (self.n, self.classes))
        order = np.arange(self.n) if self.order is None else np.asarray(self.order)
        self.facts.update(counts=counts[order], base=rng.uniform(0.5, 2.0, self.n), order=order)

    @property
    def table(self) -> ClientTable:
        """The client table, with every table signal."""
        counts = self.facts["counts"]
        return ClientTable(sizes=counts.sum(axis=1), labels=LabelCounts(counts))

    @property
    def signals(self) -> frozenset[Signal]:
        """Every signal except those of the client table, including signals that others have declared."""
        return QUERY_SIGNALS | frozenset(signal for signal in Signal.all() if signal.reported)

    def losses(self, round_: int, clients: IntArray) -> FloatArray:
        """Return the scripted losses, which fall slowly with the rounds."""
        index = self.facts["order"][clients]
        if self.loss is not None:
            return np.asarray(self.loss(round_, index), np.float64)
        # The wave makes some clients worse, which a selector must cope with.
        wave = 0.2 * np.sin(0.7 * round_ + index)
        return np.asarray(self.facts["base"][index] * np.exp(-0.02 * round_) + wave + 0.3, np.float64)

    def answer(self, query: Query | None, round_: int) -> Answer | None:
        """Answer a query."""
        if query is None:
            return None
        if isinstance(query, Losses):
            return Answer(query, {signal: self.losses(round_, query.clients) for signal in query.signals})
        clients = np.arange(self.n)
        change = self.losses(round_ + 1, clients) - self.losses(round_, clients)
        # Clients in a trial cohort gain from it, so that there is something to learn.
        pull = np.stack([-0.01 * np.isin(clients, cohort) for cohort in query.cohorts])
        return Answer(query, {query.answered_with: change + pull})

    def report(self, cohort: Cohort, status: Sequence[int] | None = None) -> RoundReport:
        """Report every signal for the whole cohort."""
        loss = self.losses(cohort.round, cohort.clients)
        metrics: dict[Signal, Any] = {}
        for signal in (s for s in Signal.all() if s.is_metric):
            after_training = isinstance(signal.how, LossOf) and signal.how.model == "own"
            values = loss * (0.9 if after_training else 1.0)
            if signal.width is not None:
                values = np.cos(np.outer(values, np.arange(signal.numbers(self.classes))))
            metrics[signal] = values
        # Two of three models are kept.
        kept = (self.facts["order"][cohort.clients] + cohort.round) % 3 != 0
        return RoundReport(cohort.ticket, cohort.clients, status=status, metrics=metrics, kept=kept)

    def session(self, selector: Selector[Any], seed: int = 0, journal: Path | None = None) -> Session:
        """Start a session of ``selector`` over this federation."""
        return Session(selector, self.table, seed=seed, signals=self.signals, journal=journal)

    def play_round(
        self,
        session: Session,
        size: int | None = 3,
        available: IntArray | None = None,
        status: Callable[[Cohort], Sequence[int]] | None = None,
    ) -> Cohort:
        """Play one round and return its cohort."""
        request = RoundRequest(size=size, available=available)
        cohort = session.ask(request, self.answer(session.query(request), session.round))
        if cohort.size:
            session.tell(self.report(cohort, None if status is None else status(cohort)))
        return cohort

    def play(self, session: Session, rounds: int, size: int | None = 3, some: bool = False) -> Trace:
        """Play rounds and return the cohorts; with ``some``, only some clients are available, others in each round."""
        trace: Trace = []
        for _ in range(rounds):
            available = None
            if some:
                draw = np.random.default_rng([self.seed, session.round])
                available = np.flatnonzero(draw.random(self.n) < 0.6)
            cohort = self.play_round(session, size, available)
            trace.append(tuple(cohort.clients.tolist()))
            if cohort.stop:
                break
        return trace

    def play_one_by_one(
        self, open_session: Callable[[], Session], events: int, *, reopen: bool = False
    ) -> list[tuple[frozenset[int], int]]:
        """Play an asynchronous session; return for each choice the clients at work and the client chosen.

        While fewer than four clients work, another one is asked for; otherwise one of them replies or fails. A new
        model is made of three models of clients.

        Parameters
        ----------
        open_session : callable
            Returns the session. With ``reopen``, it is closed and opened again after every event.
        """
        draw = np.random.default_rng([self.seed, 11])
        trace: list[tuple[frozenset[int], int]] = []
        models: list[int] = []  # tickets
        nobody = False  # whether the last request found no client
        session = open_session()
        for _ in range(events):
            pending = session.pending
            if len(models) >= 3:
                session.advance(models)
                models, nobody = [], False
            elif len(pending) < 4 and not (nobody and pending):
                request = RoundRequest(1)
                cohort = session.ask(request, self.answer(session.query(request), session.round))
                if cohort.stop:
                    break
                nobody = not cohort.size
                at_work = frozenset(np.concatenate([[], *(one.clients for one in pending)]).astype(int).tolist())
                trace += [(at_work, client) for client in cohort.clients.tolist()]
            else:
                models += self._reply_one(session, draw)
                nobody = False
            if reopen:
                session.close()
                session = open_session()
        session.close()
        return trace

    def _reply_one(self, session: Session, draw: np.random.Generator) -> list[int]:
        """Let one of the clients at work reply or fail; return its ticket if it returned a model."""
        one = session.pending[int(draw.integers(len(session.pending)))]
        status = Status.FAILED if draw.random() < 0.2 else Status.OK
        session.tell(self.report(one, [int(status)]))
        return [one.ticket] if status is Status.OK else []


def mixed_statuses(cohort: Cohort) -> list[int]:
    """Return statuses that take turns, shifted by the round."""
    kinds = list(Status)
    return [int(kinds[(i + cohort.round) % len(kinds)]) for i in range(cohort.size)]
