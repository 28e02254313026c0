"""One call of ``CohortStrategy.start``: the rounds of a live federation."""

from __future__ import annotations

import io
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedcohort.audit.choices import receipt
from fedcohort.core import rng as streams
from fedcohort.core.arrays import BoolArray, IntArray
from fedcohort.core.errors import FedcohortError, InputError, ParameterError, SignalError
from fedcohort.core.protocol import Answer, Cohort, Losses, Query, RoundReport, RoundRequest, Selector, Status, Trial
from fedcohort.core.signals import METRIC_SIGNALS, REPORT_SIGNALS, TABLE_SIGNALS, Signal
from fedcohort.core.vectors import needs_output_bias
from fedcohort.hosts import orders
from fedcohort.hosts.flower import notes
from fedcohort.hosts.flower.averaging import Average, aggregated, with_integers
from fedcohort.hosts.flower.evaluation import Evaluation, evaluated, scalars
from fedcohort.hosts.flower.exchange import Outbox, exchange, listed, with_ttl
from fedcohort.hosts.flower.logs import say
from fedcohort.hosts.flower.metrics import evened
from fedcohort.hosts.flower.population import Available, FederationTimeoutError, Population, facts_in, rules_in
from fedcohort.hosts.flower.pulse import Pulse
from fedcohort.hosts.flower.replies import (
    MEASURED,
    Checked,
    Measures,
    averaged,
    bias_of,
    sample_counts,
    scale_weight,
    weight_of,
    with_metrics,
)
from fedcohort.hosts.flower.roster import natural
from fedcohort.hosts.flower.training import Trained, Training
from fedcohort.hosts.flower.wire import plain
from fedcohort.hosts.flower.wrapped_strategy import (
    InnerStrategyError,
    StrategyState,
    accounted,
    forget_round,
    keys,
    levels,
    needed,
    sampled,
    stand_in,
    wanted,
)
from fedcohort.journal import is_blank
from fedcohort.journal.events import ABANDONED, CORRECTED, FAILURES
from fedcohort.session.resume import participations
from fedcohort.session.rules import Rules
from fedcohort.session.session import Session
from fedcohort.training.filters import KeepAll, Replies, judged

if TYPE_CHECKING:
    from fedcohort.hosts.flower.strategy import CohortStrategy, EvaluateFn

log = logging.getLogger("flwr.fedcohort")
_OK, _INVALID = Status.OK, Status.INVALID
_TRIAL = "trial"
_TRY = "try"  # the event of a pending cohort that is trained again
_TELL_EVERY = 10.0  # seconds between two lines of the log that say what is waited for
_NAMED = 8  # clients named in a line of the log


class RoundError(FedcohortError, RuntimeError):
    """A round brought no model, however often it was tried."""


