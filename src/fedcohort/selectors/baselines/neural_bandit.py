"""The contexts of FLASH with a neural bandit in place of the linear one.

.. [Chang2024] X. Chang et al., "FLASH: Federated Learning Across Simultaneous Heterogeneities", arXiv:2402.08769, 2024.
.. [Xu2020] P. Xu, Z. Wen, H. Zhao, Q. Gu, "Neural Contextual Bandits with Deep Representation and Shallow Exploration",
   arXiv:2012.01780, 2020.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, ParamSets, param
from fedcohort.core.protocol import Slate, register
from fedcohort.selectors.papers.flash.context import ContextState
from fedcohort.selectors.papers.flash.contextual import ContextualBandit, Notes
from fedcohort.selectors.papers.flash.regression import add_observations, solution

_LONGEST_GRADIENT = 1.0  # longer gradients are shortened, so that one odd reward does not ruin the network


@dataclass(frozen=True, kw_only=True)
class _NeuralState(ContextState):
    """The contexts, the network, the linear layer over its features, and the observations it is trained on."""

    first: FloatArray  # (h, d + 1) W_1
    second: FloatArray  # (h, h) W_2
    gram: FloatArray  # (h, h) A
    moment: FloatArray  # (h,) b
    inputs: FloatArray  # (R, d + 1) the last observations, in a ring
    targets: FloatArray  # (R,)
    stored: int  # observations so far


@register("neural-bandit")
@dataclass(frozen=True, kw_only=True)
class NeuralBandit(ContextualBandit[_NeuralState]):
    r"""Score contexts with a linear bandit over features that a small network learns ([Xu2020]_, Algorithm 1).

    .. math::

        \phi(x; w) = \sigma(W_2\, \sigma(W_1 x)), \qquad
        U(x) = \hat\theta^\top \phi(x; w) + \alpha \sqrt{\phi(x; w)^\top A^{-1} \phi(x; w)}, \qquad
        A = \lambda I + \sum \phi \phi^\top, \quad b = \sum r \phi, \quad \hat\theta = A^{-1} b

    The clients with the largest U are taken. Every H rounds, W_1 and W_2 take some gradient steps on
    :math:`\sum_i (\hat\theta^\top \phi(x_i; w) - r_i)^2`. Contexts and rewards are those of FLASH. Figure 4 of its
    paper replaces the linear bandit with a neural one ([Chang2024]_, Sec. 3.5), which has more to learn from the same
    few rounds.

    Symbols: x = the context of FLASH with a constant 1, scaled to norm 1 as the theory assumes; sigma = max(0, .); h =
    ``width``; alpha = ``exploration``; lambda = ``ridge``; H = ``interval``; n = ``steps`` of size eta = ``rate``;
    r = FLASH's reward (``reward``).

    Deviations from [Xu2020]_: several clients are taken per round (the combinatorial form that FLASH needs). alpha is
    a constant. The loss is the mean over the last ``memory`` observations with the current theta-hat, not over all
    observations with the theta-hat of their time, so that the state stays bounded. Gradients longer than 1 are
    shortened to 1. Weights start as He et al. propose, without the factor sqrt(h). The paper of FLASH also cites H. Cao
    et al. (FL-AAAI 2022) for its neural bandit, but does not describe their network.

    Examples
    --------
    >>> from fedcohort import Session, Signal
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> bandit = NeuralBandit(reward="robust-change", contexts="last")
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

    part_meanings: ClassVar[Mapping[str, str]] = {
        "promise": "the reward that the network expects",
        "exploration": "bonus for contexts that are rarely seen",
    }

    checked_params: ClassVar[ParamSets] = {
        "smallest": {"width": 1, "memory": 1, "interval": 1, "rate": 10.0},
        "untrained": {"steps": 0, "exploration": 0.0, "first_round": "asked"},
        "next model": {"reward": "validation-decrease"},
    }

    starves = "a client whose context promises little reward is not picked while others promise more"

    exploration: float = param(0.1, Interval(float, 0, None), "weight of the confidence width (alpha)")
    ridge: float = param(1.0, Interval(float, 0, None, "neither"), "regularisation of the last layer (lambda)")
    width: int = param(16, Interval(int, 1, 512), "units of each hidden layer (h)")
    interval: int = param(5, Interval(int, 1, None), "rounds between trainings of the network (H)")
    steps: int = param(50, Interval(int, 0, None), "gradient steps per training (n)")
    rate: float = param(0.1, Interval(float, 0, None, "neither"), "size of a gradient step (eta)")
    memory: int = param(256, Interval(int, 1, None), "observations the network is trained on")

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _NeuralState:
        """Return random weights and no observations."""
        d, h = len(self.context) + 1, self.width
        return _NeuralState(
            **_NeuralState.unknown(clients.n, len(self.context)),
            # He et al.'s variance keeps the size of the features from layer to layer under max(0, .).
            first=rng.standard_normal((h, d)) * np.sqrt(2 / d),
            second=rng.standard_normal((h, h)) * np.sqrt(2 / h),
            gram=self.ridge * np.eye(h),
            moment=np.zeros(h),
            inputs=np.zeros((self.memory, d)),
            targets=np.zeros(self.memory),
            stored=0,
        )

    def score(
        self,
        state: _NeuralState,
        slate: Slate,
        context: Mapping[str, FloatArray],
        notes: Notes,
        rng: np.random.Generator,
    ) -> tuple[FloatArray, dict[str, FloatArray], _NeuralState]:
        """Return U of every candidate."""
        x = _network_input(np.stack(list(context.values()), axis=1))
        features = _forward(state.first, state.second, x).features
        promise = features @ solution(state.gram, state.moment)
        # At least 0 below, because rounding can make the square of a small feature negative.
        square = np.einsum("ij,ij->i", features @ np.linalg.inv(state.gram), features)
        bonus = self.exploration * np.sqrt(np.maximum(square, 0.0))
        notes["observations"] = state.stored
        return promise + bonus, {"promise": promise, "exploration": bonus}, state

    def learn(self, state: _NeuralState, clients: IntArray, context: FloatArray, rewards: FloatArray) -> _NeuralState:
        """Add the observations to the last layer and the memory; train the network every ``interval`` rounds."""
        # More observations than the ring has places would overwrite each other in one assignment.
        context, rewards = context[-self.memory :], rewards[-self.memory :]
        x = _network_input(context)
        features = _forward(state.first, state.second, x).features
        gram, moment = add_observations(state.gram, state.moment, features, rewards)
        inputs, targets = state.inputs.copy(), state.targets.copy()
        at = (state.stored + np.arange(len(x))) % self.memory
        inputs[at], targets[at] = x, rewards
        stored = state.stored + len(x)
        first, second = state.first, state.second
        # As in the paper, A and b keep the features of their time when the network changes.
        if state.rounds % self.interval == 0 and stored:
            known = min(stored, self.memory)
            theta = solution(gram, moment)
            first, second = _train_network(first, second, theta, inputs[:known], targets[:known], self.steps, self.rate)
        return dataclasses.replace(
            state,
            first=first,
            second=second,
            gram=gram,
            moment=moment,
            inputs=inputs,
            targets=targets,
            stored=stored,
        )


