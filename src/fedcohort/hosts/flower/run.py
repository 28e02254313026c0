"""One call of ``CohortStrategy.start``: its session, the clients behind the grid, the strategy and the global model."""

from __future__ import annotations

import io
import logging
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedcohort.audit.choices import receipt
from fedcohort.core import rng as streams
from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.errors import InputError, ParameterError, SignalError
from fedcohort.core.protocol import Answer, Cohort, Losses, Query, Status, Trial
from fedcohort.core.signals import TABLE_SIGNALS, OnServer, Signal, metrics_of, vectors_of
from fedcohort.core.text import join_names
from fedcohort.core.vectors import needs_output_layer
from fedcohort.hosts.flower.averaging import Average, aggregate, error_text, with_integers
from fedcohort.hosts.flower.exchange import Outbox, exchange
from fedcohort.hosts.flower.logs import log_corrections, log_failures, say
from fedcohort.hosts.flower.metrics import common_metrics, scalars
from fedcohort.hosts.flower.population import Population
from fedcohort.hosts.flower.pulse import Pulse
from fedcohort.hosts.flower.replies import (
    CheckedMessage,
    Checker,
    decode,
    evaluations,
    measures_of,
    weighted_average,
    with_common_names,
)
from fedcohort.hosts.flower.roster import Card
from fedcohort.hosts.flower.wire import LOSSES
from fedcohort.hosts.flower.wrapped_strategy import InnerStrategyError, StrategyState, WrappedStrategy
from fedcohort.hosts.live import Aggregation, Online
from fedcohort.hosts.live_run import CHECKPOINT, LiveRun
from fedcohort.hosts.measures import Measures, is_statistic, output_of
from fedcohort.hosts.orders import Order
from fedcohort.hosts.round import Late, Reply, Round, Shortage
from fedcohort.hosts.weights import bounded_weights
from fedcohort.hosts.wire import CONFIRMATION, RECORD, SEED, WORK, plain, question
from fedcohort.journal import read_journal
from fedcohort.journal.events import CORRECTED
from fedcohort.session.resume import participations
from fedcohort.session.rules import Rules, difference
from fedcohort.session.session import Session

if TYPE_CHECKING:
    from fedcohort.hosts.flower.strategy import CohortStrategy

log = logging.getLogger("flwr.fedcohort")
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]  # evaluates the model of a round at the server
ShouldStop = Callable[[int, Result], bool]
_OK = Status.OK
LATE_GRACE_SECONDS = 60.0  # seconds, at least, between a train message's deadline and its end, for late answers
_NAMED = 8  # how many clients a log message names
_EVALUATION = "evaluation"  # the random stream for the choice of evaluating clients


