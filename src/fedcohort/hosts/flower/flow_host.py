"""A Flower federation whose clients answer one by one: one message at a time, models of answers that waited.

An aggregator of fedcohort says what each answer counts for, by its staleness. The wrapped strategy averages: it is
handed every update on top of the newest model, with that weight. All updates are multiplied by the sum of the weights,
so the strategy's mean is w + sum of c_k Delta_k, also where the weights c_k do not sum to 1.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord

from fedcohort.core.protocol import Cohort, Status
from fedcohort.hosts.flow import Answered, Flow, batch_seed
from fedcohort.hosts.flower.averaging import Average
from fedcohort.hosts.flower.checkpoint import AnswerFiles, WaitingAnswer
from fedcohort.hosts.flower.evaluation import scalars
from fedcohort.hosts.flower.host import FlowerHost, log_corrections, log_failures
from fedcohort.hosts.flower.logs import say
from fedcohort.hosts.flower.replies import Checked, measures_of, move_update, sample_counts, with_weight
from fedcohort.hosts.flower.wrapped_strategy import GridView, taking_all
from fedcohort.hosts.live import Aggregation
from fedcohort.hosts.live_flow import FlowHost, Taken
from fedcohort.hosts.round import Reply
from fedcohort.hosts.run_record import CHECKPOINT
from fedcohort.training.aggregators import Members, Mix, fitting

if TYPE_CHECKING:
    from fedcohort.hosts.flower.async_strategy import AsyncCohortStrategy

log = logging.getLogger("flwr.fedcohort")
_OK = Status.OK


class FlowerFlowHost(FlowerHost, FlowHost):
    """The clients behind a grid, asked one by one."""

    settings: AsyncCohortStrategy

    def __init__(self, settings: AsyncCohortStrategy, *arguments: Any, **options: Any) -> None:
        super().__init__(settings, *arguments, **options)
        store = settings.checkpoints
        self._files = None if store is None else AnswerFiles(store.folder)
        self._outbox_of_all = self._outbox()
        self._sent: dict[str, tuple[int, int]] = {}  # by message, its ticket and its node
        self._answers: dict[int, WaitingAnswer] = {}  # by ticket
        self._models: dict[int, ArrayRecord] = {}  # by number, those that clients at work began with
        self._flow: Flow

    def resume(self, flow: Flow) -> None:
        """Read the answers that wait and the models that clients at work began with."""
        self._flow, session, store = flow, self._running, self.settings.checkpoints
        if store is not None and self._files is not None:
            stored = session.host_state or {}
            self._saved = str(stored.get(CHECKPOINT, store.name(0)))
            self._files.keep_only(one.ticket for one in flow.waiting)
            self._answers = {one.ticket: self._files.load(one.ticket) for one in flow.waiting}
            self._models = {number: store.load(store.name(number)) for number in self._needed_models()}
        self._models[session.round] = self.arrays

    def _needed_models(self) -> set[int]:
        """Return the numbers of the models that clients at work, or waiting answers, began with."""
        return {c.round for c in self._flow.at_work} | {one.version for one in self._flow.waiting}

    # -- messages out, replies in -------------------------------------------------------------------------------------

    def send(self, cohort: Cohort) -> Mapping[str, str]:
        """Send a client the strategy's own train message, with the model of the cohort's round."""
        seed = batch_seed(self._running.seed, cohort.ticket)
        # A copy: what a strategy writes into its config counts once for every model, not for every message.
        config, outbox = ConfigRecord(dict(self.config)), self._outbox_of_all
        unsent = self._send(cohort, self._models[cohort.round], config, outbox, seed)
        if not unsent:
            ((name, message),) = self.training.sent.items()
            node = message.metadata.dst_node_id
            self._sent[next(reversed(outbox.waiting))] = (cohort.ticket, node)
            self.debts.working[name] = node
        return unsent

    def receive(self, until: float) -> list[Reply]:
        """Return checked replies, including those of clients that were given up."""
        self.debts.collect()  # answers to questions and evaluations that came too late
        outbox = self._outbox_of_all
        if not outbox.waiting:
            self._sleep_until(until)
            return []
        replies = outbox.receive(until)
        found = []
        for reply, checked in zip(replies, self.training.checker.check_all(replies), strict=True):
            ticket, node = self._sent.pop(reply.message.metadata.reply_to_message_id)
            if self.debts.working.get(reply.name) == node:
                del self.debts.working[reply.name]
            found.append(Reply(ticket, reply.name, checked.status, checked.reason, reply.seconds, checked))
        return found

    def take(self, cohort: Cohort, reply: Reply) -> Taken:
        """Keep an answer, on disk where there is a journal; measure it against the model it began with."""
        checked: Checked = reply.content
        model = self._models[cohort.round]
        checked, texts = self.training.shorten(checked, model)
        card = self.population.online.get(reply.client)
        times = 1.0 if cohort.weights is None else float(cohort.weights[0])
        answer = WaitingAnswer.of(checked, None if card is None else card.description.size, times)
        if self._files is not None:
            # On disk before the session records it: after a crash, a model is still made of all answers on record.
            self._files.save(cohort.ticket, answer)
        self._answers[cohort.ticket] = answer
        log_corrections(cohort.round, {reply.client: texts})
        measures = measures_of(model, [checked], sample_counts([checked]))
        return Taken(self._columns(measures), texts)

    # -- models -------------------------------------------------------------------------------------------------------

    def make_model(self, answers: Sequence[tuple[Answered, int]]) -> Aggregation:
        """Weigh answers by the aggregator, and let the strategy average them; what it cannot average is refused."""
        names = dict(zip([one.ticket for one, _ in answers], _unique(self._answers, answers), strict=True))
        sizes = {names[ticket]: self._answers[ticket].size for ticket in names}
        waiting = [self._answers[ticket].reply._replace(name=name) for ticket, name in names.items()]
        checked, corrections = self.training.bound_weights(waiting, sizes)
        sound = [
            (one, stale, reply) for (one, stale), reply in zip(answers, checked, strict=True) if reply.status is _OK
        ]
        average = self._weigh_and_average(sound, corrections)
        blamed = {reply.name: reply.reason for reply in checked if reply.status is not _OK} | average.blamed
        self._keep_average(average, self._running.round + 1)
        return Aggregation(
            np.array([names[one.ticket] not in blamed for one, _ in answers], np.bool_),
            error="" if average.arrays is not None else average.error or "it gave no model",
            refused={
                self._answers[ticket].reply.name: blamed[name] for ticket, name in names.items() if name in blamed
            },
            corrections=corrections,
        )

    def _weigh_and_average(
        self, sound: Iterable[tuple[Answered, int, Checked]], corrections: dict[str, list[str]]
    ) -> Average:
        session, given = self._running, list(sound)
        replies = [reply for _, _, reply in given]
        if not replies:
            return Average(error="too few valid models")
        members = Members(
            clients=np.array([one.client for one, _, _ in given], np.int64),
            share=np.array([reply.weight for reply in replies]),
            steps=np.ones(len(replies)),
            federation=session.table.n,
            multiplicity=np.array([self._answers[one.ticket].times for one, _, _ in given]),
            round=session.round,
            staleness=np.array([float(stale) for _, stale, _ in given]),
        )
        aggregator = self.settings.aggregator
        mix = fitting(aggregator.mix(members), Mix, members)
        # See the module: the strategy divides by this sum, so updates are multiplied by it.
        total = float(mix.weights.sum())
        chosen = []
        for (one, _, reply), weight in zip(given, mix.weights.tolist(), strict=True):
            begun = self.arrays if aggregator.mixes_models else self._models[one.version]
            moved = move_update(reply, begun, self.arrays, total)
            chosen.append(with_weight(moved, self.weight_key, weight))
        self._configure()
        return self._average_models(session.round + 1, chosen, (), corrections, lambda _: "")

    def _configure(self) -> None:
        """Let the strategy configure the newest model: some remember what they sent last and step from there."""
        view = GridView(self.grid, [1])  # nothing is sent
        with taking_all(self.inner, 1):
            list(self.inner.configure_train(self._running.round + 1, self.arrays, self.config, view))

    def store_model(self) -> None:
        """Put the model and the strategy's memory into a checkpoint."""
        self._save_model(self._running.round + 1)

    def state(self) -> Mapping[str, Any] | None:
        """Return the name of the newest checkpoint."""
        return None if self._saved is None else {CHECKPOINT: self._saved}

    # -- what happens, for the log ------------------------------------------------------------------------------------

    def on_failed(self, cohort: Cohort, reason: str) -> None:
        """Log a client without a sound answer."""
        log_failures(cohort, dict.fromkeys(cohort.names, reason))

    def on_no_model(self, made: Aggregation) -> None:
        """Log answers of which no model can be made."""
        number = self._running.round
        say(
            "round-failed", "the answers gave no model: %s", made.error,
            level=logging.WARNING, round=number, reason=made.error,
        )  # fmt: skip

    def on_model(self, number: int, models: int, made: Aggregation) -> None:
        """Go on with the new model: let what was used go, log, evaluate."""
        session, needed = self._running, self._needed_models()
        self._record_metrics(number)
        session.commit()
        store = self.settings.checkpoints
        self._take_over_model(() if store is None else {store.name(version) for version in needed})
        self._models = {v: model for v, model in self._models.items() if v in needed} | {session.round: self.arrays}
        self._answers = {}
        if self._files is not None:
            self._files.keep_only(())
        log_corrections(number, made.corrections)
        say(
            "round", "[MODEL %d, %d of %d] answers in the average: %d", number, number + 1, self.num_rounds, models,
            round=number, models=models, metrics=scalars(self._average.metrics),
        )  # fmt: skip
        self.evaluate(number, self.arrays)


def _unique(answers: Mapping[int, WaitingAnswer], used: Sequence[tuple[Answered, int]]) -> list[str]:
    """Return a name for each answer; a client may have answered twice since the newest model."""
    names: list[str] = []
    for one, _ in used:
        name = answers[one.ticket].reply.name
        names.append(name if name not in names else f"{name} (ticket {one.ticket})")
    return names
