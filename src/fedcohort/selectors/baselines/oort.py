r"""Oort: guided participant selection.

.. [Lai2021] F. Lai, X. Zhu, H. V. Madhyastha, M. Chowdhury, "Oort: Efficient Federated Learning via Guided Participant
   Selection", OSDI 2021.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, Optional, Parameterized, ParamSets, param
from fedcohort.core.plots import Lines, Picture, SelectorRun, number_text
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.core.top import top_k
from fedcohort.selectors.numerics.sampling import weighted_sample


def _pace(record: SelectorRun) -> Lines | None:
    """Return the preferred duration over the rounds, once there is one."""
    known = [(t, float(notes["preferred seconds"])) for t, notes in record.notes if notes.get("preferred seconds")]
    if not known:
        return None
    rounds, seconds = zip(*known, strict=True)
    steps = sum(later > sooner for sooner, later in itertools.pairwise(seconds))
    text = (
        f"{record.opening}, the preferred duration was {number_text(seconds[0])} s at first. The pacer extended it "
        f"{steps:,} time{'s' * (steps != 1)}, to {number_text(seconds[-1])} s."
        if steps
        else f"{record.opening}, the preferred duration was {number_text(seconds[0])} s. The pacer never extended it."
    )
    return Lines({"preferred": (rounds, seconds)}, text=text)


_PACE = Picture("oort-pace", "Preferred duration of a round", "seconds", _pace)


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
    """The parameters of Oort and the ranking they define ([Lai2021]_, Algorithm 1), which PyramidFL uses too."""

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

    pictures: ClassVar[tuple[Picture, ...]] = (_PACE,)

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
        # Rounded at random: epsilon K of a small cohort is below 1 in the end, and rounding down would end exploration.
        expected = epsilon * slate.size
        exploring = min(int(expected) + int(rng.random() < expected % 1.0), len(unseen))
        exploiting = min(slate.size - exploring, len(known))
        exploring = slate.size - exploiting  # enough are unseen, because at least slate.size are not barred
        statistical, bonus, factor = self._terms(state, slate, known)
        utility = (statistical + bonus) * factor
        best, cut_off = np.empty(0, np.int64), 0.0
        if exploiting:
            # Near the best is enough: a draw among them keeps the cohort from being the same top k for many rounds.
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
        # A cohort of the requested size matters more than the blacklist.
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
        # The paper's 0.1. Utilities grow with the number of samples and the bonus does not, so it hardly counts.
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
            # Fixed at the first report, because a step that followed the durations would chase its own choices.
            if step == 0 and len(positive):
                step = float(np.median(positive))
        achieved = np.append(state.achieved[1:], gained.sum())
        reported = min(state.reported + 1, 2 * self.window)
        # Less utility than before, at the same durations: the fast clients have little left to teach.
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


@register("oort")
@dataclass(frozen=True, kw_only=True)
class Oort(Guidance, Selector[OortState]):
    r"""Prefer clients with large losses that are fast enough, and explore new ones ([Lai2021]_, Algorithm 1 and Eq. 1).

    .. math::

        U(i) &= |B_i| \sqrt{\tfrac{1}{|B_i|} \sum_{k \in B_i} Loss(k)^2} \\
        Util(i) &= \Big(\min(U(i), cap) + \sqrt{\tfrac{0.1 \ln R}{L(i)}}\Big) \cdot
            \begin{cases}(T / D(i))^\alpha & T < D(i) \\ 1 & \text{else}\end{cases}

    1. Explore: :math:`\epsilon K` clients are drawn from those never seen. :math:`\epsilon` starts at 0.9 and falls by
       a factor of 0.98 a round to 0.2.
    2. Exploit: the other k places are drawn in proportion to Util from the clients that have at least c = 95% of the
       k-th largest Util.
    3. Robustness: U is capped at its 95% quantile, and after 10 picks a client is left out.
    4. Pacer: when the last W = 20 rounds had less utility than the W before them, :math:`T \leftarrow T + \Delta`.

    Symbols: :math:`|B_i|` = clients.sizes, the root = Signal.LOSS_RMS, D(i) = Signal.DURATION at the last report, L(i)
    the round of the last report, R = round + 1, K = slate.size, epsilon = ``exploration``, alpha = ``penalty``, Delta =
    ``step``, c = ``cut_off``.

    Deviations: U covers all of a client's samples, not only those it trained on. New clients are drawn uniformly, not
    by speed, which is unknown in advance. If :math:`\epsilon K` is not an integer, its fraction is the chance of one
    more client. If the blacklist leaves too few clients, those with the fewest picks come back. No Delta in seconds
    suits every federation, so the default is the median of the first durations reported. For a client that does not
    report, only the number of picks changes. The bonus is added to U as printed in the paper, where it hardly counts.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session, Signal
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(Oort(least_exploration=0.0, exploration=0.0), ClientTable(sizes=[10] * 4), seed=1)
    >>> everybody = session.ask(RoundRequest(size=4))
    >>> metrics = {Signal.LOSS_RMS: [0.1, 2.0, 0.2, 2.1], Signal.DURATION: [1.0, 1.0, 1.0, 9.0]}
    >>> session.tell(RoundReport(everybody.ticket, [0, 1, 2, 3], metrics=metrics))
    >>> session.ask(RoundRequest(size=1)).clients  # client 3 has the largest loss, but is slow
    array([1])
    """

    def init(self, clients: ClientTable, rng: np.random.Generator) -> OortState:
        """Start with no client explored."""
        return self.fresh(clients)

    def select(
        self, state: OortState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, OortState]:
        """Draw known clients by utility, and explore new ones."""
        return self.choose(state, slate, rng), state

    def update(self, state: OortState, outcome: Outcome) -> OortState:
        """Learn utilities and durations; extend the preferred duration when utility falls."""
        return self.learn(state, outcome, outcome[Signal.DURATION] if self.penalty > 0 else None)
