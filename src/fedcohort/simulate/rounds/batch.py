"""The models of a lock-step group, and the work that is one batch over all its runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.signals import LossMeasure, Signal, VectorOf
from fedcohort.core.vectors import OutputLayer, vector_signal
from fedcohort.simulate.engine import Engine, Jobs, TrainingResult
from fedcohort.simulate.rounds.isolate_failure import isolate_failure
from fedcohort.simulate.rounds.run import Run
from fedcohort.simulate.rounds.stages import TrainedModels, TrainedTurn


def zero_nonfinite(params: torch.Tensor) -> tuple[torch.Tensor, BoolArray]:
    """Replace models (J, P) that hold NaN or infinity by zeros, and return which are valid (J,)."""
    # NaN and infinity survive a sum, and a sum is one pass over the models. A sum may also overflow, so if one is not
    # finite, all numbers are checked.
    valid = torch.isfinite(params.sum(dim=1)).cpu().numpy()
    if not valid.all():
        valid = torch.isfinite(params).all(dim=1).cpu().numpy()
        params = torch.where(torch.as_tensor(valid, device=params.device)[:, None], params, 0.0)
    return params, valid


class Batch:
    """Global models (R, P), one row per run, and batched work on them.

    Parameters
    ----------
    models : (R, P) tensor on the engine's device
    prox : float
        Weight of the proximal term that all runs share.
    output : OutputLayer or None
        Where the output layer is in a model; None if no run needs it.
    """

    def __init__(self, engine: Engine, models: torch.Tensor, prox: float, output: OutputLayer | None = None) -> None:
        self.engine = engine
        self.models = models
        self._prox = prox
        self._output = output

    def measure(
        self,
        models: torch.Tensor,
        rows: Sequence[int],
        runs: Sequence[Run],
        clients: Sequence[IntArray],
        measures: Collection[LossMeasure],
    ) -> dict[LossMeasure, list[FloatArray]]:
        """Measure ``models[rows[i]]`` on ``clients[i]`` of ``runs[i]`` for every i, all in one batch."""
        lengths = [len(part) for part in clients]
        return self._measure(models, np.repeat(np.asarray(rows, np.int64), lengths), runs, clients, measures)

    def _measure(
        self,
        models: torch.Tensor,
        rows: IntArray,
        runs: Sequence[Run],
        clients: Sequence[IntArray],
        measures: Collection[LossMeasure],
        pseudo_models: torch.Tensor | None = None,
    ) -> dict[LossMeasure, list[FloatArray]]:
        """Measure ``models[rows[q]]`` on the q-th of all clients; ``pseudo_models[q]`` gives the pseudo-labels."""
        lengths = [len(part) for part in clients]
        values = self.engine.measure(
            models,
            rows,
            np.repeat([run.context.index for run in runs], lengths),
            np.concatenate(clients),
            measures,
            pseudo_models=pseudo_models,
        )
        ends = np.cumsum(lengths)[:-1]
        return {measure: np.split(column, ends) for measure, column in values.items()}

    def received(self, run: Run, clients: IntArray) -> torch.Tensor:
        """Return the model (P,) that ``clients`` of a run train from, or (k, P) if each has its own."""
        model = self.models[run.row]
        if not run.aggregator.own_models:
            return model
        found = isolate_failure(run, run.aggregator_label, run.starts, clients, model)
        return model.expand(len(clients), -1) if found is None else found

    def _received(self, runs: Sequence[Run], clients: Sequence[IntArray]) -> tuple[torch.Tensor, IntArray]:
        """Return models, and which of them (Q,) each client of ``clients[i]`` of ``runs[i]`` trains from."""
        rows = [np.full(len(part), run.row) for run, part in zip(runs, clients, strict=True)]
        # Clients' own models become further rows, so all runs stay one batch.
        models = [self.models]
        end = len(self.models)
        for i, (run, part) in enumerate(zip(runs, clients, strict=True)):
            if run.aggregator.own_models:
                models.append(self.received(run, part))
                rows[i] = np.arange(end, end + len(part))
                end += len(part)
        return self.models if len(models) == 1 else torch.cat(models), np.concatenate(rows)

    def train(
        self, runs: Sequence[Run], clients: Sequence[IntArray], seeds: IntArray, steps: IntArray | None
    ) -> TrainingResult:
        """Train ``clients[i]`` from the model of ``runs[i]``, all in one batch."""
        lengths = [len(part) for part in clients]
        models, rows = self._received(runs, clients)
        jobs = Jobs(
            run=rows,
            federation=np.repeat([run.context.index for run in runs], lengths),
            client=np.concatenate(clients),
            round=np.repeat([run.round for run in runs], lengths),
            seed=seeds,
            steps=steps,
        )
        correction = None
        if any(run.aggregator.corrects for run in runs):  # then all do: runs of a group agree in this
            parts = []
            for run, part in zip(runs, clients, strict=True):
                old = self.models[run.row]
                found = isolate_failure(run, run.aggregator_label, run.corrections, part, old)
                parts.append(old.new_zeros(len(part), len(old)) if found is None else found)
            correction = torch.cat(parts)
        return self.engine.train(models, jobs, prox=self._prox, correction=correction)

    def signals(
        self, turns: Sequence[TrainedTurn | TrainedModels], params: torch.Tensor
    ) -> tuple[list[dict[Signal, FloatArray]], dict[int, torch.Tensor]]:
        """Compute the signals that the runs' selectors declared.

        Parameters
        ----------
        params : (J, P) tensor
            Models after training, of all turns.

        Returns
        -------
        list of dict
            For each turn its signals, (m,) or (m, V), of the arrived models.
        dict
            Full-batch gradients (m, P) of the runs that need them, by the run's row.
        """
        found: list[dict[Signal, FloatArray]] = [{} for _ in turns]
        for i, turn in enumerate(turns):
            if Signal.DURATION in turn.run.needed:
                found[i][Signal.DURATION] = turn.seconds
        self._before(turns, found)
        self._after(turns, params, found)
        moved = [i for i, turn in enumerate(turns) if turn.run.updates]
        if moved:
            trainable = self.engine.n_trainable
            updates = [
                (params[turns[i].jobs] - self.received(turns[i].run, turns[i].clients))[:, :trainable] for i in moved
            ]
            self._add_vectors(moved, turns, updates, [turns[i].run.updates for i in moved], found)
        return found, self._gradients(turns, found)

    def _gradients(
        self, turns: Sequence[TrainedTurn | TrainedModels], found: Sequence[dict[Signal, FloatArray]]
    ) -> dict[int, torch.Tensor]:
        """Compute full-batch gradients for the runs that need them, and add the signals derived from them."""
        places = [i for i, turn in enumerate(turns) if turn.run.wants_gradients]
        if not places:
            return {}
        runs, clients = [turns[i].run for i in places], [turns[i].clients for i in places]
        lengths = [len(part) for part in clients]
        models, rows = self._received(runs, clients)
        stacked = self.engine.client_gradients(
            models, rows, np.repeat([run.context.index for run in runs], lengths), np.concatenate(clients)
        )
        gradients = torch.split(stacked, lengths)
        self._add_vectors(places, turns, gradients, [run.gradients for run in runs], found)
        return {run.row: part for run, part in zip(runs, gradients, strict=True)}

    def _before(self, turns: Sequence[TrainedTurn | TrainedModels], found: Sequence[dict[Signal, FloatArray]]) -> None:
        """Add losses of the received models; runs with the same measures are one batch."""
        for measures, places in _alike([turn.run.before for turn in turns]).items():
            runs, clients = [turns[i].run for i in places], [turns[i].clients for i in places]
            values = self._measure(*self._received(runs, clients), runs, clients, measures)
            for at, i in enumerate(places):
                found[i].update({s: values[measure][at] for s, measure in turns[i].run.before.items()})

    def _after(
        self,
        turns: Sequence[TrainedTurn | TrainedModels],
        params: torch.Tensor,
        found: Sequence[dict[Signal, FloatArray]],
    ) -> None:
        """Add losses of the clients' own models; the received models give the pseudo-labels."""
        for measures, places in _alike([turn.run.after for turn in turns]).items():
            runs, clients = [turns[i].run for i in places], [turns[i].clients for i in places]
            jobs = np.concatenate([np.arange(turns[i].jobs.start, turns[i].jobs.stop) for i in places])
            received = None
            if any(measure.loss != "label" for measure in measures):
                models, rows = self._received(runs, clients)
                received = models[torch.as_tensor(rows, device=models.device)]
            models_after = params[torch.as_tensor(jobs, device=params.device)]
            values = self._measure(models_after, np.arange(len(jobs)), runs, clients, measures, received)
            for at, i in enumerate(places):
                found[i].update({s: values[measure][at] for s, measure in turns[i].run.after.items()})

    def _add_vectors(
        self,
        places: Sequence[int],
        turns: Sequence[TrainedTurn | TrainedModels],
        vectors: Sequence[torch.Tensor],
        wanted: Sequence[Mapping[Signal, VectorOf]],
        found: Sequence[dict[Signal, FloatArray]],
    ) -> None:
        """Add the signals derived from updates or gradients (m, P), in one transfer."""
        parts: list[tuple[int, Signal, torch.Tensor]] = []
        for i, rows, signals in zip(places, vectors, wanted, strict=True):
            turn = turns[i]
            samples = turn.run.federation.train_sizes[turn.clients].astype(np.float64)
            parts += [(i, s, vector_signal(how, rows, turn.valid, self._output, samples)) for s, how in signals.items()]
        if not parts:
            return
        # One copy for all runs, because each copy waits until the device is done.
        values = torch.cat([part.reshape(-1) for _, _, part in parts]).cpu().numpy().astype(np.float64)
        at = 0
        for i, signal, part in parts:
            found[i][signal] = values[at : at + part.numel()].reshape(part.shape)
            at += part.numel()


def _alike(wanted: Sequence[Mapping[Signal, LossMeasure]]) -> dict[frozenset[LossMeasure], list[int]]:
    """Group the positions of equal sets of measures, leaving out empty ones."""
    found: dict[frozenset[LossMeasure], list[int]] = {}
    for i, measures in enumerate(wanted):
        if measures:
            found.setdefault(frozenset(measures.values()), []).append(i)
    return found
