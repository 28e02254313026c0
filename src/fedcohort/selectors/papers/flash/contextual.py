r"""FLASH with another bandit: the parts its Figure 4 keeps when it replaces the linear one.

.. [Chang2024] X. Chang et al., "FLASH: Federated Learning Across Simultaneous Heterogeneities", arXiv:2402.08769, 2024.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.errors import ParameterError
from fedcohort.core.params import Interval, OneOf, Sequence, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate
from fedcohort.core.signals import Signal
from fedcohort.selectors.papers.flash.context import ELEMENTS, LOSS_OF, State, contexts
from fedcohort.selectors.papers.flash.draw import Draw, pool_param, uniform_share_param
from fedcohort.selectors.papers.flash.observation import observed_round
from fedcohort.selectors.papers.flash.reward import READINGS


@dataclass(frozen=True, kw_only=True)
class ContextualBandit(Selector[State]):
    """Contexts, reward and first round of FLASH ([Chang2024]_ Sec. 2.3, Algorithm 1); the bandit is filled in."""

    reward: str = param(
        "robust-advantage",
        OneOf(tuple(name for name, reading in READINGS.items() if reading.after is not None)),
        "reading of FLASH's reward (r_t)",
    )
    context: tuple[str, ...] = param(ELEMENTS, Sequence(OneOf(ELEMENTS), 1), "elements of FLASH's context vector (x_t)")
    pool: float | Literal["top"] = pool_param()
    uniform_share: float = uniform_share_param()
    first_round: str = param(
        "all", OneOf(("all", "asked")), "who trains in the first round: everybody (S_0), or as many as asked"
    )
    first_round_limit: int = param(1000, Interval(int, 1, None), "most clients of a first round of all")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.context)) != len(self.context):
            raise ParameterError(
                f"The 'context' parameter of {type(self).__name__} must be a list without repeats. "
                f"Got {self.context!r}."
            )

    @property
    def requires(self) -> frozenset[Signal]:
        """Durations, the losses of the context and those of the reward."""
        reading = READINGS[self.reward]
        assert reading.after is not None
        losses = {LOSS_OF[name] for name in self.context if name in LOSS_OF}
        return frozenset({Signal.DURATION, reading.before, reading.after} | losses)

    def size(self, state: State, asked: int, candidates: int) -> int:
        """Everybody in the first round (S_0), up to the limit; then what was asked."""
        if self.first_round == "all" and state.rounds == 0:
            return max(asked, min(candidates, self.first_round_limit))
        return asked

    @abstractmethod
    def scored(
        self, state: State, slate: Slate, context: FloatArray, notes: dict[str, str | float | int]
    ) -> tuple[FloatArray, dict[str, FloatArray], State]:
        """Return the scores (c,) of contexts (c, d), what they are made of, and the state; add to ``notes``."""

    @abstractmethod
    def learnt(self, state: State, context: FloatArray, rewards: FloatArray) -> State:
        """Return the state after rewards (k,) for contexts (k, d); k may be 0."""

    def select(
        self, state: State, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, State]:
        """Draw among those that promise something, or take the highest scores; where all are equal, anybody."""
        notes: dict[str, str | float | int] = {}
        context = contexts(state, self.context, slate.candidates)
        score, parts, state = self.scored(state, slate, context, notes)
        draw = Draw(self.pool, self.uniform_share, first=state.rounds == 0 or float(np.ptp(score)) == 0.0)
        picked: IntArray = slate.candidates[
            draw.picks(score, slate.of_candidates(state.reward), slate.size, notes, rng)
        ]
        return Cohort(picked, candidates=slate.candidates, score=score, parts=parts, notes=notes), state

    def update(self, state: State, outcome: Outcome) -> State:
        """Learn from the contexts the clients were picked by and the rewards they brought."""
        state, seen = observed_round(state, outcome, self.context, READINGS[self.reward])
        assert seen.rewards is not None
        return self.learnt(state.with_rewards(seen.who, seen.rewards), seen.context, seen.rewards)