class FlowerRun(LiveRun):
    """One run of a strategy over the clients behind a grid.

    Attributes
    ----------
    model : ArrayRecord
        The global model.
    policy : Policy
        That of the settings, completed by what the wrapped strategy wants.
    """

    model: ArrayRecord

    def __init__(
        self,
        strategy: CohortStrategy,
        grid: Grid,
        initial_arrays: ArrayRecord,
        *,
        num_rounds: int,
        timeout: float,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
        should_stop: ShouldStop | None = None,
    ) -> None:
        self.strategy = strategy
        self.wrapped = strategy.wrapped
        self.grid = grid
        given = strategy.settings
        shadows = frozenset[Signal]().union(*(shadow.requires for shadow in given.shadows.values()))
        # The table must have the facts that shadows need. Other signals are reported only if all clients can.
        self._shadow_facts = shadows & TABLE_SIGNALS
        self._optional_signals = frozenset(s for s in shadows if s.reported)
        self._missing_facts = frozenset[Signal]()  # that shadows need and the journal's table lacks
        self.population = Population(
            grid,
            given.selector.requires | self._shadow_facts,
            patience=given.policy.patience,
            labels=strategy.labels,
            describe_every=strategy.describe_every,
            classes=strategy.classes,
            registered_only=strategy.registered_only,
            clock=strategy.clock,
            sleep=self._sleep,
            waits=self._waits,
        )
        super().__init__(given, num_rounds, self.population)
        self.config = train_config
        self._initial_config = dict(train_config)
        self._config_before = self._initial_config  # before the open round was configured
        self._evaluate_config = evaluate_config
        self._evaluate_fn = evaluate_fn
        self._should_stop = should_stop
        self._asked_to_stop = 0  # the newest round after which should_stop was called
        # With an automatic deadline, messages live as long as without one, so that late answers show who is slow.
        self.deadline = self.policy.fixed_deadline or timeout
        self.policy = replace(
            self.policy,
            size=lambda online: given.policy.size_for(online) or self.wrapped.sample_size("train", online),
            deadline="auto" if self.policy.deadline == "auto" else self.deadline,
            wait_for=self.policy.wait_for or self.wrapped.min_clients,
        )
        self.memory = StrategyState(self.wrapped)
        self.outstanding = self.population.outstanding
        self.result = Result()
        self.model = initial_arrays
        self._pulse = Pulse(given.journal, num_rounds, strategy.clock)
        self._open: tuple[Cohort, Outbox] | None = None  # the cohort that trains
        self._checker: Checker  # of the replies to the messages that were sent last
        self._sent: dict[str, Message] = {}  # these messages, by client
        # By ticket, how late replies are checked, and the model that was sent.
        self._late_checks: dict[int, tuple[Checker, ArrayRecord]] = {}
        self._average = Average()  # of the newest round
        self._saved: str | None = None  # the newest checkpoint
        self._begun = self.now()

    # -- from the start to the end ------------------------------------------------------------------------------------

    def reopen(self, journal: Path, *, shadows: bool = True) -> Session:
        """Return the session of the journal; as long as its table lacks facts, without the shadows that need them."""
        with closing(read_journal(journal)) as record:
            before = Rules(**(record.meta()["rules"] or {}))
            self._missing_facts = self._shadow_facts - record.table()[0].signals
        session = super().reopen(journal, shadows=not self._missing_facts)
        now, given = session.rules or Rules(), self.settings.rules
        if now != Rules() and (given is None or session.rules != given):
            say(
                "rules", "the rules of the journal stay in force: %r; rules=Rules() drops them", now,
                round=session.round, rules=now.to_dict(),
            )  # fmt: skip
        elif given is not None and session.rules == given and given.to_dict() != before.to_dict():
            say(
                "rules", "the rules change from round %d on: %s", session.round, difference(before, now),
                round=session.round, rules=now.to_dict(),
            )  # fmt: skip
        try:
            self.population.adopt(session.table)
        except InputError:
            session.close()
            raise
        return session

    def prepare(self) -> None:
        """Wait for enough clients, and refuse what cannot work before anything is recorded."""
        settings, population = self.settings, self.population
        self._check_model()
        self._pulse.start(self.session)
        population.assemble(self.policy.enough_online)
        self._check_rules()
        if self.session is None:
            used = settings.selector.adapt(population.known_signals()).requires
            most = settings.selector.adapt(frozenset(Signal.all())).requires
            for signal, names in population.partly_supplied(most - used).items():
                log.warning("the selector does without '%s', which %s cannot supply", signal, join_names(names))
        elif self._missing_facts and settings.journal is not None:
            population.complete(self.session)
            self.session.commit()
            self.session.close()
            self.session = self.reopen(settings.journal)

    def on_opened(self, session: Session) -> None:
        """Show that the run goes on, and record which names are bound to keys."""
        self._pulse.attach(session)
        self._pulse.running()
        self.population.remember(session)

    def on_finished(self, stop: str | None) -> None:
        """Log the end and the metrics of the run."""
        session = self.running
        if stop is not None:
            say("stopped", "the run ends before its last round: %s", stop, reason=stop)
        seconds = self.now() - self._begun
        say(
            "finished", "the run is finished: it has %d of %d rounds, after %.2f s", session.round, self.num_rounds,
            seconds, rounds=session.round, seconds=seconds,
        )  # fmt: skip
        log.info("Metrics by Flower's server round, which is one more than the round:")
        for line in io.StringIO(str(self.result)):
            log.info("\t%s", line.rstrip("\n"))

    def on_end(self, failed: str | None) -> None:
        """Log why the run failed, if it did, and stop showing that it is alive."""
        if failed is not None:
            say("failed", "the run ended: %s", failed, level=logging.ERROR, reason=failed)
        self._pulse.stop(failed)

    def _check_model(self) -> None:
        """Refuse a model without the output layer that the selector needs; shadows do without it."""
        required = self.settings.selector.requires
        try:
            if needs_output_layer(required | self._optional_signals):
                output_of(decode(self.model))
        except SignalError:
            if needs_output_layer(required):
                raise
            self._optional_signals = frozenset(s for s in self._optional_signals if not needs_output_layer({s}))

    def _check_rules(self) -> None:
        """Refuse rules that the clients online cannot satisfy, before they are recorded; warn of later shortages."""
        session, online = self.session, self.population.online
        rules = self.settings.rules if session is None else session.rules
        size = self.policy.size_for(len(online))
        if rules is None or size is None:
            return
        spent, left = dict.fromkeys(online, 0), self.num_rounds
        if session is not None:
            spent, left = spent | participations(session.journal), left - session.round
        try:
            rules.check_feasible(spent, size, left)
        except ParameterError:
            if session is not None:  # closed without a commit, so that the journal keeps its old rules
                session.close()
                self.session = None
            raise
        for shortage in rules.shortages(spent, size, left):
            log.warning("the rules cannot be kept to the end unless other clients join: %s", shortage)
        unregistered = [name for name, card in online.items() if not card.registered]
        if rules.by_name and unregistered:
            log.warning(
                "the rules go by names, and %d of %d clients are not registered (%s): nothing keeps them from coming "
                "back under other names (registered_only=True admits registered nodes only)",
                len(unregistered), len(online), join_names(unregistered),
            )  # fmt: skip

    def recorded_settings(self) -> dict[str, Any]:
        """Return the settings that are recorded at each start."""
        policy = self.settings.policy
        return {
            "cohort-size": policy.size,
            "spares": policy.spares,
            "min-replies": policy.min_replies,
            "max-share": policy.max_share,
            "max-update-norm": policy.max_update_norm,
            "strategy": [type(level).__name__ for level in self.wrapped.levels],
            "filter": repr(self.strategy.filter),
            "signals": sorted(s.name for s in self.population.supplied_signals()),
            **self.strategy.more_settings(),
        }

    def load(self, session: Session) -> None:
        """Load the journal's checkpoint and metrics; before the first round, save the initial model."""
        store, asynchronous = self.strategy.checkpoints, self.settings.asynchronous
        if store is not None:
            name = self.checkpoint_to_load(store)
            if name is None:
                store.save(0, self.model, self.memory, {})
            else:
                self.model = store.load(name, self.memory, self.config)
                done = session.round - (0 if asynchronous else len(session.pending))
                say("continued", "continuing after %d rounds with %s", done, store.folder / name, rounds=done)
        self.result.arrays = self.model
        recorded = session.journal.metrics()
        for round_, numbers in recorded.items():
            # The prefix says who measured a number.
            for prefix, records in (
                ("train/", self.result.train_metrics_clientapp),
                ("evaluate/", self.result.evaluate_metrics_clientapp),
            ):
                if by_clients := {k[len(prefix) :]: v for k, v in numbers.items() if k.startswith(prefix)}:
                    records[round_ + 1] = MetricRecord({**by_clients})
            if at_server := {key: value for key, value in numbers.items() if "/" not in key}:
                self.result.evaluate_metrics_serverapp[round_ + 1] = MetricRecord({**at_server})
        if session.round == 0:
            self._evaluate_at_server(0, self.model)
            return
        between_rounds = asynchronous or not session.pending
        evaluated = any(not key.startswith("train/") for key in recorded.get(session.round - 1, {}))
        if between_rounds and self.population.online and not evaluated:
            self._evaluate(session.round - 1)  # the run was interrupted before this was recorded

    def stop(self) -> str | None:
        """Ask ``should_stop`` once after each round; a continued run asks again about its last one."""
        done = self.running.round
        if self._should_stop is None or done == self._asked_to_stop:  # also when a round is tried again
            return None
        self._asked_to_stop = done
        return "should_stop said so" if self._should_stop(done, self.result) else None

    # -- who is there -------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the time on the clock of the settings."""
        return self.strategy.clock()

    def online(self) -> Online:
        """Check who is online, and let new clients join."""
        session, population = self.running, self.population
        population.refresh()
        population.admit_new_clients(session)
        self._pulse.update_online(population.online, session)
        clients = population.available(session)
        return Online(clients, population.busy(session, clients))

    def absent(self) -> Sequence[str]:
        """Describe the clients that are connected but cannot take part, with the reasons."""
        return self.population.absent()

    def _sleep(self, seconds: float) -> None:
        """Sleep, and check every few seconds who is still connected."""
        self._pulse.look(self.grid.get_node_ids)
        self.strategy.sleep(seconds)

    def _sleep_until(self, until: float) -> None:
        if (left := until - self.now()) > 0:
            self._sleep(left)

    def _waits(self, reason: str) -> None:
        self._pulse.update_online(self.population.online, self.session)
        self._pulse.waiting(reason)

    # -- messages and replies -----------------------------------------------------------------------------------------

    def _outbox(self) -> Outbox:
        return Outbox(self.grid, self.strategy.clock, self._sleep)

    def send(self, cohort: Cohort) -> Mapping[str, str]:
        """Send the strategy's own train messages."""
        self._config_before = dict(self.config)
        self.wrapped.forget_round(cohort.round + 1)  # it may be left from an interrupted run in this process
        # Its own outbox, so that late answers to earlier rounds are not taken for answers to this one.
        outbox = self._outbox()
        self._open = (cohort, outbox)
        return self._send(cohort, self.model, self.config, outbox, self.running.seed)

    def _send(
        self, cohort: Cohort, arrays: ArrayRecord, config: ConfigRecord, outbox: Outbox, seed: int
    ) -> dict[str, str]:
        session, online = self.running, self.population.online
        required = metrics_of(session.requires)
        self._checker = self._checks(arrays, required)
        optional = self._optional_signals | session.trial_signals
        signals = required | (optional & self.population.supplied_signals())
        self._sent = self._train_messages(
            self.wrapped,
            cohort.round + 1,
            {name: online[name] for name in cohort.names if name in online},
            arrays,
            config,
            seed=seed,
            ask=question(signals, receipt(session.journal, cohort.ticket, cohort.round)),
            work={} if cohort.work is None else dict(zip(cohort.names, cohort.work.tolist(), strict=True)),
        )
        # Longer than the deadline, because a late answer is recorded and may count; but a node that returns much later
        # must not train a model that nobody needs.
        for message in self._sent.values():
            message.metadata.ttl = self.deadline + max(self.deadline, LATE_GRACE_SECONDS)
        refused = outbox.send(self._sent)
        reasons = {name: "not online" for name in cohort.names if name not in online}
        return reasons | dict.fromkeys(refused, "the SuperLink did not accept the message")

    def _train_messages(
        self,
        wrapped: WrappedStrategy,
        server_round: int,
        cards: Mapping[str, Card],
        arrays: ArrayRecord,
        config: ConfigRecord,
        *,
        seed: int,
        ask: Mapping[str, Any],
        work: Mapping[str, float],
    ) -> dict[str, Message]:
        """Return the strategy's own train messages for ``cards``, with fedcohort's additions for each client.

        Parameters
        ----------
        ask : mapping
            The :func:`~fedcohort.hosts.wire.question` for clients that answer.
        work : mapping of str to float
            By client, its amount of training as a multiple of the default.
        """
        if not cards:
            return {}
        nodes = [card.node for card in cards.values()]
        messages = wrapped.configure_train(server_round, arrays, config, self.grid, nodes)
        confirmations = self.population.confirmations(list(cards))
        # Equal contents share one object, which Flower then hashes and uploads only once.
        variants: dict[tuple[int, float | None, bool, bytes | None], tuple[RecordDict, RecordDict]] = {}
        by_name: dict[str, Message] = {}
        for name, card in cards.items():
            message = by_name[name] = messages[card.node]
            original, factor, confirmation = message.content, work.get(name), confirmations.get(name)
            variant = (id(original), factor, card.answers, confirmation)
            if variant not in variants:
                content = RecordDict(dict(original))
                before = content.config_records.get(wrapped.config_key, ConfigRecord())
                ours = {SEED: seed} if factor is None else {SEED: seed, WORK: float(factor)}
                # A copy, because the strategy may write into its config while this message is on its way.
                content[wrapped.config_key] = ConfigRecord({**before, **ours})
                if card.answers:
                    confirmed = {} if confirmation is None else {CONFIRMATION: confirmation}
                    content[RECORD] = ConfigRecord({**ask, **confirmed})
                # The original must stay alive, or its id could be used again.
                variants[variant] = (original, content)
            message.content = variants[variant][1]
        return by_name

    def _checks(self, arrays: ArrayRecord, required: frozenset[Signal] = frozenset()) -> Checker:
        """Return the checks of replies to ``arrays``."""
        return Checker(arrays, self.wrapped.weight_key, required, same_shapes=not self.wrapped.adds_trees)

    def receive(self, until: float) -> list[Reply]:
        """Return checked replies of the cohort that trains, and late ones of earlier rounds."""
        replies: list[Reply] = []
        if self._open is None:
            self._sleep_until(until)
        else:
            cohort, outbox = self._open
            arrived = outbox.receive(until)
            replies += [
                Reply(cohort.ticket, reply.name, checked.status, checked.reason, reply.seconds, checked)
                for reply, checked in zip(arrived, self._checker.check_all(arrived), strict=True)
            ]
        for overdue, reply in self.outstanding.collect():
            if overdue.ticket is None:
                continue
            status, reason, content = _OK if reply.error is None else Status.FAILED, "", None
            if overdue.ticket in self._late_checks:
                checker, sent = self._late_checks[overdue.ticket]
                (checked,) = checker.check_all([reply])
                status, reason, content = checked.status, checked.reason, (checked, sent)
            replies.append(Reply(overdue.ticket, reply.name, status, reason, reply.seconds, content))
        # Models are large, so they are kept only as long as a client may still send an update.
        owed = {overdue.ticket for overdue in self.outstanding.open}
        self._late_checks = {ticket: model for ticket, model in self._late_checks.items() if ticket in owed}
        return replies

    # -- the average --------------------------------------------------------------------------------------------------

    def combine(self, round_: Round) -> Aggregation:
        """Filter the valid models and let the strategy average them; refuse those that it cannot average."""
        assert self._open is not None
        cohort, outbox = self._open
        self._open = None
        online, sent = self.population.online, self.model
        # A client that has not answered stays busy, and its late answer must find its round.
        self.outstanding.add(
            outbox, {name: online[name].node for name in outbox.unanswered() if name in online}, cohort.ticket
        )
        if self.policy.late == "count":
            self._late_checks[cohort.ticket] = (self._checker, sent)
        # Bounds first: filters, selectors and the average must all see the same weights and updates.
        checked, late, corrections = self._bounded_replies(round_)
        # A reply that was valid by itself may be refused because its vectors differ in size from those of the others.
        refused = {
            now.name: now.reason
            for now, before in zip(checked, round_.in_order(), strict=True)
            if now.status is not before.status
        }
        valid = sum(reply.status is _OK for reply in checked)
        log.info("valid models: %d, clients without one: %d", valid, len(round_.reasons.keys() | refused.keys()))
        measures = measures_of(sent, checked)
        kept = self._apply_filter(checked, measures)
        average = self._aggregate(round_, checked, kept, corrections, [reply for _, reply in late])
        if blamed := average.blamed:
            checked = [
                reply._replace(status=Status.INVALID, reason=blamed[reply.name]) if reply.name in blamed else reply
                for reply in checked
            ]
            measures = measures_of(sent, checked)
            kept = kept & measures.ok
            refused.update({name: why for name, why in blamed.items() if name in cohort.names})
        self._keep_average(average, cohort.round + 1)
        return Aggregation(
            kept,
            self._columns(measures),
            error="" if average.arrays is not None else average.error or "it gave no model",
            refused=refused,
            corrections=corrections,
            late=[late_reply for late_reply, reply in late if reply.name not in average.blamed],
        )

    def _bounded_replies(
        self, round_: Round
    ) -> tuple[list[CheckedMessage], list[tuple[Late, CheckedMessage]], dict[str, list[str]]]:
        """Return replies within their bounds, valid late ones with their smaller weight, and the corrections."""
        answered: list[CheckedMessage] = [reply.content for reply in round_.in_order()]
        # The update of a late model is applied to the current one.
        stale = [reply.moved(began, self.model, 1.0) for reply, began in (x.reply.content for x in round_.late)]
        # All together, because each weight is bounded by those of the others.
        bounded, corrections = self._bound([*answered, *stale])
        late = [
            (late, reply.with_weight(self.wrapped.weight_key, reply.weight * late.times * late.discount))
            for late, reply in zip(round_.late, bounded[len(answered) :], strict=True)
            if reply.status is _OK
        ]
        return bounded[: len(answered)], late, corrections

    def _bound(self, replies: Sequence[CheckedMessage]) -> tuple[list[CheckedMessage], dict[str, list[str]]]:
        """Return replies to the global model within all bounds, and the corrections by client."""
        sizes = {name: card.description.size for name, card in self.population.online.items()}
        bounded, corrections = self._bound_weights(replies, sizes, self.policy.max_share)
        # After the weights, so that a refused reply is not shortened for nothing.
        for i, reply in enumerate(bounded):
            bounded[i], texts = self._shorten(reply, self.model)
            if texts:
                corrections.setdefault(reply.name, []).extend(texts)
        return bounded, corrections

    def _bound_weights(
        self, replies: Sequence[CheckedMessage], sizes: Mapping[str, int | None], max_share: float | None
    ) -> tuple[list[CheckedMessage], dict[str, list[str]]]:
        """Return replies with weights within their bounds, and the corrections; ``sizes`` are the declared ones."""
        # First, because the weights of replies that are refused here must not influence the bounds.
        bounded = with_common_names(replies, self.wrapped.arrays_key)
        sent_weights = {reply.name: reply.weight for reply in bounded if reply.status is _OK}
        weights, lowered = bounded_weights(sent_weights, sizes, max_share)
        for i, reply in enumerate(bounded):
            if reply.name in lowered:
                bounded[i] = reply.with_weight(self.wrapped.weight_key, weights[reply.name])
        return bounded, {name: [why] for name, why in lowered.items()}

    def _shorten(self, reply: CheckedMessage, arrays: ArrayRecord) -> tuple[CheckedMessage, list[str]]:
        """Return a checked reply to ``arrays`` with its update within the norm, and the corrections."""
        most = self.policy.max_update_norm
        if most is None or reply.status is not _OK:
            return reply, []
        reply, norm = reply.shortened(arrays, most)
        return reply, [f"its update of norm {norm:g} was shortened to {most:g}"] if norm > most else []

    def _apply_filter(self, checked: Sequence[CheckedMessage], measures: Measures) -> BoolArray:
        """Return whether the filter keeps each of the replies."""
        validation = self.strategy.validation
        if validation is None:
            kept = measures.apply_filter(self.strategy.filter)
        else:
            logits, labels = validation.logits, plain(validation.labels)
            kept = measures.apply_filter(self.strategy.filter, lambda row: plain(logits(checked[row].arrays)), labels)
        if kept.sum() < measures.ok.sum():
            log.info("the filter keeps %d of %d models", int(kept.sum()), len(measures.rows))
        return kept

    def _aggregate(
        self,
        round_: Round,
        checked: Sequence[CheckedMessage],
        kept: BoolArray,
        corrections: dict[str, list[str]],
        late: Sequence[CheckedMessage],
    ) -> Average:
        """Let the strategy average the replies that are kept, and the late ones."""
        cohort = round_.cohort
        chosen = [reply for reply, keep in zip(checked, kept.tolist(), strict=True) if keep]
        if self.policy.private:
            # An accountant raises an error for unequal weights. Found here, they fail one client and not the round.
            odd = _odd_weights(chosen, self.wrapped.weight_key) if self.wrapped.has_accountant else {}
            if short := round_.shortfall(len(chosen) - len(odd)):
                return Average(blamed=odd, error=short)
        # After the bounds, which limit what a client claims; the selector's weights are the server's own.
        if cohort.weights is not None:
            share = dict(zip(cohort.names, cohort.weights.tolist(), strict=True))
            key = self.wrapped.weight_key
            chosen = [reply.with_weight(key, reply.weight * share[reply.name]) for reply in chosen]
        # Strategies for differential privacy count the errors. One that we refuse is an error of the app for them.
        errors = [
            reply.message
            if reply.message is not None and reply.message.has_error()
            else Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reply.reason), reply_to=self._sent[reply.name])
            for reply in checked
            if reply.status is not _OK
        ]
        return self._average_models(cohort.round + 1, [*chosen, *late], errors, corrections, round_.shortfall)

    def _average_models(
        self,
        server_round: int,
        chosen: list[CheckedMessage],
        errors: Sequence[Message],
        corrections: dict[str, list[str]],
        shortfall: Callable[[int], str],
    ) -> Average:
        """Let the strategy average models with their final weights; ``shortfall`` says whether they are too few."""
        metrics, uneven = common_metrics({reply.name: reply.metrics for reply in chosen}, self.wrapped.weight_key)
        if uneven:
            chosen = [reply.with_metrics(metrics[reply.name]) for reply in chosen]
            for name, texts in uneven.items():
                corrections.setdefault(name, []).extend(texts)
        if short := shortfall(len(chosen)):
            return Average(error=short)
        # FedAvg divides by the sum of weights.
        if not any(reply.weight > 0 for reply in chosen):
            return Average(error="too few valid models")
        average = aggregate(self.wrapped, server_round, chosen, errors)
        # Checked again without the models that could not be averaged.
        if len(chosen) - len(average.blamed) < self.policy.fewest:
            return Average(blamed=average.blamed, error=average.error)
        arrays = average.arrays
        if arrays is None:
            return average
        # Under differential privacy, only what the strategy has added noise to may be released.
        if self.wrapped.extrapolates and not self.policy.private:
            used = [reply for reply in chosen if reply.name not in average.blamed]
            arrays = ArrayRecord({**arrays, **weighted_average(used, is_statistic)})
        return replace(average, arrays=with_integers(arrays, self.model))

    def _keep_average(self, average: Average, server_round: int) -> None:
        if average.metrics is not None:
            log.info("\t└──> Aggregated MetricRecord: %s", average.metrics)
            self.result.train_metrics_clientapp[server_round] = average.metrics
        self._average = average

    def _columns(self, measures: Measures) -> Mapping[Signal, FloatArray]:
        """Return the report's numbers: required signals, duration, and everything that all valid replies contain."""
        signals = metrics_of(self.running.requires) | measures.common_signals()
        signals |= vectors_of(self._optional_signals, "update").keys()  # no client has to help with these
        on_server = {signal for signal in signals if isinstance(signal.how, OnServer)}
        columns = {signal: measures.column(signal) for signal in sorted(signals - on_server)}
        for signal in on_server:  # the received model's loss
            assert self.strategy.validation is not None
            columns[signal] = np.where(measures.ok, self.strategy.validation.loss(self.model), np.nan)
        return columns

    def store(self, round_: Round, aggregation: Aggregation) -> Any:
        """Record the strategy's metrics, and save the model and the strategy's memory in a checkpoint."""
        self._record_metrics(round_.cohort.round)
        return self._save_model(round_.cohort.round + 1)

    def _record_metrics(self, round_: int) -> None:
        """Record the strategy's metrics of the newest average."""
        if numbers := {f"train/{key}": value for key, value in scalars(self._average.metrics).items()}:
            self.running.record(round_, numbers)

    def _save_model(self, rounds: int) -> dict[str, Any] | None:
        """Save the newest average as the model after ``rounds`` rounds; return the state that names it."""
        store, arrays = self.strategy.checkpoints, self._average.arrays
        if store is None:
            return None
        assert arrays is not None
        # Only what the strategy wrote into the config; the app may change the rest in the next run.
        written = {key: value for key, value in self.config.items() if self._initial_config.get(key) != value}
        self._saved = store.save(rounds, arrays, self.memory, written)
        return {CHECKPOINT: self._saved}

    def _take_over_model(self, needed: Container[str] = ()) -> None:
        """Make the newest average the global model, and delete old checkpoints except those ``needed``."""
        assert self._average.arrays is not None
        self.result.arrays = self.model = self._average.arrays
        if self.strategy.checkpoints is not None and self._saved is not None:
            self.strategy.checkpoints.prune(self._saved, needed)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def _evaluate(self, round_: int) -> None:
        """Evaluate the model after a round on clients and at the server, and record the numbers."""
        session = self.running
        numbers, corrections = self._evaluate_on_clients(round_ + 1)
        log_corrections(round_, corrections)
        if corrections:
            session.note(CORRECTED, {"round": round_, "corrections": corrections})
        numbers.update(self._evaluate_at_server(round_ + 1, self.model))
        if numbers:
            session.record(round_, numbers)
            session.commit()
            say("evaluated", "round %d evaluated", round_, round=round_, metrics=numbers)

    def _evaluate_at_server(self, server_round: int, arrays: ArrayRecord) -> dict[str, float]:
        """Return the numbers of the server's own evaluation."""
        if self._evaluate_fn is None:
            return {}
        metrics = self._evaluate_fn(server_round, arrays)
        log.info("\t└──> Global evaluation: %s", metrics)
        if metrics is not None:
            self.result.evaluate_metrics_serverapp[server_round] = metrics
        return scalars(metrics)

    def _evaluate_on_clients(self, server_round: int) -> tuple[dict[str, float], dict[str, list[str]]]:
        """Return the averaged numbers of clients, drawn among those that are free, and the corrections by client."""
        chosen = self._draw_evaluators(server_round)
        if not chosen:
            return {}, {}
        # The strategy must find what it wrote last time. A copy protects messages that are still on their way.
        config = self._evaluate_config = ConfigRecord(dict(self._evaluate_config))
        nodes = [card.node for card in chosen.values()]
        # The strategy may write to fewer clients than it was offered.
        by_node = self.wrapped.configure_evaluate(server_round, self.model, config, self.grid, nodes)
        messages = {name: by_node[card.node] for name, card in chosen.items() if card.node in by_node}
        replies = exchange(self._outbox(), messages, self.deadline, self.outstanding)
        valid = {}
        for name in messages:
            reply = replies.get(name)
            if reply is None or reply.error is not None:
                log.info("\t> %s did not evaluate: %s", name, "no answer" if reply is None else reply.error)
            else:
                valid[name] = reply.message
        sizes = {name: chosen[name].description.size for name in valid}
        usable, corrections = evaluations(valid, self.wrapped.weight_key, sizes, self.policy.max_share)
        metrics: MetricRecord | None = None
        try:
            if usable:
                metrics = self.wrapped.strategy.aggregate_evaluate(server_round, usable)
        except Exception as error:  # it must not end the run, because evaluation changes no model
            log.warning("the evaluation of round %d failed and is left out: %s", server_round - 1, error_text(error))
            log.debug("the evaluation failed", exc_info=True)
        if metrics is not None:
            log.info("\t└──> Aggregated evaluation: %s", metrics)
            self.result.evaluate_metrics_clientapp[server_round] = metrics
        return {f"evaluate/{key}": value for key, value in scalars(metrics).items()}, corrections

    def _draw_evaluators(self, server_round: int) -> dict[str, Card]:
        """Return as many clients as the strategy wants, drawn among those that are free."""
        if self.wrapped.sample_size("evaluate", 1) == 0:
            return {}
        online = self.population.online
        free = {name: card for name, card in online.items() if not self.outstanding.busy(name, card.node)}
        count = self.wrapped.sample_size("evaluate", len(free))
        if count is None or count >= len(free):
            return free
        names = list(free)
        # By round and seed, so that a resumed run evaluates on the same clients.
        draw = streams.stream(self.settings.seed, _EVALUATION, server_round - 1)
        return {names[int(i)]: free[names[int(i)]] for i in np.sort(draw.choice(len(names), count, replace=False))}

    # -- questions ----------------------------------------------------------------------------------------------------

    def answer(self, query: Query, available: IntArray) -> Answer:
        """Ask clients for losses, or try cohorts out, which differential privacy forbids."""
        if isinstance(query, Trial) and self.policy.private:
            raise InnerStrategyError(
                f"The selector {self.running.selector.name!r} tries out cohorts, and their models would be sent to "
                "clients without the noise of differential privacy.",
                hint="use a selector without trials; FedCor has none with samples='round'",
            )
        return super().answer(query, available)

    def ask_losses(
        self, model: ArrayRecord, names: Sequence[str], signals: frozenset[Signal]
    ) -> Mapping[str, Mapping[str, object] | str | None]:
        """Ask clients for losses of a model; return by name what each reported, or why it reported nothing."""
        content = RecordDict({"arrays": model, RECORD: ConfigRecord(question(signals))})
        online = self.population.online
        messages = {
            name: Message(content, dst_node_id=online[name].node, message_type=LOSSES)
            for name in names
            if name in online and Losses.needs in online[name].description.signals
        }
        deadline = self.policy.query_deadline or self.deadline
        replies = exchange(self._outbox(), messages, deadline, self.outstanding)
        return {n: reply.error or reply.message.content.config_records.get(RECORD) for n, reply in replies.items()}

    def train_trial(self, cohort: Sequence[str], seed: int) -> ArrayRecord | None:
        """Let a trial cohort train; return the average of its models, or None if it has none."""
        online = self.population.online
        cards = {name: online[name] for name in cohort if name in online}
        # Copies, because a trial must not change the strategy: no moments, no privacy budget.
        messages = self._train_messages(
            self.wrapped.copy(),
            self.running.round + 1,
            cards,
            self.model,
            ConfigRecord(dict(self.config)),
            seed=seed,
            ask=question(()),
            work={},
        )
        replies = exchange(self._outbox(), messages, self.deadline, self.outstanding)
        checked = self._checks(self.model).check_all(replies[name] for name in cards if name in replies)
        models = [reply for reply in self._bound(checked)[0] if reply.status is _OK]
        if not models:
            log.warning("a trial of %s returned no model", ", ".join(cards))
            return None
        return weighted_average(models)

    # -- the log -----------------------------------------------------------------------------------------------------

    def log(self, text: str, level: int = logging.INFO) -> None:
        """Write a line to Flower's log."""
        log.log(level, "%s", text)

    def on_round(self, number: int, resumed: bool) -> None:
        """Log the beginning of a round."""
        text = "[ROUND %d, %d of %d] again: it was interrupted" if resumed else "[ROUND %d, %d of %d]"
        log.info(text, number, number + 1, self.num_rounds)

    def on_waiting(self, shortage: Shortage, seconds: float) -> None:
        """Write what the run waits for next to the journal, and every few seconds to the log."""
        self._pulse.waiting(shortage.describe(absent=self.absent()))
        super().on_waiting(shortage, seconds)

    def on_ready(self) -> None:
        """Show that the run continues."""
        super().on_ready()
        self._pulse.running()

    def on_rules(self, order: Order) -> None:
        """Log that an operator has changed the rules."""
        session = self.running
        self.population.refresh_descriptions()  # the new rules may use the clients' attributes
        say(
            "rules", "the operator's rules apply from round %d on: %s", session.round, session.rules,
            round=session.round, order=order.id, rules={} if session.rules is None else session.rules.to_dict(),
        )  # fmt: skip

    def on_selector(self) -> None:
        """Admit only clients that supply what the new selector reads, and log it."""
        super().on_selector()
        session, name = self.running, self.running.selector.name
        say("selector", "from round %d on, %s chooses", session.round, name, round=session.round, selector=name)

    def on_chosen(self, cohort: Cohort, available: int) -> None:
        """Log who was chosen."""
        known = self.running.table.n
        shown = ", ".join(cohort.names[:_NAMED]) + (", ..." if cohort.size > _NAMED else "")
        say(
            "selected", "selected %s (%d of %d available, %d known)", shown, cohort.size, available, known,
            round=cohort.round, ticket=cohort.ticket, clients=list(cohort.names), available=available, known=known,
        )  # fmt: skip

    def on_closed(self, round_: Round, aggregation: Aggregation) -> None:
        """Replace the global model, delete old checkpoints, log, and evaluate."""
        cohort = round_.cohort
        self._take_over_model()
        log_failures(cohort, round_.reasons)
        log_corrections(cohort.round, aggregation.corrections)
        models = int(aggregation.kept.sum())
        say(
            "round", "round %d: models in the average: %d", cohort.round, models,
            round=cohort.round, ticket=cohort.ticket, models=models, without=len(round_.reasons),
            metrics=scalars(self._average.metrics),
        )  # fmt: skip
        self._evaluate(cohort.round)

    def on_abandoned(self, round_: Round, aggregation: Aggregation) -> None:
        """Make the strategy forget the round, which will be configured again for the next try."""
        cohort = round_.cohort
        self.config = ConfigRecord(self._config_before)
        self.wrapped.forget_round(cohort.round + 1)
        log_failures(cohort, round_.reasons)
        log_corrections(cohort.round, aggregation.corrections)
        say(
            "round-failed", "round %d leaves the global model as it was and is tried again: %s", cohort.round,
            aggregation.error,
            level=logging.WARNING, round=cohort.round, ticket=cohort.ticket, reason=aggregation.error,
        )  # fmt: skip

    def on_late(self, reply: Reply, round_: int) -> None:
        """Log a late answer."""
        say(
            "late", "client %r answered round %d after %.1f s", reply.client, round_, reply.seconds,
            round=round_, ticket=reply.ticket, client=reply.client, seconds=reply.seconds,
        )  # fmt: skip


def _odd_weights(replies: Sequence[CheckedMessage], key: str) -> dict[str, str]:
    """Return the clients whose weight differs from the majority's, which a privacy accountant does not allow."""
    weights = {reply.name: reply.weight for reply in replies}
    usual, count = Counter(weights.values()).most_common(1)[0] if weights else (0.0, 0)
    if 2 * count <= len(weights):
        return {}
    why = f"its weight {key!r} is {{:g}}, that of the others {usual:g}; a privacy accountant demands equal weights"
    return {name: why.format(weight) for name, weight in weights.items() if weight != usual}
