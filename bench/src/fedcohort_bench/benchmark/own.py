"""Benchmark the user's own data: sizes follow from the data, and settings that the data do not allow are left out."""

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
from fedcohort_bench.benchmark.suite import (
    OWN_ROUNDS,
    Size,
    experiment_table,
    settings_of,
)

_FEWEST = 5  # training samples of a class, to be divided among clients, their validation data and the server


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
    """Return a benchmark on the user's data as an experiment's configuration, and notes on what was decided.

    Data that name their clients get the settings of natural federations. All other data get the drawn settings.
    ``data`` is anything that ``fedcohort compare --data`` accepts, ``columns`` names the columns ``label`` and
    ``client`` of a table, and ``folder`` says where the data are. The rest is as in
    :func:`~fedcohort_bench.benchmark.suite.table`.
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
    possible, reasons = [], {}
    for setting in settings_of(size, natural=natural):
        one = experiment_table("bench-own", dataset, size, [setting], {}, seeds)
        try:  # the federation, its first round's availability, and the views
            prepared = prepare(Experiment.from_dict(one), "cpu")
            for each, key in zip(prepared.experiment.plans, prepared.federation_keys, strict=True):
                each.scenario.available(prepared.federations[key], seed=each.seed, round=0)
                for view in () if each.scenario.shift is None else each.scenario.shift.views:
                    seen(view, dataset.x_train[:1])
            possible.append(setting)
        except FedcohortError as error:
            reasons[setting.name] = error.message
    for name in settings:
        if name in reasons:
            raise InputError(f"The setting {name!r} does not suit these data: {reasons[name]}")
    if not possible:
        first = next(iter(reasons))
        raise InputError(f"None of the benchmark's settings suits these data. {first}: {reasons[first]}")
    config = experiment_table("bench-own", section, size, possible, selectors, seeds, settings=settings, rounds=rounds)
    owners = "clients that the data name" if natural else "clients"
    notes = [
        *dataset.remarks,
        f"{size.cohort} of {size.clients} {owners} train in each round; model {size.model}, {size.local['steps']} "
        f"steps of {size.local['batch_size']} samples; seeds {', '.join(map(str, seeds))}",
    ]
    if reasons and not settings:
        notes.append(f"left out because the data do not allow them: {', '.join(reasons)} (--settings NAME says why)")
    return config, notes


def own_size(dataset: Dataset) -> Size:
    """Return how to benchmark the user's dataset: like the built-in ones of its size.

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
            hint="leave rare classes out or merge them; fedcohort compare accepts the data as they are",
        )
    samples = len(dataset.y_train)
    unit = dataset.classes + 2 * (dataset.classes // 2)  # one client for each rare class, three for every other class
    if dataset.writers is not None:
        clients = len(np.unique(dataset.writers))
    else:  # about 24 samples each, in whole units
        clients = min(100, max(10, samples // 24))
        clients = max(unit * round(clients / unit), unit) if unit <= clients else clients
    each = samples // clients
    # Batches, cohorts and the model are those of built-in datasets of about this size.
    batch = 16 if each < 50 else 32 if each < 500 else 50
    large = dataset.x_train.dtype == np.uint8 and len(dataset.shape) == 3 and min(dataset.shape[:2]) >= 28
    return Size(
        clients=clients,
        samples=min(500, max(each, 1)),
        cohort=min(max(3, round(clients / 10)), 20, max(1, clients // 2)),
        rounds=OWN_ROUNDS,
        model="lenet" if large else "mlp",
        local={"batch_size": batch, "steps": 20, "lr": 0.05},
        # The server keeps at most a fifth of the rarest class.
        server=min(20, int(counts[scarce]) // 5),
        eval_every=5,
        unit=unit,
    )


def data_title(data: Mapping[str, Any]) -> str:
    """Return a title for a section ``[data]``; a file never gets the name of one of the benchmark's datasets.

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
