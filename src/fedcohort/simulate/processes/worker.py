"""A process that makes the rounds of lock-step groups: ``python -m fedcohort.simulate.processes.worker``.

:mod:`fedcohort.simulate.processes.local` starts it and tells it, over a connection, what to do. It writes journals
where they belong, and hands over rows and checkpoints. When the connection ends, it ends.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.config.toml import read_started
from fedcohort.simulate.processes.handover import hand_over
from fedcohort.simulate.rounds.group import Group
from fedcohort.simulate.rounds.prepare import Prepared
from fedcohort.simulate.store.checkpoint import pause_after
from fedcohort.simulate.store.writer import shared

STOP = "stop"
_DISCONNECTED = (EOFError, BrokenPipeError, ConnectionResetError)  # what a connection raises whose other end is no more


@dataclass(frozen=True, eq=False)
class WorkerSetup:
    """What a worker needs to know before its first group: the experiment as it was prepared.

    Own selectors and models are found again by the directory's configuration, as they are on a resume, so that nothing
    but data travels.
    """

    out: Path
    device: str
    threads: int
    seconds: float
    prepared: dict[str, Any]  # the fields of Prepared but the experiment

    @classmethod
    def of(cls, prepared: Prepared, out: Path, device: str, threads: int, seconds: float) -> WorkerSetup:
        """Describe a prepared experiment; a worker hands over every ``seconds``."""
        fields = {name: value for name, value in vars(prepared).items() if name != "experiment"}
        return cls(out.resolve(), device, threads, seconds, fields)

    def open(self) -> Prepared:
        """Return the experiment as it was prepared."""
        return Prepared(experiment=Experiment.from_dict(read_started(self.out)), **self.prepared)


class Stopped(Exception):
    """The driver said to stop, or is no more."""


def _run_group(connection: Connection, work: WorkerSetup, group: Group) -> None:
    """Make a group's rounds until it is done or the driver says stop."""
    due = time.monotonic() + work.seconds
    stopping = False
    while not stopping:
        if not group.done:
            group.step()
        stopping = group.done or _stop_requested(connection)
        if stopping or time.monotonic() >= due:
            began = time.monotonic()
            result = hand_over(group)
            connection.send(("made", result))
            ended = time.monotonic()
            due = ended + pause_after(ended - began, work.seconds)
    if not group.done:
        raise Stopped


def _stop_requested(connection: Connection) -> bool:
    if not connection.poll():
        return False
    return bool(connection.recv() == STOP)  # or the end of the connection, which raises


def serve(connection: Connection) -> None:
    """Do what the driver says until the connection ends."""
    work: WorkerSetup = connection.recv()
    try:
        prepared = work.open()
    except Exception as error:
        connection.send(("failed", pack_error(error)))
        return
    connection.send(("ready", None))
    with shared(work.out):
        while True:
            message = connection.recv()
            if message == STOP:
                return
            number, saved = message
            try:
                group = prepared.group(number, journals=work.out / "journal", device=work.device, workers=work.threads)
                try:
                    group.begin(saved)
                    _run_group(connection, work, group)
                finally:
                    group.close()
            except Stopped:
                return
            except _DISCONNECTED:
                raise
            except BaseException as error:
                connection.send(("failed", pack_error(error)))
                return


def pack_error(error: BaseException) -> bytes | str:
    """Return an error as bytes that give it back in another process, or as text where it cannot travel."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return "".join(traceback.format_exception(error))
    return data


def main() -> None:
    """Serve the driver that started this process; the argument is the descriptor of the connection."""
    with Connection(int(sys.argv[1])) as connection, contextlib.suppress(*_DISCONNECTED):
        serve(connection)


if __name__ == "__main__":
    main()
