r"""Fed-CBS without label counts: label shares are estimated from updates of the output layer's bias.

.. [Zhang2023] J. Zhang et al., "Fed-CBS: A Heterogeneity-Aware Client Sampling Mechanism for Federated Learning via
   Class-Imbalance Reduction", ICML 2023.
.. [Chen2024] H. Chen, H. Vikalo, "Heterogeneity-Guided Client Sampling: Towards Fast and Efficient Non-IID Federated
   Learning" (HiCS-FL), NeurIPS 2024.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.clients import ClientTable, LabelCounts
from fedcohort.core.params import Interval, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.numerics.class_balance import group_of
from fedcohort.selectors.numerics.label_shares import by_relative_softmax
from fedcohort.selectors.papers.fedcbs import Weighting, draw_group, exploration_bonus


@dataclass(frozen=True)
class _BlindState:
    """What blind Fed-CBS remembers about each client."""

    pulls: FloatArray = per_client()  # (N,) T_n, how often the client was selected, plus 1
    seen: FloatArray = per_client()  # (N,) number of updates in the mean of its shares
    shares: FloatArray = per_client()  # (N, B) estimated label shares; B is 0 until the first update is seen


@register("fedcbs-blind")
@dataclass(frozen=True, kw_only=True)
class BlindFedCBS(Selector[_BlindState]):
    r"""Draw balanced cohorts ([Zhang2023]_, Algorithm 1) by estimated label shares ([Chen2024]_, Eq. 6).

    .. math::

        \hat D_n &= \mathrm{mean}\; \mathrm{softmax}(\Delta b_n / T) \\
        P(c_m \mid c_1 \dots c_{m-1}) &\propto QCID(\hat M_m)^{-\beta_m}

    Symbols: :math:`\Delta b_n` = update of the output layer's bias, T = ``temperature`` times the root mean square of
    the cohort's updates, QCID, beta_m = ``beta`` * m, lambda = ``exploration`` and L_b = ``floor`` as in ``fedcbs``,
    with the sizes q_n and label counts q_n * D_n.

    A client that was never seen counts as balanced. That makes it attractive, so the first rounds reach all clients.
    The estimates need individual updates, which secure aggregation hides.

    Deviations from the papers: the temperature of HiCS-FL is a fixed number for each dataset. Here it follows the size
    of the cohort's updates, and estimates are averaged over a client's rounds. HiCS-FL clusters clients by the entropy
    of these shares. Here Fed-CBS uses them as label counts.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(BlindFedCBS(), ClientTable(sizes=[8, 8, 8, 8]), seed=1)
    >>> cohort = session.ask(RoundRequest(size=4))
    >>> moved = {0: [1, -1], 1: [1, -1], 2: [-1, 1], 3: [-1, 1]}  # two clients of each class
    >>> updates = [moved[client] for client in cohort.clients.tolist()]
    >>> session.tell(RoundReport(cohort.ticket, cohort.clients, metrics={Signal.OUTPUT_BIAS_UPDATE: updates}))
    >>> [sorted(c // 2 for c in session.ask(RoundRequest(size=2)).clients.tolist()) for _ in range(2)]
    [[0, 1], [0, 1]]
    """

    requires = frozenset({Signal.SIZES, Signal.OUTPUT_BIAS_UPDATE})

    picks_by: ClassVar[str] = (
        "The cohort is drawn at random, place by place, with better odds for clients whose estimated classes balance"
        " those drawn before. The score is the logarithm of a client's last probability."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "balance": "how well its estimated classes balance those drawn before",
        "exploration": "bonus for having been picked rarely",
    }

    checked_params: ClassVar[ParamSets] = {
        "sharp": {"temperature": 1e-06, "exploration": 0.0},
        "flat": {"temperature": 1000000.0, "floor": 0.5},
    }

    temperature: float = param(
        0.5, Interval(float, 0, None, "neither"), "of the softmax, as a multiple of the cohort's typical update (T)"
    )
    exploration: float = param(10.0, Interval(float, 0, None), "weight of rarely selected clients (lambda)")
    beta: float = param(1.0, Interval(float, 0, None, "neither"), "growth of the exponents, beta_m = beta * m (beta_m)")
    floor: float = param(1e-20, Interval(float, 0, 1, "neither"), "least value of QCID (L_b)")

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _BlindState:
        """Start with T_n = 1 and no client seen."""
        return _BlindState(np.ones(clients.n), np.zeros(clients.n), np.zeros((clients.n, 0)))

    def select(
        self, state: _BlindState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _BlindState]:
        """Draw the cohort."""
        sizes = slate.of_candidates(slate.clients.sizes)
        # The number of classes is known only from the first update. Until then everybody counts as balanced over two.
        classes = max(state.shares.shape[1], 2)
        shares = slate.of_candidates(state.shares) if state.shares.shape[1] else np.zeros((len(sizes), classes))
        known = slate.of_candidates(state.seen) > 0
        shares = np.where(known[:, None], shares, 1.0 / classes)
        group = group_of(LabelCounts(shares * sizes[:, None]))
        bonus = exploration_bonus(self.exploration, slate.round + 1, slate.of_candidates(state.pulls))
        draw = draw_group(group, slate.size, Weighting(beta=self.beta, floor=self.floor, exploration=bonus), rng)
        cohort = Cohort(
            clients=slate.candidates[draw.picks],
            candidates=slate.candidates,
            score=draw.log_probability,
            parts={"balance": draw.log_probability - draw.exploration, "exploration": draw.exploration},
            notes={"estimated qcid": draw.qcid, "never seen": int((~known).sum())},
        )
        pulls = state.pulls.copy()
        pulls[cohort.clients] += 1  # T_n also counts selections that fail
        return cohort, dataclasses.replace(state, pulls=pulls)

    def update(self, state: _BlindState, outcome: Outcome) -> _BlindState:
        """Update the estimates of the clients that delivered."""
        ok = outcome.ok
        if not ok.any():
            return state
        updates = outcome[Signal.OUTPUT_BIAS_UPDATE][ok]
        clients = outcome.clients[ok]
        seen = state.seen.copy()
        shares = state.shares.copy() if state.shares.shape[1] else np.zeros((len(seen), updates.shape[1]))
        # A plain mean over rounds: a client's label shares stay the same, and only their estimates vary.
        seen[clients] += 1
        shares[clients] += (by_relative_softmax(updates, self.temperature) - shares[clients]) / seen[clients, None]
        return dataclasses.replace(state, seen=seen, shares=shares)
