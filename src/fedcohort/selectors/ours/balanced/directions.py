"""What a server can balance where nobody tells about labels: the directions of the clients' updates.

A cohort whose mean update points where the mean of all clients does trains what all of them would. A client's direction
is the mean of its last updates, each of length 1; a client never seen counts as the mean of the others.
"""

from __future__ import annotations

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import LabelFactor
from fedcohort.selectors.numerics.class_balance import ClassBalance, Past, group_of

_MEMORY = 10  # a direction is the mean of about so many updates


def update_directions(
    directions: FloatArray, seen: FloatArray, who: IntArray, updates: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return directions (N, V) and how often each client was seen (N,) after ``updates`` (k, V) of clients ``who``."""
    length = np.linalg.norm(updates, axis=1, keepdims=True)
    new = updates / np.where(length > 0, length, 1.0)
    seen = seen.copy()
    directions = directions.copy() if directions.shape[1] else np.zeros((len(seen), new.shape[1]))
    seen[who] += 1
    directions[who] += (new - directions[who]) / np.minimum(seen[who, None], _MEMORY)
    return directions, seen


def direction_group(
    directions: FloatArray, seen: FloatArray, sizes: FloatArray, candidates: IntArray, past: Past
) -> ClassBalance:
    """Return an empty group whose "imbalance" is the squared distance of its mean direction to that of all clients."""
    who = np.concatenate([candidates, past.clients])
    count = len(candidates)
    mean = directions[seen > 0].mean(axis=0)
    rows = np.where(seen[who, None] > 0, directions[who], mean)
    # The last column makes QCID of these rows the squared distance of their mean to the mean of all.
    factor = np.column_stack([(rows - mean) * sizes[who, None], sizes[who] / np.sqrt(2.0)])
    return group_of(
        LabelFactor(factor, 2), sizes[who], np.arange(count), Past(np.arange(count, len(who)), past.weights)
    )
