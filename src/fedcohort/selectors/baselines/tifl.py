r"""TiFL: draw each cohort from clients of similar speed.

.. [Chai2020] Z. Chai et al., "TiFL: A Tier-based Federated Learning System", HPDC 2020, arXiv:2001.09249.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Boolean, Interval, Optional, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.core.top import top_k
from fedcohort.selectors.numerics.running import update_means

_MEMORY = 10  # a client's latency is the mean of about this many durations


@dataclass(frozen=True)
class _TierState:
    """What TiFL remembers."""

    tier: int  # the tier drawn last, -1 before the first
    rounds: int  # number of rounds for which a tier was drawn
    chance: FloatArray  # (T,) probability of each tier, the fastest first
    credits: FloatArray  # (T,) how many more times each tier may be drawn
    before: FloatArray  # (T,) mean loss of each tier's clients at the last comparison
    seconds: FloatArray = per_client()  # (N,) mean of its last durations
    timed: FloatArray = per_client()  # (N,) number of durations
    asked: FloatArray = per_client()  # (N,) number of cohorts it was in
    loss: FloatArray = per_client()  # (N,) at its last report, NaN before the first


@register("tifl")
@dataclass(frozen=True, kw_only=True)
class TiFL(Selector[_TierState]):
    r"""Draw a tier of clients with similar latency, and the cohort from that tier ([Chai2020]_, adaptive).

    1. Profiling: clients that were never timed come first. Latencies divide the others into T tiers.
    2. A tier is drawn by its probability among those that have credits, and pays one.
    3. Every I rounds, if the last tier has not improved, the probabilities change in favour of the tiers that the model
       serves worst:

       .. math:: P_t = \frac{2 (T + 1 - rank_t)}{T (T + 1)}, \qquad rank_t = 1 \text{ for the largest loss}.

    Symbols: T = ``tiers``, I = ``interval``, Credits of the slowest tier = ``credits``, latency = mean of the client's
    last ten Signal.DURATION, tier t has :math:`1/T` of the clients timed so far; equal latencies share a tier.

    Deviations: clients also train in profiling rounds. After ``profile`` failed attempts a client goes into the slowest
    tier; the paper excludes it for good. Tiers follow the latencies of every round. The paper tests the model on data
    of every tier. Here a tier is judged by the mean Signal.LOSS that its clients last reported, so a tier that was not
    drawn for long has an old, larger loss. The paper does not say how probabilities follow from accuracies (here: by
    rank), nor how many credits there are (here: t times ``credits`` for the t-th tier from the slowest, all renewed
    when no tier that could be drawn has any). A tier with too few candidates is filled from the nearest tiers.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session, Signal
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(TiFL(tiers=2, adaptive=False), ClientTable(n=4), seed=1)
    >>> everybody = session.ask(RoundRequest(size=4))
    >>> seconds = [9.0 if client > 1 else 1.0 for client in everybody.clients.tolist()]
    >>> session.tell(RoundReport(everybody.ticket, everybody.clients, metrics={Signal.DURATION: seconds}))
    >>> sorted(session.ask(RoundRequest(size=2)).clients.tolist()) in ([0, 1], [2, 3])
    True
    """

    picks_by: ClassVar[str] = (
        "Clients that were never timed come first. Then a tier of similar speed is drawn at random, and clients are "
        "drawn from that tier, or from the nearest ones."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "tier": "its tier, 1 is the fastest",
        "seconds": "how long it takes",
    }

    checked_params: ClassVar[ParamSets] = {
        "static": {"adaptive": False, "credits": None},
        "one tier": {"tiers": 1, "interval": 1},
        "a tier each": {"tiers": 1000, "credits": 1, "profile": 3},
    }

    tiers: int = param(5, Interval(int, 1, None), "number of tiers (T)")
    interval: int = param(10, Interval(int, 1, None), "rounds between comparisons of the tiers (I)")
    credits: int | None = param(
        10,
        Optional(Interval(int, 1, None)),
        "draws of the slowest tier; the t-th from it has t times as many; None: no limit",
    )
    profile: int = param(1, Interval(int, 1, None), "attempts to time a client before it counts as slow")
    adaptive: bool = param(
        True, Boolean(), "whether tiers with large losses become more probable; otherwise all are equal"
    )

    @property
    def requires(self) -> frozenset[Signal]:
        """Durations, and losses if probabilities follow them."""
        return frozenset({Signal.DURATION, Signal.LOSS} if self.adaptive else {Signal.DURATION})

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _TierState:
        """Start without durations, and with equal probabilities."""
        zeros, unknown = np.zeros(clients.n), np.full(clients.n, np.nan)
        chance, before = np.full(self.tiers, 1.0 / self.tiers), np.full(self.tiers, np.nan)
        return _TierState(-1, 0, chance, self._credits(), before, zeros, zeros, zeros, unknown)

    def select(
        self, state: _TierState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _TierState]:
        """Take clients that were never timed, and fill up from one tier."""
        tier = self.tiers_of(state)
        if self.adaptive and state.rounds and state.rounds % self.interval == 0:
            state = self._compare_tiers(state, tier)
        timed, asked = slate.of_candidates(state.timed), slate.of_candidates(state.asked)
        here, new = slate.of_candidates(tier), (timed == 0) & (asked < self.profile)
        picks = rng.permutation(np.flatnonzero(new))[: slate.size]
        notes: dict[str, str | float | int] = {"never timed": int(new.sum())}
        distance = np.zeros(len(here))
        if len(picks) < slate.size:
            drawn, credits = self._draw(state, np.bincount(here[~new], minlength=self.tiers) > 0, rng)
            distance = np.abs(here - drawn).astype(np.float64)
            # From the drawn tier, and from the nearest ones if it has too few candidates.
            rest = top_k(np.where(new, -np.inf, -distance), slate.size - len(picks), rng)
            picks = np.concatenate([picks, rest])
            notes |= {"tier": drawn + 1, "probability": round(float(state.chance[drawn]), 6)}
            if self.credits is not None:
                notes["credits left"] = int(credits[drawn])
            state = dataclasses.replace(state, tier=drawn, rounds=state.rounds + 1, credits=credits)
        cohort = Cohort(
            slate.candidates[picks],
            candidates=slate.candidates,
            score=np.where(new, 1.0, -distance),  # 1 is above all distances
            parts={
                "tier": np.where(new, np.nan, here + 1.0),
                "seconds": np.where(timed > 0, slate.of_candidates(state.seconds), np.nan),
            },
            notes=notes,
        )
        return cohort, state

    def update(self, state: _TierState, outcome: Outcome) -> _TierState:
        """Learn durations and losses."""
        asked, loss, ok = state.asked.copy(), state.loss.copy(), outcome.ok
        # Also those that failed: after ``profile`` attempts they go into the slowest tier.
        asked[outcome.clients] += 1
        clients = outcome.clients[ok]
        seconds, timed = update_means(state.seconds, state.timed, clients, outcome[Signal.DURATION][ok], _MEMORY)
        if self.adaptive:
            loss[clients] = outcome[Signal.LOSS][ok]
        return dataclasses.replace(state, seconds=seconds, timed=timed, asked=asked, loss=loss)

    def tiers_of(self, state: _TierState) -> IntArray:
        """(N,) tier of each client from 0, the fastest; clients never timed are in the slowest."""
        known = state.timed > 0
        if not known.any():
            return np.full(len(known), self.tiers - 1)
        shares = np.arange(1, self.tiers) / self.tiers
        # Edges are durations that occurred, so that equal latencies share a tier.
        edges = np.quantile(state.seconds[known], shares, method="inverted_cdf")
        return np.asarray(np.searchsorted(edges, np.where(known, state.seconds, np.inf)), np.int64)

    def _credits(self) -> FloatArray:
        return np.arange(self.tiers, 0, -1, dtype=np.float64) * float(self.credits or 0)

    def _draw(self, state: _TierState, present: BoolArray, rng: np.random.Generator) -> tuple[int, FloatArray]:
        """Draw a tier with candidates (``present``, (T,)) and credits; return it and the remaining credits."""
        if self.credits is None:
            chance = state.chance * present
            return int(rng.choice(self.tiers, p=chance / chance.sum())), state.credits
        # The paper does not say what happens when credits are used up. The run must go on, so all are renewed.
        credits = state.credits if (present & (state.credits > 0)).any() else self._credits()
        chance = state.chance * (present & (credits > 0))
        drawn = int(rng.choice(self.tiers, p=chance / chance.sum()))
        left = credits.copy()
        left[drawn] -= 1
        return drawn, left

    def _compare_tiers(self, state: _TierState, tier: IntArray) -> _TierState:
        """Compare the tiers' losses with those of the last comparison."""
        known = np.isfinite(state.loss)
        count = np.bincount(tier[known], minlength=self.tiers)
        total = np.bincount(tier[known], weights=state.loss[known], minlength=self.tiers)
        now = np.divide(total, count, out=np.full(self.tiers, np.nan), where=count > 0)
        # As in the paper, probabilities stay as they are while the drawn tier still improves.
        chance = state.chance
        if now[state.tier] >= state.before[state.tier]:  # False if one of them is unknown
            chance = _by_rank(now)
        return dataclasses.replace(state, chance=chance, before=now)


def _by_rank(losses: FloatArray) -> FloatArray:
    """(T,) probabilities that fall linearly from the largest loss to the smallest; equal losses have equal ones.

    A tier with an unknown loss counts as the best.

    >>> _by_rank(np.array([1.0, 3.0, 2.0])) * 6
    array([1., 3., 2.])
    >>> _by_rank(np.array([1.0, 1.0])) * 6
    array([3., 3.])
    """
    # A tier of which nothing is known would otherwise be drawn most.
    losses = np.where(np.isnan(losses), -np.inf, losses)
    smaller = (losses[:, None] > losses).sum(axis=1)
    equal = (losses[:, None] == losses).sum(axis=1)
    weight = smaller + (equal + 1) / 2
    return np.asarray(weight / weight.sum())
