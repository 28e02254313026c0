"""A vector for each client that took part, in one matrix that grows as clients appear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedcohort.core.arrays import AnyArray, IntArray
from fedcohort.training.aggregators.arithmetic import as_like, zeros


class ClientRows:
    """Vectors (P,) by client, on the model's device. Clients that never took part cost nothing.

    Parameters
    ----------
    federation : int
        Number of clients N: the most rows that are ever needed.
    default : (P,)
        What a client without a row has.
    """

    def __init__(self, federation: int, default: Any) -> None:
        self._federation = federation
        self.default = default
        self._rows = zeros(default, 0)  # (capacity, P), grown by doubling
        self._row_of: dict[int, int] = {}

    @property
    def clients(self) -> IntArray:
        """The clients that have a row, in the order in which they appeared."""
        return np.fromiter(self._row_of, np.int64, len(self._row_of))

    @property
    def rows(self) -> Any:
        """The rows of :attr:`clients`, in their order."""
        return self._rows[: len(self._row_of)]

    def of(self, clients: IntArray) -> Any:
        """(k, P) a copy of the vectors of ``clients``."""
        found = zeros(self.default, len(clients))
        for i, client in enumerate(clients.tolist()):
            row = self._row_of.get(client)
            found[i] = self.default if row is None else self._rows[row]
        return found

    def put(self, clients: IntArray, vectors: Any) -> None:
        """Replace the vectors of ``clients`` by ``vectors`` (k, P)."""
        needed = len(self._row_of.keys() | set(clients.tolist()))
        if needed > len(self._rows):
            # Doubled, so that a federation that appears client by client is copied O(log N) times.
            grown = zeros(self.default, min(max(2 * len(self._rows), needed), max(self._federation, needed)))
            grown[: len(self._rows)] = self._rows
            self._rows = grown
        for i, client in enumerate(clients.tolist()):
            self._rows[self._row_of.setdefault(client, len(self._row_of))] = vectors[i]

    def arrays(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"clients": self.clients, "rows": self.rows}

    def restore(self, arrays: Mapping[str, AnyArray]) -> None:
        """Take over what :meth:`arrays` returned."""
        self._rows = as_like(arrays["rows"], self.default)
        self._row_of = {int(client): row for row, client in enumerate(arrays["clients"].tolist())}
