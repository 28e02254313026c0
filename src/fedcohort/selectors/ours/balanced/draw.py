"""Draw a cohort with a small objective J, and improve it by swaps."""

from __future__ import annotations

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray
from fedcohort.selectors.numerics.class_balance import ClassBalance
from fedcohort.selectors.numerics.sampling import log_choice


class Objective:
    """J of the group that is being built, and of the group with each candidate added.

    Parameters
    ----------
    group : ClassBalance or None
        The imbalance of the group; None if nothing is balanced.
    turns : (c,) float array
        gamma times the lead of each candidate.
    eligible : (c,) bool array
        Which candidates may be drawn.
    seconds : (c,) float array or None
        tau times the logarithm of each candidate's duration; None if time does not count.
    floor : float or None
        The least imbalance that counts; None: the imbalance that chance leaves in the group.
    before : int
        Number of busy clients, which count as drawn before.
    """

    def __init__(
        self,
        group: ClassBalance | None,
        turns: FloatArray,
        eligible: BoolArray,
        seconds: FloatArray | None,
        floor: float | None,
        before: int = 0,
    ) -> None:
        self.group = group
        self.turns = turns
        self.eligible = eligible
        self.seconds = seconds
        self.floor = floor
        self.before = before
        self.members: list[int] = []
        self._values = np.empty(len(turns))

    def balance(self) -> FloatArray | float:
        """(c,) log QCID of the group with each candidate added; infinite for members."""
        if self.group is None:
            return 0.0
        least = self.group.extended_by_chance() if self.floor is None else self.floor
        return np.asarray(np.log(np.maximum(self.group.qcid_with_each(self._values), least)))

    def slowest(self) -> FloatArray | float:
        """(c,) tau times the logarithm of the round's duration with each candidate added."""
        if self.seconds is None:
            return 0.0
        return np.asarray(np.maximum(self.seconds, self.seconds[self.members].max(initial=-np.inf)))

    def add(self, position: int) -> None:
        """Add a candidate."""
        self.members.append(position)
        if self.group is not None:
            self.group.add(position)

    def draw(self, rng: np.random.Generator) -> None:
        """Draw the m-th client with log-weight -m J of the group it would complete."""
        m = self.before + len(self.members) + 1
        weights = -m * (self.balance() + self.turns + self.slowest())
        weights[~self.eligible] = -np.inf
        weights[self.members] = -np.inf
        self.add(log_choice(weights, rng.random())[0])

    def swap(self, position: int) -> None:
        """Give a member's place to the client that makes J smallest, which may be the member itself."""
        self.members.remove(position)
        if self.group is not None:
            self.group.remove(position)
        value = self.balance() + self.turns / (len(self.members) + 1) + self.slowest()
        value[~self.eligible] = np.inf
        value[self.members] = np.inf
        best = int(value.argmin())
        self.add(best if value[best] < value[position] - 1e-12 else position)

    def parts(self) -> dict[str, FloatArray]:
        """Return the terms of J for the group with each candidate added; for members, those of the group itself."""
        parts = {"turn": -self.turns}
        if self.group is not None:
            balance = np.broadcast_to(self.balance(), len(self.turns)).copy()
            least = self.group.by_chance() if self.floor is None else self.floor
            balance[self.members] = np.log(max(self.group.qcid(), least))
            parts["balance"] = -balance
        if self.seconds is not None:
            parts["speed"] = -np.broadcast_to(self.slowest(), len(self.turns))
        return parts
