"""The experiment behind ``fedcohort.compare`` and ``fedcohort compare``: the user's choices, and defaults that fit."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from fedcohort.core.errors import InputError, SignalError
from fedcohort.core.registry import is_reference
from fedcohort.core.text import short_repr
from fedcohort.scenario import Scenario
from fedcohort.scenario.presets import find_preset, preset_table
from fedcohort.simulate.config.experiment import Configuration, Experiment, Table, values_of
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
    preset = described.get("preset")
    # A paper trains differently on each dataset, so the preset's training depends on its name.
    name = dataset.name if dataset is not None else (section or {}).get("name")
    # The demo's two federations would be nonsense beside one that the user describes.
    federation = any(value is not None for value in (data, scenario, partition, clients))
    base, origin = _base_table(config, name, preset, selectors is not None, keep_settings=not federation)

    # The user's choices, as sections.
    if preset is not None and config is None:
        described.pop("preset")  # the base configuration has it, with the paper's training
    described |= _given(partition=_as_table("partition", partition))
    if clients is not None:
        described["partition"] = {**described.get("partition", {}), "clients": clients}
    sections = _given(
        data=section,
        scenario=described or None,
        model=_as_table("model", model),
        task=_as_table("task", task),
        run=_given(rounds=rounds, cohort=cohort, targets=_plain(targets), baseline=baseline),
    )
    table = merge_tables(base, sections)
    if dataset is not None:
        table["data"] = dataset
    if seeds is not None:
        table["seeds"] = _plain(seeds)
    if selectors is not None:
        entries = table["selectors"] = selector_entries(selectors, table.get("selectors", {}))
        # A baseline or a sweep of the base configuration may be of a selector that is gone.
        bases = (*entries, baseline)
        table["run"] = {key: item for key, item in table["run"].items() if key != "baseline" or item in bases}
        if "sweep" in table:
            table["sweep"] = {label: grid for label, grid in table["sweep"].items() if label in entries}
    if sweep:
        table["sweep"] = {**table.get("sweep", {}), **sweep}
    if (federation or selectors is not None or sweep) and config is None:
        table["name"] = "compare"
    table = with_keys(table, overrides or {})
    configuration = Configuration.of(table)

    # Values of a configuration or a preset were chosen by the user or by a paper, so only the demo's are fitted.
    fitted = config is None and scenario is None and any(value is not None for value in (data, label, client))
    notes: list[str] = []
    if config is None and targets is None:
        # The base's targets mean nothing for other data, or for another metric.
        run, other_data = configuration.table["run"], fitted and table["data"] != base["data"]
        inherited_targets = run.get("targets") and run["targets"] == base["run"].get("targets")
        if inherited_targets and (other_data or not configuration.parts["task"].judged_by.is_accuracy):
            configuration = configuration.with_section("run", {**run, "targets": []})
    if fitted:
        described_by_hand = any(key == "scenario" or key.startswith("scenario.partition") for key in overrides or {})
        if partition is None and clients is None and not described_by_hand:
            configuration, notes = _fit_partition(configuration)
        if selectors is None:
            configuration, left_out = _leave_out_unfit(configuration)
            notes += left_out
    inherited = _describe_inherited(base, configuration) if origin else ""
    if inherited:
        notes.insert(0, f"from {origin}: {inherited}")
    configuration, supplied = supply_held_out_data(configuration)
    experiment = configuration.experiment()
    return replace(experiment, notes=(*notes, *supplied, *experiment.notes))


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


# -- the user's arguments -----------------------------------------------------------------------------------------


def _dataset(
    data: Any, label: str | None, client: str | None, task: Any
) -> tuple[Dataset | None, dict[str, Any] | None]:
    """Return the dataset if ``data`` holds one, otherwise the section ``[data]`` that ``data`` describes."""
    name = task.get("name") if isinstance(task, Mapping) else task
    # Of a file, the experiment's task decides what is predicted; arrays and frames become a dataset already here.
    known = isinstance(name, str) and (name in TASKS or is_reference(name))
    target: Target = getattr(TASKS.get(str(name)), "target", "class") if known else "class"
    columns = _given(label=label, client=client)
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
    if isinstance(data, Dataset):
        return data, None
    if isinstance(data, tuple) and len(data) in (2, 4) and all(isinstance(part, np.ndarray) for part in data):
        return from_arrays(*data, target=target), None
    raise InputError(
        f"'data' must be {_DATA}. Got {short_repr(data)}.", hint="from_arrays and from_pandas build a Dataset"
    )


def _plain(value: object) -> object:
    """Return numbers, also NumPy's, in ranges or in tuples, as TOML has them: as numbers and lists."""
    return None if value is None else np.asarray(value).tolist()


def _scenario(value: Any) -> dict[str, Any]:
    if value is None or isinstance(value, Mapping):
        return dict(value or {})
    if isinstance(value, Scenario):
        return value.to_dict()
    if isinstance(value, str):
        return {"preset": value}
    raise InputError(f"'scenario' must be the name of a preset, a Scenario or a table. Got {short_repr(value)}.")


def _as_table(argument: str, value: Any) -> dict[str, Any] | None:
    """Return a section that is given by name, as a table or not at all."""
    if value is None or isinstance(value, Mapping):
        return None if value is None else dict(value)
    if isinstance(value, str):
        return {"name": value}
    raise InputError(f"'{argument}' must be a name, or a table with a name and parameters. Got {short_repr(value)}.")


