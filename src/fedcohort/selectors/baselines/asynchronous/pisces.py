r"""Pisces: prefer clients with large losses whose updates will not be stale.

.. [Jiang2022] Z. Jiang, W. Wang, B. Li, B. Li, "Pisces: Efficient Federated Learning via Guided Asynchronous Training",
   SoCC 2022, arXiv:2206.09264.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, Optional, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.core.top import top_k

_SEEN = 5  # reports whose staleness is averaged, and models over which losses are compared


@dataclass(frozen=True)
class _PiscesState:
    """What Pisces remembers."""

    places: int  # most clients that were busy at the same time
    loss: FloatArray = per_client()  # (N,) root mean squared loss at the last report; NaN: not explored yet
    version: FloatArray = per_client()  # (N,) the model that this loss belongs to
    lags: FloatArray = per_client()  # (N, 5) staleness of the last reports, the newest last; NaN if there were fewer
    credits: FloatArray = per_client()  # (N,) how many more times its loss may be an outlier


@register("pisces")
@dataclass(frozen=True, kw_only=True)
class Pisces(Selector[_PiscesState]):
    r"""Prefer clients with large losses whose updates will not be stale, and explore new ones ([Jiang2022]_).

    .. math:: U_k = |B_k| \sqrt{\tfrac{1}{|B_k|} \sum_{i \in B_k} Loss(i)^2} \cdot \frac{1}{(\tilde\tau_k + 1)^\beta}

    :math:`\tilde\tau_k` is the mean staleness of the client's last five updates. With probability epsilon, a client
    that never reported is drawn; otherwise the one with the largest :math:`U_k` is taken. Outliers are excluded: a
    client whose loss DBSCAN calls an outlier among those of the last five models loses a credit, and a client without
    credits is never asked again.

    Symbols: :math:`|B_k|` = clients.sizes, the root = Signal.LOSS_RMS, tau = Signal.STALENESS, beta = ``discount``,
    epsilon = ``exploration`` times ``decay`` for every model, at least ``least_exploration``; DBSCAN's radius =
    ``radius``, its least number of neighbours = half the busy clients; credits = ``credits``.

    The utility, the outliers and the credits are those of the paper and its software, with the same numbers (five
    reports, five models, five credits, radius 0.5, half the places). Of epsilon we know only the form; its numbers are
    those of Oort. Deviations: only the newest loss of each client is compared, and only the client that reports is
    judged, once as many losses are known as clients are busy. U covers all of a client's samples, not only those it
    trained on. The host decides when models are made (``buffer`` or ``period`` of a flow). The paper's pace, b models
    in the time of the slowest client, is not part of a selector. In sessions with rounds, all updates are fresh, so
    the largest losses are taken.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(Pisces(exploration=0.0, least_exploration=0.0), ClientTable(sizes=[10] * 3), seed=1)
    >>> everybody = session.ask(RoundRequest(size=3))
    >>> session.tell(RoundReport(everybody.ticket, [0, 1, 2], metrics={Signal.LOSS_RMS: [0.1, 2.0, 0.2]}))
    >>> session.ask(RoundRequest(size=1)).clients
    array([1])
    """

    requires = frozenset({Signal.SIZES, Signal.LOSS_RMS, Signal.STALENESS})

    one_at_a_time = True
    picks_by: ClassVar[str] = (
        "Clients without credits are left out, and a few places go to clients never tried. Of the others, those with "
        "the highest scores are picked."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "statistical": "size times the root mean square of its losses",
        "expected staleness": "mean staleness of its last updates",
        "unexplored": "1 if it never reported",
    }
    checked_params: ClassVar[ParamSets] = {
        "exploit": {"exploration": 0.0, "least_exploration": 0.0, "credits": None},
        "explore": {"least_exploration": 1.0, "discount": 0.0},
        "strict": {"credits": 1, "radius": 1e-06, "discount": 5.0},
    }

    discount: float = param(0.5, Interval(float, 0, None), "exponent of the discount of stale updates (beta); 0: none")
    exploration: float = param(
        0.9, Interval(float, 0, 1), "probability of drawing a client never tried, at first (epsilon)"
    )
    decay: float = param(0.98, Interval(float, 0, 1, "right"), "factor of epsilon per model")
    least_exploration: float = param(0.2, Interval(float, 0, 1), "epsilon does not fall below this")
    credits: int | None = param(
        5, Optional(Interval(int, 1, None)), "outliers after which a client is left out; None: never"
    )
    radius: float = param(0.5, Interval(float, 0, None, "neither"), "distance of neighbouring losses in DBSCAN")

    starves = "clients with small losses come after all others, and outliers are left out"

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _PiscesState:
        """Start with no client explored."""
        unknown = np.full(clients.n, np.nan)
        return _PiscesState(
            0, unknown, unknown, np.full((clients.n, _SEEN), np.nan), np.full(clients.n, float(self.credits or 0))
        )

    def select(
        self, state: _PiscesState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _PiscesState]:
        """Explore with probability epsilon, else take the largest utilities."""
        loss, lags = slate.of_candidates(state.loss), slate.of_candidates(state.lags)
        statistical = slate.of_candidates(slate.clients.sizes) * loss
        seen = np.isfinite(lags)
        expected = np.where(seen, lags, 0.0).sum(axis=1) / np.maximum(seen.sum(axis=1), 1)
        score = statistical / (expected + 1.0) ** self.discount
        trusted = np.ones(len(loss), np.bool_)
        if self.credits is not None:
            trusted = slate.of_candidates(state.credits) > 0
            if trusted.sum() < slate.size:  # a client without credits is better than none
                trusted[:] = True
        unseen = np.flatnonzero(np.isnan(loss) & trusted)
        known = np.flatnonzero(np.isfinite(loss) & trusted)
        # The paper says that epsilon falls, but not how; this is Oort's rule, with models for rounds.
        epsilon = max(self.exploration * self.decay**slate.round, self.least_exploration)
        exploring = min(int(rng.binomial(slate.size, epsilon)), len(unseen))
        exploiting = min(slate.size - exploring, len(known))
        exploring = slate.size - exploiting  # enough are unseen, because at least slate.size are trusted
        best = known[top_k(score[known], exploiting, rng)]
        new = rng.choice(unseen, exploring, replace=False) if exploring else np.empty(0, np.int64)
        cohort = Cohort(
            slate.candidates[np.concatenate([best, new])],
            candidates=slate.candidates,
            score=score,
            parts={
                "statistical": statistical,
                "expected staleness": np.where(np.isnan(loss), np.nan, expected),
                "unexplored": np.isnan(loss).astype(np.float64),
            },
            notes={
                "exploration": round(epsilon, 4),
                "unexplored picked": len(new),
                "left out as outliers": int((~trusted).sum()),
            },
        )
        # The largest number ever busy stands for the paper's concurrency, which a selector is not told.
        busy = slate.size + (0 if slate.busy is None else len(slate.busy))
        places = max(state.places, busy)
        return cohort, _PiscesState(places, state.loss, state.version, state.lags, state.credits)

    def update(self, state: _PiscesState, outcome: Outcome) -> _PiscesState:
        """Update the losses and staleness of the clients that answered, and look for outliers."""
        clients = outcome.clients[outcome.ok]
        loss, version, lags = state.loss.copy(), state.version.copy(), state.lags.copy()
        loss[clients] = np.maximum(outcome[Signal.LOSS_RMS][outcome.ok], 0.0)
        version[clients] = outcome.round
        # The newest last, and the oldest of the five drops out.
        lags[clients] = np.column_stack([lags[clients, 1:], outcome[Signal.STALENESS][outcome.ok]])
        credits = state.credits
        if self.credits is not None and len(clients):
            recent = np.flatnonzero((version > outcome.round - _SEEN) & (version <= outcome.round))
            # With fewer losses than places, every loss could look alone.
            if len(recent) >= max(state.places, 1):
                outliers = recent[self._outliers(loss[recent], max(state.places // 2, 1))]
                credits = credits.copy()
                credits[np.intersect1d(clients, outliers)] -= 1
        return _PiscesState(state.places, loss, version, lags, credits)

    def _outliers(self, losses: FloatArray, min_near: int) -> BoolArray:
        """(r,) which losses DBSCAN calls outliers: no loss within the radius has ``min_near`` losses within it."""
        # DBSCAN on a line: neighbours are counted by two searches in sorted losses instead of all pairs.
        order = np.sort(losses)
        low, high = losses - self.radius, losses + self.radius
        close = np.searchsorted(order, high, "right") - np.searchsorted(order, low, "left")
        cores = np.sort(losses[close >= min_near])
        near = np.searchsorted(cores, high, "right") - np.searchsorted(cores, low, "left")
        return np.asarray(near == 0)
