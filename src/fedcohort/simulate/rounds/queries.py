"""Answer selectors' questions (losses and trial cohorts) for all runs of a group at once, and book the cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedcohort.core import rng
from fedcohort.core.arrays import IntArray
from fedcohort.core.protocol import Answer, Losses, Trial
from fedcohort.core.signals import Signal, losses_of
from fedcohort.simulate.rounds.batch import Batch, Starts
from fedcohort.simulate.rounds.run import Run
from fedcohort.simulate.rounds.turn import Turn

_TRIED = losses_of([Trial.measured], "received")


def answer(batch: Batch, turns: Sequence[Turn]) -> None:
    """Answer the questions of all turns in one batch, and book what they cost."""
    questions: dict[frozenset[Signal], list[tuple[Turn, Losses]]] = {}
    trials: list[tuple[Turn, Trial]] = []
    for turn in turns:
        match turn.query:
            case Losses() as losses:
                questions.setdefault(losses.signals, []).append((turn, losses))
            case Trial() as trial:
                trials.append((turn, trial))
    for signals, asking in questions.items():
        _answer_losses(batch, signals, asking)
    if trials:
        _answer_trials(batch, trials)


def _answer_losses(batch: Batch, signals: frozenset[Signal], asking: Sequence[tuple[Turn, Losses]]) -> None:
    measures = losses_of(signals, "received")
    reachable = [turn.reachable(query.clients) for turn, query in asking]
    runs = [turn.run for turn, _ in asking]
    found = batch.measure(_global(batch, runs, reachable), runs, reachable, frozenset(measures.values()))
    for i, (turn, query) in enumerate(asking):
        # Whoever is not there does not answer, and the selector sees NaN.
        place = np.isin(query.clients, reachable[i])
        values = {}
        for signal, measure in measures.items():
            values[signal] = np.full(len(query.clients), np.nan)
            values[signal][place] = found[measure][i]
        costs, work = turn.run.costs, turn.run.costs.loss_work(reachable[i], signals)
        costs.book_losses(turn.cost, turn.work_seconds(reachable[i], work), signals)
        turn.answer, turn.holders = Answer(query, values), reachable[i]


def _answer_trials(batch: Batch, asking: Sequence[tuple[Turn, Trial]]) -> None:
    """Train and average each trial cohort, and measure everyone's loss before and after. The models are not kept."""
    (measure,) = _TRIED.values()
    everyone = [turn.reachable(None) for turn, _ in asking]
    runs = [turn.run for turn, _ in asking]
    before = batch.measure(_global(batch, runs, everyone), runs, everyone, [measure])[measure]
    parts: list[tuple[int, IntArray]] = []  # (turn, trial cohort)
    seeds = []
    for i, (turn, query) in enumerate(asking):
        for number, cohort in enumerate(query.cohorts):
            parts.append((i, turn.reachable(cohort)))
            # The round itself may train the same clients; a trial must not use the same batches.
            seeds.append(int(rng.stream(turn.run.plan.seed, "trial", turn.run.round, number).integers(1 << 62)))
    owners = [runs[i] for i, _ in parts]
    averages = _tried_models(batch, owners, [clients for _, clients in parts], seeds)
    listeners = [everyone[i] for i, _ in parts]
    which = np.repeat(np.arange(len(parts)), [len(clients) for clients in listeners])
    after = batch.measure((averages, which), owners, listeners, [measure])[measure]
    for i, (turn, query) in enumerate(asking):
        cohorts = [clients for owner, clients in parts if owner == i]
        changes = [losses - before[i] for (owner, _), losses in zip(parts, after, strict=True) if owner == i]
        change = np.full((len(cohorts), len(turn.run.federation)), np.nan)  # for clients who are not there
        for place, values in enumerate(changes):
            change[place, everyone[i]] = values
        costs = turn.run.costs
        evaluation = turn.work_seconds(everyone[i], costs.loss_work(everyone[i], _TRIED))
        training = [turn.work_seconds(clients, 1.0) for clients in cohorts]
        costs.book_trial(turn.cost, evaluation, training, turn.run.aggregator.model_copies)
        turn.answer, turn.holders = Answer(query, {query.answered_with: change}), everyone[i]


def _tried_models(
    batch: Batch, owners: Sequence[Run], cohorts: Sequence[IntArray], seeds: Sequence[int]
) -> torch.Tensor:
    """Return the average of each trial cohort (T, P): the old model if nobody is available or the run fails."""
    lengths = [len(clients) for clients in cohorts]
    trained = batch.train(owners, cohorts, np.repeat(seeds, lengths), None)
    averages = []
    ends = np.concatenate([[0], np.cumsum(lengths)])
    for run, clients, start, stop in zip(owners, cohorts, ends[:-1], ends[1:], strict=True):
        old = batch.models[run.row]
        if start == stop:
            averages.append(old)
            continue
        described = run.members(clients, trained.steps[start:stop])
        combined = run.combine(old, trained.params[start:stop], described, trial=True)
        averages.append(old if combined is None else combined.model)
    return torch.stack(averages)


def _global(batch: Batch, runs: Sequence[Run], clients: Sequence[IntArray]) -> Starts:
    """Return the global models, and each client's row of them."""
    return batch.models, np.repeat([run.row for run in runs], [len(part) for part in clients])
