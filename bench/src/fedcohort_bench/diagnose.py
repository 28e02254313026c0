"""Does a Gaussian process suit a federation? Simulate the samples that FedCor's Appendix D examines.

Rounds with uniform cohorts train a model. Every few rounds, a look tries many uniform cohorts from the same global
model. Each is trained, averaged and thrown away, and every client reports how much its loss changed. Normality is
checked on the samples of one look, stationarity on those of neighbouring looks.

.. [Tang2022] M. Tang et al., "FedCor: Correlation-Based Active Client Selection Strategy for Heterogeneous Federated
   Learning", CVPR 2022, Appendix D.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError
from fedcohort.core.params import Interval, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Query, Selector, Slate, Trial
from fedcohort.core.signals import Signal
from fedcohort.scenario import Federation
from fedcohort.simulate.config.experiment import RunPlan
from fedcohort.simulate.rounds.group import OnRound
from fedcohort.simulate.rounds.single_run import play_run
from fedcohort_bench.diagnostics import Normality, normality, stationarity

FEWEST_SAMPLES = 20
_COMPONENTS = 5  # principal components to check
_NEARLY = 0.1  # distances below this are small, even if they are no chance
_STEADY, _SLOW = 0.9, 0.5  # similarities of covariances from which they hardly change, or change slowly


@dataclass(frozen=True)
class _TrialState:
    """The loss changes of all looks so far."""

    changes: FloatArray  # (looks, samples, N)


@dataclass(frozen=True, kw_only=True)
class UniformTrials(Selector[_TrialState]):
    """Choose uniform cohorts; every few rounds, also try many uniform cohorts and keep their loss changes."""

    samples: int = param(200, Interval(int, FEWEST_SAMPLES, None), "cohorts to try at each look")
    every: int = param(10, Interval(int, 1, None), "rounds from one look to the next")

    @property
    def requires(self) -> frozenset[Signal]:
        """Trials."""
        return frozenset({Signal.TRIAL_QUERY})

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _TrialState:
        """Start without looks."""
        return _TrialState(np.empty((0, self.samples, clients.n)))

    def query(self, state: _TrialState, slate: Slate, rng: np.random.Generator) -> Query | None:
        """Ask for trials of uniform cohorts if this round has a look."""
        if slate.round % self.every:
            return None
        return Trial(tuple(_uniform(slate, rng) for _ in range(self.samples)))

    def select(
        self, state: _TrialState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _TrialState]:
        """Draw a uniform cohort, and keep the loss changes of the trials."""
        if answer is not None:
            state = _TrialState(np.concatenate([state.changes, answer[Signal.LOSS_CHANGE][None]]))
        return Cohort(clients=_uniform(slate, rng)), state

    def update(self, state: _TrialState, outcome: Outcome) -> _TrialState:
        """Learn nothing from a report."""
        return state


def _uniform(slate: Slate, rng: np.random.Generator) -> IntArray:
    return np.sort(rng.choice(slate.candidates, slate.size, replace=False))


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The result of all looks.

    Attributes
    ----------
    rounds : (L,) int array
        The rounds of the looks.
    normality : list of L Normality
        Normality of the loss changes at each look, by principal component.
    similarity : (L - 1,) float array
        Cosine similarity of the covariances of each look and the next.
    """

    rounds: IntArray
    normality: list[Normality]
    similarity: FloatArray

    @property
    def distance(self) -> float:
        """Kolmogorov's distance to a Gaussian, weighted by each component's variance; the mean over looks."""
        return float(np.mean([np.average(n.distance, weights=n.explained) for n in self.normality]))

    @property
    def chance(self) -> float:
        """The distance that samples of a true Gaussian rarely exceed: 1 / sqrt(samples)."""
        return float(1.0 / np.sqrt(min(len(n.components) for n in self.normality)))

    @property
    def verdict(self) -> str:
        """Whether FedCor's assumption holds here: loss changes are Gaussian, and their covariance changes slowly."""
        gaussian = self.distance < self.chance
        # With many samples, every real distribution is rejected; a small distance still means nearly Gaussian.
        nearly = gaussian or self.distance < _NEARLY
        least = float(self.similarity.min())
        shape = "look Gaussian" if gaussian else "are nearly Gaussian" if nearly else "are not Gaussian"
        pace = "hardly changes" if least >= _STEADY else "changes slowly" if least >= _SLOW else "changes quickly"
        text = (
            f"Loss changes {shape} (distance {self.distance:.2f}, by chance {self.chance:.2f}), and their covariance "
            f"{pace} from one check to the next (least similarity {least:.2f})."
        )
        if nearly and least >= _SLOW:
            return f"{text} FedCor's assumption {'holds' if gaussian and least >= _STEADY else 'roughly holds'} here."
        causes = [] if nearly else ["a Gaussian process describes these losses badly"]
        causes += ["what it learns is soon out of date"] if least < _SLOW else []
        return f"{text} FedCor's assumption does not hold here: {' and '.join(causes)}."


def diagnose(
    table: Mapping[str, Any],
    *,
    looks: int = 6,
    every: int = 10,
    samples: int = 200,
    device: str | None = None,
    on_start: Callable[[int], None] | None = None,
    on_round: OnRound | None = None,
) -> Diagnosis:
    """Examine the loss changes of a configuration's federation while it trains with uniform cohorts.

    Parameters
    ----------
    table : mapping
        A configuration; its data, scenario, model, local training, cohort and first seed are used.
    looks, every, samples : int
        The number of looks, the rounds between two of them (the first is in round 0), and the cohorts to try at each.
    on_start : callable, optional
        Called before the first round with the number of rounds.
    on_round : callable, optional
        Called after every round, as by :meth:`fedcohort.simulate.rounds.group.Group.step`.
    """
    if looks < 2:
        raise InputError(f"Stationarity compares looks, so at least 2 are needed. Got {looks}.")

    def adjust_plan(plan: RunPlan, federation: Federation) -> RunPlan:
        return replace(plan, options=replace(plan.options, rounds=(looks - 1) * every + 1))

    # By its import path: the selector is of no use outside this study, so it is not registered.
    selectors = {"trials": {"name": f"{__name__}:UniformTrials", "samples": samples, "every": every}}
    with play_run(table, selectors, adjust_plan, device=device, on_start=on_start, on_round=on_round) as group:
        state: _TrialState = group.runs[0].session.state
        changes = list(state.changes)
    # Losses that diverge end a run.
    if len(changes) < 2:
        raise InputError(f"The run ended early, after {len(changes)} of {looks} looks.", hint="lower the learning rate")
    return Diagnosis(
        rounds=np.arange(len(changes)) * every,
        normality=[normality(part, _COMPONENTS) for part in changes],
        similarity=stationarity(changes),
    )
