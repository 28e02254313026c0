"""Selectors with signals of their own in one file, as a user writes them; tests run it on every host."""

from dataclasses import dataclass

import numpy as np

import fedcohort as fc

RMS = fc.LossMeasure(mean="root-mean-square")
LARGE_LOSS = fc.Signal("large-loss", meaning="root mean square loss before training", how=fc.LossOf(RMS))
LARGE_LOSS_AFTER = fc.Signal("large-loss-after", meaning="the same after training", how=fc.LossOf(RMS, "own"))
STEP = fc.Signal("step", meaning="how far the client moved the model", how=fc.VectorOf("update", "norm"))
SLOPE = fc.Signal("slope", meaning="how steep the loss is", how=fc.VectorOf("gradient", "norm"))
DRAIN = fc.Signal("battery-used", meaning="percent of the battery that training took")
SENSORS = fc.Signal("sensors", meaning="temperatures of the device", width=2)


@dataclass(frozen=True)
class Seen:
    """The last numbers of each client, in the order of ``watched``."""

    last: np.ndarray = fc.per_client()  # (N, S)


@dataclass(frozen=True, kw_only=True)
class Curious(fc.Selector[Seen]):
    """Asks everybody for a loss of its own, picks the largest, and remembers all numbers."""

    watched = (LARGE_LOSS, LARGE_LOSS_AFTER, STEP, SLOPE)

    @property
    def requires(self):
        return frozenset({*self.watched, fc.Signal.LOSS_QUERY})

    def init(self, clients, rng):
        return Seen(np.full((clients.n, len(self.watched)), np.nan))

    def query(self, state, slate, rng):
        return fc.Losses(slate.candidates, frozenset({LARGE_LOSS}))

    def select(self, state, slate, answer, rng):
        score = np.nan_to_num(answer[LARGE_LOSS])
        return fc.Cohort(
            slate.candidates[np.argsort(-score)[: slate.size]], candidates=slate.candidates, score=score
        ), state

    def update(self, state, outcome):
        last = state.last.copy()
        last[outcome.clients] = np.column_stack([outcome[signal] for signal in self.watched])
        return Seen(last)


@dataclass(frozen=True, kw_only=True)
class Gentle(fc.Selector[Seen]):
    """Picks the clients whose batteries lost least, which only a client can tell."""

    @property
    def requires(self):
        return frozenset({DRAIN, SENSORS})

    def init(self, clients, rng):
        return Seen(np.zeros((clients.n, 3)))

    def select(self, state, slate, answer, rng):
        used = slate.of_candidates(state.last)[:, 0]
        return fc.Cohort(
            slate.candidates[np.argsort(used)[: slate.size]], candidates=slate.candidates, score=-used
        ), state

    def update(self, state, outcome):
        last = state.last.copy()
        last[outcome.clients] = np.column_stack([outcome[DRAIN], outcome[SENSORS]])
        return Seen(last)
