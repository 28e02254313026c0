"""Into how many processes an experiment is divided."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fedcohort.simulate.engine import choose_device
from fedcohort.simulate.engine.modules import usable_cores

if TYPE_CHECKING:
    from fedcohort.simulate.config.experiment import Experiment, RunPlan

_FEWEST_ROUNDS = 5_000  # of all runs together, below which starting processes takes longer than it saves
_FEWEST_RUNS = 4  # of a group
_MOST = 12
_GPU_BYTES = 4 * 2**30  # of a GPU's memory for each process
_LIGHT = 1e8  # operations that a core does while a run's host does its part of a round, roughly


def choose_process_count(experiment: Experiment, device: str, asked: int | None, operations: float) -> int:
    """Return the number of processes: what was asked for, here or in the configuration, or what pays.

    On a GPU several pay whenever there is enough to do. On a CPU training has all cores already; there they pay where
    the hosts' part of a round, which one process does for one run after the other, is the larger one.

    Parameters
    ----------
    experiment : Experiment
    device : str
    asked : int or None
        Instead of the configuration's.
    operations : float
        Of training in a run's round, at most; infinite where nobody can say.
    """
    options, runs = experiment.options, len(experiment.plans)
    asked = asked or options.processes
    if options.engine != "local":
        return 1
    if asked is not None:
        return min(asked, runs)
    enough = sum(plan.options.rounds for plan in experiment.plans) >= _FEWEST_ROUNDS
    if os.name != "posix" or not enough or not all(map(_is_importable, experiment.plans)):
        return 1
    chosen, cores = choose_device(device), usable_cores()
    if chosen.type == "cuda":
        memory = torch.cuda.get_device_properties(chosen).total_memory
        return max(1, min(cores - 1, runs // _FEWEST_RUNS, memory // _GPU_BYTES, _MOST))
    return max(1, min(cores, runs // _FEWEST_RUNS, _MOST)) if operations < _LIGHT * cores else 1


def _is_importable(plan: RunPlan) -> bool:
    """Whether another process can find a run's own parts: not if they are of a notebook or a script."""
    parts = (plan.selector, plan.aggregator, plan.filter, plan.task, plan.data.source)
    return all(type(part).__module__ != "__main__" for part in parts)


def training_operations(shapes: Sequence[Sequence[int]], samples: float) -> float:
    """Return the operations of training a network with parameters of these shapes on so many samples.

    >>> training_operations([(64, 10), (10,)], 100)
    390000.0
    """
    if any(len(shape) > 2 for shape in shapes):  # a weight of a convolution is used more than once
        return float("inf")
    return 6.0 * samples * sum(int(torch.Size(shape).numel()) for shape in shapes)
