r"""Oort for asynchronous sessions, in which clients are chosen one by one.

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
class _AsyncOortState:
    """What asynchronous Oort remembers."""

    achieved: FloatArray  # (2 W,) statistical utility reported during each of the last models, the newest last
    models: int  # number of models so far, from the newest report
    threshold: float  # the preferred percentile of the durations
    utility: FloatArray = per_client()  # (N,) U(i), at the client's last report; NaN: not explored yet
    last: FloatArray = per_client()  # (N,) L(i), model at which the client was last picked, counted from 1; 0: never
    seconds: FloatArray = per_client()  # (N,) D(i), duration at the last report


@register("oort-async")
@dataclass(frozen=True, kw_only=True)
class AsyncOort(Selector[_AsyncOortState]):
    r"""Oort with models instead of rounds, and a percentile as the preferred duration ([Lai2021]_, [Flame]_).

    .. math::

        Util(i) = \Big(\min(U(i), cap) + \sqrt{\tfrac{0.1 \ln R}{L(i)}}\Big) \cdot
            \begin{cases}(T / D(i))^\alpha & T < D(i) \\ 1 & \text{else}\end{cases}

    1. With probability :math:`\epsilon`, a client that was never tried is drawn. :math:`\epsilon` starts at 0.9 and
       falls by a factor of 0.98 with each model to 0.2.
    2. Otherwise a client is drawn in proportion to Util from those with at least c = 95% of the largest Util.
    3. No client is picked twice during one model while others are available.
    4. T is the p-th percentile of the known durations; p is 30 at first. Every W = 20 models, the utility of the last W
       is compared with that of the W before them. If it fell, p grows by 5. At p = 100, no client is too slow.

    Symbols: U(i) = clients.sizes times Signal.LOSS_RMS at the last report, D(i) = Signal.DURATION, L(i) the model at
    which the client was last picked, R = slate.round + 1, epsilon = ``exploration``, alpha = ``penalty``, p =
    ``threshold``, c = ``cut_off``, W = ``window``.

    Points 3 and 4 and their numbers are from Flame, the rest is from Oort. Deviations: Flame draws a client that was
    never tried whenever there is one, because it rounds up epsilon times one place. Here the probability is epsilon.
    The pacer of Flame compares utilities of picks; here they are utilities of answers. Flame's evaluation tasks and
    its forecasts of availability are not part of a selector. The blacklist, which is off in Flame, is left out.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> selector = AsyncOort(exploration=0.0, least_exploration=0.0, threshold=50.0)
    >>> session = Session(selector, ClientTable(sizes=[10] * 4), seed=1)
    >>> everybody = session.ask(RoundRequest(size=4))
    >>> metrics = {Signal.LOSS_RMS: [0.1, 2.0, 0.2, 2.1], Signal.DURATION: [1.0, 1.0, 1.0, 9.0]}
    >>> session.tell(RoundReport(everybody.ticket, [0, 1, 2, 3], metrics=metrics))
    >>> session.ask(RoundRequest(size=1)).clients  # client 3 has the largest loss, but is slow
    array([1])
    """

    requires = frozenset({Signal.SIZES, Signal.LOSS_RMS, Signal.DURATION, Signal.STALENESS})

    one_at_a_time = True
    picks_by: ClassVar[str] = (
        "Clients picked during this model come last, and a few places go to clients never tried. The others are drawn "
        "at random from the clients near the best, with better odds for higher scores."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "statistical": "size times the root mean square of its losses, capped",
        "staleness": "bonus for a pick long ago",
        "slowness": "penalty for being slower than preferred",
        "unexplored": "1 if it never reported",
    }
    checked_params: ClassVar[ParamSets] = {
        "exploit": {"exploration": 0.0, "least_exploration": 0.0, "cut_off": 0.0},
        "explore": {"least_exploration": 1.0, "window": 1},
        "only the fastest": {"threshold": 0.0, "penalty": 50.0, "window": 1, "pace": 0.0},
    }

    exploration: float = param(
        0.9, Interval(float, 0, 1), "probability of drawing a client never tried, at first (epsilon)"
    )
    decay: float = param(0.98, Interval(float, 0, 1, "right"), "factor of epsilon per model")
    least_exploration: float = param(0.2, Interval(float, 0, 1), "epsilon does not fall below this")
    penalty: float = param(2.0, Interval(float, 0, None), "exponent of the penalty for slow clients (alpha)")
    clip: float = param(0.95, Interval(float, 0, 1, "right"), "quantile that utilities are capped at")
    cut_off: float = param(0.95, Interval(float, 0, 1), "share of the largest utility that is enough to be drawn (c)")
    threshold: float = param(30.0, Interval(float, 0, 100), "preferred percentile of durations, at first (p)")
    pace: float = param(5.0, Interval(float, 0, 100), "how much the percentile grows when utility falls")
    window: int = param(20, Interval(int, 1, None), "models that the pacer compares with as many before them (W)")

    starves = "clients that are slow or have small losses come after all others"

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _AsyncOortState:
        """Start with no client explored."""
        zeros, unknown = np.zeros(clients.n), np.full(clients.n, np.nan)
        return _AsyncOortState(np.zeros(2 * self.window), 0, self.threshold, unknown, zeros, zeros)

    def preferred(self, state: _AsyncOortState) -> float:
        """Return T in seconds; infinity if no client is too slow."""
        known = np.sort(state.seconds[np.isfinite(state.utility)])
        if state.threshold >= 100 or not len(known):
            return float(np.inf)
        return float(known[min(int(len(known) * state.threshold / 100), len(known) - 1)])

    def select(
        self, state: _AsyncOortState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _AsyncOortState]:
        """Explore with probability epsilon, else draw from the clients near the best."""
        utility, last = slate.of_candidates(state.utility), slate.of_candidates(state.last)
        explored = np.isfinite(utility)
        fresh = last != slate.round + 1  # not picked during this model
        if fresh.sum() < slate.size:
            fresh[:] = True
        known, unseen = np.flatnonzero(explored & fresh), np.flatnonzero(~explored & fresh)
        epsilon = max(self.exploration * self.decay**slate.round, self.least_exploration)
        exploring = min(int(rng.binomial(slate.size, epsilon)), len(unseen))
        exploiting = min(slate.size - exploring, len(known))
        exploring = slate.size - exploiting  # more than drawn, if too few are known
        # The cap is over all explored candidates, also those picked during this model: they are evidence too.
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
            threshold = self.cut_off * float(np.partition(among, -exploiting)[-exploiting])
            pool = known[among >= threshold]
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

    def update(self, state: _AsyncOortState, outcome: Outcome) -> _AsyncOortState:
        """Update the clients that answered, and let the pacer compare."""
        ok = outcome.ok
        clients = outcome.clients[ok]
        if not len(clients):
            return state
        gained = outcome.table.sizes[clients] * np.maximum(outcome[Signal.LOSS_RMS][ok], 0.0)
        utility, seconds = state.utility.copy(), state.seconds.copy()
        utility[clients] = gained
        seconds[clients] = np.maximum(outcome[Signal.DURATION][ok], 0.0)
        achieved, threshold = state.achieved, state.threshold
        now = int(outcome.round + outcome[Signal.STALENESS][ok].max())  # the newest model when it answered
        for model in range(state.models + 1, now + 1):
            # At the first report during a model, all models before it are complete.
            fell = achieved[: self.window].sum() > achieved[self.window :].sum()
            if model % self.window == 0 and model >= 2 * self.window and fell:
                threshold = min(threshold + self.pace, 100.0)
            achieved = np.append(achieved[1:], 0.0)
        # Late reports count for the newest model, since the sums of older ones may have been compared already.
        achieved = np.append(achieved[:-1], achieved[-1] + gained.sum())
        models = max(state.models, now)
        return _AsyncOortState(achieved, models, threshold, utility, state.last, seconds)
