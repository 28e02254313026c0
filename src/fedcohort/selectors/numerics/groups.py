"""Distances between vectors, and groups of similar vectors by Ward's method."""

from __future__ import annotations

import numpy as np
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from fedcohort.core.arrays import FloatArray, IntArray


def scale_down(vectors: FloatArray) -> FloatArray:
    """Return ``vectors`` (n, V) divided by their largest entry, so that squares do not overflow."""
    largest = float(np.abs(vectors).max(initial=0.0))
    return vectors / largest if largest > 0 else vectors


def angles(vectors: FloatArray) -> FloatArray:
    """Return the angles (n, n) between vectors (n, V).

    A zero vector has no direction: its angle is pi / 2 to other vectors and 0 to another zero vector.

    >>> angles(np.array([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]])) / np.pi
    array([[0. , 0.5, 1. ],
           [0.5, 0. , 0.5],
           [1. , 0.5, 0. ]])
    """
    # Scaled to a largest entry of 1 first: squares of very large or very small entries would overflow or vanish.
    largest = np.abs(vectors).max(axis=1, keepdims=True, initial=0.0)
    unit = vectors / np.where(largest > 0, largest, 1.0)
    length = np.linalg.norm(unit, axis=1, keepdims=True)
    unit = unit / np.where(length > 0, length, 1.0)
    angle = np.arccos(np.clip(unit @ unit.T, -1.0, 1.0))
    nothing = length[:, 0] == 0
    angle[np.ix_(nothing, nothing)] = 0.0
    np.fill_diagonal(angle, 0.0)
    return np.asarray((angle + angle.T) / 2)  # a product of matrices may be asymmetric by rounding


def distances(vectors: FloatArray) -> FloatArray:
    """Return the L2 distances (n, n) between vectors (n, V)."""
    square = (vectors**2).sum(axis=1)
    apart = np.sqrt(np.maximum(square[:, None] + square - 2 * (vectors @ vectors.T), 0.0))
    np.fill_diagonal(apart, 0.0)
    return np.asarray((apart + apart.T) / 2)


def ward_groups(
    distance: FloatArray, min_groups: int, sizes: FloatArray | None = None, capacity: float = np.inf
) -> IntArray:
    """Return the group of each of n items, from the tree that Ward's method builds over their distances.

    The tree is cut into as few groups as possible, but at least ``min_groups`` (n if there are fewer items), and no
    group's sizes sum to more than ``capacity``.

    Parameters
    ----------
    distance : (n, n) float array
        Symmetric, zeros on the diagonal.
    min_groups : int
    sizes : (n,) float array, optional
    capacity : float

    Returns
    -------
    (n,) int array
        Group numbers from 0, ordered by first member.

    Examples
    --------
    >>> place = np.array([0.0, 0.1, 5.0, 5.1, 9.0])
    >>> ward_groups(np.abs(place[:, None] - place), 3)
    array([0, 0, 1, 1, 2])
    >>> ward_groups(np.abs(place[:, None] - place), 3, np.array([1.0, 2.0, 1.0, 1.0, 1.0]), 2.0)
    array([0, 1, 2, 2, 3])
    """
    n = len(distance)
    if n < 2:
        return np.zeros(n, np.int64)
    tree = linkage(squareform(distance, checks=False), "ward")
    total = np.concatenate([np.zeros(n) if sizes is None else sizes, np.empty(n - 1)])
    parent = np.arange(2 * n - 1)
    for step in range(n - max(min_groups, 1)):
        left, right = int(tree[step, 0]), int(tree[step, 1])
        total[n + step] = total[left] + total[right]
        # Not only this merge is skipped: later ones are of items that are further apart.
        if total[n + step] > capacity:
            break
        parent[left] = parent[right] = n + step
    for node in range(2 * n - 2, -1, -1):  # a parent's number is higher, so it is final before its children's
        parent[node] = parent[parent[node]]
    _, first, group = np.unique(parent[:n], return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[group], dtype=np.int64)
