"""The experiment behind ``fedcohort.compare`` and ``fedcohort compare``: the user's choices, and defaults that fit."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedcohort.core.errors import FedcohortError, InputError, SignalError
from fedcohort.core.protocol import SELECTORS, Selector
from fedcohort.core.registry import is_reference
from fedcohort.core.text import short_repr
from fedcohort.scenario import Scenario
from fedcohort.scenario.presets import find_preset, preset_table
from fedcohort.simulate.config.experiment import Experiment, names_clients, values_of
from fedcohort.simulate.config.toml import find_table, merge_tables, set_key
from fedcohort.simulate.data import Dataset, data_section, from_arrays, from_pandas
from fedcohort.simulate.metrics import Metric
from fedcohort.training.filters import Need

_DATA = "the name of a dataset, a file, a Dataset, arrays (x, y) or a pandas DataFrame"
_SELECTORS = "names, selectors or selector classes, or a mapping from labels to parameters"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The arguments of :func:`fedcohort.compare`, all of which have a default."""

    selectors: Any = None
    data: Any = None
    label: str | None = None
    client: str | None = None
    task: Any = None
    scenario: Any = None
    partition: Any = None
    clients: int | None = None
    model: Any = None
    rounds: int | None = None
    cohort: int | None = None
    targets: Sequence[float] | None = None
    seeds: Any = None
    sweep: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    config: Any = None

    def experiment(self) -> tuple[Experiment, list[str]]:
        """Return the experiment, and notes about what was decided for the user."""
        dataset, data = _dataset(self.data, self.label, self.client)
        preset = _preset(self.scenario)
        name = dataset.name if dataset is not None else (data or {}).get("name")
        federation = any(value is not None for value in (self.data, self.scenario, self.partition, self.clients))
        base, origin = base_table(self.config, name, preset, self.selectors is not None, keep_settings=not federation)
        table = merge_tables(base, self._changes(data, preset))
        if dataset is not None:
            table["data"] = dataset
        if self.seeds is not None:
            table["seeds"] = _seeds(self.seeds)
        if self.selectors is not None:
            _replace_selectors(table, self.selectors)
        if self.sweep:
            table["sweep"] = {**table.get("sweep", {}), **self.sweep}
        if (federation or self.selectors is not None or self.sweep) and self.config is None:
            table["name"] = "compare"
        for key, value in check_overrides(self.overrides).items():
            set_key(table, key, value)
        notes = self._fit(table, base, origin)
        return Experiment.from_dict(table), notes

    def _changes(self, data: Mapping[str, Any] | None, preset: str | None) -> dict[str, Any]:
        """Return the user's choices as sections of a configuration."""
        changes: dict[str, Any] = {}
        if data is not None:
            changes["data"] = dict(data)
        scenario = self._changed_scenario(preset)
        if scenario:
            changes["scenario"] = scenario
        if self.model is not None:
            changes["model"] = _as_table("model", self.model)
        if self.task is not None:
            changes["task"] = _as_table("task", self.task)
        run = {"rounds": self.rounds, "cohort": self.cohort, "targets": _listed(self.targets)}
        changes["run"] = {key: value for key, value in run.items() if value is not None}
        return changes

    def _changed_scenario(self, preset: str | None) -> dict[str, Any]:
        scenario = _scenario(self.scenario)
        if preset is not None and self.config is None:
            scenario.pop("preset")  # the base configuration has it, with the paper's training
        if self.partition is not None:
            scenario["partition"] = _as_table("partition", self.partition)
        if self.clients is not None:
            scenario["partition"] = {**scenario.get("partition", {}), "clients": self.clients}
        return scenario

    def _fit(self, table: dict[str, Any], base: Mapping[str, Any], origin: str) -> list[str]:
        """Fit the defaults to the user's choices; return notes about defaults that were used and changed."""
        if table.get("task") and self.config is None and self.targets is None:
            drop_targets(table, base)
        own_data = any(value is not None for value in (self.data, self.label, self.client))
        # Values of a configuration or a preset were chosen by the user or by a paper, so they are not changed.
        fitted = self._fit_demo(table, base) if own_data and self.config is None and self.scenario is None else []
        inherited = describe_inherited(base, table)
        origins = [f"from {origin}: {inherited}"] if origin and inherited else []
        return [*origins, *fitted, *supply_held_out_data(table)]

    def _fit_demo(self, table: dict[str, Any], base: Mapping[str, Any]) -> list[str]:
        """Fit the demo's defaults to the user's data; return notes about what was changed."""
        if self.targets is None and _section(table, "data") != _section(base, "data"):
            # The demo's targets were chosen for its own data.
            table["run"] = {key: value for key, value in table["run"].items() if key != "targets"}
        overridden = any(key.startswith("scenario.partition") for key in self.overrides)
        unchanged = _section(table, "scenario").get("partition") == base["scenario"]["partition"]
        return fit_to_data(table, partition=unchanged and not overridden, selectors=self.selectors is None)


