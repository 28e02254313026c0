"""Asynchronous runs: events instead of rounds, at the speed of lock-step.

Each run plays its own events: clients start, answer or fail, and new global models appear.
:class:`~fedcohort.hosts.flow.Flow` and the scenario decide what happens when, and neither needs a trained model. So a
run continues until the next answer is from a client that is not trained yet. Then all clients at work, in all runs of
the group, are trained in one batch, although they start from different models and will answer at different times. On
the CPU the result is the same as if each client were trained alone.

A step of the group is one new global model for every run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.errors import InputError, SelectorError
from fedcohort.core.protocol import Answer, Cohort, Query, Status
from fedcohort.core.signals import Signal
from fedcohort.hosts.flow import Flow, FlowPolicy, batch_seed
from fedcohort.scenario.availability import Always
from fedcohort.scenario.devices import OnlineDevices
from fedcohort.session.validation import check_one_at_a_time
from fedcohort.simulate.config.experiment import RunPlan
from fedcohort.simulate.engine import Jobs, TrainingResult
from fedcohort.simulate.rounds.batch import Batch, zero_nonfinite
from fedcohort.simulate.rounds.costs import RoundCost
from fedcohort.simulate.rounds.group import Group, OnRound, finite_score, is_due, measurements
from fedcohort.simulate.rounds.isolate_failure import fail_selector, isolate_failure
from fedcohort.simulate.rounds.judge import ModelScore
from fedcohort.simulate.rounds.queries import answer
from fedcohort.simulate.rounds.run import Run
from fedcohort.simulate.rounds.turn import Stopwatch, Turn, members
from fedcohort.simulate.store.checkpoint import Checkpoint
from fedcohort.training.filters import KeepAll

_OK, _FAILED = int(Status.OK), int(Status.FAILED)
_INTEGERS = ("ticket", "version", "status", "steps", "trained", "valid")
_NUMBERS = ("begins", "seconds")


def check_asynchronous(plan: RunPlan) -> None:
    """Refuse a run with parts that work only in rounds."""
    options, scenario, aggregator = plan.options, plan.scenario, plan.aggregator
    check_one_at_a_time(True, plan.selector)
    wrong = {
        'run.cohort is "all"; it is how many clients work at the same time': options.size is None,
        "run.patience watches rounds": options.patience is not None,
        "run.spares belong to rounds": options.spares > 0,
        "scenario.deadline closes rounds": scenario.deadline is not None,
        "run.deadline closes rounds": options.deadline is not None,
        "run.late is about rounds": options.late != "discard",
        f"the availability {scenario.availability.name!r} is a function of the round": not isinstance(
            scenario.availability, Always
        ),
        f"the filter {plan.filter.name!r} judges the models of a round": not isinstance(plan.filter, KeepAll),
        f"the aggregator {aggregator.name!r} changes local training by what it remembers": aggregator.corrects
        or aggregator.own_models
        or aggregator.needs_gradients,
    }
    for what, found in wrong.items():
        if found:
            raise InputError(
                f"Run {plan.id!r} is asynchronous, and {what}.",
                hint='set run.mode to "sync", or leave that out; [scenario.devices] says which clients are online when',
            )


@dataclass
class Job:
    """One client at work.

    Attributes
    ----------
    cohort : Cohort
        This client's cohort; its round is the number of the model it started from.
    begins, seconds : float
        When it started, and how long it works until it answers or fails.
    status : int
        OK or FAILED.
    steps : int
        Its local steps.
    model : tensor (P,) or None
        After training: its model if the aggregator mixes models, otherwise its update.
    valid : bool
        Whether its model is finite.
    signals : dict of Signal to (1,) or (1, V) array
    """

    cohort: Cohort
    begins: float
    seconds: float
    status: int
    steps: int
    model: torch.Tensor | None = None
    valid: bool = True
    signals: dict[Signal, FloatArray] = field(default_factory=dict)

    @property
    def client(self) -> int:
        """The client's index."""
        return int(self.cohort.clients[0])

    @property
    def answers_with(self) -> Status:
        """The status that is reported to the session."""
        return Status.FAILED if self.status == _FAILED else Status.OK if self.valid else Status.INVALID


