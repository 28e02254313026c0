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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedcohort.core.arrays import BoolArray, FloatArray
from fedcohort.core.protocol import Cohort, Query, Status
from fedcohort.core.signals import Signal
from fedcohort.hosts.flow import Flow, FlowPolicy, batch_seed
from fedcohort.simulate.rounds.batch import received, zero_nonfinite
from fedcohort.simulate.rounds.group import Group, OnRound, of_run
from fedcohort.simulate.rounds.isolate_failure import selector_errors
from fedcohort.simulate.rounds.queries import answer
from fedcohort.simulate.rounds.run import Run
from fedcohort.simulate.rounds.turn import Turn

_OK, _FAILED = int(Status.OK), int(Status.FAILED)


@dataclass
class _Job:
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
    def untrained(self) -> bool:
        """Whether it will answer and has not been trained."""
        return self.status == _OK and self.model is None


class _Flight:
    """A run's work in progress: its flow, the clients at work, and the models they started from."""

    def __init__(self, run: Run) -> None:
        options = run.plan.options
        assert options.size is not None
        self.run, self.roster = run, run.roster
        self.flow = Flow(
            run.session, FlowPolicy(options.size, options.buffer, options.period, options.max_answers), run.clock
        )
        self.jobs: dict[int, _Job] = {}  # by ticket
        self.models: dict[int, torch.Tensor] = {}  # by version, those that untrained clients start from
        self.queue: list[tuple[float, int]] = []  # when each answers, and its ticket
        self.begin_model()

    def begin_model(self) -> None:
        """Start to record what belongs to the next model."""
        self.since = self.run.clock
        self.turn = Turn(self.run)
        self.answered: dict[int, _Job] = {}  # by ticket, the answers for it
        self.begun: list[int] = []  # clients that started from the newest model
        self.durations: list[float] = []  # how long they work
        # Old global models are kept only for clients that still have to be trained from them.
        needed = {job.cohort.round for job in self.jobs.values() if job.untrained}
        self.models = {version: model for version, model in self.models.items() if version in needed}

    def add(self, job: _Job) -> None:
        """Start a client."""
        self.jobs[job.cohort.ticket] = job
        # By time, and then by ticket: clients that answer at the same moment do so in the order in which they began.
        heapq.heappush(self.queue, (job.begins + job.seconds, job.cohort.ticket))

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

    def answer(self) -> None:
        """Record that the first client in the queue has answered or failed."""
        _, ticket = heapq.heappop(self.queue)
        job, turn, run = self.jobs.pop(ticket), self.turn, self.run
        status = Status.FAILED if job.status == _FAILED else Status.OK if job.valid else Status.INVALID
        with turn.selecting:
            used = self.flow.receive(ticket, status, job.signals)
        if used:
            self.answered[ticket] = job
        if job.status == _OK:
            turn.cost.bytes_up += run.costs.upload(run.needed, run.aggregator.model_copies)
        turn.cost.client_seconds += job.seconds


