"""Runs in lock-step: the jobs of all runs of a group are one batch in every round.

The order of a round is the same as for every host: requests, questions, cohorts, training, filter, average, evaluation,
reports. The models are one tensor (R, P) on the engine's device. A round takes a few tensor operations and one
transfer, however many runs there are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedcohort.core import rng
from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.errors import OtherEngineError
from fedcohort.core.protocol import Status
from fedcohort.core.signals import OnServer, Signal
from fedcohort.core.vectors import needs_output_layer, output_layer
from fedcohort.hosts.round import Round, late_discount
from fedcohort.journal import Savepoint
from fedcohort.journal.events import LATE_COUNTED
from fedcohort.scenario import Federation
from fedcohort.simulate.config.experiment import RunPlan
from fedcohort.simulate.engine import Engine
from fedcohort.simulate.metrics import Participation, imbalance
from fedcohort.simulate.own_code import OwnCodeError
from fedcohort.simulate.rounds.batch import Batch, Starts, received, zero_nonfinite
from fedcohort.simulate.rounds.isolate_failure import fail, isolate_failure, own_parts, selector_errors
from fedcohort.simulate.rounds.judge import ModelScore, Views, score_models
from fedcohort.simulate.rounds.late import LateUpdate, counting
from fedcohort.simulate.rounds.queries import answer
from fedcohort.simulate.rounds.run import FederationContext, Run
from fedcohort.simulate.rounds.server import ServerSamples, Validation, coalition_utilities, server_samples
from fedcohort.simulate.rounds.turn import Turn
from fedcohort.simulate.store.checkpoint import Checkpoint
from fedcohort.simulate.store.parts import to_table
from fedcohort.simulate.store.results import RunInfo
from fedcohort.training.aggregators import Corrections, WeightedSum
from fedcohort.training.filters import Need, Replies, checked_decision

if TYPE_CHECKING:
    import pyarrow as pa

    from fedcohort.simulate.data import Dataset

log = logging.getLogger(__name__)
_BEFORE = " before"  # ends the key of what the clients of a federation hold before a drift
OnRound = Callable[[RunInfo, Mapping[str, Any]], None]


class Group:
    """Runs that share a dataset, a model and a batch shape.

    Parameters
    ----------
    keys : sequence of str
        Each plan's federation, a key of ``federations``.
    journals : Path, optional
        Folder for the sessions' journals; None keeps them in memory.
    allow_other_engine : bool
        Whether :meth:`resume` accepts a checkpoint of another kind of engine.
    """

    def __init__(
        self,
        plans: Sequence[RunPlan],
        keys: Sequence[str],
        dataset: Dataset,
        federations: Mapping[str, Federation],
        *,
        journals: Path | None = None,
        device: str = "auto",
        workers: int | None = None,
        allow_other_engine: bool = False,
    ) -> None:
        self._keys = list(keys)
        self._allow_other_engine = allow_other_engine
        self._journals = journals
        used = {key: federations[key] for key in keys}
        for plan, key in zip(plans, keys, strict=True):  # what clients hold before a drift is a federation too
            before = plan.scenario.before(federations[key], seed=plan.seed)
            if before is not None:
                used[f"{key}{_BEFORE}"] = before
        first = plans[0]
        task = first.task
        views = Views(dataset, list(used.values()))
        self.engine = Engine(
            dataset.x_train,
            dataset.y_train,
            dataset.x_test,
            dataset.y_test,
            classes=dataset.outputs,
            federations=[views.client_data(federation) for federation in used.values()],
            model=first.model.name,
            local=first.local,
            device=device,
            workers=workers,
            precision=first.options.precision,
            task=task,
            copies=views.copies,
        )
        contexts: dict[str, FederationContext] = {}
        validations: dict[str, Validation] = {}
        for i, (key, federation) in enumerate(used.items()):
            judge = None
            # Groups of clients are compared only by accuracy.
            if task.has_classes and task.judged_by.is_accuracy and federation.groups is not None:
                # Before a drift, models are judged by what clients need after it.
                judge = views.judge(used[key.removesuffix(_BEFORE)])
            contexts[key] = FederationContext(federation, i, task.has_classes, judge)
            if len(federation.server_validation):
                validations[key] = Validation(self.engine, federation.server_validation, dataset.y_train)
        self.runs = [
            Run(plan, i, contexts[key], contexts.get(f"{key}{_BEFORE}"), self.engine)
            for i, (plan, key) in enumerate(zip(plans, keys, strict=True))
        ]
        # All selectors of a seed start from the same model, so only their choice of clients makes a difference.
        fresh = {seed: self.engine.init(seed) for seed in dict.fromkeys(plan.seed for plan in plans)}
        models = torch.stack([fresh[plan.seed] for plan in plans])
        needed = frozenset[Signal]().union(*(run.needed for run in self.runs))
        output = output_layer(self.engine.shapes, dataset.classes) if needs_output_layer(needed) else None
        self.batch = Batch(self.engine, models, first.aggregator.prox, output)
        servers: dict[tuple[int, str | None], ServerSamples] = {}
        for run, key in zip(self.runs, keys, strict=True):
            run.remember(self.models[run.row])
            run.validation = validations.get(key)
            if run.aggregator.needs_server:
                public = run.aggregator.public
                shared = (-1 if public is not None else run.context.index, public)
                if shared not in servers:
                    positions = run.federation.server_validation.astype(np.int64)
                    servers[shared] = server_samples(self.engine, dataset, positions, public)
                run.server = servers[shared]
        self._rows: list[Mapping[str, Any]] = []  # of the rounds since the last call of drain
        self._shared = own_parts(first)

    @property
    def models(self) -> torch.Tensor:
        """(R, P) global models, one row per run."""
        return self.batch.models

    # -- starting, saving, continuing --------------------------------------------------------------------------

    def begin(self, saved: bytes | None) -> None:
        """Start, or continue from a packed checkpoint."""
        if saved is None:
            self.start()
        else:
            self.resume(Checkpoint.from_bytes(saved))

    def start(self) -> None:
        """Start a new session for every run."""
        for run in self.runs:
            run.engines = ((0, self.engine.kind),)
            with selector_errors(run):
                run.start_session(None if self._journals is None else self._journals / f"{run.plan.id}.sqlite")

    def checkpoint(self) -> Checkpoint:
        """Return everything that is needed to continue after this round."""
        arrays = {"models": self.models.cpu().numpy()}
        for run in self.runs:
            arrays |= self._arrays(run)
        facts = {"runs": {run.plan.id: {**run.facts(), "federation": self._keys[run.row]} for run in self.runs}}
        # Runs that began with more rounds wait for the others, so the farthest one says where the group is.
        return Checkpoint(max(run.round for run in self.runs), facts, arrays)

    def _arrays(self, run: Run) -> dict[str, Any]:
        """Return the arrays of a run, except its model; their names are ``KIND/ROW`` or ``KIND/ROW/NAME``."""
        arrays: dict[str, Any] = {}
        if run.has_session:
            arrays[f"participation/{run.row}"] = run.participation.array()
            arrays[f"session/{run.row}"] = np.frombuffer(run.session.savepoint().to_bytes(), np.uint8)
        if run.late:
            arrays[f"late/{run.row}"] = torch.stack([one.update for one in run.late]).cpu().numpy()
        if run.memory is not None:
            for name, value in run.memory.arrays().items():
                arrays[f"memory/{run.row}/{name}"] = value if isinstance(value, np.ndarray) else value.cpu().numpy()
        return arrays

    def commit(self) -> None:
        """Make everything in the journals durable."""
        for run in self.runs:
            if run.has_session:
                run.session.commit()

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint; what journals hold beyond it is undone."""
        for run in self.runs:
            facts = checkpoint.facts["runs"][run.plan.id]
            if f"session/{run.row}" in checkpoint.arrays:
                self._resume_run(run, facts, checkpoint.arrays)
            else:
                run.restore(facts)  # its selector failed before there was a session

    def _resume_run(self, run: Run, facts: dict[str, Any], arrays: Mapping[str, Any]) -> None:
        assert self._journals is not None
        # The session first: it undoes what its journal has after the savepoint, and the rest must match that state.
        savepoint = Savepoint.from_bytes(arrays[f"session/{run.row}"].tobytes())
        run.resume_session(self._journals / f"{run.plan.id}.sqlite", savepoint)
        late = arrays.get(f"late/{run.row}")
        run.restore(facts, None if late is None else torch.as_tensor(late).to(self.models))
        run.participation = Participation.of(arrays[f"participation/{run.row}"])
        before, now = run.engines[-1][1], self.engine.kind
        if run.running and before != now:
            if not self._allow_other_engine:
                raise other_engine_error(run.plan.id, before, now)
            log.warning("run %s continues from round %d with %s, after %s", run.plan.id, run.round, now, before)
            run.engines = (*run.engines, (run.round, now))
        self.models[run.row] = torch.as_tensor(arrays["models"][run.row])
        if run.memory is not None:
            run.memory.restore(of_run(arrays, "memory", run))

    def infos(self) -> list[RunInfo]:
        """Return the runs' entries for runs.json."""
        return [run.info(key) for run, key in zip(self.runs, self._keys, strict=True)]

    def drain(self) -> pa.Table:
        """Return the rows of ``rounds/`` since the last call."""
        rows, self._rows = self._rows, []
        return to_table(rows)

    @property
    def done(self) -> bool:
        """Whether every run has ended."""
        return not any(run.running for run in self.runs)

    def close(self) -> None:
        """Close the sessions and the engine; what was not committed is lost."""
        for run in self.runs:
            if run.has_session:
                run.session.close()
        self.engine.close()

    # -- one round ---------------------------------------------------------------------------------------------

    def step(self, on_round: OnRound | None = None) -> None:
        """Advance the runs that are furthest behind by one round. These are all, unless some began with more rounds."""
        behind = min(run.round for run in self.runs if run.running)
        runs = [run for run in self.runs if run.running and run.round == behind]
        try:
            self._step(runs, on_round)
        except OwnCodeError as failure:
            # A user's own model, loss or metric is part of every run here. Without one, the error is ours.
            error = failure.__cause__ or failure
            if self._shared is None:
                raise error from None
            for run in runs:
                if run.running:
                    fail(run, self._shared, error)

    def _step(self, runs: Sequence[Run], on_round: OnRound | None) -> None:
        turns = [turn for run in runs if (turn := _open(run)).run.running]
        # All questions before all choices: the answers for all runs are one batch.
        answer(self.batch, turns)
        for turn in turns:
            if turn.run.running:
                with selector_errors(turn.run):
                    _choose(turn)
        self._train([turn for turn in turns if turn.run.running])
        turns = [turn for turn in turns if turn.run.running]
        due = []
        for turn in turns:
            _apply_early_stop(turn)
            # A run that ends here is tested, whatever its interval, so that it has a last score.
            if turn.stop is not None or turn.run.is_due(turn.run.clock + turn.cost.seconds):
                due.append(turn.run)
        scores = self._score(due)
        for turn in turns:
            self._report(turn, scores.get(turn.run.row), on_round)

    def _train(self, turns: Sequence[Turn]) -> None:
        """Train the clients that will answer, compute signals, filter, and average."""
        # Late models that count in a later round are trained now, because the models that they start from are replaced
        # at the end of this round. Their jobs come last, so that those that count now are without gaps.
        late = [turn for turn in turns if turn.run.policy.late == "count" and len(turn.round.late_models)]
        turns = [turn for turn in turns if len(turn.arrived)]
        jobs = [(turn, turn.arrived) for turn in turns] + [(turn, turn.round.late_models) for turn in late]
        if not jobs:
            return
        runs = [turn.run for turn, _ in jobs]
        clients = [turn.cohort.clients[places] for turn, places in jobs]
        # The engine knows the usual steps. They are needed here only if a selector asks for more or less work.
        steps = None
        if any(turn.cohort.work is not None for turn, _ in jobs):
            parts = [
                turn.run.local_steps(ids, None if turn.cohort.work is None else turn.cohort.work[places])
                for (turn, places), ids in zip(jobs, clients, strict=True)
            ]
            steps = np.concatenate(parts)
        seeds = np.repeat([run.plan.seed for run in runs], [len(part) for part in clients])
        starts = self.batch.starts(runs, clients)
        trained = self.batch.train(runs, clients, seeds, steps, starts)
        params, valid = zero_nonfinite(trained.params)
        start = 0
        for turn in turns:
            turn.jobs = slice(start, start + len(turn.clients))
            turn.valid = valid[turn.jobs]
            start = turn.jobs.stop
        for turn in late:
            start = self._keep_late(turn, params, valid, trained.steps, start)
        if not turns:
            return
        gradients = self.batch.signals(turns, params, starts)
        for turn in turns:
            for signal in turn.run.needed:
                if isinstance(signal.how, OnServer):
                    turn.signals[signal] = self._on_server(signal.how, turn, params[turn.jobs])
        new = self._average(turns, params, trained.steps, starts)
        for turn in turns:
            run, good = turn.run, torch.as_tensor(turn.valid, device=params.device)
            if run.running and isinstance(run.memory, Corrections):
                full = gradients[run.row][good] if run.aggregator.needs_gradients else None
                done = trained.steps[turn.jobs][turn.valid]
                run.absorb(turn.clients[turn.valid], self.models[run.row], params[turn.jobs][good], done, full)
        # Only now: signals, filters and corrections need the models that the clients received.
        self.models[torch.as_tensor([turn.run.row for turn in turns], device=self.models.device)] = new
        for turn in turns:
            if not turn.valid.all():
                turn.round.invalidate(turn.arrived[~turn.valid])

    def _keep_late(self, turn: Turn, params: torch.Tensor, valid: BoolArray, steps: IntArray, start: int) -> int:
        """Keep the models from row ``start`` on for the round in which they arrive; return the next row."""
        run, cohort, round_ = turn.run, turn.cohort, turn.round
        for job, place in enumerate(round_.late_models.tolist(), start):
            if valid[job]:
                arrives = round_.begun + float(round_.seconds[place])
                times = 1.0 if cohort.weights is None else float(cohort.weights[place])
                update = params[job] - run.base(self.models[run.row])
                client = int(cohort.clients[place])
                run.late.append(LateUpdate(client, cohort.ticket, run.round, int(steps[job]), arrives, times, update))
        return start + len(round_.late_models)

    def _on_server(self, how: OnServer, turn: Turn, models: torch.Tensor) -> FloatArray:
        """Return a number (m,) for each of the arrived ``models`` (m, P); 0 for models that are not finite."""
        run, old = turn.run, self.models[turn.run.row]
        assert run.validation is not None
        if how.values is None:
            return np.full(len(turn.clients), float(run.validation.losses(old[None])[0]))
        valid = np.flatnonzero(turn.valid)
        new = models[torch.as_tensor(valid, device=models.device)]
        utility = coalition_utilities(run.validation, run.context.share[turn.clients[valid]], old, new)
        values = np.zeros(len(turn.clients))
        generator = rng.stream(run.plan.seed, how.stream, run.round)
        part = f"the selector {run.plan.selector.name!r}"
        found = isolate_failure(run, part, how.measure, utility, len(valid), generator)
        if found is not None:
            values[valid] = found
        # A selector could not recover from NaN in its state.
        return np.where(np.isfinite(values), values, 0.0)

    # -- filter and average ------------------------------------------------------------------------------------

    def _average(self, turns: Sequence[Turn], params: torch.Tensor, steps: IntArray, starts: Starts) -> torch.Tensor:
        """Return the next global models (E, P); the turns get which models are kept, and their weights."""
        shares: list[float] = []  # of the old models
        special: dict[int, torch.Tensor] = {}  # by turn, the models of aggregators that are no weighted sum
        stale: dict[int, torch.Tensor] = {}  # by turn, the weighted sum of late models
        for i, turn in enumerate(turns):
            run, old = turn.run, self.models[turn.run.row]
            turn.kept = kept = self._kept(turn, params, starts)
            turn.weights = np.zeros(len(kept))
            shares.append(1.0)  # without any model, the old one stays
            if not kept.any():
                continue
            late = _take_late(turn)
            members = run.members(*_described(turn, steps[turn.jobs][kept], late))
            # A late update is applied to the current model, because the one it was computed from is gone.
            moved = run.base(old) + torch.stack([one.update for one in late]) if late else params[:0]
            fresh = int(kept.sum())
            if isinstance(run.aggregator, WeightedSum) and run.trainable == len(old):
                mix = run.mix(members)
                if mix is not None:
                    turn.weights[kept], shares[i] = mix.weights[:fresh], mix.old
                    if late:
                        stale[i] = torch.as_tensor(mix.weights[fresh:]).to(moved) @ moved
            else:
                rows = params[turn.jobs][torch.as_tensor(kept, device=params.device)]
                combined = run.combine(old, torch.cat([rows, moved]) if late else rows, members)
                if combined is not None:
                    turn.weights[kept], shares[i] = combined.weights[:fresh], 0.0
                    special[i] = combined.model
        new = self._weighted_sums(turns, params, shares)
        for i, model in special.items():
            new[i] = model
        for i, models in stale.items():
            new[i] += models
        return new

    def _kept(self, turn: Turn, params: torch.Tensor, starts: Starts) -> BoolArray:
        """Return which models (m,) the filter keeps; none if the run has failed."""
        run, good = turn.run, turn.valid
        none = np.zeros(len(good), np.bool_)
        if not run.running or run.filter is None:
            return good if run.running else none
        validation = run.validation if Need.LOGITS in run.filter.needs else None
        replies = Replies(
            good,
            updates=lambda: (params[turn.jobs] - received(starts, turn.jobs))[:, : run.trainable],
            logits=None if validation is None else validation.logits(params[turn.jobs]),
            labels=None if validation is None else validation.labels,
        )
        decision = isolate_failure(run, f"the filter {run.plan.filter.name!r}", checked_decision, run.filter, replies)
        if decision is None:
            return none
        if decision.notes:
            run.session.note("filter", {"round": run.round, **decision.notes})
        # A filter may keep what it likes, but a model with NaN would spoil the average.
        return np.asarray(decision.kept & good)

    def _weighted_sums(self, turns: Sequence[Turn], params: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
        """Return the weighted sums (E, P) of the new models and the old one, which has the weight ``shares[i]``."""
        old = self.models[torch.as_tensor([turn.run.row for turn in turns], device=self.models.device)]
        weights = torch.as_tensor(np.concatenate([turn.weights for turn in turns])).to(params)
        widths = {len(turn.weights) for turn in turns}
        if params.device.type == "cpu":
            # Model by model: the order of summation in a matrix product depends on the other runs.
            new = torch.zeros_like(old)
            for row, turn in zip(new, turns, strict=True):
                for model, weight in zip(params[turn.jobs], weights[turn.jobs].tolist(), strict=True):
                    row.add_(model, alpha=weight)
        elif len(widths) == 1:  # cohorts of one size need only one product
            width = widths.pop()
            grouped = params[: len(weights)].view(len(turns), width, -1)
            new = torch.bmm(weights.view(len(turns), 1, width), grouped).squeeze(1)
        else:
            new = torch.stack([weights[turn.jobs] @ params[turn.jobs] for turn in turns])
        if any(shares):
            new += torch.as_tensor(shares).to(params)[:, None] * old
        return new

    # -- evaluation and reports --------------------------------------------------------------------------------

    def _score(self, runs: Sequence[Run]) -> dict[int, ModelScore]:
        """Test the models of some runs; return the scores by row."""
        rows = [run.row for run in runs]
        models = self.models[torch.as_tensor(rows, dtype=torch.int64, device=self.models.device)]
        return dict(zip(rows, score_models(self.engine, models, [run.context.judge for run in runs]), strict=True))

    def _report(self, turn: Turn, score: ModelScore | None, on_round: OnRound | None) -> None:
        """Report to the session, and finish the turn."""
        run, cohort = turn.run, turn.cohort
        if len(cohort):
            signals = {signal: turn.in_cohort(values, np.nan) for signal, values in turn.signals.items()}
            with selector_errors(run), turn.selecting:
                turn.round.finish(turn.in_cohort(turn.kept, False) > 0, signals)
            if not run.running:
                return
        run.clock += turn.cost.seconds
        run.participation.add(run.round, cohort.clients)
        columns = {
            "available": len(run.federation) if turn.available is None else int(turn.available.sum()),
            "durations": turn.round.seconds,
            "weights": turn.in_cohort(turn.weights, 0.0),
            "answers": [],
        }
        self._finish(turn, score, cohort.round, cohort.clients, columns, on_round)

    def _finish(
        self,
        turn: Turn,
        score: ModelScore | None,
        number: int,
        clients: IntArray,
        columns: Mapping[str, Any],
        on_round: OnRound | None,
    ) -> None:
        """Record the score of model ``number``, add a row of measurements, and end the run if it is over.

        Parameters
        ----------
        clients : (k,) int array
            Whose models or work the row is about.
        columns : mapping
            The columns of ``rounds`` that differ between rounds and asynchronous runs.
        """
        run, accuracy = turn.run, turn.run.judged_by.is_accuracy
        finite = score is not None and bool(np.isfinite(score[:2]).all())
        tested = score if score is not None and finite else ModelScore()
        if finite:
            run.session.record(number, {run.judged_by.name: tested.metric, "loss": tested.loss})
        counts, fair = run.context.true_counts, tested.fairness
        row = {
            "run": run.plan.id,
            "round": run.round,
            "accuracy": _known(tested.metric) if accuracy else None,
            "metric": None if accuracy else _known(tested.metric),
            "loss": _known(tested.loss),
            "qcid": imbalance(counts[clients].sum(0)) if len(clients) and counts is not None else None,
            "clock": run.clock,
            "selection_seconds": turn.selecting.seconds,
            "groups": fair.groups,
            "worst_group": _known(float(np.nanmin(fair.groups))) if len(fair.groups) else None,
            "worst_tenth": _known(fair.worst_tenth),
            "client_spread": _known(fair.spread),
            "macro_f1": _known(fair.macro_f1),
            "worst_recall": _known(fair.worst_recall),
            # Only where the model was tested, so that all columns of fairness are known in the same rounds.
            "jain": _known(run.participation.jain) if finite else None,
            "longest_absence": run.participation.longest_absence(run.round + 1) if finite else None,
            **vars(turn.cost),
            **columns,
        }
        self._rows.append(row)
        # If there was no test in this round, models that are all NaN are the only sign of divergence.
        broken = len(turn.arrived) > 0 and not turn.valid.any()
        if broken or (score is not None and not finite):
            what = "every client's model" if broken else "the global model's test loss"
            run.end("diverged", f"{what} became NaN or infinite in round {run.round}")
        elif turn.stop is not None:
            run.end("stopped", turn.stop)
        else:
            run.end_if_over()
        run.round += 1
        if on_round is not None:
            on_round(run.info(self._keys[run.row]), row)


def of_run(arrays: Mapping[str, Any], kind: str, run: Run) -> dict[str, Any]:
    """Return a run's arrays of one kind in a checkpoint, by name."""
    prefix = f"{kind}/{run.row}/"
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def other_engine_error(run: str, before: str, now: str) -> OtherEngineError:
    """Return the error for a run that would continue with another kind of engine."""
    wants = "install a C compiler, or unset FEDCOHORT_CC, " if before.startswith("compiled") else ""
    return OtherEngineError(
        f"Run {run!r} was trained by {before} so far and would continue with {now}, which rounds numbers differently. "
        "The results would be those of neither.",
        hint=f"{wants}choose the device with --device, or continue on a machine like the first one; "
        "--allow-other-engine continues anyway and records the change",
    )


# -- one turn --------------------------------------------------------------------------------------------------


def _open(run: Run) -> Turn:
    """Open a run's next round, and find its selector's question."""
    turn = Turn(run)
    turn.available = available = run.wait()
    if run.begins == np.inf:
        run.end("stopped", f"no client is online after {run.clock:.0f} s")
        return turn
    run.update_attributes(changing=True)
    online = None if available is None else int(available.sum())
    turn.round = Round(run.session, run.policy, online=online, pace=run.pace, now=run.begins)
    with selector_errors(run), turn.selecting:
        turn.query = turn.round.open(available)
    return turn


def _choose(turn: Turn) -> None:
    """Choose the cohort, and find out which clients will answer in time."""
    run, round_, cost = turn.run, turn.round, turn.cost
    if run.round == 0:  # labels are shared once, before the first round
        run.costs.book_labels(cost, run.context.label_facts(run.plan.labels, run.plan.seed))
    with turn.selecting:
        cohort = turn.cohort = round_.choose(turn.answer)
    turn.stop = cohort.stop
    count = len(cohort.clients)
    if run.instant or not count:
        durations, status = np.zeros(count), np.zeros(count, np.int8)
    else:
        durations, status = run.events(cohort, run.begins + cost.seconds)
    # The question took its time before anybody could train.
    round_.begun = run.begins + cost.seconds
    cost.seconds += run.begins - run.clock  # nobody was online before
    seconds = round_.settle(durations, status)
    if count:
        run.costs.book_round(
            cost,
            seconds,
            durations,
            uploads=int((round_.status != Status.FAILED).sum()),
            holders=0 if turn.holders is None else int(np.isin(cohort.clients, turn.holders).sum()),
            cohort=count,
            signals=run.needed,
            copies=run.aggregator.model_copies,
        )
    turn.arrived = np.flatnonzero(round_.status == Status.OK)
    turn.clients, turn.seconds = cohort.clients[turn.arrived], round_.seconds[turn.arrived]


def _take_late(turn: Turn) -> list[LateUpdate]:
    """Return the late models that count in this turn's average, and record which these are."""
    run, now = turn.run, turn.round.closed_at
    late = counting(run.late, now, set(turn.clients[turn.kept].tolist()))
    run.late = [one for one in run.late if one.arrives > now]
    if late:
        name = run.session.table.name
        clients = {name(one.client): {"ticket": one.ticket, "staleness": run.round - one.round} for one in late}
        run.session.note(LATE_COUNTED, {"round": run.round, "ticket": turn.cohort.ticket, "clients": clients})
    return late


def _described(turn: Turn, steps: IntArray, late: Sequence[LateUpdate]) -> tuple[Any, ...]:
    """Describe the kept models, which made ``steps``, and then the late ones, as :meth:`Run.members` takes them."""
    run, kept = turn.run, turn.kept
    weights = None if turn.cohort.weights is None else turn.cohort.weights[turn.arrived[kept]]
    metrics = {signal: turn.signals[signal][kept] for signal in run.aggregator.requires}
    if not late:
        return turn.clients[kept], steps, weights, metrics
    staleness = np.array([run.round - one.round for one in late], np.float64)
    times = np.array([one.times for one in late], np.float64)
    if not run.aggregator.discounts_staleness:
        times = times * late_discount(staleness)
    fresh = np.ones(len(steps))
    return (
        np.concatenate([turn.clients[kept], np.array([one.client for one in late], np.int64)]),
        np.concatenate([steps, np.array([one.steps for one in late], np.int64)]),
        np.concatenate([fresh if weights is None else weights, times]),
        metrics,
        np.concatenate([0.0 * fresh, staleness]),
    )


def _apply_early_stop(turn: Turn) -> None:
    """Find out whether the early-stop rule ends the run here, unless the selector does."""
    run = turn.run
    if run.early_stop is not None:
        training, validation = run.early_stop.watches
        run.watch, reason = run.early_stop.after_round(run.watch, turn.mean(training), turn.mean(validation))
        turn.stop = reason if turn.stop is None else turn.stop


def _known(value: float) -> float | None:
    return value if np.isfinite(value) else None
