"""FLASH with our own reward and draw.

.. [Chang2024] X. Chang et al., "FLASH: Federated Learning Across Simultaneous Heterogeneities", arXiv:2402.08769, 2024.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Either, Interval, OneOf, Optional, ParamSets, param
from fedcohort.core.protocol import Outcome, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.core.top import top_k
from fedcohort.selectors.papers.flash.contextual import READINGS, Notes, Reading, decrease
from fedcohort.selectors.papers.flash.selector import Flash, FlashState


@dataclass(frozen=True, kw_only=True)
class _FlashLevels(FlashState):
    """What FLASH knows, and the losses that the clients last reported for the model they received."""

    level: FloatArray = per_client()  # (N,) NaN if unknown


def _advantage(usual: FloatArray, after: FloatArray) -> FloatArray:
    """Return how far the loss after training is below the ``usual`` loss, as a share of it; 0 where that is 0.

    >>> _advantage(np.array([2.0, 2.0, 0.0]), np.array([0.5, 3.0, 1.0]))
    array([ 0.75, -0.5 ,  0.  ])
    """
    return np.divide(usual - after, usual, out=np.zeros(len(after)), where=usual > 1e-100)


_ADVANTAGE = "robust-advantage"
_OUR_READINGS = {
    _ADVANTAGE: Reading(Signal.ROBUST_LOSS, Signal.ROBUST_LOSS_AFTER, _advantage),
    "robust-decrease": Reading(Signal.ROBUST_LOSS, Signal.ROBUST_LOSS_AFTER, decrease),
    "pseudo-decrease": Reading(Signal.PSEUDO_LOSS, Signal.PSEUDO_LOSS_AFTER, decrease),
    **READINGS,
}


@register("flash-advantage")
@dataclass(frozen=True, kw_only=True)
class FlashAdvantage(Flash):
    r"""FLASH that rewards clients for beating the federation, and draws from all clients that promise a reward.

    It is :class:`~fedcohort.selectors.papers.flash.Flash` ([Chang2024]_) with five changes.

    *The reward* compares with the federation (``robust-advantage``). With the robust loss :math:`L_i` of client i's own
    model after training, and the mean :math:`\bar L` of the losses that all clients last reported for the model they
    received,

    .. math:: r_i = \frac{1 - L_i / \bar L}{\tau_i}.

    The paper's absolute change rewards clients with wrong labels. Its signed form ``pseudo-decrease`` avoids them, but
    rewards clients that already agree with the model, so that with skewed labels a handful of them train in every
    round. ``robust-decrease`` is the signed formula. Wrong labels cannot be learnt in one round, so the loss of noisy
    clients stays above the mean and their advantage is below 0. The loss of skewed but clean clients falls below the
    mean, whatever the model knew before.

    *The draw.* As long as scores differ, the top M_t are always the same few clients. Here the cohort is drawn
    uniformly from all promising candidates, whose score or last reward is above 0. If there are too few, it is drawn
    from the top four fifths of the scores (``pool=0.8``). With probability ``uniform_share``, a place goes to a client
    drawn from all candidates.

    *Exploration.* The alpha_t of the theory is scaled by 0.1, because rewards are far smaller than the unit variance
    that the theory assumes. *Contexts* are those last reported, so that no client is asked before a round
    (``contexts="last"``). *The first round* has at most 1,000 clients.

    Examples
    --------
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> from fedcohort.session.session import Session
    >>> session = Session(FlashAdvantage(first_round="asked", pool=0.5), ClientTable(n=6), seed=1)
    >>> for _ in range(30):  # clients 0 to 2 have clean labels, which can be learnt
    ...     cohort = session.ask(RoundRequest(size=2))
    ...     clean = cohort.clients < 3
    ...     report = {
    ...         Signal.ROBUST_LOSS: np.where(clean, 1.0, 3.0),
    ...         Signal.VALIDATION_LOSS: np.where(clean, 0.5, 2.0),
    ...         Signal.DURATION: np.full(2, 60.0),
    ...         Signal.ROBUST_LOSS_AFTER: np.where(clean, 0.5, 2.5),
    ...     }
    ...     session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=report))
    >>> cohort = session.ask(RoundRequest(size=2))
    >>> cohort.clients < 3, cohort.notes["promising"]
    (array([ True,  True]), 3)
    """

    picks_by: ClassVar[str] = (
        "The cohort is drawn at random from a pool of clients whose score or last reward is promising."
    )

    checked_params: ClassVar[ParamSets] = {
        "the paper's draw": {"pool": "top", "uniform_share": 0.0},
        "the paper's reward": {"reward": "round-change", "contexts": "fresh", "first_round_limit": None},
        "signed": {"reward": "pseudo-decrease", "pool": 0.0},
        "uniform": {"uniform_share": 1.0, "reward": "robust-decrease", "first_round": "asked"},
        "one element": {"context": ("last-reward",), "ridge": 1e-06, "delta": 0.999},
        "early stop": {"patience": 50, "ridge": 1e06, "delta": 1e-09},
    }

    readings = _OUR_READINGS
    starves = "a client whose context promises no reward can only get the few places that are drawn from all clients"

    reward: str = param(_ADVANTAGE, OneOf(tuple(_OUR_READINGS)), "what is rewarded (r_t)")
    contexts: str = param(
        "last", OneOf(("last", "fresh")), "losses last reported, or asked of all candidates before every round"
    )
    first_round_limit: int | None = param(
        1000, Optional(Interval(int, 1, None)), "most clients in a first round with all clients; None: no limit"
    )
    exploration: float = param(0.1, Interval(float, 0, None), "factor on alpha_t (c)")
    pool: float | Literal["top"] = param(
        0.8,
        Either(OneOf(("top",)), Interval(float, 0, 1)),
        "draw from all that promise a reward above 0, at least this share of the candidates; or take the top M_t",
    )
    uniform_share: float = param(
        0.1, Interval(float, 0, 1), "probability that a place of the cohort is drawn from all clients"
    )

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _FlashLevels:
        """Start as FLASH does, without losses."""
        return _FlashLevels(**vars(super().init(clients, rng)), level=np.full(clients.n, np.nan))

    def rewards(self, state: FlashState, before: FloatArray, after: FloatArray, tau: FloatArray) -> FloatArray:
        """Compare with the federation's mean loss instead of the client's own, if ``reward`` is the advantage."""
        if self.reward == _ADVANTAGE:
            assert isinstance(state, _FlashLevels)
            known = state.level[np.isfinite(state.level)]
            # Clipped, because one diverged loss would make everybody else's reward the same.
            before = np.full(len(after), np.clip(known, -1e100, 1e100).mean() if len(known) else 0.0)
        return super().rewards(state, before, after, tau)

    def update(self, state: FlashState, outcome: Outcome) -> FlashState:
        """Remember the losses of the received model, then learn as FLASH does."""
        assert isinstance(state, _FlashLevels)
        usable = self.usable(outcome)
        level = state.level.copy()
        level[outcome.clients[usable]] = outcome[self._reading.before][usable]
        return super().update(dataclasses.replace(state, level=level), outcome)

    def choose(
        self,
        state: FlashState,
        score: FloatArray,
        reward: FloatArray,
        size: int,
        notes: Notes,
        rng: np.random.Generator,
    ) -> IntArray:
        """Draw from the promising candidates; in the first round, or if all scores are equal, take the top."""
        count = len(score)
        # In the first round and with equal scores nothing is promising yet, and a pool of all would be a draw of all.
        undecided = state.rounds == 0 or float(np.ptp(score)) == 0.0
        if size >= count or undecided or self.pool == "top":
            picks = top_k(score, min(size, count), rng)
        else:
            pool = np.flatnonzero((score > 0) | (reward > 0))
            notes["promising"] = len(pool)
            # Otherwise the few that happened to be rewarded first would fill every cohort.
            min_pool = max(size, math.ceil(self.pool * count))
            if len(pool) < min_pool:
                pool = top_k(score, min_pool, rng)
            notes["pool"] = len(pool)
            picks = rng.choice(pool, size, replace=False)
        # A share of the places stays open to all, so that a client whose context misleads is seen again.
        places = rng.binomial(size, self.uniform_share) if size < count and self.uniform_share > 0 else 0
        if places and not undecided:
            kept = picks[: size - places]
            others = np.setdiff1d(np.arange(count), kept, assume_unique=True)
            picks = np.concatenate([kept, rng.choice(others, places, replace=False)])
            notes["drawn from everybody"] = places
        return picks
