"""Late models of a simulated run that count in a later round (``run.late = "count"``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedcohort.core.arrays import AnyArray, FloatArray, IntArray
from fedcohort.hosts.round import newest_late


@dataclass(frozen=True, eq=False)
class LateUpdate:
    """What one client's training added to the model it started from.

    Attributes
    ----------
    client, ticket, round : int
        The client, its cohort and its round.
    steps : int
        Its local steps.
    arrives : float
        When it arrives, by the run's clock.
    times : float
        How often its selector counts the client.
    update : (P,) tensor
    """

    client: int
    ticket: int
    round: int
    steps: int
    arrives: float
    times: float
    update: torch.Tensor


@dataclass
class LateUpdates:
    """The late updates of one run that have not counted yet."""

    waiting: list[LateUpdate] = field(default_factory=list)

    def take(self, now: float, answered: Iterable[int]) -> list[LateUpdate]:
        """Return each client's newest update that has arrived by ``now``, except for clients that ``answered``."""
        arrived = [one for one in self.waiting if one.arrives <= now]
        self.waiting = [one for one in self.waiting if one.arrives > now]
        arrived.sort(key=lambda one: one.arrives)
        counting = newest_late(arrived, lambda one: one.client, set(answered))
        return sorted(counting, key=lambda one: one.client)

    def facts(self) -> list[list[Any]]:
        """Return what a checkpoint keeps beside :meth:`updates`."""
        return [[one.client, one.ticket, one.round, one.steps, one.arrives, one.times] for one in self.waiting]

    def updates(self) -> AnyArray:
        """(l, P) the updates that wait."""
        return torch.stack([one.update for one in self.waiting]).cpu().numpy()

    def restore(self, facts: Sequence[Sequence[Any]], updates: torch.Tensor) -> None:
        """Take over :meth:`facts` and :meth:`updates`."""
        self.waiting = [
            LateUpdate(client, ticket, round_, steps, arrives, times, update)
            for (client, ticket, round_, steps, arrives, times), update in zip(facts, updates, strict=True)
        ]


def columns(late: Sequence[LateUpdate], round_: int) -> tuple[IntArray, IntArray, FloatArray, FloatArray]:
    """Return clients, steps, how often each client counts, and staleness (l,) of updates that count in ``round_``."""
    return (
        np.array([one.client for one in late], np.int64),
        np.array([one.steps for one in late], np.int64),
        np.array([one.times for one in late], np.float64),
        np.array([round_ - one.round for one in late], np.float64),
    )
