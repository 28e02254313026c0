"""The members of a federation, and which of them can be picked now."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray, IntArray, freeze
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError
from fedcohort.core.protocol import RoundRequest
from fedcohort.core.validate import array

_NOTHING = np.empty(0, "V1")  # a type that no request has


class Membership:
    """A client table, and which of its clients are members now. Immutable.

    Parameters
    ----------
    active : (N,) bool array
        Whether each client is a member; one that left keeps its row.

    Examples
    --------
    >>> members = Membership.of(ClientTable(names=["anna", "ben"]))
    >>> after, indices = members.change(["anna"], member=False)
    >>> after.active.tolist(), indices.tolist(), members.active.tolist()
    ([False, True], [0], [True, True])
    """

    def __init__(self, table: ClientTable, active: AnyArray) -> None:
        self.table = table
        self.active: BoolArray = freeze(np.array(active, np.bool_))
        self._all = bool(self.active.all())
        self._recent: tuple[AnyArray, IntArray] = (_NOTHING, _NOTHING)  # the last request, and its candidates

    @classmethod
    def of(cls, table: ClientTable) -> Membership:
        """Return a federation in which every client is a member."""
        return cls(table, np.ones(table.n, np.bool_))

    def join(self, clients: ClientTable) -> Membership:
        """Return the federation after new clients joined; they come after the others."""
        if clients.has_names:
            repeated = [name for name in clients.names if name in self.table]
            if repeated:
                raise InputError(
                    f"The client {repeated[0]!r} is already in the federation.",
                    hint="session.rejoin(names) brings back clients that left",
                )
        return Membership(self.table.with_clients(clients), np.concatenate([self.active, np.ones(clients.n, np.bool_)]))

    def with_facts(self, table: ClientTable) -> Membership:
        """Return the federation with other facts about the same clients; no kind of fact may be missing."""
        if table.names != self.table.names or not table.signals >= self.table.signals:
            raise InputError("New facts must cover the same clients and the same kinds of facts as the old ones.")
        return Membership(table, self.active)

    def change(self, clients: Sequence[str] | Sequence[int] | IntArray, member: bool) -> tuple[Membership, IntArray]:
        """Return the federation after clients left or came back, and their indices."""
        indices = self.table.indices(clients)
        # A copy, because the caller records the change first, and keeps the old object if that fails.
        active = self.active.copy()
        active[indices] = member
        return Membership(self.table, active), indices

    def candidates(self, request: RoundRequest, training: IntArray) -> IntArray:
        """Return the clients that can be picked: members that are available and not training."""
        available = request.available
        if available is None:
            if self._all and not len(training):
                return freeze(np.arange(self.table.n))
            return self._without(self.active.copy(), training)
        if len(training):
            return self._without(self._mask(available), training)
        request_array = _as_array(available)
        before, candidates = self._recent
        # Types are compared too, because a mask would equal a list of the indices 0 and 1.
        if request_array.dtype != before.dtype or not np.array_equal(request_array, before):
            candidates = self._without(self._mask(available), training)
            if request_array is available and request_array.base is None and not request_array.flags.writeable:
                # A host may pass the same array in every round; comparing a million entries is a fortieth of the work.
                self._recent = (request_array, candidates)
        return candidates

    def _mask(self, available: AnyArray | Sequence[int] | Sequence[str]) -> BoolArray:
        """Return which members are available, (N,)."""
        mask, n = _as_array(available), self.table.n
        if mask.dtype != np.bool_:
            mask = np.zeros(n, np.bool_)
            mask[self.table.indices(available)] = True
        elif mask.shape != (n,):
            raise InputError(f"'available' as a mask must have one entry per client, shape ({n},). Got {mask.shape}.")
        return mask & self.active

    @staticmethod
    def _without(mask: BoolArray, training: IntArray) -> IntArray:
        mask[training] = False
        return freeze(np.flatnonzero(mask))


def _as_array(available: AnyArray | Sequence[int] | Sequence[str]) -> AnyArray:
    return array(available, "'available'", "a mask, indices or names of clients")
