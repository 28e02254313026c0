"""The experiment behind ``fedcohort.compare`` and ``fedcohort compare``: the user's choices, and defaults that fit."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from fedcohort.core.errors import InputError, SignalError
from fedcohort.core.registry import is_reference
from fedcohort.core.text import short_repr
from fedcohort.scenario import Scenario
from fedcohort.scenario.presets import find_preset, preset_table
from fedcohort.simulate.config.experiment import Configuration, Experiment, Table
from fedcohort.simulate.config.selectors import selector_entries
from fedcohort.simulate.config.toml import find_table, merge_tables, with_keys
from fedcohort.simulate.data import Dataset, data_section, from_arrays, from_pandas
from fedcohort.simulate.data.dataset import Target
from fedcohort.simulate.tasks import TASKS
from fedcohort.training.filters import Need

_DATA = "the name of a dataset, a file, a Dataset, arrays (x, y) or a pandas DataFrame"


def compared(
    *,
    selectors: object = None,
    data: object = None,
    label: str | None = None,
    client: str | None = None,
    task: object = None,
    scenario: object = None,
    partition: object = None,
    clients: int | None = None,
    model: object = None,
    rounds: int | None = None,
    cohort: int | None = None,
    targets: Sequence[float] | None = None,
    baseline: str | None = None,
    seeds: object = None,
    sweep: Table | None = None,
    overrides: Table | None = None,
    config: object = None,
) -> Experiment:
    """Return the experiment of :func:`fedcohort.compare`; its notes say what was decided for the user."""
    dataset, section = _dataset(data, label, client, task)
    described = _scenario(scenario)
    preset = _preset(described)
    name = dataset.name if dataset is not None else (section or {}).get("name")
    federation = any(value is not None for value in (data, scenario, partition, clients))
    base, origin = base_table(config, name, preset, selectors is not None, keep_settings=not federation)

    # The user's choices, as sections.
    if preset is not None and config is None:
        described.pop("preset")  # the base configuration has it, with the paper's training
    if partition is not None:
        described["partition"] = _as_table("partition", partition)
    if clients is not None:
        described["partition"] = {**described.get("partition", {}), "clients": clients}
    run = {"rounds": rounds, "cohort": cohort, "targets": _listed(targets), "baseline": baseline}
    sections = {
        "data": section,
        "scenario": described or None,
        "model": None if model is None else _as_table("model", model),
        "task": None if task is None else _as_table("task", task),
        "run": {key: value for key, value in run.items() if value is not None},
    }
    table = merge_tables(base, {key: part for key, part in sections.items() if part is not None})
    if dataset is not None:
        table["data"] = dataset
    if seeds is not None:
        table["seeds"] = _seeds(seeds)
    if selectors is not None:
        table = _with_selectors(table, selector_entries(selectors, table.get("selectors", {})))
    if sweep:
        table["sweep"] = {**table.get("sweep", {}), **sweep}
    if (federation or selectors is not None or sweep) and config is None:
        table["name"] = "compare"
    overrides = check_overrides({} if overrides is None else overrides)
    configuration = Configuration(with_keys(table, overrides))

    # Values of a configuration or a preset were chosen by the user or by a paper, so only the demo's are fitted.
    fitted = config is None and scenario is None and any(value is not None for value in (data, label, client))
    notes: list[str] = []
    if config is None and targets is None:
        other_data = fitted and configuration.table.get("data") != base["data"]
        configuration = _drop_targets(configuration, base, other_data)
    if fitted:
        overridden = any(key.startswith("scenario.partition") for key in overrides)
        unchanged = _section(configuration.table, "scenario").get("partition") == base["scenario"]["partition"]
        if unchanged and not overridden:
            configuration, notes = _fit_partition(configuration)
        if selectors is None:
            configuration, left_out = _leave_out_unfit(configuration)
            notes += left_out
    inherited = describe_inherited(base, configuration) if origin else ""
    if inherited:
        notes.insert(0, f"from {origin}: {inherited}")
    configuration, supplied = supply_held_out_data(configuration)
    experiment = configuration.experiment()
    return replace(experiment, notes=(*notes, *supplied, *experiment.notes))


# -- the user's arguments -----------------------------------------------------------------------------------------


def _dataset(
    data: Any, label: str | None, client: str | None, task: Any
) -> tuple[Dataset | None, dict[str, Any] | None]:
    """Return the dataset if ``data`` holds one, otherwise the section ``[data]`` that ``data`` describes."""
    name = task.get("name") if isinstance(task, Mapping) else task
    # Of a file, the experiment's task decides what is predicted; arrays and frames become a dataset already here.
    known = isinstance(name, str) and (name in TASKS or is_reference(name))
    target: Target = getattr(TASKS.get(str(name)), "target", "class") if known else "class"
    columns = {key: value for key, value in (("label", label), ("client", client)) if value is not None}
    for key, value in columns.items():
        if not isinstance(value, str):
            raise InputError(f"'{key}' must be the name of a column. Got {short_repr(value)}.")
    if hasattr(data, "columns") and hasattr(data, "to_numpy"):  # not isinstance: pandas may not be installed
        predicted: Literal["class", "number"] = "number" if target == "number" else "class"
        return from_pandas(data, label=label or "label", client=client, target=predicted), None
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
    return data if isinstance(data, Dataset) else _from_tuple(data, target), None


def _from_tuple(data: Any, target: Target) -> Dataset:
    """Return a dataset from arrays (x, y) or (x, y, x_test, y_test)."""
    if isinstance(data, tuple) and len(data) in (2, 4) and all(isinstance(part, np.ndarray) for part in data):
        return from_arrays(*data, target=target)
    raise InputError(
        f"'data' must be {_DATA}. Got {short_repr(data)}.", hint="from_arrays and from_pandas build a Dataset"
    )


def _with_selectors(table: dict[str, Any], selectors: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the selectors of a configuration; drop its baseline and sweeps of selectors that are gone."""
    table = {**table, "selectors": selectors}
    if _section(table, "run").get("baseline") not in selectors:
        table = _without(table, "run", "baseline")
    if "sweep" in table:
        table["sweep"] = {label: grid for label, grid in table["sweep"].items() if label in selectors}
    return table