# -- the user's arguments -----------------------------------------------------------------------------------------


def _dataset(data: Any, label: str | None, client: str | None) -> tuple[Dataset | None, dict[str, Any] | None]:
    """Return the dataset if ``data`` holds one, otherwise the section ``[data]`` that ``data`` describes."""
    columns = {key: value for key, value in (("label", label), ("client", client)) if value is not None}
    for key, value in columns.items():
        if not isinstance(value, str):
            raise InputError(f"'{key}' must be the name of a column. Got {short_repr(value)}.")
    if hasattr(data, "columns") and hasattr(data, "to_numpy"):  # not isinstance: pandas may not be installed
        return from_pandas(data, label=columns.get("label", "label"), client=columns.get("client")), None
    if data is None or isinstance(data, (str, os.PathLike)):
        section = {} if data is None else data_section(os.fspath(data))
        return None, {**section, **columns} or None
    if isinstance(data, Mapping):
        return None, {**data, **columns}
    if columns:
        raise InputError(
            f"'{next(iter(columns))}' names a column of a table, but 'data' is not a table.",
            hint="from_arrays(x, y, writers=...) says which client each sample belongs to",
        )
    return data if isinstance(data, Dataset) else _from_tuple(data), None


def _from_tuple(data: Any) -> Dataset:
    """Return a dataset from arrays (x, y) or (x, y, x_test, y_test)."""
    if isinstance(data, tuple) and len(data) in (2, 4) and all(isinstance(part, np.ndarray) for part in data):
        return from_arrays(*data)
    raise InputError(
        f"'data' must be {_DATA}. Got {short_repr(data)}.", hint="from_arrays and from_pandas build a Dataset"
    )


def _replace_selectors(table: dict[str, Any], selectors: Any) -> None:
    """Replace the selectors of a configuration; drop its baseline and sweeps of selectors that are gone."""
    table["selectors"] = selector_entries(selectors, table.get("selectors", {}))
    if table.get("run", {}).get("baseline") not in table["selectors"]:
        table.get("run", {}).pop("baseline", None)
    if "sweep" in table:
        table["sweep"] = {label: grid for label, grid in table["sweep"].items() if label in table["selectors"]}


def _listed(targets: Any) -> Any:
    """Return targets as a list, as TOML needs; the configuration refuses anything that is not a collection."""
    return list(targets) if isinstance(targets, Iterable) and not isinstance(targets, str) else targets


def _scenario(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, Scenario):
        return value.to_dict()
    if isinstance(value, str):
        return {"preset": value}
    if isinstance(value, Mapping):
        return dict(value)
    raise InputError(f"'scenario' must be the name of a preset, a Scenario or a table. Got {short_repr(value)}.")


def _preset(scenario: Any) -> str | None:
    preset = _scenario(scenario).get("preset")
    if preset is not None and not isinstance(preset, str):
        raise InputError(f"'scenario' must name its preset by a string. Got {short_repr(preset)}.")
    return preset


