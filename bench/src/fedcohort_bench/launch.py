"""Begin, continue and run the experiments of a benchmark or a study, all with the same options."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from fedcohort.core.terminal import err
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.play import play, say_notes
from fedcohort.simulate.runner import Simulation


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Where and how long the experiments of a study run.

    Attributes
    ----------
    device, processes, command
        As in :class:`~fedcohort.simulate.runner.Simulation`.
    console : Console
        Where messages and progress go.
    until : float
        When to stop after the current round, by ``time.monotonic``.
    """

    device: str | None = None
    processes: int | None = None
    command: str = ""
    console: Console = field(default_factory=err)
    until: float = math.inf

    def begin(self, table: Mapping[str, Any], out: Path) -> Simulation:
        """Begin an experiment in a new folder."""
        experiment = Experiment.from_dict(table)
        return Simulation(experiment, out, device=self.device, processes=self.processes, command=self.command)

    def resume(self, out: Path) -> Simulation:
        """Open the experiment in a folder to continue it."""
        return Simulation.open(out, device=self.device, processes=self.processes)

    def extend(self, out: Path, seeds: Sequence[int] | None, selectors: Mapping[str, Any]) -> Simulation:
        """Add seeds and selectors to the experiment in a folder."""
        return Simulation.extend(
            out,
            seeds=seeds,
            selectors=selectors,
            device=self.device,
            processes=self.processes,
            command=self.command,
        )

    def run(self, simulation: Simulation) -> bool:
        """Run an experiment; return whether it finished. It can be continued if it did not."""
        finished = play(simulation, self.console, until=self.until) == "finished"
        say_notes(simulation, self.console)
        return finished
