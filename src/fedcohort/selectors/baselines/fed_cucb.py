r"""Fed-cucb: greedy class balance from estimated label shares, with a combinatorial bandit.

.. [Yang2020] M. Yang, X. Wang, H. Zhu, H. Wang, H. Qian, "Federated Learning with Class Imbalance Reduction"
   (Fed-cucb), EUSIPCO 2021, arXiv:2011.11266.
.. [Zhang2023] J. Zhang et al., "Fed-CBS: A Heterogeneity-Aware Client Sampling Mechanism for Federated Learning via
   Class-Imbalance Reduction", ICML 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.numerics.greedy_balance import GreedyBalance, divergence_from_uniform
from fedcohort.selectors.numerics.label_shares import by_relative_softmax

_MIN_DIVERGENCE = 1e-6  # so that the reward of a client that seems exactly balanced is large, not infinite


@dataclass(frozen=True)
class _CucbState:
    """What Fed-cucb remembers about each client."""

    pulls: FloatArray = per_client()  # (N,) T_k, how often the client's update was seen
    weight: FloatArray = per_client()  # (N,) sum of rho^j over the updates in its means
    reward: FloatArray = per_client()  # (N,) decaying mean of 1 / D_KL
    shares: FloatArray = per_client()  # (N, B) decaying mean of estimated label shares; B is 0 before any update


@register("fed-cucb")
@dataclass(frozen=True, kw_only=True)
class FedCucb(Selector[_CucbState]):
    r"""Start with the client that has the highest bound, then add those that balance it best ([Yang2020]_).

    .. math::

        r_k = \frac{1}{D_{KL}(R_k \| U)}, \qquad
        c_1 = \arg\max_k\; \bar r_k + \alpha \sqrt{\frac{3 \ln t}{2 T_k}}, \qquad
        c_m = \arg\min_k\; D_{KL}\Big(\tfrac{1}{m} \big(\bar R_k + \sum_{i < m} \bar R_{c_i}\big) \Big\| U\Big)

    Clients that were never seen come first, in random order, because every arm of the bandit must be played once.

    Symbols: R_k = estimated label shares of client k, U = the uniform distribution, bars = means in which an update
    counts :math:`\rho^j` after j more reports of the client, T_k = number of reports, t = round + 1, alpha =
    ``exploration``, rho = ``forgetting``.

    Deviations: the paper estimates R_k from gradients on a small balanced set at the server, one class at a time. Here
    it comes from the client's update of the output layer's bias, :math:`R_k = softmax(\Delta b_k / T)` with T =
    ``temperature`` times the cohort's typical update, so no such set is needed. [Zhang2023]_ (Figure 2) finds the
    paper's estimate inaccurate. A divergence counts as at least 1e-6. When the cohort is filled up, the members that
    were never seen count as balanced.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(FedCucb(), ClientTable(n=4), seed=1)
    >>> cohort = session.ask(RoundRequest(size=4))
    >>> moved = {0: [1, -1], 1: [1, -1], 2: [-1, 1], 3: [-1, 1]}  # two clients of each class
    >>> updates = [moved[client] for client in cohort.clients.tolist()]
    >>> session.tell(RoundReport(cohort.ticket, cohort.clients, metrics={Signal.OUTPUT_BIAS_UPDATE: updates}))
    >>> sorted(c // 2 for c in session.ask(RoundRequest(size=2)).clients.tolist())
    [0, 1]
    """

    requires = frozenset({Signal.OUTPUT_BIAS_UPDATE})

    picks_by: ClassVar[str] = (
        "Clients that were never seen come first, then the one with the highest bound. The rest of the cohort are the "
        "clients that balance its estimated classes best. The score refers to the finished cohort."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "divergence": "how uneven the estimated classes of the finished cohort would be with this client",
        "reward": "mean reward so far",
        "exploration": "bonus for having been picked rarely",
    }

    checked_params: ClassVar[ParamSets] = {
        "greedy": {"exploration": 0.0, "forgetting": 1.0},
        "last estimate": {"forgetting": 0.01, "temperature": 0.001},
    }

    exploration: float = param(0.2, Interval(float, 0, None), "weight of rarely seen clients (alpha)")
    forgetting: float = param(
        0.99, Interval(float, 0, 1, "right"), "weight of an estimate relative to the next one (rho)"
    )
    temperature: float = param(
        0.5,
        Interval(float, 0, None, "neither"),
        "of the softmax, as a multiple of the cohort's typical update (T)",
    )

    starves = "once all clients have been seen, the client that seems most balanced leads every cohort"

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _CucbState:
        """Start with no client seen."""
        zeros = np.zeros(clients.n)
        return _CucbState(zeros, zeros, zeros, np.zeros((clients.n, 0)))

    def select(
        self, state: _CucbState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _CucbState]:
        """Take clients that were never seen, then the one with the highest bound and those that balance it."""
        pulls = slate.of_candidates(state.pulls)
        seen = pulls > 0
        # Before any report the number of classes is unknown, and with one class everybody is balanced.
        classes = max(state.shares.shape[1], 1)
        shares = np.full((len(pulls), classes), 1.0 / classes)
        if state.shares.shape[1]:
            shares[seen] = slate.of_candidates(state.shares)[seen]
        reward = np.where(seen, slate.of_candidates(state.reward), np.nan)
        bonus = self.exploration * np.sqrt(1.5 * np.log(slate.round + 1) / np.maximum(pulls, 1.0))
        group = GreedyBalance(shares, rng)
        unseen = rng.permutation(np.flatnonzero(~seen))[: slate.size]
        for position in unseen.tolist():
            group.add(position)
        bound = reward + bonus
        # The bandit chooses only the first member. Unseen clients, if there are any, have that place already.
        if not len(unseen):
            group.add(int(rng.choice(np.flatnonzero(bound == bound.max()))))
        group.grow(slate.size - len(group.members), seen)
        divergence = group.with_each()
        # A cohort of one is chosen by the bound alone.
        cohort = Cohort(
            slate.candidates[group.members],
            candidates=slate.candidates,
            score=bound if slate.size == 1 else -divergence,
            parts={"divergence": divergence, "reward": reward, "exploration": bonus},
            notes={"estimated divergence": group.divergence, "never seen": int((~seen).sum())},
        )
        return cohort, state

    def update(self, state: _CucbState, outcome: Outcome) -> _CucbState:
        """Estimate the label shares of the clients that reported."""
        ok = outcome.ok
        if not ok.any():
            return state
        clients, updates = outcome.clients[ok], outcome[Signal.OUTPUT_BIAS_UPDATE][ok]
        estimated = by_relative_softmax(updates, self.temperature)
        pulls, weight, reward = state.pulls.copy(), state.weight.copy(), state.reward.copy()
        shares = state.shares.copy() if state.shares.shape[1] else np.zeros((len(pulls), updates.shape[1]))
        pulls[clients] += 1
        # The sum of rho^j over all updates, so the newest one counts 1 / weight, and the mean needs no history.
        weight[clients] = self.forgetting * weight[clients] + 1.0
        share = 1.0 / weight[clients]
        shares[clients] += share[:, None] * (estimated - shares[clients])
        reward[clients] += share * (
            1.0 / np.maximum(divergence_from_uniform(estimated), _MIN_DIVERGENCE) - reward[clients]
        )
        return _CucbState(pulls, weight, reward, shares)
