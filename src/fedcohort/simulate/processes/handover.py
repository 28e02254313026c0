"""What a process that makes a lock-step group's rounds hands to the one that writes the experiment's directory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedcohort.simulate.store.results import RunInfo

if TYPE_CHECKING:
    import pyarrow as pa

    from fedcohort.simulate.rounds.group import Group


@dataclass(frozen=True, eq=False)
class HandOver:
    """A group's rounds since the last time, and everything that is needed to continue after them.

    Attributes
    ----------
    rounds, clients : Arrow tables
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
    clients: pa.Table
    round: int
    checkpoint: bytes
    infos: list[RunInfo]
    done: bool
    journals: dict[str, bytes] = field(default_factory=dict)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rounds as listeners take them, with statuses and durations of the cohort."""
        statuses = self.clients.column("status").to_numpy()
        durations = self.clients.column("seconds").to_numpy()
        start = 0
        for row in self.rounds.to_pylist():
            stop = start + len(row["cohort"])
            yield {**row, "statuses": statuses[start:stop], "durations": durations[start:stop]}
            start = stop


def hand_over(group: Group) -> HandOver:
    """Return what came of a group since the last time; its journals are committed up to here."""
    point = group.checkpoint()
    rounds, clients = group.drain()
    group.commit()
    return HandOver(rounds, clients, point.round, point.to_bytes(), group.infos(), group.done)