class Flight:
    """A run's work in progress: its flow, the clients at work, and the models they started from."""

    def __init__(self, run: Run) -> None:
        options = run.plan.options
        assert options.size is not None
        self.run = run
        self.flow = Flow(
            run.session, FlowPolicy(options.size, options.buffer, options.period, options.max_answers), run.clock
        )
        self.roster: OnlineDevices | None = None
        if run.devices is not None and not run.devices.always_on:
            self.roster = OnlineDevices(run.devices, len(run.federation), seed=run.plan.seed, time=run.clock)
        self.jobs: dict[int, Job] = {}  # by ticket
        self.models: dict[int, torch.Tensor] = {}  # by version, those that untrained clients start from
        self.answered: dict[int, Job] = {}  # by ticket, the answers for the next model
        self.queue: list[tuple[float, int]] = []  # when each answers, and its ticket
        self.cost = RoundCost()
        self.selecting = Stopwatch()
        self.begun: list[int] = []  # clients that started from the newest model
        self.durations: list[float] = []  # how long they work
        self.weights: FloatArray = np.empty(0)  # of the answers in the newest model
        self.since = run.clock

    def add(self, job: Job) -> None:
        """Start a client."""
        self.jobs[job.cohort.ticket] = job
        heapq.heappush(self.queue, (job.begins + job.seconds, job.cohort.ticket))

    @property
    def untrained(self) -> list[Job]:
        """Clients at work that will answer and have not been trained."""
        return [job for job in self.jobs.values() if job.status == _OK and job.model is None]

    def available(self) -> BoolArray:
        """Return which clients (N,) are online and not at work."""
        free: BoolArray = ~self.flow.busy
        return free if self.roster is None else self.roster.on & free

    def next_event(self) -> float:
        """Return the time of the next event; infinity if there is none."""
        moments = [self.queue[0][0]] if self.queue else []
        if self.flow.waiting:
            moments.append(self.flow.due_at)
        if self.roster is not None and self.flow.free:
            moments.append(self.roster.next)
        return min(moments, default=np.inf)


