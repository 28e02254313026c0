r"""FLASH: a linear contextual bandit over each client's losses, speed and last reward.

.. [Chang2024] X. Chang, S. M. Ahmed, B. Guler, S. V. Krishnamurthy, A. Swami, S. Oymak, A. K. Roy-Chowdhury, "FLASH:
   Federated Learning Across Simultaneous Heterogeneities", arXiv:2402.08769, 2024.

The paper's noise-robust loss is a matter of local training (the simulator's loss ``robust``), and the early stop it
gives to other selectors is :class:`fedcohort.training.early_stop.EarlyStop`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray, sealed
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import ParameterError
from fedcohort.core.params import Interval, OneOf, Optional, Sequence, param
from fedcohort.core.plots import Lines, Picture, SelectorRun, number_text
from fedcohort.core.protocol import Answer, Cohort, Losses, Outcome, Query, Selector, Slate, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.papers.flash.context import (
    ELEMENTS,
    LOSS_OF,
    FlashState,
    columns,
    contexts,
    with_losses,
)
from fedcohort.selectors.papers.flash.draw import Draw, pool_param, uniform_share_param
from fedcohort.selectors.papers.flash.observation import observed_round
from fedcohort.selectors.papers.flash.regression import confidence_width, observed, posterior_draw, solution
from fedcohort.selectors.papers.flash.reward import READINGS, Reading, rate

_THETA = "theta "  # a cohort's notes have the fitted coefficients under this and the element's name


def _coefficients(record: SelectorRun) -> Lines | None:
    """Show the fitted coefficient of each context element over the rounds."""
    lines: dict[str, tuple[list[int], list[float]]] = {}
    for t, notes in record.notes:
        for key, value in notes.items():
            if key.startswith(_THETA):
                rounds, values = lines.setdefault(key.removeprefix(_THETA), ([], []))
                rounds.append(t)
                values.append(float(value))
    if not lines:
        return None
    last = {name: values[-1] for name, (_, values) in lines.items()}
    top = max(last, key=lambda name: abs(last[name]))
    effect = "more" if last[top] > 0 else "less"
    text = (
        f"{record.opening} the largest coefficient is that of {top}, {number_text(last[top])}: the higher a client's "
        f"{top}, the {effect} reward is expected of it."
        if last[top]
        else f"{record.opening} nothing has been learned: all coefficients are 0."
    )
    return Lines(lines, text)


@register("flash")
@dataclass(frozen=True, kw_only=True)
class Flash(Selector[FlashState]):
    r"""Take the clients whose context promises most reward under a sampled linear model ([Chang2024]_, Algorithm 1).

    Client i has the context (Sec. 2.3) of its loss and validation loss relative to their first values, its duration and
    its last reward,

    .. math:: x_i = [L_{robust} / L^1_{robust},\; L_{CE}(V) / L^1_{CE}(V),\; \tau,\; r],

    and expected reward :math:`\theta^\top x_i` (Eq. 1). Ridge regression over all observations and one Thompson draw
    (Eq. 2) give the scores :math:`\tilde\theta^\top x_i`:

    .. math:: V = \lambda I + \sum x x^\top, \quad b = \sum r x, \quad \hat\theta = V^{-1} b, \quad
              \tilde\theta \sim N(\hat\theta, (c\,\alpha_t)^2 V^{-1}), \quad
              \alpha_t = \sqrt\lambda + \sqrt{d \ln((1 + t m) / \delta)}

    Symbols: V = ``gram``, b = ``moment``, lambda = ``ridge``, delta = ``delta``, c = ``exploration``, t = round, m =
    number of clients, d = number of context elements, N = ``patience``. M_t is whatever size the host asks for.

    **The reward** is ambiguous in the paper; each reading has a name. Its formula is the absolute change of the robust
    loss over the duration (``robust-change``); the sentence above it says pseudo-label cross-entropy
    (``pseudo-change``); Algorithm 1 evaluates the next global model (``validation-decrease``, on each client's held-out
    data; needs ``contexts="fresh"``). The absolute value rewards clients that change a lot for the worse, those with
    noisy labels. Its signed form ``pseudo-decrease`` avoids them and pays clients that agree with the model already, so
    that under skewed labels a handful of them train for ever; ``robust-decrease`` is the signed formula. The default,
    ``robust-advantage``, compares with the federation: with the robust loss :math:`L_i` of client i's own model after
    training and the mean :math:`\bar L` of what all clients last reported of the model they received,

    .. math:: r_i = \frac{1 - L_i / \bar L}{\tau_i}.

    Wrong labels cannot be learnt in a round, so noisy clients stay above the mean and bring less than 0; skewed clean
    ones come below it whatever the model knew before.

    **The choice.** The paper takes the top M_t scores (``pool="top"``), that is the same few clients as long as scores
    differ. By default the cohort is drawn uniformly from all candidates that promise something, those whose score or
    last reward is above 0, or from the top four fifths of the scores where fewer do (``pool=0.8``); and each place goes
    to somebody drawn from everybody with probability ``uniform_share``.

    The early-stop rule (``patience``; off by default) retires a client for which :math:`\hat\theta^\top x` was smaller
    than the reward it then brought ``patience`` times in a row, and ends the run when all clients are retired.

    Deviations from the paper: the reward and the choice, as above; the paper is ``Flash(reward="robust-change",
    pool="top", uniform_share=0, exploration=1, contexts="fresh")``. alpha_t of the theory is scaled by c = 0.1, because
    rewards are far smaller than the unit variance the theory assumes. Contexts are those last reported; Algorithm 2
    asks everybody for fresh losses before every round, which is booked as such (``contexts="fresh"``). A regression
    pair is the context a client was picked by and the reward it then brought, as in Eq. (1); Algorithm 1 line 9
    computes the context after training, when the reward is known already. tau is the client's own duration (Algorithm 1
    line 8). Durations are in units of the median of the first round, so that the choice does not depend on seconds or
    milliseconds. Contexts, rewards and durations are cut off at 100 (durations also at 1/100) so that V stays sound. A
    client that failed keeps its context with a last reward of 0, since the round got nothing from it, and does not
    enter the regression. One that was never asked has the context [1, 1, 1, mean reward so far]. In the first round all
    clients train, but no more than ``first_round_limit`` of them. Retired clients are asked only in rounds in which
    nobody else is available.

    Examples
    --------
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> from fedcohort.session.session import Session
    >>> session = Session(Flash(first_round="asked", pool=0.5), ClientTable(n=6), seed=1)
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

    starves = "a client whose context promises no reward is left to the few places that are drawn from everybody"

    pictures = (Picture("flash-coefficients", "FLASH: what its score is made of", "coefficient", _coefficients),)

    reward: str = param("robust-advantage", OneOf(tuple(READINGS)), "reading of the reward (r_t)")
    context: tuple[str, ...] = param(
        ELEMENTS, Sequence(OneOf(ELEMENTS), 1), "elements of the context vector (x_t); leave some out for the ablation"
    )
    contexts: str = param(
        "last", OneOf(("last", "fresh")), "losses last reported, or asked of all candidates before every round"
    )
    exploration: float = param(0.1, Interval(float, 0, None), "factor on alpha_t (c; the paper: 1)")
    ridge: float = param(1.0, Interval(float, 0, None, "neither"), "regularisation (lambda)")
    delta: float = param(0.1, Interval(float, 0, 1, "neither"), "confidence (delta)")
    pool: float | Literal["top"] = pool_param()
    uniform_share: float = uniform_share_param()
    first_round: str = param(
        "all", OneOf(("all", "asked")), "who trains in the first round: everybody (S_0), or as many as asked"
    )
    first_round_limit: int = param(1000, Interval(int, 1, None), "most clients of a first round of all")
    patience: int | None = param(
        None, Optional(Interval(int, 1, None)), "rounds in a row with theta-hat' x < reward that retire a client (N)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.context)) != len(self.context):
            raise ParameterError(
                f"The 'context' parameter of Flash must be a list without repeats. Got {self.context!r}."
            )
        if self._reading.after is None and self.contexts != "fresh":
            raise ParameterError(
                f"The 'contexts' parameter of Flash must be 'fresh' with reward={self.reward!r}, which compares the "
                f"losses of two global models. Got {self.contexts!r}."
            )

    @property
    def _reading(self) -> Reading:
        return READINGS[self.reward]

    @property
    def _asked(self) -> frozenset[Signal]:
        """The losses asked of all candidates before a round."""
        if self.contexts != "fresh":
            return frozenset()
        losses = {LOSS_OF[name] for name in self.context if name in LOSS_OF}
        return frozenset(losses | ({self._reading.before} if self._reading.after is None else set()))

    @property
    def requires(self) -> frozenset[Signal]:
        """Durations, the losses of the context and those of the reward; loss queries when contexts are fresh."""
        needed = {Signal.DURATION, self._reading.before}
        if self._reading.after is not None:
            needed.add(self._reading.after)
        if self.contexts == "last":
            needed |= {LOSS_OF[name] for name in self.context if name in LOSS_OF}
        elif self._asked:
            needed.add(Signal.LOSS_QUERY)
        return frozenset(needed)

    def init(self, clients: ClientTable, rng: np.random.Generator) -> FlashState:
        """Nothing is known: the first context of everybody is [1, 1, 1, 0], V = lambda I, b = 0."""
        n, d = clients.n, len(self.context)
        return FlashState(
            **FlashState.unknown(n),
            predicted=sealed(np.full(n, np.nan)),
            streak=sealed(np.zeros(n, np.int64)),
            gram=sealed(self.ridge * np.eye(d)),
            moment=sealed(np.zeros(d)),
            waiting_context=sealed(np.empty((0, d))),
        )

    def size(self, state: FlashState, asked: int, candidates: int) -> int:
        """Everybody in the first round (S_0), up to the limit; then what was asked."""
        if self.first_round == "all" and state.rounds == 0:
            return max(asked, min(candidates, self.first_round_limit))
        return asked

    def query(self, state: FlashState, slate: Slate, rng: np.random.Generator) -> Query | None:
        """With fresh contexts, the losses of all candidates."""
        return Losses(slate.candidates, self._asked) if self._asked else None

    def select(
        self, state: FlashState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, FlashState]:
        """Draw theta, score everybody by it, draw the cohort among those that promise something."""
        if answer is not None:
            state = self._with_answer(state, slate.candidates, answer)
        candidates = slate.candidates
        notes: dict[str, str | float | int] = {}
        retired = self._retired(state)
        if retired is not None and retired.all():
            return Cohort(
                clients=np.empty(0, np.int64), stop="every client has been retired by the early-stop rule"
            ), state
        mean = solution(state.gram, state.moment)
        width = self.exploration * confidence_width(slate.round, slate.n, len(self.context), self.ridge, self.delta)
        theta = posterior_draw(state.gram, mean, width, rng)
        parts = {
            name: theta[j] * column
            for j, (name, column) in enumerate(columns(state, self.context, None if slate.everyone else candidates))
        }
        score = np.zeros(len(candidates))
        for part in parts.values():
            score += part
        for name, fitted, drawn in zip(self.context, mean.tolist(), theta.tolist(), strict=True):
            notes[f"{_THETA}{name}"] = fitted
            notes[f"drawn {name}"] = drawn
        notes["alpha"] = width
        allowed = np.arange(len(candidates))
        if retired is not None:
            out = slate.of_candidates(retired)
            notes["retired"] = int(retired.sum())
            if out.all():
                notes["reason"] = "only retired clients are available"
            else:
                allowed = np.flatnonzero(~out)
        draw = Draw(self.pool, self.uniform_share, first=state.rounds == 0)
        chosen = candidates[
            allowed[draw.picks(score[allowed], state.reward[candidates[allowed]], slate.size, notes, rng)]
        ]
        if self.patience is not None:
            predicted = state.predicted.copy()
            predicted[chosen] = contexts(state, self.context, chosen) @ mean
            state = dataclasses.replace(state, predicted=sealed(predicted))
        return Cohort(clients=chosen, candidates=candidates, score=score, parts=parts, notes=notes), state

    def update(self, state: FlashState, outcome: Outcome) -> FlashState:
        """Learn from the contexts the clients were picked by and the rewards they brought."""
        state, seen = observed_round(state, outcome, self.context, self._reading, losses=self.contexts == "last")
        if seen.rewards is None:
            return dataclasses.replace(
                state,
                waiting=sealed(np.concatenate([state.waiting, seen.who])),
                waiting_context=sealed(np.concatenate([state.waiting_context, seen.context])),
                waiting_loss=sealed(np.concatenate([state.waiting_loss, seen.before])),
            )
        return self._learnt(state, seen.who, seen.context, seen.rewards)

    def theta(self, state: FlashState) -> dict[str, float]:
        """Return the fitted weight of each context element."""
        return dict(zip(self.context, solution(state.gram, state.moment).tolist(), strict=True))

    def _learnt(self, state: FlashState, who: IntArray, context: FloatArray, rewards: FloatArray) -> FlashState:
        """Enter observations into the regression, the last rewards and the early-stop counts."""
        gram, moment = observed(state.gram, state.moment, context, rewards)
        state = dataclasses.replace(state.with_rewards(who, rewards), gram=sealed(gram), moment=sealed(moment))
        if self.patience is None:
            return state
        streak, predicted = state.streak.copy(), state.predicted.copy()
        waited = np.isfinite(predicted[who])
        streak[who] = np.where(waited, np.where(predicted[who] < rewards, streak[who] + 1, 0), streak[who])
        predicted[who] = np.nan
        return dataclasses.replace(state, streak=sealed(streak), predicted=sealed(predicted))

    def _retired(self, state: FlashState) -> BoolArray | None:
        return None if self.patience is None else np.asarray(state.streak >= self.patience)

    def _with_answer(self, state: FlashState, candidates: IntArray, answer: Answer) -> FlashState:
        """Take in the losses of the current global model, and the rewards that waited for them."""
        losses = {s: answer[s] for name, s in LOSS_OF.items() if name in self.context and s in self._asked}
        if len(state.waiting):
            at = np.minimum(np.searchsorted(candidates, state.waiting), len(candidates) - 1)
            now = np.where(candidates[at] == state.waiting, answer[self._reading.before][at], np.nan)
            known = np.isfinite(now)
            who = state.waiting[known]
            rewards = rate(self._reading, state.waiting_loss[known], now[known], state.duration[who], state.usual)
            state = self._learnt(state, who, state.waiting_context[known], rewards)
            state = dataclasses.replace(
                state,
                waiting=sealed(np.empty(0, np.int64)),
                waiting_context=sealed(np.empty((0, len(self.context)))),
                waiting_loss=sealed(np.empty(0)),
            )
        return with_losses(state, candidates, losses)
