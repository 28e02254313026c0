"""One run of a lock-step group: its session, its federation, its clock."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from fedcohort.core import rng as streams
from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError
from fedcohort.core.protocol import Cohort
from fedcohort.core.signals import SIGNALS, Signal, losses_of, vectors_of
from fedcohort.hosts.pace import Pace
from fedcohort.hosts.round import Policy
from fedcohort.journal import Savepoint
from fedcohort.scenario import Federation
from fedcohort.scenario.availability import Always
from fedcohort.scenario.devices import OnlineDevices
from fedcohort.scenario.latency import NoLatency
from fedcohort.scenario.scenario import RoundEvents
from fedcohort.session.session import Session
from fedcohort.simulate.config.experiment import RunPlan, values_of
from fedcohort.simulate.engine import Engine
from fedcohort.simulate.label_sharing import LabelKnowledge, LabelSharing
from fedcohort.simulate.metrics import Participation
from fedcohort.simulate.rounds.checks import adapt_selector, host_signals
from fedcohort.simulate.rounds.costs import CostModel
from fedcohort.simulate.rounds.isolate_failure import isolate_failure
from fedcohort.simulate.rounds.judge import Judge
from fedcohort.simulate.rounds.late import LateUpdate
from fedcohort.simulate.store.checkpoint import has_rounds_left
from fedcohort.simulate.store.results import RunInfo, parse_engines
from fedcohort.training.aggregators import (
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
from fedcohort.training.filters import KeepAll

if TYPE_CHECKING:
    from fedcohort.simulate.rounds.server import ServerSamples, Validation


T = TypeVar("T")


class FederationContext:
    """What all runs on a federation share.

    Parameters
    ----------
    index : int
        Among the engine's federations.
    judge : Judge, optional
        None if only the whole test set counts.

    Attributes
    ----------
    share : (N,) float array
        p_k
    true_counts : (N, B) float array or None
        True labels of the training samples.
    """

    def __init__(
        self, federation: Federation, index: int = 0, has_classes: bool = True, judge: Judge | None = None
    ) -> None:
        self.federation, self.index, self.judge = federation, index, judge
        sizes = federation.train_sizes
        self.share: FloatArray = np.asarray(sizes / max(int(sizes.sum()), 1), np.float64)
        self.true_counts: FloatArray | None = None
        if has_classes:
            self.true_counts = federation.label_counts(part="train", true=True).astype(np.float64)
        self._label_facts: dict[tuple[LabelSharing, int], LabelKnowledge] = {}

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

    session: Session  # missing if the selector failed before the first round

    def __init__(
        self,
        plan: RunPlan,
        row: int,
        context: FederationContext,
        before: FederationContext | None,
        engine: Engine,
    ) -> None:
        self.plan = plan
        self.row = row  # of the group's models
        self._before, self._after = before, context  # before a drift the clients hold other samples
        self.federation = federation = context.federation
        self.memory: Memory | None = None
        self.server: ServerSamples | None = None  # if the aggregator computes on the server's samples
        self.validation: Validation | None = None  # if the server has a validation set
        self.state, self.reason = "running", ""
        self.round = 0
        self.clock = 0.0  # simulated seconds
        self.participation = Participation(len(federation))
        self.engines: tuple[tuple[int, str], ...] = ()  # the kinds of engine, each with its first round
        options, local = plan.options, plan.local
        # A simulated round always counts: without any reply, the global model stays as it is.
        self.policy = Policy(
            size=options.size,
            spares=options.spares,
            deadline=options.deadline or plan.scenario.deadline,
            leave_out_slow=options.leave_out_slow,
            late=options.late,
            min_replies=0,
        )
        self.late: list[LateUpdate] = []  # models that wait for a later round
        self.pace: Pace | None = None  # how long clients took, for an automatic deadline
        self.aggregator = plan.aggregator
        self.trainable = engine.n_trainable  # how many of a model's numbers are parameters; running statistics follow
        whole = plan.aggregator.whole_models or plan.aggregator.needs_server
        self.averaged = engine.n_params if whole else self.trainable  # how many the aggregator sees
        self.filter = None if isinstance(plan.filter, KeepAll) else plan.filter
        self.devices = plan.scenario.devices
        self._roster: OnlineDevices | None = None
        self.begins = 0.0  # when this round begins: with devices, as soon as a client is online
        # Then no times and failures are drawn at all.
        self.instant = (
            isinstance(plan.scenario.latency, NoLatency) and not plan.scenario.failure and self.devices is None
        )
        # A selector may adapt to what there is, so it must be known before the session.
        self._supplied = host_signals(federation, plan)  # in reports and answers
        self.table = self.context.table(plan.labels, plan.seed)  # what the session knows before the first round
        self.selector = adapt_selector(plan, self.table.signals | self._supplied)
        self.judged_by = plan.task.judged_by
        train = federation.train_sizes
        # By size, not by client: a million clients have a few hundred sizes.
        distinct, place = np.unique(train, return_inverse=True)
        largest = int(train.max(initial=0))
        steps = np.array([local.steps_for(int(n), largest) for n in distinct], np.int64)
        self.steps: IntArray = steps[place]  # (N,) usual local steps
        passed = self.steps * np.minimum(train, local.batch_size)
        self.costs = CostModel(engine.n_params, train, federation.validation, passed, engine.classes)
        self.early_stop = None if options.patience is None else EarlyStop(patience=options.patience)
        self.watch = LossTrend()
        # What clients report: for the selector, for the aggregator, for the early stop.
        self.needed = frozenset(s for s in self.selector.requires if s.reported) | plan.aggregator.requires
        if self.early_stop is not None:
            self.needed |= frozenset(self.early_stop.watches)
        self.before, self.after = losses_of(self.needed, "received"), losses_of(self.needed, "own")
        self.updates, self.gradients = vectors_of(self.needed, "update"), vectors_of(self.needed, "gradient")
        self.wants_gradients = bool(self.gradients) or plan.aggregator.needs_gradients

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

    # -- the session -------------------------------------------------------------------------------------------

    def start_session(self, journal: Path | None) -> None:
        """Start the run's session."""
        # Not what other runs declare: this journal must open where their files are not imported.
        used = self.selector.requires.union(SIGNALS, *(shadow.requires for shadow in self.plan.shadows.values()))
        self.session = Session(
            self.selector,
            self.table,
            seed=self.plan.seed,
            signals=self._supplied & used,
            journal=journal,
            shadows=self.plan.shadows,
            rules=self.plan.rules,
            commit="manual",
            asynchronous=self.plan.options.mode == "async",
        )
        self.update_attributes()
        self.pace = Pace.of(self.session) if self.policy.deadline == "auto" else None

    def resume_session(self, journal: Path, at: Savepoint) -> None:
        """Continue the run's session from a checkpoint; shadows that had failed before stay out."""
        shadows = {name: shadow for name, shadow in self.plan.shadows.items() if name in at.shadows}
        self.session = Session.open(
            journal, self.selector, shadows=shadows, rules=self.plan.rules, commit="manual", at=at
        )
        self.pace = Pace.of(self.session) if self.policy.deadline == "auto" else None

    def update_attributes(self, *, changing: bool = False) -> None:
        """Give the rules what clients say about themselves now; with ``changing``, only what can change."""
        if self.plan.rules is None:
            return
        attributes = self.plan.scenario.client_attributes(
            self.session.table.names, seed=self.plan.seed, round=self.round, changing=changing
        )
        if attributes:
            self.session.set_attributes(attributes)

    # -- clients and time --------------------------------------------------------------------------------------

    @property
    def roster(self) -> OnlineDevices | None:
        """Which devices are online, since the clock of its first use; None if all always are."""
        if self._roster is None and self.devices is not None and not self.devices.always_on:
            self._roster = OnlineDevices(self.devices, len(self.federation), seed=self.plan.seed, time=self.clock)
        return self._roster

    def wait(self) -> BoolArray | None:
        """Wait until a client is online, and return which clients can take part (N,); None means everybody.

        ``begins`` is then that time, or infinity if nobody will ever be online again.
        """
        self.begins = self.clock
        if self.roster is not None:
            self.begins = self.roster.wait(self.clock)
            return self.roster.on
        if isinstance(self.plan.scenario.availability, Always) or self.devices is not None:
            return None
        return self.plan.scenario.available(self.federation, seed=self.plan.seed, round=self.round)

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
        # With devices, sending takes time too: the model, what the aggregator adds, and the signals.
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

    # -- the aggregator ----------------------------------------------------------------------------------------

    def _ask_aggregator(self, work: Callable[..., T], *arguments: Any) -> T | None:
        """Call the own code of the aggregator; None if it raised, which ends the run."""
        return isolate_failure(self, f"the aggregator {self.aggregator.name!r}", work, *arguments)

    def remember(self, model: torch.Tensor) -> None:
        """Give the aggregator its memory before the first round."""
        self.memory = self._ask_aggregator(self.aggregator.memory, len(self.federation), model[: self.averaged])

    def members(
        self,
        clients: IntArray,
        steps: IntArray,
        multiplicity: FloatArray | None = None,
        metrics: dict[Signal, FloatArray] | None = None,
        staleness: FloatArray | None = None,
    ) -> Members:
        """Describe models to the aggregator.

        Parameters
        ----------
        clients : (j,) int array
        steps : (j,) int array
            Local steps of each client.
        multiplicity : (j,) float array, optional
            How often each model counts. Default: once.
        metrics : dict of Signal to (j,) array, optional
            The signals that the aggregator requires.
        staleness : (j,) float array, optional
            How many new global models there were while each client trained. Default: none.
        """
        staleness = np.zeros(len(clients)) if staleness is None else staleness
        local, sizes = self.plan.local, self.federation.train_sizes
        begun = self.round - staleness.astype(np.int64)
        distinct, place = np.unique(begun, return_inverse=True)
        first_rates = np.array([local.lr_at(int(round_)) for round_ in distinct], np.float64)[place]
        rates = np.asarray(steps * first_rates, np.float64)  # the sum of learning rates over each client's steps
        if local.lr_decay_epoch != 1.0:
            owners = clients if local.epochs_of_largest is None else np.full(len(clients), sizes.argmax())
            batches = [local.batches_per_epoch(int(sizes[c])) for c in owners]
            rows = zip(begun.tolist(), steps.tolist(), batches, strict=True)
            rates = np.array([local.lr_schedule(*row).sum() for row in rows], np.float64)
        return Members(
            clients=clients,
            share=self.context.share[clients],
            steps=steps.astype(np.float64),
            federation=len(self.federation),
            multiplicity=np.ones(len(clients)) if multiplicity is None else multiplicity,
            momentum=local.momentum,
            rates=rates,
            metrics=metrics or {},
            round=self.round,
            staleness=staleness,
            decay=local.lr_at(self.round) / first_rates,
        )

    def mix(self, members: Members) -> Mix | None:
        """Return the weights of an aggregator that computes a weighted sum; None if it raised."""
        assert isinstance(self.aggregator, WeightedSum)
        mix = self.aggregator.mix
        return self._ask_aggregator(lambda: fitting(mix(members), Mix, members))

    def combine(
        self, old: torch.Tensor, models: torch.Tensor, members: Members, *, trial: bool = False
    ) -> Combined | None:
        """Return the next global model, or None if the aggregator raised; a trial leaves no trace in its memory."""
        # Averaging does not change corrections, and a copy of all clients' corrections would be large.
        memory = copy.deepcopy(self.memory) if trial and not self.aggregator.corrects else self.memory
        server = None if self.server is None else self.server.in_round(self.plan.seed, self.round)
        n = self.averaged

        def work() -> Combined:
            found = self.aggregator.combine(old[:n], models[:, :n], members, memory, server)
            found = fitting(found, Combined, members, old[:n])
            if n == len(old):
                return found
            statistics = Mix(found.weights, found.old).convex().of(old[n:], models[:, n:])
            return dataclasses.replace(found, model=torch.cat([found.model, statistics]))

        return self._ask_aggregator(work)

    def base(self, models: torch.Tensor) -> torch.Tensor:
        """Return what updates (..., P) are added to: ``models`` with zeros for statistics, which are replaced."""
        if self.trainable == models.shape[-1]:
            return models
        base = models.clone()
        base[..., self.trainable :] = 0.0
        return base

    def corrections(self, clients: IntArray, model: torch.Tensor) -> torch.Tensor:
        """Return what is added to every local gradient of ``clients`` (k, P); zeros if the aggregator raised."""
        found = self._of_memory("corrections", "corrects", Corrections, clients, model, 0.0 * model)
        return model.new_zeros(len(clients), len(model)) if found is None else found

    def starts(self, clients: IntArray, model: torch.Tensor) -> torch.Tensor | None:
        """Return the models that ``clients`` train from (k, P); None if the aggregator raised."""
        return self._of_memory("starts", "own_models", OwnModels, clients, model, model)

    def _of_memory(
        self, what: str, says: str, kind: type[Memory], clients: IntArray, like: torch.Tensor, rest: torch.Tensor
    ) -> torch.Tensor | None:
        """Return one vector like ``like`` for each client from a method of the memory, with the statistics of ``rest``.

        ``says`` is what the aggregator says of itself when its memory is of this kind.
        """
        n = self.averaged

        def work() -> torch.Tensor:
            if not isinstance(self.memory, kind):
                raise InputError(f"Its memory must be {kind.__name__}, because it says {says!r}. Got {self.memory!r}.")
            found = getattr(self.memory, what)(clients)
            wanted = (len(clients), n)
            if type(found) is not type(like) or tuple(found.shape) != wanted:
                raise InputError(
                    f"Its {what} must be a {type(like).__name__} of shape {wanted}. Got {type(found).__name__} of "
                    f"shape {np.shape(found)}."
                )
            return found if n == len(like) else torch.cat([found, rest[n:].expand(len(clients), -1)], -1)

        return self._ask_aggregator(work)

    def absorb(
        self, clients: IntArray, old: torch.Tensor, models: torch.Tensor, steps: IntArray, gradients: Any
    ) -> None:
        """Let an aggregator such as SCAFFOLD learn from models (k, P), including those that the filter dropped."""
        assert isinstance(self.memory, Corrections)
        n, rates = self.averaged, self.members(clients, steps).rates
        gradients = None if gradients is None else gradients[:, :n]
        self._ask_aggregator(self.memory.absorb, clients, old[:n], models[:, :n], rates, gradients)

    # -- the end -----------------------------------------------------------------------------------------------

    def end(self, state: str, reason: str = "") -> None:
        """Mark the run as over."""
        self.state, self.reason = state, reason

    def is_due(self, clock: float) -> bool:
        """Whether a test is due after this round, which ends at ``clock``."""
        return self.is_last(clock) or (self.round + 1) % self.plan.options.eval_every == 0

    def is_last(self, clock: float) -> bool:
        """Whether this round, which ends at ``clock``, is the last one."""
        limit = self.plan.options.seconds
        return self.round + 1 >= self.plan.options.rounds or (limit is not None and clock >= limit)

    def end_if_over(self) -> None:
        """Mark the run as over if this was its last round, or its simulated time is up."""
        if self.round + 1 >= self.plan.options.rounds:
            self.end("finished")
        elif self.is_last(self.clock):
            self.end("stopped", f"its {self.plan.options.seconds:g} simulated seconds are over")

    def info(self, federation_key: str) -> RunInfo:
        """Return the run's entry for runs.json."""
        new = run_info(self.plan, federation_key)
        return dataclasses.replace(
            new,
            params=values_of(self.selector),
            state=self.state,
            reason=self.reason,
            rounds_done=self.round,
            engines=self.engines,
        )

    def facts(self) -> dict[str, Any]:
        """Return the values to keep in a checkpoint."""
        facts: dict[str, Any] = {
            "round": self.round,
            "clock": self.clock,
            "state": self.state,
            "reason": self.reason,
            "watch": None,
            "engines": self.engines,
        }
        if self.early_stop is not None:
            facts["watch"] = [None if math.isnan(v) else v for v in self.watch]
        if self.policy.late == "count":
            facts["late"] = [one[:-1] for one in self.late]  # without the update, which is an array
        return facts

    def restore(self, facts: dict[str, Any], late: torch.Tensor | None = None) -> None:
        """Restore the values from :meth:`facts`, with the updates (l, P) of late models."""
        self.round, self.clock = int(facts["round"]), float(facts["clock"])
        self.state, self.reason = str(facts["state"]), str(facts["reason"])
        self.engines = parse_engines(facts["engines"])
        if has_rounds_left(facts, self.plan.options.rounds):
            self.state = "running"  # also if it had finished and now has more rounds
        if facts["watch"] is not None:
            training, validation, streak = facts["watch"]
            training, validation = (math.nan if value is None else value for value in (training, validation))
            self.watch = LossTrend(training, validation, streak)
        if late is not None:
            self.late = [LateUpdate._make([*row, update]) for row, update in zip(facts["late"], late, strict=True)]


def run_info(plan: RunPlan, federation_key: str) -> RunInfo:
    """Return the entry of a run that has not begun."""
    return RunInfo(
        id=plan.id,
        selector=plan.selector.name,
        label=plan.label,
        seed=plan.seed,
        setting={**({"name": plan.setting_name} if plan.setting_name else {}), **plan.setting},
        params=values_of(plan.selector),
        federation=federation_key,
    )