def _without(table: Table, section: str, key: str) -> dict[str, Any]:
    """Return a configuration without one key of a section."""
    return {**table, section: {name: value for name, value in _section(table, section).items() if name != key}}


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


def _preset(scenario: Table) -> str | None:
    preset = scenario.get("preset")
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


def describe_inherited(base: Table, final: Configuration) -> str:
    """List the values that an experiment inherits from its base configuration."""
    before, after = _section(base, "run"), _section(final.table, "run")
    values = [(key, before.get(key), after.get(key)) for key in ("cohort", "rounds", "targets")]
    local = _section(final.table, "local")
    values += [(key, value, local.get(key)) for key, value in _section(base, "local").items()]
    aggregator = final.table.get("aggregator", {})
    name = aggregator.get("name") if isinstance(aggregator, Mapping) else aggregator
    values += [("aggregator", _section(base, "aggregator").get("name"), name)]
    values += [("eval_every", before.get("eval_every"), after.get("eval_every"))]
    # Of the scenario, the parts that are not defaults.
    old, new, plain = final.scenario_of(base).to_dict(), final.scenario.to_dict(), Scenario().to_dict()
    values += [(key, _words(old[key]), _words(new.get(key))) for key in old if old[key] != plain.get(key)]
    return ", ".join(f"{key} {_value_text(a)}" for key, a, b in values if a is not None and a == b)


def _words(part: Any) -> Any:
    """Return a part of a scenario as readable text."""
    if not isinstance(part, Mapping):
        return part
    inside = ", ".join(f"{key}={value}" for key, value in part.items() if key != "name")
    return f"{part.get('name', '')}({inside})"


def _drop_targets(configuration: Configuration, base: Table, own_data: bool) -> Configuration:
    """Remove the base configuration's targets if they are for other data or for another metric."""
    targets = _section(base, "run").get("targets")
    if not targets or _section(configuration.table, "run").get("targets") != targets:
        return configuration
    without = configuration.replaced(_without(configuration.table, "run", "targets"))
    return without if own_data or not without.task.judged_by.is_accuracy else configuration


def _fit_partition(configuration: Configuration) -> tuple[Configuration, list[str]]:
    """Replace the default partition if the user's data name their clients, or have no classes to divide by."""
    table = configuration.table
    if configuration.data_name_clients:
        return configuration.replaced(_without(table, "scenario", "partition")), []  # the experiment has a note
    if configuration.task.has_classes or not configuration.scenario.partition.by_class:
        return configuration, []
    clients = table["scenario"]["partition"].get("clients", 50)
    table = _without(table, "scenario", "server_validation")  # a number of samples of each class
    table["scenario"]["partition"] = {"name": "iid", "clients": clients}
    note = f"samples are divided at random among {clients} clients, because there are no classes"
    return configuration.replaced(table), [note]


def _leave_out_unfit(configuration: Configuration) -> tuple[Configuration, list[str]]:
    """Remove the default selectors that do not fit the task, unless none fits."""
    from fedcohort.simulate.rounds.run import check_fits

    unfit: dict[str, None] = {}  # an ordered set
    for plan in configuration.plans if _section(configuration.table, "task") else ():
        try:
            check_fits(plan)
        except (SignalError, InputError):
            unfit[plan.label] = None
    selectors = configuration.table["selectors"]
    kept = {label: entry for label, entry in selectors.items() if label not in unfit}
    if not unfit or not kept:
        return configuration, []
    fitting = configuration.replaced({**configuration.table, "selectors": kept})
    return fitting, [f"left out, because they need classes: {', '.join(unfit)}"]


def supply_held_out_data(configuration: Configuration) -> tuple[Configuration, list[str]]:
    """Give all selectors the data that one of them needs, so that the comparison is fair; return notes."""
    changes: dict[str, Any] = {}
    notes: list[str] = []
    for plan in configuration.plans:
        held_out = any(signal.held_out for signal in plan.selector.requires)
        if held_out and not plan.scenario.validation and "validation" not in changes:
            changes["validation"] = 0.1
            notes.append(f"every client holds out 10% of its data, because {plan.label} needs validation losses")
        at_server = Need.LOGITS in plan.filter.needs
        if at_server and not plan.scenario.server_validation and "server_validation" not in changes:
            changes["server_validation"] = 20
            needed = f"because the filter of {plan.label} needs them"
            notes.append(f"the server keeps 20 samples of each class, {needed}")
    return configuration.changed({"scenario": changes}) if changes else configuration, notes


def _section(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a configuration that has not been checked yet."""
    section = table.get(name)
    return section if isinstance(section, Mapping) else {}


def _value_text(value: Any) -> str:
    return " and ".join(f"{item:g}" for item in value) if isinstance(value, list) else str(value)
