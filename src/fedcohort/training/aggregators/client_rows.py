"""One vector per client that took part, in a matrix that grows as clients appear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedcohort.core.arrays import AnyArray, IntArray
from fedcohort.training.arithmetic import as_like, zeros


class ClientRows:
    """Vectors (P,) by client, on the model's device. Clients that never took part use no memory.

    Parameters
    ----------
    federation : int
        N, the number of clients, which is the largest number of rows ever needed.
    default : (P,)
        The vector of a client without a row.
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
        # Row by row, because some clients have no row to index.
        vectors = zeros(self.default, len(clients))
        for i, client in enumerate(clients.tolist()):
            row = self._row_of.get(client)
            vectors[i] = self.default if row is None else self._rows[row]
        return vectors

    def put(self, clients: IntArray, vectors: Any) -> None:
        """Replace the vectors of ``clients`` by ``vectors`` (k, P)."""
        needed = len(self._row_of.keys() | set(clients.tolist()))
        if needed > len(self._rows):
            # Doubled, so that rows are copied only O(log N) times if clients appear one by one.
            grown = zeros(self.default, min(max(2 * len(self._rows), needed), max(self._federation, needed)))
            grown[: len(self._rows)] = self._rows
            self._rows = grown
        for i, client in enumerate(clients.tolist()):
            self._rows[self._row_of.setdefault(client, len(self._row_of))] = vectors[i]

    def arrays(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {"clients": self.clients, "rows": self.rows}

    def restore(self, arrays: Mapping[str, AnyArray]) -> None:
        """Restore what :meth:`arrays` returned."""
        self._rows = as_like(arrays["rows"], self.default)
        self._row_of = {int(client): row for row, client in enumerate(arrays["clients"].tolist())}
