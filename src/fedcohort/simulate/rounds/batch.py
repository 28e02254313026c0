"""The models of a lock-step group, and the work that is one batch over all its runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.signals import LossMeasure, Signal, VectorOf
from fedcohort.core.vectors import OutputLayer, vector_signal
from fedcohort.simulate.engine import Engine, Jobs, TrainingResult
from fedcohort.simulate.rounds.run import Run
from fedcohort.simulate.rounds.turn import Turn

Starts = tuple[torch.Tensor, IntArray]
"""Models (S, P), and the row (J,) of the one that each of J clients trains from."""


def zero_nonfinite(params: torch.Tensor) -> tuple[torch.Tensor, BoolArray]:
    """Replace models (J, P) that hold NaN or infinity by zeros, and return which are valid (J,)."""
    # NaN and infinity survive a sum, and a sum is one pass over the models. A sum may also overflow, so if one is not
    # finite, all numbers are checked.
    valid = torch.isfinite(params.sum(dim=1)).cpu().numpy()
    if not valid.all():
        valid = torch.isfinite(params).all(dim=1).cpu().numpy()
        params = torch.where(torch.as_tensor(valid, device=params.device)[:, None], params, 0.0)
    return params, valid


def received(starts: Starts, jobs: slice) -> torch.Tensor:
    """Return the model (P,) that some clients train from, or (m, P) if they have different ones."""
    models, rows = starts[0], starts[1][jobs]
    # One model is subtracted from all updates without a copy for each client.
    return models[rows[0]] if len(rows) and (rows == rows[0]).all() else models[torch.as_tensor(rows).to(models.device)]


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

    def starts(self, runs: Sequence[Run], clients: Sequence[IntArray]) -> Starts:
        """Return the models that ``clients[i]`` of ``runs[i]`` train from."""
        rows = [np.full(len(part), run.row) for run, part in zip(runs, clients, strict=True)]
        # Clients' own models become further rows, so all runs stay one batch.
        models = [self.models]
        end = len(self.models)
        for i, (run, part) in enumerate(zip(runs, clients, strict=True)):
            if run.aggregator.own_models and (own := run.starts(part, self.models[run.row])) is not None:
                models.append(own)
                rows[i] = np.arange(end, end + len(part))
                end += len(part)
        return self.models if len(models) == 1 else torch.cat(models), np.concatenate(rows)

    def measure(
        self,
        starts: Starts,
        runs: Sequence[Run],
        clients: Sequence[IntArray],
        measures: Collection[LossMeasure],
        pseudo_models: torch.Tensor | None = None,
    ) -> dict[LossMeasure, list[FloatArray]]:
        """Measure models on the data of ``clients[i]`` of ``runs[i]``; ``pseudo_models`` (J, P) give pseudo-labels."""
        lengths = [len(part) for part in clients]
        # The engine knows clients by federation and number.
        federations = np.repeat([run.context.index for run in runs], lengths)
        values = self.engine.measure(
            *starts, federations, np.concatenate(clients), measures, pseudo_models=pseudo_models
        )
        return {measure: np.split(column, np.cumsum(lengths)[:-1]) for measure, column in values.items()}

    def train(
        self,
        runs: Sequence[Run],
        clients: Sequence[IntArray],
        seeds: IntArray,
        steps: IntArray | None,
        starts: Starts | None = None,
        rounds: IntArray | None = None,
    ) -> TrainingResult:
        """Train ``clients[i]`` from the model of ``runs[i]``, all in one batch.

        Parameters
        ----------
        seeds : (J,) int array
        steps : (J,) int array or None
            Local steps; None means the usual ones.
        starts : optional
            Default: those of :meth:`starts`.
        rounds : (J,) int array, optional
            The rounds in which the clients began. Default: the runs' current rounds.
        """
        lengths = [len(part) for part in clients]
        models, rows = self.starts(runs, clients) if starts is None else starts
        jobs = Jobs(
            run=rows,
            federation=np.repeat([run.context.index for run in runs], lengths),
            client=np.concatenate(clients),
            round=np.repeat([run.round for run in runs], lengths) if rounds is None else rounds,
            seed=seeds,
            steps=steps,
        )
        correction = None
        if any(run.aggregator.corrects for run in runs):  # then all do: runs of a group agree in this
            pairs = zip(runs, clients, strict=True)
            correction = torch.cat([run.corrections(part, self.models[run.row]) for run, part in pairs])
        return self.engine.train(models, jobs, prox=self._prox, correction=correction)

    def signals(self, turns: Sequence[Turn], params: torch.Tensor, starts: Starts) -> dict[int, torch.Tensor]:
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
        models, rows = starts
        for turn in turns:
            if Signal.DURATION in turn.run.needed:
                turn.signals[Signal.DURATION] = turn.seconds
        for measures, alike, jobs in _alike(turns, [turn.run.before for turn in turns]):
            runs, clients = [turn.run for turn in alike], [turn.clients for turn in alike]
            values = self.measure((models, rows[jobs]), runs, clients, measures)
            for at, turn in enumerate(alike):
                turn.signals.update({s: values[measure][at] for s, measure in turn.run.before.items()})
        for measures, alike, jobs in _alike(turns, [turn.run.after for turn in turns]):
            runs, clients = [turn.run for turn in alike], [turn.clients for turn in alike]
            teachers = None
            if any(measure.loss != "label" for measure in measures):  # the received models give the pseudo-labels
                teachers = models[torch.as_tensor(rows[jobs], device=models.device)]
            own = params[torch.as_tensor(jobs, device=params.device)]
            values = self.measure((own, np.arange(len(jobs))), runs, clients, measures, teachers)
            for at, turn in enumerate(alike):
                turn.signals.update({s: values[measure][at] for s, measure in turn.run.after.items()})
        moved = [turn for turn in turns if turn.run.updates]
        updates = [(params[t.jobs] - received(starts, t.jobs))[:, : self.engine.n_trainable] for t in moved]
        self._add_vectors(moved, updates, [turn.run.updates for turn in moved])
        wanting = [turn for turn in turns if turn.run.wants_gradients]
        if not wanting:
            return {}
        lengths = [len(turn.clients) for turn in wanting]
        gradients = torch.split(
            self.engine.client_gradients(
                models,
                np.concatenate([rows[turn.jobs] for turn in wanting]),
                np.repeat([turn.run.context.index for turn in wanting], lengths),
                np.concatenate([turn.clients for turn in wanting]),
            ),
            lengths,
        )
        self._add_vectors(wanting, gradients, [turn.run.gradients for turn in wanting])
        return {turn.run.row: part for turn, part in zip(wanting, gradients, strict=True)}

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
) -> list[tuple[frozenset[LossMeasure], list[Turn], IntArray]]:
    """Group the turns that want equal sets of measures, so that each group is one batch; with the rows of its jobs."""
    # Runs of one selector want the same losses, so there are few groups, whatever the number of runs.
    found: dict[frozenset[LossMeasure], list[Turn]] = {}
    for turn, measures in zip(turns, wanted, strict=True):
        if measures:
            found.setdefault(frozenset(measures.values()), []).append(turn)
    return [
        (measures, alike, np.concatenate([np.arange(turn.jobs.start, turn.jobs.stop) for turn in alike]))
        for measures, alike in found.items()
    ]
