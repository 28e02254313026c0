"""The papers' settings by name, from ``presets.toml``: each federation, and how the paper trains on it."""

from __future__ import annotations

import importlib.resources
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedcohort.core.errors import UnknownNameError
from fedcohort.core.registry import suggest
from fedcohort.scenario.scenario import Scenario


@dataclass(frozen=True)
class _PaperTraining:
    """How a paper trains on one dataset.

    Attributes
    ----------
    local : mapping
        Keys of the section ``[local]`` of an experiment.
    targets : tuple of float
        Accuracies for which the paper reports the number of rounds.
    ours : tuple of str
        What the paper does not specify, so that we chose it.
    """

    local: Mapping[str, Any]
    rounds: int
    targets: tuple[float, ...] = ()
    aggregator: str = "fedavg"
    ours: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Preset:
    """A named scenario, its source, how many clients are selected per round, and how they train on each dataset."""

    scenario: Scenario
    source: str
    meaning: str
    cohort: int | None  # None: the paper does not say
    training: Mapping[str, _PaperTraining]

    def training_on(self, data: str) -> _PaperTraining:
        """Return how clients train on a dataset: as on the paper's first one, without its targets, if it is another."""
        if data in self.training:
            return self.training[data]
        # An accuracy of one dataset is no target for another.
        return replace(next(iter(self.training.values())), targets=())


def _read_presets() -> dict[str, _Preset]:
    table = tomllib.loads((importlib.resources.files("fedcohort.scenario") / "presets.toml").read_text())
    presets = {}
    for name, entry in table["presets"].items():
        targets = entry.get("targets", {})
        training = {
            data: _PaperTraining(
                **{**keys, "ours": tuple(keys.get("ours", ())), "targets": tuple(targets.get(data, ()))}
            )
            for data, keys in table["training"][entry["training"]].items()
        }
        scenario = Scenario.from_dict(entry.get("scenario", {}))
        presets[name] = _Preset(scenario, entry["source"], entry["meaning"], entry.get("cohort"), training)
    return presets


PRESETS = _read_presets()


def find_preset(name: str) -> _Preset:
    """Return a preset by name. For an unknown name, the error suggests the nearest one."""
    if not isinstance(name, str) or name not in PRESETS:
        raise UnknownNameError(
            f"There is no scenario {name!r}. Known: {', '.join(sorted(PRESETS))}.",
            hint=suggest(str(name), list(PRESETS)),
        )
    return PRESETS[name]


def preset_table(name: str, data: str) -> dict[str, Any]:
    """Return a preset as the configuration of an experiment: scenario, local training, aggregator, cohort, rounds.

    Papers train differently on each dataset.

    Examples
    --------
    >>> table = preset_table("fedcor-1spc", "fashion-mnist")
    >>> table["run"]
    {'rounds': 500, 'cohort': 10, 'targets': [0.62]}
    """
    preset = find_preset(name)
    training = preset.training_on(data)
    run: dict[str, Any] = {"rounds": training.rounds, "cohort": preset.cohort or 10}
    if training.targets:
        run["targets"] = list(training.targets)
    table = {"data": {"name": data}, "scenario": {"preset": name}, "local": dict(training.local), "run": run}
    if training.aggregator != _PaperTraining.aggregator:  # with the default, a selector may bring its own
        table["aggregator"] = {"name": training.aggregator}
    return table
