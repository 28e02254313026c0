"""Balance without labels: by the directions of clients' updates.

A cohort whose mean update points in the direction of the mean of all clients trains what all of them would train. A
client's direction is the mean of its last updates, each scaled to length 1. A client that was never seen has the mean
direction.
"""

from __future__ import annotations

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import LabelFactor
from fedcohort.selectors.numerics.class_balance import ClassBalance, Past, group_of

_MEMORY = 10  # a direction is the mean of about this many updates


def update_directions(
    directions: FloatArray, seen: FloatArray, clients: IntArray, updates: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return directions (N, V) and how often each client was seen (N,) after ``updates`` (k, V) of ``clients``."""
    length = np.linalg.norm(updates, axis=1, keepdims=True)
    new = updates / np.where(length > 0, length, 1.0)
    seen = seen.copy()
    directions = directions.copy() if directions.shape[1] else np.zeros((len(seen), new.shape[1]))
    seen[clients] += 1
    directions[clients] += (new - directions[clients]) / np.minimum(seen[clients, None], _MEMORY)
    return directions, seen


def direction_group(
    directions: FloatArray, seen: FloatArray, sizes: FloatArray, candidates: IntArray, past: Past
) -> ClassBalance:
    """Return an empty group whose QCID is the squared distance of its mean direction from that of all clients."""
    clients = np.concatenate([candidates, past.clients])
    count = len(candidates)
    mean = directions[seen > 0].mean(axis=0)
    rows = np.where(seen[clients, None] > 0, directions[clients], mean)
    # The last column makes the QCID of these rows the squared distance of their mean from the mean of all.
    factor = np.column_stack([(rows - mean) * sizes[clients, None], sizes[clients] / np.sqrt(2.0)])
    return group_of(
        LabelFactor(factor, 2), sizes[clients], np.arange(count), Past(np.arange(count, len(clients)), past.weights)
    )
