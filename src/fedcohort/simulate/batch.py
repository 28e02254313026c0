"""The models of a lock-step group and the engine that trains them: everything that is one batch over all runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedcohort.aggregators import Corrections
from fedcohort.arrays import FloatArray, IntArray
from fedcohort.scenario import Federation
from fedcohort.signals import Measure, Signal
from fedcohort.simulate.engine import ClientData, Engine, Jobs, Trained
from fedcohort.simulate.run import Run, Turn

MEASURES = {
    Signal.LOSS: Measure(),
    Signal.VALIDATION_LOSS: Measure("validation"),
    Signal.ROBUST_LOSS: Measure(loss="robust"),
    Signal.PSEUDO_LOSS: Measure(loss="pseudo"),
    Signal.LOSS_AFTER: Measure(),
    Signal.ROBUST_LOSS_AFTER: Measure(loss="robust"),
    Signal.PSEUDO_LOSS_AFTER: Measure(loss="pseudo"),
}


class Batch:
    """Global models (R, P), one row per run, and batched work on them.

    Parameters
    ----------
    engine : Engine
    models : (R, P) tensor on the engine's device
    prox : float
        Weight of the proximal term that all runs share.
    """

    def __init__(self, engine: Engine, models: torch.Tensor, prox: float) -> None:
        self.engine = engine
        self.models = models
        self._prox = prox

    def losses(
        self,
        models: torch.Tensor,
        rows: Sequence[int],
        turns: Sequence[Turn],
        clients: Sequence[IntArray],
        signals: frozenset[Signal],
    ) -> dict[Signal, list[FloatArray]]:
        """Losses of ``models[rows[i]]`` on ``clients[i]``, one list entry per i, for all i in one batch."""
        lengths = [len(part) for part in clients]
        values = self.engine.measure(
            models,
            np.repeat(np.asarray(rows, np.int64), lengths),
            np.repeat([turn.run.ground.index for turn in turns], lengths),
            np.concatenate(clients),
            [MEASURES[signal] for signal in signals],
        )
        ends = np.cumsum(lengths)[:-1]
        return {signal: np.split(values[MEASURES[signal]], ends) for signal in signals}

    def train(
        self, runs: Sequence[Run], clients: Sequence[IntArray], seeds: IntArray, steps: IntArray | None
    ) -> Trained:
        """Train ``clients[i]`` from the model of ``runs[i]``, all in one batch."""
        lengths = [len(part) for part in clients]
        jobs = Jobs(
            run=np.repeat([run.row for run in runs], lengths),
            federation=np.repeat([run.ground.index for run in runs], lengths),
            client=np.concatenate(clients),
            round=np.repeat([run.round for run in runs], lengths),
            seed=seeds,
            steps=steps,
        )
        correction = None
        if any(run.aggregator.corrects for run in runs):  # then all do: it is part of what makes a group
            correction = torch.cat(
                [
                    run.memory.corrections(part)
                    for run, part in zip(runs, clients, strict=True)
                    if isinstance(run.memory, Corrections)
                ]
            )
        return self.engine.train(self.models, jobs, prox=self._prox, correction=correction)

    def signals(
        self, turns: Sequence[Turn], clients: Sequence[IntArray], params: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        """Compute what the runs' selectors declared, nothing else; return full-batch gradients by run row, if any."""
        by_losses: dict[frozenset[Signal], list[int]] = {}
        for i, turn in enumerate(turns):
            if turn.run.before:
                by_losses.setdefault(turn.run.before, []).append(i)
            if Signal.DURATION in turn.run.needed:
                turn.metric(Signal.DURATION, turn.durations[turn.arrived])
        for signals, places in by_losses.items():
            chosen = [turns[i] for i in places]
            found = self.losses(self.models, [t.run.row for t in chosen], chosen, [clients[i] for i in places], signals)
            for signal, values in found.items():
                for turn, part in zip(chosen, values, strict=True):
                    turn.metric(signal, part)
        self._losses_after(turns, clients, params)
        moved = [turn for turn in turns if turn.run.updates]
        if moved:
            self._distances(
                moved,
                [params[turn.jobs] - self.models[turn.run.row] for turn in moved],
                Signal.UPDATE_NORM,
                Signal.UPDATE_DISTANCE,
            )
        with_gradients = [i for i, turn in enumerate(turns) if turn.run.wants_gradients]
        if not with_gradients:
            return {}
        lengths = [len(clients[i]) for i in with_gradients]
        chosen = [turns[i] for i in with_gradients]
        stacked = self.engine.client_gradients(
            self.models,
            np.repeat([turn.run.row for turn in chosen], lengths),
            np.repeat([turn.run.ground.index for turn in chosen], lengths),
            np.concatenate([clients[i] for i in with_gradients]),
        )
        split = list(torch.split(stacked, lengths))
        reported = [(t, g) for t, g in zip(chosen, split, strict=True) if t.run.gradients]
        if reported:
            self._distances(
                [t for t, _ in reported], [g for _, g in reported], Signal.GRADIENT_NORM, Signal.GRADIENT_DISTANCE
            )
        return {turn.run.row: part for turn, part in zip(chosen, split, strict=True)}

    def _losses_after(self, turns: Sequence[Turn], clients: Sequence[IntArray], params: torch.Tensor) -> None:
        by_signals: dict[frozenset[Signal], list[int]] = {}
        for i, turn in enumerate(turns):
            if turn.run.after:
                by_signals.setdefault(turn.run.after, []).append(i)
        for signals, places in by_signals.items():
            asked = [MEASURES[signal] for signal in signals]
            jobs = np.concatenate([np.arange(turns[i].jobs.start, turns[i].jobs.stop) for i in places])
            lengths = [len(clients[i]) for i in places]
            rows = np.repeat([turns[i].run.row for i in places], lengths)
            received = None
            if any(measure.loss != "label" for measure in asked):
                received = self.models[torch.as_tensor(rows, device=self.models.device)]
            values = self.engine.measure(
                params[torch.as_tensor(jobs, device=params.device)],
                np.arange(len(jobs)),
                np.repeat([turns[i].run.ground.index for i in places], lengths),
                np.concatenate([clients[i] for i in places]),
                asked,
                pseudo_models=received,
            )
            ends = np.cumsum(lengths)[:-1]
            for signal in signals:
                for i, part in zip(places, np.split(values[MEASURES[signal]], ends), strict=True):
                    turns[i].metric(signal, part)

    @staticmethod
    def _distances(turns: Sequence[Turn], vectors: Sequence[torch.Tensor], norm: Signal, distance: Signal) -> None:
        """Report L2 norms of vectors (m, P) and their distances to the mean of the sound replies, in one transfer."""
        columns = []
        for turn, rows in zip(turns, vectors, strict=True):
            if norm in turn.run.needed:
                columns.append(torch.linalg.vector_norm(rows, dim=1))
            if distance in turn.run.needed:
                sound = rows if turn.sound.all() else rows[torch.as_tensor(turn.sound, device=rows.device)]
                columns.append(torch.linalg.vector_norm(rows - sound.mean(dim=0), dim=1))
        values = torch.cat(columns).cpu().numpy().astype(np.float64)
        at = 0
        for turn, rows in zip(turns, vectors, strict=True):
            for signal in (norm, distance):
                if signal in turn.run.needed:
                    turn.metric(signal, values[at : at + len(rows)])
                    at += len(rows)


def client_data(federation: Federation) -> ClientData:
    """Return a federation as the engine takes it."""
    return ClientData(
        indices=federation.indices.astype(np.int64),
        offsets=federation.offsets,
        labels=federation.labels.astype(np.int64),
        validation=federation.validation,
    )
