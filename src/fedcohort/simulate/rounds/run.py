"""One run of a lock-step group: its session, its federation, its clock."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcohort.core import rng as streams
from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError, SignalError
from fedcohort.core.protocol import SELECTORS, Cohort, Selector
from fedcohort.core.registry import user_code_errors
from fedcohort.core.signals import (
    QUERY_SIGNALS,
    SIGNALS,
    TABLE_SIGNALS,
    OnServer,
    Signal,
    VectorOf,
    losses_of,
    vectors_of,
)
from fedcohort.core.text import short_repr
from fedcohort.hosts.pace import Pace
from fedcohort.hosts.round import Policy
from fedcohort.journal import Savepoint
from fedcohort.scenario import Federation
from fedcohort.scenario.availability import Always, ClassBiased
from fedcohort.scenario.devices import OnlineDevices
from fedcohort.scenario.latency import NoLatency
from fedcohort.scenario.scenario import RoundEvents
from fedcohort.scenario.shift import RELABEL
from fedcohort.session.rules import Rules
from fedcohort.session.session import Session
from fedcohort.simulate.config.experiment import RunPlan, values_of
from fedcohort.simulate.label_sharing import LabelKnowledge, LabelSharing
from fedcohort.simulate.metrics import Participation
from fedcohort.simulate.rounds.costs import CostModel
from fedcohort.simulate.rounds.judge import Judge
from fedcohort.simulate.rounds.late import LateUpdates
from fedcohort.simulate.rounds.server import ServerSamples
from fedcohort.simulate.store.checkpoint import has_rounds_left
from fedcohort.simulate.store.results import RunInfo, parse_engines
from fedcohort.simulate.tasks import Task
from fedcohort.training.aggregators import (
    Aggregator,
    Combined,
    Corrections,
    Members,
    Memory,
    Mix,
    OwnModels,
    WeightedSum,
    fitting,
)
from fedcohort.training.early_stop import EarlyStop, LossTrend
from fedcohort.training.filters import KeepAll, Need


def host_signals(federation: Federation, task: Task, asynchronous: bool = False) -> frozenset[Signal]:
    """Return the signals that the simulator can supply: all, if clients hold out data and samples have classes.

    These are fedcohort's own signals, and any other that says how it is computed. An asynchronous run has no cohorts to
    compare a client with, and no filter.
    """
    supplied = _computed()
    if asynchronous:
        supplied = frozenset(s for s in supplied if not _needs_rounds(s))
    if not len(federation.server_validation) or not task.has_classes:
        supplied = frozenset(s for s in supplied if not isinstance(s.how, OnServer))
    if not task.has_classes:
        supplied = frozenset(s for s in supplied if not _needs_classes(s))
    return supplied if federation.validation.any() else frozenset(s for s in supplied if not s.held_out)


def _computed() -> frozenset[Signal]:
    """Return the signals whose values the simulator can compute, in a round's report or as an answer."""
    return QUERY_SIGNALS | {s for s in Signal.all() if s.reported and (s.unaided or s.how is not None)}


def _needs_rounds(signal: Signal) -> bool:
    compared = isinstance(signal.how, VectorOf) and signal.how.take.endswith("distance")
    return compared or isinstance(signal.how, OnServer) or signal in (Signal.KEPT, Signal.TRIAL_QUERY)


def _needs_classes(signal: Signal) -> bool:
    return signal.pseudo or signal.width == "classes" or signal in (Signal.LABEL_COUNTS, Signal.LABEL_PRODUCTS)


