"""A Flower federation as a host: it sends the strategy's messages, checks replies, and lets the strategy average."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedcohort.audit.choices import receipt
from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.protocol import Answer, Cohort, Losses, Query, Status, Trial
from fedcohort.core.signals import TABLE_SIGNALS, OnServer, Signal, metrics_of, vectors_of
from fedcohort.hosts.flower.averaging import Average, aggregate, with_integers
from fedcohort.hosts.flower.evaluation import EvaluateFn, Evaluation, scalars
from fedcohort.hosts.flower.exchange import Outbox, exchange, with_ttl
from fedcohort.hosts.flower.logs import say
from fedcohort.hosts.flower.metrics import common_metrics
from fedcohort.hosts.flower.population import Population
from fedcohort.hosts.flower.pulse import Pulse
from fedcohort.hosts.flower.replies import (
    CheckedMessage,
    Checker,
    measures_of,
    move_update,
    weighted_average,
    with_metrics,
    with_weight,
)
from fedcohort.hosts.flower.training import Training, as_errors
from fedcohort.hosts.flower.wrapped_strategy import (
    InnerStrategyError,
    StrategyState,
    extrapolates,
    forget_round,
    has_accountant,
    keys,
    levels,
    min_clients,
    sample_size,
    strategy_copy,
)
from fedcohort.hosts.leases import Leases
from fedcohort.hosts.live import Aggregation, Host, Online, play
from fedcohort.hosts.measures import Measures, is_statistic
from fedcohort.hosts.orders import Order
from fedcohort.hosts.questions import try_out
from fedcohort.hosts.round import Late, Reply, Round, Shortage
from fedcohort.hosts.run_record import CHECKPOINT
from fedcohort.hosts.wire import plain, question
from fedcohort.journal.events import CORRECTED
from fedcohort.session.session import Session

if TYPE_CHECKING:
    from fedcohort.hosts.flower.strategy import CohortStrategy

log = logging.getLogger("flwr.fedcohort")
ShouldStop = Callable[[int, Result], bool]
_OK, _INVALID = Status.OK, Status.INVALID
_LOG_EVERY = 10.0  # seconds between two log messages about what the run waits for
_NAMED = 8  # how many clients a log message names


class FlowerHost(Host):
    """The clients behind a grid, the wrapped strategy and the global model.

    Attributes
    ----------
    session : Session or None
        None until enough clients are online.
    arrays : ArrayRecord
        The global model.
    policy : Policy
    """

    def __init__(
        self,
        settings: CohortStrategy,
        grid: Grid,
        *,
        num_rounds: int,
        timeout: float,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
        should_stop: ShouldStop | None = None,
    ) -> None:
        self.settings = settings
        self.inner = settings.strategy
        self.grid = grid
        self.num_rounds = num_rounds
        self.should_stop = should_stop
        self._asked_to_stop = 0  # the newest round after which should_stop was called
        self.config = train_config
        self._initial_config = dict(train_config)
        self._config_before = self._initial_config  # before the open round was configured
        self.levels = levels(self.inner)
        given = settings.policy
        # With an automatic deadline, messages live as long as without one, so that late answers show who is slow.
        deadline = self.deadline = given.fixed_deadline or timeout
        self.query_deadline = given.query_deadline or deadline
        self.policy = replace(
            given,
            size=self._size,
            deadline="auto" if given.deadline == "auto" else deadline,
            wait_for=given.wait_for or max(min_clients(self.inner), 1),
        )
        self.memory = StrategyState(self.inner)
        self.weight_key, _ = keys(self.inner)
        shadows = frozenset[Signal]().union(*(shadow.requires for shadow in settings.shadows.values()))
        # The table must have the facts that shadows need. Other signals are reported only if all clients can.
        self.shadow_facts = shadows & TABLE_SIGNALS
        self.optional_signals = frozenset(s for s in shadows if s.reported)
        self.population = Population(
            grid,
            settings.selector.requires | self.shadow_facts,
            patience=given.patience,
            labels=settings.labels,
            describe_every=settings.describe_every,
            classes=settings.classes,
            registered_only=settings.registered_only,
            clock=settings.clock,
            sleep=self._sleep,
            waits=self._waits,
        )
        self.outstanding = self.population.outstanding
        self.result = Result()
        self.training = Training(self)
        self.evaluation = Evaluation(self, evaluate_config, evaluate_fn)
        self.session: Session | None = None
        self.arrays = ArrayRecord()
        self.pulse = Pulse(settings.journal, num_rounds, settings.clock)
        self._open: tuple[Cohort, Outbox] | None = None  # the cohort that trains, and its messages
        # By ticket, how late replies are checked, and the model that was sent.
        self._late_checks: dict[int, tuple[Checker, ArrayRecord]] = {}
        self._average = Average()  # of the newest round
        self._saved: str | None = None  # the newest checkpoint
        self._logged = 0.0  # how long the run had waited at the last log message about it

    def _size(self, online: int) -> int | None:
        return self.settings.policy.size_for(online) or sample_size(self.levels, "train", online)

    def play(self, session: Session, leases: Leases | None) -> str | None:
        """Play the rounds that are left; return why the selector ended the run earlier, or None."""
        return play(self, session, self.policy, self.num_rounds, leases)

    def stop(self) -> str | None:
        """Ask ``should_stop`` once after each round; a continued run asks again about its last one."""
        done = self._running.round
        if self.should_stop is None or done == self._asked_to_stop:  # also when a round is tried again
            return None
        self._asked_to_stop = done
        return "should_stop said so" if self.should_stop(done, self.result) else None

    def tidy(self) -> None:
        """Delete what a run that was killed at its very end has left."""

    def _sleep(self, seconds: float) -> None:
        """Sleep, and check every few seconds who is still connected."""
        self.pulse.look(self.grid.get_node_ids)
        self.settings.sleep(seconds)

    def _waits(self, reason: str) -> None:
        self.pulse.update_online(self.population.online, self.session)
        self.pulse.waiting(reason)

    def _outbox(self) -> Outbox:
        return Outbox(self.grid, self.settings.clock, self._sleep)

    @property
    def _running(self) -> Session:
        assert self.session is not None
        return self.session

    # -- messages and replies -----------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the time on the clock of the settings."""
        return self.settings.clock()

    def online(self) -> Online:
        """Check who is online, and let new clients join."""
        session, population = self._running, self.population
        population.refresh()
        population.admit_new_clients(session)
        self.pulse.update_online(population.online, session)
        clients = population.available(session)
        return Online(clients, population.busy(session, clients))

    def absent(self) -> Sequence[str]:
        """Describe the clients that are connected but cannot take part, with the reasons."""
        return self.population.absent()

    def send(self, cohort: Cohort) -> Mapping[str, str]:
        """Send the strategy's own train messages."""
        self._config_before = dict(self.config)
        forget_round(self.inner, cohort.round + 1)  # it may be left from an interrupted run in this process
        outbox = self._outbox()
        self._open = (cohort, outbox)
        return self._send(cohort, self.arrays, self.config, outbox, self._running.seed)

    def _send(
        self, cohort: Cohort, arrays: ArrayRecord, config: ConfigRecord, outbox: Outbox, seed: int
    ) -> dict[str, str]:
        session = self._running
        required = metrics_of(session.requires)
        return self.training.send(
            cohort,
            self.population.online,
            arrays,
            config,
            outbox,
            seed=seed,
            required=required,
            ask=question(
                required | ((self.optional_signals | session.trial_signals) & self.population.supplied_signals()),
                receipt(session.journal, cohort.ticket, cohort.round),
            ),
            confirmations=self.population.confirmations(session.table.names_of(cohort.clients)),
        )

    def receive(self, until: float) -> list[Reply]:
        """Return checked replies of the cohort that trains, and late ones of earlier rounds."""
        if self._open is None:
            self._sleep_until(until)
            return self._late()
        cohort, outbox = self._open
        arrived = outbox.receive(until)
        replies = [
            Reply(cohort.ticket, reply.name, checked.status, checked.reason, reply.seconds, checked)
            for reply, checked in zip(arrived, self.training.checker.check_all(arrived), strict=True)
        ]
        return replies + self._late()

    def _late(self) -> list[Reply]:
        """Return late replies of earlier rounds that have arrived."""
        replies = []
        for overdue, reply in self.outstanding.collect():
            if overdue.ticket is None:
                continue
            status, reason, content = Status.OK if reply.error is None else Status.FAILED, "", None
            if overdue.ticket in self._late_checks:
                checker, sent = self._late_checks[overdue.ticket]
                (checked,) = checker.check_all([reply])
                status, reason, content = checked.status, checked.reason, (checked, sent)
            replies.append(Reply(overdue.ticket, reply.name, status, reason, reply.seconds, content))
        # Models are large, so they are kept only as long as a client may still send an update.
        owed = {overdue.ticket for overdue in self.outstanding.open}
        self._late_checks = {ticket: model for ticket, model in self._late_checks.items() if ticket in owed}
        return replies

    def _sleep_until(self, until: float) -> None:
        if (left := until - self.now()) > 0:
            self._sleep(left)

    # -- the average --------------------------------------------------------------------------------------------------

    def combine(self, round_: Round) -> Aggregation:
        """Filter the valid models and let the strategy average them; refuse those that it cannot average."""
        assert self._open is not None
        cohort, outbox = self._open
        self._open = None
        online, sent = self.population.online, self.arrays
        # A client that has not answered stays busy, and its late answer must find its round.
        self.outstanding.add(
            outbox, {name: online[name].node for name in outbox.unanswered() if name in online}, cohort.ticket
        )
        if self.policy.late == "count":
            self._late_checks[cohort.ticket] = (self.training.checker, sent)
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
        if average.blamed:
            blamed = average.blamed
            checked = [
                reply._replace(status=_INVALID, reason=blamed[reply.name]) if reply.name in blamed else reply
                for reply in checked
            ]
            measures = measures_of(sent, checked)
            kept = kept & measures.ok
            refused.update({name: why for name, why in average.blamed.items() if name in round_.cohort.names})
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
        stale = [move_update(reply, began, self.arrays, 1.0) for reply, began in (x.reply.content for x in round_.late)]
        # All together, because each weight is bounded by those of the others.
        bounded, corrections = self.training.bound([*answered, *stale], self.population.online, self.arrays)
        late = [
            (late_reply, with_weight(reply, self.weight_key, reply.weight * late_reply.times * late_reply.discount))
            for late_reply, reply in zip(round_.late, bounded[len(answered) :], strict=True)
            if reply.status is _OK
        ]
        return bounded[: len(answered)], late, corrections

    def _keep_average(self, average: Average, server_round: int) -> None:
        if average.metrics is not None:
            log.info("\t└──> Aggregated MetricRecord: %s", average.metrics)
            self.result.train_metrics_clientapp[server_round] = average.metrics
        self._average = average

    def _apply_filter(self, checked: Sequence[CheckedMessage], measures: Measures) -> BoolArray:
        """Return whether the filter keeps each of the replies."""
        validation = self.settings.validation
        if validation is None:
            kept = measures.apply_filter(self.settings.filter)
        else:
            logits, labels = validation.logits, plain(validation.labels)
            kept = measures.apply_filter(self.settings.filter, lambda row: plain(logits(checked[row].arrays)), labels)
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
        cohort = round_.cohort
        chosen = [reply for reply, keep in zip(checked, kept.tolist(), strict=True) if keep]
        if self.policy.private:
            # An accountant raises an error for unequal weights. Found here, they fail one client and not the round.
            odd = _odd_weights(chosen, self.weight_key) if has_accountant(self.inner) else {}
            if short := round_.shortfall(len(chosen) - len(odd)):
                return Average(blamed=odd, error=short)
        # After the bounds, which limit what a client claims; the selector's weights are the server's own.
        if cohort.weights is not None:
            share = dict(zip(cohort.names, cohort.weights.tolist(), strict=True))
            chosen = [with_weight(reply, self.weight_key, reply.weight * share[reply.name]) for reply in chosen]
        return self._average_models(
            cohort.round + 1, [*chosen, *late], as_errors(checked, self.training.sent), corrections, round_.shortfall
        )

    def _average_models(
        self,
        server_round: int,
        chosen: list[CheckedMessage],
        errors: Sequence[Message],
        corrections: dict[str, list[str]],
        shortfall: Callable[[int], str],
    ) -> Average:
        """Let the strategy average models with their final weights; ``shortfall`` says whether they are too few."""
        metrics, uneven = common_metrics({reply.name: reply.metrics for reply in chosen}, self.weight_key)
        if uneven:
            chosen = [with_metrics(reply, metrics[reply.name]) for reply in chosen]
            for name, texts in uneven.items():
                corrections.setdefault(name, []).extend(texts)
        if short := shortfall(len(chosen)):
            return Average(error=short)
        # FedAvg divides by the sum of weights.
        if not any(reply.weight > 0 for reply in chosen):
            return Average(error="too few valid models")
        average = aggregate(self.inner, server_round, chosen, errors)
        # Checked again without the models that could not be averaged.
        if len(chosen) - len(average.blamed) < self.policy.fewest:
            return Average(blamed=average.blamed, error=average.error)
        arrays = average.arrays
        if arrays is None:
            return average
        # Under differential privacy, only what the strategy has added noise to may be released.
        if extrapolates(self.inner) and not self.policy.private:
            used = [reply for reply in chosen if reply.name not in average.blamed]
            arrays = ArrayRecord({**arrays, **weighted_average(used, is_statistic)})
        return replace(average, arrays=with_integers(arrays, self.arrays))

    def _columns(self, measures: Measures) -> Mapping[Signal, FloatArray]:
        """Return the report's numbers: required signals, duration, and everything that all valid replies contain."""
        session = self._running
        signals = metrics_of(session.requires) | measures.common_signals()
        signals |= vectors_of(self.optional_signals, "update").keys()  # no client has to help with these
        on_server = {signal for signal in signals if isinstance(signal.how, OnServer)}
        columns = {signal: measures.column(signal) for signal in sorted(signals - on_server)}
        for signal in on_server:  # the received model's loss
            assert self.settings.validation is not None
            columns[signal] = np.where(measures.ok, self.settings.validation.loss(self.arrays), np.nan)
        return columns

    def store(self, round_: Round, aggregation: Aggregation) -> Any:
        """Record the strategy's metrics, and save the model and the strategy's memory in a checkpoint."""
        self._record_metrics(round_.cohort.round)
        return self._save_model(round_.cohort.round + 1)

    def _record_metrics(self, round_: int) -> None:
        """Record the strategy's metrics of the newest average."""
        numbers = {f"train/{key}": value for key, value in scalars(self._average.metrics).items()}
        if numbers:
            self._running.record(round_, numbers)

    def _save_model(self, rounds: int) -> dict[str, Any] | None:
        """Save the newest average as the model after ``rounds`` rounds; return the state that names it."""
        store, arrays = self.settings.checkpoints, self._average.arrays
        if store is None:
            return None
        assert arrays is not None
        # Only what the strategy wrote into the config; the app may change the rest in the next run.
        written = {key: value for key, value in self.config.items() if self._initial_config.get(key) != value}
        self._saved = store.save(rounds, arrays, self.memory, written)
        return {CHECKPOINT: self._saved}

    def evaluate(self, round_: int, arrays: ArrayRecord) -> None:
        """Evaluate the model after a round on clients and at the server, and record the numbers."""
        session = self._running
        numbers, corrections = self.evaluation.on_clients(round_ + 1, arrays, self.population.online, self._outbox())
        log_corrections(round_, corrections)
        if corrections:
            session.note(CORRECTED, {"round": round_, "corrections": corrections})
        numbers.update(self.evaluation.at_server(round_ + 1, arrays))
        if numbers:
            session.record(round_, numbers)
            session.commit()
            say("evaluated", "round %d evaluated", round_, round=round_, metrics=numbers)

    # -- questions ----------------------------------------------------------------------------------------------------

    def answer(self, query: Query, available: IntArray) -> Answer:
        """Ask clients for losses, or try cohorts out."""
        session, losses = self._running, partial(self.population.losses, deadline=self.query_deadline)
        match query:
            case Losses(clients=clients, signals=signals):
                return Answer(query, losses(self.arrays, session.table.names_of(clients), signals))
            case Trial():
                if self.policy.private:
                    raise InnerStrategyError(
                        f"The selector {session.selector.name!r} tries out cohorts, and their models would be "
                        "sent to clients without the noise of differential privacy.",
                        hint="use a selector without trials; FedCor has none with samples='round'",
                    )
                return try_out(session, query, available, model=self.arrays, losses=losses, train=self._train_trial)

    def _train_trial(self, cohort: Sequence[str], seed: int) -> ArrayRecord | None:
        """Let a trial cohort train; return the average of its models, or None if it has none."""
        online, arrays, deadline = self.population.online, self.arrays, self.deadline
        cards = {name: online[name] for name in cohort if name in online}
        # Copies, because a trial must not change the strategy: no moments, no privacy budget.
        strategy, config = strategy_copy(self.inner), ConfigRecord(dict(self.config))
        server_round = self._running.round + 1
        messages = self.training.messages(
            strategy,
            server_round,
            cards,
            arrays,
            config,
            seed=seed,
            work={},
            ask=question(()),
            confirmations=self.population.confirmations(list(cards)),
        )
        with_ttl(messages.values(), 2 * deadline)
        replies = exchange(self._outbox(), messages, deadline, self.outstanding)
        valid = self.training.checks(arrays, ()).check_all(replies[name] for name in cards if name in replies)
        checked, _ = self.training.bound(valid, online, arrays)
        models = [reply for reply in checked if reply.status is _OK]
        if not models:
            log.warning("a trial of %s returned no model", ", ".join(cards))
            return None
        return weighted_average(models)

    # -- the log ------------------------------------------------------------------------------------------------------

    def on_round(self, number: int, resumed: bool) -> None:
        """Log the beginning of a round."""
        text = "[ROUND %d, %d of %d] again: it was interrupted" if resumed else "[ROUND %d, %d of %d]"
        log.info(text, number, number + 1, self.num_rounds)

    def on_waiting(self, shortage: Shortage, seconds: float) -> None:
        """Write what the run waits for next to the journal, and every few seconds to the log."""
        absent = self.absent()
        self.pulse.waiting(shortage.describe(absent=absent))
        if seconds - self._logged >= _LOG_EVERY:
            self._logged = seconds
            log.info("waiting: %s", shortage.describe(seconds, absent))

    def on_ready(self) -> None:
        """Log that the run continues."""
        self._logged = 0.0
        self.pulse.running()

    def on_rules(self, order: Order) -> None:
        """Log that an operator has changed the rules."""
        session = self._running
        self.population.refresh_descriptions()  # the new rules may use the clients' attributes
        say(
            "rules", "the operator's rules apply from round %d on: %s", session.round, session.rules,
            round=session.round, order=order.id, rules={} if session.rules is None else session.rules.to_dict(),
        )  # fmt: skip

    def on_selector(self) -> None:
        """Admit only clients that supply what the new selector reads, and log it."""
        session = self._running
        self.population.require(session.selector.requires)
        name = session.selector.name
        say("selector", "from round %d on, %s chooses", session.round, name, round=session.round, selector=name)

    def on_chosen(self, cohort: Cohort, available: int) -> None:
        """Log who was chosen."""
        known = self._running.table.n
        shown = ", ".join(cohort.names[:_NAMED]) + (", ..." if cohort.size > _NAMED else "")
        say(
            "selected", "selected %s (%d of %d available, %d known)", shown, cohort.size, available, known,
            round=cohort.round, ticket=cohort.ticket, clients=list(cohort.names), available=available, known=known,
        )  # fmt: skip

    def on_closed(self, round_: Round, aggregation: Aggregation) -> None:
        """Replace the global model, delete old checkpoints, log, and evaluate."""
        cohort = round_.cohort
        self._take_over_model()
        _log_replies(round_, aggregation)
        models = int(aggregation.kept.sum())
        say(
            "round", "round %d: models in the average: %d", cohort.round, models,
            round=cohort.round, ticket=cohort.ticket, models=models, without=len(round_.reasons),
            metrics=scalars(self._average.metrics),
        )  # fmt: skip
        self.evaluate(cohort.round, self.arrays)

    def _take_over_model(self, needed: Container[str] = ()) -> None:
        """Make the newest average the global model, and delete old checkpoints except those ``needed``."""
        assert self._average.arrays is not None
        self.result.arrays = self.arrays = self._average.arrays
        if self.settings.checkpoints is not None and self._saved is not None:
            self.settings.checkpoints.prune(self._saved, needed)

    def on_abandoned(self, round_: Round, aggregation: Aggregation) -> None:
        """Make the strategy forget the round, which will be configured again for the next try."""
        cohort = round_.cohort
        self.config = ConfigRecord(self._config_before)
        forget_round(self.inner, cohort.round + 1)
        _log_replies(round_, aggregation)
        say(
            "round-failed", "round %d leaves the global model as it was and is tried again: %s", cohort.round,
            aggregation.error,
            level=logging.WARNING, round=cohort.round, ticket=cohort.ticket, reason=aggregation.error,
        )  # fmt: skip

    def on_unfinished(self, cohort: Cohort, why: str) -> None:
        """Log that a cohort is abandoned."""
        log.warning("a new cohort is chosen for round %d: %s", cohort.round, why)

    def on_late(self, reply: Reply, round_: int) -> None:
        """Log a late answer."""
        say(
            "late", "client %r answered round %d after %.1f s", reply.client, round_, reply.seconds,
            round=round_, ticket=reply.ticket, client=reply.client, seconds=reply.seconds,
        )  # fmt: skip


