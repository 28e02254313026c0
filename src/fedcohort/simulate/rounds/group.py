"""Runs in lock-step: the jobs of all runs of a group are one batch in every round.

The order of a round is the same as for every host: requests, questions, cohorts, training, filter, average, evaluation,
reports. The models are one tensor (R, P) on the engine's device. A round takes a few tensor operations and one
transfer, however many runs there are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from fedcohort.core import rng
from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.errors import OtherEngineError, SelectorError
from fedcohort.core.protocol import Status
from fedcohort.core.signals import OnServer, Signal
from fedcohort.core.vectors import needs_output_layer, output_layer
from fedcohort.hosts.round import Round
from fedcohort.journal import Savepoint
from fedcohort.journal.events import LATE_COUNTED
from fedcohort.scenario import Federation
from fedcohort.session.validation import check_signals
from fedcohort.simulate.config.experiment import RunPlan
from fedcohort.simulate.engine import Engine, HeldOut, TrainingResult
from fedcohort.simulate.metrics import Participation, imbalance
from fedcohort.simulate.own_code import OwnCodeError
from fedcohort.simulate.rounds.batch import Batch, zero_nonfinite
from fedcohort.simulate.rounds.costs import RoundCost, holders
from fedcohort.simulate.rounds.isolate_failure import fail, fail_selector, isolate_failure, own_parts
from fedcohort.simulate.rounds.judge import Judge, ModelScore, Views
from fedcohort.simulate.rounds.late import LateUpdate
from fedcohort.simulate.rounds.queries import answer
from fedcohort.simulate.rounds.run import FederationContext, Run
from fedcohort.simulate.rounds.server import ServerSamples, server_samples
from fedcohort.simulate.rounds.turn import Turn
from fedcohort.simulate.store.checkpoint import Checkpoint
from fedcohort.simulate.store.results import RunInfo
from fedcohort.simulate.store.rows import RowBuffer
from fedcohort.training.aggregators import Corrections, Members, Mix, WeightedSum
from fedcohort.training.filters import Need, Replies, checked_decision

if TYPE_CHECKING:
    import pyarrow as pa

    from fedcohort.simulate.data import Dataset

log = logging.getLogger(__name__)
BEFORE = " before"  # ends the key of what the clients of a federation hold before a drift
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

    batch_class: ClassVar[type[Batch]] = Batch

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
                used[f"{key}{BEFORE}"] = before
        first = plans[0]
        views = Views(dataset, list(used.values()))
        contexts = _contexts(used, views, first)
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
            task=first.task,
            copies=views.copies,
        )
        self._server_labels = {
            context.index: torch.as_tensor(
                np.asarray(dataset.y_train, np.int64)[context.federation.server_validation], device=self.engine.device
            )
            for context in contexts.values()
            if len(context.federation.server_validation)
        }
        size = self.engine.n_params
        self.runs = [
            Run(plan, i, contexts[key], size, self.engine.n_trainable, dataset.outputs, contexts.get(f"{key}{BEFORE}"))
            for i, (plan, key) in enumerate(zip(plans, keys, strict=True))
        ]
        # All selectors of a seed start from the same model, so only their choice of clients makes a difference.
        fresh = {seed: self.engine.init(seed) for seed in dict.fromkeys(plan.seed for plan in plans)}
        models = torch.stack([fresh[plan.seed] for plan in plans])
        needed = frozenset[Signal]().union(*(run.needed for run in self.runs))
        output = output_layer(self.engine.shapes, dataset.classes) if needs_output_layer(needed) else None
        self.batch = self.batch_class(self.engine, models, first.aggregator.prox, output)
        self._servers: dict[tuple[int, str | None], ServerSamples] = {}
        for run in self.runs:
            run.memory = isolate_failure(
                run,
                run.aggregator_label,
                run.aggregator.memory,
                len(run.federation),
                self.models[run.row][: run.averaged],
            )
            if run.aggregator.needs_server:
                run.server = self._server_samples(run, dataset)
        self._rows = RowBuffer()
        self._shared = own_parts(first)

    def _server_samples(self, run: Run, dataset: Dataset) -> ServerSamples:
        """Return the server's samples for a run's aggregator; runs that use the same samples share them."""
        public = run.aggregator.public
        key = (-1 if public is not None else run.context.index, public)
        if key not in self._servers:
            positions = run.federation.server_validation.astype(np.int64)
            self._servers[key] = server_samples(self.engine, dataset, positions, public)
        return self._servers[key]

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
            # A configuration that withholds a signal is an error of the experiment. An error of the selector ends only
            # this run.
            check_signals(run.selector, run.table, run.signals)
            try:
                run.start_session(self._journal(run))
            except SelectorError as error:
                fail_selector(run, error)

    def _journal(self, run: Run) -> Path | None:
        return None if self._journals is None else self._journals / f"{run.plan.id}.sqlite"

    def checkpoint(self) -> Checkpoint:
        """Return everything that is needed to continue after this round."""
        arrays = {"models": self.models.cpu().numpy()}
        for run in self.runs:
            if run.has_session:
                arrays[f"participation/{run.row}"] = run.participation.array()
                arrays[f"session/{run.row}"] = np.frombuffer(run.session.savepoint().to_bytes(), np.uint8)
            if run.late is not None and run.late.waiting:
                arrays[f"late/{run.row}"] = run.late.updates()
            if run.memory is not None:
                for name, value in run.memory.arrays().items():
                    arrays[f"memory/{run.row}/{name}"] = value if isinstance(value, np.ndarray) else value.cpu().numpy()
        facts = {"runs": {run.plan.id: {**run.facts(), "federation": self._keys[run.row]} for run in self.runs}}
        return Checkpoint(max(run.round for run in self.runs), facts, arrays)

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
        # The session first: it undoes what its journal has after the savepoint, and the rest must match that state.
        run.resume_session(self._journal(run), Savepoint.from_bytes(arrays[f"session/{run.row}"].tobytes()))
        run.restore(facts)
        run.participation = Participation.of(arrays[f"participation/{run.row}"])
        if run.late is not None and facts["late"]:
            run.late.restore(facts["late"], torch.as_tensor(arrays[f"late/{run.row}"]).to(self.models))
        if run.running:
            self._continue_engine(run)
        self.models[run.row] = torch.as_tensor(arrays["models"][run.row])
        if run.memory is not None:
            prefix = f"memory/{run.row}/"
            run.memory.restore(
                {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
            )

    def _continue_engine(self, run: Run) -> None:
        """Refuse to continue with another kind of engine, or record the change if it is allowed."""
        kind, before = self.engine.kind, run.engines[-1][1]
        if before == kind:
            return
        if not self._allow_other_engine:
            raise other_engine_error(run.plan.id, before, kind)
        log.warning("run %s continues from round %d with %s, after %s", run.plan.id, run.round, kind, before)
        run.engines = (*run.engines, (run.round, kind))

    def infos(self) -> list[RunInfo]:
        """Return the runs' entries for runs.json."""
        return [run.info(key) for run, key in zip(self.runs, self._keys, strict=True)]

    def drain(self) -> pa.Table:
        """Return the rows of ``rounds/`` since the last call."""
        return self._rows.drain()

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
        opened = self._open(runs)
        answer(self.batch, opened)
        turns = []
        for turn in opened:
            if turn.run.running:
                try:
                    _choose(turn)
                    turns.append(turn)
                except SelectorError as error:
                    fail_selector(turn.run, error)
        self._train_late([turn for turn in turns if turn.run.late is not None and len(turn.round.late_models)])
        if training := [turn for turn in turns if len(turn.arrived)]:
            self._train(training)
        tested = [turn for turn in turns if turn.run.running]
        self._evaluate(tested)
        for turn in tested:
            self._finish(turn, on_round)

    def _open(self, runs: Sequence[Run]) -> list[Turn]:
        """Open the next round of each run; return the turns, each with its selector's question."""
        masks: dict[tuple[int, int, Any], BoolArray] = {}
        turns = []
        for run in runs:
            available = run.wait()
            if run.begins == np.inf:
                run.end("stopped", f"no client is online after {run.clock:.0f} s")
                continue
            if not run.always:
                # Runs with one federation and seed find the same clients, so their selectors can be compared.
                plan = run.plan
                key = (run.context.index, plan.seed, plan.scenario.availability)
                available = masks.get(key)
                if available is None:
                    available = plan.scenario.available(run.federation, seed=plan.seed, round=run.round)
                    masks[key] = available
            run.update_attributes(changing=True)
            round_ = Round(
                run.session,
                run.policy,
                online=None if available is None else int(available.sum()),
                pace=run.pace,
                now=run.begins,
            )
            try:
                turn = Turn(run, available)
                turn.round = round_
                with turn.selecting:
                    turn.query = round_.open(available)
                turns.append(turn)
            except SelectorError as error:
                fail_selector(run, error)
        return turns

    # -- training ----------------------------------------------------------------------------------------------

    def _train(self, turns: Sequence[Turn]) -> None:
        """Train the clients that will answer, compute signals, filter, and average."""
        trained = self._train_clients(turns, [turn.arrived for turn in turns])
        params, valid = zero_nonfinite(trained.params)
        start = 0
        for turn in turns:
            turn.jobs = slice(start, start + len(turn.clients))
            turn.valid = valid[turn.jobs]
            start = turn.jobs.stop
        gradients = self.batch.signals(turns, params)
        for turn in turns:
            for signal in turn.run.needed:
                if isinstance(signal.how, OnServer):
                    turn.signals[signal] = self._on_server(signal.how, turn, params[turn.jobs])
        new = self._average(turns, params, trained.steps)
        self._learn_corrections(turns, params, trained.steps, gradients)
        # Only now: signals, filters and corrections need the models that the clients received.
        self.models[torch.as_tensor([turn.run.row for turn in turns], device=self.models.device)] = new
        for turn in turns:
            if not turn.valid.all():
                turn.round.invalidate(turn.arrived[~turn.valid])

    def _train_clients(self, turns: Sequence[Turn], places: Sequence[IntArray]) -> TrainingResult:
        """Train the clients at positions ``places[i]`` of the cohort of ``turns[i]``, all in one batch."""
        clients = [turn.cohort.clients[part] for turn, part in zip(turns, places, strict=True)]
        # The engine knows the usual steps. They are needed here only if a selector asks for more or less work.
        steps = None
        if any(turn.cohort.work is not None for turn in turns):
            parts = [
                turn.run.local_steps(ids, None if turn.cohort.work is None else turn.cohort.work[part])
                for turn, ids, part in zip(turns, clients, places, strict=True)
            ]
            steps = np.concatenate(parts)
        seeds = np.repeat([turn.run.plan.seed for turn in turns], [len(part) for part in clients])
        return self.batch.train([turn.run for turn in turns], clients, seeds, steps)

    def _learn_corrections(
        self, turns: Sequence[Turn], params: torch.Tensor, steps: IntArray, gradients: Mapping[int, torch.Tensor]
    ) -> None:
        """Let aggregators such as SCAFFOLD learn from all finite models, including those that the filter dropped."""
        for turn in turns:
            run = turn.run
            if not run.running or not isinstance(run.memory, Corrections):
                continue
            good = torch.as_tensor(turn.valid, device=params.device)
            clients = turn.clients[turn.valid]
            isolate_failure(
                run,
                run.aggregator_label,
                run.memory.absorb,
                clients,
                self.models[run.row][: run.averaged],
                params[turn.jobs][good][:, : run.averaged],
                run.rate_sums(steps[turn.jobs][turn.valid], clients, np.full(len(clients), run.round)),
                gradients[run.row][good][:, : run.averaged] if run.aggregator.needs_gradients else None,
            )

    def _train_late(self, turns: Sequence[Turn]) -> None:
        """Train the clients that will answer too late and whose models count in a later round."""
        if not turns:
            return
        # They answer later, but the model that they train from is replaced at the end of this round.
        places = [turn.round.late_models for turn in turns]
        trained = self._train_clients(turns, places)
        job = 0
        for turn, late in zip(turns, places, strict=True):
            run, cohort = turn.run, turn.cohort
            assert run.late is not None
            for client, place in zip(cohort.clients[late].tolist(), late.tolist(), strict=True):
                update, steps = trained.params[job] - run.base(self.models[run.row]), int(trained.steps[job])
                arrives = turn.round.begun + float(turn.round.seconds[place])
                times = 1.0 if cohort.weights is None else float(cohort.weights[place])
                if bool(torch.isfinite(update).all()):
                    found = LateUpdate(client, cohort.ticket, run.round, steps, arrives, times, update)
                    run.late.waiting.append(found)
                job += 1

    # -- filter and average ------------------------------------------------------------------------------------

    def _average(self, turns: Sequence[Turn], params: torch.Tensor, steps: IntArray) -> torch.Tensor:
        """Return the next global models (E, P); the turns get which models are kept, and their weights."""
        logits = self._logits(turns, params)
        mixes: list[Mix] = []
        special: dict[int, torch.Tensor] = {}
        stale: dict[int, torch.Tensor] = {}  # by turn, the weighted sum of late models
        for i, turn in enumerate(turns):
            run = turn.run
            turn.kept = kept = self._kept(turn, params, logits.get(i))
            turn.weights = np.zeros(len(kept))
            if not kept.any():
                mixes.append(Mix(turn.weights, 1.0))  # the old model stays
                continue
            late = [] if run.late is None else run.late.take(turn.round.closed_at, turn.clients[kept].tolist())
            _note_late(turn, late)
            members = turn.members(steps[turn.jobs], late)
            old = self.models[run.row]
            # A late update is applied to the current model, because the one it was computed from is gone.
            moved = run.base(old) + torch.stack([one.update for one in late]) if late else params[:0]
            if isinstance(run.aggregator, WeightedSum) and run.trainable == len(old):
                mix, summed = _weigh(run, members, kept, moved)
                if summed is not None:
                    stale[i] = summed
            else:
                rows = params[turn.jobs][torch.as_tensor(kept, device=params.device)]
                mix, model = _combine(run, old, torch.cat([rows, moved]) if late else rows, members, kept)
                if model is not None:
                    special[i] = model
            turn.weights = mix.weights
            mixes.append(mix)
        new = self._mix(turns, params, mixes, special)
        for i, models in stale.items():
            new[i] += models
        return new

    def _kept(self, turn: Turn, params: torch.Tensor, logits: torch.Tensor | None) -> BoolArray:
        """Return which models (m,) the filter keeps; none if the run has failed."""
        run, good = turn.run, turn.valid
        if not run.running:
            return np.zeros(len(good), np.bool_)
        if run.filter is None:
            return good
        replies = Replies(
            good,
            updates=lambda: (params[turn.jobs] - self.batch.received(run, turn.clients))[:, : run.trainable],
            logits=logits,
            labels=None if logits is None else self._server_labels[run.context.index],
        )
        decision = isolate_failure(run, f"the filter {run.plan.filter.name!r}", checked_decision, run.filter, replies)
        if decision is None:
            return np.zeros(len(good), np.bool_)
        if decision.notes:
            run.session.note("filter", {"round": run.round, **decision.notes})
        return np.asarray(decision.kept & good)

    def _mix(
        self,
        turns: Sequence[Turn],
        params: torch.Tensor,
        mixes: Sequence[Mix],
        special: Mapping[int, torch.Tensor],
    ) -> torch.Tensor:
        """Return the next models (E, P): weighted sums of the new models and the old one, or the ``special`` ones."""
        old = self.models[torch.as_tensor([turn.run.row for turn in turns], device=self.models.device)]
        lengths = {len(mix.weights) for mix in mixes}
        share = torch.as_tensor(np.concatenate([mix.weights for mix in mixes])).to(params)
        if params.device.type == "cpu":
            # Model by model: the order of summation in a matrix product depends on the other runs.
            new = torch.zeros_like(old)
            for row, turn in zip(new, turns, strict=True):
                for model, weight in zip(params[turn.jobs], share[turn.jobs].tolist(), strict=True):
                    row.add_(model, alpha=weight)
        elif len(lengths) == 1:  # cohorts of one size need only one product
            width = lengths.pop()
            grouped = params.view(len(turns), width, -1)
            new = torch.bmm(share.view(len(turns), 1, width), grouped).squeeze(1)
        else:
            new = torch.stack([share[turn.jobs] @ params[turn.jobs] for turn in turns])
        if any(mix.old for mix in mixes):
            new += torch.as_tensor([mix.old for mix in mixes]).to(params)[:, None] * old
        for i, model in special.items():
            new[i] = model
        return new

    def _server_loss(self, run: Run) -> float:
        """Return the loss on the server's validation set of the global model that clients received."""
        return float(self._server_losses(run, self.models[run.row][None])[0])

    def _server_losses(self, run: Run, models: torch.Tensor) -> FloatArray:
        """Return the losses (s,) of ``models`` (s, P) on the server's validation set."""
        positions = run.federation.server_validation.astype(np.int64)
        labels = self._server_labels[run.context.index]
        logits = self.engine.logits(models, positions).double()
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.repeat(len(models)), reduction="none")
        return np.asarray(losses.view(len(models), -1).mean(dim=1).cpu().numpy())

    def _on_server(self, how: OnServer, turn: Turn, models: torch.Tensor) -> FloatArray:
        """Return a number (m,) for each of the arrived ``models`` (m, P); 0 for models that are not finite.

        The utility of a coalition is minus the server's loss of its members' average, weighted by size. The empty
        coalition has the old global model.
        """
        run = turn.run
        if how.values is None:
            return np.full(len(turn.clients), self._server_loss(run))
        valid = np.flatnonzero(turn.valid)
        old, new = self.models[run.row], models[torch.as_tensor(valid, device=models.device)]
        sizes = run.context.share[turn.clients[valid]]
        sizes = sizes if sizes.sum() > 0 else np.ones(len(valid))

        def utility(coalitions: BoolArray) -> FloatArray:
            weights = coalitions * np.maximum(sizes, np.finfo(np.float64).tiny)
            total = weights.sum(axis=1, keepdims=True)
            shares = torch.as_tensor(weights / np.where(total > 0, total, 1.0)).to(new)
            averages = shares @ new + torch.as_tensor(total[:, 0] == 0).to(new)[:, None] * old
            return -self._server_losses(run, averages)

        values = np.zeros(len(turn.clients))
        generator = rng.stream(run.plan.seed, how.stream, run.round)
        found = isolate_failure(run, run.selector_label, how.measure, utility, len(valid), generator)
        if found is not None:
            values[valid] = found
        return np.where(np.isfinite(values), values, 0.0)

    def _logits(self, turns: Sequence[Turn], params: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return logits on the server's validation set for the filters that need them, in one batch per federation."""
        wanting: dict[int, list[int]] = {}
        for i, turn in enumerate(turns):
            if turn.run.filter is not None and Need.LOGITS in turn.run.filter.needs:
                wanting.setdefault(turn.run.context.index, []).append(i)
        found: dict[int, torch.Tensor] = {}
        for places in wanting.values():
            stacked = torch.cat([params[turns[i].jobs] for i in places])
            logits = self.engine.logits(stacked, turns[places[0]].run.federation.server_validation.astype(np.int64))
            found |= zip(places, torch.split(logits, [len(turns[i].clients) for i in places]), strict=True)
        return found

    # -- evaluation and reports --------------------------------------------------------------------------------

    def _evaluate(self, turns: Sequence[Turn]) -> None:
        """Apply the early-stop rules, and test the models for which a test is due."""
        due = {}
        for i, turn in enumerate(turns):
            turn.stop = _stop(turn)
            if turn.stop is not None or is_due(turn.run, turn.run.clock + turn.cost.seconds):
                due[i] = turn.run
        for i, score in self._score(due).items():
            turns[i].score = score

    def _score(self, runs: Mapping[int, Run]) -> dict[int, ModelScore]:
        """Test the models of some runs; those with the same test set are one batch."""
        judges = {i: run.context.judge for i, run in runs.items() if run.context.judge is not None}
        plain = [i for i in runs if i not in judges]
        scores = self._score_groups(runs, judges)
        if plain:
            losses, metrics = self.engine.evaluate(self._models_of([runs[i] for i in plain]))
            for i, loss, metric in zip(plain, np.asarray(losses).tolist(), np.asarray(metrics).tolist(), strict=True):
                scores[i] = ModelScore(loss, metric, None)
        return scores

    def _score_groups(self, runs: Mapping[int, Run], judges: Mapping[int, Judge]) -> dict[int, ModelScore]:
        """Test models whose accuracy is also measured for groups of clients."""
        tested_on: dict[HeldOut, list[int]] = {}
        for i, judge in judges.items():
            for test in judge.tests:
                tested_on.setdefault(test, []).append(i)
        found: dict[tuple[int, HeldOut], tuple[float, FloatArray, FloatArray]] = {}
        for test, indices in tested_on.items():
            tested = self.engine.evaluate_cells(self._models_of([runs[i] for i in indices]), test)
            found |= {(i, test): (float(loss), *rows) for i, loss, *rows in zip(indices, *tested, strict=True)}
        return {
            i: judge.score(*zip(*(found[i, test] for test in judge.tests), strict=True)) for i, judge in judges.items()
        }

    def _models_of(self, runs: Sequence[Run]) -> torch.Tensor:
        return self.models[torch.as_tensor([run.row for run in runs], device=self.models.device)]

    @staticmethod
    def _record_score(run: Run, round: int, score: ModelScore | None) -> None:
        if score is not None:
            run.session.record(round, {run.judged_by.name: score.metric, "loss": score.loss})

    def _finish(self, turn: Turn, on_round: OnRound | None) -> None:
        """Report to the session, add a row of measurements, and end the run if it is over."""
        run, cohort, cost = turn.run, turn.cohort, turn.cost
        if len(cohort):
            signals = {signal: turn.in_cohort(values, np.nan) for signal, values in turn.signals.items()}
            try:
                with turn.selecting:
                    turn.round.finish(turn.in_cohort(turn.kept, False) > 0, signals)
            except SelectorError as error:
                fail_selector(run, error)
                return
        finite = finite_score(turn.score)
        self._record_score(run, cohort.round, finite)
        run.clock += cost.seconds
        run.participation.add(run.round, cohort.clients)
        row = {
            **measurements(run, finite, cost, cohort.clients),
            "seconds": cost.seconds,
            "available": len(run.federation) if turn.available is None else int(turn.available.sum()),
            "selection_seconds": turn.selecting.seconds,
            "durations": turn.round.seconds,
            "weights": turn.in_cohort(turn.weights, 0.0),
        }
        self._rows.add(row)
        _conclude(turn, diverged=turn.score is not None and finite is None)
        run.round += 1
        if on_round is not None:
            on_round(run.info(self._keys[run.row]), row)


def _contexts(federations: Mapping[str, Federation], views: Views, first: RunPlan) -> dict[str, FederationContext]:
    """Return what runs on one federation share, by the federation's key."""
    classes = first.task.has_classes
    judged = classes and first.task.judged_by.is_accuracy  # groups of clients are compared only by accuracy
    # Before a drift, models are judged by what clients need after it, unless that is another view of the samples.
    judges = {key: views.judge(f) for key, f in federations.items() if judged and not key.endswith(BEFORE)}
    return {
        key: FederationContext.of(
            federation, i, classes, None if federation.groups is None else judges.get(key.removesuffix(BEFORE))
        )
        for i, (key, federation) in enumerate(federations.items())
    }


def _weigh(run: Run, members: Members, kept: BoolArray, late: torch.Tensor) -> tuple[Mix, torch.Tensor | None]:
    """Return the weights (m,) of this round's models, and the weighted sum of the late ones.

    ``members`` are the kept models, followed by the ``late`` ones (l, P).
    """
    weights = np.zeros(len(kept))
    mix = isolate_failure(run, run.aggregator_label, run.mix, members)
    if mix is None:
        return Mix(weights, 1.0), None
    fresh = int(kept.sum())
    weights[kept] = mix.weights[:fresh]
    return Mix(weights, mix.old), torch.as_tensor(mix.weights[fresh:]).to(late) @ late if len(late) else None


def _combine(
    run: Run, old: torch.Tensor, models: torch.Tensor, members: Members, kept: BoolArray
) -> tuple[Mix, torch.Tensor | None]:
    """Return the model of an aggregator by itself, and the weights (m,) to record."""
    weights = np.zeros(len(kept))
    combined = isolate_failure(run, run.aggregator_label, run.combine, old, models, members)
    if combined is None:
        return Mix(weights, 1.0), None
    weights[kept] = combined.weights[: int(kept.sum())]
    return Mix(weights, 0.0), combined.model


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


def _choose(turn: Turn) -> None:
    """Choose the cohort, and find out which clients will answer in time."""
    run, round_, cost = turn.run, turn.round, turn.cost
    plan = run.plan
    if run.round == 0:  # labels are shared once, before the first round
        run.costs.book_labels(cost, run.context.label_facts(plan.labels, plan.seed))
    with turn.selecting:
        cohort = turn.cohort = round_.choose(turn.answer)
    count = len(cohort.clients)
    if run.instant or not count:
        durations, status = np.zeros(count), np.zeros(count, np.int8)
    else:
        events = run.events(cohort, run.begins + cost.seconds)
        durations, status = events.durations, events.status
    round_.begun = run.begins + cost.seconds
    cost.seconds += run.begins - run.clock  # nobody was online before
    seconds = round_.settle(durations, status)
    if count:
        run.costs.book_round(
            cost,
            seconds,
            durations,
            uploads=int((round_.status != Status.FAILED).sum()),
            holders=holders(cohort.clients, turn.holders),
            cohort=count,
            signals=run.needed,
            copies=run.aggregator.model_copies,
        )
    turn.arrived = np.flatnonzero(round_.status == Status.OK)
    turn.clients, turn.seconds = cohort.clients[turn.arrived], round_.seconds[turn.arrived]


def finite_score(score: ModelScore | None) -> ModelScore | None:
    """Return the score, or None if there is none or the model has diverged."""
    return score if score is not None and np.isfinite(score[:2]).all() else None


def measurements(run: Run, score: ModelScore | None, cost: RoundCost, clients: IntArray) -> dict[str, Any]:
    """Return the columns of ``rounds/`` that are the same for rounds and for asynchronous runs."""
    is_accuracy, counts = run.judged_by.is_accuracy, run.context.true_counts
    return {
        "run": run.plan.id,
        "round": run.round,
        "accuracy": None if score is None or not is_accuracy else score.metric,
        "metric": None if score is None or is_accuracy else score.metric,
        "loss": None if score is None else score.loss,
        "qcid": imbalance(counts[clients].sum(0)) if len(clients) and counts is not None else None,
        "clock": run.clock,
        "bytes_down": cost.bytes_down,
        "bytes_up": cost.bytes_up,
        "query_bytes_down": cost.query_bytes_down,
        "query_bytes_up": cost.query_bytes_up,
        "client_seconds": cost.client_seconds,
        "query_client_seconds": cost.query_client_seconds,
        "query_seconds": cost.query_seconds,
        "asked": cost.asked,
        "answers": [],
        **_fairness(run, score),
    }


def _fairness(run: Run, score: ModelScore | None) -> dict[str, Any]:
    """Return the columns about fairness; null where the model was not tested."""
    found = None if score is None else score.fairness
    return {
        "groups": [] if found is None else found.groups,
        "worst_group": None if found is None or not len(found.groups) else _known(float(np.nanmin(found.groups))),
        "worst_tenth": None if found is None else _known(found.worst_tenth),
        "client_spread": None if found is None else _known(found.spread),
        "macro_f1": None if found is None else _known(found.macro_f1),
        "worst_recall": None if found is None else _known(found.worst_recall),
        "jain": None if score is None else _known(run.participation.jain),
        "longest_absence": None if score is None else run.participation.longest_absence(run.round + 1),
    }


def _known(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _note_late(turn: Turn, late: Sequence[LateUpdate]) -> None:
    """Record which late models are in a run's average."""
    if late:
        run, name = turn.run, turn.run.session.table.name
        clients = {name(one.client): {"ticket": one.ticket, "staleness": run.round - one.round} for one in late}
        run.session.note(LATE_COUNTED, {"round": run.round, "ticket": turn.cohort.ticket, "clients": clients})


def _stop(turn: Turn) -> str | None:
    """Return why the selector, or else the early-stop rule, ends the run here; None if neither does."""
    run, reason = turn.run, None
    if run.early_stop is not None:
        training, validation = run.early_stop.watches
        run.watch, reason = run.early_stop.after_round(run.watch, turn.mean(training), turn.mean(validation))
    return reason if turn.cohort.stop is None else turn.cohort.stop


def is_due(run: Run, clock: float) -> bool:
    """Whether a test is due after this round, which ends at ``clock``."""
    return run.is_last(clock) or (run.round + 1) % run.eval_every == 0


def _conclude(turn: Turn, diverged: bool) -> None:
    """End the run if it is over; ``diverged`` says whether the test loss is NaN or infinite."""
    run = turn.run
    # If there was no test in this round, models that are all NaN are the only sign of divergence.
    broken = len(turn.arrived) > 0 and not turn.valid.any()
    if broken or diverged:
        what = "every client's model" if broken else "the global model's test loss"
        run.end("diverged", f"{what} became NaN or infinite in round {run.round}")
    elif turn.stop is not None:
        run.end("stopped", turn.stop)
    else:
        run.end_if_over()