def check_fits(plan: RunPlan) -> None:
    """Refuse a run whose parts need classes or a loss that its task does not have."""
    task, where = plan.task, f"the task {plan.task.name!r} of run {plan.id!r}"
    if plan.local.loss == "robust" and not task.fast:
        raise InputError(
            f"The robust loss needs a classifier's cross-entropies; {where} has the loss {task.loss!r}.",
            hint="leave out local.loss, or task.loss",
        )
    if task.has_classes:
        return
    scenario = plan.scenario
    parts = {
        f"The partition {scenario.partition.name!r} divides by class": scenario.partition.by_class,
        "Label noise changes classes": scenario.noise.changes,
        "The view 'relabel' changes classes": RELABEL in scenario.shift.views,
        "The availability 'class-biased' depends on classes": isinstance(scenario.availability, ClassBiased),
        f"The filter {plan.filter.name!r} judges predicted classes": Need.LOGITS in plan.filter.needs,
        f"The aggregator {plan.aggregator.name!r} learns from predicted classes": plan.aggregator.needs_server,
        f"The label sharing {plan.labels.name!r} is about classes": plan.labels.name not in ("counts", "none"),
    }
    for what, needed in parts.items():
        if needed:
            raise InputError(
                f"{what}, and {where} predicts {task.predicts}.",
                hint="partitions without classes are 'iid', 'natural' and 'custom'" if "partition" in what else None,
            )
    supplied = frozenset(s for s in _computed() if not _needs_classes(s)) | {Signal.SIZES}
    for signal in sorted(adapt_selector(plan, supplied).requires):
        if _needs_classes(signal):
            raise SignalError(
                f"The selector {plan.selector.name!r} of run {plan.id!r} requires the signal '{signal}' "
                f"({signal.meaning}), which the task {task.name!r} does not supply: it predicts {task.predicts}.",
                hint="choose a selector that needs no labels; 'fedcohort list selectors' names what each needs",
            )


def adapt_selector(plan: RunPlan, supplied: frozenset[Signal]) -> Selector[Any]:
    """Return a run's selector, adapted to the signals that are supplied."""
    name = SELECTORS.reference(type(plan.selector)) or plan.selector.name
    with user_code_errors(f"The selector {name!r} cannot adapt to the signals that are supplied", name):
        found: object = plan.selector.adapt(supplied)
    if not isinstance(found, Selector):
        raise InputError(
            f"The selector {name!r} must return a selector from adapt(), itself or another. Got {short_repr(found)}."
        )
    return found


def check_plan(plan: RunPlan, federation: Federation) -> None:
    """Refuse an impossible run before any long work starts."""
    supplied = TABLE_SIGNALS | host_signals(federation, plan.task, plan.options.mode == "async")
    for signal in sorted(adapt_selector(plan, supplied).requires):
        if signal.reported and signal not in _computed():
            raise SignalError(
                f"The selector {plan.selector.name!r} of run {plan.id!r} requires the signal '{signal}' "
                f"({signal.meaning}), which the simulator cannot compute.",
                hint="declare it with how=LossOf(...), VectorOf(...) or OnServer(...); if only a client can measure "
                "it, run the selector on Flower, on FLARE or in your own loop",
            )
    size = plan.options.size
    if size is not None and size > len(federation):
        raise InputError(
            f"The cohort of run {plan.id!r} is {size} clients, its federation has {len(federation)}.",
            hint='lower run.cohort, or set it to "all"',
        )
    if plan.options.deadline is not None and plan.scenario.deadline is not None:
        raise InputError(
            f"Run {plan.id!r} has two deadlines: run.deadline is {plan.options.deadline!r}, scenario.deadline is "
            f"{plan.scenario.deadline:g} s.",
            hint="leave one of them out",
        )
    if plan.options.late == "count":
        _check_late(plan)
    if plan.rules is not None and size is not None:
        _check_rules(plan, plan.rules, federation, size)
    if not federation.validation.any():
        _check_needs_no_validation(plan)
    if not len(federation.server_validation):
        _check_needs_no_server(plan)


def _check_rules(plan: RunPlan, rules: Rules, federation: Federation, size: int) -> None:
    names, rounds = federation.names, plan.options.rounds
    rules.check_feasible(names, size, rounds)
    short = rules.shortages(dict.fromkeys(names, 0), size, rounds)
    if short:
        raise InputError(
            f"The rules of run {plan.id!r} cannot be kept: {short[0]}.",
            hint="change [rules], run.rounds or run.cohort",
        )


def _check_needs_no_validation(plan: RunPlan) -> None:
    hint = "set scenario.validation, for example to 0.1"
    for signal in sorted(plan.selector.requires):
        if signal.held_out:
            raise SignalError(
                f"The selector of run {plan.id!r} requires the signal '{signal}', but the clients hold out no data.",
                hint=hint,
            )
    if plan.options.patience is not None:
        raise InputError(
            f"The early stop of run {plan.id!r} watches validation losses, but the clients hold out no data.",
            hint=hint,
        )


