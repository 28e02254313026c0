"""A Flower federation whose clients answer one by one.

An aggregator of fedcohort decides how much each answer counts, given its staleness. The wrapped strategy averages: it
gets every update on top of the newest model, with this weight. All updates are multiplied by the sum of the weights, so
the strategy's mean is w + sum of c_k Delta_k, even if the weights c_k do not sum to 1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord

from fedcohort.core.arrays import FloatArray
from fedcohort.core.protocol import Cohort, Status
from fedcohort.core.signals import Signal
from fedcohort.hosts.flow import BufferedAnswer, Flow, batch_seed
from fedcohort.hosts.flower.averaging import Average
from fedcohort.hosts.flower.checkpoint import AnswerFiles, WaitingAnswer
from fedcohort.hosts.flower.logs import log_corrections, log_failures, say
from fedcohort.hosts.flower.metrics import scalars
from fedcohort.hosts.flower.replies import CheckedMessage, measures_of
from fedcohort.hosts.flower.run import FlowerRun
from fedcohort.hosts.leases import Leases
from fedcohort.hosts.live import Aggregation
from fedcohort.hosts.live_flow import FlowHost, play_flow
from fedcohort.hosts.live_run import CHECKPOINT
from fedcohort.hosts.round import Reply
from fedcohort.hosts.weights import bounded_shares
from fedcohort.session.session import Session
from fedcohort.training.aggregators import Members, Mix, fitting

if TYPE_CHECKING:
    from fedcohort.hosts.flower.async_strategy import AsyncCohortStrategy

log = logging.getLogger("flwr.fedcohort")
_OK = Status.OK


class FlowRun(FlowerRun, FlowHost):
    """One run of a strategy without rounds: the clients behind a grid are asked one by one."""

    strategy: AsyncCohortStrategy

    def __init__(self, strategy: AsyncCohortStrategy, *arguments: Any, **options: Any) -> None:
        super().__init__(strategy, *arguments, **options)
        # With fewer clients, no model could keep to `max_share`.
        self.policy = replace(self.policy, wait_for=max(self.policy.enough_online, strategy.flow.min_clients))
        store = strategy.checkpoints
        self._files = None if store is None else AnswerFiles(store.folder)
        self._common_outbox = self._outbox()
        self._questions: dict[str, tuple[int, int]] = {}  # by message id, the ticket and the node
        self._answers: dict[int, WaitingAnswer] = {}  # by ticket
        self._models: dict[int, ArrayRecord] = {}  # by number, the models that clients at work began with
        self._flow: Flow

    def play_rounds(self, session: Session, leases: Leases | None) -> str | None:
        """Play the models that are left; return why the run ended earlier, or None."""
        return play_flow(self, session, self.policy, self.strategy.flow, self.num_rounds, leases)

    def on_finished(self, stop: str | None) -> None:
        """Delete the answers that are in the last model; more models may still need the others."""
        if self._files is not None:
            self._files.keep_only(answer.ticket for answer in Flow(self.running, self.strategy.flow).waiting)
        super().on_finished(stop)

    def resume(self, flow: Flow) -> None:
        """Load the waiting answers and the models that clients at work began with."""
        self._flow, session, store = flow, self.running, self.strategy.checkpoints
        if store is not None and self._files is not None:
            stored = session.host_state or {}
            self._saved = str(stored.get(CHECKPOINT, store.name(0)))
            tickets = [answer.ticket for answer in flow.waiting]
            self._files.keep_only(tickets)
            self._answers = {ticket: self._files.load(ticket) for ticket in tickets}
            self._models = {number: store.load(store.name(number)) for number in self._needed_models()}
        self._models[session.round] = self.model

    def _needed_models(self) -> set[int]:
        """Return the numbers of the models that clients at work, or waiting answers, began with."""
        return {cohort.round for cohort in self._flow.at_work} | {answer.version for answer in self._flow.waiting}

    # -- messages and replies -----------------------------------------------------------------------------------------

    def send(self, cohort: Cohort) -> Mapping[str, str]:
        """Send a client the strategy's own train message, with the model of the cohort's round."""
        seed = batch_seed(self.running.seed, cohort.ticket)
        # A copy, because a strategy may change its config once per model, but not once per message.
        config, outbox = ConfigRecord(dict(self.config)), self._common_outbox
        unsent = self._send(cohort, self._models[cohort.round], config, outbox, seed)
        if not unsent:
            ((name, message),) = self._sent.items()
            node = message.metadata.dst_node_id
            self._questions[next(reversed(outbox.waiting))] = (cohort.ticket, node)
            self.outstanding.working[name] = node
        return unsent

    def receive(self, until: float) -> list[Reply]:
        """Return checked replies, including those of clients that missed their deadline."""
        self.outstanding.collect()  # late answers to questions and evaluations, which are not needed
        outbox = self._common_outbox
        if not outbox.waiting:
            self._sleep_until(until)
            return []
        arrived = outbox.receive(until)
        replies = []
        for reply, checked in zip(arrived, self._checker.check_all(arrived), strict=True):
            ticket, node = self._questions.pop(reply.message.metadata.reply_to_message_id)
            if self.outstanding.working.get(reply.name) == node:
                del self.outstanding.working[reply.name]
            replies.append(Reply(ticket, reply.name, checked.status, checked.reason, reply.seconds, checked))
        return replies

    def take(self, cohort: Cohort, reply: Reply) -> tuple[Mapping[Signal, FloatArray], Sequence[str]]:
        """Keep an answer, on disk if there is a journal, and measure it against the model that it began with."""
        checked: CheckedMessage = reply.content
        model = self._models[cohort.round]
        checked, texts = self._shorten(checked, model)
        card = self.population.online.get(reply.client)
        times = 1.0 if cohort.weights is None else float(cohort.weights[0])
        answer = WaitingAnswer.of(checked, None if card is None else card.description.size, times)
        if self._files is not None:
            # Before the session records it, so that after a crash all recorded answers are still there.
            self._files.save(cohort.ticket, answer)
        self._answers[cohort.ticket] = answer
        log_corrections(cohort.round, {reply.client: texts})
        measures = measures_of(model, [checked])
        return self._columns(measures), texts

    # -- models -------------------------------------------------------------------------------------------------------

    def make_model(self, answers: Sequence[tuple[BufferedAnswer, int]]) -> Aggregation:
        """Weigh answers with the aggregator and let the strategy average them; refuse those that it cannot average."""
        names: dict[int, str] = {}  # by ticket; a client may have answered twice since the newest model
        for answer, _ in answers:
            name = self._answers[answer.ticket].reply.name
            names[answer.ticket] = f"{name} (ticket {answer.ticket})" if name in names.values() else name
        sizes = {names[ticket]: self._answers[ticket].size for ticket in names}
        waiting = [self._answers[ticket].reply._replace(name=name) for ticket, name in names.items()]
        # The share of a client is limited later, when the aggregator has weighed its answers.
        checked, corrections = self._bound_weights(waiting, sizes, None)
        valid = [
            (answer, staleness, reply)
            for (answer, staleness), reply in zip(answers, checked, strict=True)
            if reply.status is _OK
        ]
        average = self._weigh_and_average(valid, corrections)
        blamed = {reply.name: reply.reason for reply in checked if reply.status is not _OK} | average.blamed
        self._keep_average(average, self.running.round + 1)
        return Aggregation(
            np.array([name not in blamed for name in names.values()], np.bool_),
            error="" if average.arrays is not None else average.error or "it gave no model",
            refused={
                self._answers[ticket].reply.name: blamed[name] for ticket, name in names.items() if name in blamed
            },
            corrections=corrections,
        )

    def _weigh_and_average(
        self, valid: Sequence[tuple[BufferedAnswer, int, CheckedMessage]], corrections: dict[str, list[str]]
    ) -> Average:
        if not valid:
            return Average(error="too few valid models")
        session = self.running
        members = Members(
            clients=np.array([answer.client for answer, _, _ in valid], np.int64),
            share=np.array([reply.weight for _, _, reply in valid]),
            steps=np.ones(len(valid)),
            federation=session.table.n,
            multiplicity=np.array([self._answers[answer.ticket].times for answer, _, _ in valid]),
            round=session.round,
            staleness=np.array([float(staleness) for _, staleness, _ in valid]),
        )
        aggregator = self.strategy.aggregator
        mix = fitting(aggregator.mix(members), Mix, members)
        weights = dict(zip((answer.ticket for answer, _, _ in valid), mix.weights.tolist(), strict=True))
        if self.policy.max_share is not None:
            clients = {ticket: self._answers[ticket].reply.name for ticket in weights}
            counting = {clients[ticket] for ticket, weight in weights.items() if weight > 0}
            if len(counting) < self.strategy.flow.min_clients:
                return Average(error=f"{len(counting)} valid clients are too few for max_share")
            weights, lowered = bounded_shares(weights, clients, self.policy.max_share)
            for name, why in lowered.items():
                corrections.setdefault(name, []).append(why)
        # The strategy divides by this sum, so updates are multiplied by it.
        total = math.fsum(weights.values())
        chosen = []
        for answer, _, reply in valid:
            weight = weights[answer.ticket]
            begun = self.model if aggregator.mixes_models else self._models[answer.version]
            moved = reply.moved(begun, self.model, total)
            chosen.append(moved.with_weight(self.wrapped.weight_key, weight))
        self.wrapped.step_from(session.round + 1, self.model, self.config, self.grid)  # nothing is sent
        return self._average_models(session.round + 1, chosen, (), corrections, lambda _: "")

    def store_model(self) -> None:
        """Save the model and the strategy's memory in a checkpoint."""
        self._save_model(self.running.round + 1)

    def state(self) -> Mapping[str, Any] | None:
        """Return the name of the newest checkpoint."""
        return None if self._saved is None else {CHECKPOINT: self._saved}

    # -- the log ------------------------------------------------------------------------------------------------------

    def on_failed(self, cohort: Cohort, reason: str) -> None:
        """Log a client without a valid answer."""
        log_failures(cohort, dict.fromkeys(cohort.names, reason))

    def on_no_model(self, aggregation: Aggregation) -> None:
        """Log that the answers gave no model."""
        say(
            "round-failed", "the answers gave no model: %s", aggregation.error,
            level=logging.WARNING, round=self.running.round, reason=aggregation.error,
        )  # fmt: skip

    def on_model(self, number: int, models: int, aggregation: Aggregation) -> None:
        """Replace the global model, delete the answers that were used, log, and evaluate."""
        session, needed = self.running, self._needed_models()
        self._record_metrics(number)
        session.commit()
        store = self.strategy.checkpoints
        self._take_over_model(() if store is None else {store.name(version) for version in needed})
        self._models = {v: model for v, model in self._models.items() if v in needed} | {session.round: self.model}
        self._answers = {}
        if self._files is not None:
            self._files.keep_only(())
        log_corrections(number, aggregation.corrections)
        say(
            "round", "[MODEL %d, %d of %d] answers in the average: %d", number, number + 1, self.num_rounds, models,
            round=number, models=models, metrics=scalars(self._average.metrics),
        )  # fmt: skip
        self._evaluate(number)
