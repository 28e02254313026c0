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
from fedcohort.simulate.rounds.turn import Turn


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

    def signals(self, turns: Sequence[Turn], params: torch.Tensor) -> dict[int, torch.Tensor]:
        """Compute the signals that the runs' selectors declared, and put them into the turns.

        Parameters
        ----------
        params : (J, P) tensor
            Models after training, of all turns.

        Returns
        -------
        dict
            Full-batch gradients (m, P) of the runs that need them, by the run's row.
        """
        for turn in turns:
            if Signal.DURATION in turn.run.needed:
                turn.signals[Signal.DURATION] = turn.seconds
        self._before(turns)
        self._after(turns, params)
        moved = [turn for turn in turns if turn.run.updates]
        updates = [
            (params[turn.jobs] - self.received(turn.run, turn.clients))[:, : self.engine.n_trainable] for turn in moved
        ]
        self._add_vectors(moved, updates, [turn.run.updates for turn in moved])
        wanting = [turn for turn in turns if turn.run.wants_gradients]
        gradients = self._gradients(wanting) if wanting else ()
        self._add_vectors(wanting, gradients, [turn.run.gradients for turn in wanting])
        return {turn.run.row: part for turn, part in zip(wanting, gradients, strict=True)}

    def _gradients(self, turns: Sequence[Turn]) -> Sequence[torch.Tensor]:
        """Compute full-batch gradients (m, P) of each turn's clients at the models they received."""
        clients = [turn.clients for turn in turns]
        lengths = [len(part) for part in clients]
        models, rows = self._received([turn.run for turn in turns], clients)
        indices = np.repeat([turn.run.context.index for turn in turns], lengths)
        return torch.split(self.engine.client_gradients(models, rows, indices, np.concatenate(clients)), lengths)

    def _before(self, turns: Sequence[Turn]) -> None:
        """Add losses of the received models; runs with the same measures are one batch."""
        for measures, alike in _alike(turns, [turn.run.before for turn in turns]).items():
            runs, clients = [turn.run for turn in alike], [turn.clients for turn in alike]
            values = self._measure(*self._received(runs, clients), runs, clients, measures)
            for at, turn in enumerate(alike):
                turn.signals.update({s: values[measure][at] for s, measure in turn.run.before.items()})

    def _after(self, turns: Sequence[Turn], params: torch.Tensor) -> None:
        """Add losses of the clients' own models; the received models give the pseudo-labels."""
        for measures, alike in _alike(turns, [turn.run.after for turn in turns]).items():
            runs, clients = [turn.run for turn in alike], [turn.clients for turn in alike]
            jobs = np.concatenate([np.arange(turn.jobs.start, turn.jobs.stop) for turn in alike])
            received = None
            if any(measure.loss != "label" for measure in measures):
                models, rows = self._received(runs, clients)
                received = models[torch.as_tensor(rows, device=models.device)]
            models_after = params[torch.as_tensor(jobs, device=params.device)]
            values = self._measure(models_after, np.arange(len(jobs)), runs, clients, measures, received)
            for at, turn in enumerate(alike):
                turn.signals.update({s: values[measure][at] for s, measure in turn.run.after.items()})

    def _add_vectors(
        self, turns: Sequence[Turn], vectors: Sequence[torch.Tensor], wanted: Sequence[Mapping[Signal, VectorOf]]
    ) -> None:
        """Add the signals derived from updates or gradients (m, P), in one transfer."""
        parts: list[tuple[Turn, Signal, torch.Tensor]] = []
        for turn, rows, signals in zip(turns, vectors, wanted, strict=True):
            samples = turn.run.federation.train_sizes[turn.clients].astype(np.float64)
            for signal, how in signals.items():
                parts.append((turn, signal, vector_signal(how, rows, turn.valid, self._output, samples)))
        if not parts:
            return
        # One copy for all runs, because each copy waits until the device is done.
        values = torch.cat([part.reshape(-1) for _, _, part in parts]).cpu().numpy().astype(np.float64)
        at = 0
        for turn, signal, part in parts:
            turn.signals[signal] = values[at : at + part.numel()].reshape(part.shape)
            at += part.numel()


def _alike(
    turns: Sequence[Turn], wanted: Sequence[Mapping[Signal, LossMeasure]]
) -> dict[frozenset[LossMeasure], list[Turn]]:
    """Group the turns that want equal sets of measures, leaving out empty ones."""
    found: dict[frozenset[LossMeasure], list[Turn]] = {}
    for turn, measures in zip(turns, wanted, strict=True):
        if measures:
            found.setdefault(frozenset(measures.values()), []).append(turn)
    return found
