"""The contexts of FLASH with a restless bandit in place of the linear one.

.. [Chang2024] X. Chang et al., "FLASH: Federated Learning Across Simultaneous Heterogeneities", arXiv:2402.08769, 2024.
.. [Yemini2021] M. Yemini, A. Leshem, A. Somekh-Baruch, "The Restless Hidden Markov Bandit With Linear Rewards and Side
   Information", IEEE Transactions on Signal Processing 69, 2021, arXiv:1910.10271.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.special import ndtri

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, ParamSets, param
from fedcohort.core.protocol import Slate, register
from fedcohort.selectors.papers.flash.context import ContextState
from fedcohort.selectors.papers.flash.contextual import ContextualBandit, Notes
from fedcohort.selectors.papers.flash.regression import add_observations, solution

_FORGET = 0.9  # factor per round of past rounds in the running mean and variance of rewards


@dataclass(frozen=True, kw_only=True)
class _RestlessState(ContextState):
    """The contexts, the Markov chain of the hidden state, and one linear model of the rewards for each state."""

    gram: FloatArray  # (S, d, d)
    moment: FloatArray  # (S, d)
    transitions: FloatArray  # (S, S) how often state i was followed by state j
    at: int  # the state of the last round; -1 before the first
    pay_mean: float  # running mean of the rounds' mean rewards
    pay_variance: float  # running variance of the same
    heard: int  # rounds with rewards
    explored: int  # rounds that explored


@register("restless-bandit")
@dataclass(frozen=True, kw_only=True)
class RestlessBandit(ContextualBandit[_RestlessState]):
    r"""Predict a hidden state that all clients share, and take the best contexts under it ([Yemini2021]_).

    Rewards :math:`r_i` are linear in the context, with coefficients that depend on a state common to all clients. The
    state is hidden and moves as a Markov chain whether or not clients are asked (hence *restless*):

    .. math:: E[r_i \mid s] = \theta_s^\top x_i, \qquad \hat P_{ss'} = \frac{1 + C_{ss'}}{S + \sum_u C_{su}}, \qquad
              \text{score}_i = \sum_{s'} \hat P_{s_t s'} \, \hat\theta_{s'}^\top x_i

    The clients with the highest scores are taken. The state of a round is inferred from its rewards, each theta_s is a
    ridge regression over the rounds in that state, and the estimated transition matrix predicts the next state. Some
    rounds explore with a uniform cohort, about c ln t of them by round t. Contexts and rewards are those of FLASH.
    Figure 4 of its paper replaces the linear bandit with this one ([Chang2024]_, Sec. 3.5), and notes that the
    transition matrix has to be estimated as well.

    Symbols: x = FLASH's context; s_t = ``at``; S = ``states``; C = ``transitions``; c = ``exploration``; the ridge's
    lambda = ``ridge``; t = round + 1; r = FLASH's reward (``reward``).

    Deviations from [Yemini2021]_: its rewards have no noise beyond the hidden states, so the states can be solved for.
    Here the mean reward of a round decides its state. The S states are equally likely intervals of the normal
    distribution with the running mean and variance, in which a past round loses a tenth of its weight every round. In
    that paper, each arm also has a state of its own, independent from round to round; here it is part of the
    regression's noise. Its actions come from a polytope; here they are the contexts of the clients, several of which
    are taken. The paper of FLASH says no more about this bandit than this.

    Examples
    --------
    >>> from fedcohort import Session, Signal
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> bandit = RestlessBandit(reward="robust-change", contexts="last")
    >>> session = Session(bandit, ClientTable(n=6), seed=1)
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
        "one state": {"states": 1, "exploration": 0.0},
        "many states": {"states": 32, "exploration": 100.0, "first_round": "asked"},
        "next model": {"reward": "validation-decrease"},
    }

    starves = "a client whose context promises little reward is picked only in rounds that explore"

    states: int = param(2, Interval(int, 1, 32), "number of hidden states (S)")
    exploration: float = param(3.0, Interval(float, 0, None), "about c ln t of t rounds explore (c)")
    ridge: float = param(1.0, Interval(float, 0, None, "neither"), "regularisation (lambda)")

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _RestlessState:
        """Start without observations."""
        d, s = len(self.context), self.states
        return _RestlessState(
            **_RestlessState.unknown(clients.n, len(self.context)),
            gram=np.tile(self.ridge * np.eye(d), (s, 1, 1)),
            moment=np.zeros((s, d)),
            transitions=np.zeros((s, s)),
            at=-1,
            pay_mean=0.0,
            pay_variance=0.0,
            heard=0,
            explored=0,
        )

    def score(
        self,
        state: _RestlessState,
        slate: Slate,
        context: Mapping[str, FloatArray],
        notes: Notes,
        rng: np.random.Generator,
    ) -> tuple[FloatArray, dict[str, FloatArray], _RestlessState]:
        """Return the expected rewards under the next state's distribution; zeros in a round that explores."""
        following = _next_distribution(state.transitions, state.at)
        theta = following @ np.stack([solution(g, b) for g, b in zip(state.gram, state.moment, strict=True)])
        parts = {name: theta[j] * column for j, (name, column) in enumerate(context.items())}
        for s, chance in enumerate(following.tolist()):
            notes[f"chance of state {s}"] = chance
        if state.explored < self.exploration * math.log(slate.round + 1):
            # Equal scores are ordered at random, so the cohort is uniform.
            notes["reason"] = "this round explores: the cohort is uniform"
            state = dataclasses.replace(state, explored=state.explored + 1)
            return np.zeros(len(slate.candidates)), parts, state
        return np.stack(list(context.values()), axis=1) @ theta, parts, state

    def learn(
        self, state: _RestlessState, clients: IntArray, context: FloatArray, rewards: FloatArray
    ) -> _RestlessState:
        """Infer the round's state, count the transition, and add to the regression of that state."""
        if not len(rewards):
            return state
        mean_reward = float(rewards.mean())
        now = self.states // 2  # in the first round there is nothing to compare with
        if state.heard:
            now = _state_of(mean_reward, state.pay_mean, state.pay_variance, self.states)
        transitions = state.transitions.copy()
        if state.at >= 0:
            transitions[state.at, now] += 1
        # Only the regression of that state learns: under another one the same context pays differently.
        gram, moment = state.gram.copy(), state.moment.copy()
        gram[now], moment[now] = add_observations(gram[now], moment[now], context, rewards)
        # A plain mean over the first ten rounds, which would otherwise be pulled towards the starting 0.
        share = max(1 - _FORGET, 1 / (state.heard + 1))
        difference = mean_reward - state.pay_mean
        return dataclasses.replace(
            state,
            gram=gram,
            moment=moment,
            transitions=transitions,
            at=now,
            pay_mean=state.pay_mean + share * difference,
            pay_variance=(1 - share) * (state.pay_variance + share * difference**2),
            heard=state.heard + 1,
        )


def _next_distribution(transitions: FloatArray, at: int) -> FloatArray:
    """Return the distribution (S,) of the state after ``at``, with one added to every count; uniform if ``at`` is -1.

    >>> _next_distribution(np.array([[3.0, 1.0], [0.0, 0.0]]), 0)
    array([0.66666667, 0.33333333])
    """
    count = len(transitions)
    row = 1 + (transitions[at] if at >= 0 else np.zeros(count))
    return np.asarray(row / row.sum())


def _state_of(reward: float, mean: float, variance: float, states: int) -> int:
    """Return which of ``states`` equally likely intervals of N(mean, variance) contains ``reward``; 0 is the lowest.

    >>> [_state_of(reward, 0.0, 1.0, 3) for reward in (-1.0, 0.1, 0.5)]
    [0, 1, 2]
    """
    # With a variance of 0 all bounds are the mean: smaller rewards are in the lowest interval, others in the highest.
    bounds = mean + math.sqrt(variance) * ndtri(np.arange(1, states) / states)
    return int(np.searchsorted(bounds, reward, side="right"))
