"""Run lock-step groups on a Ray cluster, for sweeps too large for one machine.

An actor runs the rounds of one lock-step group. Every few seconds it hands over rows, a checkpoint and the journals,
which the driver writes just like a local experiment. The results are therefore the same as with ``--engine local``, and
an experiment started on Ray can be continued locally, and vice versa. If a machine is lost, only the rounds since the
last hand-over are repeated. ``run.lockstep`` sets how many runs form a group.
"""

from __future__ import annotations

import logging
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedcohort.core.errors import FedcohortError, needs_extra
from fedcohort.journal.opening import snapshot
from fedcohort.simulate.processes.handover import DrivenExperiment, HandOver, hand_over
from fedcohort.simulate.rounds.group import Group
from fedcohort.simulate.rounds.prepare import PreparedExperiment
from fedcohort.simulate.store.writer import write_atomically

log = logging.getLogger(__name__)

_SLICE_SECONDS = 5.0  # between two hand-overs
_ATTEMPTS = 3  # how often a group is started if its machine keeps dying before a hand-over


class ClusterError(FedcohortError, RuntimeError):
    """The Ray cluster cannot be reached, or keeps losing a group."""


class _GroupHost:
    """Runs one lock-step group inside an actor.

    Parameters
    ----------
    number : int
        Which group.
    saved : bytes, optional
        The checkpoint to continue from.
    journals : dict of file name to bytes
        Journals to continue, as they are on the driver's disk.
    """

    def __init__(
        self,
        prepared: PreparedExperiment,
        number: int,
        device: str,
        workers: int,
        *,
        saved: bytes | None,
        journals: dict[str, bytes],
    ) -> None:
        self._prepared, self._number, self._device, self._workers = prepared, number, device, workers
        self._saved, self._journals = saved, journals
        self._folder = tempfile.TemporaryDirectory(prefix="fedcohort-")
        self._home = Path(self._folder.name)
        self._stop = False
        self._group: Group | None = None

    def advance(self, seconds: float) -> HandOver:
        """Run rounds for some seconds, then hand over the results."""
        if self._group is None:  # not in the constructor, because Ray reports errors there as a lost machine
            self._group = self._prepared.group(
                self._number, journals=self._home, device=self._device, workers=self._workers
            )
            for name, data in self._journals.items():
                (self._home / name).write_bytes(data)
            self._group.begin(self._saved)
        group = self._group
        end = time.monotonic() + seconds
        while not group.done and not self._stop:
            group.step()
            if time.monotonic() >= end:
                break
        result = hand_over(group)
        return replace(result, journals={path.name: snapshot(path) for path in sorted(self._home.glob("*.sqlite"))})

    def stop(self) -> None:
        """End the current :meth:`advance` after the current round."""
        self._stop = True

    def close(self) -> None:
        """Release all resources."""
        if self._group is not None:
            self._group.close()
        self._folder.cleanup()


def _ray() -> Any:
    with needs_extra("The engine 'ray' needs Ray.", "ray"):
        import ray
    return ray


class ClusterDriver:
    """Runs all unfinished groups of an experiment on a cluster."""

    def __init__(self, simulation: DrivenExperiment) -> None:
        self.simulation = simulation
        self.ray = _ray()
        self.prepared = self.ray.put(simulation.prepared)  # once for all actors: it holds the data
        self.pending: dict[Any, tuple[int, Any]] = {}  # future of advance -> group, actor
        self.attempts: dict[int, int] = {}
        options = simulation.experiment.options
        self.workers = options.workers or 1
        wants_gpu = simulation.device.startswith("cuda") or (
            simulation.device == "auto" and self.ray.cluster_resources().get("GPU", 0) >= 1
        )
        self.resources = {"num_cpus": self.workers, "num_gpus": 1 if wants_gpu else 0}
        # Ray would wait forever for resources that no machine of the cluster has.
        nodes = [node.get("Resources", {}) for node in self.ray.nodes() if node.get("Alive")]
        if wants_gpu and not any(node.get("GPU", 0) >= 1 for node in nodes):
            raise ClusterError(
                f"The device {simulation.device!r} was requested, but no machine of the Ray cluster has a GPU.",
                hint="use --device cpu or --device auto",
            )
        most = int(max((node.get("CPU", 0) for node in nodes), default=0))
        if self.workers > most:
            raise ClusterError(
                f"A group needs {self.workers} workers, but the largest machine of the Ray cluster has {most} CPUs.",
                hint="lower run.workers",
            )
        self.seconds = min(_SLICE_SECONDS, options.checkpoint_seconds)

    def launch(self, number: int) -> None:
        """Start an actor for a group and its first slice."""
        simulation = self.simulation
        saved = simulation.last_checkpoint(number)
        journals = {} if saved is None else simulation.journals(number)
        actor = (
            self.ray.remote(_GroupHost)
            .options(max_concurrency=2, **self.resources)  # so that stop() is heard while advance() runs
            .remote(self.prepared, number, simulation.device, self.workers, saved=saved, journals=journals)
        )
        self.pending[actor.advance.remote(self.seconds)] = (number, actor)

    def collect(self, future: Any) -> None:
        """Write what an actor hands over and start its next slice, or restart its group on another machine."""
        number, actor = self.pending.pop(future)
        exceptions = self.ray.exceptions
        try:
            result: HandOver = self.ray.get(future)
        except exceptions.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, FedcohortError) else error from None
        except (exceptions.RayActorError, exceptions.ObjectLostError) as error:
            # The machine died while it worked, or before its hand-over was collected.
            self.attempts[number] = self.attempts.get(number, 0) + 1
            if self.attempts[number] >= _ATTEMPTS:
                raise ClusterError(
                    f"The machine of group {number} was lost {_ATTEMPTS} times in a row; the last error was: {error}.",
                    hint="continue with --resume once the cluster is healthy again",
                ) from error
            log.warning("the machine of group %d was lost; another continues from its last checkpoint", number)
            self.launch(number)
            return
        self.attempts.pop(number, None)
        self.simulation.take_over(number, result)
        if result.done or self.simulation.stopping:
            actor.close.remote()
            return
        self.pending[actor.advance.remote(self.seconds)] = (number, actor)


def drive(simulation: DrivenExperiment) -> str:
    """Run all unfinished groups of an experiment on Ray; return "finished" or "interrupted"."""
    ray, address = _ray(), simulation.address
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, include_dashboard=False if address is None else None)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ClusterError(
                f"There is no Ray cluster at {address!r}: {error}.", hint="start one with 'ray start --head'"
            ) from error
    driver = ClusterDriver(simulation)
    for number in simulation.prepared.groups:
        if not simulation.has_ended(number):
            driver.launch(number)
    told_to_stop = False
    while driver.pending:
        if simulation.stopping and not told_to_stop:
            told_to_stop = True
            for _, actor in driver.pending.values():
                actor.stop.remote()
        ready, _ = driver.ray.wait(list(driver.pending), timeout=0.2)
        for future in ready:
            driver.collect(future)
    ended = all(simulation.has_ended(number) for number in simulation.prepared.groups)
    return "finished" if ended else "interrupted"


def write_journals(folder: Path, journals: dict[str, bytes]) -> None:
    """Write handed-over journals, each completely or not at all."""
    for name, data in journals.items():
        path = folder / name
        if path.with_name(f"{name}-wal").exists():  # left by a killed process, whose rounds must not be lost
            write_atomically(path, snapshot(path))
            for extra in ("-wal", "-shm"):
                path.with_name(f"{name}{extra}").unlink(missing_ok=True)
        write_atomically(path, data)
