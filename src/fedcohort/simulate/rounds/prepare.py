"""Before the first round: load data, divide it among clients, form lock-step groups, check every run."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedcohort.core.errors import DataError, FedcohortError, InputError
from fedcohort.core.registry import is_reference
from fedcohort.core.text import error_text
from fedcohort.scenario import Federation
from fedcohort.simulate.config.experiment import Experiment, RunPlan, values_of
from fedcohort.simulate.config.sections import DataOptions
from fedcohort.simulate.data import Dataset
from fedcohort.simulate.engine import choose_device, choose_engine
from fedcohort.simulate.engine.crops import crop_table
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.store import sample_shape
from fedcohort.simulate.memory_check import check_memory
from fedcohort.simulate.models import build_model
from fedcohort.simulate.own_code import OwnCodeError
from fedcohort.simulate.rounds.asynchronous import AsynchronousGroup
from fedcohort.simulate.rounds.checks import check_fits, check_plan
from fedcohort.simulate.rounds.group import Group
from fedcohort.simulate.rounds.process_count import choose_process_count, training_operations
from fedcohort.simulate.store.parts import ResultsError

_OF_FEDERATION = ("partition", "noise", "shift", "drift", "validation", "server_validation")  # keys of a scenario
_SUITS = {"class": "classification", "number": "regression", "token": "next-token prediction"}


@dataclass(frozen=True, eq=False)
class PreparedExperiment:
    """An experiment with its data, checked before the first round.

    Attributes
    ----------
    data_keys, federation_keys : tuple of str
        For each plan.
    groups : dict of int to tuple of int
        Lock-step groups by number, as positions of plans.
    processes : int
        How many processes work on them in parallel.
    allow_other_engine : bool
        Whether a group may continue with another kind of engine than before.
    """

    experiment: Experiment
    datasets: dict[str, Dataset]
    federations: dict[str, Federation]
    data_keys: tuple[str, ...]
    federation_keys: tuple[str, ...]
    groups: dict[int, tuple[int, ...]]
    processes: int
    allow_other_engine: bool = False

    def engine_choice(self, number: int, device: str) -> tuple[str, str | None]:
        """Return what kind of engine would train a group on this machine, and why none is faster."""
        place = self.groups[number][0]
        plan, dataset = self.experiment.plans[place], self.datasets[self.data_keys[place]]
        return choose_engine(
            FlatModel(_model(plan, dataset)),
            sample_shape(dataset.x_train),
            plan.local,
            choose_device(device),
            plan.task,
            torch.int64 if dataset.x_train.dtype.kind == "i" else torch.float32,
            plan.options.precision,
        )

    def group(self, number: int, *, journals: Path | None, device: str, workers: int | None) -> Group:
        """Build a lock-step group with its engine."""
        places = self.groups[number]
        keys = [self.federation_keys[i] for i in places]
        kind = AsynchronousGroup if self.experiment.plans[places[0]].options.mode == "async" else Group
        return kind(
            [self.experiment.plans[i] for i in places],
            keys,
            self.datasets[self.data_keys[places[0]]],
            {key: self.federations[key] for key in keys},
            journals=journals,
            device=device,
            workers=workers,
            allow_other_engine=self.allow_other_engine,
        )


def _identity(thing: Any) -> str:
    return json.dumps(thing, sort_keys=True, default=str)


def _data_key(data: DataOptions) -> str:
    return _identity({**values_of(data), **values_of(data.source)})


def group_key(plan: RunPlan) -> str:
    """Return a key; runs with the same key can share a batch, as data, model and local training are the same."""
    aggregator = plan.aggregator
    training = [values_of(plan.local), aggregator.prox, aggregator.corrects]
    return _identity([_data_key(plan.data), plan.model.name, *training, plan.options.mode])


def prepare(
    experiment: Experiment,
    device: str | None = None,
    *,
    processes: int | None = 1,
    known_federations: Mapping[str, str] | None = None,
    started_groups: Mapping[int, Sequence[str]] | None = None,
) -> PreparedExperiment:
    """Load data, divide it, form groups, and check that every run is possible.

    Parameters
    ----------
    processes : int or None
        How many processes need work: there are at least as many groups, if there are enough runs. None means what
        the configuration says, or else what is fastest.
    known_federations : mapping of run id to str, optional
        Keys of the federations that are already on disk.
    started_groups : mapping of int to sequence of str, optional
        Runs of the groups that have checkpoints. These groups stay as they are; other runs form new ones.
    """
    if experiment.options.engine == "local":  # with Ray, the workers choose their devices
        choose_device(device or experiment.options.device)
    datasets: dict[str, Dataset] = {}
    federations: dict[str, Federation] = {}
    data_keys = [_data_key(plan.data) for plan in experiment.plans]
    identities = []
    for plan, data_key in zip(experiment.plans, data_keys, strict=True):
        scenario = plan.scenario.to_dict()
        # Only what decides which samples and labels a client has. Latency, availability and failures change neither.
        identities.append(_identity([data_key, *map(scenario.get, _OF_FEDERATION), plan.seed]))
    known = known_federations or {}
    # A federation on disk keeps its name, and a new one gets the next number.
    names = {i: known[plan.id] for plan, i in zip(experiment.plans, identities, strict=True) if plan.id in known}
    for plan, identity in zip(experiment.plans, identities, strict=True):
        names.setdefault(identity, f"{len(names)}-s{plan.seed}")
    built: dict[tuple[str, str], list[torch.Size]] = {}  # shapes of the parameters
    work = 0.0
    for plan, data_key, identity in zip(experiment.plans, data_keys, identities, strict=True):
        if data_key not in datasets:
            datasets[data_key] = load_data(plan)
        dataset = datasets[data_key]
        if (data_key, plan.model.name) not in built:
            built[data_key, plan.model.name] = _check_model(plan, dataset)
        check_fits(plan)
        name = names[identity]
        if name not in federations:
            classes = dataset.classes if plan.task.has_classes else 1
            federations[name] = plan.scenario.build(
                dataset.labels, classes, plan.seed, dataset.writers, dataset.writer_names
            )
        federation = federations[name]
        if plan.local.augment:
            crop_table(sample_shape(dataset.x_train))  # refuses samples that are not images
        check_plan(plan, federation)
        # How many samples the largest client uses in a round, with repetitions; their numbers alone must fit.
        largest = int(federation.train_sizes.max(initial=0))
        samples = plan.local.steps_for(largest, largest) * min(plan.local.batch_size, largest)
        check_memory(f"One client's local training in run {plan.id!r} of {samples:,} samples", 8 * samples)
        trained = (plan.options.size or len(federation)) * samples
        work = max(work, training_operations(built[data_key, plan.model.name], trained))
    keys = tuple(names[identity] for identity in identities)
    process_count = choose_process_count(experiment, device or experiment.options.device, processes, work)
    groups = _groups(experiment, process_count, started_groups or {})
    return PreparedExperiment(experiment, datasets, federations, tuple(data_keys), keys, groups, process_count)


def load_data(plan: RunPlan) -> Dataset:
    """Return the data of a run; an error in a user's own source names the source."""
    data = plan.data
    try:
        return data.source.load(data.folder, data.download)
    except FedcohortError:
        raise
    except Exception as error:  # the user's own code
        if not is_reference(data.name):
            raise
        raise DataError(f"The data {data.name!r} cannot be loaded: {type(error).__name__}: {error}.") from error


