r"""FLASH: a linear contextual bandit over each client's losses, speed and last reward.

.. [Chang2024] X. Chang, S. M. Ahmed, B. Guler, S. V. Krishnamurthy, A. Swami, S. Oymak, A. K. Roy-Chowdhury, "FLASH:
   Federated Learning Across Simultaneous Heterogeneities", arXiv:2402.08769, 2024.

The paper's noise-robust loss is part of local training (the simulator's loss ``robust``). The early stop that it gives
to other selectors is :class:`fedcohort.training.early_stop.EarlyStop`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, OneOf, Optional, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Slate, per_client, register
from fedcohort.selectors.papers.flash.context import ContextState, contexts
from fedcohort.selectors.papers.flash.contextual import ContextualBandit, Notes
from fedcohort.selectors.papers.flash.plots import COEFFICIENTS, THETA
from fedcohort.selectors.papers.flash.regression import add_observations, confidence_width, posterior_draw, solution


@dataclass(frozen=True, kw_only=True)
class FlashState(ContextState):
    """The contexts and the linear regression over them."""

    gram: FloatArray  # (d, d) V
    moment: FloatArray  # (d,) b
    predicted: FloatArray = per_client()  # (N,) theta-hat' x at its last pick; NaN if no reward is due
    streak: IntArray = per_client()  # (N,) times in a row that the prediction was below the reward


@register("flash")
@dataclass(frozen=True, kw_only=True)
class Flash(ContextualBandit[FlashState]):
    r"""Take the clients with the largest expected rewards under a sampled linear model ([Chang2024]_, Algorithm 1).

    The context of client i (Sec. 2.3) is its loss and validation loss relative to their first values, its duration and
    its last reward,

    .. math:: x_i = [L_{robust} / L^1_{robust},\; L_{CE}(V) / L^1_{CE}(V),\; \tau,\; r],

    which all candidates are asked for before every round (Algorithm 2). Its expected reward is
    :math:`\theta^\top x_i` (Eq. 1). Ridge regression over all observations and one Thompson draw (Eq. 2) give the
    scores :math:`\tilde\theta^\top x_i`, and the clients with the top M_t scores are taken:

    .. math:: V = \lambda I + \sum x x^\top, \quad b = \sum r x, \quad \hat\theta = V^{-1} b, \quad
              \tilde\theta \sim N(\hat\theta, (c\,\alpha_t)^2 V^{-1}), \quad
              \alpha_t = \sqrt\lambda + \sqrt{d \ln((1 + t m) / \delta)}

    Symbols: V = ``gram``, b = ``moment``, lambda = ``ridge``, delta = ``delta``, c = ``exploration``, t = round, m =
    number of clients, d = number of context elements, N = ``patience``. M_t is whatever size the host asks for.

    **The reward** of a client is how far the robust loss of the context moved from one round to the next, per unit of
    time (Sec. 2.3; ``round-change``, the default):

    .. math:: r_t(i) = |L^t_{robust} - L^{t-1}_{robust}| / \tau_{t-1}

    It is known once the next global model is, which is also the model that Algorithm 1 evaluates for it (line 13). The
    paper has other readings, so each has a name. ``robust-change`` is the same formula over the client's own local
    training instead of a round. ``pseudo-change`` is that for the pseudo-label cross-entropy, which the sentence above
    the formula names. ``validation-decrease`` evaluates the next global model on each client's held-out data, V in
    line 13. An absolute value also rewards changes for the worse, as in clients with noisy labels; ``flash-advantage``
    does not.

    The early-stop rule of Sec. 3.2 (``patience``; off by default) retires a client for which
    :math:`\hat\theta^\top x` was smaller than the reward it then brought ``patience`` times in a row, and ends the run
    when all clients are retired.

    Deviations from the paper: a regression pair is the context a client was picked by and the reward it then brought,
    as in Eq. (1); Algorithm 1 (lines 9 and 12) pairs the reward with the context after training, when the reward is
    already known. tau is in units of the median of the first round, so that the choice does not depend on the unit of
    time. Contexts, rewards and durations are clipped at 100 (durations also at 1/100), so that one diverged client does
    not outweigh all others in V.

    In the paper all clients are available and answer. Here, a client that failed keeps its context with a last reward
    of 0, since the round got nothing from it, and does not enter the regression; neither does a client that does not
    answer in the next round. The last reward of a client that was never asked to train is the mean reward so far.
    Retired clients are asked only in rounds in which no other client is available. The paper gives no lambda and no
    delta; ours are 1 and 0.1. tau is the client's own duration (Algorithm 1, line 8), not the round's.

    Examples
    --------
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> from fedcohort.core.signals import Signal
    >>> from fedcohort.session.session import Session
    >>> flash = Flash(reward="robust-change", contexts="last", exploration=0.01)  # asks nobody before a round
    >>> session = Session(flash, ClientTable(n=6), seed=1)
    >>> for _ in range(30):  # clients 0 to 2 still learn, the others do not
    ...     cohort = session.ask(RoundRequest(size=2))
    ...     learns = cohort.clients < 3
    ...     report = {
    ...         Signal.ROBUST_LOSS: np.where(learns, 1.0, 3.0),
    ...         Signal.VALIDATION_LOSS: np.where(learns, 0.5, 2.0),
    ...         Signal.DURATION: np.full(cohort.size, 60.0),
    ...         Signal.ROBUST_LOSS_AFTER: np.where(learns, 0.5, 3.0),
    ...     }
    ...     session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=report))
    >>> session.ask(RoundRequest(size=2)).clients < 3
    array([ True,  True])
    """

    checked_params: ClassVar[ParamSets] = {
        "ablation": {"context": ("duration",), "first_round": "asked"},
        "local training": {"reward": "robust-change", "contexts": "last"},
        "sentence": {"reward": "pseudo-change", "first_round_limit": 3},
        "algorithm": {"reward": "validation-decrease"},
        "greedy": {"exploration": 0.0, "ridge": 1e-06},
        "early stop": {"patience": 50},
        "the round's": {"reward_of": "round", "tau": "round", "alpha": "constant"},
        "after training": {"observed": "trained", "time_unit": "milliseconds"},
    }

    starves = "a client whose context promises little reward is not picked while others promise more"

    pictures = (COEFFICIENTS,)

    alpha: str = param(
        "growing", OneOf(("growing", "constant")), "width of the draw: alpha_t of Sec. 2.1, or 1 in all rounds"
    )
    exploration: float = param(1.0, Interval(float, 0, None), "factor on it (c); Algorithm 2's alpha if it is constant")
    ridge: float = param(1.0, Interval(float, 0, None, "neither"), "regularisation (lambda)")
    delta: float = param(0.1, Interval(float, 0, 1, "neither"), "confidence (delta)")
    patience: int | None = param(
        None, Optional(Interval(int, 1, None)), "rounds in a row with theta-hat' x < reward that retire a client (N)"
    )

    def init(self, clients: ClientTable, rng: np.random.Generator) -> FlashState:
        """Start with the context [1, 1, 1, 0] for every client, V = lambda I and b = 0."""
        n, d = clients.n, len(self.context)
        return FlashState(
            **FlashState.unknown(n, d),
            predicted=np.full(n, np.nan),
            streak=np.zeros(n, np.int64),
            gram=self.ridge * np.eye(d),
            moment=np.zeros(d),
        )

    def score(
        self, state: FlashState, slate: Slate, context: Mapping[str, FloatArray], notes: Notes, rng: np.random.Generator
    ) -> tuple[FloatArray, dict[str, FloatArray], FlashState]:
        """Draw theta, and score all candidates by it (Algorithm 2)."""
        mean = solution(state.gram, state.moment)
        width = self.exploration
        if self.alpha == "growing":
            width *= confidence_width(slate.round, slate.n, len(self.context), self.ridge, self.delta)
        # One draw for all candidates: Thompson sampling draws a model, not a score for each arm.
        theta = posterior_draw(state.gram, mean, width, rng)
        parts = {name: theta[j] * column for j, (name, column) in enumerate(context.items())}
        score = np.zeros(len(slate.candidates))
        for part in parts.values():
            score += part
        for name, fitted, drawn in zip(self.context, mean.tolist(), theta.tolist(), strict=True):
            notes[f"{THETA}{name}"] = fitted
            notes[f"drawn {name}"] = drawn
        notes["alpha"] = width
        return score, parts, state

    def learn(self, state: FlashState, clients: IntArray, context: FloatArray, rewards: FloatArray) -> FlashState:
        """Add observations to the regression and to the counts of the early stop."""
        gram, moment = add_observations(state.gram, state.moment, context, rewards)
        state = dataclasses.replace(state, gram=gram, moment=moment)
        if self.patience is None:
            return state
        # A shadow also learns from clients that it did not pick, for which it has no prediction.
        streak, predicted = state.streak.copy(), state.predicted.copy()
        due = np.isfinite(predicted[clients])
        longer = np.where(predicted[clients] < rewards, streak[clients] + 1, 0)
        streak[clients] = np.where(due, longer, streak[clients])
        predicted[clients] = np.nan
        return dataclasses.replace(state, streak=streak, predicted=predicted)

    def select(
        self, state: FlashState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, FlashState]:
        """Take the top scores; with early stop, remember the reward that each pick is expected to bring."""
        if self.patience is None:
            return super().select(state, slate, answer, rng)
        # Before the choice, because the rewards that the answer settles may retire the last client.
        state = self.take_answer(state, slate.candidates, answer)
        if self._is_retired(state).all():
            return Cohort(np.empty(0, np.int64), stop="every client has been retired by the early-stop rule"), state
        cohort, state = super().select(state, slate, None, rng)
        predicted = state.predicted.copy()
        predicted[cohort.clients] = contexts(state, self.context, cohort.clients) @ solution(state.gram, state.moment)
        return cohort, dataclasses.replace(state, predicted=predicted)

    def choosable(self, state: FlashState, slate: Slate, notes: Notes) -> IntArray:
        """Return the positions of the candidates that are not retired, or of all if all are."""
        every_position = super().choosable(state, slate, notes)
        if self.patience is None:
            return every_position
        retired = self._is_retired(state)
        notes["retired"] = int(retired.sum())
        out = slate.of_candidates(retired)
        if out.all():
            notes["reason"] = "only retired clients are available"
            return every_position
        return np.flatnonzero(~out)

    def _is_retired(self, state: FlashState) -> BoolArray:
        return np.asarray(state.streak >= (self.patience or np.inf))
