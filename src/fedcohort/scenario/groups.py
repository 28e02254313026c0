"""Groups of clients with the same view of the world, the same kind of data, or the same owner.

An average over all clients hides what a minority loses. So a federation names its groups, and every evaluation measures
each of them on samples of its own kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedcohort.core.arrays import IntArray, freeze

Kind = Literal["view", "class", "client"]


@dataclass(frozen=True, eq=False)
class Groups:
    """Which group every client is in.

    Attributes
    ----------
    kind : "view", "class" or "client"
        What the clients of a group have in common: how they see their samples, the class they hold most of, or the
        owner.
    of : (N,) int64
        The group of each client.
    views : tuple of str
        How each group sees its samples, a name in :data:`~fedcohort.scenario.shift.VIEWS`; "plain" is unchanged.

    Examples
    --------
    >>> Groups.by_class(np.array([2, 0, 2])).names
    ('mostly class 0', 'mostly class 2')
    """

    kind: Kind
    of: IntArray
    names: tuple[str, ...]
    views: tuple[str, ...]

    def __post_init__(self) -> None:
        freeze(self.of)

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def by_class(cls, main_class: IntArray) -> Groups:
        """Group clients by the class they hold most of."""
        # Classes that are nobody's main class make no group, which would have no clients to measure.
        present, of = np.unique(main_class, return_inverse=True)
        names = tuple(f"mostly class {c}" for c in present)
        return cls("class", of.astype(np.int64), names, ("plain",) * len(names))

    @classmethod
    def by_client(cls, names: tuple[str, ...]) -> Groups:
        """Make each client a group."""
        return cls("client", np.arange(len(names), dtype=np.int64), names, ("plain",) * len(names))