def _groups(experiment: Experiment, processes: int, started: Mapping[int, Sequence[str]]) -> dict[int, tuple[int, ...]]:
    """Return the lock-step groups: those with checkpoints, and groups of the other runs that can share a batch."""
    place_of = {plan.id: i for i, plan in enumerate(experiment.plans)}
    foreign = [name for names in started.values() for name in names if name not in place_of]
    if foreign:
        raise ResultsError(f"There is a checkpoint of the run {foreign[0]!r}, which is not in the configuration.")
    groups = {number: tuple(place_of[name] for name in names) for number, names in started.items()}
    whole = _split(experiment, range(len(experiment.plans)), processes, itertools.count())
    if groups.items() <= whole.items():  # nothing was added, so the batches are the same as without an interruption
        return whole
    placed = {place for places in groups.values() for place in places}
    rest = [place for place in range(len(experiment.plans)) if place not in placed]
    free = (number for number in itertools.count() if number not in started)
    return dict(sorted((groups | _split(experiment, rest, processes, free)).items()))


def _split(
    experiment: Experiment, places: Sequence[int], processes: int, numbers: Iterator[int]
) -> dict[int, tuple[int, ...]]:
    """Divide plans into groups that can share a batch, none larger than ``run.lockstep``.

    Neighbouring plans cost about the same, so they go to different groups.
    """
    by_key: dict[str, list[int]] = {}
    for place in places:
        by_key.setdefault(group_key(experiment.plans[place]), []).append(place)
    groups = {}
    for alike in by_key.values():
        # Enough groups to keep this kind's share of the processes busy, and none above the limit.
        wanted = max(
            math.ceil(len(alike) / experiment.options.lockstep), math.ceil(processes * len(alike) / len(places))
        )
        turns = min(len(alike), wanted)
        for turn in range(turns):
            groups[next(numbers)] = tuple(alike[turn::turns])
    return groups


def _check_model(plan: RunPlan, dataset: Dataset) -> list[torch.Size]:
    """Build the model, try the task's loss and metric on it, and return the shapes of the model's parameters.

    So mistakes are found before the first round.
    """
    task = plan.task
    if dataset.target != task.target:
        raise InputError(
            f"The task {task.name!r} predicts {task.predicts}; the dataset {dataset.name!r} is for "
            f"{_SUITS[dataset.target]}.",
            hint="choose another task.name, or say what is predicted: data.target, or target= of from_arrays",
        )
    shapes = [value.shape for value in _model(plan, dataset).parameters()]
    targets = torch.as_tensor(dataset.y_test[:2])
    outputs = torch.zeros(len(targets), *_output(dataset))
    try:
        task.measure(outputs, targets, task.losses(outputs, targets))
    except Exception as error:
        # Without a cause, they returned something that cannot be used; the error says what.
        cause = error.__cause__ if isinstance(error, OwnCodeError) else error if is_reference(task.name) else None
        if cause is None:
            raise
        raise InputError(
            f"The loss {task.loss!r} and the metric {task.metric!r} cannot be computed from outputs of shape "
            f"{tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}: {error_text(cause)}."
        ) from cause
    return shapes


def _output(dataset: Dataset) -> tuple[int, ...]:
    """Return the shape of a model's output for one sample."""
    whole = (*sample_shape(dataset.x_train), dataset.classes)
    return whole if dataset.target == "token" else (dataset.outputs,)


def _model(plan: RunPlan, dataset: Dataset) -> nn.Module:
    return build_model(
        plan.model.name,
        sample_shape(dataset.x_train),
        dataset.outputs,
        integers=dataset.x_train.dtype.kind == "i",
        output=None if dataset.target == "class" else _output(dataset),
    )
