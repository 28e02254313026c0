"""Answer selectors' questions (losses and trial cohorts) for all runs of a group at once, and book the cost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from fedcohort.core import rng
from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.protocol import Answer, Losses, Trial
from fedcohort.core.signals import Signal, losses_of
from fedcohort.simulate.rounds.batch import Batch
from fedcohort.simulate.rounds.costs import RoundCost
from fedcohort.simulate.rounds.isolate_failure import isolate_failure
from fedcohort.simulate.rounds.run import Run
from fedcohort.simulate.rounds.stages import AnsweredTurn, OpenTurn, members

_TRIED = losses_of([Trial.measured], "received")


def answer(batch: Batch, turns: Sequence[OpenTurn]) -> list[AnsweredTurn]:
    """Answer the questions of all runs in one batch, and book what they cost."""
    found: dict[int, AnsweredTurn] = {}
    questions: dict[frozenset[Signal], list[tuple[int, Losses]]] = {}
    trials: list[tuple[int, Trial]] = []
    for i, turn in enumerate(turns):
        match turn.query:
            case None:
                found[i] = AnsweredTurn(turn, None, None, RoundCost())
            case Losses() as losses:
                questions.setdefault(losses.signals, []).append((i, losses))
            case Trial() as trial:
                trials.append((i, trial))
    for signals, asking in questions.items():
        replies = _losses(batch, signals, [turns[i] for i, _ in asking], [query for _, query in asking])
        found |= zip([i for i, _ in asking], replies, strict=True)
    if trials:
        replies = _trials(batch, [turns[i] for i, _ in trials], [query for _, query in trials])
        found |= zip([i for i, _ in trials], replies, strict=True)
    return [found[i] for i in range(len(turns))]


def _losses(
    batch: Batch, signals: frozenset[Signal], turns: Sequence[OpenTurn], queries: Sequence[Losses]
) -> list[AnsweredTurn]:
    measures = losses_of(signals, "received")
    reachable = [turn.reachable(query.clients) for turn, query in zip(turns, queries, strict=True)]
    runs = [turn.run for turn in turns]
    found = batch.measure(batch.models, [run.row for run in runs], runs, reachable, frozenset(measures.values()))
    answered = []
    for i, (turn, query) in enumerate(zip(turns, queries, strict=True)):
        place = np.isin(query.clients, reachable[i])
        values = {}
        for signal, measure in measures.items():
            values[signal] = np.full(len(query.clients), np.nan)
            values[signal][place] = found[measure][i]
        cost, costs = RoundCost(), turn.run.costs
        costs.book_losses(cost, turn.seconds(reachable[i], costs.loss_work(reachable[i], signals)), signals)
        answered.append(AnsweredTurn(turn, Answer(query, values), reachable[i], cost))
    return answered


def _trials(batch: Batch, turns: Sequence[OpenTurn], queries: Sequence[Trial]) -> list[AnsweredTurn]:
    """Train and average each trial cohort, and measure everyone's loss before and after. The models are not kept."""
    (measure,) = _TRIED.values()
    everyone = [turn.reachable(None) for turn in turns]
    runs = [turn.run for turn in turns]
    before = batch.measure(batch.models, [run.row for run in runs], runs, everyone, [measure])[measure]
    parts: list[tuple[int, IntArray]] = []  # (turn, trial cohort)
    seeds = []
    for i, (turn, query) in enumerate(zip(turns, queries, strict=True)):
        for number, cohort in enumerate(query.cohorts):
            parts.append((i, turn.reachable(cohort)))
            # The round itself may train the same clients; a trial must not use the same batches.
            seeds.append(int(rng.stream(turn.run.plan.seed, "trial", turn.run.round, number).integers(1 << 62)))
    owners = [runs[i] for i, _ in parts]
    averages = _tried_models(batch, owners, [clients for _, clients in parts], seeds)
    after = batch.measure(averages, range(len(parts)), owners, [everyone[i] for i, _ in parts], [measure])[measure]
    answered = []
    for i, (turn, query) in enumerate(zip(turns, queries, strict=True)):
        trials = [j for j, (owner, _) in enumerate(parts) if owner == i]
        cohorts, losses = [parts[j][1] for j in trials], [after[j] - before[i] for j in trials]
        answered.append(_trial_answer(turn, query, everyone[i], cohorts, losses))
    return answered


def _trial_answer(
    turn: OpenTurn, query: Trial, everyone: IntArray, cohorts: Sequence[IntArray], changes: Sequence[FloatArray]
) -> AnsweredTurn:
    """Return how the loss of ``everyone`` (a,) changes with each trial cohort; NaN for others."""
    change = np.full((len(cohorts), len(turn.run.federation)), np.nan)
    for place, values in enumerate(changes):
        change[place, everyone] = values
    cost, costs = RoundCost(), turn.run.costs
    evaluation = turn.seconds(everyone, costs.loss_work(everyone, _TRIED))
    costs.book_trial(cost, evaluation, [turn.seconds(c, 1.0) for c in cohorts], turn.run.aggregator.model_copies)
    return AnsweredTurn(turn, Answer(query, {query.answered_with: change}), everyone, cost)


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
        described = members(run, clients, trained.steps[start:stop], None, {})
        tried = partial(run.combine, old, trained.params[start:stop], described, trial=True)
        combined = isolate_failure(run, run.aggregator_label, tried)
        averages.append(old if combined is None else combined.model)
    return torch.stack(averages)
