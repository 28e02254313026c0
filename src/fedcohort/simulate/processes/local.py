"""Run lock-step groups in several processes on one machine.

Between two rounds of training a run's host has work to do: the selector, the journal, the rows. One process does that
for one run after the other, while the GPU waits. An experiment with many runs is therefore split into more groups,
which separate processes run side by side: while some select, others train. The results are those of a single process,
except for the order in which a GPU adds numbers. If a process dies, the rounds since its last hand-over are repeated.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import torch

from fedcohort.core.errors import FedcohortError
from fedcohort.simulate.engine import choose_device
from fedcohort.simulate.engine.modules import usable_cores
from fedcohort.simulate.processes.cuda_sharing import shared_device
from fedcohort.simulate.processes.worker import KEPT, STOP, WorkerSetup

if TYPE_CHECKING:
    from fedcohort.simulate.rounds.runner import Simulation

log = logging.getLogger(__name__)

_HAND_OVER_SECONDS = 2.0
_NO_MEMORY = (MemoryError, torch.OutOfMemoryError)
_ATTEMPTS = 3  # to run a group whose process keeps dying


class WorkerError(FedcohortError, RuntimeError):
    """A worker process keeps dying, or failed with an error that cannot be raised again here."""


class Worker:
    """A process that runs groups, and the connection to it.

    Parameters
    ----------
    assignment : bytes
        The pickled :class:`~fedcohort.simulate.processes.worker.WorkerSetup`.
    threads : int
        Number of torch threads in that process.
    environment : dict of str to str
        Environment variables in addition to this process's own.

    Attributes
    ----------
    group : int or None
        The group it is running.
    ready : bool
        Whether it has opened the experiment.
    process : subprocess.Popen
    """

    def __init__(self, assignment: bytes, threads: int, environment: Mapping[str, str]) -> None:
        self.group: int | None = None
        self.ready = False
        self.connection, theirs = Pipe()
        # With -P and this path a worker imports what this process does, and nothing from the folder it stands in.
        path = os.pathsep.join(os.path.abspath(place) for place in sys.path)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fedcohort.simulate.processes.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that Ctrl-C in a terminal reaches only the driver
                env={**os.environ, **environment, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
            )
        self._assignment = assignment

    def send_setup(self) -> None:
        """Send the experiment; wait until the process is listening."""
        with self._ignore_disconnect():
            self.connection.send_bytes(self._assignment)

    def start_group(self, group: int, saved: bytes | None) -> None:
        """Start a group, from a checkpoint if there is one."""
        self.group = group
        with self._ignore_disconnect():
            self.connection.send((group, saved))

    def confirm(self) -> None:
        """Say that what it handed over is on disk."""
        with self._ignore_disconnect():
            self.connection.send(KEPT)

    def stop(self) -> None:
        """Ask it to hand over after the current round and exit."""
        with self._ignore_disconnect():
            self.connection.send(STOP)

    @staticmethod
    def _ignore_disconnect() -> contextlib.suppress:
        return contextlib.suppress(BrokenPipeError, ConnectionResetError)

    def receive(self) -> tuple[str, Any]:
        """Return its next message; "lost" if it has died."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, ConnectionResetError):
            return "lost", self.process.wait()
        return kind, value

    def disconnect(self) -> None:
        """Close the connection, so that the process exits."""
        self.connection.close()

    def wait(self) -> None:
        """Wait until the process has exited; kill it after ten seconds."""
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class LocalDriver:
    """Distributes the unfinished groups to processes, and writes what they hand over.

    Parameters
    ----------
    count : int
        Number of processes.
    asked : bool
        Whether the user asked for that many. If so, a process that cannot open the experiment is an error.
    """

    def __init__(self, simulation: Simulation, count: int, asked: bool) -> None:
        self.simulation = simulation
        self._asked = asked
        options = simulation.experiment.options
        self._todo = deque(number for number in simulation.prepared.groups if not simulation.has_ended(number))
        self._attempts: dict[int, int] = {}
        self._threads = options.workers or max(1, usable_cores() // count)
        seconds = min(_HAND_OVER_SECONDS, options.checkpoint_seconds)
        work = WorkerSetup.of(simulation.prepared, simulation.out, simulation.device, self._threads, seconds)
        self._assignment = pickle.dumps(work)
        self.workers: list[Worker] = []
        self._ending: list[Worker] = []
        self._environment: dict[str, str] = {}
        self._count = min(count, len(self._todo))

    def drive(self) -> bool:
        """Run all groups, or stop when the simulation is asked to; return False if workers cannot run it at all."""
        with shared_device(str(choose_device(self.simulation.device))) as self._environment:
            try:
                return self._drive()
            finally:
                for worker in list(self.workers):
                    self._end(worker)
                for worker in self._ending:
                    worker.wait()

    def _drive(self) -> bool:
        # All are started before any is spoken to, so that they import torch at the same time.
        for _ in range(self._count):
            self._start()
        for worker in list(self.workers):
            worker.send_setup()
        asked = False
        while self.workers:
            if self.simulation.stopping and not asked:
                asked = True
                for worker in self.workers:
                    worker.stop()
            places = {worker.connection: worker for worker in self.workers}
            for connection in wait(list(places), timeout=0.2):
                if not self._handle_message(places[connection]):  # type: ignore[index]
                    return False
        return True

    def _start(self) -> Worker:
        worker = Worker(self._assignment, self._threads, self._environment)
        self.workers.append(worker)
        return worker

    def _handle_message(self, worker: Worker) -> bool:
        """Handle one message; return False if a process cannot open the experiment and none were asked for."""
        kind, value = worker.receive()
        match kind:
            case "ready":
                worker.ready = True
                log.debug("a process is ready")
                self._assign_next(worker)
            case "made":
                assert worker.group is not None
                log.debug("group %d is at round %d", worker.group, value.round)
                self.simulation.take_over(worker.group, value)
                worker.confirm()
                if value.done:
                    worker.group = None
                    self._assign_next(worker)
                elif self.simulation.stopping:
                    self._end(worker)
            case "failed":
                error = unpack_error(value)
                if isinstance(error, _NO_MEMORY) and len(self.workers) > 1:
                    self._continue_without(worker)
                    return True
                if not worker.ready and not self._asked:
                    log.warning("using a single process, because another one cannot open the experiment: %s", error)
                    return False
                raise error
            case "lost":
                self._replace(worker, value)
        return True

    def _assign_next(self, worker: Worker) -> None:
        """Give a process the next group, or end it if none is left."""
        if not self._todo or self.simulation.stopping:
            self._end(worker)
            return
        number = self._todo.popleft()
        worker.start_group(number, self.simulation.last_checkpoint(number))

    def _end(self, worker: Worker) -> None:
        self.workers.remove(worker)
        self._ending.append(worker)
        worker.disconnect()

    def _continue_without(self, worker: Worker) -> None:
        """Continue with one process less when memory runs out; its group waits for another process."""
        log.warning(
            "a process ran out of memory; %d others continue and will take over its runs (see run.processes)",
            len(self.workers) - 1,
        )
        if worker.group is not None:
            self._todo.append(worker.group)
        self._end(worker)

    def _replace(self, worker: Worker, status: int) -> None:
        """Replace a process that died; its group continues from the last hand-over."""
        self._end(worker)
        if self.simulation.stopping:
            return
        place = -1 if worker.group is None else worker.group
        self._attempts[place] = self._attempts.get(place, 0) + 1
        if self._attempts[place] >= _ATTEMPTS:
            raise WorkerError(
                f"A worker process died {_ATTEMPTS} times, the last time with status {status}.",
                hint="is there enough memory? Continue with --resume and fewer processes (run.processes)",
            )
        log.warning("a worker process died with status %d; another one continues", status)
        if worker.group is not None:
            self._todo.appendleft(worker.group)
        self._start().send_setup()


def unpack_error(value: bytes | str) -> BaseException:
    """Return the error that a worker raised."""
    if isinstance(value, str):
        return WorkerError(f"A worker process failed:\n{value}")
    error: BaseException = pickle.loads(value)
    return error