def _as_table(argument: str, value: Any) -> dict[str, Any]:
    """Return a section that is given by name or as a table."""
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping):
        return dict(value)
    raise InputError(f"'{argument}' must be a name, or a table with a name and parameters. Got {short_repr(value)}.")


def _seeds(value: Any) -> Any:
    """Return the number of seeds, or a list of them; the configuration refuses anything else."""
    if isinstance(value, (str, bytes, bool)) or value is None:
        return value
    try:
        return operator.index(value)
    except TypeError:
        pass
    try:
        return [seed if isinstance(seed, bool) else operator.index(seed) for seed in value]
    except TypeError:
        return value


def check_overrides(value: Any) -> Mapping[str, Any]:
    """Return ``value``, which must be a mapping from keys of a configuration to values."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InputError(
            f"'overrides' must map keys of the configuration to values. Got {short_repr(value)}.",
            hint='for example {"local.lr": 0.1}',
        )
    return value


def selector_entries(selectors: Any, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the section ``[selectors]`` for names, selectors, classes, or a mapping from labels to parameters.

    Parameters
    ----------
    selectors : object
        One or several of these.
    known : mapping, optional
        ``[selectors]`` of the configuration to start from. A name in it keeps its parameters.

    Examples
    --------
    >>> selector_entries(["uniform", {"eager": {"name": "fedcor", "warmup": 5}}])
    {'uniform': {}, 'eager': {'name': 'fedcor', 'warmup': 5}}
    """
    if isinstance(selectors, Mapping):
        return {_label(label): _entry(str(label), value) for label, value in selectors.items()}
    single = isinstance(selectors, (str, Selector, type))
    if not single and not isinstance(selectors, Iterable):
        raise InputError(f"'selectors' must be {_SELECTORS}. Got {short_repr(selectors)}.")
    entries: dict[str, Any] = {}
    for item in [selectors] if single else selectors:
        _add_entries(entries, item, known or {})
    if not entries:
        raise InputError(f"'selectors' must be {_SELECTORS}. Got {short_repr(selectors)}.")
    return entries


def _add_entries(entries: dict[str, Any], item: Any, known: Mapping[str, Any]) -> None:
    for name, entry in _label_entries(item, known).items():
        # Two files may each have a class of this name.
        label = item if name in entries and isinstance(item, str) and is_reference(item) else name
        if label in entries:
            raise InputError(
                f"'selectors' has two entries called {label!r}.",
                hint='give each its own label: {"first": ..., "second": ...}',
            )
        entries[label] = entry


