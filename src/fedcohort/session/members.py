"""Who is in a federation, and who of them can be picked now."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray, IntArray, sealed
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError
from fedcohort.core.protocol import RoundRequest

_NOTHING = np.empty(0, "V1")  # of a kind nobody asks with


class Membership:
    """A client table and who of it is a member; both are replaced, never changed.

    Parameters
    ----------
    table : ClientTable
    active : (N,) bool array
        Who is a member now.
    """

    def __init__(self, table: ClientTable, active: AnyArray) -> None:
        self.table = table
        self.active: BoolArray = sealed(np.array(active, np.bool_))
        self._all = bool(self.active.all())
        self._recent: tuple[AnyArray, IntArray] = (_NOTHING, _NOTHING)  # what was asked last, and who could be picked

    def knows(self, name: str) -> bool:
        """Whether a name is that of a client, a member or one that left."""
        return name in self.table

    def changed(self, clients: Sequence[str] | Sequence[int] | IntArray, member: bool) -> tuple[Membership, IntArray]:
        """Return the federation after clients left or came back, and who they are."""
        who = self.table.indices(clients)
        active = self.active.copy()
        active[who] = member
        return Membership(self.table, active), who

    def candidates(self, request: RoundRequest, training: Sequence[IntArray]) -> IntArray:
        """Return who can be picked: available, a member, and in none of the cohorts that still train."""
        available = request.available
        if available is None:
            if self._all and not training:
                return sealed(np.arange(self.table.n))
            return self._without(self.active.copy(), training)
        given = np.asarray(available)
        if training:
            return self._without(self._mask(available), training)
        before, candidates = self._recent
        if given.dtype != before.dtype or not np.array_equal(given, before):
            candidates = self._without(self._mask(available), ())
            if given is available and given.base is None and not given.flags.writeable:
                # A host may pass the same round after round; at a million clients to compare is a fortieth of the work.
                self._recent = (given, candidates)
        return candidates

    def _mask(self, available: AnyArray | Sequence[int] | Sequence[str]) -> BoolArray:
        """Return which members are available, (N,)."""
        given, n = np.asarray(available), self.table.n
        if given.dtype != np.bool_:
            mask = np.zeros(n, np.bool_)
            mask[self.table.indices(available)] = True
        elif given.shape == (n,):
            mask = given
        else:
            raise InputError(f"'available' as a mask must have one entry per client, shape ({n},). Got {given.shape}.")
        return mask & self.active

    @staticmethod
    def _without(mask: BoolArray, training: Sequence[IntArray]) -> IntArray:
        for clients in training:
            mask[clients] = False
        return sealed(np.flatnonzero(mask))
