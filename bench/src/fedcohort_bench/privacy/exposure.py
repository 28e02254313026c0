"""What a simulated federation reveals: its clients' label counts, and the unencrypted updates they leak through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.vectors import output_layer
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.rounds.single_run import open_run


@dataclass(frozen=True, eq=False)
class _Exposure:
    """What an audit needs to know about a federation.

    Attributes
    ----------
    counts : (N, B) int array
        Label counts of each client's training samples, with the labels it sees.
    updates : (N, B) float array
        Each client's update of the output layer's bias after it has trained an untrained model once.
    step : float
        Learning rate times local steps.
    """

    names: tuple[str, ...]
    counts: IntArray
    updates: FloatArray
    step: float


def measure_exposure(table: Mapping[str, Any], device: str | None = None) -> _Exposure:
    """Divide the data of a configuration among clients, and train each client once from the first seed's model.

    Parameters
    ----------
    table : mapping
        A configuration; its data, scenario, model, local training and first seed are used.
    """
    # The run below uses only some sections, so this finds mistakes in the others.
    Experiment.from_dict({k: v for k, v in table.items() if k not in ("selectors", "settings", "sweep")})
    with open_run({**table, "run": {"rounds": 1, "cohort": "all"}}, {"all": {}}, device) as group:
        (run,) = group.runs
        federation = run.federation
        everyone = np.arange(len(federation))
        trained = group.batch.train([run], [everyone], np.full(len(everyone), run.plan.seed, np.int64), None)
        bias = output_layer(group.engine.shapes, federation.classes).bias
        updates = (trained.params[:, bias] - group.models[run.row, bias]).cpu().numpy().astype(np.float64)
    # What clients would report: counts of the labels they see, wrong ones included.
    counts = federation.label_counts(part="train").astype(np.int64)
    names = federation.client_names or tuple(map(str, range(len(federation))))
    return _Exposure(tuple(names), counts, updates, run.plan.local.lr * float(run.steps.mean()))
