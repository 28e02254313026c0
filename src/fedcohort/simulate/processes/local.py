"""Run lock-step groups in several processes on one machine.

Between two rounds of training, the host of a run selects clients, writes the journal and collects rows. A single
process does this for one run after another while the GPU waits. An experiment with many runs is therefore split into
more groups, which separate processes run in parallel: while some select, others train. The results are those of a
single process, except for the order in which a GPU adds numbers. If a process dies, the rounds since its last hand-over
are repeated.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from fedcohort.core.errors import FedcohortError
from fedcohort.simulate.cores import free_cores
from fedcohort.simulate.engine import choose_device
from fedcohort.simulate.processes.cuda_sharing import shared_device
from fedcohort.simulate.processes.handover import DrivenExperiment
from fedcohort.simulate.processes.worker import KEPT, STOP, WorkerSetup
from fedcohort.simulate.store.writer import disk_errors

log = logging.getLogger(__name__)

_HAND_OVER_SECONDS = 5.0  # the dashboard sees each round sooner, in the live files
_NO_MEMORY = (MemoryError, torch.OutOfMemoryError)
_IGNORE_DISCONNECT = contextlib.suppress(BrokenPipeError, ConnectionResetError)
_ATTEMPTS = 3  # how often a group is started if its process keeps dying


class _WorkerError(FedcohortError, RuntimeError):
    """A worker process keeps dying, or failed with an error that cannot be raised again here."""


class Worker:
    """A process that runs groups, and the connection to it.

    Parameters
    ----------
    setup : int
        The descriptor of the file with the :class:`~fedcohort.simulate.processes.worker.WorkerSetup`.
    device : str
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

    def __init__(self, setup: int, device: str, threads: int, environment: Mapping[str, str]) -> None:
        self.group: int | None = None
        self.ready = False
        self.connection, child_end = Pipe()
        # With -P and this path, a worker imports the same modules as this process, and nothing from its own folder.
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
        with child_end:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "fedcohort.simulate.processes",
                    str(child_end.fileno()),
                    str(setup),
                    device,
                ],
                pass_fds=[child_end.fileno(), setup],
                start_new_session=True,  # so that Ctrl-C in a terminal reaches only the driver
                env={**os.environ, **environment, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
            )

    def send(self, message: Any) -> None:
        """Send a command; :meth:`receive` notices if the process has died."""
        with _IGNORE_DISCONNECT:
            self.connection.send(message)

    def receive(self) -> tuple[str, Any]:
        """Return its next message; "lost" if it has died."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, ConnectionResetError):
            return "lost", self.process.wait()
        return kind, value

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
    requested : bool
        Whether the user requested this number. If so, a process that cannot open the experiment is an error.
    """

    def __init__(self, simulation: DrivenExperiment, count: int, requested: bool) -> None:
        self.simulation = simulation
        self._requested = requested
        options = simulation.experiment.options
        self._todo = deque(number for number in simulation.prepared.groups if not simulation.has_ended(number))
        self._attempts: dict[int, int] = {}
        # More threads than cores would wait for each other, and a process is worth more than a thread.
        self._threads = options.workers or max(1, free_cores() // count)
        seconds = min(_HAND_OVER_SECONDS, options.checkpoint_seconds)
        self._setup = WorkerSetup.of(simulation.prepared, simulation.out, simulation.device, self._threads, seconds)
        self._device = str(choose_device(simulation.device))
        self.workers: list[Worker] = []
        self._ending: list[Worker] = []
        self._environment: dict[str, str] = {}
        self._count = min(count, len(self._todo))

    def drive(self) -> bool:
        """Run all groups, or until the simulation is stopped; return False if processes cannot open the experiment."""
        with shared_device(self._device) as self._environment, tempfile.TemporaryFile() as self._file:
            try:
                return self._drive()
            finally:
                for worker in list(self.workers):
                    self._end(worker)
                for worker in self._ending:
                    worker.wait()

    def _drive(self) -> bool:
        # The processes import torch while the setup is written.
        for _ in range(self._count):
            self._start()
        # A file that workers map: over the connection, each would get a copy of the data of its own.
        with disk_errors(Path(tempfile.gettempdir())):
            self._ends = self._setup.write(self._file)
        for worker in self.workers:
            worker.send(self._ends)
        told_to_stop = False
        while self.workers:
            if self.simulation.stopping and not told_to_stop:
                told_to_stop = True
                for worker in self.workers:
                    worker.send(STOP)
            workers = {worker.connection: worker for worker in self.workers}
            for connection in wait(list(workers), timeout=0.2):
                if not self._handle_message(workers[connection]):  # type: ignore[index]
                    return False
        return True

    def _start(self) -> Worker:
        worker = Worker(self._file.fileno(), self._device, self._threads, self._environment)
        self.workers.append(worker)
        return worker

    def _handle_message(self, worker: Worker) -> bool:
        """Handle one message; return False if a process that nobody requested cannot open the experiment."""
        kind, value = worker.receive()
        match kind:
            case "ready":
                worker.ready = True
                log.debug("a process is ready")
                self._assign_next(worker)
            case "results":
                assert worker.group is not None
                log.debug("group %d is at round %d", worker.group, value.round)
                self.simulation.take_over(worker.group, value)
                worker.send(KEPT)
                if value.done:
                    worker.group = None
                    self._assign_next(worker)
                elif self.simulation.stopping:
                    self._end(worker)
            case "failed":
                error = pickle.loads(value) if isinstance(value, bytes) else _WorkerError(f"A process failed:\n{value}")
                if isinstance(error, _NO_MEMORY) and len(self.workers) > 1:
                    left = len(self.workers) - 1
                    log.warning("a process ran out of memory; %d others take over its runs (see run.processes)", left)
                    if worker.group is not None:
                        self._todo.append(worker.group)
                    self._end(worker)
                    return True
                if not worker.ready and not self._requested:
                    log.warning("using a single process, because another one cannot open the experiment: %s", error)
                    return False
                if not worker.ready and isinstance(error, FedcohortError):
                    raise type(error)(
                        error.message,
                        hint="another process cannot find what a script defines: save the class in a file and name it "
                        "'file.py:Class', or ask for one process",
                    )
                raise error
            case "lost":
                self._replace(worker, value)
        return True

    def _assign_next(self, worker: Worker) -> None:
        """Give a process the next group, or end it if none is left."""
        if not self._todo or self.simulation.stopping:
            self._end(worker)
            return
        worker.group = self._todo.popleft()
        worker.send((worker.group, self.simulation.last_checkpoint(worker.group)))

    def _end(self, worker: Worker) -> None:
        self.workers.remove(worker)
        self._ending.append(worker)
        worker.connection.close()  # so that the process exits

    def _replace(self, worker: Worker, status: int) -> None:
        """Replace a process that died; its group continues from the last hand-over."""
        self._end(worker)
        if self.simulation.stopping:
            return
        # Counted for each group: one that kills its process must not use up the attempts of the others.
        place = -1 if worker.group is None else worker.group
        self._attempts[place] = self._attempts.get(place, 0) + 1
        if self._attempts[place] >= _ATTEMPTS:
            raise _WorkerError(
                f"A worker process died {_ATTEMPTS} times, the last time with status {status}.",
                hint="is there enough memory? Continue with --resume and fewer processes (run.processes)",
            )
        log.warning("a worker process died with status %d; another one continues", status)
        if worker.group is not None:
            self._todo.appendleft(worker.group)
        self._start().send(self._ends)