class Rounds:
    """One call of ``start``: everything that changes while it lasts."""

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
    ) -> None:
        self.settings = settings
        self.inner = settings.strategy
        self.grid = grid
        self.num_rounds = num_rounds
        self.deadline = settings.deadline or timeout
        self.query_deadline = settings.query_deadline or self.deadline
        self.config = train_config
        self._given = dict(train_config)
        self.levels = levels(self.inner)
        self.least = settings.wait_for or needed(self.inner)
        self.private = sampled(self.inner)  # a cohort has exactly so many clients; None: no differential privacy
        self._left_out: set[str] = set()  # who failed in earlier tries of this round
        self._written_off: set[tuple[int, str]] = set()  # by ticket, who was reported as failed without an answer
        self._narrowed = False  # whether the last try named somebody new to leave out
        self.memory = StrategyState(self.inner)
        self.weight_key, _ = keys(self.inner)
        shadows = frozenset[Signal]().union(*(shadow.requires for shadow in settings.shadows.values()))
        # A shadow must be able to read the table; what else it would like to know is reported where clients can.
        self._shadowed = shadows & TABLE_SIGNALS
        required = settings.selector.requires | self._shadowed
        self.wished = shadows & REPORT_SIGNALS
        self.population = Population(
            grid,
            required,
            patience=settings.patience,
            labels=settings.labels,
            describe_every=settings.describe_every,
            classes=settings.classes,
            registered_only=settings.registered_only,
            clock=settings.clock,
            sleep=self._sleep,
            waits=self._waits,
        )
        self.debts = self.population.debts
        self.result = Result()
        self.training = Training(
            grid, self.inner, self.deadline, self.debts, settings.max_share, settings.max_update_norm
        )
        self.evaluation = Evaluation(
            grid,
            self.inner,
            evaluate_config,
            evaluate_fn,
            self.result,
            seed=settings.seed,
            deadline=self.deadline,
            debts=self.debts,
            max_share=settings.max_share,
        )
        self.session: Session | None = None
        self.pulse = Pulse(settings.journal, num_rounds, settings.clock)
        self._choice = 0  # how many could be chosen when that was last looked at
        self._kept_out: tuple[str, ...] = ()  # why the rules kept others out

    def close(self, failed: BaseException | None = None) -> None:
        """Close the journal; ``failed``: why the run ended."""
        self.pulse.stop(failed)
        if self.session is not None:
            self.session.close()

    def _sleep(self, seconds: float) -> None:
        """Wait, and see now and then who is still there."""
        self.pulse.look(self.grid.get_node_ids)
        self.settings.sleep(seconds)

    def _waits(self, what: str) -> None:
        self.pulse.seen(self.population.online, self.session)
        self.pulse.waiting(what)

    # -- the whole run ----------------------------------------------------------------------------------------------

    def play(self, initial_arrays: ArrayRecord) -> Result:
        """Run until as many rounds are on record as were asked for."""
        begun, num_rounds = self.settings.clock(), self.num_rounds
        journal = self.settings.journal
        unknown = frozenset[Signal]()
        if journal is not None and not is_blank(journal):
            # As long as its table lacks facts that new shadows go by, those it has go on.
            unknown = self._shadowed - facts_in(journal)
            self.session = self._reopened(None if unknown else self.settings.shadows)
            self.population.require(self.session.selector.requires)
            if _finished(self.session, num_rounds):
                self._resumed(self.session, initial_arrays)
                say(
                    "finished", "the run is finished: %s holds %d of %d rounds", journal, self.session.round,
                    num_rounds, rounds=self.session.round,
                )  # fmt: skip
                return self.result
        self._check_model(initial_arrays)
        self.pulse.start(self.session)
        self.population.assemble(self.least)
        self._check_rules()
        if self.session is not None and unknown:
            self.population.complete(self.session)
            self.session.commit()
            self.session.close()
            self.session = self._reopened(self.settings.shadows)
        session = self.session = self.session or self._created()
        self.pulse.opened(session)
        self.pulse.running()
        self.population.remember(session)
        notes.begun(session, self.settings, self.levels, self.population.supplied(), num_rounds)
        arrays = self._resumed(session, initial_arrays)
        self._left_out = self._failed_before(session)
        fruitless = 0
        while True:
            cohort = self._pending(session, num_rounds)
            if cohort is None:
                if session.round >= num_rounds:
                    break
                log.info("[ROUND %d, %d of %d]", session.round, session.round + 1, num_rounds)
                cohort = self._choose(session, arrays)
            if cohort.size:
                after = self._round(session, cohort, arrays)
                fruitless = 0 if after is not None else fruitless + (not self._narrowed)
                if fruitless == self.settings.tries:
                    raise self._gave_up(session, cohort)
                self.result.arrays = arrays = arrays if after is None else after
            if cohort.stop is not None:
                say("stopped", "the selector declares the run finished: %s", cohort.stop, reason=cohort.stop)
                break
        notes.finished(session, self.settings.clock() - begun)
        log.info("Metrics by Flower's server round, which is one more than the round:")
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

    def _spent(self, session: Session | None) -> tuple[dict[str, int], int]:
        """Return the clients there are, each with its participations so far, and how many rounds are left."""
        spent = dict.fromkeys(self.population.online, 0)
        if session is None:
            return spent, self.num_rounds
        return spent | participations(session.journal), self.num_rounds - session.round

    def _check_rules(self) -> None:
        """Refuse rules that the clients there are cannot keep, before they are on record; warn of what may come."""
        session = self.session
        rules = self.settings.rules if session is None else session.rules
        size = self.private or self._size()
        if rules is None or size is None:
            return
        spent, left = self._spent(session)
        try:
            rules.check_feasible(spent, size, left)
        except ParameterError:
            if session is not None:  # without a commit, so that the journal keeps the rules it has
                session.close()
                self.session = None
            raise
        for what in rules.shortages(spent, size, left):
            log.warning("the rules cannot be kept to the end unless other clients join: %s", what)
        strangers = [name for name, card in self.population.online.items() if not card.registered]
        if strangers and rules.by_name:
            log.warning(
                "the rules go by names, and %d of %d clients are not registered (%s): nothing keeps them from coming "
                "back under other names (registered_only=True admits registered nodes only)",
                len(strangers), len(self.population.online), listed(strangers),
            )  # fmt: skip

    def _reopened(self, shadows: Mapping[str, Selector[Any]] | None) -> Session:
        settings = self.settings
        assert settings.journal is not None
        before = rules_in(settings.journal)
        # An operator's orders outlast a start with the rules they were given against.
        rules = None if notes.begun_with(settings.journal, settings.rules) else settings.rules
        session = Session.open(
            settings.journal, settings.selector, shadows=shadows, rules=rules, commit="manual", sign=settings.sign
        )
        notes.rules(session, before, settings.rules if session.rules == settings.rules else rules)
        if session.seed != settings.seed:
            session.close()
            raise InputError(
                f"The journal {settings.journal} was written with seed {session.seed}; it cannot be continued with "
                f"seed {settings.seed}.",
                hint="pass the old seed, or start a new journal",
            )
        try:
            self.population.adopt(session.table)
        except InputError:
            session.close()
            raise
        return session

    def _created(self) -> Session:
        settings = self.settings
        if settings.journal is not None:
            settings.journal.parent.mkdir(parents=True, exist_ok=True)
        # From here on a client must supply what the selector, seeing who is there, decided to use.
        selector = settings.selector.adapted(self.population.known())
        for signal, names in self.population.untold(settings.selector.adapted(frozenset(Signal)).requires).items():
            if signal not in selector.requires:
                log.warning("the selector goes without '%s', which %s cannot supply", signal, listed(names))
        self.population.require(selector.requires)
        return Session(
            selector,
            self.population.first_table(self.least),
            seed=settings.seed,
            signals=self.population.supplied(),
            journal=settings.journal,
            shadows=settings.shadows,
            rules=settings.rules,
            # A round is made durable twice, when it is chosen and when it is closed; the rest can wait for these.
            commit="manual",
            audit=settings.audit,
            sign=settings.sign,
        )

    def _resumed(self, session: Session, initial_arrays: ArrayRecord) -> ArrayRecord:
        """Return the model to go on with: the journal's checkpoint, or ``initial_arrays`` before the first round."""
        arrays = self._loaded(session, initial_arrays)
        self.result.arrays = arrays
        recorded = session.journal.metrics()
        for round_, numbers in recorded.items():
            for prefix, into in (
                ("train/", self.result.train_metrics_clientapp),
                ("evaluate/", self.result.evaluate_metrics_clientapp),
                ("", self.result.evaluate_metrics_serverapp),
            ):
                found = {k[len(prefix) :]: v for k, v in numbers.items() if k.startswith(prefix) and
                         (prefix or "/" not in k)}  # fmt: skip
                if found:
                    into[round_ + 1] = MetricRecord({**found})
        if session.round == 0:
            self.evaluation.at_server(0, arrays)
        elif not session.pending and self.population.online and not evaluated(recorded.get(session.round - 1, {})):
            self._evaluate(session, session.round - 1, arrays)  # the run was cut off before this was on record
        return arrays

    def _loaded(self, session: Session, initial_arrays: ArrayRecord) -> ArrayRecord:
        store = self.settings.checkpoints
        if store is None:
            return initial_arrays
        first = store.name(0)
        if session.host_state is not None:
            name = str(session.host_state["checkpoint"])
        elif (begun := session.journal.last()[1] >= 0) and store.exists(first):
            name = first
        elif begun:
            raise InputError(
                f"The journal {self.settings.journal} has rounds, but {store.folder} has no checkpoint to go on from.",
                hint="was 'checkpoints' another folder before?",
            )
        else:
            store.save(0, initial_arrays, self.memory, {})
            return initial_arrays
        arrays = store.load(name, self.memory, self.config, like=initial_arrays)
        done = session.round - len(session.pending)
        say("continued", "continuing after %d rounds with %s", done, store.folder / name, rounds=done)
        return arrays

    def _pending(self, session: Session, num_rounds: int) -> Cohort | None:
        """Return the cohort that was not finished when the run was cut off; one tried too often is abandoned."""
        while session.pending:
            cohort = session.pending[0]
            tries = 1 + sum(body["ticket"] == cohort.ticket for body in session.journal.events(_TRY))
            why = self._broken(cohort)
            if not why and tries >= self.settings.tries:
                why = f"not finished in {tries} tries"
            if not why:
                self._available(session)
                why = self._broken(cohort)  # somebody may have left meanwhile
            if not why:
                log.info("[ROUND %d, %d of %d] again: it was cut off", cohort.round, cohort.round + 1, num_rounds)
                session.note(_TRY, {"ticket": cohort.ticket})
                session.commit()
                return cohort
            log.warning("round %d is chosen anew: %s", cohort.round, why)
            session.abandon(cohort.ticket, why)
            session.commit()
        return None

    def _broken(self, cohort: Cohort) -> str:
        """Return why differential privacy cannot use a cohort of an earlier run; an empty text when it can."""
        if self.private is None:
            return ""
        if cohort.size != self.private:
            return f"it has {cohort.size} clients, and the noise is made for {self.private}"
        gone = [name for name in cohort.names if name not in self.population.online]
        return f"{listed(gone)} not online, and the noise is made for {self.private} clients" if gone else ""

    def _failed_before(self, session: Session) -> set[str]:
        """Return who failed when an earlier run tried the round that is next."""
        tried = {body["ticket"] for body in session.journal.events(ABANDONED) if body["round"] == session.round}
        return {
            name for body in session.journal.events(FAILURES) if body["ticket"] in tried for name in body["failures"]
        }

    def _gave_up(self, session: Session, cohort: Cohort) -> RoundError:
        told = [body["failures"] for body in session.journal.events(FAILURES) if body["ticket"] == cohort.ticket]
        why = [f"{name}: {reason}" for failures in told for name, reason in failures.items()][:_NAMED]
        why += [body["reason"] for body in session.journal.events(ABANDONED) if body["ticket"] == cohort.ticket]
        return RoundError(
            f"Round {cohort.round} brought no model in {self.settings.tries} tries. The last time: {'; '.join(why)}.",
            hint="mend the clients or the strategy and start the run again: it continues with this round",
        )

    # -- choosing ---------------------------------------------------------------------------------------------------

    def _available(self, session: Session) -> Available:
        """Return who can take part, waiting until as many are online as the run wants to see and one is free."""
        begun = told = self.settings.clock()
        end = begun + self.settings.patience
        while True:
            self.population.refresh()
            self._collect_late(session)
            self._obey(session)
            self.population.welcome(session)
            enough = len(self.population.online) >= self.least
            self.pulse.seen(self.population.online, session)
            found = self._rested(session, busy=bool(self.debts.open))
            if enough and self._admitted(session, found):
                self.pulse.running()
                return found
            if self.settings.clock() > end:
                # Better to ask somebody who is slow than nobody.
                found = self._rested(session, busy=False)
                if enough and self._admitted(session, found):
                    self.pulse.running()
                    return found
                raise self._nobody(session)
            self.pulse.waiting(self._missing())
            if (now := self.settings.clock()) - told >= _TELL_EVERY:
                told = now
                log.info("waiting: %s", self._missing(now - begun))
            self._sleep(0.25)

    def _obey(self, session: Session) -> None:
        """Carry out what an operator has ordered since the last round."""
        for order in orders.take(session, self._feasible):
            self.population.meet_again()  # rules that are new may go by what clients say about themselves
            say(
                "rules", "rules of the operator hold from round %d on: %s", session.round, session.rules,
                round=session.round, order=order.id, rules={} if session.rules is None else session.rules.to_dict(),
            )  # fmt: skip

    def _feasible(self, session: Session, rules: Rules) -> None:
        """Refuse rules that the clients there are cannot keep."""
        size = self.private or self._size()
        if size is not None:
            spent, left = self._spent(session)
            rules.check_feasible(spent, size, left)

    def _rested(self, session: Session, busy: bool) -> Available:
        """Return who can take part, without those who failed in this round if the others are enough."""
        found = self.population.available(session, busy=busy)
        if self._left_out:
            everybody = self.population.available(session, busy=False)
            others = Available.of(session.table, [name for name in everybody.names if name not in self._left_out])
            enough = self.private or self._size() or self.settings.min_replies
            if self._admitted(session, others) and self._choice >= enough:
                return Available.of(session.table, [name for name in found.names if name not in self._left_out])
        return found

    def _admitted(self, session: Session, available: Available) -> bool:
        """Whether so many are there, and so many of them admitted by the rules, that a cohort can be chosen."""
        self._choice, self._kept_out = len(available.names), ()
        if session.rules is not None and not session.pending and available.names:
            verdict = session.eligibility(RoundRequest(1, available.clients))
            if verdict is not None:
                self._choice, self._kept_out = len(verdict.allowed), verdict.reasons
        return self._choice >= (1 if self.private is None or session.pending else self.private)

    def _missing(self, seconds: float | None = None) -> str:
        """Return what has kept a round from being chosen, for so long."""
        long = "" if seconds is None else f" for {seconds:.0f} s"
        online = len(self.population.online)
        if online < self.least:
            absent = self.population.absent()
            what = f"{online} of {self.least} clients have been online" if online else "nobody has been available"
            return f"{what}{long}{': ' if absent else ''}{'; '.join(absent)}"
        busy = sorted({name for debt in self.debts.open for name in debt.outbox.owing()}, key=natural)
        rules = f" ({'; '.join(self._kept_out[:3])})" if self._kept_out else ""
        if self.private is not None and self._choice:
            some = "1 client" if self._choice == 1 else f"{self._choice} clients"
            what = f"{some} could be chosen{rules}, and the privacy noise is made for {self.private}"
            return f"{what}{',' if long else ''}{long}{f'; still at work: {listed(busy)}' if busy else ''}"
        if rules:
            return f"the rules have admitted nobody{rules}{long}"
        return f"everybody who is online has been at work on something else{long}: {listed(busy)}"

    def _nobody(self, session: Session) -> FederationTimeoutError:
        said = self._missing(self.settings.patience)
        hint = "start SuperNodes and run the app again: it continues with this round"
        if self.private is not None and len(self.population.online) >= self.least:
            hint = (
                f"differential privacy needs {self.private} clients in every round: start more SuperNodes or ease the "
                "rules, and run the app again; it continues with this round"
            )
        return FederationTimeoutError(f"{said[0].upper()}{said[1:]} in round {session.round}.", hint=hint)

    def _collect_late(self, session: Session) -> None:
        """Put answers that came after their round was closed on record, and see who is free again."""
        for debt, reply in self.debts.collect():
            if debt.ticket is not None and debt.round is not None and reply.error is None:
                if (debt.ticket, reply.name) not in self._written_off:
                    session.tell(RoundReport(debt.ticket, [reply.name]))
                note = {reply.name: f"answered after {reply.seconds:.1f} s, when the round was closed"}
                session.note(FAILURES, {"round": debt.round, "ticket": debt.ticket, "failures": note})
                say(
                    "late", "client %r answered round %d after %.1f s", reply.name, debt.round, reply.seconds,
                    round=debt.round, ticket=debt.ticket, client=reply.name, seconds=reply.seconds,
                )  # fmt: skip

    def _size(self) -> int | None:
        """Return how many sound models a round needs; None: everybody's."""
        return self.settings.cohort_size or wanted(self.levels, "train", len(self.population.online))

    def _choose(self, session: Session, arrays: ArrayRecord) -> Cohort:
        available = self._available(session)
        size = self._size()
        if size is not None:
            size = min(size + self.settings.spares, session.table.n)
        request = RoundRequest(size, available.clients)
        query = session.query(request)
        answer = None if query is None else self._answer(session, query, arrays, available.names)
        cohort = session.ask(request, answer)
        if self.private is not None and cohort.size not in (0, self.private):
            why = f"the selector chose {cohort.size} clients, and the privacy noise is made for {self.private}"
            session.abandon(cohort.ticket, why)
            session.commit()
            raise InnerStrategyError(
                f"In round {cohort.round} {why}.",
                hint="use a selector that takes as many as it is asked for, such as 'uniform'",
            )
        session.commit()
        if log.isEnabledFor(logging.INFO):
            shown = ", ".join(cohort.names[:_NAMED]) + (", ..." if cohort.size > _NAMED else "")
            say(
                "selected", "selected %s (%d of %d available, %d known)", shown, cohort.size, len(available.names),
                session.table.n, round=cohort.round, ticket=cohort.ticket, clients=list(cohort.names),
                available=len(available.names), known=session.table.n,
            )  # fmt: skip
        return cohort

    def _outbox(self) -> Outbox:
        return Outbox(self.grid, self.settings.clock, self._sleep)

    def _answer(self, session: Session, query: Query, arrays: ArrayRecord, available: Sequence[str]) -> Answer:
        match query:
            case Losses(clients=clients, signals=signals):
                names = [session.table.name(int(c)) for c in clients]
                return Answer(query, self.population.losses(arrays, names, signals, self.query_deadline))
            case Trial(cohorts=cohorts):
                if self.private is not None:
                    raise InnerStrategyError(
                        f"The selector {session.selector.name!r} wants to try cohorts out, and their models would be "
                        "sent to clients without the noise of differential privacy.",
                        hint="use a selector without trials; FedCor has none with samples='round'",
                    )
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
            cards = {name: online[name] for name in names}
            # Not the batches of the round itself, which may train the same clients.
            seed = int(streams.stream(session.seed, _TRIAL, session.round, row).integers(1 << 62))
            # Copies, because a trial must leave no trace in the strategy: no moments, no privacy spent.
            double, config = stand_in(self.inner), ConfigRecord(dict(self.config))
            messages = self.training.messages(
                double, session.round + 1, cards, arrays, config, seed=seed, work={}, report=()
            )
            with_ttl(messages.values(), 2 * self.deadline)
            replies = exchange(self._outbox(), messages, self.deadline, self.debts)
            answers = [replies[name] for name in names if name in replies]
            checked, _ = self.training.bounded(self.training.checker(arrays, ()).all(answers), online, arrays)
            models = [reply for reply in checked if reply.status is _OK]
            if not models:
                log.warning("a trial of %s brought no model", ", ".join(names))
                continue
            tried = averaged(models, self.weight_key)
            after = self.population.losses(tried, available, ask, self.query_deadline)[query.measured]
            changes[row, everyone] = after - before
        return Answer(query, {query.answered_with: changes})

    # -- one round --------------------------------------------------------------------------------------------------

    def _round(self, session: Session, cohort: Cohort, arrays: ArrayRecord) -> ArrayRecord | None:
        """Train a cohort, average, put the round on record, evaluate; return the next model, or None without one."""
        server_round = cohort.round + 1
        config = dict(self.config)
        forget_round(self.inner, server_round)  # of a run in this process that was cut off
        required = session.requires & METRIC_SIGNALS
        self.training.commitment = receipt(session.journal, cohort.ticket, cohort.round)
        self.training.confirmations = self.population.confirmations(session.table.names_of(cohort.clients))
        trained = self.training.train(
            cohort,
            self.population.online,
            arrays,
            self.config,
            self._outbox(),
            seed=session.seed,
            required=required,
            asked=required | (self.wished & self.population.supplied()),
            enough=self._enough(cohort),
        )
        samples = sample_counts(trained.checked)
        measures = Measures(arrays, trained.checked, samples)
        kept = self._kept(trained.checked, measures)
        average = self._aggregate(server_round, cohort, trained, kept)
        if average.arrays is not None:
            average = replace(average, arrays=with_integers(average.arrays, arrays))
        checked = trained.checked
        if average.blamed:
            checked = [
                reply._replace(status=_INVALID, reason=average.blamed[reply.name])
                if reply.name in average.blamed
                else reply
                for reply in checked
            ]
            kept = kept & np.array([reply.name not in average.blamed for reply in checked])
            measures = Measures(arrays, checked, samples)
            trained.reasons.update(average.blamed)
        sound = int(kept.sum())
        if average.arrays is None:
            kept = np.zeros(len(checked), np.bool_)
        if average.metrics is not None:
            log.info("\t└──> Aggregated MetricRecord: %s", average.metrics)
            self.result.train_metrics_clientapp[server_round] = average.metrics
        if trained.reasons:
            for name, reason in trained.reasons.items():
                say(
                    "client-failed", "\t> %s: %s", name, reason,
                    round=cohort.round, ticket=cohort.ticket, client=name, reason=reason,
                )  # fmt: skip
            session.note(FAILURES, {"round": cohort.round, "ticket": cohort.ticket, "failures": trained.reasons})
        self._correct(session, cohort.round, trained.corrections)
        report = RoundReport(
            ticket=cohort.ticket,
            clients=self._indices(cohort, checked),
            status=None if measures.all_ok else [int(reply.status) for reply in checked],
            metrics=self._columns(session, measures, checked, arrays),
            kept=kept,
            complete=average.arrays is not None,
        )
        if average.arrays is None:
            self._narrowed = sound > 0 and not self._left_out.issuperset(trained.reasons)
            self._left_out.update(trained.reasons)
            self.config = ConfigRecord(config)  # the round is configured anew when it is tried again
            forget_round(self.inner, server_round)
            session.tell(report)
            self._write_off(session, cohort, trained)
            why = average.error or "no model came of it"
            session.abandon(cohort.ticket, why)
            session.commit()
            say(
                "round-failed", "round %d leaves the global model as it was and is tried again: %s", cohort.round, why,
                level=logging.WARNING, round=cohort.round, ticket=cohort.ticket, reason=why,
            )  # fmt: skip
            return None
        self._store(session, report, server_round, average)
        self._left_out.clear()
        models = int(kept.sum())
        say(
            "round", "round %d: models in the average: %d", cohort.round, models,
            round=cohort.round, ticket=cohort.ticket, models=models, without=len(trained.reasons),
            metrics=scalars(average.metrics),
        )  # fmt: skip
        self._evaluate(session, cohort.round, average.arrays)
        return average.arrays

    def _write_off(self, session: Session, cohort: Cohort, trained: Trained) -> None:
        """Report who was asked and said nothing as failed: when a cohort is abandoned, absence alone counts as none."""
        answered = {reply.name for reply in trained.checked}
        silent = [name for name in cohort.names if name in trained.sent and name not in answered]
        if silent and answered:  # when nobody answered, it was hardly the clients
            failed = [int(Status.FAILED)] * len(silent)
            session.tell(RoundReport(cohort.ticket, silent, status=failed, complete=False))
            self._written_off.update((cohort.ticket, name) for name in silent)

    def _enough(self, cohort: Cohort) -> int:
        """Return how many sound models close the round; without spares everybody is waited for."""
        size = self._size()
        if not self.settings.spares or size is None:
            return cohort.size
        return min(cohort.size, max(size, cohort.size - self.settings.spares))

    def _store(self, session: Session, report: RoundReport, server_round: int, average: Average) -> None:
        """Put the round on record, and the model beside it."""
        numbers = {f"train/{key}": value for key, value in scalars(average.metrics).items()}
        if numbers:
            session.record(server_round - 1, numbers)
        store = self.settings.checkpoints
        if store is None:
            session.tell(report)
            return
        assert average.arrays is not None
        # Of the config only what the strategy wrote; the rest is the app's, which may say otherwise next time.
        written = {k: v for k, v in self.config.items() if k not in self._given or self._given[k] != v}
        name = store.save(server_round, average.arrays, self.memory, written)
        session.tell(report, host={"checkpoint": name})
        session.commit()
        store.prune(name)

    @staticmethod
    def _correct(session: Session, round_: int, corrections: Mapping[str, Sequence[str]]) -> None:
        """Name the clients whose replies were changed before they entered an average."""
        for name, texts in corrections.items():
            for text in texts:
                say(
                    "corrected", "\t> %s: %s", name, text,
                    level=logging.WARNING, round=round_, client=name, reason=text,
                )  # fmt: skip
        if corrections:
            session.note(CORRECTED, {"round": round_, "corrections": {n: list(t) for n, t in corrections.items()}})

    def _evaluate(self, session: Session, round_: int, arrays: ArrayRecord) -> None:
        numbers, corrections = self.evaluation.on_clients(round_ + 1, arrays, self.population.online, self._outbox())
        self._correct(session, round_, corrections)
        numbers.update(self.evaluation.at_server(round_ + 1, arrays))
        if numbers:
            session.record(round_, numbers)
            session.commit()
            say("evaluated", "round %d evaluated", round_, round=round_, metrics=numbers)

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
        verdict = judged(
            self.settings.filter,
            Replies(
                np.ones(len(ok), np.bool_),
                updates=lambda: measures.updates[ok],
                logits=None
                if validation is None
                else lambda: np.stack([plain(validation.logits(checked[i].arrays)) for i in ok.tolist()]),
                labels=None if validation is None else plain(validation.labels),
            ),
        )
        if not verdict.kept.all():
            log.info("the filter keeps %d of %d models", int(verdict.kept.sum()), len(ok))
        if measures.all_ok:
            return verdict.kept
        kept = np.zeros(len(checked), np.bool_)
        kept[ok] = verdict.kept
        return kept

    def _aggregate(self, server_round: int, cohort: Cohort, trained: Trained, kept: BoolArray) -> Average:
        chosen = [reply for reply, keep in zip(trained.checked, kept.tolist(), strict=True) if keep]
        if self.private is not None:
            odd = _odd_weights(chosen, self.weight_key) if accounted(self.inner) else {}
            if len(chosen) - len(odd) != self.private:
                models = f"{len(chosen) - len(odd)} sound models came, and the privacy noise is made for {self.private}"
                return Average(blamed=odd, error=models)
        if cohort.weights is not None:
            share = dict(zip(cohort.names, cohort.weights.tolist(), strict=True))
            for reply in chosen:
                scale_weight(reply, self.weight_key, share[reply.name])
        metrics, uneven = evened({reply.name: reply.metrics for reply in chosen}, self.weight_key)
        if uneven:
            chosen = [with_metrics(reply, metrics[reply.name]) for reply in chosen]
            for name, texts in uneven.items():
                trained.corrections.setdefault(name, []).extend(texts)
        if len(chosen) < self.settings.min_replies or not any(weight_of(r, self.weight_key) > 0 for r in chosen):
            return Average(error="too few sound models")
        found = aggregated(self.inner, server_round, chosen, trained.errors())
        if len(chosen) - len(found.blamed) < self.settings.min_replies:
            return Average(blamed=found.blamed, error=found.error)
        return found

    def _columns(
        self, session: Session, measures: Measures, checked: Sequence[Checked], sent: ArrayRecord
    ) -> Mapping[Signal, Any]:
        """Return the report's numbers: what is required, the duration, and what every sound reply brought besides."""
        brought = [reply.values for reply in checked if reply.status is _OK]
        extra = frozenset(brought[0] if brought else ()).intersection(*brought[1:])
        extra = frozenset(s for s in extra if len({np.shape(values[s]) for values in brought}) == 1)
        signals = (session.requires & METRIC_SIGNALS) | extra | (self.wished & MEASURED)
        columns = {signal: measures.column(signal) for signal in sorted(signals - {Signal.SERVER_LOSS})}
        if Signal.SERVER_LOSS in session.requires:  # never what a client says
            assert self.settings.validation is not None
            columns[Signal.SERVER_LOSS] = np.where(measures.ok, self.settings.validation.loss(sent), np.nan)
        return columns


def _odd_weights(replies: Sequence[Checked], key: str) -> dict[str, str]:
    """Return whose weight is not that of most others, which a privacy accountant demands; nobody without a majority."""
    weights = {reply.name: weight_of(reply, key) for reply in replies}
    usual, count = Counter(weights.values()).most_common(1)[0] if weights else (0.0, 0)
    if 2 * count <= len(weights):
        return {}
    why = f"its weight {key!r} is {{:g}}, that of the others {usual:g}; a privacy accountant demands equal weights"
    return {name: why.format(weight) for name, weight in weights.items() if weight != usual}


def _finished(session: Session, num_rounds: int) -> bool:
    """Whether nothing is left to do: enough rounds, or the selector declared the run finished."""
    last = session.journal.cohorts()[-1:]
    stopped = bool(last) and last[0].stop is not None
    return not session.pending and (session.round >= num_rounds or stopped)
