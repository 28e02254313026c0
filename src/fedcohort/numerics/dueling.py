"""Everybody against everybody in O(k log k)."""

from __future__ import annotations

import numpy as np

from fedcohort.arrays import FloatArray


def duels(rewards: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return how many others each one beats and by how many it is beaten; equals do neither.

    Parameters
    ----------
    rewards : (k,) float array
        Finite, higher is better.

    Returns
    -------
    wins, losses : (k,) float array

    Examples
    --------
    >>> wins, losses = duels(np.array([3.0, 1.0, 3.0]))
    >>> wins.tolist(), losses.tolist()
    ([1.0, 0.0, 1.0], [0.0, 2.0, 0.0])
    """
    ordered = np.sort(rewards)
    wins = np.searchsorted(ordered, rewards, side="left")
    losses = len(rewards) - np.searchsorted(ordered, rewards, side="right")
    return wins.astype(np.float64), losses.astype(np.float64)
