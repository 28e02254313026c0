r"""TiFL: cohorts of one latency tier.

.. [Chai2020] Z. Chai et al., "TiFL: A Tier-based Federated Learning System", HPDC 2020, arXiv:2001.09249.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Boolean, Interval, Optional, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.core.top import top_k
from fedcohort.selectors.numerics.running import update_means

_MEMORY = 10  # a client's latency is the mean of about so many durations


@dataclass(frozen=True)
class TierState:
    """What TiFL remembers."""

    tier: int  # drawn last, -1 before the first
    rounds: int  # for which a tier was drawn
    chance: FloatArray  # (T,) probability of each tier, the fastest first
    credits: FloatArray  # (T,) rounds each tier may still have
    before: FloatArray  # (T,) mean loss of each tier's clients when the probabilities were last looked at
    seconds: FloatArray = per_client()  # (N,) mean of its last durations
    timed: FloatArray = per_client()  # (N,) how many durations
    asked: FloatArray = per_client()  # (N,) cohorts it was in
    loss: FloatArray = per_client()  # (N,) at its last report, NaN before the first


@register("tifl")
@dataclass(frozen=True, kw_only=True)
class TiFL(Selector[TierState]):
    r"""Draw a tier of clients that take about equally long, and the cohort from it ([Chai2020]_, adaptive).

    1. Profiling: clients that were never timed come first. Latencies divide the others into T tiers.
    2. A tier is drawn by its probability among those that have credits, and pays one.
    3. Every I rounds, when the last tier got no better since, probabilities are changed in favour of the tiers the
       model serves worst:

       .. math:: P_t = \frac{2 (T + 1 - rank_t)}{T (T + 1)}, \qquad rank_t = 1 \text{ for the largest loss}.

    Symbols: T = ``tiers``, I = ``interval``, Credits of the slowest tier = ``credits``, latency = mean of the client's
    last ten Signal.DURATION, tier t has :math:`1/T` of the clients timed so far; equal latencies share a tier.

    Deviations: profiling rounds train, and ``profile`` vain attempts put a client into the slowest tier, where the
    paper leaves it out for good. Tiers follow the latencies of every round. The paper tests the model on data of every
    tier; here a tier is served as well as the mean Signal.LOSS its clients last reported, so a tier that was not drawn
    for long has an old, larger one. The paper says neither how probabilities follow from accuracies (here: by rank)
    nor how many credits there are (here: t times ``credits`` for the t-th tier from the slowest, all renewed when no
    tier that could be drawn has any). A tier with too few candidates is filled up from the nearest.

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
        "Clients never timed come first; then a tier of like speed is drawn by chance, and clients of that tier, "
        "or of the nearest ones, by chance."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "tier": "tier it is in, 1 is the fastest",
        "seconds": "how long it takes",
    }

    checked_params: ClassVar[ParamSets] = {
        "static": {"adaptive": False, "credits": None},
        "one tier": {"tiers": 1, "interval": 1},
        "a tier each": {"tiers": 1000, "credits": 1, "profile": 3},
    }

    tiers: int = param(5, Interval(int, 1, None), "number of tiers (T)")
    interval: int = param(10, Interval(int, 1, None), "rounds after which probabilities are looked at again (I)")
    credits: int | None = param(
        10,
        Optional(Interval(int, 1, None)),
        "rounds of the slowest tier, the t-th from it has t times as many; None: no limit",
    )
    profile: int = param(1, Interval(int, 1, None), "attempts to time a client before it counts as slow")
    adaptive: bool = param(True, Boolean(), "whether tiers with large losses become more probable; else all are equal")

    @property
    def requires(self) -> frozenset[Signal]:
        """Durations, and losses where probabilities follow them."""
        return frozenset({Signal.DURATION, Signal.LOSS} if self.adaptive else {Signal.DURATION})

    def init(self, clients: ClientTable, rng: np.random.Generator) -> TierState:
        """Nobody was timed, and all tiers are equally probable."""
        zeros, unknown = np.zeros(clients.n), np.full(clients.n, np.nan)
        chance, before = np.full(self.tiers, 1.0 / self.tiers), np.full(self.tiers, np.nan)
        return TierState(-1, 0, chance, self._credits(), before, zeros, zeros, zeros, unknown)

    def select(
        self, state: TierState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, TierState]:
        """Time who is new, and fill up from one tier."""
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
            rest = top_k(np.where(new, -np.inf, -distance), slate.size - len(picks), rng)
            picks = np.concatenate([picks, rest])
            notes |= {"tier": drawn + 1, "probability": round(float(state.chance[drawn]), 6)}
            if self.credits is not None:
                notes["credits left"] = int(credits[drawn])
            state = dataclasses.replace(state, tier=drawn, rounds=state.rounds + 1, credits=credits)
        cohort = Cohort(
            slate.candidates[picks],
            candidates=slate.candidates,
            score=np.where(new, 1.0, -distance),
            parts={
                "tier": np.where(new, np.nan, here + 1.0),
                "seconds": np.where(timed > 0, slate.of_candidates(state.seconds), np.nan),
            },
            notes=notes,
        )
        return cohort, state

    def update(self, state: TierState, outcome: Outcome) -> TierState:
        """Learn durations and losses."""
        asked, loss, ok = state.asked.copy(), state.loss.copy(), outcome.ok
        asked[outcome.clients] += 1
        who = outcome.clients[ok]
        seconds, timed = update_means(state.seconds, state.timed, who, outcome[Signal.DURATION][ok], _MEMORY)
        if self.adaptive:
            loss[who] = outcome[Signal.LOSS][ok]
        return dataclasses.replace(state, seconds=seconds, timed=timed, asked=asked, loss=loss)

    def tiers_of(self, state: TierState) -> IntArray:
        """(N,) tier of each client from 0, the fastest; clients never timed are in the slowest."""
        known = state.timed > 0
        if not known.any():
            return np.full(len(known), self.tiers - 1)
        shares = np.arange(1, self.tiers) / self.tiers
        edges = np.quantile(state.seconds[known], shares, method="inverted_cdf")
        return np.asarray(np.searchsorted(edges, np.where(known, state.seconds, np.inf)), np.int64)

    def _credits(self) -> FloatArray:
        return np.arange(self.tiers, 0, -1, dtype=np.float64) * float(self.credits or 0)

    def _draw(
        self, state: TierState, there: np.typing.NDArray[np.bool_], rng: np.random.Generator
    ) -> tuple[int, FloatArray]:
        """Draw a tier among those that are there and have credits; return it and the credits after it paid."""
        if self.credits is None:
            chance = state.chance * there
            return int(rng.choice(self.tiers, p=chance / chance.sum())), state.credits
        credits = state.credits if (there & (state.credits > 0)).any() else self._credits()
        chance = state.chance * (there & (credits > 0))
        drawn = int(rng.choice(self.tiers, p=chance / chance.sum()))
        left = credits.copy()
        left[drawn] -= 1
        return drawn, left

    def _compare_tiers(self, state: TierState, tier: IntArray) -> TierState:
        """Compare the tiers' losses with those of the last look."""
        known = np.isfinite(state.loss)
        count = np.bincount(tier[known], minlength=self.tiers)
        total = np.bincount(tier[known], weights=state.loss[known], minlength=self.tiers)
        now = np.divide(total, count, out=np.full(self.tiers, np.nan), where=count > 0)
        chance = state.chance
        if now[state.tier] >= state.before[state.tier]:  # False where one of them is not known
            chance = by_rank(now)
        return dataclasses.replace(state, chance=chance, before=now)


def by_rank(losses: FloatArray) -> FloatArray:
    """(T,) probabilities that fall linearly from the largest loss to the smallest; equal losses share theirs.

    A tier whose loss is not known counts as the best.

    >>> by_rank(np.array([1.0, 3.0, 2.0])) * 6
    array([1., 3., 2.])
    >>> by_rank(np.array([1.0, 1.0])) * 6
    array([3., 3.])
    """
    losses = np.where(np.isnan(losses), -np.inf, losses)
    smaller = (losses[:, None] > losses).sum(axis=1)
    equal = (losses[:, None] == losses).sum(axis=1)
    weight = smaller + (equal + 1) / 2
    return np.asarray(weight / weight.sum())
