r"""FLASH without its bandit: contexts, rewards and first round. Figure 4 of the paper keeps these for other bandits.

.. [Chang2024] X. Chang et al., "FLASH: Federated Learning Across Simultaneous Heterogeneities", arXiv:2402.08769, 2024.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.errors import ParameterError
from fedcohort.core.params import Interval, OneOf, Optional, Sequence, param
from fedcohort.core.protocol import Answer, Cohort, Losses, Outcome, Query, Selector, Slate
from fedcohort.core.signals import Signal
from fedcohort.core.top import top_k
from fedcohort.selectors.papers.flash.context import (
    ELEMENTS,
    LIMIT,
    LOSS_OF,
    OWN_LOSS_OF,
    State,
    columns,
    contexts,
    in_units,
    relative,
    time_unit,
    with_losses,
)

Notes = dict[str, str | float | int]


class Reading(NamedTuple):
    """One way to read the paper's reward, which is ambiguous (Sec. 2.3, Algorithm 1)."""

    before: Signal
    after: Signal | None  # None: the loss "before", of the next global model, from the next round's query
    gain: Callable[[FloatArray, FloatArray], FloatArray]  # from the losses before and after (k,)


def _change(before: FloatArray, after: FloatArray) -> FloatArray:
    """Return how far the loss moved, in either direction."""
    return np.abs(before - after)


def decrease(before: FloatArray, after: FloatArray) -> FloatArray:
    """Return how far the loss fell."""
    return before - after


READINGS = {
    "round-change": Reading(Signal.ROBUST_LOSS, None, _change),  # the formula, over rounds
    "robust-change": Reading(Signal.ROBUST_LOSS, Signal.ROBUST_LOSS_AFTER, _change),
    "pseudo-change": Reading(Signal.PSEUDO_LOSS, Signal.PSEUDO_LOSS_AFTER, _change),
    "validation-decrease": Reading(Signal.VALIDATION_LOSS, None, decrease),
}


