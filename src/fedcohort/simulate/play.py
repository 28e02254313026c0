"""Run an experiment as its user watches it: progress, Ctrl-C, a time limit. All commands and functions do it here."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console

from fedcohort.core.terminal import say
from fedcohort.simulate.leaderboard.words import quantity
from fedcohort.simulate.metrics import Metric
from fedcohort.simulate.progress import Progress
from fedcohort.simulate.rounds.listener import Deadline

if TYPE_CHECKING:
    from fedcohort.simulate.runner import Simulation


def play(simulation: Simulation, console: Console, *, until: float = math.inf) -> str:
    """Run an experiment to its end, and show how far it is; return "finished" or "interrupted".

    The first Ctrl-C finishes the round and writes a checkpoint, a second one stops at once.

    Parameters
    ----------
    console : Console
        Where notes and progress go.
    until : float
        When to stop after the current round, by ``time.monotonic``.
    """
    experiment, prepared = simulation.experiment, simulation.prepared
    # First, because what was changed in the user's data explains everything below.
    for dataset in prepared.datasets.values():
        for remark in dataset.remarks:
            say(console, f"note: {remark}")
    runs, groups = quantity(len(experiment.plans), "run"), quantity(len(prepared.groups), "lock-step group")
    say(console, f"{runs} in {groups}, {simulation.total} rounds in total; results in {simulation.out}")
    simulation.listeners.append(Progress(console, Metric.of(experiment.table.get("task"))))
    if until < math.inf:
        simulation.listeners.append(Deadline(simulation.stop, until))
    with _finish_round_on_interrupt(simulation, console):
        try:
            return simulation.run()
        except KeyboardInterrupt:
            return "interrupted"


def say_notes(simulation: Simulation, console: Console) -> None:
    """Say below the result which settings were chosen for the user; whoever continues an experiment has read them."""
    for note in () if simulation.resumed else simulation.experiment.notes:
        say(console, f"note: {note}")


@contextmanager
def _finish_round_on_interrupt(simulation: Simulation, console: Console) -> Iterator[None]:
    """Finish the round and write a checkpoint on the first SIGINT or SIGTERM; stop at once on the second."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if simulation.stopping:
            raise KeyboardInterrupt
        simulation.stop()
        say(console, "stopping after this round; press Ctrl-C again to stop at once")

    # SIGTERM too: a cluster's scheduler sends it some seconds before it kills.
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
