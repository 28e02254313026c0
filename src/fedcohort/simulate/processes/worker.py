"""Run lock-step groups in a separate process.

:mod:`fedcohort.simulate.processes.local` starts the worker and sends it commands over a connection. The worker writes
the journals itself and hands over rows and checkpoints. It exits when the connection closes.
"""

from __future__ import annotations

import contextlib
import mmap
import pickle
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.config.toml import read_table
from fedcohort.simulate.processes.handover import hand_over
from fedcohort.simulate.rounds.group import Group
from fedcohort.simulate.rounds.prepare import PreparedExperiment
from fedcohort.simulate.store.checkpoint import pause_after
from fedcohort.simulate.store.live import LiveFeed
from fedcohort.simulate.store.writer import share_lock

STOP = "stop"
KEPT = "kept"  # the driver has written a hand-over to disk
_ALIGNMENT = 64  # bytes; arrays begin at multiples of it, as NumPy's own do
_DISCONNECTED = (EOFError, BrokenPipeError, ConnectionResetError)  # raised when the other end of a connection is gone


@dataclass(frozen=True, eq=False)
class WorkerSetup:
    """Everything a worker needs before its first group.

    Only data is sent. The worker finds the user's selectors and models through the directory's configuration, as when
    an experiment is resumed.
    """

    out: Path
    device: str
    threads: int
    seconds: float
    prepared: dict[str, Any]  # all fields of PreparedExperiment except the experiment

    @classmethod
    def of(cls, prepared: PreparedExperiment, out: Path, device: str, threads: int, seconds: float) -> WorkerSetup:
        """Describe a prepared experiment; the worker hands over its results every ``seconds``."""
        fields = {name: value for name, value in vars(prepared).items() if name != "experiment"}
        return cls(out.resolve(), device, threads, seconds, fields)

    def open(self) -> PreparedExperiment:
        """Return the prepared experiment."""
        return PreparedExperiment(
            experiment=Experiment.from_dict(read_table(self.out / "config.toml")), **self.prepared
        )

    def write(self, file: IO[bytes]) -> list[int]:
        """Write it to a file that workers map into memory, so that all of them share one copy of the data.

        Returns
        -------
        list of int
            What :meth:`read` needs to know: where each part of the file ends.
        """
        arrays: list[pickle.PickleBuffer] = []
        rest = pickle.dumps(self, protocol=5, buffer_callback=arrays.append)
        ends = []
        for part in (memoryview(rest), *(array.raw() for array in arrays)):
            file.write(part)
            ends.append(file.tell())
            file.write(bytes(-file.tell() % _ALIGNMENT))
        file.flush()
        return ends

    @staticmethod
    def read(descriptor: int, ends: Sequence[int]) -> WorkerSetup:
        """Return what :meth:`write` wrote. Arrays are views of the file; changing them does not change the file."""
        whole = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
        starts = [0, *(end + -end % _ALIGNMENT for end in ends[:-1])]
        rest, *arrays = (whole[start:end] for start, end in zip(starts, ends, strict=True))
        setup: WorkerSetup = pickle.loads(rest, buffers=arrays)
        return setup


def _run_group(connection: Connection, work: WorkerSetup, group: Group, number: int) -> None:
    """Run a group's rounds until it is done or the driver tells the worker to stop."""
    journals = {run.plan.id: run.session.journal for run in group.runs if run.has_session}
    # The end of the live file at each hand-over that is not on disk yet: until then, dashboards read its rounds there.
    marks: deque[dict[str, int]] = deque()
    with LiveFeed(work.out, journals, number) as feed:

        def hear() -> bool:
            """Read the driver's next message, and return whether it says to stop; an error if the driver is gone."""
            message = connection.recv()
            if message == KEPT:
                feed.forget(marks.popleft())
            return bool(message == STOP)

        due = time.monotonic() + work.seconds
        stop = False
        while not stop:
            if not group.done:
                group.step(lambda info, row: feed.add(row))
            while connection.poll():
                stop |= hear()
            stop |= group.done
            # One hand-over at a time: the driver serves all workers, and a queue of theirs would delay the end.
            if stop or (time.monotonic() >= due and not marks):
                began = time.monotonic()
                result = hand_over(group)
                marks.append(feed.mark())
                connection.send(("results", result))
                ended = time.monotonic()
                due = ended + pause_after(ended - began, work.seconds)
        while marks:
            hear()


def serve(connection: Connection, setup: int) -> None:
    """Execute the driver's commands until the connection closes.

    Parameters
    ----------
    setup : int
        The descriptor of the file with the :class:`WorkerSetup`; the driver's first message says that it is complete.
    """
    with contextlib.suppress(*_DISCONNECTED):
        work = WorkerSetup.read(setup, connection.recv())
        try:
            prepared = work.open()
        except Exception as error:
            connection.send(("failed", pack_error(error)))
            return
        connection.send(("ready", None))
        with share_lock(work.out):
            while True:
                message = connection.recv()
                if message == STOP:
                    return
                number, saved = message
                try:
                    group = prepared.group(
                        number, journals=work.out / "journal", device=work.device, workers=work.threads
                    )
                    with contextlib.closing(group):
                        group.begin(saved)
                        _run_group(connection, work, group, number)
                except _DISCONNECTED:
                    raise
                except BaseException as error:
                    connection.send(("failed", pack_error(error)))
                    return
                if not group.done:
                    return


def pack_error(error: BaseException) -> bytes | str:
    """Return an error as bytes that another process can unpack, or as text if it cannot be pickled."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # fails for an error whose constructor takes other arguments than it passes on
    except Exception:
        return "".join(traceback.format_exception(error))
    return data
