"""Runs in lock-step: all runs of a group put the jobs of one round into the same batch.

The order of a round is that of every host: requests, questions, cohorts, training, filter, average, evaluation,
reports. Models are one tensor (R, P) on the engine's device; per round there are a handful of tensor operations and
one transfer, whatever the number of runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedcohort.aggregators import Corrections, Mix, WeightedSum
from fedcohort.arrays import BoolArray, FloatArray, IntArray
from fedcohort.filters import Need, Replies
from fedcohort.protocol import RoundReport, RoundRequest, Status
from fedcohort.scenario import Federation
from fedcohort.signals import Signal
from fedcohort.simulate.batch import Batch, client_data
from fedcohort.simulate.checkpoint import Checkpoint
from fedcohort.simulate.config import RunPlan
from fedcohort.simulate.costs import holders
from fedcohort.simulate.engine import Engine
from fedcohort.simulate.metrics import imbalance
from fedcohort.simulate.queries import answer
from fedcohort.simulate.results import ResultsError, RunInfo
from fedcohort.simulate.rows import RowBuffer
from fedcohort.simulate.run import Ground, Run, Turn

if TYPE_CHECKING:
    import pyarrow as pa

    from fedcohort.simulate.data import Dataset

OnRound = Callable[[RunInfo, Mapping[str, Any]], None]


class Group:
    """Runs that share a dataset, a model and a batch shape.

    Parameters
    ----------
    plans : sequence of RunPlan
    keys : sequence of str
        Each plan's federation, a key of ``federations``.
    dataset : Dataset
    federations : mapping of str to Federation
    journals : Path, optional
        Folder of the sessions' journals; None keeps them in memory.
    device : str
    workers : int, optional
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
    ) -> None:
        self._keys = list(keys)
        self._journals = journals
        used = list(dict.fromkeys(keys))
        grounds = {key: Ground.of(federations[key], i) for i, key in enumerate(used)}
        first = plans[0]
        self.engine = Engine(
            dataset.x_train,
            dataset.y_train,
            dataset.x_test,
            dataset.y_test,
            classes=dataset.classes,
            federations=[client_data(grounds[key].federation) for key in used],
            model=first.model.name,
            local=first.local,
            device=device,
            workers=workers,
        )
        self._server_labels = {
            ground.index: torch.as_tensor(
                np.asarray(dataset.y_train, np.int64)[ground.federation.server_validation], device=self.engine.device
            )
            for ground in grounds.values()
            if len(ground.federation.server_validation)
        }
        size = self.engine.n_params
        self.runs = [Run(plan, i, grounds[key], size) for i, (plan, key) in enumerate(zip(plans, keys, strict=True))]
        fresh = {seed: self.engine.init(seed) for seed in dict.fromkeys(plan.seed for plan in plans)}
        models = torch.stack([fresh[plan.seed] for plan in plans])
        self.batch = Batch(self.engine, models, first.aggregator.prox)
        for run in self.runs:
            run.memory = run.aggregator.memory(len(run.federation), self.models[run.row])
        self._rows = RowBuffer()

    @property
    def models(self) -> torch.Tensor:
        """(R, P) global models, one row per run."""
        return self.batch.models

    # -- starting, saving, continuing --------------------------------------------------------------------------

    def start(self) -> None:
        """Open every run's session anew."""
        for run in self.runs:
            run.open_session(self._journal(run), again=False)

    def _journal(self, run: Run) -> Path | None:
        return None if self._journals is None else self._journals / f"{run.plan.id}.sqlite"

    def checkpoint(self) -> Checkpoint:
        """Return everything that is needed to continue, between two rounds."""
        arrays = {"models": self.models.cpu().numpy()}
        for run in self.runs:
            if run.memory is not None:
                for name, value in run.memory.arrays().items():
                    arrays[f"memory/{run.row}/{name}"] = value if isinstance(value, np.ndarray) else value.cpu().numpy()
        facts = {"runs": {run.plan.id: run.facts() for run in self.runs}}
        return Checkpoint(max(run.round for run in self.runs), facts, arrays)

    def commit(self) -> None:
        """Make all journals durable up to here."""
        for run in self.runs:
            run.session.commit()

    def resume(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Continue each run from the checkpoint its journal agrees with.

        Parameters
        ----------
        checkpoints : sequence of Checkpoint
            Usually one; two when the machine died while journals were being committed.
        """
        for run in self.runs:
            run.open_session(self._journal(run), again=True)
            at = run.session.round
            fitting = [c for c in checkpoints if c.facts["runs"].get(run.plan.id, {}).get("round") == at]
            if not fitting:
                raise ResultsError(
                    f"The journal of run {run.plan.id!r} stands at round {at}, and no checkpoint does.",
                    hint="the experiment cannot be continued; start it again with another --out",
                )
            checkpoint = fitting[-1]
            run.take(checkpoint.facts["runs"][run.plan.id])
            self.models[run.row] = torch.as_tensor(checkpoint.arrays["models"][run.row])
            if run.memory is not None:
                prefix = f"memory/{run.row}/"
                run.memory.restore(
                    {
                        name.removeprefix(prefix): value
                        for name, value in checkpoint.arrays.items()
                        if name.startswith(prefix)
                    }
                )

    def infos(self) -> list[RunInfo]:
        """Return the runs' entries of runs.json."""
        return [run.info(key) for run, key in zip(self.runs, self._keys, strict=True)]

    def drain(self) -> tuple[pa.Table, pa.Table]:
        """Return the rows since the last time, as tables ``rounds`` and ``clients``."""
        return self._rows.drain()

    @property
    def done(self) -> bool:
        """Whether every run has ended."""
        return not any(run.running for run in self.runs)

    def close(self) -> None:
        """Close sessions and the engine; what was not committed is dropped."""
        for run in self.runs:
            if hasattr(run, "session"):
                run.session.close()
        self.engine.close()

    # -- one round ---------------------------------------------------------------------------------------------

    def step(self, on_round: OnRound | None = None) -> None:
        """Advance by one round every run that is furthest behind: all of them, save after a crash."""
        began = time.perf_counter()
        behind = min(run.round for run in self.runs if run.running)
        turns = self._requests([run for run in self.runs if run.running and run.round == behind])
        answer(self.batch, turns)
        for turn in turns:
            self._choose(turn)
        training = [turn for turn in turns if len(turn.arrived)]
        if training:
            self._train(training)
        for turn in turns:
            run = turn.run
            if run.early_stop is not None:
                losses = turn.mean(Signal.LOSS), turn.mean(Signal.VALIDATION_LOSS)
                run.watch, turn.stop = run.early_stop.after_round(run.watch, *losses)
        self._evaluate(turns)
        share = (time.perf_counter() - began) / len(turns)
        for turn in turns:
            self._finish(turn, share, on_round)

    def _requests(self, runs: Sequence[Run]) -> list[Turn]:
        masks: dict[tuple[int, int, Any], BoolArray] = {}
        turns = []
        for run in runs:
            available = None
            if not run.always:
                plan = run.plan
                key = (run.ground.index, plan.seed, plan.scenario.availability)
                available = masks.get(key)
                if available is None:
                    available = plan.scenario.available(run.federation, seed=plan.seed, round=run.round)
                    masks[key] = available
            turn = Turn(run, RoundRequest(run.size, available), available)
            if run.round == 0:
                run.costs.book_labels(turn.cost, run.ground.told(run.plan.labels, run.plan.seed))
            if run.asks:
                turn.query = run.session.query(turn.request)
            turns.append(turn)
        return turns

    # -- choosing ----------------------------------------------------------------------------------------------

    def _choose(self, turn: Turn) -> None:
        """Get the cohort, and find out who will answer in time."""
        run, plan = turn.run, turn.run.plan
        cohort = turn.cohort = run.session.ask(turn.request, turn.answer)
        count = len(cohort.clients)
        turn.kept = np.zeros(count, np.bool_)
        turn.weight = np.zeros(count)
        if not count:
            return
        if run.instant:
            turn.durations = np.zeros(count)
            turn.status = np.zeros(count, np.int8)
            seconds = 0.0
        else:
            work = run.costs.round_work(cohort.clients, cohort.work, run.needed, run.aggregator.needs_gradients)
            events = plan.scenario.events(run.federation, cohort.clients, seed=plan.seed, round=run.round, work=work)
            turn.durations, turn.status, seconds = events.durations, events.status.copy(), events.seconds
        turn.arrived = np.flatnonzero(turn.status == Status.OK)
        run.costs.book_round(
            turn.cost,
            seconds,
            turn.durations,
            uploads=int((turn.status != Status.FAILED).sum()),
            holders=holders(cohort.clients, turn.asked),
            cohort=count,
            signals=run.needed,
            copies=run.aggregator.model_copies,
        )

    # -- training ----------------------------------------------------------------------------------------------

    def _train(self, turns: Sequence[Turn]) -> None:
        """Train everyone who will answer, gather signals, filter, average."""
        clients = [turn.clients[turn.arrived] for turn in turns]
        lengths = [len(part) for part in clients]
        steps = None
        if any(turn.cohort is not None and turn.cohort.work is not None for turn in turns):
            steps = np.concatenate([_steps(turn) for turn in turns])
        seeds = np.repeat([turn.run.plan.seed for turn in turns], lengths)
        trained = self.batch.train([turn.run for turn in turns], clients, seeds, steps)
        params = trained.params
        # NaN and infinity survive a sum, which is one pass over the models; (J,)
        sound = torch.isfinite(params.sum(dim=1)).cpu().numpy()
        if not sound.all():
            sound = torch.isfinite(params).all(dim=1).cpu().numpy()  # a sum may also overflow
            params = torch.where(torch.as_tensor(sound, device=params.device)[:, None], params, 0.0)
        start = 0
        for turn, length in zip(turns, lengths, strict=True):
            turn.start = start
            start += length
            turn.sound = sound[turn.jobs]
            turn.status[turn.arrived[~turn.sound]] = Status.INVALID
        gradients = self.batch.signals(turns, clients, params)
        new = self._average(turns, params, trained.steps)
        for turn, part in zip(turns, clients, strict=True):
            run = turn.run
            if isinstance(run.memory, Corrections):
                good = torch.as_tensor(turn.sound, device=params.device)
                run.memory.absorb(
                    part[turn.sound],
                    self.models[run.row],
                    params[turn.jobs][good],
                    _rate_sums(turn, trained.steps[turn.jobs][turn.sound], part[turn.sound]),
                    gradients[run.row][good] if run.aggregator.needs_gradients else None,
                )
        self.models[torch.as_tensor([turn.run.row for turn in turns], device=self.models.device)] = new

    # -- filter and average ------------------------------------------------------------------------------------

    def _average(self, turns: Sequence[Turn], params: torch.Tensor, steps: IntArray) -> torch.Tensor:
        """Return the next global models (E, P) of these turns."""
        logits = self._logits(turns, params)
        mixes: list[Mix] = []
        special: dict[int, torch.Tensor] = {}
        for i, turn in enumerate(turns):
            kept = self._kept(turn, params, logits.get(i))
            turn.kept[turn.arrived[kept]] = True
            if not kept.any():
                mixes.append(Mix(np.zeros(len(kept)), 1.0))
                continue
            members = turn.members(turn.arrived[kept], steps[turn.jobs][kept])
            run, weights = turn.run, np.zeros(len(kept))
            if isinstance(run.aggregator, WeightedSum):
                mix = run.aggregator.mix(members)
                weights[kept] = mix.weights
                mixes.append(Mix(weights, mix.old))
            else:
                rows = params[turn.jobs][torch.as_tensor(kept, device=params.device)]
                combined = run.combine(self.models[run.row], rows, members)
                weights[kept] = combined.weights
                special[i] = combined.model
                mixes.append(Mix(weights))
            turn.weight[turn.arrived] = weights
        return self._mixed(turns, params, mixes, special)

    def _mixed(
        self, turns: Sequence[Turn], params: torch.Tensor, mixes: Sequence[Mix], special: Mapping[int, torch.Tensor]
    ) -> torch.Tensor:
        old = self.models[torch.as_tensor([turn.run.row for turn in turns], device=self.models.device)]
        lengths = {len(mix.weights) for mix in mixes}
        share = torch.as_tensor(np.concatenate([mix.weights for mix in mixes])).to(params)
        if params.device.type == "cpu":
            # Model by model: a product of matrices may add up in another order beside other runs.
            new = torch.zeros_like(old)
            for row, turn in zip(new, turns, strict=True):
                for model, weight in zip(params[turn.jobs], share[turn.jobs].tolist(), strict=True):
                    row.add_(model, alpha=weight)
        elif len(lengths) == 1:
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

    def _logits(self, turns: Sequence[Turn], params: torch.Tensor) -> dict[int, torch.Tensor]:
        """Logits on the server's validation set where a run's filter wants them; one batch per federation."""
        wanting: dict[int, list[int]] = {}
        for i, turn in enumerate(turns):
            if turn.run.filter is not None and Need.LOGITS in turn.run.filter.needs:
                wanting.setdefault(turn.run.ground.index, []).append(i)
        found: dict[int, torch.Tensor] = {}
        for places in wanting.values():
            stacked = torch.cat([params[turns[i].jobs] for i in places])
            logits = self.engine.logits(stacked, turns[places[0]].run.federation.server_validation.astype(np.int64))
            found |= zip(places, torch.split(logits, [len(turns[i].arrived) for i in places]), strict=True)
        return found

    def _kept(self, turn: Turn, params: torch.Tensor, logits: torch.Tensor | None) -> BoolArray:
        """(m,) which of the arrived models enter the average."""
        run = turn.run
        good = turn.sound
        if run.filter is None:
            return good
        labels = None if logits is None else self._server_labels[run.ground.index]
        verdict = run.filter.judge(
            Replies(good, updates=lambda: params[turn.jobs] - self.models[run.row], logits=logits, labels=labels)
        )
        if verdict.notes:
            run.session.note("filter", {"round": run.round, **verdict.notes})
        return np.asarray(verdict.kept & good)

    # -- evaluation and reports --------------------------------------------------------------------------------

    def _evaluate(self, turns: Sequence[Turn]) -> None:
        due = [turn for turn in turns if _evaluates(turn)]
        if not due:
            return
        rows = torch.as_tensor([turn.run.row for turn in due], device=self.models.device)
        losses, accuracies = self.engine.evaluate(self.models[rows])
        for turn, loss, accuracy in zip(due, np.asarray(losses).tolist(), np.asarray(accuracies).tolist(), strict=True):
            turn.loss, turn.accuracy = float(loss), float(accuracy)

    def _finish(self, turn: Turn, wall: float, on_round: OnRound | None) -> None:
        """Report to the session, write the rows, see whether the run is over."""
        run, cohort = turn.run, turn.cohort
        assert cohort is not None
        if len(cohort):
            run.session.tell(
                RoundReport(cohort.ticket, cohort.clients, status=turn.status, metrics=turn.metrics, kept=turn.kept)
            )
        finite = turn.loss is not None and bool(np.isfinite(turn.loss))
        if finite:
            run.session.record(cohort.round, {"accuracy": turn.accuracy, "loss": turn.loss})
        cost = turn.cost
        run.clock += cost.seconds
        qcid = imbalance(run.ground.true_counts[cohort.clients].sum(0)) if len(cohort) else None
        row = {
            "run": run.plan.id,
            "round": run.round,
            "accuracy": turn.accuracy if finite else None,
            "loss": turn.loss if finite else None,
            "qcid": qcid,
            "cohort": cohort.clients,
            "kept": turn.kept,
            "seconds": cost.seconds,
            "clock": run.clock,
            "bytes_down": cost.bytes_down,
            "bytes_up": cost.bytes_up,
            "query_bytes_down": cost.query_bytes_down,
            "query_bytes_up": cost.query_bytes_up,
            "client_seconds": cost.client_seconds,
            "query_client_seconds": cost.query_client_seconds,
            "query_seconds": cost.query_seconds,
            "available": len(run.federation) if turn.available is None else int(turn.available.sum()),
            "wall_seconds": wall,
            # Not columns of the rounds, but what listeners show beside them.
            "statuses": turn.status,
            "durations": turn.durations,
        }
        self._rows.add_round(row)
        if len(cohort):
            self._rows.add_clients(
                run.plan.id,
                run.round,
                cohort.clients,
                status=turn.status,
                kept=turn.kept,
                seconds=turn.durations,
                loss=turn.metrics.get(Signal.LOSS),
                weight=turn.weight,
            )
        self._conclude(turn, finite)
        run.round += 1
        if on_round is not None:
            on_round(run.info(self._keys[run.row]), row)

    @staticmethod
    def _conclude(turn: Turn, finite: bool) -> None:
        run, cohort = turn.run, turn.cohort
        assert cohort is not None
        broken = len(turn.arrived) > 0 and not (turn.status == Status.OK).any()
        if broken or (turn.loss is not None and not finite):
            what = "every client's model" if broken else "the global model's test loss"
            run.end("diverged", f"{what} became NaN or infinite in round {run.round}")
        elif cohort.stop is not None:
            run.end("stopped", cohort.stop)
        elif turn.stop is not None:
            run.end("stopped", turn.stop)
        elif run.round + 1 >= run.rounds:
            run.end("finished")


# -- helpers ---------------------------------------------------------------------------------------------------


def _evaluates(turn: Turn) -> bool:
    run = turn.run
    stops = turn.stop is not None or (turn.cohort is not None and turn.cohort.stop is not None)
    return stops or run.round + 1 >= run.rounds or (run.round + 1) % run.eval_every == 0


def _steps(turn: Turn) -> IntArray:
    """(m,) local steps of each arrived client: the usual number times its work, at least one."""
    assert turn.cohort is not None
    clients = turn.clients[turn.arrived]
    usual = turn.run.steps[clients]
    if turn.cohort.work is None:
        return usual
    scaled = np.floor(usual * turn.cohort.work[turn.arrived] + 0.5).astype(np.int64)
    return np.where(usual > 0, np.maximum(scaled, 1), 0)


def _rate_sums(turn: Turn, steps: IntArray, clients: IntArray) -> FloatArray:
    """(m,) sum of the learning rates over each client's local steps."""
    local, run = turn.run.plan.local, turn.run
    sizes = run.federation.train_sizes
    if local.epochs_of_largest is not None:
        batches = [local.batches_per_epoch(int(sizes.max()))] * len(clients)
    else:
        batches = [local.batches_per_epoch(int(sizes[c])) for c in clients]
    sums = [local.lr_schedule(run.round, int(s), b).sum() for s, b in zip(steps, batches, strict=True)]
    return np.array(sums, np.float64)
