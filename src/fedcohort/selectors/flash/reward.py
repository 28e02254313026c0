r"""FLASH's reward, which the paper leaves ambiguous: each reading has a name (Sec. 2.3, Algorithm 1).

.. [Chang2024] X. Chang et al., "FLASH: Federated Learning Across Simultaneous Heterogeneities", arXiv:2402.08769, 2024.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedcohort.arrays import FloatArray
from fedcohort.selectors.flash.context import LIMIT
from fedcohort.signals import Signal


class Reading(NamedTuple):
    """One way to read the paper's reward."""

    before: Signal
    after: Signal | None  # None: the same loss of the next global model, from the next round's query
    absolute: bool


READINGS = {
    "pseudo-decrease": Reading(Signal.PSEUDO_LOSS, Signal.PSEUDO_LOSS_AFTER, False),
    "pseudo-change": Reading(Signal.PSEUDO_LOSS, Signal.PSEUDO_LOSS_AFTER, True),
    "robust-decrease": Reading(Signal.ROBUST_LOSS, Signal.ROBUST_LOSS_AFTER, False),
    "robust-change": Reading(Signal.ROBUST_LOSS, Signal.ROBUST_LOSS_AFTER, True),
    "validation-decrease": Reading(Signal.VALIDATION_LOSS, None, False),
}


def rate(reading: Reading, before: FloatArray, after: FloatArray, tau: FloatArray) -> FloatArray:
    """Return the rewards: decrease of a loss, or its absolute value, per unit of time."""
    # Losses may be as large as 1e308; their difference must not overflow before it is cut off.
    decrease = np.clip(before, -1e100, 1e100) - np.clip(after, -1e100, 1e100)
    if reading.absolute:
        decrease = np.abs(decrease)
    return np.asarray(np.clip(decrease / tau, -LIMIT, LIMIT))
