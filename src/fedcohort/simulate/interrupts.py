"""Handle Ctrl-C during an experiment without losing finished rounds."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedcohort.simulate.runner import Simulation


def print_to_stderr(text: str) -> None:
    """Print a message to stderr, for callers without a console."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def finish_round_on_interrupt(simulation: Simulation, say: Callable[[str], None]) -> Iterator[None]:
    """Finish the round and write a checkpoint on the first SIGINT or SIGTERM; stop at once on the second.

    Parameters
    ----------
    say : callable
        Receives messages for the user.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if simulation.stopping:
            raise KeyboardInterrupt
        simulation.stop()
        say("stopping after this round; press Ctrl-C again to stop at once")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