class AsynchronousGroup(Group):
    """Asynchronous runs that share a dataset, a model and a batch shape. A step is one new model for each run."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._flights: dict[int, _Flight] = {}  # by row of the run

    def _flight(self, run: Run) -> _Flight:
        if run.row not in self._flights:
            self._flights[run.row] = _Flight(run)
        return self._flights[run.row]

    # -- saving and continuing -----------------------------------------------------------------------------------

    def _arrays(self, run: Run) -> dict[str, Any]:
        """Add the clients at work, and the models they need."""
        arrays = super()._arrays(run)
        if run.row not in self._flights:
            return arrays
        flight = self._flights[run.row]
        jobs = list(flight.jobs.values())
        trained = [job for job in jobs if job.model is not None]
        integers = [(j.cohort.ticket, j.cohort.round, j.status, j.steps, j.model is not None, j.valid) for j in jobs]
        found: dict[str, Any] = {
            "integers": np.array(integers, np.int64).reshape(len(jobs), 6),
            "numbers": np.array([(job.begins, job.seconds) for job in jobs], np.float64).reshape(len(jobs), 2),
            "since": np.array([flight.since]),
            "versions": np.array(list(flight.models), np.int64),
        }
        if flight.models:
            found["models"] = torch.stack(list(flight.models.values())).cpu().numpy()
        if trained:
            found["trained"] = torch.stack([job.model for job in trained if job.model is not None]).cpu().numpy()
            for signal in trained[0].signals:
                found[f"signal/{signal}"] = np.concatenate([job.signals[signal] for job in trained])
        return arrays | {f"flight/{run.row}/{name}": value for name, value in found.items()}

    def _resume_run(self, run: Run, facts: dict[str, Any], arrays: Mapping[str, Any]) -> None:
        super()._resume_run(run, facts, arrays)
        found = of_run(arrays, "flight", run)
        if not found:
            return
        flight, device = self._flight(run), self.models.device
        flight.since = float(found["since"][0])
        versions = found["versions"].tolist()
        flight.models = {v: torch.tensor(found["models"][i], device=device) for i, v in enumerate(versions)}
        # The cohorts themselves are in the journal; the checkpoint has what only the simulator knows.
        pending = {cohort.ticket: cohort for cohort in flight.flow.at_work}
        names = [name for name in found if name.startswith("signal/")]
        at = 0
        rows = zip(found["integers"].tolist(), found["numbers"].tolist(), strict=True)
        for (ticket, _, status, steps, trained, valid), (begins, seconds) in rows:
            job = _Job(pending[ticket], begins, seconds, status, steps, valid=bool(valid))
            if trained:
                job.model = torch.tensor(found["trained"][at], device=device)
                job.signals = {Signal.by_name(n.removeprefix("signal/")): found[n][at : at + 1] for n in names}
                at += 1
            flight.add(job)

    # -- one model of each run -----------------------------------------------------------------------------------

    def _step(self, runs: Sequence[Run], on_round: OnRound | None) -> None:
        for run in runs:
            run.update_attributes(changing=True)
        waiting = list(runs)
        # Each run plays until a model is due or the next answer is from an untrained client. Then all untrained clients
        # are trained in one batch, and the runs that waited for them continue.
        while waiting:
            untrained: list[Run] = []
            for run in waiting:
                due = False
                with selector_errors(run):
                    due = self._play(run)
                if run.running and not due:
                    untrained.append(run)
            if untrained:
                self._train_jobs(untrained)
            waiting = untrained
        updated = [run for run in runs if run.running and self._aggregate(run)]
        scores = self._score([run for run in updated if run.is_due(run.clock)])
        for run in updated:
            flight = self._flight(run)
            used = flight.flow.advance(run.clock)
            columns = {
                # In rounds, seconds are added up; here they pass between two models.
                "seconds": run.clock - flight.since,
                "available": len(run.federation) if flight.roster is None else int(flight.roster.on.sum()),
                "durations": np.array(flight.durations),
                "answers": [one.ticket for one in used],
                "weights": flight.turn.weights,
            }
            run.participation.add(run.round, np.array(flight.begun, np.int64))
            clients = np.array([one.client for one in used], np.int64)
            turn, score = flight.turn, scores.get(run.row)
            flight.begin_model()
            self._finish(turn, score, run.session.round - 1, clients, columns, on_round)

    def _play(self, run: Run) -> bool:
        """Play events; return True when a model is due, False when the next answer is from an untrained client."""
        flight = self._flight(run)
        while not flight.flow.is_due(run.clock):
            self._begin_all(run, flight)
            if not run.running:
                return False
            moment = flight.next_event()
            if moment == np.inf:
                reason = "the rules admit nobody" if flight.available().any() else "no client is online"
                run.end("stopped", f"{reason} after {run.clock:.0f} s")
                return False
            if flight.queue and flight.queue[0][0] <= moment:
                if flight.jobs[flight.queue[0][1]].untrained:
                    return False  # the clock stays: after training, this event is played again
                run.clock = moment
                flight.answer()
            run.clock = moment
            if flight.roster is not None:
                flight.roster.advance(run.clock)
        return True

    def _begin_all(self, run: Run, flight: _Flight) -> None:
        """Start clients while there are free places and available clients."""
        while flight.flow.free and run.running:
            available = flight.available()
            if not available.any():
                break
            with flight.turn.selecting:
                query = flight.flow.open(available)
            if flight.flow.excluded:
                break
            cohort, begins = self._choose(run, flight, available, query)
            if cohort.stop is not None:
                run.end("stopped", cohort.stop)
            # A selector may wait for busy clients. It would answer the same until one of them is back.
            if not cohort.size:
                break
            durations, status = run.events(cohort, begins)
            steps = run.local_steps(cohort.clients, cohort.work)
            flight.add(_Job(cohort, begins, float(durations[0]), int(status[0]), int(steps[0])))
            # A copy: the next model overwrites the group's row, perhaps before this client is trained.
            if cohort.round not in flight.models:
                flight.models[cohort.round] = self.models[run.row].clone()
            flight.turn.cost.bytes_down += run.aggregator.model_copies * run.costs.model_bytes
            flight.begun += cohort.clients.tolist()
            flight.durations += durations.tolist()

    def _choose(self, run: Run, flight: _Flight, available: BoolArray, query: Query | None) -> tuple[Cohort, float]:
        """Return one more client as a cohort, and when it begins: after the selector's question is answered."""
        asked = Turn(run)
        asked.available, asked.query = available, query
        if query is not None:
            answer(self.batch, [asked])
            flight.turn.cost.add(asked.cost)
        with flight.turn.selecting:
            return flight.flow.choose(asked.answer), run.clock + asked.cost.query_seconds

    def _train_jobs(self, runs: Sequence[Run]) -> None:
        """Train all clients at work that will answer, in one batch, and compute the signals for their selectors."""
        flights = [self._flight(run) for run in runs]
        jobs = [[job for job in flight.jobs.values() if job.untrained] for flight in flights]
        clients = [np.array([job.client for job in part], np.int64) for part in jobs]
        models = [flight.models[job.cohort.round] for flight, part in zip(flights, jobs, strict=True) for job in part]
        starts = (torch.stack(models), np.arange(len(models)))  # every client starts from its own model
        every = [(run, job) for run, part in zip(runs, jobs, strict=True) for job in part]
        trained = self.batch.train(
            runs,
            clients,
            np.array([batch_seed(run.plan.seed, job.cohort.ticket) for run, job in every]),
            np.array([job.steps for _, job in every]),
            starts,
            np.array([job.cohort.round for _, job in every]),
        )
        params, valid = zero_nonfinite(trained.params)
        turns, start = [], 0
        for run, part, ids in zip(runs, jobs, clients, strict=True):
            turn = Turn(run)
            turn.clients, turn.jobs = ids, slice(start, start + len(ids))
            turn.valid = valid[turn.jobs]
            turn.seconds = np.array([job.seconds for job in part])
            turns.append(turn)
            start = turn.jobs.stop
        self.batch.signals(turns, params, starts)
        for run, part, turn in zip(runs, jobs, turns, strict=True):
            own = params[turn.jobs]
            if not run.aggregator.mixes_models:
                own = own - run.base(received(starts, turn.jobs))
            for i, job in enumerate(part):
                job.model, job.valid = own[i].clone(), bool(turn.valid[i])
                job.signals = {signal: values[i : i + 1] for signal, values in turn.signals.items()}

    def _aggregate(self, run: Run) -> bool:
        """Make the next model from the answers; return whether that worked."""
        flight = self._flight(run)
        used = [flight.answered[one.ticket] for one in flight.flow.waiting]
        old = self.models[run.row]
        models = torch.stack([job.model for job in used if job.model is not None])
        if not run.aggregator.mixes_models:
            models = models + run.base(old)
        weights = [1.0 if job.cohort.weights is None else float(job.cohort.weights[0]) for job in used]
        described = run.members(
            np.array([job.client for job in used], np.int64),
            np.array([job.steps for job in used], np.int64),
            np.array(weights),
            {signal: np.concatenate([job.signals[signal] for job in used]) for signal in run.aggregator.requires},
            np.array([flight.flow.staleness(one) for one in flight.flow.waiting], np.float64),
        )
        combined = run.combine(old, models, described)
        if combined is None:
            return False
        self.models[run.row], flight.turn.weights = combined.model, np.asarray(combined.weights, np.float64)
        return True
