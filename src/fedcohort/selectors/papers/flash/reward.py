r"""FLASH's reward, which the paper leaves ambiguous: each reading has a name (Sec. 2.3, Algorithm 1).

.. [Chang2024] X. Chang et al., "FLASH: Federated Learning Across Simultaneous Heterogeneities", arXiv:2402.08769, 2024.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.signals import Signal
from fedcohort.selectors.papers.flash.context import LIMIT


class Reading(NamedTuple):
    """One way to read the paper's reward."""

    before: Signal
    after: Signal | None  # None: the same loss of the next global model, from the next round's query
    form: Literal["decrease", "change", "advantage"]


READINGS = {
    "robust-advantage": Reading(Signal.ROBUST_LOSS, Signal.ROBUST_LOSS_AFTER, "advantage"),
    "robust-decrease": Reading(Signal.ROBUST_LOSS, Signal.ROBUST_LOSS_AFTER, "decrease"),
    "robust-change": Reading(Signal.ROBUST_LOSS, Signal.ROBUST_LOSS_AFTER, "change"),
    "pseudo-decrease": Reading(Signal.PSEUDO_LOSS, Signal.PSEUDO_LOSS_AFTER, "decrease"),
    "pseudo-change": Reading(Signal.PSEUDO_LOSS, Signal.PSEUDO_LOSS_AFTER, "change"),
    "validation-decrease": Reading(Signal.VALIDATION_LOSS, None, "decrease"),
}


def rate(reading: Reading, before: FloatArray, after: FloatArray, tau: FloatArray, usual: float) -> FloatArray:
    """Return the rewards per unit of time.

    Parameters
    ----------
    reading : Reading
        What is rewarded: the decrease of a loss, its change in either direction, or how far the loss afterwards lies
        below the usual one, as a share of it.
    before, after : (k,) float array
        The loss of the received model and of the client's own (or of the next global model).
    tau : (k,) float array
        Durations.
    usual : float
        The mean of the loss over all clients that are known; only looked at by an advantage. At 0 nobody has one.

    Examples
    --------
    >>> rate(READINGS["robust-advantage"], np.ones(2), np.array([0.5, 3.0]), np.array([1.0, 2.0]), 2.0)
    array([ 0.75, -0.25])
    """
    # Losses may be as large as 1e308; their difference must not overflow before it is cut off.
    before, after = np.clip(before, -1e100, 1e100), np.clip(after, -1e100, 1e100)
    match reading.form:
        case "advantage":
            gain = (usual - after) / usual if usual > 1e-100 else np.zeros(len(after))
        case "decrease":
            gain = before - after
        case "change":
            gain = np.abs(before - after)
    return np.asarray(np.clip(gain / tau, -LIMIT, LIMIT))
