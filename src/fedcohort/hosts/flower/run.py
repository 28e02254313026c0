"""One call of ``CohortStrategy.start``: open or continue the session, play its rounds, record what happened."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result

from fedcohort.core.errors import InputError, ParameterError, SignalError
from fedcohort.core.protocol import Selector
from fedcohort.core.signals import Signal
from fedcohort.core.text import join_names, shorten
from fedcohort.core.vectors import needs_output_layer
from fedcohort.hosts.flower.host import FlowerHost
from fedcohort.hosts.flower.logs import say
from fedcohort.hosts.flower.replies import decode
from fedcohort.hosts.leases import leases_of
from fedcohort.hosts.measures import output_of
from fedcohort.hosts.run_record import (
    RULES,
    checkpoint_to_load,
    is_finished,
    note_once,
    record_end,
    record_failure,
    reopen,
)
from fedcohort.journal import is_blank, read_journal
from fedcohort.journal.events import PLANNED, SETTINGS
from fedcohort.session.resume import participations
from fedcohort.session.rules import Rules, difference
from fedcohort.session.session import Session

log = logging.getLogger("flwr.fedcohort")


class LiveRun:
    """One call of ``CohortStrategy.start``."""

    def __init__(self, host: FlowerHost) -> None:
        self.host = host
        self.settings = host.settings
        self.population = host.population

    @property
    def session(self) -> Session | None:
        """The session, or None if there is none yet."""
        return self.host.session

    def play(self, initial_arrays: ArrayRecord) -> Result:
        """Run until the journal has ``num_rounds`` rounds, record how the run ended, and close the journal."""
        failed: BaseException | None = None
        try:
            return self._play(initial_arrays)
        except BaseException as error:
            failed = error
            reason = shorten(str(error) or type(error).__name__)
            say("failed", "the run ended: %s", reason, level=logging.ERROR, reason=reason)
            record_failure(self.session, reason)
            raise
        finally:
            self.host.pulse.stop(failed)
            if self.session is not None:
                self.session.close()

    def _play(self, initial_arrays: ArrayRecord) -> Result:
        host, settings, num_rounds = self.host, self.settings, self.host.num_rounds
        begun, journal = settings.clock(), settings.journal
        unknown = frozenset[Signal]()
        if journal is not None and not is_blank(journal):
            # If its table lacks facts that new shadows need, the old shadows continue for now.
            with closing(read_journal(journal)) as record:
                unknown = host.shadow_facts - record.table()[0].signals
            session = host.session = self._reopen_session(None if unknown else settings.shadows)
            self.population.require(session.selector.requires)
            if is_finished(session, num_rounds, host.policy.early_stop):
                self._resume(session, initial_arrays)
                host.tidy()
                say(
                    "finished", "the run is finished: %s holds %d of %d rounds", journal, session.round, num_rounds,
                    rounds=session.round,
                )  # fmt: skip
                return host.result
        self._check_model(initial_arrays)
        host.pulse.start(host.session)
        self.population.assemble(host.policy.enough_online)
        self._check_rules()
        if host.session is not None and unknown:
            self.population.complete(host.session)
            host.session.commit()
            host.session.close()
            host.session = self._reopen_session(settings.shadows)
        session = host.session = host.session or self._create_session()
        host.pulse.attach(session)
        host.pulse.running()
        self.population.remember(session)
        # Before anything is asked of clients, so that a run that fails has recorded its settings.
        self._record_start(session)
        self._resume(session, initial_arrays)
        leases = None if settings.leases is None else leases_of(settings.leases, journal, host.policy.fixed_deadline)
        stop = host.play(session, leases)
        if stop is not None:
            say("stopped", "the run ends before its last round: %s", stop, reason=stop)
        record_end(session, "finished", stop or "")
        seconds = settings.clock() - begun
        say("finished", "Strategy execution finished in %.2fs", seconds, rounds=session.round, seconds=seconds)
        log.info("Metrics by Flower's server round, which is one more than the round:")
        for line in io.StringIO(str(host.result)):
            log.info("\t%s", line.rstrip("\n"))
        return host.result

    def _record_start(self, session: Session) -> None:
        """Record the settings of the run; warn if they differ from those of the previous start."""
        settings, policy = self.settings, self.settings.policy
        now = {
            "cohort-size": policy.size,
            "spares": policy.spares,
            "min-replies": policy.min_replies,
            "max-share": policy.max_share,
            "max-update-norm": policy.max_update_norm,
            "strategy": [type(level).__name__ for level in self.host.levels],
            "filter": repr(settings.filter),
            "signals": sorted(s.name for s in self.population.supplied_signals()),
            RULES: None if settings.rules is None else settings.rules.to_dict(),
            **settings.more_settings(),
        }
        (before,) = session.journal.events(SETTINGS)[-1:] or [{}]
        changed = [f"{key} was {before[key]}, is {now[key]}" for key in now if before.get(key, now[key]) != now[key]]
        if changed:
            log.warning("other settings than when the journal was last written: %s", "; ".join(changed))
        note_once(session, SETTINGS, now)
        unknown = [] if session.rules is None else [n for n in session.rules.named if n not in session.table]
        if unknown:
            log.warning("no client is called %s so far, which the rules name", ", ".join(map(repr, unknown[:8])))
        note_once(session, PLANNED, {"rounds": self.host.num_rounds})

    def _check_model(self, arrays: ArrayRecord) -> None:
        """Refuse a model without the output layer that the selector needs; shadows do without it."""
        required, optional = self.settings.selector.requires, self.host.optional_signals
        try:
            if needs_output_layer(required | optional):
                output_of(decode(arrays))
        except SignalError:
            if needs_output_layer(required):
                raise
            self.host.optional_signals = frozenset(s for s in optional if not needs_output_layer({s}))

    def _check_rules(self) -> None:
        """Refuse rules that the clients online cannot satisfy, before they are recorded; warn of later shortages."""
        session, online = self.session, self.population.online
        rules = self.settings.rules if session is None else session.rules
        size = self.host.policy.size_for(len(online))
        if rules is None or size is None:
            return
        spent, left = dict.fromkeys(online, 0), self.host.num_rounds
        if session is not None:
            spent, left = spent | participations(session.journal), left - session.round
        try:
            rules.check_feasible(spent, size, left)
        except ParameterError:
            if session is not None:  # closed without a commit, so that the journal keeps its old rules
                session.close()
                self.host.session = None
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

    # -- the session --------------------------------------------------------------------------------------------------

    def _reopen_session(self, shadows: Mapping[str, Selector[Any]] | None) -> Session:
        settings = self.settings
        assert settings.journal is not None
        with closing(read_journal(settings.journal)) as record:
            before = Rules(**(record.meta()["rules"] or {}))
        session = reopen(
            settings.journal, settings.selector, settings.seed, settings.rules,
            asynchronous=settings.asynchronous, shadows=shadows, sign=settings.sign,
        )  # fmt: skip
        _log_rules(session, before, settings.rules if session.rules == settings.rules else None)
        try:
            self.population.adopt(session.table)
        except InputError:
            session.close()
            raise
        return session

    def _create_session(self) -> Session:
        settings = self.settings
        if settings.journal is not None:
            settings.journal.parent.mkdir(parents=True, exist_ok=True)
        # From here on, a client must supply what the selector has decided to use.
        selector = settings.selector.adapt(self.population.known_signals())
        for signal, names in self.population.partly_supplied(
            settings.selector.adapt(frozenset(Signal.all())).requires
        ).items():
            if signal not in selector.requires:
                log.warning("the selector does without '%s', which %s cannot supply", signal, join_names(names))
        self.population.require(selector.requires)
        return Session(
            selector,
            self.population.first_table(self.host.policy.enough_online),
            seed=settings.seed,
            signals=self.population.supplied_signals(),
            journal=settings.journal,
            shadows=settings.shadows,
            rules=settings.rules,
            commit="manual",  # twice a round, when it is chosen and when it is closed
            audit=settings.audit,
            sign=settings.sign,
            asynchronous=settings.asynchronous,
        )

    # -- the model ----------------------------------------------------------------------------------------------------

    def _resume(self, session: Session, initial_arrays: ArrayRecord) -> None:
        """Load the journal's checkpoint and metrics, or ``initial_arrays`` before the first round."""
        host, result = self.host, self.host.result
        host.arrays = result.arrays = self._load_model(session, initial_arrays)
        recorded = session.journal.metrics()
        for round_, numbers in recorded.items():
            _add_metrics(result, round_ + 1, numbers)
        if session.round == 0:
            host.evaluation.at_server(0, host.arrays)
            return
        between_rounds = self.settings.asynchronous or not session.pending
        evaluated = any(not key.startswith("train/") for key in recorded.get(session.round - 1, {}))
        if between_rounds and self.population.online and not evaluated:
            host.evaluate(session.round - 1, host.arrays)  # the run was interrupted before this was recorded

    def _load_model(self, session: Session, initial_arrays: ArrayRecord) -> ArrayRecord:
        host, store = self.host, self.settings.checkpoints
        if store is None:
            return initial_arrays
        name = checkpoint_to_load(session, store)
        if name is None:
            store.save(0, initial_arrays, host.memory, {})
            return initial_arrays
        arrays = store.load(name, host.memory, host.config)
        done = session.round - (0 if self.settings.asynchronous else len(session.pending))
        say("continued", "continuing after %d rounds with %s", done, store.folder / name, rounds=done)
        return arrays


def _log_rules(session: Session, before: Rules, given: Rules | None) -> None:
    """Log which rules a continued run uses."""
    now = session.rules or Rules()
    if given is None and now != Rules():
        say(
            "rules", "the rules of the journal stay in force: %r; rules=Rules() drops them", now,
            round=session.round, rules=now.to_dict(),
        )  # fmt: skip
    elif given is not None and given.to_dict() != before.to_dict():
        say(
            "rules", "the rules change from round %d on: %s", session.round, difference(before, now),
            round=session.round, rules=now.to_dict(),
        )  # fmt: skip


def _add_metrics(result: Result, server_round: int, numbers: Mapping[str, float]) -> None:
    """Add a round's recorded numbers to Flower's result; the prefix says who measured them."""
    for prefix, records in (
        ("train/", result.train_metrics_clientapp),
        ("evaluate/", result.evaluate_metrics_clientapp),
    ):
        metrics = {key[len(prefix) :]: value for key, value in numbers.items() if key.startswith(prefix)}
        if metrics:
            records[server_round] = MetricRecord({**metrics})
    at_server = {key: value for key, value in numbers.items() if "/" not in key}
    if at_server:
        result.evaluate_metrics_serverapp[server_round] = MetricRecord({**at_server})