class _Layers(NamedTuple):
    """The outputs of the network's layers."""

    hidden: FloatArray  # (n, h) sigma(W_1 x)
    features: FloatArray  # (n, h) phi


def _network_input(context: FloatArray) -> FloatArray:
    """Return contexts (n, d) with a constant 1, scaled to norm 1: (n, d + 1).

    >>> _network_input(np.array([[0.0, 0.0], [2.0, 2.0]]))
    array([[0.        , 0.        , 1.        ],
           [0.66666667, 0.66666667, 0.33333333]])
    """
    x = np.concatenate([context, np.ones((len(context), 1))], axis=1)
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))


def _forward(first: FloatArray, second: FloatArray, x: FloatArray) -> _Layers:
    """Return the layers of the network for inputs (n, d + 1)."""
    hidden = np.maximum(x @ first.T, 0.0)
    return _Layers(hidden, np.maximum(hidden @ second.T, 0.0))


def _gradients(
    first: FloatArray, second: FloatArray, theta: FloatArray, x: FloatArray, target: FloatArray
) -> tuple[float, FloatArray, FloatArray]:
    """Return the mean of (theta' phi(x) - r)^2 / 2 and its gradients with respect to W_1 and W_2."""
    hidden, features = _forward(first, second, x)
    error = features @ theta - target
    # By hand, because a selector must not need torch.
    top = (error[:, None] * theta) * (features > 0)  # (n, h) gradient with respect to the second layer's input
    bottom = (top @ second) * (hidden > 0)
    return float((error**2).mean() / 2), bottom.T @ x / len(x), top.T @ hidden / len(x)


def _train_network(
    first: FloatArray, second: FloatArray, theta: FloatArray, x: FloatArray, target: FloatArray, steps: int, rate: float
) -> tuple[FloatArray, FloatArray]:
    """Return W_1 and W_2 after gradient steps on the observations."""
    for _ in range(steps):
        _, by_first, by_second = _gradients(first, second, theta, x, target)
        length = float(np.sqrt((by_first**2).sum() + (by_second**2).sum()))
        step = rate * min(1.0, _LONGEST_GRADIENT / length) if length > 0 else 0.0
        first, second = first - step * by_first, second - step * by_second
    return first, second
