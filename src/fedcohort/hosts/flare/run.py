"""One run of a FLARE job: its session, its sites and the global model; it sends tasks, and uses FLARE's aggregation."""

from __future__ import annotations

import json
import logging
import queue
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from fedcohort.audit.choices import receipt
from fedcohort.core.arrays import AnyArray, FloatArray
from fedcohort.core.protocol import Cohort, Status
from fedcohort.core.signals import Signal, metrics_of
from fedcohort.core.text import shorten
from fedcohort.core.vectors import needs_output_layer
from fedcohort.hosts.ask_again import ASK_AGAIN_AFTER
from fedcohort.hosts.flare.replies import (
    CheckedResult,
    ResultChecker,
    measures_of,
    odd_metrics,
    record_of,
    to_aggregate,
    weighted_average,
)
from fedcohort.hosts.flare.sites import Sites
from fedcohort.hosts.flare.wire import DESCRIBE, LOSSES
from fedcohort.hosts.live import Aggregation, Online
from fedcohort.hosts.live_run import CHECKPOINT, LiveRun
from fedcohort.hosts.measures import Measures, output_of
from fedcohort.hosts.orders import Order
from fedcohort.hosts.round import FederationTimeoutError, Reply, Round
from fedcohort.hosts.weights import bounded_weights
from fedcohort.hosts.wire import RECORD, SEED, WORK, question
from fedcohort.session.session import Session

if TYPE_CHECKING:
    from fedcohort.hosts.flare.controller import CohortController

_FORMAT = "fedcohort-flare-1"  # of checkpoints
_SLICE = 0.25  # seconds between two checks whether the job was aborted
_SETTLE = 10.0  # seconds to wait for sites that have not described themselves, once enough others have
LATE_GRACE_SECONDS = 60.0  # seconds, at least, that a task outlives its round, for late results
_SLOWEST = 10.0  # with an automatic deadline, a task outlives its round by this multiple of the round's duration


class Aborted(Exception):
    """FLARE ends the job."""


class _Arrival(NamedTuple):
    """A site's answer to a task_message."""

    task_message: TaskMessage
    site: str
    result: FLModel | None
    problem: str
    seconds: float


@dataclass(eq=False)
class TaskMessage:
    """A task sent to several sites. FLARE's threads put results into the inbox, from which the run takes them."""

    inbox: queue.Queue[_Arrival]
    kind: str
    targets: Sequence[str]
    ticket: int | None = None
    closed: bool = False
    begun: float = field(default_factory=time.monotonic)
    fetched: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    task: Any = None
    checker: ResultChecker | None = None  # of results that count

    def __call__(self, result: FLModel) -> None:
        """Accept a result from FLARE, which adds the name of the site."""
        self.arrive(str(result.meta.get("client_name")), result, "")

    def arrive(self, site: str, result: FLModel | None, problem: str) -> None:
        """Put a site's answer into the inbox; only its first answer counts."""
        if site not in self.answered:
            self.answered.add(site)
            self.inbox.put(_Arrival(self, site, result, problem, time.monotonic() - self.begun))

    @property
    def at_work(self) -> set[str]:
        """The sites that have fetched the task and not answered."""
        return self.fetched - self.answered


