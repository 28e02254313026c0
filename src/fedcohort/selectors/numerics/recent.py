"""The last vectors that clients reported, for a limited number of clients."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.protocol import per_client

_MAX_ENTRY = 1e100  # larger entries are clipped, so that their squares and sums stay finite


@dataclass(frozen=True)
class RecentVectors:
    """The last vector of each client that reported recently.

    A client keeps its row while it is remembered, so that a journal writes only the rows that changed.
    """

    known: IntArray  # (r,) the client of each row
    when: IntArray  # (r,) the round of that client's last report
    vectors: FloatArray  # (r, V)

    @classmethod
    def empty(cls, **more: Any) -> Self:
        """Return the state before the first report; ``more`` are the fields that a subclass adds."""
        # The length of a vector is not known yet.
        return cls(known=np.empty(0, np.int64), when=np.empty(0, np.int64), vectors=np.empty((0, 0)), **more)

    def rows_of(self, clients: IntArray) -> IntArray:
        """Return the row of each of ``clients`` (c,), -1 if it is not remembered."""
        if not len(self.known):
            return np.full(len(clients), -1)
        # Rows stay in their places, so that a journal writes few of them. They are sorted only here.
        order = np.argsort(self.known)
        at = np.minimum(np.searchsorted(self.known, clients, sorter=order), len(order) - 1)
        rows = order[at]
        return np.asarray(np.where(self.known[rows] == clients, rows, -1))

    def with_reports(self, clients: IntArray, vectors: FloatArray, round_: int, limit: int) -> Self:
        """Return the vectors after a round's reports.

        Parameters
        ----------
        clients : (k,) int array
        vectors : (k, V) float array
            Finite. If V has changed, so has the model, and all earlier vectors are dropped.
        round_ : int
        limit : int
            Most clients to remember; those that reported longest ago are dropped.

        Examples
        --------
        >>> recent = RecentVectors.empty().with_reports(np.array([7, 3]), np.eye(2), 0, 2)
        >>> recent.with_reports(np.array([3, 5]), np.ones((2, 2)), 1, 2).known
        array([3, 5])
        """
        if not len(clients):
            return self
        # Only the last ones fit. They are clipped, because a diverged client must not make all distances infinite.
        clients, vectors = clients[-limit:], np.clip(vectors[-limit:], -_MAX_ENTRY, _MAX_ENTRY)
        if len(self.known) and self.vectors.shape[1] == vectors.shape[1]:
            known, when, kept = self.known, self.when, self.vectors
        else:
            known, when, kept = np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, vectors.shape[1]))
        order = np.argsort(clients)
        renewed = np.isin(known, clients)
        fresh = clients[order][~np.isin(clients[order], known)]
        free = max(limit - len(known), 0)
        added, instead = fresh[:free], fresh[free:]
        # Rows of clients that have just reported are the last to be given away.
        age = np.where(renewed, np.iinfo(np.int64).max, when)
        dropped = np.argsort(age, kind="stable")[: len(instead)]
        known, when = np.concatenate([known, added]), np.concatenate([when, np.zeros(len(added), np.int64)])
        kept = np.concatenate([kept, np.zeros((len(added), kept.shape[1]))])
        known[dropped] = instead
        here = np.flatnonzero(np.isin(known, clients))
        kept[here] = vectors[order][np.searchsorted(clients[order], known[here])]
        when[here] = round_
        return dataclasses.replace(self, known=known, when=when, vectors=kept)


@dataclass(frozen=True)
class AskedVectors(RecentVectors):
    """The same, and which clients were ever asked for a vector."""

    asked: BoolArray = per_client()  # (N,)
