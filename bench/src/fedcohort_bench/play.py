"""Run the experiments of a study: show progress, finish the round on Ctrl-C, stop when the time is up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedcohort.core.terminal import err
from fedcohort.simulate.interrupts import finish_round_on_interrupt, print_to_stderr
from fedcohort.simulate.progress import Progress
from fedcohort.simulate.rounds.listener import Deadline
from fedcohort.simulate.runner import Simulation


@dataclass(frozen=True, kw_only=True)
class Player:
    """How the experiments of a study are run.

    Attributes
    ----------
    device, processes, command
        As in :class:`~fedcohort.simulate.runner.Simulation`.
    say : callable
        Receives messages for the user.
    quiet : bool
        Whether to hide the progress.
    until : float
        When to stop after the current round, by ``time.monotonic``.
    """

    device: str | None = None
    processes: int | None = None
    command: str = ""
    say: Callable[[str], None] = print_to_stderr
    quiet: bool = False
    until: float = math.inf

    def play(self, simulation: Simulation) -> bool:
        """Run an experiment; return whether it finished. It can be continued if it did not."""
        simulation.listeners.append(Progress(err(self.quiet)))
        if self.until < math.inf:
            simulation.listeners.append(Deadline(simulation.stop, self.until))
        self.say(f"{len(simulation.experiment.plans)} runs; results in {simulation.out}")
        with finish_round_on_interrupt(simulation, self.say):
            return simulation.run() == "finished"
