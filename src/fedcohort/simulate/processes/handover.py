"""What a process that runs a lock-step group hands to the process that writes the experiment's directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedcohort.simulate.store.results import RunInfo

if TYPE_CHECKING:
    import pyarrow as pa

    from fedcohort.simulate.rounds.group import Group


@dataclass(frozen=True, eq=False)
class HandOver:
    """A group's rounds since the last hand-over, and everything needed to continue after them.

    Attributes
    ----------
    rounds : Arrow table
    round : int
        The next round to run.
    done : bool
        Whether every run of the group has ended.
    journals : dict of file name to bytes
        Empty if the process that runs the rounds writes them to the experiment's directory itself.
    """

    rounds: pa.Table
    round: int
    checkpoint: bytes
    infos: list[RunInfo]
    done: bool
    journals: dict[str, bytes] = field(default_factory=dict)


def hand_over(group: Group) -> HandOver:
    """Return a group's results since the last hand-over, after committing its journals."""
    point = group.checkpoint()
    rounds = group.drain()
    group.commit()
    return HandOver(rounds, point.round, point.to_bytes(), group.infos(), group.done)