class FlowBatch(Batch):
    """A batch in which every client starts from its own model."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._starts: dict[tuple[int, int], torch.Tensor] = {}  # by row of the run, and client

    def received(self, run: Run, clients: IntArray) -> torch.Tensor:
        """Return the models (k, P) that ``clients`` of a run train from."""
        return torch.stack([self._starts[run.row, client] for client in clients.tolist()])

    def _received(self, runs: Sequence[Run], clients: Sequence[IntArray]) -> tuple[torch.Tensor, IntArray]:
        models = torch.cat([self.received(run, part) for run, part in zip(runs, clients, strict=True)])
        return models, np.arange(len(models))

    def train_jobs(self, runs: Sequence[Run], jobs: Sequence[Sequence[Job]], flights: Mapping[int, Flight]) -> None:
        """Train ``jobs[i]`` of ``runs[i]``, all in one batch, and compute the signals that their selectors declared."""
        self._starts = {
            (run.row, job.client): flights[run.row].models[job.cohort.round]
            for run, run_jobs in zip(runs, jobs, strict=True)
            for job in run_jobs
        }
        clients = [np.array([job.client for job in run_jobs], np.int64) for run_jobs in jobs]
        trained = self._trained(runs, jobs, clients)
        params, valid = zero_nonfinite(trained.params)
        turns, start = [], 0
        for run, run_jobs, part in zip(runs, jobs, clients, strict=True):
            place = slice(start, start + len(part))
            turn = Turn(run)
            turn.clients, turn.jobs, turn.valid = part, place, valid[place]
            turn.seconds = np.array([job.seconds for job in run_jobs])
            turns.append(turn)
            start = place.stop
        self.signals(turns, params)
        for run, run_jobs, turn in zip(runs, jobs, turns, strict=True):
            models = params[turn.jobs]
            if not run.aggregator.mixes_models:
                models = models - run.base(self.received(run, turn.clients))
            for i, job in enumerate(run_jobs):
                job.model, job.valid = models[i].clone(), bool(turn.valid[i])
                job.signals = {signal: values[i : i + 1] for signal, values in turn.signals.items()}
        self._starts = {}

    def _trained(
        self, runs: Sequence[Run], jobs: Sequence[Sequence[Job]], clients: Sequence[IntArray]
    ) -> TrainingResult:
        models, rows = self._received(runs, clients)
        lengths = [len(part) for part in clients]
        pairs = [(run, job) for run, run_jobs in zip(runs, jobs, strict=True) for job in run_jobs]
        work = Jobs(
            run=rows,
            federation=np.repeat([run.context.index for run in runs], lengths),
            client=np.concatenate(clients),
            round=np.array([job.cohort.round for _, job in pairs]),
            seed=np.array([batch_seed(run.plan.seed, job.cohort.ticket) for run, job in pairs]),
            steps=np.array([job.steps for _, job in pairs]),
        )
        return self.engine.train(models, work, prox=self._prox)


class AsynchronousGroup(Group):
    """Asynchronous runs that share a dataset, a model and a batch shape. A step is one new model for each run."""

    batch_class = FlowBatch
    batch: FlowBatch

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._flights: dict[int, Flight] = {}  # by row of the run

    def _flight(self, run: Run) -> Flight:
        if run.row not in self._flights:
            self._flights[run.row] = Flight(run)
        return self._flights[run.row]

    # -- saving and continuing -----------------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """Return everything that is needed to continue, including the clients at work and their models."""
        saved = super().checkpoint()
        arrays = dict(saved.arrays)
        for run in self.runs:
            if run.row in self._flights:
                prefix = f"flight/{run.row}/"
                arrays |= {prefix + name: value for name, value in _packed(self._flights[run.row]).items()}
        return Checkpoint(saved.round, saved.facts, arrays)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint, with the same clients at work."""
        super().resume(checkpoint)
        for run in self.runs:
            prefix = f"flight/{run.row}/"
            found = {k.removeprefix(prefix): v for k, v in checkpoint.arrays.items() if k.startswith(prefix)}
            if run.has_session and found:
                _unpack(self._flight(run), found, self.models)

    # -- one model of each run -----------------------------------------------------------------------------------

    def _step(self, runs: Sequence[Run], on_round: OnRound | None) -> None:
        for run in runs:
            run.update_attributes(changing=True)
        waiting: list[Run] = list(runs)
        ready: list[Run] = []
        # Each run plays until a model is due or the next answer is from an untrained client. Then all untrained clients
        # are trained in one batch, and the runs that waited for them continue.
        while waiting:
            untrained: list[Run] = []
            for run in waiting:
                try:
                    due = self._play(run)
                except SelectorError as error:
                    fail_selector(run, error)
                if run.running:
                    (ready if due else untrained).append(run)
            if untrained:
                self.batch.train_jobs(untrained, [self._flight(run).untrained for run in untrained], self._flights)
            waiting = untrained
        updated = [run for run in runs if run in ready and self._aggregate(run)]
        scores = self._score({run.row: run for run in updated if is_due(run, run.clock)})
        for run in updated:
            self._report(run, scores.get(run.row), on_round)

    def _play(self, run: Run) -> bool:
        """Play events; return True when a model is due, False when the next answer is from an untrained client."""
        flight = self._flight(run)
        flow, roster = flight.flow, flight.roster
        while True:
            if flow.is_due(run.clock):
                return True
            self._begin_all(run, flight)
            if not run.running:
                return False
            moment = flight.next_event()
            if moment == np.inf:
                reason = "the rules admit nobody" if flight.available().any() else "no client is online"
                run.end("stopped", f"{reason} after {run.clock:.0f} s")
                return False
            if flight.queue and flight.queue[0][0] <= moment:
                job = flight.jobs[flight.queue[0][1]]
                if job.status == _OK and job.model is None:
                    return False  # the clock stays: after training, this event is played again
                run.clock = moment
                self._answer(run, flight, job)
            run.clock = moment
            if roster is not None:
                roster.advance(run.clock)

    def _begin_all(self, run: Run, flight: Flight) -> None:
        """Start clients while there are free places and available clients."""
        while flight.flow.free and run.running:
            available = flight.available()
            if not available.any():
                break
            with flight.selecting:
                query = flight.flow.open(available)
            if flight.flow.excluded:
                break
            if not self._begin(run, flight, available, query):
                break

    def _begin(self, run: Run, flight: Flight, available: BoolArray, query: Query | None) -> bool:
        """Choose one more client and start it; return False if the selector leaves the place free."""
        known, seconds = self._answer_query(run, flight, available, query)
        with flight.selecting:
            cohort = flight.flow.choose(known)
        if cohort.stop is not None:
            run.end("stopped", cohort.stop)
        # A selector may wait for busy clients. It would answer the same until one of them is back.
        if not cohort.size:
            return False
        clients = cohort.clients
        begins = run.clock + seconds
        events = run.events(cohort, begins)
        steps = run.local_steps(clients, cohort.work)
        flight.add(Job(cohort, begins, float(events.durations[0]), int(events.status[0]), int(steps[0])))
        # A copy: the next model overwrites the group's row, perhaps before this client is trained.
        if cohort.round not in flight.models:
            flight.models[cohort.round] = self.models[run.row].clone()
        flight.cost.bytes_down += run.aggregator.model_copies * run.costs.model_bytes
        flight.begun += clients.tolist()
        flight.durations += events.durations.tolist()
        return True

    def _answer_query(
        self, run: Run, flight: Flight, available: BoolArray, query: Query | None
    ) -> tuple[Answer | None, float]:
        """Return the answer to a selector's question and how long it took, and book its cost."""
        if query is None:
            return None, 0.0
        turn = Turn(run, available, query)
        answer(self.batch, [turn])
        cost, total = turn.cost, flight.cost
        total.asked += cost.asked
        total.query_bytes_down += cost.query_bytes_down
        total.query_bytes_up += cost.query_bytes_up
        total.query_seconds += cost.query_seconds
        total.query_client_seconds += cost.query_client_seconds
        return turn.answer, cost.query_seconds

    def _answer(self, run: Run, flight: Flight, job: Job) -> None:
        """Record that a client has answered or failed."""
        heapq.heappop(flight.queue)
        ticket = job.cohort.ticket
        del flight.jobs[ticket]
        with flight.selecting:
            used = flight.flow.receive(ticket, job.answers_with, job.signals)
        if used:
            flight.answered[ticket] = job
        if job.status == _OK:
            flight.cost.bytes_up += run.costs.upload(run.needed, run.aggregator.model_copies)
        flight.cost.client_seconds += job.seconds

    # -- a new model ---------------------------------------------------------------------------------------------

    def _aggregate(self, run: Run) -> bool:
        """Make the next model from the answers; return whether that worked."""
        flight = self._flight(run)
        flow = flight.flow
        used = [flight.answered[one.ticket] for one in flow.waiting]
        old = self.models[run.row]
        models = torch.stack([job.model for job in used if job.model is not None])
        if not run.aggregator.mixes_models:
            models = models + run.base(old)
        weights = [1.0 if job.cohort.weights is None else float(job.cohort.weights[0]) for job in used]
        described = members(
            run,
            np.array([job.client for job in used], np.int64),
            np.array([job.steps for job in used], np.int64),
            np.array(weights),
            {signal: np.concatenate([job.signals[signal] for job in used]) for signal in run.aggregator.requires},
            np.array([flow.staleness(one) for one in flow.waiting], np.float64),
        )
        combined = isolate_failure(run, run.aggregator_label, run.combine, old, models, described)
        if combined is None:
            return False
        self.models[run.row], flight.weights = combined.model, np.asarray(combined.weights, np.float64)
        return True

    def _report(self, run: Run, score: ModelScore | None, on_round: OnRound | None) -> None:
        """Report to the session, add a row of measurements, and end the run if it is over."""
        flight = self._flight(run)
        used = flight.flow.advance(run.clock)
        version = run.session.round - 1
        finite = finite_score(score)
        self._record_score(run, version, finite)
        run.participation.add(run.round, np.array(flight.begun, np.int64))
        clients = np.array([one.client for one in used], np.int64)
        row = {
            **measurements(run, finite, flight.cost, clients),
            "seconds": run.clock - flight.since,
            "available": len(run.federation) if flight.roster is None else int(flight.roster.on.sum()),
            "selection_seconds": flight.selecting.seconds,
            "durations": np.array(flight.durations),
            "answers": [one.ticket for one in used],
            "weights": flight.weights,
        }
        self._rows.add(row)
        flight.cost, flight.since, flight.answered = RoundCost(), run.clock, {}
        flight.begun, flight.durations, flight.selecting = [], [], Stopwatch()
        # Old global models are kept only for clients that still have to be trained from them.
        needed = {job.cohort.round for job in flight.untrained}
        flight.models = {version: model for version, model in flight.models.items() if version in needed}
        if score is not None and finite is None:
            run.end("diverged", f"the global model's test loss became NaN or infinite in round {run.round}")
        else:
            run.end_if_over()
        run.round += 1
        if on_round is not None:
            on_round(run.info(self._keys[run.row]), row)


