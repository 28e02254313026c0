"""The exact distribution of small cohorts, by enumeration: what the step-by-step draw does, and what it aims for.

.. [Zhang2023] J. Zhang et al., "Fed-CBS: A Heterogeneity-Aware Client Sampling Mechanism for Federated Learning via
   Class-Imbalance Reduction", ICML 2023.
"""

from __future__ import annotations

import itertools

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import LabelInfo
from fedcohort.selectors.numerics.class_balance import chance, group_of, qcid
from fedcohort.selectors.ours.fedcbs_chance import _ChanceWeighting
from fedcohort.selectors.papers.fedcbs import Weighting


def ordered_probabilities(
    labels: LabelInfo, size: int, weighting: Weighting, sizes: FloatArray | None = None
) -> tuple[IntArray, FloatArray]:
    """Return every ordered pick of ``size`` clients, (P, M), and its exact probability under the sequential draw, (P,).

    For small federations only: P = N! / (N - M)!.

    Examples
    --------
    Figure 3 of [Zhang2023]_: the optimum {0, 2, 3} comes out seldom.

    >>> from fedcohort.core.clients import LabelCounts
    >>> labels = LabelCounts([[5] * 6, [6, 6, 6, 6, 6, 0], [0, 0, 0, 10, 10, 10], [10, 10, 10, 0, 0, 0]])
    >>> picks, chances = ordered_probabilities(labels, 3, Weighting())
    >>> best = [set(pick) == {0, 2, 3} for pick in picks.tolist()]
    >>> round(float(chances[best].sum()), 3)
    0.074
    """
    group = group_of(labels, sizes)
    picks: list[tuple[int, ...]] = []
    chances: list[float] = []

    def descend(chance: float) -> None:
        m = len(group.members) + 1
        if m > size:
            picks.append(tuple(group.members))
            chances.append(chance)
            return
        values = weighting.imbalance(group, np.empty(group.n))
        logits = weighting.first(values) if m == 1 else weighting.balance(values, m)
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        for position in np.flatnonzero(np.isfinite(values)):
            group.add(int(position))
            descend(chance * float(weights[position]))
            group.remove(int(position))

    descend(1.0)
    return np.array(picks, dtype=np.int64), np.array(chances)


def target_probabilities(
    labels: LabelInfo, size: int, weighting: Weighting, sizes: FloatArray | None = None
) -> tuple[IntArray, FloatArray]:
    r"""Return every group of ``size`` clients, (P, M) ascending, and :math:`P(M) \propto QCID(M)^{-\beta_M}`, (P,)."""
    everybody = group_of(labels, sizes)
    groups = np.array(list(itertools.combinations(range(everybody.n), size)), dtype=np.int64)
    values = np.array([qcid(labels, group, sizes) for group in groups])
    if isinstance(weighting, _ChanceWeighting):
        values = np.maximum(values, chance(everybody.sizes[groups].sum(axis=1), labels.classes))
    logits = weighting.balance(values, size)
    weights = np.exp(logits - logits.max())
    return groups, weights / weights.sum()


def expected_qcid(
    labels: LabelInfo, groups: IntArray, probabilities: FloatArray, sizes: FloatArray | None = None
) -> float:
    """Return the mean QCID of enumerated groups (P, M) under their probabilities (P,)."""
    return float(np.dot(probabilities, [qcid(labels, group, sizes) for group in groups]))
