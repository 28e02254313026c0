r"""Astraea: greedy class balance from label counts.

.. [Duan2019] M. Duan et al., "Astraea: Self-balancing Federated Learning for Improving Classification Accuracy of
   Mobile Deep Learning Applications", ICCD 2019.
.. [Zhang2023] J. Zhang et al., "Fed-CBS: A Heterogeneity-Aware Client Sampling Mechanism for Federated Learning via
   Class-Imbalance Reduction", ICML 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import BoolArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Boolean, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.numerics.greedy_balance import GreedyBalance


@dataclass(frozen=True)
class _AstraeaState:
    """What Astraea remembers about each client."""

    taken: BoolArray = per_client()  # (N,) whether it has taken part in this pass through the federation


@register("astraea")
@dataclass(frozen=True, kw_only=True)
class Astraea(Selector[_AstraeaState]):
    r"""Grow the cohort by the client that leaves its labels closest to uniform ([Duan2019]_, rescheduling).

    .. math::

        c_m = \arg\min_{n}\; D_{KL}\Big(\frac{q}{\lVert q \rVert_1} \,\Big\|\, U\Big), \qquad
        q = \sum_{i \in M_{m-1}} q_i + q_n

    A cohort is what the paper calls the clients of a mediator. Groups are formed until every client has been in one,
    and then from the start again, so a client takes part once in every pass through the federation. With
    ``turns=False``, every cohort is chosen from all candidates. That is Fed-cucb+ of [Zhang2023]_ (Appendix D.1)
    without exploration, and it picks the same few well-balanced clients forever.

    Symbols: :math:`q_n` = label counts of client n, U = the uniform distribution, M_m = the first m clients.

    Deviations: the clients of a group train in parallel and are averaged. In the paper, a mediator trains them one
    after another, and several mediators are averaged. Rare classes are not augmented. Ties are broken at random. When
    a pass has fewer clients left than a cohort needs, the cohort is filled from the next pass. Clients without samples
    come last.

    Examples
    --------
    Figure 3 of Fed-CBS: the greedy rule finds {C1, C2, C3}, though {C1, C3, C4} is exactly balanced.

    >>> from fedcohort import ClientTable, LabelCounts, Session
    >>> from fedcohort.core.protocol import RoundRequest
    >>> labels = LabelCounts([[5] * 6, [6, 6, 6, 6, 6, 0], [0, 0, 0, 10, 10, 10], [10, 10, 10, 0, 0, 0]])
    >>> session = Session(Astraea(), ClientTable(names=["C1", "C2", "C3", "C4"], labels=labels))
    >>> session.ask(RoundRequest(size=3)).names
    ('C1', 'C2', 'C3')
    """

    requires = frozenset({Signal.LABEL_COUNTS})

    picks_by: ClassVar[str] = (
        "The cohort grows by the client that balances its classes best. A client that had its turn waits until all "
        "have had one. The score refers to the finished cohort."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "divergence": "how uneven the classes of the finished cohort would be with this client",
        "left in this pass": "1 if it has not had its turn in this pass",
    }

    checked_params: ClassVar[ParamSets] = {
        "without turns": {"turns": False},
    }

    turns: bool = param(True, Boolean(), "whether every client takes part once before any client does again")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.turns:
            object.__setattr__(self, "starves", "without turns, the same few well-balanced clients are always picked")

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _AstraeaState:
        """Start a pass: no client has taken part."""
        return _AstraeaState(np.zeros(clients.n, np.bool_))

    def select(
        self, state: _AstraeaState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _AstraeaState]:
        """Grow the cohort client by client."""
        group = GreedyBalance(slate.of_candidates(slate.clients.label_counts), rng)
        anyone = np.ones(len(slate.candidates), np.bool_)
        left = ~slate.of_candidates(state.taken) if self.turns else anyone
        taken = state.taken.copy()
        within = min(slate.size, int(left.sum()))
        group.grow(within, left)
        if within < slate.size:  # the pass is over
            taken[slate.candidates] = False
            group.grow(slate.size - within, anyone)
        if self.turns:
            # Those that ended the old pass may be asked again in the new one, which only counts who filled the cohort.
            new = group.members[within:] if within < slate.size else group.members
            taken[slate.candidates[new]] = True
        divergence = group.with_each()
        cohort = Cohort(
            slate.candidates[group.members],
            candidates=slate.candidates,
            score=-divergence,
            parts={"divergence": divergence, "left in this pass": left.astype(np.float64)},
            notes={"divergence": group.divergence},
        )
        return cohort, _AstraeaState(taken)

    def update(self, state: _AstraeaState, outcome: Outcome) -> _AstraeaState:
        """Learn nothing."""
        return state