# -- checkpoints ----------------------------------------------------------------------------------------------------


def _packed(flight: Flight) -> dict[str, Any]:
    """Return the clients at work and the models they need, as arrays."""
    jobs = list(flight.jobs.values())
    trained = [job for job in jobs if job.model is not None]
    columns = [
        (job.cohort.ticket, job.cohort.round, job.status, job.steps, job.model is not None, job.valid) for job in jobs
    ]
    arrays: dict[str, Any] = {
        "integers": np.array(columns, np.int64).reshape(len(jobs), len(_INTEGERS)),
        "numbers": np.array([(job.begins, job.seconds) for job in jobs], np.float64).reshape(len(jobs), len(_NUMBERS)),
        "since": np.array([flight.since]),
        "versions": np.array(list(flight.models), np.int64),
    }
    if flight.models:
        arrays["models"] = torch.stack(list(flight.models.values())).cpu().numpy()
    if trained:
        arrays["trained"] = torch.stack([job.model for job in trained if job.model is not None]).cpu().numpy()
        for signal in trained[0].signals:
            arrays[f"signal/{signal}"] = np.concatenate([job.signals[signal] for job in trained])
    return arrays


def _unpack(flight: Flight, arrays: Mapping[str, Any], like: torch.Tensor) -> None:
    """Restore what :func:`_packed` returned."""
    as_model: Callable[[Any], torch.Tensor] = partial(torch.as_tensor, device=like.device)
    flight.since = float(arrays["since"][0])
    if len(arrays["versions"]):
        flight.models = {int(v): as_model(m).clone() for v, m in zip(arrays["versions"], arrays["models"], strict=True)}
    pending = {cohort.ticket: cohort for cohort in flight.flow.at_work}
    at = 0
    for (ticket, _, status, steps, trained, valid), (begins, seconds) in zip(
        arrays["integers"].tolist(), arrays["numbers"].tolist(), strict=True
    ):
        job = Job(pending[ticket], begins, seconds, status, steps, valid=bool(valid))
        if trained:
            job.model = as_model(arrays["trained"][at]).clone()
            names = [name for name in arrays if name.startswith("signal/")]
            job.signals = {Signal.by_name(n.removeprefix("signal/")): arrays[n][at : at + 1] for n in names}
            at += 1
        flight.add(job)
