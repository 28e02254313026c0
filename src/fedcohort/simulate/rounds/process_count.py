"""Choose how many processes an experiment runs in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fedcohort.simulate.cores import free_cores
from fedcohort.simulate.engine import choose_device

if TYPE_CHECKING:
    from fedcohort.simulate.config.experiment import Experiment

_MIN_ROUNDS = 5_000  # of all runs together; with fewer, starting processes takes longer than it saves
_MIN_RUNS = 4  # in a group
_MAX_PROCESSES = 12
_GPU_BYTES = 4 * 2**30  # GPU memory for each process
_LIGHT = 1e8  # roughly the operations of a core in the time that a run's host needs for a round


def choose_process_count(experiment: Experiment, device: str, requested: int | None, operations: float) -> int:
    """Return the requested number of processes, or the fastest one.

    On a GPU, several processes help whenever there is enough work. On a CPU, training already uses all cores. Several
    processes help there only if a round spends most of its time in the hosts, which one process runs one after another.

    Parameters
    ----------
    requested : int or None
        Overrides the configuration.
    operations : float
        The most training operations in a round of any run; infinite if unknown.
    """
    options, runs = experiment.options, len(experiment.plans)
    requested = requested or options.processes
    if options.engine != "local":
        return 1
    if requested is not None:
        return min(requested, runs)
    parts = [part for p in experiment.plans for part in (p.selector, p.aggregator, p.filter, p.task, p.data.source)]
    # Another process cannot import what is defined in a notebook or script.
    importable = all(type(part).__module__ != "__main__" for part in parts)
    rounds = sum(plan.options.rounds for plan in experiment.plans)
    if os.name != "posix" or rounds < _MIN_ROUNDS or not importable:
        return 1
    chosen, cores = choose_device(device), free_cores()
    if chosen.type == "cuda":
        memory = torch.cuda.get_device_properties(chosen).total_memory
        return max(1, min(cores - 1, runs // _MIN_RUNS, memory // _GPU_BYTES, _MAX_PROCESSES))
    return max(1, min(cores, runs // _MIN_RUNS, _MAX_PROCESSES)) if operations < _LIGHT * cores else 1


def training_operations(shapes: Sequence[Sequence[int]], samples: float) -> float:
    """Return how many operations it takes to train parameters of these shapes on ``samples`` samples.

    >>> training_operations([(64, 10), (10,)], 100)
    390000.0
    """
    if any(len(shape) > 2 for shape in shapes):  # a convolution uses each weight many times, which we do not count
        return float("inf")
    return 6.0 * samples * sum(int(torch.Size(shape).numel()) for shape in shapes)