class FlareRun(LiveRun):
    """One run of a job over the sites behind a FLARE server.

    Attributes
    ----------
    model : dict of str to array
        The global model.
    task_messages : list of TaskMessage
        Those that are open, or that a site still works on.
    """

    model: dict[str, AnyArray]

    def __init__(self, controller: CohortController, first: dict[str, AnyArray]) -> None:
        self.controller = controller
        self.sites = Sites(controller.settings.selector.requires, controller.classes)
        super().__init__(controller.settings, controller.num_rounds, self.sites)
        # Raises an error before any site trains.
        if needs_output_layer(self.settings.selector.requires):
            output_of(first)
        self.model = first
        self.task_messages: list[TaskMessage] = []
        self._inbox: queue.Queue[_Arrival] = queue.Queue()
        self._open: TaskMessage | None = None  # to the cohort that trains
        self._next: tuple[dict[str, AnyArray], FLModel] | None = None  # the newest average, and FLARE's result
        self._saved: str | None = None

    # -- from the start to the end ------------------------------------------------------------------------------------

    def reopen(self, journal: Path, *, shadows: bool = True) -> Session:
        """Return the session of the journal, to be continued."""
        session = super().reopen(journal, shadows=shadows)
        if Signal.LABEL_COUNTS in session.table.signals:
            self.sites.classes = session.table.label_counts.shape[1]
        return session

    def prepare(self) -> None:
        """Wait until enough sites have described themselves."""
        begun, enough_since = self.now(), None
        while True:
            self._look()
            self._arrivals(self.now() + _SLICE)
            now, fit = self.now(), len(self.sites.fit())
            waited_enough = now - begun > self.policy.patience
            if fit >= self.policy.enough_online:
                enough_since = enough_since or now
                # A site that does not answer delays the run for a while, but cannot end it.
                if not self.sites.unknown() or now - enough_since > _SETTLE or waited_enough:
                    return
            elif waited_enough:
                absent = "; ".join(self.sites.absent())
                raise FederationTimeoutError(
                    f"Waited {self.policy.patience:g} s for {self.policy.enough_online} sites; {fit} can take part"
                    f"{': ' if absent else '.'}{absent}",
                    hint="connect more sites, give them the answers they lack, lower wait_for, or raise patience",
                )

    def on_finished(self, stop: str | None) -> None:
        """Log why the run ended before its last round."""
        if stop is not None:
            self.log(f"the run ends before its last round: {stop}")

    def load(self, session: Session) -> None:
        """Load the model of the journal's checkpoint; before the first round, save the persistor's."""
        store = self.controller.checkpoints
        if store is None:
            return
        name = self.checkpoint_to_load(store)
        if name is None:
            self._save_model(0, self.model)
            return
        header, tensors = store.read(name, _FORMAT)
        self.log(f"continuing after {session.round - len(session.pending)} rounds with {store.folder / name}")
        self.model = {key: tensors[key] for key in json.loads(header["model"])}

    def _save_model(self, rounds: int, model: Mapping[str, AnyArray]) -> None:
        if self.controller.checkpoints is not None:
            header = {"format": _FORMAT, "model": json.dumps(list(model))}
            self._saved = self.controller.checkpoints.write(rounds, model, header)

    # -- tasks and results --------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the time."""
        return time.monotonic()

    def _post(
        self,
        kind: str,
        names: Sequence[str],
        params: Mapping[str, AnyArray],
        record: Mapping[str, Any],
        ticket: int | None = None,
        **about: Any,
    ) -> TaskMessage:
        """Send a task to sites; ``about`` is what FLARE shows about the round."""
        task_message = TaskMessage(self._inbox, kind, list(names), ticket)
        data = FLModel(params_type=ParamsType.FULL, params=dict(params), meta={RECORD: dict(record)}, **about)
        self.task_messages = [old for old in self.task_messages if not old.closed or old.at_work] + [task_message]
        self.controller.dispatch(kind, data, names, task_message)
        return task_message

    def _close(self, task_message: TaskMessage) -> None:
        """Give a task to no more sites, and limit how long FLARE waits for those at work on it."""
        task = task_message.task
        task_message.closed = True
        if task_message.at_work:
            lasted = time.monotonic() - task_message.begun
            # An automatic deadline is short, and late results show how slow sites are.
            extra = _SLOWEST * lasted if self.policy.deadline == "auto" else self.policy.fixed_deadline or 0.0
            task.targets[:] = [name for name in task.targets if name in task_message.fetched]
            # FLARE forgets a task at its timeout, which counts from when the task was sent.
            task.timeout = int(lasted + max(extra, LATE_GRACE_SECONDS)) + 1
        else:
            self.controller.communicator.cancel_task(task)

    def _arrivals(self, until: float) -> list[_Arrival]:
        """Return the answers that have arrived; if there are none, wait for one until the time ``until``.

        Descriptions are handled here and not returned.
        """
        arrivals: list[_Arrival] = []
        while not arrivals:
            self.controller.check_alive()
            self._write_off()
            left = until - self.now()
            try:
                arrivals.append(self._inbox.get(block=left > 0, timeout=min(left, _SLICE) if left > 0 else None))
            except queue.Empty:
                if left <= 0:
                    return []
        # FLARE's threads fill the inbox, and all that has come by now counts for this moment.
        while not self._inbox.empty():
            arrivals.append(self._inbox.get())
        answers = []
        for arrival in arrivals:
            task_message = arrival.task_message
            if task_message.kind != DESCRIBE:
                answers.append(arrival)
                continue
            task_message.closed = task_message.answered.issuperset(task_message.targets)
            if problem := self.sites.describe(arrival.site, record_of(arrival.result), arrival.problem):
                self.log(f"{arrival.site} is left out: {problem}", logging.WARNING)
        return answers

    def _write_off(self) -> None:
        """Stop waiting for sites that are no longer connected."""
        # Questions for a description are not written off: a site that comes back finds them, or is asked again.
        waiting = [message for message in self.task_messages if not message.closed and message.kind != DESCRIBE]
        connected = set(self.controller.connected()) if waiting else set()
        for task_message in waiting:
            for name in task_message.targets:
                if name not in connected:
                    task_message.arrive(name, None, "the site is no longer connected")

    def _look(self) -> None:
        """Check who is connected, and ask sites that have not described themselves to do so."""
        self.sites.connected = tuple(self.controller.connected())
        pending: set[str] = set()
        for task_message in self.task_messages:
            if task_message.kind == DESCRIBE and not task_message.closed:
                if self.now() - task_message.begun > ASK_AGAIN_AFTER:
                    self._close(task_message)
                else:
                    pending.update(task_message.targets)
        if new := [name for name in self.sites.unknown() if name not in pending]:
            self._post(DESCRIBE, new, {}, {})

    def online(self) -> Online:
        """Check who is connected, and let new sites join."""
        self._look()
        joined = self.sites.admit_new_clients(self.running)
        if joined:
            self.log(f"joined: {', '.join(joined)}")
        table = self.running.table
        names = [name for name in self.sites.fit() if name in table]
        busy = {name for task_message in self.task_messages for name in task_message.at_work}
        return Online(names, [name for name in names if name in busy])

    def absent(self) -> Sequence[str]:
        """Describe the sites that are connected but cannot take part, with the reasons."""
        return self.sites.absent()

    def set_free(self, site: str) -> None:
        """Mark a site as free, because it asks for a new task."""
        for task_message in self.task_messages:
            if task_message.closed:
                task_message.fetched.discard(site)

    def send(self, cohort: Cohort) -> Mapping[str, str]:
        """Send the global model to a cohort."""
        session = self.running
        required = metrics_of(session.requires)
        asked = required | (session.trial_signals & self.sites.supplied_signals())
        record = question(asked, receipt(session.journal, cohort.ticket, cohort.round))
        record[SEED] = session.seed
        if cohort.work is not None:
            # All sites get the same task, so each finds its amount by its name.
            record[WORK] = dict(zip(cohort.names, cohort.work.tolist(), strict=True))
        connected = set(self.sites.connected)
        names = [name for name in cohort.names if name in connected]
        self._open = self._train(names, record, cohort.round, cohort.ticket)
        self._open.checker = ResultChecker(self.model, required)
        return {name: "not connected" for name in cohort.names if name not in connected}

    def _train(
        self, names: Sequence[str], record: Mapping[str, Any], round_: int, ticket: int | None = None
    ) -> TaskMessage:
        controller = self.controller
        return self._post(
            controller.task_name, names, self.model, record, ticket,
            current_round=round_, total_rounds=controller.num_rounds,
        )  # fmt: skip

    def receive(self, until: float) -> list[Reply]:
        """Return checked results of the cohort that trains, and late ones of earlier rounds."""
        replies = []
        for arrival in self._arrivals(until):
            task_message, site, _, problem, seconds = arrival
            if task_message.ticket is None:
                continue  # a late answer to a question, or a late trial
            if task_message.checker is None:  # it is late and will not count
                status = Status.FAILED if arrival.result is None else Status.OK
                replies.append(Reply(task_message.ticket, site, status, problem, seconds))
                continue
            checked = _check(task_message.checker, arrival)
            content = checked if task_message is self._open else (checked, task_message.checker.model)
            replies.append(Reply(task_message.ticket, site, checked.status, checked.reason, seconds, content))
        return replies

    # -- the average --------------------------------------------------------------------------------------------------

    def combine(self, round_: Round) -> Aggregation:
        """Filter the valid models and average them with FLARE's aggregation."""
        assert self._open is not None
        self._close(self._open)
        if self.policy.late == "discard":
            self._open.checker = None  # it holds the model that was sent
        self._open = None
        checked: list[CheckedResult] = [reply.content for reply in round_.in_order()]
        # The update of a late model is applied to the current one.
        late = [result.moved(sent, self.model) for result, sent in (x.reply.content for x in round_.late)]
        weights, corrections = self._weigh(round_, checked, late)
        measures = measures_of(self.model, checked)
        kept = measures.apply_filter(self.controller.filter_)
        chosen = [reply for reply, keep in zip(checked, kept.tolist(), strict=True) if keep]
        chosen = [reply for reply in [*chosen, *late] if weights[reply.name] > 0]
        refused: dict[str, str] = {}
        error = round_.shortfall(len(chosen)) or ("" if chosen else "too few valid models")
        if not error:
            error, refused = self._aggregate(chosen, weights)
            error = error or round_.shortfall(len(chosen) - len(refused))
        counted = {reply.name for reply in chosen} - refused.keys()
        return Aggregation(
            kept & np.array([reply.name not in refused for reply in checked], np.bool_),
            self._columns(measures),
            error=error,
            refused={name: why for name, why in refused.items() if name in round_.cohort.names},
            corrections=corrections,
            late=[late_reply for late_reply in round_.late if late_reply.reply.client in counted],
        )

    def _weigh(
        self, round_: Round, checked: Sequence[CheckedResult], late: Sequence[CheckedResult]
    ) -> tuple[dict[str, float], dict[str, list[str]]]:
        """Return the weights of valid models by site, and the corrections by site."""
        weights, lowered = self._bound_weights([reply for reply in [*checked, *late] if reply.status is Status.OK])
        corrections = {name: [text] for name, text in lowered.items()}
        for reply in checked:
            if reply.result is not None and (odd := odd_metrics(reply.result.metrics)):
                corrections.setdefault(reply.name, []).extend(odd)
        cohort = round_.cohort
        times = {} if cohort.weights is None else dict(zip(cohort.names, cohort.weights.tolist(), strict=True))
        times |= {late_reply.reply.client: late_reply.times * late_reply.discount for late_reply in round_.late}
        return {name: weight * times.get(name, 1.0) for name, weight in weights.items()}, corrections

    def _bound_weights(self, replies: Sequence[CheckedResult]) -> tuple[dict[str, float], dict[str, str]]:
        """Return the weights of valid replies by site, and the reason for each that was lowered."""
        sizes = {name: description.size for name, description in self.sites.described.items()}
        return bounded_weights({reply.name: reply.weight for reply in replies}, sizes, self.policy.max_share)

    def _aggregate(self, chosen: Sequence[CheckedResult], weights: Mapping[str, float]) -> tuple[str, dict[str, str]]:
        """Let FLARE aggregate; return the error, if any, and by site why its model cannot be aggregated.

        The checks of single models cannot know what an aggregator will do with them. If it raises an error, or its
        result is not finite, models are left out one by one to find one without which the others aggregate.
        """
        error = self._attempt(chosen, weights)
        if not error or len(chosen) == 1:
            return error, {}
        self.log(f"the aggregation failed: {error}", logging.WARNING)
        for blamed in chosen:
            others = [reply for reply in chosen if reply is not blamed]
            if not self._attempt(others, weights):
                return "", {blamed.name: f"the others can be aggregated, but not together with it: {error}"}
        return error, {}

    def _attempt(self, chosen: Sequence[CheckedResult], weights: Mapping[str, float]) -> str:
        try:
            model, result = self.controller.aggregate(to_aggregate(chosen, self.model, weights), self.model)
        except Exception as error:  # the job's own aggregator may raise anything
            return shorten(f"{type(error).__name__}: {error}")
        if model.keys() != self.model.keys():
            return "the aggregated model has other arrays than the one before"
        for key, array in model.items():
            if array.shape != self.model[key].shape or not np.isfinite(array).all():
                return f"the aggregated array {key!r} has another shape, or NaN or infinite entries"
        self._next = ({key: model[key] for key in self.model}, result)
        return ""

    def _columns(self, measures: Measures) -> Mapping[Signal, FloatArray]:
        """Return the report's numbers: required signals, and everything that all valid replies contain."""
        signals = metrics_of(self.running.requires) | measures.common_signals()
        return {signal: measures.column(signal) for signal in sorted(signals)}

    def store(self, round_: Round, aggregation: Aggregation) -> Any:
        """Record the sites' metrics, and save the model in a checkpoint."""
        assert self._next is not None
        model, result = self._next
        if result.metrics:
            self.running.record(round_.cohort.round, {f"train/{k}": float(v) for k, v in result.metrics.items()})
        self._save_model(round_.cohort.round + 1, model)
        return None if self._saved is None else {CHECKPOINT: self._saved}

    # -- questions ----------------------------------------------------------------------------------------------------

    def _exchange(
        self, task_message: TaskMessage, names: Collection[str], deadline: float | None
    ) -> dict[str, _Arrival]:
        """Return the answers to a task_message that arrive before the deadline, by site."""
        until = self.now() + deadline if deadline is not None else float("inf")
        answers: dict[str, _Arrival] = {}
        while len(answers) < len(names) and self.now() < until:
            # Arrivals of other tasks are late answers to earlier questions, which nobody needs any more.
            answers.update({a.site: a for a in self._arrivals(until) if a.task_message is task_message})
        self._close(task_message)
        return answers

    def ask_losses(
        self, model: Mapping[str, AnyArray], names: Sequence[str], signals: frozenset[Signal]
    ) -> Mapping[str, Mapping[str, object] | str | None]:
        """Ask sites for losses of a model; return by name what each reported, or why it reported nothing."""
        connected = [name for name in names if name in set(self.sites.connected)]
        if not connected:
            return {}
        task_message = self._post(LOSSES, connected, model, question(signals), current_round=self.running.round)
        deadline = self.policy.query_deadline or self.policy.fixed_deadline
        return {
            name: arrival.problem if arrival.result is None else record_of(arrival.result)
            for name, arrival in self._exchange(task_message, connected, deadline).items()
        }

    def train_trial(self, cohort: Sequence[str], seed: int) -> dict[str, AnyArray] | None:
        """Let a trial cohort train; return the average of its models, or None if it has none."""
        names = [name for name in cohort if name in set(self.sites.connected)]
        if not names:
            return None
        task_message = self._train(names, {**question(()), SEED: seed}, self.running.round)
        arrivals = self._exchange(task_message, names, self.policy.fixed_deadline)
        checker = ResultChecker(self.model, ())
        checked = [_check(checker, arrivals[name]) for name in names if name in arrivals]
        models = [reply for reply in checked if reply.status is Status.OK]
        if not models:
            self.log(f"a trial of {', '.join(names)} returned no model", logging.WARNING)
            return None
        return weighted_average(models, self._bound_weights(models)[0])

    # -- what happens -------------------------------------------------------------------------------------------------

    def on_round(self, number: int, resumed: bool) -> None:
        """Log the beginning of a round."""
        self.controller.round_begins(number, resumed)

    def log(self, text: str, level: int = logging.INFO) -> None:
        """Write a line to the log of the job."""
        (self.controller.warning if level >= logging.WARNING else self.controller.info)(text)

    def on_rules(self, order: Order) -> None:
        """Log that an operator has changed the rules."""
        self.log(f"the operator's rules apply from round {self.running.round} on: {self.running.rules}")

    def on_selector(self) -> None:
        """Admit only sites that supply what the new selector reads, and log it."""
        super().on_selector()
        self.log(f"from round {self.running.round} on, {self.running.selector.name} chooses")

    def on_chosen(self, cohort: Cohort, available: int) -> None:
        """Log who was chosen."""
        self.log(f"selected {', '.join(cohort.names)} ({cohort.size} of {available} available)")

    def on_closed(self, round_: Round, aggregation: Aggregation) -> None:
        """Replace the global model and log."""
        assert self._next is not None
        self.model, result = self._next
        self._log(round_, aggregation)
        self.controller.round_ends(self.model, result, self._saved)

    def on_abandoned(self, round_: Round, aggregation: Aggregation) -> None:
        """Log why a round is tried again."""
        self._log(round_, aggregation)
        number = round_.cohort.round
        self.log(f"round {number} leaves the model as it was and is tried again: {aggregation.error}", logging.WARNING)

    def _log(self, round_: Round, aggregation: Aggregation) -> None:
        for name, reason in round_.reasons.items():
            self.log(f"{name}: {reason}", logging.WARNING)
        for name, texts in aggregation.corrections.items():
            self.log(f"{name}: {'; '.join(texts)}", logging.WARNING)

    def on_late(self, reply: Reply, round_: int) -> None:
        """Log a late result."""
        self.log(f"{reply.client} answered round {round_} after {reply.seconds:.1f} s, too late")


def _check(checker: ResultChecker, arrival: _Arrival) -> CheckedResult:
    if arrival.result is None:
        return CheckedResult(arrival.site, Status.FAILED, arrival.problem)
    return checker.check(arrival.site, arrival.result, arrival.seconds)