def _check_needs_no_server(plan: RunPlan) -> None:
    if Need.LOGITS in plan.filter.needs:
        raise InputError(
            f"The filter {plan.filter.name!r} of run {plan.id!r} validates models at the server, which holds no data.",
            hint="set scenario.server_validation, the number of samples of each class to keep there",
        )
    aggregator = plan.aggregator
    if aggregator.needs_server and aggregator.public is None:
        raise InputError(
            f"The aggregator {aggregator.name!r} of run {plan.id!r} computes on the server's own samples, and "
            "the server holds none.",
            hint="set scenario.server_validation, the number of samples of each class to keep there",
        )


def _check_late(plan: RunPlan) -> None:
    """Refuse to count late models if the models of a round belong together."""
    aggregator = plan.aggregator
    why = {
        f"the filter {plan.filter.name!r} compares the models of a round": not isinstance(plan.filter, KeepAll),
        f"the aggregator {aggregator.name!r} changes local training by what it remembers": aggregator.corrects
        or aggregator.own_models
        or aggregator.needs_gradients,
        f"the aggregator {aggregator.name!r} needs what clients report": bool(aggregator.requires),
    }
    for reason, found in why.items():
        if found:
            raise InputError(f"Run {plan.id!r} cannot count late models: {reason}.", hint='set run.late to "discard"')


@dataclass(frozen=True, eq=False)
class FederationContext:
    """What all runs on a federation share."""

    federation: Federation
    index: int  # among the engine's federations
    share: FloatArray  # (N,) p_k
    true_counts: FloatArray | None  # (N, B) true labels of the training samples; None without classes
    judge: Judge | None = None  # None if only the whole test set counts
    _label_facts: dict[tuple[LabelSharing, int], LabelKnowledge] = field(default_factory=dict)

    @classmethod
    def of(
        cls, federation: Federation, index: int, has_classes: bool = True, judge: Judge | None = None
    ) -> FederationContext:
        """Compute what runs share."""
        sizes = federation.train_sizes
        share = np.asarray(sizes / max(int(sizes.sum()), 1), np.float64)
        counts = federation.label_counts(part="train", true=True).astype(np.float64) if has_classes else None
        return cls(federation, index, share, counts, judge)

    def label_facts(self, labels: LabelSharing, seed: int) -> LabelKnowledge:
        """Return what clients share about their labels; computed once for all runs that need the same."""
        if self.true_counts is None:
            return LabelKnowledge(None)
        key = (labels, seed)
        if key not in self._label_facts:
            counts = self.federation.label_counts(part="train").astype(np.int64)
            self._label_facts[key] = labels.share(counts, streams.stream(seed, streams.LABELS))
        return self._label_facts[key]

    def table(self, labels: LabelSharing, seed: int) -> ClientTable:
        """Return what selectors may know of the federation: names, sizes, and labels in the form that is shared."""
        federation = self.federation
        facts = self.label_facts(labels, seed)
        return ClientTable(names=federation.client_names, sizes=federation.train_sizes, labels=facts.labels)


