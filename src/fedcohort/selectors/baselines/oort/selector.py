r"""Oort: guided participant selection.

.. [Lai2021] F. Lai, X. Zhu, H. V. Madhyastha, M. Chowdhury, "Oort: Efficient Federated Learning via Guided Participant
   Selection", OSDI 2021.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.baselines.oort.guidance import Guidance, OortState


@register("oort")
@dataclass(frozen=True, kw_only=True)
class Oort(Guidance, Selector[OortState]):
    r"""Prefer clients with large losses that are fast enough, and explore new ones ([Lai2021]_, Algorithm 1 and Eq. 1).

    .. math::

        U(i) &= |B_i| \sqrt{\tfrac{1}{|B_i|} \sum_{k \in B_i} Loss(k)^2} \\
        Util(i) &= \Big(\min(U(i), cap) + \sqrt{\tfrac{0.1 \ln R}{L(i)}}\Big) \cdot
            \begin{cases}(T / D(i))^\alpha & T < D(i) \\ 1 & \text{else}\end{cases}

    1. Explore: :math:`\epsilon K` clients are drawn from those never seen. :math:`\epsilon` starts at 0.9 and falls by
       a factor of 0.98 a round to 0.2.
    2. Exploit: the other k places are drawn in proportion to Util from the clients that have at least c = 95% of the
       k-th largest Util.
    3. Robustness: U is capped at its 95% quantile, and after 10 picks a client is left out.
    4. Pacer: when the last W = 20 rounds had less utility than the W before them, :math:`T \leftarrow T + \Delta`.

    Symbols: :math:`|B_i|` = clients.sizes, the root = Signal.LOSS_RMS, D(i) = Signal.DURATION at the last report, L(i)
    the round of the last report, R = round + 1, K = slate.size, epsilon = ``exploration``, alpha = ``penalty``, Delta =
    ``step``, c = ``cut_off``.

    Deviations: U covers all of a client's samples, not only those it trained on. New clients are drawn uniformly, not
    by speed, which is unknown in advance. If :math:`\epsilon K` is not an integer, its fraction is the chance of one
    more client. If the blacklist leaves too few clients, those with the fewest picks come back. No Delta in seconds
    suits every federation, so the default is the median of the first durations reported. For a client that does not
    report, only the number of picks changes. The bonus is added to U as printed in the paper, where it hardly counts.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session, Signal
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(Oort(least_exploration=0.0, exploration=0.0), ClientTable(sizes=[10] * 4), seed=1)
    >>> everybody = session.ask(RoundRequest(size=4))
    >>> metrics = {Signal.LOSS_RMS: [0.1, 2.0, 0.2, 2.1], Signal.DURATION: [1.0, 1.0, 1.0, 9.0]}
    >>> session.tell(RoundReport(everybody.ticket, [0, 1, 2, 3], metrics=metrics))
    >>> session.ask(RoundRequest(size=1)).clients  # client 3 has the largest loss, but is slow
    array([1])
    """

    def init(self, clients: ClientTable, rng: np.random.Generator) -> OortState:
        """Start with no client explored."""
        return self.fresh(clients)

    def select(
        self, state: OortState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, OortState]:
        """Draw known clients by utility, and explore new ones."""
        return self.choose(state, slate, rng), state

    def update(self, state: OortState, outcome: Outcome) -> OortState:
        """Learn utilities and durations; extend the preferred duration when utility falls."""
        return self.learn(state, outcome, outcome[Signal.DURATION] if self.penalty > 0 else None)
