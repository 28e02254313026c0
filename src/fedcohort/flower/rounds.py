"""One call of ``CohortStrategy.start``: the rounds of a live federation."""

from __future__ import annotations

import copy
import io
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedcohort import rng as streams
from fedcohort.arrays import BoolArray, IntArray
from fedcohort.errors import InputError, SignalError
from fedcohort.filters import KeepAll, Replies
from fedcohort.flower.exchange import Outbox, Reply, exchange, with_ttl
from fedcohort.flower.failed import EVENT, event
from fedcohort.flower.inner import GridView, StrategyState, addressed, grows, keys, levels, needed, offered, wanted
from fedcohort.flower.population import FederationTimeoutError, Population
from fedcohort.flower.replies import (
    MEASURED,
    Checked,
    Checker,
    Measures,
    agreeing,
    alike,
    averaged,
    bias_of,
    scale_weight,
    weight_of,
)
from fedcohort.flower.roster import Card
from fedcohort.flower.wire import RECORD, SEED, WORK, ask_record
from fedcohort.journal import is_blank
from fedcohort.protocol import Answer, Cohort, Losses, Query, RoundReport, RoundRequest, Status, Trial
from fedcohort.session import Session
from fedcohort.signals import METRIC_SIGNALS, REPORT_SIGNALS, TABLE_SIGNALS, Signal
from fedcohort.vectors import needs_output_bias

if TYPE_CHECKING:
    from fedcohort.flower.strategy import CohortStrategy, EvaluateFn

log = logging.getLogger("flwr.fedcohort")
_OK, _MISSING = Status.OK, Status.MISSING
_EVALUATION = "evaluation"
_TRIAL = "trial"
_AFTERLIFE = 60.0  # seconds, at least, that a train message outlives its deadline, so that a late answer can arrive


@dataclass(frozen=True)
class _Owed:
    """Train messages of a closed round that are still unanswered."""

    ticket: int
    round: int
    outbox: Outbox
    nodes: Mapping[str, int]