def _label_entries(item: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(item, Mapping):
        return {_label(label): _entry(str(label), value) for label, value in item.items()}
    if not isinstance(item, str):
        entry = _entry(type(item).__name__, item)
        cls = item if isinstance(item, type) else type(item)
        return {str(getattr(cls, "name", cls.__name__)): entry}
    if is_reference(item):
        return {str(getattr(SELECTORS.get(item), "name", item)): {"name": item}}
    return {item: _entry(item, known.get(item))}


def _label(label: Any) -> str:
    if not isinstance(label, str) or not label.strip():
        raise InputError(f"The label of a selector must be a string. Got {short_repr(label)}.")
    return label


def _entry(label: str, value: Any) -> dict[str, Any]:
    """Return an entry of ``[selectors]`` for a name, parameters, a selector or a selector class."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Selector):
        return {"name": _name_of(type(value)), **values_of(value)}
    if isinstance(value, type) and issubclass(value, Selector):
        return {"name": _name_of(value)}
    raise InputError(
        f"The selector {label!r} must be a name, parameters, a Selector or its class. Got {short_repr(value)}."
    )


def _name_of(cls: type[Selector[Any]]) -> str:
    """Return the name or reference by which a configuration and other processes find a selector class."""
    name = vars(cls).get("name")
    if isinstance(name, str) and name in SELECTORS and SELECTORS.get(name) is cls:
        return name
    reference = SELECTORS.reference(cls) or f"{cls.__module__}:{cls.__qualname__}"
    if cls.__module__ != "__main__" and cls.__qualname__.isidentifier() and not inspect.isabstract(cls):
        try:
            if SELECTORS.get(reference) is cls:
                return reference
        except FedcohortError:
            pass
    raise InputError(
        f"A configuration names its selectors, but {cls.__qualname__} in {cls.__module__} cannot be found by name.",
        hint='register it with @register("a-name"), or save it in a file and pass "file.py:Class"',
    )


# -- defaults -----------------------------------------------------------------------------------------------------


def base_table(
    config: Any, data: str | None, scenario: str | None, own_selectors: bool, *, keep_settings: bool = True
) -> tuple[dict[str, Any], str]:
    """Return the configuration to start from, and where it comes from if the user did not name one.

    Parameters
    ----------
    config : str, path or mapping, optional
        The configuration that the user named.
    data, scenario : str, optional
        Names of the dataset and of the preset.
    own_selectors : bool
        Whether the user named selectors.
    keep_settings : bool
        Whether to keep the demo's two federations; False if the user described another one.
    """
    if config is not None:
        return _read_config(config), ""
    demo = find_table("demo")
    if scenario is None:
        if not keep_settings:
            demo.pop("settings", None)
        if keep_settings and not own_selectors:
            return demo, ""
        return {**demo, "selectors": _plain_selectors(demo)}, "the built-in configuration 'demo'"
    preset = find_preset(scenario)
    data = data or demo["data"]["name"]
    origin = f"the preset {scenario!r} ({preset.source})"
    if data not in preset.training and "" not in preset.training:
        origin += f", as for {next(iter(preset.training))}"
    not_in_paper = [*preset.training_on(data).ours]
    if not_in_paper:
        not_in_paper += ["cohort"] if preset.cohort is None else []
        origin += f" (not in the paper: {', '.join(not_in_paper)})"
    return {
        "seeds": demo["seeds"],
        "model": {"name": "mlp"},
        **preset_table(scenario, data),
        "selectors": _plain_selectors(demo),
    }, origin


def _read_config(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, (str, os.PathLike)):
        return find_table(os.fspath(config))
    raise InputError(
        f"'config' must be a TOML file, the name of a built-in configuration or a table. Got {short_repr(config)}."
    )


def _plain_selectors(demo: Mapping[str, Any]) -> dict[str, Any]:
    """Return the demo's selectors, each once and with its documented defaults."""
    return {entry.get("name", label): {} for label, entry in demo["selectors"].items()}


# -- fitting the defaults -----------------------------------------------------------------------------------------


def describe_inherited(base: Mapping[str, Any], final: Mapping[str, Any]) -> str:
    """List the values that an experiment inherits from its base configuration."""
    before, after = _section(base, "run"), _section(final, "run")
    run = [(key, before.get(key), after.get(key)) for key in ("cohort", "rounds", "targets")]
    evaluation = [("eval_every", before.get("eval_every"), after.get("eval_every"))]
    local = [(key, value, _section(final, "local").get(key)) for key, value in _section(base, "local").items()]
    aggregator = [("aggregator", base.get("aggregator", {}).get("name"), _name(final.get("aggregator", {})))]
    inherited = [
        f"{key} {_value_text(old)}"
        for key, old, new in [*run, *local, *aggregator, *evaluation, *_scenario_parts(base, final)]
        if old is not None and old == new
    ]
    return ", ".join(inherited)


def _scenario_parts(base: Mapping[str, Any], final: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the parts of the base's scenario that are not defaults: name, value in base, value in final."""
    tables = [
        {"preset": part} if isinstance(part, str) else part for part in (t.get("scenario", {}) for t in (base, final))
    ]
    before, after = (Scenario.from_dict(part).to_dict() if isinstance(part, Mapping) else {} for part in tables)
    plain = Scenario().to_dict()
    keys = [key for key in before if before[key] != plain.get(key)]
    return [(key, _words(before[key]), _words(after.get(key))) for key in keys]


def _words(part: Any) -> Any:
    """Return a part of a scenario as readable text."""
    if not isinstance(part, Mapping):
        return part
    inside = ", ".join(f"{key}={value}" for key, value in part.items() if key != "name")
    return f"{part.get('name', '')}({inside})"


def drop_targets(table: dict[str, Any], base: Mapping[str, Any]) -> None:
    """Remove the base configuration's targets, which are accuracies, if the task has another metric."""
    targets = _section(base, "run").get("targets")
    if targets and _section(table, "run").get("targets") == targets:
        without = {**table, "run": {key: value for key, value in table["run"].items() if key != "targets"}}
        if not Metric.of(Experiment.from_dict(without).table["task"]).is_accuracy:
            table["run"] = without["run"]


def fit_to_data(table: dict[str, Any], *, partition: bool, selectors: bool) -> list[str]:
    """Replace defaults that do not fit the user's data; return notes about what was changed.

    Parameters
    ----------
    partition, selectors : bool
        Whether these are defaults and not the user's choice.
    """
    notes: list[str] = []
    if partition and names_clients(table):
        del table["scenario"]["partition"]  # the experiment then uses the clients that the data name, with a note
    elif partition and _section(table, "task"):
        notes += _without_classes(table)
    if selectors and _section(table, "task"):
        notes += _leave_out_unfit(table)
    return notes


def _without_classes(table: dict[str, Any]) -> list[str]:
    """Replace a partition by classes if the task has no classes."""
    first, *_ = Experiment.from_dict(table).plans
    if first.task.has_classes or not first.scenario.partition.by_class:
        return []
    clients = table["scenario"]["partition"].get("clients", 50)
    table["scenario"]["partition"] = {"name": "iid", "clients": clients}
    table["scenario"].pop("server_validation", None)  # a number of samples of each class
    return [f"samples are divided at random among {clients} clients, because there are no classes"]


def _leave_out_unfit(table: dict[str, Any]) -> list[str]:
    """Remove the selectors that do not fit the task, unless none fits."""
    from fedcohort.simulate.rounds.run import check_fits

    unfit: dict[str, None] = {}  # an ordered set
    for plan in Experiment.from_dict(table).plans:
        try:
            check_fits(plan)
        except (SignalError, InputError):
            unfit[plan.label] = None
    kept = {name: entry for name, entry in table["selectors"].items() if name not in unfit}
    if not unfit or not kept:
        return []
    table["selectors"] = kept
    return [f"left out, because they need classes: {', '.join(unfit)}"]


def supply_held_out_data(table: dict[str, Any]) -> list[str]:
    """Give all selectors the data that one of them needs, so that the comparison is fair; return notes."""
    experiment = Experiment.from_dict(table)
    notes: list[str] = []
    scenario = table.get("scenario", {})
    if isinstance(scenario, str):
        scenario = table["scenario"] = {"preset": scenario}
    plans = experiment.plans
    validating = [p.label for p in plans if not p.scenario.validation and any(s.held_out for s in p.selector.requires)]
    if validating:
        table.setdefault("scenario", scenario)["validation"] = 0.1
        notes.append(f"every client holds out 10% of its data, because {validating[0]} needs validation losses")
    at_server = [p.label for p in plans if Need.LOGITS in p.filter.needs and not p.scenario.server_validation]
    if at_server:
        table.setdefault("scenario", scenario)["server_validation"] = 20
        notes.append(f"the server keeps 20 samples of each class, because the filter of {at_server[0]} needs them")
    return notes


def _section(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a configuration that has not been checked yet."""
    section = table.get(name)
    return section if isinstance(section, Mapping) else {}


def _name(part: Any) -> Any:
    return part.get("name") if isinstance(part, Mapping) else part


def _value_text(value: Any) -> str:
    return " and ".join(f"{item:g}" for item in value) if isinstance(value, list) else str(value)
