"""What processes that run lock-step groups hand to the process that writes the experiment's directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.rounds.group import Group
from fedcohort.simulate.rounds.prepare import PreparedExperiment
from fedcohort.simulate.store.results import RunInfo

if TYPE_CHECKING:
    import pyarrow as pa


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


# A protocol, because the runner imports the drivers and not the other way round.
class DrivenExperiment(Protocol):
    """What a driver needs of the :class:`~fedcohort.simulate.runner.Simulation` that it runs groups for."""

    experiment: Experiment
    prepared: PreparedExperiment
    out: Path
    device: str
    address: str | None

    @property
    def stopping(self) -> bool:
        """Whether to stop after the current round."""

    def has_ended(self, number: int) -> bool:
        """Whether all runs of a group have ended and are on disk."""

    def last_checkpoint(self, number: int) -> bytes | None:
        """Return the checkpoint that a group continues from, after removing everything later from the directory."""

    def journals(self, number: int) -> dict[str, bytes]:
        """Return complete copies of the journals of a group's runs, by file name."""

    def take_over(self, number: int, result: HandOver) -> None:
        """Write what a group's process hands over."""


def hand_over(group: Group) -> HandOver:
    """Return a group's results since the last hand-over, after committing its journals."""
    point = group.checkpoint()
    rounds = group.drain()
    group.commit()
    return HandOver(rounds, point.round, point.to_bytes(), group.infos(), group.done)