class Run:
    """A run and everything about it that changes, except its model, which is a row of the group's tensor."""

    def __init__(
        self,
        plan: RunPlan,
        row: int,
        context: FederationContext,
        numbers: int,
        trainable: int,
        classes: int,
        before: FederationContext | None = None,
    ) -> None:
        self.plan = plan
        self.row = row  # of the group's models
        self._before, self._after = before, context  # before a drift the clients hold other samples
        self.federation = federation = context.federation
        self.session: Session
        self.memory: Memory | None = None
        self.server: ServerSamples | None = None  # if the aggregator computes on the server's samples
        self.state = "running"
        self.reason = ""
        self.round = 0
        self.clock = 0.0  # simulated seconds
        self.participation = Participation(len(federation))
        self.engines: tuple[tuple[int, str], ...] = ()  # the kinds of engine, each with its first round
        options, local = plan.options, plan.local
        # A simulated round always counts: without any reply, the global model stays as it is.
        deadline = options.deadline or plan.scenario.deadline
        self.policy = Policy(
            size=options.size,
            spares=options.spares,
            deadline=deadline,
            leave_out_slow=options.leave_out_slow,
            late=options.late,
            min_replies=0,
        )
        self.late = LateUpdates() if options.late == "count" else None
        self.pace: Pace | None = None  # how long clients took, for an automatic deadline
        self.rounds = options.rounds
        self.eval_every = options.eval_every
        self.aggregator: Aggregator = plan.aggregator
        self.trainable = trainable  # how many of a model's numbers are parameters; running statistics follow
        whole = plan.aggregator.whole_models or plan.aggregator.needs_server
        self.averaged = numbers if whole else trainable  # how many the aggregator sees
        self.filter = None if isinstance(plan.filter, KeepAll) else plan.filter
        self.always = isinstance(plan.scenario.availability, Always)
        self.devices = plan.scenario.devices
        self.roster: OnlineDevices | None = None  # which devices are online, unless all always are
        self.begins = 0.0  # when this round begins: with devices, as soon as a client is online
        self.instant = (
            isinstance(plan.scenario.latency, NoLatency) and not plan.scenario.failure and self.devices is None
        )
        self.selector = adapt_selector(plan, self.table.signals | self.signals)
        self._params = values_of(self.selector)
        self.judged_by = plan.task.judged_by
        sizes = federation.train_sizes
        largest = int(sizes.max(initial=0))
        # By size, not by client: a million clients have a few hundred sizes.
        distinct, place = np.unique(sizes, return_inverse=True)
        steps = np.array([local.steps_for(int(n), largest) for n in distinct], np.int64)
        self.steps: IntArray = steps[place]  # (N,) usual local steps
        self.costs = CostModel.of(
            numbers, sizes, federation.validation, self.steps * np.minimum(sizes, local.batch_size), classes
        )
        self.early_stop = None if options.patience is None else EarlyStop(patience=options.patience)
        self.watch = LossTrend()
        self.needed = frozenset(s for s in self.selector.requires if s.reported) | plan.aggregator.requires
        if self.early_stop is not None:
            self.needed |= frozenset(self.early_stop.watches)
        self.before, self.after = losses_of(self.needed, "received"), losses_of(self.needed, "own")
        self.updates, self.gradients = vectors_of(self.needed, "update"), vectors_of(self.needed, "gradient")
        self.wants_gradients = bool(self.gradients) or plan.aggregator.needs_gradients

    @property
    def selector_label(self) -> str:
        """The selector, as messages name it."""
        return f"the selector {self.plan.selector.name!r}"

    @property
    def aggregator_label(self) -> str:
        """The aggregator, as messages name it."""
        return f"the aggregator {self.aggregator.name!r}"

    @property
    def has_session(self) -> bool:
        """Whether it has a session; a run has none if its selector failed before the first round."""
        return hasattr(self, "session")

    @property
    def running(self) -> bool:
        """Whether the run is not over."""
        return self.state == "running"

    @property
    def context(self) -> FederationContext:
        """What all runs on this federation share, as it is in this round."""
        drift = self.plan.scenario.drift
        return self._after if self._before is None or drift is None or self.round >= drift.at else self._before

    @property
    def table(self) -> ClientTable:
        """What the session knows about clients before the first round."""
        return self.context.table(self.plan.labels, self.plan.seed)

    @property
    def signals(self) -> frozenset[Signal]:
        """What the simulator supplies in reports and answers."""
        return host_signals(self.federation, self.plan.task, self.plan.options.mode == "async")

    def start_session(self, journal: Path | None) -> None:
        """Start the run's session."""
        # Not what other runs declare: this journal must open where their files are not imported.
        used = self.selector.requires.union(SIGNALS, *(shadow.requires for shadow in self.plan.shadows.values()))
        self.session = Session(
            self.selector,
            self.table,
            seed=self.plan.seed,
            signals=self.signals & used,
            journal=journal,
            shadows=self.plan.shadows,
            rules=self.plan.rules,
            commit="manual",
            asynchronous=self.plan.options.mode == "async",
        )
        self.update_attributes()
        self._read_pace()

    def _read_pace(self) -> None:
        if self.policy.deadline == "auto":
            self.pace = Pace.of(self.session)

    def update_attributes(self, *, changing: bool = False) -> None:
        """Give the rules what clients say about themselves now; with ``changing``, only what can change."""
        if self.plan.rules is None:
            return
        names = self.session.table.names
        attributes = self.plan.scenario.client_attributes(
            names, seed=self.plan.seed, round=self.round, changing=changing
        )
        if attributes:
            self.session.set_attributes(attributes)

    def resume_session(self, journal: Path | None, at: Savepoint) -> None:
        """Continue the run's session from a checkpoint; shadows that had failed before stay out."""
        assert journal is not None
        shadows = {name: shadow for name, shadow in self.plan.shadows.items() if name in at.shadows}
        self.session = Session.open(
            journal, self.selector, shadows=shadows, rules=self.plan.rules, commit="manual", at=at
        )
        self._read_pace()

    def wait(self) -> BoolArray | None:
        """Wait until a client is online, and return which clients are (N,); None means everybody.

        ``begins`` is then that time, or infinity if nobody will ever be online again.
        """
        self.begins = self.clock
        if self.devices is None or self.devices.always_on:
            return None
        if self.roster is None:
            self.roster = OnlineDevices(self.devices, len(self.federation), seed=self.plan.seed, time=self.clock)
        self.begins = self.roster.wait(self.clock)
        return self.roster.on

    def seconds(self, clients: IntArray, work: FloatArray | float, transfer: float) -> FloatArray:
        """Return how many simulated seconds (k,) these clients need for some work and for sending some bytes."""
        if self.instant:
            return np.zeros(len(clients))
        if self.devices is not None:
            return self.devices.durations(clients, self.costs.samples(clients, work), transfer, seed=self.plan.seed)
        return self.plan.scenario.seconds(self.federation, clients, seed=self.plan.seed, round=self.round, work=work)

    def events(self, cohort: Cohort, begins: float) -> RoundEvents:
        """Return how long each client of a cohort works that begins at ``begins``, and which clients fail."""
        plan, costs, clients = self.plan, self.costs, cohort.clients
        work = costs.round_work(clients, cohort.work, self.needed, self.aggregator.needs_gradients)
        if self.devices is None:
            # Clients draw by round, so all selectors meet the same latencies; without rounds, by ticket.
            draw = cohort.ticket if self.session.asynchronous else self.round
            return plan.scenario.events(self.federation, clients, seed=plan.seed, round=draw, work=work)
        copies = self.aggregator.model_copies
        return plan.scenario.timed_events(
            self.federation,
            clients,
            seed=plan.seed,
            ticket=cohort.ticket,
            time=begins,
            samples=costs.samples(clients, work),
            transfer=copies * costs.model_bytes + costs.upload(self.needed, copies),
        )

    def local_steps(self, clients: IntArray, work: FloatArray | None) -> IntArray:
        """Return the local steps (k,) of ``clients``: the usual number times their ``work``, at least one."""
        usual = self.steps[clients]
        if work is None:
            return usual
        scaled = np.floor(usual * work + 0.5).astype(np.int64)
        return np.where(usual > 0, np.maximum(scaled, 1), 0)

    def combine(self, old: Any, models: Any, members: Members, *, trial: bool = False) -> Combined:
        """Return the next global model; a trial leaves no trace in the aggregator's memory."""
        # Averaging does not change corrections, and a copy of all clients' corrections would be large.
        memory = copy.deepcopy(self.memory) if trial and not self.aggregator.corrects else self.memory
        server = None if self.server is None else self.server.in_round(self.plan.seed, self.round)
        n = self.averaged
        found = self.aggregator.combine(old[:n], models[:, :n], members, memory, server)
        found = fitting(found, Combined, members, old[:n])
        if n == len(old):
            return found
        statistics = Mix(found.weights, found.old).convex().of(old[n:], models[:, n:])
        return dataclasses.replace(found, model=torch.cat([found.model, statistics]))

    def base(self, models: Any) -> Any:
        """Return what updates (..., P) are added to: ``models`` with zeros for statistics, which are replaced."""
        if self.trainable == models.shape[-1]:
            return models
        base = models.clone()
        base[..., self.trainable :] = 0.0
        return base

    def mix(self, members: Members) -> Mix:
        """Return the weights of an aggregator that computes a weighted sum."""
        assert isinstance(self.aggregator, WeightedSum)
        return fitting(self.aggregator.mix(members), Mix, members)

    def corrections(self, clients: IntArray, like: Any) -> Any:
        """Return what is added to every local gradient of ``clients`` (k, P); ``like`` is a model (P,)."""
        if not isinstance(self.memory, Corrections):
            raise InputError(f"Its memory must be Corrections, because it says 'corrects'. Got {self.memory!r}.")
        found = _vectors("corrections", self.memory.corrections(clients), clients, like[: self.averaged])
        return _with_statistics(found, 0.0 * like[self.averaged :])

    def starts(self, clients: IntArray, like: Any) -> Any:
        """Return the models that ``clients`` train from (k, P); ``like`` is a model (P,)."""
        if not isinstance(self.memory, OwnModels):
            raise InputError(f"Its memory must be OwnModels, because it says 'own_models'. Got {self.memory!r}.")
        found = _vectors("starts", self.memory.starts(clients), clients, like[: self.averaged])
        return _with_statistics(found, like[self.averaged :])

    def rate_sums(self, steps: IntArray, clients: IntArray, begun: IntArray) -> FloatArray:
        """Return the sum of learning rates (k,) over the local steps of each client in the round in which it began."""
        local, sizes = self.plan.local, self.federation.train_sizes
        if local.lr_decay_epoch == 1.0:
            return np.asarray(steps * self.rates_at(begun), np.float64)
        if local.epochs_of_largest is not None:
            batches = [local.batches_per_epoch(int(sizes.max()))] * len(clients)
        else:
            batches = [local.batches_per_epoch(int(sizes[c])) for c in clients]
        rows = zip(begun.tolist(), steps.tolist(), batches, strict=True)
        return np.array([local.lr_schedule(*row).sum() for row in rows], np.float64)

    def rates_at(self, rounds: IntArray) -> FloatArray:
        """Return the learning rate (k,) of the first step in each of ``rounds``."""
        distinct, place = np.unique(rounds, return_inverse=True)
        return np.array([self.plan.local.lr_at(int(round_)) for round_ in distinct], np.float64)[place]

    def end(self, state: str, reason: str = "") -> None:
        """Mark the run as over."""
        self.state, self.reason = state, reason

    def is_last(self, clock: float) -> bool:
        """Whether this round, which ends at ``clock``, is the last one."""
        limit = self.plan.options.seconds
        return self.round + 1 >= self.rounds or (limit is not None and clock >= limit)

    def end_if_over(self) -> None:
        """Mark the run as over if this was its last round, or its simulated time is up."""
        if self.round + 1 >= self.rounds:
            self.end("finished")
        elif self.is_last(self.clock):
            self.end("stopped", f"its {self.plan.options.seconds:g} simulated seconds are over")

    def info(self, federation_key: str) -> RunInfo:
        """Return the run's entry for runs.json."""
        plan = self.plan
        return RunInfo(
            id=plan.id,
            selector=plan.selector.name,
            label=plan.label,
            seed=plan.seed,
            setting={**({"name": plan.setting_name} if plan.setting_name else {}), **plan.setting},
            params=self._params,
            federation=federation_key,
            state=self.state,
            reason=self.reason,
            rounds_done=self.round,
            engines=self.engines,
        )

    def facts(self) -> dict[str, Any]:
        """Return the values to keep in a checkpoint."""
        watch = None if self.early_stop is None else [_or_none(v) for v in dataclasses.astuple(self.watch)]
        return {
            "round": self.round,
            "clock": self.clock,
            "state": self.state,
            "reason": self.reason,
            "watch": watch,
            "engines": self.engines,
            **({} if self.late is None else {"late": self.late.facts()}),
        }

    def restore(self, facts: dict[str, Any]) -> None:
        """Restore the values from :meth:`facts`."""
        self.round, self.clock = int(facts["round"]), float(facts["clock"])
        self.state, self.reason = str(facts["state"]), str(facts["reason"])
        self.engines = parse_engines(facts["engines"])
        if has_rounds_left(facts, self.rounds):
            self.state = "running"  # also if it had finished and now has more rounds
        if facts["watch"] is not None:
            training, validation, streak = facts["watch"]
            nan = float("nan")
            self.watch = LossTrend(
                nan if training is None else training, nan if validation is None else validation, streak
            )


def _vectors(what: str, found: Any, clients: IntArray, like: Any) -> Any:
    """Return one vector like ``like`` for each client, if that is what an aggregator's memory gave."""
    wanted = (len(clients), len(like))
    if type(found) is not type(like) or tuple(found.shape) != wanted:
        raise InputError(
            f"Its {what} must be a {type(like).__name__} of shape {wanted}. Got {type(found).__name__} of "
            f"shape {np.shape(found)}."
        )
    return found


def _with_statistics(models: torch.Tensor, statistics: torch.Tensor) -> torch.Tensor:
    """Append running statistics (s,) to each of ``models`` (..., T)."""
    if not len(statistics):
        return models
    return torch.cat([models, statistics.expand(*models.shape[:-1], -1)], -1)


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else value
