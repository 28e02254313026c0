"""What a process that makes a lock-step group's rounds hands to the one that writes the experiment's directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedcohort.simulate.store.results import RunInfo

if TYPE_CHECKING:
    import pyarrow as pa

    from fedcohort.simulate.rounds.group import Group


@dataclass(frozen=True, eq=False)
class HandOver:
    """A group's rounds since the last time, and everything that is needed to continue after them.

    Attributes
    ----------
    rounds : Arrow table
    round : int
        The next round to make.
    checkpoint : bytes
    infos : list of RunInfo
    done : bool
        Whether every run of the group has ended.
    journals : dict of file name to bytes
        Where the process that makes the rounds cannot write them in their place.
    """

    rounds: pa.Table
    round: int
    checkpoint: bytes
    infos: list[RunInfo]
    done: bool
    journals: dict[str, bytes] = field(default_factory=dict)


def hand_over(group: Group) -> HandOver:
    """Return what came of a group since the last time; its journals are committed up to here."""
    point = group.checkpoint()
    rounds = group.drain()
    group.commit()
    return HandOver(rounds, point.round, point.to_bytes(), group.infos(), group.done)
