"""Who is in a federation, and who of them can be picked now."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedcohort.arrays import AnyArray, BoolArray, IntArray, sealed
from fedcohort.clients import ClientTable
from fedcohort.errors import InputError
from fedcohort.protocol import RoundRequest

_NOBODY = np.empty(0, np.int64)


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
        self._recent: tuple[object, IntArray] = (None, _NOBODY)  # what was asked last, and who could be picked

    def knows(self, name: str) -> bool:
        """Whether a name is that of a client, a member or one that left."""
        try:
            self.table.index(name)
        except KeyError:
            return False
        return True

    def changed(self, clients: Sequence[str] | Sequence[int] | IntArray, member: bool) -> tuple[Membership, IntArray]:
        """Return the federation after clients left or came back, and who they are."""
        who = self.table.indices(clients)
        active = self.active.copy()
        active[who] = member
        return Membership(self.table, active), who

    def candidates(self, request: RoundRequest, training: Sequence[IntArray]) -> IntArray:
        """Return who can be picked: available, a member, and in none of the cohorts that still train."""
        available = request.available
        n = self.table.n
        if available is None:
            if self._all and not training:
                return sealed(np.arange(n))
            mask = self.active.copy()
        elif self._recent[0] is available and not training:
            return self._recent[1]
        else:
            given = np.asarray(available)
            if given.dtype == np.bool_:
                if given.shape != (n,):
                    raise InputError(
                        f"'available' as a mask must have one entry per client, shape ({n},). Got {given.shape}."
                    )
                mask = given & self.active
            else:
                mask = np.zeros(n, np.bool_)
                mask[self.table.indices(available)] = True
                mask &= self.active
        for clients in training:
            mask[clients] = False
        candidates = sealed(np.flatnonzero(mask))
        fixed = isinstance(available, np.ndarray) and available.base is None and not available.flags.writeable
        if fixed and not training:
            self._recent = (available, candidates)  # a host may pass the same array round after round
        return candidates
