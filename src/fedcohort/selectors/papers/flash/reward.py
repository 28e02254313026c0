r"""The reward of FLASH (Sec. 2.3, Algorithm 1). The paper is ambiguous, so each reading has a name.

.. [Chang2024] X. Chang et al., "FLASH: Federated Learning Across Simultaneous Heterogeneities", arXiv:2402.08769, 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.signals import Signal
from fedcohort.selectors.papers.flash.context import LIMIT

_Gain = Callable[[FloatArray, FloatArray], FloatArray]
"""Maps the losses before and after (k,) to gains (k,)."""


class Reading(NamedTuple):
    """One way to read the paper's reward."""

    before: Signal
    after: Signal | None  # None: the loss "before", of the next global model, from the next round's query
    gain: _Gain


def _change(before: FloatArray, after: FloatArray) -> FloatArray:
    """Return how far the loss moved, in either direction."""
    return np.abs(before - after)


def decrease(before: FloatArray, after: FloatArray) -> FloatArray:
    """Return how far the loss fell."""
    return before - after


READINGS = {
    "round-change": Reading(Signal.ROBUST_LOSS, None, _change),  # the formula, over rounds
    "robust-change": Reading(Signal.ROBUST_LOSS, Signal.ROBUST_LOSS_AFTER, _change),
    "pseudo-change": Reading(Signal.PSEUDO_LOSS, Signal.PSEUDO_LOSS_AFTER, _change),
    "validation-decrease": Reading(Signal.VALIDATION_LOSS, None, decrease),
}


def rate(gain: _Gain, before: FloatArray, after: FloatArray, tau: FloatArray) -> FloatArray:
    """Return the rewards per unit of time.

    Parameters
    ----------
    gain : callable
        What is rewarded.
    before, after : (k,) float array
        The loss of the received model, and of the client's own (or of the next global model).
    tau : (k,) float array
        Durations.

    Examples
    --------
    >>> rate(_change, np.array([1.0, 1.0]), np.array([0.5, 3.0]), np.array([1.0, 2.0]))
    array([0.5, 1. ])
    """
    # Losses may be as large as 1e308. Their difference must not overflow before it is clipped.
    return np.asarray(np.clip(gain(np.clip(before, -1e100, 1e100), np.clip(after, -1e100, 1e100)) / tau, -LIMIT, LIMIT))
