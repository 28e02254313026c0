r"""FLASH and its other bandits with a reward and a draw of ours: compare with the federation, draw among the promising.

.. [Chang2024] X. Chang et al., "FLASH: Federated Learning Across Simultaneous Heterogeneities", arXiv:2402.08769, 2024.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.params import Either, Interval, OneOf, Optional, ParamSets, param
from fedcohort.core.protocol import register
from fedcohort.core.signals import Signal
from fedcohort.core.top import top_k
from fedcohort.selectors.baselines.neural_bandit import NeuralBandit, NeuralState
from fedcohort.selectors.baselines.restless_bandit import RestlessBandit, RestlessState
from fedcohort.selectors.papers.flash.context import State
from fedcohort.selectors.papers.flash.contextual import ContextualBandit, Notes
from fedcohort.selectors.papers.flash.reward import READINGS, Reading, decrease
from fedcohort.selectors.papers.flash.selector import Flash, FlashState


def advantage(before: FloatArray, after: FloatArray, usual: float) -> FloatArray:
    """Return how far the loss afterwards lies below the usual one, as a share of it; at 0 nobody has an advantage.

    >>> advantage(np.ones(2), np.array([0.5, 3.0]), 2.0)
    array([ 0.75, -0.5 ])
    """
    return (usual - after) / usual if usual > 1e-100 else np.zeros(len(after))


OUR_READINGS = {
    "robust-advantage": Reading(Signal.ROBUST_LOSS, Signal.ROBUST_LOSS_AFTER, advantage),
    "robust-decrease": Reading(Signal.ROBUST_LOSS, Signal.ROBUST_LOSS_AFTER, decrease),
    "pseudo-decrease": Reading(Signal.PSEUDO_LOSS, Signal.PSEUDO_LOSS_AFTER, decrease),
    **READINGS,
}


@dataclass(frozen=True, kw_only=True)
class Advantage(ContextualBandit[State]):
    """The reward, the draw and the contexts that the variants of this module share; see :class:`FlashAdvantage`."""

    picks_by: ClassVar[str] = (
        "The cohort is drawn by chance from a pool of clients that promise something by score or last reward."
    )

    checked_params: ClassVar[ParamSets] = {
        "the paper's draw": {"pool": "top", "uniform_share": 0.0},
        "the paper's reward": {"reward": "robust-change", "contexts": "fresh", "first_round_limit": None},
        "signed": {"reward": "pseudo-decrease", "pool": 0.0},
        "uniform": {"uniform_share": 1.0, "reward": "robust-decrease", "first_round": "asked"},
    }

    readings = OUR_READINGS
    starves = "a client whose context promises no reward is left to the few places that are drawn from everybody"

    reward: str = param("robust-advantage", OneOf(tuple(OUR_READINGS)), "what is rewarded (r_t)")
    contexts: str = param(
        "last", OneOf(("last", "fresh")), "losses last reported, or asked of all candidates before every round"
    )
    first_round_limit: int | None = param(
        1000, Optional(Interval(int, 1, None)), "most clients of a first round of all; None: no limit"
    )
    pool: float | Literal["top"] = param(
        0.8,
        Either(OneOf(("top",)), Interval(float, 0, 1)),
        "draw from all that promise a reward above 0, at least this share of the candidates; or take the top M_t",
    )
    uniform_share: float = param(
        0.1, Interval(float, 0, 1), "chance that a place of the cohort is drawn from everybody"
    )

    def choose(
        self, state: State, score: FloatArray, reward: FloatArray, size: int, notes: Notes, rng: np.random.Generator
    ) -> IntArray:
        """Draw among the candidates that promise something; the top in the first round, anybody where all are equal."""
        count = len(score)
        undecided = state.rounds == 0 or float(np.ptp(score)) == 0.0
        if size >= count or undecided or self.pool == "top":
            picks = top_k(score, min(size, count), rng)
        else:
            pool = np.flatnonzero((score > 0) | (reward > 0))
            notes["promising"] = len(pool)
            least = max(size, math.ceil(self.pool * count))
            if len(pool) < least:
                pool = top_k(score, least, rng)
            notes["pool"] = len(pool)
            picks = rng.choice(pool, size, replace=False)
        places = rng.binomial(size, self.uniform_share) if size < count and self.uniform_share > 0 else 0
        if places and not undecided:
            kept = picks[: size - places]
            others = np.setdiff1d(np.arange(count), kept, assume_unique=True)
            picks = np.concatenate([kept, rng.choice(others, places, replace=False)])
            notes["drawn from everybody"] = places
        return picks


@register("flash-advantage")
@dataclass(frozen=True, kw_only=True)
class FlashAdvantage(Advantage[FlashState], Flash):
    r"""FLASH that rewards what beats the federation, and draws among all clients that promise a reward.

    It is :class:`~fedcohort.selectors.papers.flash.Flash` ([Chang2024]_) with five changes.

    *The reward* compares with the federation (``robust-advantage``): with the robust loss :math:`L_i` of client i's own
    model after training and the mean :math:`\bar L` of what all clients last reported of the model they received,

    .. math:: r_i = \frac{1 - L_i / \bar L}{\tau_i}.

    The paper's absolute change pays clients whose labels are wrong. Its signed form ``pseudo-decrease`` avoids them and
    pays clients that agree with the model already, so that under skewed labels a handful of them train for ever;
    ``robust-decrease`` is the signed formula. Wrong labels cannot be learnt in a round, so by the advantage noisy
    clients stay above the mean and bring less than 0; skewed clean ones come below it whatever the model knew before.

    *The draw.* The top M_t scores are the same few clients as long as scores differ. Here the cohort is drawn uniformly
    from all candidates that promise something, those whose score or last reward is above 0, or from the top four fifths
    of the scores where fewer do (``pool=0.8``); and each place goes to somebody drawn from everybody with probability
    ``uniform_share``.

    *Exploration.* alpha_t of the theory is scaled by 0.1, because rewards are far smaller than the unit variance the
    theory assumes. *Contexts* are those last reported, so that nobody is asked before a round (``contexts="last"``).
    *The first round* is one of at most 1,000 clients.

    Examples
    --------
    >>> from fedcohort.core.clients import ClientTable
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> from fedcohort.session.session import Session
    >>> session = Session(FlashAdvantage(first_round="asked", pool=0.5), ClientTable(n=6), seed=1)
    >>> for _ in range(30):  # clients 0 to 2 have clean labels: training fits them
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

    formerly = ("flash",)

    exploration: float = param(0.1, Interval(float, 0, None), "factor on alpha_t (c)")


@register("neural-bandit-advantage")
@dataclass(frozen=True, kw_only=True)
class NeuralBanditAdvantage(Advantage[NeuralState], NeuralBandit):
    """The neural bandit of [Chang2024]_ with the reward, the draw and the contexts of :class:`FlashAdvantage`."""

    formerly = ("neural-bandit",)
    added: ClassVar[Mapping[str, object]] = {"contexts": "last"}


@register("restless-bandit-advantage")
@dataclass(frozen=True, kw_only=True)
class RestlessBanditAdvantage(Advantage[RestlessState], RestlessBandit):
    """The restless bandit of [Chang2024]_ with the reward, the draw and the contexts of :class:`FlashAdvantage`."""

    starves = "a client whose context promises no reward is left to places drawn from everybody and rounds that explore"
    formerly = ("restless-bandit",)
    added: ClassVar[Mapping[str, object]] = {"contexts": "last"}