@dataclass(frozen=True, kw_only=True)
class ContextualBandit(Selector[State]):
    """The contexts, rewards and first round of FLASH ([Chang2024]_ Sec. 2.3, Algorithm 1); subclasses add a bandit."""

    picks_by: ClassVar[str] = "The clients with the highest scores are picked; ties are broken at random."
    part_meanings: ClassVar[Mapping[str, str]] = {
        "robust-loss": "reward that the regression expects from its robust loss",
        "validation-loss": "reward that the regression expects from its loss on validation data",
        "duration": "reward that the regression expects from its duration",
        "last-reward": "reward that the regression expects from its last reward",
    }

    readings: ClassVar[Mapping[str, Reading]] = READINGS

    reward: str = param("round-change", OneOf(tuple(READINGS)), "reading of the reward (r_t)")
    reward_of: str = param(
        "client",
        OneOf(("client", "round")),
        "losses whose change is rewarded: each client's, or their mean in the round",
    )
    tau: str = param(
        "client", OneOf(("client", "round")), "duration: the client's own, or the longest of its round (tau)"
    )
    time_unit: str = param(
        "first-round", OneOf(("first-round", "milliseconds")), "unit of tau: the first round's median, or the paper's"
    )
    observed: str = param(
        "picked",
        OneOf(("picked", "trained")),
        "context in the regression: the one a client was picked by, or that of its own model after training",
    )
    context: tuple[str, ...] = param(
        ELEMENTS, Sequence(OneOf(ELEMENTS), 1), "elements of the context vector (x_t); leave some out for the ablation"
    )
    contexts: str = param(
        "fresh", OneOf(("last", "fresh")), "losses last reported, or asked of all candidates before every round"
    )
    first_round: str = param(
        "all", OneOf(("all", "asked")), "clients in the first round: all (S_0), or as many as the host asks for"
    )
    first_round_limit: int | None = param(
        None, Optional(Interval(int, 1, None)), "most clients in a first round with all clients; None: no limit"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if len(set(self.context)) != len(self.context):
            raise ParameterError(
                f"The 'context' parameter of {name} must be a list without repeats. Got {self.context!r}."
            )
        if self._reading.after is None and self.contexts != "fresh":
            raise ParameterError(
                f"The 'contexts' parameter of {name} must be 'fresh' with reward={self.reward!r}, which compares the "
                f"losses of two global models. Got {self.contexts!r}."
            )

    @property
    def _reading(self) -> Reading:
        return self.readings[self.reward]

    @property
    def _asked_losses(self) -> frozenset[Signal]:
        """The losses that all candidates are asked for before a round."""
        if self.contexts != "fresh":
            return frozenset()
        losses = {LOSS_OF[name] for name in self.context if name in LOSS_OF}
        return frozenset(losses | ({self._reading.before} if self._reading.after is None else set()))

    @property
    def requires(self) -> frozenset[Signal]:
        """Durations, the losses of the context and the reward, and loss queries if contexts are fresh."""
        needed = {Signal.DURATION, self._reading.before}
        if self._reading.after is not None:
            needed.add(self._reading.after)
        needed |= {LOSS_OF[name] for name in self.context if name in LOSS_OF}
        if self.observed == "trained":
            needed |= {OWN_LOSS_OF[name] for name in self.context if name in OWN_LOSS_OF}
        if self._asked_losses:
            needed.add(Signal.LOSS_QUERY)
        return frozenset(needed)

    def size(self, state: State, asked: int, candidates: int) -> int:
        """Return all candidates in the first round (S_0), up to the limit; then what the host asks for."""
        # Every client has to report once before there is a first loss to divide by.
        if self.first_round == "all" and state.rounds == 0:
            limit = candidates if self.first_round_limit is None else self.first_round_limit
            return max(asked, min(candidates, limit))
        return asked

    def query(self, state: State, slate: Slate, rng: np.random.Generator) -> Query | None:
        """Ask all candidates for losses if contexts are fresh."""
        return Losses(slate.candidates, self._asked_losses) if self._asked_losses else None

    @abstractmethod
    def score(
        self, state: State, slate: Slate, context: Mapping[str, FloatArray], notes: Notes, rng: np.random.Generator
    ) -> tuple[FloatArray, dict[str, FloatArray], State]:
        """Return the scores (c,) of contexts, their parts, and the new state; add to ``notes``.

        ``context`` has a column (c,) for each element.
        """

    @abstractmethod
    def learn(self, state: State, clients: IntArray, context: FloatArray, rewards: FloatArray) -> State:
        """Return the state after rewards (k,) for contexts (k, d); k may be 0."""

    def choose(
        self, state: State, score: FloatArray, reward: FloatArray, size: int, notes: Notes, rng: np.random.Generator
    ) -> IntArray:
        """Return up to ``size`` positions of candidates by their scores and last rewards (c,): the top M_t."""
        return top_k(score, min(size, len(score)), rng)

    def rewards(self, state: State, before: FloatArray, after: FloatArray, tau: FloatArray) -> FloatArray:
        """Return the rewards (k,) per unit of time, by losses before and after and durations.

        ``after`` is the loss of the client's own model, or of the next global one.
        """
        # One reading of the formula has no client in its losses: then all of a round share the change of its mean.
        if self.reward_of == "round" and len(before):
            before, after = np.full(len(before), before.mean()), np.full(len(after), after.mean())
        # Losses may be as large as 1e308. Their difference must not overflow before it is clipped.
        gain = self._reading.gain(np.clip(before, -1e100, 1e100), np.clip(after, -1e100, 1e100))
        return np.asarray(np.clip(gain / tau, -LIMIT, LIMIT))

    def take_answer(self, state: State, candidates: IntArray, answer: Answer | None) -> State:
        """Update the losses of the current global model, and the rewards that depend on them."""
        if answer is None:
            return state
        losses = {s: answer[s] for name, s in LOSS_OF.items() if name in self.context and s in self._asked_losses}
        if len(state.waiting):
            # A client that is away now does not answer, and its reward is lost: the model of that round is gone.
            at = np.minimum(np.searchsorted(candidates, state.waiting), len(candidates) - 1)
            now = np.where(candidates[at] == state.waiting, answer[self._reading.before][at], np.nan)
            known = np.isfinite(now)
            clients, context = state.waiting[known], state.waiting_context[known]
            rewards = self.rewards(state, state.waiting_loss[known], now[known], state.duration[clients])
            state = dataclasses.replace(
                self.learn(state.with_rewards(clients, rewards), clients, context, rewards),
                waiting=np.empty(0, np.int64),
                waiting_context=np.empty((0, len(self.context))),
                waiting_loss=np.empty(0),
            )
        return with_losses(state, candidates, losses)

    def select(
        self, state: State, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, State]:
        """Score all candidates, and choose by the scores."""
        # The answer is about the newest global model, so it comes first: it also settles the rewards of the last round.
        state = self.take_answer(state, slate.candidates, answer)
        notes: Notes = {}
        context = columns(state, self.context, None if slate.everyone else slate.candidates)
        score, parts, state = self.score(state, slate, context, notes, rng)
        allowed = self.choosable(state, slate, notes)
        reward = slate.of_candidates(state.reward)
        picks = allowed[self.choose(state, score[allowed], reward[allowed], slate.size, notes, rng)]
        chosen: IntArray = slate.candidates[picks]
        return Cohort(chosen, candidates=slate.candidates, score=score, parts=parts, notes=notes), state

    def choosable(self, state: State, slate: Slate, notes: Notes) -> IntArray:
        """Return the positions of the candidates that may be chosen: all of them."""
        return np.arange(len(slate.candidates))

    def usable(self, outcome: Outcome) -> BoolArray:
        """Return which clients of a cohort (k,) finished and reported all that their reward needs."""
        # A single NaN would stay in V and b for ever.
        needed = [Signal.DURATION, self._reading.before]
        needed += [] if self._reading.after is None else [self._reading.after]
        return np.asarray(np.all([outcome.ok, *(np.isfinite(outcome[signal]) for signal in needed)], axis=0))

    def _context_after_training(self, state: State, outcome: Outcome, usable: BoolArray, tau: FloatArray) -> FloatArray:
        """Return the contexts (k, d) of line 9: losses of the clients' own models, and the durations of this round."""
        clients = outcome.clients[usable]
        known = columns(state, self.context, clients)
        for name, first in (("robust-loss", state.first_robust), ("validation-loss", state.first_validation)):
            if name in known:
                loss = outcome[OWN_LOSS_OF[name]][usable]
                known[name] = np.where(np.isfinite(loss), relative(loss, first[clients]), known[name])
        if "duration" in known:
            known["duration"] = tau
        return np.stack(list(known.values()), axis=1)

    def update(self, state: State, outcome: Outcome) -> State:
        """Learn from the contexts clients were picked by and the rewards they earned (Algorithm 1, lines 7 to 9)."""
        reading, duration, usable = self._reading, outcome[Signal.DURATION], self.usable(outcome)
        clients, before = outcome.clients[usable], outcome[reading.before][usable]
        context = contexts(state, self.context, clients)  # before the reports change it
        # Fixed in the first round. A unit that moved would give old and new contexts different meanings in V.
        unit = state.time_unit or time_unit(duration[usable])
        tau = in_units(duration[usable], unit)
        if self.time_unit == "milliseconds":
            tau *= 1000 * (unit or 1.0)
        if self.tau == "round" and len(tau):
            tau = np.full(len(tau), tau.max())
        if self.contexts == "last":
            reported = {s: outcome[s][usable] for name, s in LOSS_OF.items() if name in self.context}
            state = with_losses(state, clients, reported)
        if self.observed == "trained":
            context = self._context_after_training(state, outcome, usable, tau)
        durations = state.duration.copy()
        durations[clients] = tau
        last_reward, rewarded = state.reward.copy(), state.rewarded.copy()
        last_reward[outcome.clients[~usable]] = 0.0  # the round got nothing from them
        rewarded[outcome.clients] = True
        state = dataclasses.replace(
            state,
            duration=durations,
            reward=last_reward,
            rewarded=rewarded,
            rounds=state.rounds + 1,
            time_unit=unit,
        )
        if reading.after is None:  # the reward needs the next global model
            return dataclasses.replace(
                state,
                waiting=np.concatenate([state.waiting, clients]),
                waiting_context=np.concatenate([state.waiting_context, context]),
                waiting_loss=np.concatenate([state.waiting_loss, before]),
            )
        rewards = self.rewards(state, before, outcome[reading.after][usable], tau)
        return self.learn(state.with_rewards(clients, rewards), clients, context, rewards)
