r"""FLASH: a linear contextual bandit over each client's losses, speed and last reward.

.. [Chang2024] X. Chang, S. M. Ahmed, B. Guler, S. V. Krishnamurthy, A. Swami, S. Oymak, A. K. Roy-Chowdhury, "FLASH:
   Federated Learning Across Simultaneous Heterogeneities", arXiv:2402.08769, 2024.

The paper's noise-robust loss is a matter of local training (the simulator's loss ``robust``), and the early stop it
gives to other selectors is :class:`fedcohort.early_stop.EarlyStop`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fedcohort.arrays import AnyArray, BoolArray, FloatArray, IntArray, sealed
from fedcohort.clients import ClientTable
from fedcohort.errors import ParameterError
from fedcohort.numerics.ridge import observed, posterior_draw, solution
from fedcohort.numerics.top import top_k
from fedcohort.params import Interval, OneOf, Optional, Sequence, param
from fedcohort.protocol import Answer, Cohort, Losses, Outcome, Query, Selector, Slate, per_client, register
from fedcohort.signals import Signal

ELEMENTS = ("robust-loss", "validation-loss", "duration", "last-reward")
_LOSS_OF = {"robust-loss": Signal.ROBUST_LOSS, "validation-loss": Signal.VALIDATION_LOSS}

# Contexts and rewards are cut off at 100 times their usual size, durations also at a hundredth: one diverged client or
# one reply in no time would otherwise outweigh all other observations in V for ever.
LIMIT = 100.0


class _Reading(NamedTuple):
    """One way to read the paper's reward."""

    before: Signal
    after: Signal | None  # None: the same loss of the next global model, from the next round's query
    absolute: bool


READINGS = {
    "pseudo-decrease": _Reading(Signal.PSEUDO_LOSS, Signal.PSEUDO_LOSS_AFTER, False),
    "pseudo-change": _Reading(Signal.PSEUDO_LOSS, Signal.PSEUDO_LOSS_AFTER, True),
    "robust-decrease": _Reading(Signal.ROBUST_LOSS, Signal.ROBUST_LOSS_AFTER, False),
    "robust-change": _Reading(Signal.ROBUST_LOSS, Signal.ROBUST_LOSS_AFTER, True),
    "validation-decrease": _Reading(Signal.VALIDATION_LOSS, None, False),
}


@dataclass(frozen=True)
class FlashState:
    """The regression, and what was last known about each client."""

    gram: FloatArray  # (d, d) V
    moment: FloatArray  # (d,) b
    rounds: int  # rounds learnt from
    time_unit: float  # median duration of the first round; 0 while unknown
    reward_sum: float
    reward_count: int
    robust: FloatArray = per_client()  # (N,) robust loss over its first value; 1 while unknown
    validation: FloatArray = per_client()  # (N,) validation loss over its first value; 1 while unknown
    duration: FloatArray = per_client()  # (N,) tau of its last round, in units of time_unit; 1 while unknown
    reward: FloatArray = per_client()  # (N,) its last reward
    first_robust: FloatArray = per_client()  # (N,) NaN while unknown
    first_validation: FloatArray = per_client()  # (N,) NaN while unknown
    rewarded: BoolArray = per_client()  # (N,) whether it was ever asked and the outcome is known
    predicted: FloatArray = per_client()  # (N,) the score it was last picked by; NaN when it is not waited for
    streak: IntArray = per_client()  # (N,) times in a row that the score was below the reward
    # Rewards that wait for the next global model (only with reward="validation-decrease").
    waiting: IntArray = field(default_factory=lambda: sealed(np.empty(0, np.int64)))  # (w,) clients
    waiting_context: FloatArray = field(default_factory=lambda: sealed(np.empty((0, 0))))  # (w, d)
    waiting_loss: FloatArray = field(default_factory=lambda: sealed(np.empty(0)))  # (w,) of the model they received

    @property
    def mean_reward(self) -> float:
        """The mean of all rewards so far."""
        return self.reward_sum / self.reward_count if self.reward_count else 0.0


