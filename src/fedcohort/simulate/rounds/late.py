"""Late models of a simulated run that count in a later round (``run.late = "count"``)."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

import torch

from fedcohort.hosts.round import newest_late


class LateUpdate(NamedTuple):
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


def counting(waiting: Sequence[LateUpdate], now: float, answered: Container[int]) -> list[LateUpdate]:
    """Return each client's newest update that has arrived by ``now``, except for clients that ``answered``."""
    arrived = sorted((one for one in waiting if one.arrives <= now), key=lambda one: one.arrives)
    return sorted(newest_late(arrived, lambda one: one.client, answered), key=lambda one: one.client)
