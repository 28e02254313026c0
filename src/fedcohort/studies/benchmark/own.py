"""Benchmark data of one's own: sizes follow from the data, and settings that the data do not allow are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from fedcohort.core.errors import FedcohortError, InputError
from fedcohort.scenario.shift import seen
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.data import Dataset, data_section
from fedcohort.simulate.rounds.prepare import load_data, prepare
from fedcohort.studies.benchmark.suite import (
    OWN_ROUNDS,
    BenchmarkSetting,
    Size,
    drawn_settings,
    experiment_table,
    natural_settings,
)

_FEWEST = 5  # training samples of a class: less cannot be divided among clients, their validation and the server


def own_table(
    data: str | Dataset,
    selectors: Mapping[str, Any],
    seeds: Sequence[int],
    *,
    columns: Mapping[str, str] | None = None,
    folder: str | None = None,
    settings: Sequence[str] = (),
    rounds: int = 0,
) -> tuple[dict[str, Any], list[str]]:
    """Return a benchmark on data of one's own as an experiment's configuration, and what was decided, in sentences.

    Data that name their clients get the settings of natural federations, all others those that are drawn.

    Parameters
    ----------
    data : str or Dataset
        A file, a folder, or anything else that ``fedcohort compare --data`` takes.
    selectors, seeds, settings, rounds
        As :func:`~fedcohort.studies.benchmark.suite.table` takes them.
    columns : mapping, optional
        Of a table: ``label`` and ``client``.
    folder : str, optional
        Where the data are.
    """
    section: Any = data
    if isinstance(data, str):
        section = {**data_section(data), **(columns or {})}
        if folder is not None:
            section["folder"] = folder
    (plan,) = Experiment.from_dict({"data": section, "seeds": [0], "selectors": {"uniform": {}}}).plans
    dataset = load_data(plan)
    natural = dataset.writers is not None
    size = own_size(dataset)
    kept, reasons = _possible(natural_settings() if natural else drawn_settings(size), dataset, size, seeds)
    for name in settings:
        if name in reasons:
            raise InputError(f"The setting {name!r} does not suit these data: {reasons[name]}")
    if not kept:
        first = next(iter(reasons))
        raise InputError(f"None of the benchmark's settings suits these data. {first}: {reasons[first]}")
    wanted = experiment_table("bench-own", section, size, kept, selectors, seeds, settings=settings, rounds=rounds)
    owners = "clients that the data name" if natural else "clients"
    notes = [
        *dataset.remarks,
        f"{size.cohort} of {size.clients} {owners} train in each round; model {size.model}, {size.local['steps']} "
        f"steps of {size.local['batch_size']} samples; seeds {', '.join(map(str, seeds))}",
    ]
    if reasons and not settings:
        notes.append(f"left out, because the data do not allow them: {', '.join(reasons)} (--settings NAME says why)")
    return wanted, notes


def _possible(
    settings: Sequence[BenchmarkSetting], dataset: Dataset, size: Size, seeds: Sequence[int]
) -> tuple[list[BenchmarkSetting], dict[str, str]]:
    """Return the settings that the data allow, and why not the others, by name."""
    kept, reasons = [], {}
    for setting in settings:
        try:
            _try(setting, dataset, size, seeds)
            kept.append(setting)
        except FedcohortError as error:
            reasons[setting.name] = getattr(error, "message", str(error))
    return kept, reasons


def own_size(dataset: Dataset) -> Size:
    """Return how a dataset of one's own is benchmarked: as the built-in ones of its size are.

    >>> from fedcohort.simulate.data import load_dataset
    >>> own_size(load_dataset("digits")).clients
    60
    """
    if dataset.target != "class" or dataset.classes < 2:
        raise InputError(
            f"The benchmark compares accuracies, so the data must have at least two classes. {dataset!r} does not.",
            hint="fedcohort compare --task regression compares selectors for other tasks",
        )
    counts = np.bincount(dataset.y_train, minlength=dataset.classes)
    scarce = int(counts.argmin())
    if counts[scarce] < _FEWEST:
        raise InputError(
            f"The benchmark needs at least {_FEWEST} training samples of each class. Class "
            f"{dataset.class_names[scarce]!r} has {counts[scarce]}.",
            hint="leave rare classes out, or merge them; fedcohort compare takes the data as they are",
        )
    samples = len(dataset.y_train)
    unit = dataset.classes + 2 * (dataset.classes // 2)  # one client of each rare class, three of each other one
    clients = _drawn_clients(samples, unit) if dataset.writers is None else len(np.unique(dataset.writers))
    each = samples // clients
    # Batches, cohorts and the model are those that the built-in datasets of about this size have.
    batch = 16 if each < 50 else 32 if each < 500 else 50
    large = dataset.x_train.dtype == np.uint8 and len(dataset.shape) == 3 and min(dataset.shape[:2]) >= 28
    return Size(
        clients=clients,
        samples=min(500, max(each, 1)),
        cohort=min(max(3, round(clients / 10)), 20, max(1, clients // 2)),
        rounds=OWN_ROUNDS,
        model="lenet" if large else "mlp",
        local={"batch_size": batch, "steps": 20, "lr": 0.05},
        server=min(20, int(counts[scarce]) // 5),
        evaluated=5,
        unit=unit,
    )


def _drawn_clients(samples: int, unit: int) -> int:
    """Return among how many clients samples without owners are divided: 24 samples each, and whole units."""
    target = min(100, max(10, samples // 24))
    return max(unit * round(target / unit), unit) if unit <= target else target


def data_title(data: Mapping[str, Any]) -> str:
    """Return what to call the data of a section ``[data]``: a name, or the file's, never one of the benchmark's.

    >>> data_title({"name": "digits"}), data_title({"name": "file", "path": "/home/me/digits.csv"})
    ('digits', 'digits.csv')
    >>> data_title({"name": "file", "path": "/home/me/digits"}), data_title({"name": "flwr", "dataset": "a/b"})
    ('digits/', 'flwr:a/b')
    """
    if data["name"] == "flwr":
        return f"flwr:{data['dataset']}"
    if data["name"] != "file":
        return str(data["name"])
    path = PurePath(data["path"])
    return path.name if path.suffix else f"{path.name}/"


def _try(setting: BenchmarkSetting, dataset: Dataset, size: Size, seeds: Sequence[int]) -> None:
    """Build the federations of a setting, whoever is available in the first round, and what its views show."""
    prepared = prepare(Experiment.from_dict(experiment_table("bench-own", dataset, size, [setting], {}, seeds)), "cpu")
    for plan, key in zip(prepared.experiment.plans, prepared.federation_keys, strict=True):
        plan.scenario.available(prepared.federations[key], seed=plan.seed, round=0)
        for view in () if plan.scenario.shift is None else plan.scenario.shift.views:
            seen(view, dataset.x_train[:1])