def _log_replies(round_: Round, aggregation: Aggregation) -> None:
    """Log which models are missing and which were corrected."""
    log_failures(round_.cohort, round_.reasons)
    log_corrections(round_.cohort.round, aggregation.corrections)


def log_failures(cohort: Cohort, reasons: Mapping[str, str]) -> None:
    """Log which clients of a cohort returned no valid model, and why."""
    for name, reason in reasons.items():
        say(
            "client-failed", "\t> %s: %s", name, reason,
            round=cohort.round, ticket=cohort.ticket, client=name, reason=reason,
        )  # fmt: skip


def log_corrections(round_: int, corrections: Mapping[str, Sequence[str]]) -> None:
    """Log the changes made to replies."""
    for name, texts in corrections.items():
        for text in texts:
            say("corrected", "\t> %s: %s", name, text, level=logging.WARNING, round=round_, client=name, reason=text)


def _odd_weights(replies: Sequence[CheckedMessage], key: str) -> dict[str, str]:
    """Return the clients whose weight differs from the majority's, which a privacy accountant does not allow."""
    weights = {reply.name: reply.weight for reply in replies}
    usual, count = Counter(weights.values()).most_common(1)[0] if weights else (0.0, 0)
    if 2 * count <= len(weights):
        return {}
    why = f"its weight {key!r} is {{:g}}, that of the others {usual:g}; a privacy accountant demands equal weights"
    return {name: why.format(weight) for name, weight in weights.items() if weight != usual}
