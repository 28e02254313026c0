r"""Label shares of a client, estimated from its update of the output layer's bias.

For softmax and cross-entropy the gradient of bias i is the mean of :math:`p_i(x) - 1[y = i]` over the batch, so R steps
of SGD with learning rate :math:`\eta` move the bias by

.. math:: \Delta b \approx \eta R\, (D - \bar p),

where D are the client's label shares and :math:`\bar p` is the model's mean prediction on its data.

.. [Chen2024] H. Chen, H. Vikalo, "Heterogeneity-Guided Client Sampling: Towards Fast and Efficient Non-IID Federated
   Learning" (HiCS-FL), NeurIPS 2024.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fedcohort.core.arrays import FloatArray


def by_softmax(updates: ArrayLike, temperature: float) -> FloatArray:
    r"""Return (k, B) shares :math:`\mathrm{softmax}(\Delta b / T)`, as in HiCS-FL ([Chen2024]_, Eq. 6).

    Examples
    --------
    >>> by_softmax([[0.02, 0.0, -0.02]], temperature=0.02).round(3).tolist()
    [[0.665, 0.245, 0.09]]
    """
    scaled = np.asarray(updates, np.float64) / temperature
    weights = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def by_relative_softmax(updates: ArrayLike, temperature: float) -> FloatArray:
    r"""Return (k, B) shares as :func:`by_softmax` does, with T a multiple of the cohort's typical update.

    T = ``temperature`` times the root mean square of the cohort's updates, each without its mean. So learning rate,
    number of local steps and round need no tuning. A client that moves less than the others counts as balanced.
    """
    moved = np.asarray(updates, np.float64)
    # Without its mean, because adding a constant to all biases changes no prediction.
    scale = float(np.sqrt(((moved - moved.mean(axis=-1, keepdims=True)) ** 2).mean())) if moved.size else 0.0
    if scale == 0.0:  # nobody's bias moved, which tells nothing about labels
        return np.full(moved.shape, 1.0 / moved.shape[-1])
    return by_softmax(moved, temperature * scale)
