"""What HiCS-FL estimates from bias updates, and the probabilities that follow (Eqs. 7, 9 and 10).

.. [Chen2024] H. Chen, H. Vikalo, "Heterogeneity-Guided Client Sampling: Towards Fast and Efficient Non-IID Federated
   Learning", NeurIPS 2024, arXiv:2310.00198.
"""

from __future__ import annotations

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.selectors.numerics.groups import angles


def label_entropy(updates: FloatArray, temperature: float) -> FloatArray:
    r"""Return :math:`H(\mathrm{softmax}(\Delta b / T))` (n,) of bias updates (n, C), in nats ([Chen2024]_, Eq. 7).

    >>> label_entropy(np.array([[0.0, 0.0], [0.0, 100.0]]), 1.0).round(6) + 0.0
    array([0.693147, 0.      ])
    """
    with np.errstate(over="ignore"):  # e to the power of anything below -1000 is 0
        logits = np.maximum((updates - updates.max(axis=1, keepdims=True)) / temperature, -1000.0)
    share = np.exp(logits)
    total = share.sum(axis=1, keepdims=True)
    return np.asarray(-(share / total * (logits - np.log(total))).sum(axis=1))


def hics_distance(updates: FloatArray, entropy: FloatArray, weight: float) -> FloatArray:
    """Return the distances (n, n) of Eq. 9 between bias updates (n, C) with estimated entropies (n,)."""
    return np.asarray(angles(updates) + weight * np.abs(entropy[:, None] - entropy))


def sampling_chances(cluster: IntArray, entropy: FloatArray, sizes: FloatArray, preference: float) -> FloatArray:
    """Return pi_m p_k / sum of the cluster's p_j (n,) (Eq. 10); clients of a cluster without data are equally likely.

    >>> sampling_chances(np.array([0, 0, 1]), np.array([1.0, 1.0, 1.0]), np.array([1.0, 3.0, 2.0]), 4.0)
    array([0.125, 0.375, 0.5  ])
    """
    _, group = np.unique(cluster, return_inverse=True)
    members = np.bincount(group)
    mean = np.bincount(group, entropy) / members
    pi = np.exp(preference * (mean - mean.max()))
    total = np.bincount(group, sizes)
    share = np.where(total[group] > 0, sizes / np.where(total > 0, total, 1.0)[group], 1 / members[group])
    return np.asarray((pi / pi.sum())[group] * share)