# -- defaults -----------------------------------------------------------------------------------------------------


def _base_table(
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
        if isinstance(config, Mapping):
            return dict(config), ""
        if isinstance(config, (str, os.PathLike)):
            return find_table(os.fspath(config)), ""
        raise InputError(
            f"'config' must be a TOML file, the name of a built-in configuration or a table. Got {short_repr(config)}."
        )
    demo = find_table("demo")
    # The demo's selectors, each once and with its documented defaults.
    plain: dict[str, Any] = {"selectors": {entry.get("name", label): {} for label, entry in demo["selectors"].items()}}
    if scenario is None:
        if not keep_settings:
            demo.pop("settings")
        kept = keep_settings and not own_selectors
        return (demo, "") if kept else ({**demo, **plain}, "the built-in configuration 'demo'")
    preset = find_preset(scenario)
    data = data or demo["data"]["name"]
    origin = f"the preset {scenario!r} ({preset.source})"
    if data not in preset.training and "" not in preset.training:
        origin += f", as for {next(iter(preset.training))}"
    not_in_paper = [*preset.training_on(data).ours]
    if not_in_paper:
        not_in_paper += ["cohort"] if preset.cohort is None else []  # then it is ours, too
        origin += f" (not in the paper: {', '.join(not_in_paper)})"
    return {"seeds": demo["seeds"], "model": {"name": "mlp"}, **preset_table(scenario, data), **plain}, origin


def _describe_inherited(base: Table, final: Configuration) -> str:
    """List the values that an experiment inherits from the demo or a preset."""
    before, after, local = base["run"], values_of(final.parts["run"]), values_of(final.parts["local"])
    values = [(key, before.get(key), after.get(key)) for key in ("cohort", "rounds", "targets")]
    values += [(key, value, local.get(key)) for key, value in base["local"].items()]
    values += [("aggregator", base.get("aggregator", {}).get("name"), final.parts["aggregator"].name)]
    values += [("eval_every", before.get("eval_every"), after["eval_every"])]
    # Of the scenario, the parts that are not defaults.
    scenarios = (Scenario.from_dict(base["scenario"]), final.parts["scenario"], Scenario())
    old, new, plain = (scenario.to_dict() for scenario in scenarios)
    values += [(key, _words(old[key]), _words(new.get(key))) for key in old if old[key] != plain.get(key)]
    return ", ".join(f"{key} {_value_text(a)}" for key, a, b in values if a is not None and a == b)


def _words(part: Any) -> Any:
    """Return a part of a scenario as readable text."""
    if not isinstance(part, Mapping):
        return part
    inside = ", ".join(f"{key}={value}" for key, value in part.items() if key != "name")
    return f"{part.get('name', '')}({inside})"


def _value_text(value: Any) -> str:
    return " and ".join(f"{item:g}" for item in value) if isinstance(value, list) else str(value)


def _fit_partition(configuration: Configuration) -> tuple[Configuration, list[str]]:
    """Replace the demo's partition if the user's data name their clients, or have no classes to divide by."""
    scenario = dict(configuration.table["scenario"])
    if configuration.parts["data"].names_clients:
        del scenario["partition"]
        return configuration.with_section("scenario", scenario), []  # the experiment has a note
    if configuration.parts["task"].has_classes:
        return configuration, []
    clients = scenario["partition"]["clients"]
    scenario |= {"partition": {"name": "iid", "clients": clients}, "server_validation": 0}  # it is counted by class
    note = f"samples are divided at random among {clients} clients, because there are no classes"
    return configuration.with_section("scenario", scenario), [note]


def _leave_out_unfit(configuration: Configuration) -> tuple[Configuration, list[str]]:
    """Remove the default selectors that do not fit the task, unless none fits."""
    from fedcohort.simulate.rounds.checks import check_fits

    fits = dict.fromkeys(configuration.selectors, True)
    for plan in configuration.plans() if "task" in configuration.table else ():
        try:
            check_fits(plan)
        except (SignalError, InputError):
            fits[plan.label] = False
    kept, unfit = ([label for label, fit in fits.items() if fit is wanted] for wanted in (True, False))
    if not unfit or not kept:
        return configuration, []
    return configuration.with_selectors(kept), [f"left out, because they need classes: {', '.join(unfit)}"]


def supply_held_out_data(configuration: Configuration) -> tuple[Configuration, list[str]]:
    """Give all selectors the data that one of them needs, so that the comparison is fair; return notes."""
    changes: dict[str, Any] = {}
    notes: list[str] = []
    for _, label, parts in configuration.combinations():
        held_out = any(signal.held_out for signal in configuration.selectors[label].selector.requires)
        if held_out and not parts["scenario"].validation and "validation" not in changes:
            changes["validation"] = 0.1
            notes.append(f"every client holds out 10% of its data, because {label} needs validation losses")
        at_server = Need.LOGITS in parts["filter"].needs
        if at_server and not parts["scenario"].server_validation and "server_validation" not in changes:
            changes["server_validation"] = 20
            needed = f"because the filter of {label} needs them"
            notes.append(f"the server keeps 20 samples of each class, {needed}")
    if not changes:
        return configuration, []
    table = merge_tables(configuration.table, {"scenario": changes})
    return configuration.with_section("scenario", table["scenario"]), notes
