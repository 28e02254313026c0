r"""Fed-CBS with a floor set by chance, and with optional swaps towards the distribution it aims for.

.. [Zhang2023] J. Zhang et al., "Fed-CBS: A Heterogeneity-Aware Client Sampling Mechanism for Federated Learning via
   Class-Imbalance Reduction", ICML 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.params import Either, Interval, OneOf, ParamSets, param
from fedcohort.core.protocol import register
from fedcohort.selectors.numerics.class_balance import RESOLUTION, ClassBalance
from fedcohort.selectors.papers.fedcbs import (
    DrawnGroup,
    FedCBS,
    Weighting,
    draw_group,
    draw_next,
    drawn_group,
)


@register("fedcbs-chance")
@dataclass(frozen=True, kw_only=True)
class FedCBSChance(FedCBS):
    r"""Fed-CBS that treats groups as equally balanced if only chance tells them apart.

    **The floor.** The L_b = 1e-20 of :class:`~fedcohort.selectors.papers.fedcbs.FedCBS` ([Zhang2023]_) gives an exactly
    balanced client the weight 1e20, which no exploration can match. If most clients are nearly balanced, the few that
    are exactly balanced train in every round. Here L_b is the QCID that a group of that many samples shows by chance
    when the classes are balanced,

    .. math:: L_b(M) = \Bigl(1 - \frac{1}{B}\Bigr) \Big/ \sum_{n \in M} q_n,

    below which one group is not better balanced than another. Skewed groups are far above it.

    **Swaps.** The step-by-step draw does not follow :math:`P(M) \propto QCID(M)^{-\beta_M}`, which the paper aims
    for. Of the four clients of its Figure 3, it finds the balanced three with probability 0.074. With ``swaps``, the
    drawn cohort is moved towards that distribution, one member at a time. What that gains depends on which clients are
    available (Fashion-MNIST, 5 seeds, ``fedcor`` and ``fedcbs`` in ``bench/experiments``; accuracy of the last 50
    rounds without swaps and with ten). With all clients available, swaps lower QCID further and help: one class per
    client 0.749 to 0.753, two 0.784 to 0.802, Dirichlet 0.734 to 0.740. With 30% available, they make cohorts more
    alike and cost a little: Dirichlet 0.777 to 0.774, class-imbalanced Case 2 0.742 to 0.735. So they are off by
    default.

    Examples
    --------
    Clients 0 and 1 are both as balanced as chance allows, so neither has an advantage over the other.

    >>> from fedcohort import ClientTable, LabelCounts, Session
    >>> from fedcohort.core.protocol import RoundRequest
    >>> table = ClientTable(labels=LabelCounts([[5, 5], [6, 4], [9, 1]]))
    >>> cohort = Session(FedCBSChance(), table, seed=3).ask(RoundRequest(size=1))
    >>> bool(abs(cohort.score[0] - cohort.score[1]) < 1e-9), bool(cohort.score[2] < cohort.score[1])
    (True, True)
    """

    checked_params: ClassVar[ParamSets] = {
        "swaps": {"swaps": 7},
        "the paper's floor": {"floor": 1e-20},
    }

    floor: float | Literal["chance"] = param(  # type: ignore[assignment]
        "chance",
        Either(OneOf(("chance",)), Interval(float, 0, 1, "neither")),
        "least value of QCID (L_b): the QCID of balanced data by chance, or a number",
    )
    swaps: int = param(0, Interval(int, 0, None), "swap moves towards P(M) ~ QCID^-beta_M after the draw")

    def draw(self, group: ClassBalance, size: int, bonus: FloatArray, rng: np.random.Generator) -> DrawnGroup:
        """Draw, then move the group by swaps."""
        weighting = (
            _ChanceWeighting(beta=self.beta, floor=RESOLUTION, exploration=bonus)
            if self.floor == "chance"
            else Weighting(beta=self.beta, floor=self.floor, exploration=bonus)
        )
        drawn = draw_group(group, size, weighting, rng)
        return _swap_members(group, drawn, weighting, self.swaps, rng) if self.swaps else drawn


class _ChanceWeighting(Weighting):
    """The weights of Fed-CBS, with the QCID that balanced data shows by chance as the least value."""

    def imbalance(self, group: ClassBalance, out: FloatArray) -> FloatArray:
        """Write to ``out`` (c,) the QCID of a group with each candidate, or that of chance if it is larger."""
        return np.maximum(group.qcid_with_each(out), group.extended_by_chance(), out=out)


def _swap_members(
    group: ClassBalance, drawn: DrawnGroup, weighting: Weighting, swaps: int, rng: np.random.Generator
) -> DrawnGroup:
    r"""Move a drawn group towards :math:`P(M) \propto QCID(M)^{-\beta_M}`, one member at a time.

    ``swaps`` times, one member (each in turn, in random order) is removed and its replacement drawn, which may be the
    same client, with probability proportional to :math:`QCID(M)^{-\beta_M}` of the resulting group. Each swap is a
    Metropolis-Hastings move with P(M) as its target. The replacement is proposed from the exact conditional
    distribution, so the move is always accepted, and P(M) is stationary.

    A group of a single client or of all candidates is returned as it is. A replacement has the place of the member it
    replaced in ``picks``.
    """
    size = len(drawn.picks)
    if not 1 < size < group.n:
        return drawn
    values = np.empty(group.n)
    picks, chances = drawn.picks.copy(), drawn.log_probability[drawn.picks]
    bonus = drawn.exploration[picks]
    order = np.empty(0, dtype=np.int64)
    for move in range(swaps):
        # Every member has a turn before any has two, so no member of the greedy draw is overlooked.
        if move % size == 0:
            order = rng.permutation(size)
        place = int(order[move % size])
        group.remove(int(picks[place]))
        picks[place], chances[place] = draw_next(weighting.imbalance(group, values), size, weighting, rng.random())
        bonus[place] = 0.0  # a replacement was not drawn with the bonus
        group.add(int(picks[place]))
    exploration = np.zeros(group.n)
    exploration[picks] = bonus
    return drawn_group(group, picks, chances, weighting.balance(values, size), exploration)
