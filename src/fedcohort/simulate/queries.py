"""The host's side of queries: losses and trials, answered for all runs of a group at once and paid for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedcohort import rng
from fedcohort.arrays import FloatArray, IntArray
from fedcohort.protocol import Answer, Cohort, Losses, Trial
from fedcohort.signals import Signal
from fedcohort.simulate.batch import Batch
from fedcohort.simulate.run import Turn


def answer(batch: Batch, turns: Sequence[Turn]) -> None:
    """Answer what the runs' selectors asked, all runs in one batch, and book what it costs."""
    questions: dict[frozenset[Signal], list[Turn]] = {}
    trials = []
    for turn in turns:
        if isinstance(turn.query, Losses):
            questions.setdefault(turn.query.signals, []).append(turn)
        elif isinstance(turn.query, Trial):
            trials.append(turn)
    for signals, asking in questions.items():
        _answer_losses(batch, signals, asking)
    if trials:
        _answer_trials(batch, trials)


def _answer_losses(batch: Batch, signals: frozenset[Signal], turns: Sequence[Turn]) -> None:
    reachable = [_reachable(turn, turn.query.clients) for turn in turns if isinstance(turn.query, Losses)]
    found = batch.losses(batch.models, [t.run.row for t in turns], turns, reachable, signals)
    for i, turn in enumerate(turns):
        assert isinstance(turn.query, Losses)
        place = np.isin(turn.query.clients, reachable[i])
        values = {}
        for signal in signals:
            values[signal] = np.full(len(turn.query.clients), np.nan)
            values[signal][place] = found[signal][i]
        turn.answer = Answer(turn.query, values)
        turn.asked = reachable[i]
        costs = turn.run.costs
        costs.book_losses(turn.cost, _seconds(turn, reachable[i], costs.loss_work(reachable[i], signals)), signals)


def _answer_trials(batch: Batch, turns: Sequence[Turn]) -> None:
    """Train and average each trial cohort, evaluate everyone before and after, throw the models away."""
    only_loss = frozenset({Signal.LOSS})
    everyone = [_reachable(turn, None) for turn in turns]
    before = batch.losses(batch.models, [t.run.row for t in turns], turns, everyone, only_loss)[Signal.LOSS]
    parts: list[tuple[int, IntArray]] = []  # (turn, trial cohort)
    seeds = []
    for i, turn in enumerate(turns):
        assert isinstance(turn.query, Trial)
        for number, cohort in enumerate(turn.query.cohorts):
            parts.append((i, _reachable(turn, cohort)))
            # Not the batches of the round itself, which may train the same clients.
            seeds.append(int(rng.stream(turn.run.plan.seed, "trial", turn.run.round, number).integers(1 << 62)))
    owners = [turns[i] for i, _ in parts]
    lengths = [len(clients) for _, clients in parts]
    trained = batch.train(
        [turn.run for turn in owners], [clients for _, clients in parts], np.repeat(seeds, lengths), None
    )
    averages = []
    ends = np.concatenate([[0], np.cumsum(lengths)])
    for turn, (_, clients), start, stop in zip(owners, parts, ends[:-1], ends[1:], strict=True):
        scratch = Turn(turn.run, turn.request, None)
        scratch.cohort = Cohort(clients)
        old = batch.models[turn.run.row]
        if start == stop:
            averages.append(old)
            continue
        members = scratch.members(np.arange(len(clients)), trained.steps[start:stop])
        averages.append(turn.run.combine(old, trained.params[start:stop], members, trial=True).model)
    after = batch.losses(torch.stack(averages), range(len(parts)), owners, [everyone[i] for i, _ in parts], only_loss)[
        Signal.LOSS
    ]
    for i, turn in enumerate(turns):
        mine = [j for j, (owner, _) in enumerate(parts) if owner == i]
        change = np.full((len(mine), len(turn.run.federation)), np.nan)
        for place, j in enumerate(mine):
            change[place, everyone[i]] = after[j] - before[i]
        assert turn.query is not None
        turn.answer = Answer(turn.query, {Signal.LOSS_CHANGE: change})
        turn.asked = everyone[i]
        costs = turn.run.costs
        evaluation = _seconds(turn, everyone[i], costs.loss_work(everyone[i], only_loss))
        training = [_seconds(turn, parts[j][1], 1.0) for j in mine]
        costs.book_trial(turn.cost, evaluation, training, turn.run.aggregator.model_copies)


def _seconds(turn: Turn, clients: IntArray, work: FloatArray | float) -> FloatArray:
    """(k,) simulated seconds some work takes these clients in this round."""
    if turn.run.instant:
        return np.zeros(len(clients))
    plan = turn.run.plan
    return plan.scenario.latency.durations(
        turn.run.federation.sizes, clients, seed=plan.seed, round=turn.run.round, work=work
    )


def _reachable(turn: Turn, clients: IntArray | None) -> IntArray:
    """Those of ``clients`` (None: everybody) who are available."""
    if turn.available is None:
        return np.arange(len(turn.run.federation)) if clients is None else clients
    return np.flatnonzero(turn.available) if clients is None else clients[turn.available[clients]]