@register("flash")
@dataclass(frozen=True, kw_only=True)
class Flash(Selector[FlashState]):
    r"""Take the clients whose context promises most reward under a sampled linear model ([Chang2024]_, Algorithm 1).

    Client i has the context (Sec. 2.3) of its loss and validation loss relative to their first values, its duration and
    its last reward,

    .. math:: x_i = [L_{robust} / L^1_{robust},\; L_{CE}(V) / L^1_{CE}(V),\; \tau,\; r],

    and expected reward :math:`\theta^\top x_i` (Eq. 1). Ridge regression over all observations and one Thompson draw
    (Eq. 2) give the scores :math:`\tilde\theta^\top x_i`, of which the top M_t are taken:

    .. math:: V = \lambda I + \sum x x^\top, \quad b = \sum r x, \quad \hat\theta = V^{-1} b, \quad
              \tilde\theta \sim N(\hat\theta, (c\,\alpha_t)^2 V^{-1}), \quad
              \alpha_t = \sqrt\lambda + \sqrt{d \ln((1 + t m) / \delta)}

    Symbols: V = ``gram``, b = ``moment``, lambda = ``ridge``, delta = ``delta``, c = ``exploration``, t = round, m =
    number of clients, d = number of context elements, N = ``patience``. M_t is whatever size the host asks for.

    **The reward is ambiguous in the paper**; each reading has a name. Its formula is the absolute change of the robust
    loss over the duration (``robust-change``); the sentence above it says pseudo-label cross-entropy
    (``pseudo-change``); Algorithm 1 evaluates the next global model (``validation-decrease``, on each client's held-out
    data; needs ``contexts="fresh"``). The absolute value rewards clients that change a lot for the worse, those with
    noisy labels, so the default is the signed one, ``pseudo-decrease``: how much closer the client's training moved the
    model to the pseudo-labels of the model it received, per unit of time. ``robust-decrease`` is the signed robust
    loss.

    The early-stop rule (``patience``; off by default) retires a client whose score was smaller than the reward it then
    brought ``patience`` times in a row, and ends the run when all clients are retired.

    Deviations from the paper: alpha_t of the theory is scaled by c = 0.1, because rewards are far smaller than the unit
    variance the theory assumes (c = 1 is the paper). A regression pair is the context a client was picked by and the
    reward it then brought, as in Eq. (1); Algorithm 1 line 9 computes the context after training, when the reward is
    known already. tau is the client's own duration (Algorithm 1 line 8). Durations are in units of the median of the
    first round, so that the choice does not depend on seconds or milliseconds. Contexts, rewards and durations are cut
    off at 100 (durations also at 1/100) so that V stays sound. A client that failed keeps its context with a last
    reward of 0, since the round got nothing from it, and does not enter the regression. One that was never asked has
    the context [1, 1, 1, mean reward so far]. In the first round all clients train, but no more than
    ``first_round_limit`` of them. Retired clients are asked only in rounds in which nobody else is available.

    Examples
    --------
    >>> from fedcohort.protocol import RoundReport, RoundRequest
    >>> from fedcohort.session import Session
    >>> session = Session(Flash(first_round="asked"), ClientTable(n=6), seed=1)
    >>> for _ in range(30):  # clients 0 to 2 have clean labels: training brings the model closer to its pseudo-labels
    ...     cohort = session.ask(RoundRequest(size=2))
    ...     clean = cohort.clients < 3
    ...     report = {
    ...         Signal.ROBUST_LOSS: np.where(clean, 1.0, 3.0),
    ...         Signal.VALIDATION_LOSS: np.where(clean, 0.5, 2.0),
    ...         Signal.DURATION: np.full(2, 60.0),
    ...         Signal.PSEUDO_LOSS: np.full(2, 0.4),
    ...         Signal.PSEUDO_LOSS_AFTER: np.where(clean, 0.3, 0.9),
    ...     }
    ...     session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=report))
    >>> session.ask(RoundRequest(size=2)).clients < 3
    array([ True,  True])
    """

    starves = "a client whose context promises little reward is left out on purpose"

    reward: str = param("pseudo-decrease", OneOf(tuple(READINGS)), "reading of the reward (r_t)")
    context: tuple[str, ...] = param(
        ELEMENTS, Sequence(OneOf(ELEMENTS), 1), "elements of the context vector (x_t); leave some out for the ablation"
    )
    contexts: str = param(
        "last", OneOf(("last", "fresh")), "losses last reported, or asked of all candidates before every round"
    )
    exploration: float = param(0.1, Interval(float, 0, None), "factor on alpha_t (c; the paper: 1)")
    ridge: float = param(1.0, Interval(float, 0, None, "neither"), "regularisation (lambda)")
    delta: float = param(0.1, Interval(float, 0, 1, "neither"), "confidence (delta)")
    first_round: str = param(
        "all", OneOf(("all", "asked")), "who trains in the first round: everybody (S_0), or as many as asked"
    )
    first_round_limit: int = param(1000, Interval(int, 1, None), "most clients of a first round of all")
    patience: int | None = param(
        None, Optional(Interval(int, 1, None)), "rounds in a row with score < reward that retire a client (N)"
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
    def _reading(self) -> _Reading:
        return READINGS[self.reward]

    @property
    def _asked(self) -> frozenset[Signal]:
        """The losses asked of all candidates before a round."""
        if self.contexts != "fresh":
            return frozenset()
        losses = {_LOSS_OF[name] for name in self.context if name in _LOSS_OF}
        return frozenset(losses | ({self._reading.before} if self._reading.after is None else set()))

    @property
    def requires(self) -> frozenset[Signal]:
        """Durations, the losses of the context and those of the reward; loss queries when contexts are fresh."""
        needed = {Signal.DURATION, self._reading.before}
        if self._reading.after is not None:
            needed.add(self._reading.after)
        if self.contexts == "last":
            needed |= {_LOSS_OF[name] for name in self.context if name in _LOSS_OF}
        elif self._asked:
            needed.add(Signal.LOSS_QUERY)
        return frozenset(needed)

    def init(self, clients: ClientTable, rng: np.random.Generator) -> FlashState:
        """Nothing is known: the first context of everybody is [1, 1, 1, 0], V = lambda I, b = 0."""
        n, d = clients.n, len(self.context)
        ones, unknown = sealed(np.ones(n)), sealed(np.full(n, np.nan))
        return FlashState(
            robust=ones,
            validation=ones,
            duration=ones,
            reward=sealed(np.zeros(n)),
            first_robust=unknown,
            first_validation=unknown,
            rewarded=sealed(np.zeros(n, np.bool_)),
            predicted=unknown,
            streak=sealed(np.zeros(n, np.int64)),
            gram=sealed(self.ridge * np.eye(d)),
            moment=sealed(np.zeros(d)),
            rounds=0,
            time_unit=0.0,
            reward_sum=0.0,
            reward_count=0,
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
        """Draw theta, score everybody by it, take the top."""
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
        width = self.exploration * self._alpha(slate.round, slate.n)
        theta = posterior_draw(state.gram, mean, width, rng)
        parts = {
            name: theta[j] * column
            for j, (name, column) in enumerate(self._columns(state, None if slate.everyone else candidates))
        }
        score = np.zeros(len(candidates))
        for part in parts.values():
            score += part
        for name, fitted, drawn in zip(self.context, mean.tolist(), theta.tolist(), strict=True):
            notes[f"theta {name}"] = fitted
            notes[f"drawn {name}"] = drawn
        notes["alpha"] = width
        allowed = score
        if retired is not None:
            out = slate.of_candidates(retired)
            notes["retired"] = int(retired.sum())
            if out.all():
                notes["reason"] = "only retired clients are available"
            elif out.any():
                allowed = np.where(out, -np.inf, score)
        size = min(slate.size, int(np.isfinite(allowed).sum())) if allowed is not score else slate.size
        chosen = candidates[top_k(allowed, size, rng)]
        if self.patience is not None:
            predicted = state.predicted.copy()
            predicted[chosen] = score[np.searchsorted(candidates, chosen)]
            state = dataclasses.replace(state, predicted=sealed(predicted))
        return Cohort(clients=chosen, candidates=candidates, score=score, parts=parts, notes=notes), state

    def update(self, state: FlashState, outcome: Outcome) -> FlashState:
        """Learn from the contexts the clients were picked by and the rewards they brought."""
        duration = outcome[Signal.DURATION]
        reading = self._reading
        usable = outcome.ok & np.isfinite(duration) & np.isfinite(outcome[reading.before])
        if reading.after is not None:
            usable &= np.isfinite(outcome[reading.after])
        who = outcome.clients[usable]
        time_unit = state.time_unit or _typical(duration[usable])
        with np.errstate(over="ignore"):  # infinite is cut off like everything above the limit
            tau = np.clip(duration[usable] / (time_unit or 1.0), 1 / LIMIT, LIMIT)
        context = self._contexts(state, who)
        changes: dict[str, AnyArray] = {}
        if self.contexts == "last":
            changes = self._with_losses(
                state, who, {s: outcome[s][usable] for name, s in _LOSS_OF.items() if name in self.context}
            )
        durations = state.duration.copy()
        durations[who] = tau
        rewards, rewarded = state.reward.copy(), state.rewarded.copy()
        rewards[outcome.clients[~usable]] = 0.0
        rewarded[outcome.clients] = True
        state = dataclasses.replace(
            _replaced(state, changes),
            duration=sealed(durations),
            reward=sealed(rewards),
            rewarded=sealed(rewarded),
            rounds=state.rounds + 1,
            time_unit=time_unit,
        )
        before = outcome[reading.before][usable]
        if reading.after is None:
            return dataclasses.replace(
                state,
                waiting=sealed(np.concatenate([state.waiting, who])),
                waiting_context=sealed(np.concatenate([state.waiting_context, context])),
                waiting_loss=sealed(np.concatenate([state.waiting_loss, before])),
            )
        return self._learnt(state, who, context, self._rate(before, outcome[reading.after][usable], tau))

    def theta(self, state: FlashState) -> dict[str, float]:
        """Return the fitted weight of each context element."""
        return dict(zip(self.context, solution(state.gram, state.moment).tolist(), strict=True))

    # -- the bandit -------------------------------------------------------------------------------------------------

    def _alpha(self, t: int, m: int) -> float:
        d = len(self.context)
        return math.sqrt(self.ridge) + math.sqrt(d * math.log((1 + t * m) / self.delta))

    def _rate(self, before: FloatArray, after: FloatArray, tau: FloatArray) -> FloatArray:
        """Return the rewards: decrease of a loss, or its absolute value, per unit of time."""
        # Losses may be as large as 1e308; their difference must not overflow before it is cut off.
        decrease = np.clip(before, -1e100, 1e100) - np.clip(after, -1e100, 1e100)
        if self._reading.absolute:
            decrease = np.abs(decrease)
        return np.clip(decrease / tau, -LIMIT, LIMIT)

    def _learnt(self, state: FlashState, who: IntArray, context: FloatArray, rewards: FloatArray) -> FlashState:
        """Enter observations into the regression, the last rewards and the early-stop counts."""
        gram, moment = observed(state.gram, state.moment, context, rewards)
        last = state.reward.copy()
        last[who] = rewards
        state = dataclasses.replace(
            state,
            gram=sealed(gram),
            moment=sealed(moment),
            reward=sealed(last),
            reward_sum=state.reward_sum + float(rewards.sum()),
            reward_count=state.reward_count + len(rewards),
        )
        if self.patience is None:
            return state
        streak, predicted = state.streak.copy(), state.predicted.copy()
        waited = np.isfinite(predicted[who])
        streak[who] = np.where(waited, np.where(predicted[who] < rewards, streak[who] + 1, 0), streak[who])
        predicted[who] = np.nan
        return dataclasses.replace(state, streak=sealed(streak), predicted=sealed(predicted))

    def _retired(self, state: FlashState) -> BoolArray | None:
        return None if self.patience is None else np.asarray(state.streak >= self.patience)

    # -- contexts ---------------------------------------------------------------------------------------------------

    def _columns(self, state: FlashState, who: IntArray | None) -> list[tuple[str, FloatArray]]:
        """Return each element's name and its numbers, of ``who`` or of everybody."""
        columns = {
            "robust-loss": state.robust,
            "validation-loss": state.validation,
            "duration": state.duration,
            "last-reward": state.reward,
        }
        chosen = [(name, columns[name] if who is None else columns[name][who]) for name in self.context]
        if "last-reward" in self.context and not state.rewarded.all():
            rewarded = state.rewarded if who is None else state.rewarded[who]
            chosen = [
                (name, np.where(rewarded, column, state.mean_reward) if name == "last-reward" else column)
                for name, column in chosen
            ]
        return chosen

    def _contexts(self, state: FlashState, who: IntArray) -> FloatArray:
        """Return the contexts (k, d) of some clients."""
        return np.stack([column for _, column in self._columns(state, who)], axis=1)

    def _with_losses(self, state: FlashState, who: IntArray, losses: dict[Signal, FloatArray]) -> dict[str, AnyArray]:
        """Return the columns changed by newly known losses of ``who``; NaN leaves what was known."""
        changes: dict[str, AnyArray] = {}
        for signal, values in losses.items():
            name = "robust" if signal is Signal.ROBUST_LOSS else "validation"
            first, column = getattr(state, f"first_{name}").copy(), getattr(state, name).copy()
            known = np.isfinite(values)
            new, loss = who[known], values[known]
            first[new] = np.where(np.isnan(first[new]), loss, first[new])
            column[new] = _relative(loss, first[new])
            changes |= {f"first_{name}": first, name: column}
        return changes

    def _with_answer(self, state: FlashState, candidates: IntArray, answer: Answer) -> FlashState:
        """Take in the losses of the current global model, and the rewards that waited for them."""
        losses = {s: answer[s] for name, s in _LOSS_OF.items() if name in self.context and s in self._asked}
        if len(state.waiting):
            at = np.minimum(np.searchsorted(candidates, state.waiting), len(candidates) - 1)
            now = np.where(candidates[at] == state.waiting, answer[self._reading.before][at], np.nan)
            known = np.isfinite(now)
            who = state.waiting[known]
            rewards = self._rate(state.waiting_loss[known], now[known], state.duration[who])
            state = self._learnt(state, who, state.waiting_context[known], rewards)
            state = dataclasses.replace(
                state,
                waiting=sealed(np.empty(0, np.int64)),
                waiting_context=sealed(np.empty((0, len(self.context)))),
                waiting_loss=sealed(np.empty(0)),
            )
        changes = self._with_losses(state, candidates, losses)
        return _replaced(state, changes)


def _replaced(state: FlashState, columns: dict[str, AnyArray]) -> FlashState:
    """Return the state with some of its columns replaced."""
    given: dict[str, Any] = {name: sealed(column) for name, column in columns.items()}
    return dataclasses.replace(state, **given)


def _relative(loss: FloatArray, first: FloatArray) -> FloatArray:
    """Return loss / first value, cut off; 1 where both are 0."""
    ratio = np.full(len(loss), LIMIT)
    np.divide(loss, first, out=ratio, where=np.abs(first) > np.abs(loss) / LIMIT)
    ratio[(first == 0) & (loss == 0)] = 1.0
    clipped: FloatArray = np.clip(ratio, -LIMIT, LIMIT)
    return clipped


def _typical(duration: FloatArray) -> float:
    """Return the median of the positive durations, 0 when there is none."""
    positive = duration[duration > 0]
    return float(np.median(positive)) if len(positive) else 0.0
