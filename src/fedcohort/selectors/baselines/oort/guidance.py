r"""How Oort ranks and draws clients ([Lai2021]_, Algorithm 1). PyramidFL uses the same ranking.

.. [Lai2021] F. Lai, X. Zhu, H. V. Madhyastha, M. Chowdhury, "Oort: Efficient Federated Learning via Guided Participant
   Selection", OSDI 2021.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, Optional, Parameterized, ParamSets, param
from fedcohort.core.plots import Picture
from fedcohort.core.protocol import Cohort, Outcome, Slate, per_client
from fedcohort.core.signals import Signal
from fedcohort.core.top import top_k
from fedcohort.selectors.baselines.oort.plots import PACE
from fedcohort.selectors.numerics.sampling import weighted_sample


@dataclass(frozen=True)
class OortState:
    """What Oort remembers."""

    achieved: FloatArray  # (2 W,) statistical utility of each of the last rounds, the newest last
    reported: int  # rounds with a report
    step: float  # Delta, seconds; 0 while it is unknown
    relaxed: int  # how often the pacer added a step; T = Delta * (1 + relaxed)
    utility: FloatArray = per_client()  # (N,) U(i), at the client's last report
    last: FloatArray = per_client()  # (N,) L(i), round of the last report counted from 1; 0: not explored yet
    seconds: FloatArray = per_client()  # (N,) D(i), duration at the last report
    picks: FloatArray = per_client()  # (N,) number of cohorts the client was in

    @property
    def preferred(self) -> float:
        """T, the preferred duration of a round in seconds; 0 while it is unknown."""
        return self.step * (1 + self.relaxed)


State = TypeVar("State", bound=OortState)


@dataclass(frozen=True, kw_only=True)
class Guidance(Parameterized):
    """The parameters of Oort, and the ranking they define."""

    picks_by: ClassVar[str] = (
        "Clients that were picked often enough are left out, and a few places go to clients never tried. The others "
        "are drawn at random from the clients near the best, with better odds for higher scores."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "statistical": "size times the root mean square of its losses, capped",
        "staleness": "bonus for a report long ago",
        "slowness": "penalty for being slower than preferred",
        "unexplored": "1 if it was never tried",
    }

    pictures: ClassVar[tuple[Picture, ...]] = (PACE,)

    checked_params: ClassVar[ParamSets] = {
        "exploit": {"exploration": 0.0, "least_exploration": 0.0, "cut_off": 0.0, "blacklist": None},
        "explore": {"least_exploration": 1.0, "window": 1, "blacklist": 1},
        "losses alone": {"penalty": 0.0, "clip": 1.0},
        "fixed step": {"step": 1e-06, "penalty": 50.0},
    }

    exploration: float = param(0.9, Interval(float, 0, 1), "share of unexplored clients in the first cohort (epsilon)")
    decay: float = param(0.98, Interval(float, 0, 1, "right"), "factor of epsilon per round")
    least_exploration: float = param(0.2, Interval(float, 0, 1), "epsilon does not fall below this")
    window: int = param(20, Interval(int, 1, None), "rounds that the pacer compares with as many before them (W)")
    step: float | None = param(
        None,
        Optional(Interval(float, 0, None, "neither")),
        "seconds that the preferred duration starts with and grows by (Delta); None: median of the first durations",
    )
    penalty: float = param(
        2.0, Interval(float, 0, None), "exponent of the penalty for slow clients (alpha); 0: no penalty"
    )
    clip: float = param(0.95, Interval(float, 0, 1, "right"), "quantile that utilities are capped at")
    cut_off: float = param(
        0.95, Interval(float, 0, 1), "share of the k-th largest utility that is enough to be drawn (c)"
    )
    blacklist: int | None = param(
        10, Optional(Interval(int, 1, None)), "picks after which a client is left out; None: never"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exploration == self.least_exploration == 0:
            object.__setattr__(self, "starves", "without exploration, clients that were never picked stay unexplored")

    @property
    def requires(self) -> frozenset[Signal]:
        """Sizes, root mean squared losses, and durations if slow clients are penalised."""
        needed = {Signal.SIZES, Signal.LOSS_RMS}
        return frozenset(needed | {Signal.DURATION} if self.penalty > 0 else needed)

    def fresh(self, clients: ClientTable) -> OortState:
        """Return the state before the first round."""
        zeros = np.zeros(clients.n)
        return OortState(np.zeros(2 * self.window), 0, self.step or 0.0, 0, zeros, zeros, zeros, zeros)

    def choose(self, state: OortState, slate: Slate, rng: np.random.Generator) -> Cohort:
        """Draw ``slate.size`` candidates: exploit, then explore. Unexplored and barred clients have no score."""
        last = slate.of_candidates(state.last)
        barred = self._exclusions(slate.of_candidates(state.picks), slate.size, rng)
        explored = last > 0
        known, unseen = np.flatnonzero(explored & ~barred), np.flatnonzero(~explored & ~barred)
        epsilon = max(self.exploration * self.decay**slate.round, self.least_exploration)
        expected = epsilon * slate.size
        exploring = min(int(expected) + int(rng.random() < expected % 1.0), len(unseen))
        exploiting = min(slate.size - exploring, len(known))
        exploring = slate.size - exploiting  # enough are unseen, because at least slate.size are not barred
        statistical, bonus, factor = self._terms(state, slate, known)
        utility = (statistical + bonus) * factor
        best, cut_off = np.empty(0, np.int64), 0.0
        if exploiting:
            cut_off = self.cut_off * float(np.partition(utility, -exploiting)[-exploiting])
            pool = np.flatnonzero(utility >= cut_off)
            best = known[pool[weighted_sample(utility[pool], exploiting, rng)]]
        new = rng.choice(unseen, exploring, replace=False) if exploring else np.empty(0, np.int64)
        count = len(last)
        return Cohort(
            slate.candidates[np.concatenate([best, new])],
            candidates=slate.candidates,
            score=_spread(utility, known, count),
            parts={
                "statistical": _spread(statistical, known, count),
                "staleness": _spread(bonus, known, count),
                "slowness": _spread((statistical + bonus) * (factor - 1.0), known, count),
                "unexplored": (~explored).astype(np.float64),
            },
            notes={
                "exploration": round(epsilon, 4),
                "unexplored picked": len(new),
                "blacklisted": int(barred.sum()),
                "preferred seconds": round(state.preferred, 6),
                "cut-off": cut_off,
            },
        )

    def _exclusions(self, picks: FloatArray, size: int, rng: np.random.Generator) -> BoolArray:
        """(c,) which candidates are left out; if too few remain, those with the fewest picks come back."""
        if self.blacklist is None:
            return np.zeros(len(picks), np.bool_)
        barred = picks >= self.blacklist
        missing = size - int(len(picks) - barred.sum())
        if missing > 0:
            back = np.flatnonzero(barred)
            barred[back[top_k(-picks[back], missing, rng)]] = False
        return barred

    def _terms(self, state: OortState, slate: Slate, known: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(e,) capped statistical utility, bonus for old reports, and factor for slow clients."""
        clients = slate.candidates[known]
        utility, last, seconds = state.utility[clients], state.last[clients], state.seconds[clients]
        if not len(known):
            return utility, last, seconds
        cap = float(np.quantile(utility, self.clip))
        statistical = np.minimum(utility, cap)
        bonus = np.sqrt(0.1 * np.log(slate.round + 1) / last)
        factor = np.ones(len(known))
        preferred = state.preferred
        if self.penalty > 0 and preferred > 0:
            slow = seconds > preferred
            factor[slow] = (preferred / seconds[slow]) ** self.penalty
        return statistical, bonus, factor

    def learn(self, state: State, outcome: Outcome, seconds: FloatArray | None) -> State:
        """Return the state after a round, with the reports and the pacer's step.

        Parameters
        ----------
        state : OortState
        outcome : Outcome
        seconds : (k,) float array or None
            Duration of each client of the cohort; None if slow clients are not penalised.
        """
        picks = state.picks.copy()
        picks[outcome.clients] += 1
        ok = outcome.ok
        clients = outcome.clients[ok]
        gained = outcome.table.sizes[clients] * np.maximum(outcome[Signal.LOSS_RMS][ok], 0.0)
        utility, last, durations = state.utility.copy(), state.last.copy(), state.seconds.copy()
        utility[clients] = gained
        last[clients] = outcome.round + 1
        step = state.step
        if seconds is not None:
            durations[clients] = seconds[ok]
            positive = seconds[ok][seconds[ok] > 0]
            if step == 0 and len(positive):
                step = float(np.median(positive))
        achieved = np.append(state.achieved[1:], gained.sum())
        reported = min(state.reported + 1, 2 * self.window)
        before, after = achieved[: self.window].sum(), achieved[self.window :].sum()
        falls = reported == 2 * self.window and before > after
        return dataclasses.replace(
            state,
            achieved=achieved,
            reported=reported,
            step=step,
            relaxed=state.relaxed + int(falls),
            utility=utility,
            last=last,
            seconds=durations,
            picks=picks,
        )


def _spread(values: FloatArray, positions: IntArray, n: int) -> FloatArray:
    """(n,) the values at their positions, NaN elsewhere."""
    full = np.full(n, np.nan)
    full[positions] = values
    return full