class Rounds:
    """One call of ``start``: everything that changes while it lasts."""

    def __init__(
        self,
        settings: CohortStrategy,
        grid: Grid,
        *,
        timeout: float,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
    ) -> None:
        self.settings = settings
        self.inner = settings.strategy
        self.grid = grid
        self.deadline = settings.deadline or timeout
        self.query_deadline = settings.query_deadline or self.deadline
        self.train_config = train_config
        self.evaluate_config = evaluate_config
        self.evaluate_fn = evaluate_fn
        self.levels = levels(self.inner)
        self.memory = StrategyState(self.inner)
        self.weight_key, self.config_key = keys(self.inner)
        shadows = frozenset[Signal]().union(*(shadow.requires for shadow in settings.shadows.values()))
        # A shadow must be able to read the table; what else it would like to know is reported where clients can.
        required = settings.selector.requires | (shadows & TABLE_SIGNALS)
        self.wished = shadows & REPORT_SIGNALS
        self.population = Population(
            grid,
            required,
            patience=settings.patience,
            unseal=settings.unseal,
            clock=settings.clock,
            sleep=settings.sleep,
        )
        self.owed: list[_Owed] = []
        self.session: Session | None = None
        self.result = Result()

    def close(self) -> None:
        """Close the journal."""
        if self.session is not None:
            self.session.close()

    # -- the whole run ----------------------------------------------------------------------------------------------

    def play(self, initial_arrays: ArrayRecord, num_rounds: int) -> Result:
        """Run until ``num_rounds`` rounds are on record."""
        begun = self.settings.clock()
        self._check_model(initial_arrays)
        self.population.assemble(self.settings.wait_for or needed(self.inner))
        session = self.session = self._open()
        arrays = self._resumed(session, initial_arrays)
        self.result.arrays = arrays
        if session.round == 0 and self.evaluate_fn is not None:
            self._evaluated_here(0, arrays)
        while True:
            pending = session.pending
            if pending:
                cohort = pending[0]
                log.info("[ROUND %d/%d] trained again: it was not finished", cohort.round + 1, num_rounds)
            elif session.round < num_rounds:
                log.info("[ROUND %d/%d]", session.round + 1, num_rounds)
                cohort = self._choose(session, arrays)
            else:
                break
            if cohort.size:
                arrays = self._round(session, cohort, arrays)
                self.result.arrays = arrays
            if cohort.stop is not None:
                log.info("the selector declares the run finished: %s", cohort.stop)
                break
        session.commit()
        log.info("Strategy execution finished in %.2fs", self.settings.clock() - begun)
        for line in io.StringIO(str(self.result)):
            log.info("\t%s", line.rstrip("\n"))
        return self.result

    def _check_model(self, arrays: ArrayRecord) -> None:
        """Refuse a model that cannot supply what the selector requires, before anybody trains."""
        try:
            if needs_output_bias(self.settings.selector.requires | self.wished):
                bias_of(arrays)
        except SignalError:
            if needs_output_bias(self.settings.selector.requires):
                raise
            self.wished = frozenset(s for s in self.wished if not needs_output_bias({s}))

    def _open(self) -> Session:
        settings = self.settings
        if settings.journal is not None and not is_blank(settings.journal):
            session = Session.open(settings.journal, settings.selector, shadows=settings.shadows, commit="manual")
            if session.seed != settings.seed:
                session.close()
                raise InputError(
                    f"The journal {settings.journal} was written with seed {session.seed}; it cannot be continued with "
                    f"seed {settings.seed}.",
                    hint="pass the old seed, or start a new journal",
                )
            return session
        if settings.journal is not None:
            settings.journal.parent.mkdir(parents=True, exist_ok=True)
        return Session(
            settings.selector,
            self.population.table(list(self.population.online.values())),
            seed=settings.seed,
            signals=self.population.supplied(),
            journal=settings.journal,
            shadows=settings.shadows,
            # A round is made durable twice, when it is chosen and when it is closed; the rest can wait for these.
            commit="manual",
        )

    def _resumed(self, session: Session, initial_arrays: ArrayRecord) -> ArrayRecord:
        """Return the model to go on with: the journal's checkpoint, or ``initial_arrays`` before the first round."""
        store = self.settings.checkpoints
        if store is None:
            return initial_arrays
        first = store.name(0)
        if session.host_state is not None:
            name = str(session.host_state["checkpoint"])
        elif session.round and store.exists(first):
            name = first
        elif session.round:
            raise InputError(
                f"The journal {self.settings.journal} has rounds, but {store.folder} has no checkpoint to go on from.",
                hint="was 'checkpoints' another folder before?",
            )
        else:
            store.save(0, initial_arrays, self.memory)
            return initial_arrays
        arrays = store.load(name, self.memory)
        log.info("continuing after round %d with %s", session.round - len(session.pending), store.folder / name)
        return arrays

    # -- choosing ---------------------------------------------------------------------------------------------------

    def _busy(self, card: Card) -> bool:
        """Whether a client still owes the answer to an earlier round; one that restarted since owes nothing."""
        return any(card.name in o.outbox.owing() and o.nodes[card.name] == card.node for o in self.owed)

    def _available(self, session: Session) -> list[str]:
        """Return who can take part, waiting for the first client if nobody can."""
        end = self.settings.clock() + self.settings.patience
        while True:
            self.population.refresh()
            self._collect_late(session)
            self.population.welcome(session)
            names = self.population.available(session, self._busy if self.owed else None)
            if self.settings.clock() > end:
                # Better to ask somebody who is slow than nobody.
                names = names or self.population.available(session, None)
            if names:
                return names
            if self.settings.clock() > end:
                raise FederationTimeoutError(
                    f"Nobody has been available for {self.settings.patience:g} s in round {session.round + 1}.",
                    hint="start SuperNodes and run the app again: it continues with this round",
                )
            self.settings.sleep(0.25)

    def _collect_late(self, session: Session) -> None:
        """Put answers that came after their round was closed on record, and see who is free again."""
        for owed in self.owed:
            for reply in owed.outbox.pull():
                if reply.error is None:
                    session.tell(RoundReport(owed.ticket, [reply.name]))
                    note = {reply.name: f"answered after {reply.seconds:.1f} s, when the round was closed"}
                    session.note(EVENT, event(owed.round, note))
                    log.info("client %r answered round %d after %.1f s", reply.name, owed.round + 1, reply.seconds)
        self.owed = [owed for owed in self.owed if owed.outbox.waiting]

    def _choose(self, session: Session, arrays: ArrayRecord) -> Cohort:
        names = self._available(session)
        size = self.settings.cohort_size or wanted(self.levels, "train", len(self.population.online))
        if size is not None:
            size = min(size + self.settings.spares, session.table.n)
        request = RoundRequest(size, self.population.indices(session.table, names))
        query = session.query(request)
        answer = None if query is None else self._answer(session, query, arrays, names)
        cohort = session.ask(request, answer)
        session.commit()
        log.info("selected %d of %d available clients (%d known)", cohort.size, len(names), session.table.n)
        return cohort

    def _answer(self, session: Session, query: Query, arrays: ArrayRecord, available: Sequence[str]) -> Answer:
        match query:
            case Losses(clients=clients, signals=signals):
                names = [session.table.name(int(c)) for c in clients]
                return Answer(query, self.population.losses(arrays, names, signals, self.query_deadline))
            case Trial(cohorts=cohorts):
                return self._try_out(session, query, cohorts, arrays, available)

    def _try_out(
        self, session: Session, query: Trial, cohorts: Sequence[Any], arrays: ArrayRecord, available: Sequence[str]
    ) -> Answer:
        """Train each trial cohort on a copy of the strategy, average, and ask everybody for the change of loss."""
        ask = frozenset({query.measured})
        everyone = session.table.indices(list(available))
        before = self.population.losses(arrays, available, ask, self.query_deadline)[query.measured]
        changes = np.full((len(cohorts), session.table.n), np.nan)
        for row, clients in enumerate(cohorts):
            online = self.population.online
            names = [n for n in (session.table.name(int(c)) for c in clients) if n in online]
            # A copy, because a trial must leave no trace in the strategy: no moments, no privacy spent.
            stand_in = copy.deepcopy(self.inner)
            cards = {name: online[name] for name in names}
            # Not the batches of the round itself, which may train the same clients.
            seed = int(streams.stream(session.seed, _TRIAL, session.round, row).integers(1 << 62))
            messages = self._train_messages(stand_in, session.round + 1, cards, arrays, seed=seed, work={}, report=())
            with_ttl(messages.values(), 2 * self.deadline)
            replies = exchange(self.grid, messages, self.deadline, clock=self.settings.clock, sleep=self.settings.sleep)
            checked = agreeing(self._checker(arrays, ()).all(replies[name] for name in names if name in replies))
            models = [reply for reply in checked if reply.status is _OK]
            if not models:
                log.warning("a trial of %s brought no model", ", ".join(names))
                continue
            tried = averaged(models, self.weight_key)
            after = self.population.losses(tried, available, ask, self.query_deadline)[query.measured]
            changes[row, everyone] = after - before
        return Answer(query, {query.answered_with: changes})

    # -- one round --------------------------------------------------------------------------------------------------

    def _checker(self, arrays: ArrayRecord, required: Iterable[Signal]) -> Checker:
        return Checker(arrays, self.weight_key, required, same_shapes=not grows(self.inner))

    def _train_messages(
        self,
        strategy: Strategy,
        server_round: int,
        cards: Mapping[str, Card],
        arrays: ArrayRecord,
        *,
        seed: int,
        work: Mapping[str, float],
        report: Iterable[Signal],
    ) -> dict[str, Message]:
        """Return the strategy's own train messages for ``cards``, with what fedcohort adds for each client."""
        nodes = [card.node for card in cards.values()]
        if not nodes:
            return {}
        with offered(strategy, len(nodes)):
            view = GridView(self.grid, nodes)
            # Strategies write into the config; a copy keeps this round's number out of messages still on their way.
            config = ConfigRecord(dict(self.train_config))
            written = strategy.configure_train(server_round, arrays, config, view)
            messages = addressed(strategy, written, nodes)
        ask = ask_record(report)
        # Equal contents stay one object: Flower then hashes and uploads them once.
        variants: dict[tuple[int, float | None, bool], tuple[RecordDict, RecordDict]] = {}
        found: dict[str, Message] = {}
        for name, card in cards.items():
            message = found[name] = messages[card.node]
            original = message.content
            factor = work.get(name)
            variant = (id(original), factor, card.answers)
            known = variants.get(variant)
            if known is None:
                content = RecordDict(dict(original))
                theirs = content.config_records.get(self.config_key, ConfigRecord())
                ours = {SEED: seed} if factor is None else {SEED: seed, WORK: float(factor)}
                content[self.config_key] = ConfigRecord({**theirs, **ours})
                if card.answers:
                    content[RECORD] = ask
                # The original is held, or its id could be given out again.
                known = variants[variant] = (original, content)
            message.content = known[1]
        return found

    def _round(self, session: Session, cohort: Cohort, arrays: ArrayRecord) -> ArrayRecord:
        """Train a cohort, average, put the round on record, evaluate; return the next model."""
        server_round = cohort.round + 1
        checked, reasons = self._train(session, cohort, arrays)
        measures = Measures(arrays, checked)
        kept = self._kept(checked, measures)
        agg_arrays, metrics = self._aggregate(server_round, cohort, checked, kept)
        if agg_arrays is None:
            log.info("round %d leaves the global model as it was", server_round)
            kept = np.zeros(len(checked), np.bool_)
        else:
            arrays = agg_arrays
        if metrics is not None:
            log.info("\t└──> Aggregated MetricRecord: %s", metrics)
            self.result.train_metrics_clientapp[server_round] = metrics
        if reasons:
            for name, reason in reasons.items():
                log.info("\t> %s: %s", name, reason)
            session.note(EVENT, event(cohort.round, reasons))
        report = RoundReport(
            ticket=cohort.ticket,
            clients=self._indices(cohort, checked),
            status=None if measures.all_ok else [int(reply.status) for reply in checked],
            metrics=self._columns(session, measures, checked),
            kept=kept,
        )
        store = self.settings.checkpoints
        if store is None:
            session.tell(report)
        else:
            name = store.save(server_round, arrays, self.memory)
            session.tell(report, host={"checkpoint": name})
            session.commit()
            store.prune(name)
        numbers = {f"train/{key}": value for key, value in _scalars(metrics).items()}
        numbers.update(self._evaluated_there(server_round, arrays))
        numbers.update(self._evaluated_here(server_round, arrays))
        if numbers:
            session.record(cohort.round, numbers)
        return arrays

    def _train(self, session: Session, cohort: Cohort, arrays: ArrayRecord) -> tuple[list[Checked], dict[str, str]]:
        """Return the checked replies in cohort order, and why clients without a sound one have none."""
        online = self.population.online
        cards = {name: card for name in cohort.names if (card := online.get(name)) is not None}
        reasons: dict[str, str] = {}
        if len(cards) < len(cohort.names):
            reasons.update({name: "not online" for name in cohort.names if name not in online})
        work = {} if cohort.work is None else dict(zip(cohort.names, cohort.work.tolist(), strict=True))
        required = session.requires & METRIC_SIGNALS
        asked = required | (self.wished & self.population.supplied())
        messages = self._train_messages(
            self.inner, cohort.round + 1, cards, arrays, seed=session.seed, work=work, report=asked
        )
        with_ttl(messages.values(), self.deadline + max(self.deadline, _AFTERLIFE))
        outbox = Outbox(self.grid, self.settings.clock, self.settings.sleep)
        for name in outbox.send(messages):
            reasons[name] = "the SuperLink did not take the message"
        checker = self._checker(arrays, required)
        checked: dict[str, Checked] = {}
        enough = len(cohort.names)
        if self.settings.spares:
            enough = max(cohort.size - self.settings.spares, 1)

        seen = sound = 0

        def done(replies: Sequence[Reply]) -> bool:
            nonlocal seen, sound
            for result in checker.all(replies[seen:]):
                checked[result.name] = result
                sound += result.status is _OK
            seen = len(replies)
            return sound >= enough

        begun = self.settings.clock()
        done(outbox.gather(self.deadline, done))
        if outbox.waiting:
            closed = self.settings.clock() - begun >= self.deadline
            why = f"no answer within {self.deadline:g} s" if closed else "the round was closed with enough others"
            reasons.update(dict.fromkeys(outbox.owing(), why))
            nodes = {name: cards[name].node for name in outbox.owing()}
            self.owed.append(_Owed(cohort.ticket, cohort.round, outbox, nodes))
        # What was lost on the way counts as never answered; the session knows those by their absence.
        if sound < len(checked):
            reasons.update({c.name: c.reason for c in checked.values() if c.status is _MISSING})
        ordered = agreeing([c for c in map(checked.get, cohort.names) if c is not None and c.status is not _MISSING])
        failed = {reply.name: reply.reason for reply in ordered if reply.status is not _OK}
        reasons.update(failed)
        log.info("%d sound models, %d clients without one", len(ordered) - len(failed), len(reasons))
        return ordered, reasons

    @staticmethod
    def _indices(cohort: Cohort, checked: Sequence[Checked]) -> IntArray:
        """(r,) the dense indices of replies, which are in cohort order."""
        if len(checked) == cohort.size:
            return cohort.clients
        answered = {reply.name for reply in checked}
        return cohort.clients[[name in answered for name in cohort.names]]

    def _kept(self, checked: Sequence[Checked], measures: Measures) -> BoolArray:
        """Return which of the replies the filter keeps."""
        ok = measures.rows
        if not len(ok) or type(self.settings.filter) is KeepAll:
            return measures.ok
        validation = self.settings.validation
        verdict = self.settings.filter.judge(
            Replies(
                np.ones(len(ok), np.bool_),
                updates=lambda: measures.updates[ok],
                logits=None
                if validation is None
                else lambda: np.stack([np.asarray(validation.logits(checked[i].arrays)) for i in ok.tolist()]),
                labels=None if validation is None else validation.labels,
            )
        )
        if not verdict.kept.all():
            log.info("the filter keeps %d of %d models", int(verdict.kept.sum()), len(ok))
        if measures.all_ok:
            return verdict.kept
        kept = np.zeros(len(checked), np.bool_)
        kept[ok] = verdict.kept
        return kept

    def _aggregate(
        self, server_round: int, cohort: Cohort, checked: Sequence[Checked], kept: Any
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        chosen = [reply for reply, keep in zip(checked, kept.tolist(), strict=True) if keep]
        if cohort.weights is not None:
            share = dict(zip(cohort.names, cohort.weights.tolist(), strict=True))
            for reply in chosen:
                scale_weight(reply, self.weight_key, share[reply.name])
        if len(chosen) < self.settings.min_replies or not any(weight_of(r, self.weight_key) > 0 for r in chosen):
            chosen = []
        messages = [reply.message for reply in chosen if reply.message is not None]
        return self.inner.aggregate_train(server_round, messages)

    def _columns(self, session: Session, measures: Measures, checked: Sequence[Checked]) -> dict[Signal, Any]:
        """Return the report's numbers: what is required, the duration, and what every sound reply brought besides."""
        brought = [reply.values for reply in checked if reply.status is _OK]
        extra = frozenset(brought[0] if brought else ()).intersection(*brought[1:])
        signals = (session.requires & METRIC_SIGNALS) | extra | (self.wished & MEASURED)
        return {signal: measures.column(signal) for signal in sorted(signals)}

    # -- evaluation -------------------------------------------------------------------------------------------------

    def _evaluated_here(self, server_round: int, arrays: ArrayRecord) -> dict[str, float]:
        if self.evaluate_fn is None:
            return {}
        metrics = self.evaluate_fn(server_round, arrays)
        log.info("\t└──> Global evaluation: %s", metrics)
        if metrics is not None:
            self.result.evaluate_metrics_serverapp[server_round] = metrics
        return _scalars(metrics)

    def _evaluated_there(self, server_round: int, arrays: ArrayRecord) -> dict[str, float]:
        """Evaluate on clients, drawn by the seed among those that are free."""
        if wanted(self.levels, "evaluate", 1) == 0:
            return {}
        online = {name: card for name, card in self.population.online.items() if not self._busy(card)}
        if not online:
            return {}
        count = wanted(self.levels, "evaluate", len(online))
        names = list(online)
        if count is not None and count < len(names):
            draw = streams.stream(self.settings.seed, _EVALUATION, server_round - 1)
            names = [names[int(i)] for i in np.sort(draw.choice(len(names), count, replace=False))]
        nodes = [online[name].node for name in names]
        with offered(self.inner, len(nodes)):
            view = GridView(self.grid, nodes)
            config = ConfigRecord(dict(self.evaluate_config))
            written = self.inner.configure_evaluate(server_round, arrays, config, view)
            by_node = {message.metadata.dst_node_id: message for message in written}
        messages = {name: by_node[online[name].node] for name in names if online[name].node in by_node}
        with_ttl(messages.values(), 2 * self.deadline)
        replies = exchange(self.grid, messages, self.deadline, clock=self.settings.clock, sleep=self.settings.sleep)
        sound = []
        for name in messages:
            reply = replies.get(name)
            if reply is None or reply.error is not None:
                log.info("\t> %s did not evaluate: %s", name, "no answer" if reply is None else reply.error)
            else:
                sound.append(reply.message)
        metrics = self.inner.aggregate_evaluate(server_round, alike(sound, self.weight_key))
        if metrics is not None:
            log.info("\t└──> Aggregated evaluation: %s", metrics)
            self.result.evaluate_metrics_clientapp[server_round] = metrics
        return {f"evaluate/{key}": value for key, value in _scalars(metrics).items()}


def _scalars(metrics: MetricRecord | None) -> dict[str, float]:
    return {k: float(v) for k, v in (metrics or {}).items() if isinstance(v, (int, float)) and math.isfinite(v)}
