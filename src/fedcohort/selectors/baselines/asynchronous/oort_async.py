r"""Oort for clients that are chosen one by one.

.. [Lai2021] F. Lai, X. Zhu, H. V. Madhyastha, M. Chowdhury, "Oort: Efficient Federated Learning via Guided Participant
   Selection", OSDI 2021.
.. [Flame] The selector ``async_oort`` of Flame, Cisco's software for federated learning, Apache 2.0,
   github.com/cisco-open/flame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.numerics.sampling import weighted_sample


@dataclass(frozen=True)
class AsyncOortState:
    """What it remembers."""

    achieved: FloatArray  # (2 W,) statistical utility that came during each of the last models, the newest last
    models: int  # models so far, by the newest report
    threshold: float  # percentile of the durations that is preferred
    utility: FloatArray = per_client()  # (N,) U(i), at the client's last report; NaN: not explored
    last: FloatArray = per_client()  # (N,) L(i), model at which the client was last picked, counted from 1; 0: never
    seconds: FloatArray = per_client()  # (N,) D(i), duration at the last report


@register("oort-async")
@dataclass(frozen=True, kw_only=True)
class AsyncOort(Selector[AsyncOortState]):
    r"""Oort with models in the place of rounds, and a preferred duration that is a percentile ([Lai2021]_, [Flame]_).

    .. math::

        Util(i) = \Big(\min(U(i), cap) + \sqrt{\tfrac{0.1 \ln R}{L(i)}}\Big) \cdot
            \begin{cases}(T / D(i))^\alpha & T < D(i) \\ 1 & \text{else}\end{cases}

    1. With probability :math:`\epsilon`, falling from 0.9 by 0.98 a model to 0.2, a client never tried is drawn.
    2. Else one of those with at least c = 95% of the largest Util, by Util.
    3. Nobody is picked twice during one model, as long as others are there.
    4. T is the p-th percentile of the durations known, p = 30 at first. Every W = 20 models the utility of the last W
       is compared with that of the W before; when it fell, p grows by 5. From p = 100 on nobody is too slow.

    Symbols: U(i) = clients.sizes times Signal.LOSS_RMS at the last report, D(i) = Signal.DURATION, L(i) the model at
    which the client was last picked, R = slate.round + 1, epsilon = ``exploration``, alpha = ``penalty``, p =
    ``threshold``, c = ``cut_off``, W = ``window``.

    What is certain: points 3 and 4 and their numbers are Flame's, the rest is Oort's. Deviations: Flame draws a client
    never tried whenever there is one, because it rounds up one place times epsilon; here the chance is epsilon. Its
    pacer compares utilities of picks, ours those of answers. Its tasks of evaluation and its knowledge of who will be
    there are no part of a selector. The blacklist is off in Flame, and left out.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> selector = AsyncOort(exploration=0.0, least_exploration=0.0, threshold=50.0)
    >>> session = Session(selector, ClientTable(sizes=[10] * 4), seed=1)
    >>> everybody = session.ask(RoundRequest(size=4))
    >>> metrics = {Signal.LOSS_RMS: [0.1, 2.0, 0.2, 2.1], Signal.DURATION: [1.0, 1.0, 1.0, 9.0]}
    >>> session.tell(RoundReport(everybody.ticket, [0, 1, 2, 3], metrics=metrics))
    >>> session.ask(RoundRequest(size=1)).clients  # client 3 has the largest loss, and is slow
    array([1])
    """

    one_at_a_time = True
    picks_by: ClassVar[str] = (
        "Clients picked during this model come last, and a few places go to clients never tried; the others are drawn "
        "by chance among the clients near the best, the higher the score the likelier."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "statistical": "size times root mean square of its losses, cut off above",
        "staleness": "bonus for not having been picked lately",
        "slowness": "deduction for being slower than preferred",
        "unexplored": "1 if it never reported",
    }
    checked_params: ClassVar[ParamSets] = {
        "exploit": {"exploration": 0.0, "least_exploration": 0.0, "cut_off": 0.0},
        "explore": {"least_exploration": 1.0, "window": 1},
        "only the fastest": {"threshold": 0.0, "penalty": 50.0, "window": 1, "pace": 0.0},
    }

    exploration: float = param(0.9, Interval(float, 0, 1), "chance of a client never tried, at first (epsilon)")
    decay: float = param(0.98, Interval(float, 0, 1, "right"), "factor of epsilon per model")
    least_exploration: float = param(0.2, Interval(float, 0, 1), "epsilon does not fall below this")
    penalty: float = param(2.0, Interval(float, 0, None), "exponent for clients slower than preferred (alpha)")
    clip: float = param(0.95, Interval(float, 0, 1, "right"), "quantile that utilities are capped at")
    cut_off: float = param(0.95, Interval(float, 0, 1), "share of the last admitted utility that still admits (c)")
    threshold: float = param(30.0, Interval(float, 0, 100), "percentile of durations that is preferred at first (p)")
    pace: float = param(5.0, Interval(float, 0, 100), "how much the percentile grows when utility falls")
    window: int = param(20, Interval(int, 1, None), "models the pacer compares with as many before (W)")

    starves = "clients with small losses, and slow ones, come after all others"

    @property
    def requires(self) -> frozenset[Signal]:
        """Sizes, root mean squared losses, durations and staleness."""
        return frozenset({Signal.SIZES, Signal.LOSS_RMS, Signal.DURATION, Signal.STALENESS})

    def init(self, clients: ClientTable, rng: np.random.Generator) -> AsyncOortState:
        """Nobody is explored."""
        zeros, unknown = np.zeros(clients.n), np.full(clients.n, np.nan)
        return AsyncOortState(np.zeros(2 * self.window), 0, self.threshold, unknown, zeros, zeros)

    def preferred(self, state: AsyncOortState) -> float:
        """Return T in seconds; infinity where nobody is too slow."""
        known = np.sort(state.seconds[np.isfinite(state.utility)])
        if state.threshold >= 100 or not len(known):
            return float(np.inf)
        return float(known[min(int(len(known) * state.threshold / 100), len(known) - 1)])

    def select(
        self, state: AsyncOortState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, AsyncOortState]:
        """Explore by chance, else draw near the best."""
        utility, last = slate.of_candidates(state.utility), slate.of_candidates(state.last)
        explored = np.isfinite(utility)
        fresh = last != slate.round + 1
        if fresh.sum() < slate.size:
            fresh[:] = True
        known, unseen = np.flatnonzero(explored & fresh), np.flatnonzero(~explored & fresh)
        epsilon = max(self.exploration * self.decay**slate.round, self.least_exploration)
        exploring = min(int(rng.binomial(slate.size, epsilon)), len(unseen))
        exploiting = min(slate.size - exploring, len(known))
        exploring = slate.size - exploiting
        cap = float(np.quantile(utility[explored], self.clip)) if explored.any() else 0.0
        statistical = np.minimum(utility, cap)
        bonus = np.sqrt(0.1 * np.log(slate.round + 1) / np.maximum(last, 1))
        preferred, seconds = self.preferred(state), slate.of_candidates(state.seconds)
        factor = np.ones(len(seconds))
        slow = seconds > preferred
        factor[slow] = (preferred / seconds[slow]) ** self.penalty
        score = (statistical + bonus) * factor
        best = np.empty(0, np.int64)
        if exploiting:
            among = score[known]
            least = self.cut_off * float(np.partition(among, -exploiting)[-exploiting])
            pool = known[among >= least]
            best = pool[weighted_sample(score[pool], exploiting, rng)]
        new = rng.choice(unseen, exploring, replace=False) if exploring else np.empty(0, np.int64)
        cohort = Cohort(
            slate.candidates[np.concatenate([best, new])],
            candidates=slate.candidates,
            score=score,
            parts={
                "statistical": statistical,
                "staleness": np.where(explored, bonus, np.nan),
                "slowness": score - statistical - bonus,
                "unexplored": (~explored).astype(np.float64),
            },
            notes={
                "exploration": round(epsilon, 4),
                "unexplored picked": len(new),
                "preferred percentile": state.threshold,
            },
        )
        picked = state.last.copy()
        picked[cohort.clients] = slate.round + 1
        return cohort, replace(state, last=picked)

    def update(self, state: AsyncOortState, outcome: Outcome) -> AsyncOortState:
        """Renew what is known of those that answered, and let the pacer compare."""
        ok = outcome.ok
        who = outcome.clients[ok]
        if not len(who):
            return state
        gained = outcome.table.sizes[who] * np.maximum(outcome[Signal.LOSS_RMS][ok], 0.0)
        utility, seconds = state.utility.copy(), state.seconds.copy()
        utility[who] = gained
        seconds[who] = np.maximum(outcome[Signal.DURATION][ok], 0.0)
        achieved, threshold = state.achieved, state.threshold
        now = int(outcome.round + outcome[Signal.STALENESS][ok].max())  # models there were when it answered
        for model in range(state.models + 1, now + 1):
            # Before the first report of a model, all models before it are complete.
            fell = achieved[: self.window].sum() > achieved[self.window :].sum()
            if model % self.window == 0 and model >= 2 * self.window and fell:
                threshold = min(threshold + self.pace, 100.0)
            achieved = np.append(achieved[1:], 0.0)
        achieved = np.append(achieved[:-1], achieved[-1] + gained.sum())
        models = max(state.models, now)
        return AsyncOortState(achieved, models, threshold, utility, state.last, seconds)
