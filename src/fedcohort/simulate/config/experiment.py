"""The configuration of an experiment, and the runs it describes.

::

    name = "noise"
    seeds = [0, 1, 2]

    [data]
    name = "fashion-mnist"            # folder = "..."

    [scenario]
    preset = "flash-noise"            # or partition = {name = "shards", clients = 100}, ...

    [model]
    name = "mlp"

    [local]
    batch_size = 64
    steps = 20
    lr = 0.005

    [aggregator]
    name = "fedavg"

    [run]
    rounds = 200
    cohort = 10
    eval_every = 5
    targets = [0.7, 0.8]

    [selectors.uniform]

    [selectors.ours]                  # a label, which is also the selector's name unless "name" is given
    name = "flash-advantage"
    local = {loss = "robust"}         # for this selector only: local, aggregator, filter or labels

    # [selectors.mine]
    # name = "mine.py:MySelector"     # your own class: file.py:Class next to this file, or module:Class

    # [task]
    # name = "regression"             # or next-token; classification is the default

    # [data]
    # path = "people.csv"             # your own data, next to this file; see the source "file"
    # label = "diagnosis"
    # client = "hospital"             # with scenario.partition = "natural"

    [sweep]                           # each value becomes a selector: "ours exploration=0.1" and so on
    ours.exploration = [0.1, 0.2]

    [[settings]]                      # each setting changes some of the keys above
    name = "quiet"
    scenario.noise.level = 0.0

Every key is checked; the error for an unknown key names the nearest known one. Everything is built before any training
starts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from fedcohort.core.errors import InputError, ParameterError, UnknownNameError
from fedcohort.core.params import Interval, Text, parameters
from fedcohort.core.protocol import SELECTORS, Selector
from fedcohort.core.registry import Registry, is_reference, nearest, resolve_reference, suggest, user_code_errors
from fedcohort.core.signals import Signal
from fedcohort.core.text import short_repr
from fedcohort.core.validate import mapping
from fedcohort.scenario import Scenario
from fedcohort.selectors import Uniform
from fedcohort.session.rules import Rules
from fedcohort.simulate.config.sections import DataOptions, ModelOptions, RunOptions
from fedcohort.simulate.config.sweep import expand_sweep
from fedcohort.simulate.config.toml import LENGTHS, ConfigError, merge_tables, to_toml
from fedcohort.simulate.data import DATASETS, Dataset, InMemory, OwnFile, data_section
from fedcohort.simulate.label_sharing import LABEL_SHARING, LabelSharing
from fedcohort.simulate.tasks import TASKS, Classification, Task
from fedcohort.training.aggregators import AGGREGATORS, Aggregator, InverseProbability
from fedcohort.training.filters import FILTERS, Filter
from fedcohort.training.local import LocalTraining

Table = Mapping[str, Any]  # a configuration, or part of one, that may not have been checked
Parts = dict[str, Any]  # what sections describe, by the sections' names

MAX_RUNS = 100_000
MAX_SEED = 2**63 - 1
_MAX_NAME = 200  # characters of a run's name, which becomes a file name; file systems allow 255
MEMORY_FILE = "data.npz"  # in an experiment's directory: data that the user passed as arrays


@dataclass(frozen=True, eq=False)
class RunPlan:
    """One run: a selector under one seed in one setting, built and checked."""

    id: str
    label: str
    seed: int
    setting: dict[str, Any]
    setting_name: str
    selector: Selector[Any]
    data: DataOptions
    scenario: Scenario
    model: ModelOptions
    local: LocalTraining
    aggregator: Aggregator
    filter: Filter
    labels: LabelSharing
    options: RunOptions
    task: Task = field(default_factory=Classification)
    rules: Rules | None = None
    shadows: Mapping[str, Selector[Any]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Experiment:
    """A checked configuration.

    Attributes
    ----------
    table : dict
        The complete configuration as plain values; :func:`to_toml` writes it.
    plans : tuple of RunPlan
        Settings x selectors x seeds, in this order.
    options : RunOptions
        Options of the base configuration, which settings may change.
    notes : tuple of str
        Sentences about choices that the configuration left open.
    """

    name: str
    table: dict[str, Any]
    plans: tuple[RunPlan, ...]
    options: RunOptions
    notes: tuple[str, ...] = ()

    @property
    def baseline(self) -> str:
        """The label that all others are compared with."""
        if self.options.baseline is not None:
            return self.options.baseline
        uniform = (plan.label for plan in self.plans if isinstance(plan.selector, Uniform))
        return next(uniform, self.plans[0].label)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Experiment:
        """Check a configuration and build all its runs.

        >>> experiment = Experiment.from_dict({"seeds": [1, 2], "selectors": {"uniform": {}}})
        >>> [plan.id for plan in experiment.plans]
        ['uniform-s1', 'uniform-s2']
        >>> Experiment.from_dict({"rounds": 5})
        Traceback (most recent call last):
            ...
        fedcohort.simulate.config.experiment.ConfigError: The configuration has no key 'rounds'. ...
          hint: did you mean 'run.rounds'?
        """
        return Configuration.of(mapping(table, "A configuration")).experiment()


# -- sections --------------------------------------------------------------------------------------------------

# Settings merge tables and not built parts: a part with another name starts from its own defaults, and only the table
# says which of its values somebody wrote.
_PLAIN: dict[str, type[Any]] = {"model": ModelOptions, "local": LocalTraining, "run": RunOptions, "rules": Rules}
_NAMED: dict[str, Registry[Any]] = {
    "task": TASKS,
    "aggregator": AGGREGATORS,
    "filter": FILTERS,
    "labels": LABEL_SHARING,
}
_DEFAULTS = {"task": "classification", "aggregator": "fedavg", "filter": "keep-all", "labels": "counts"}
_CHOICES = ("aggregator", "filter", "labels")  # of the server, which a selector may change
_OF_SELECTORS = ["local", *_CHOICES]
_OF_SETTINGS = ["data", *_PLAIN, "scenario", *_CHOICES]
_TOP = ["name", "seeds", "data", "task", *_PLAIN, "scenario", *_CHOICES, "selectors", "sweep", "settings"]


@contextmanager
def _errors_in(where: str) -> Iterator[None]:
    """Turn an error about a value into a :class:`ConfigError` that says where the value is."""
    try:
        yield
    except (InputError, ParameterError, UnknownNameError) as error:
        raise ConfigError(f"{where}: {error.message}", hint=error.hint) from error


def _check_keys(
    where: str, table: Table, known: Sequence[str], hint: Callable[[str, Sequence[str]], str | None] = suggest
) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{where} has no key {key!r}. Known: {', '.join(known)}.", hint=hint(key, known))


def _suggest_section(key: str, top: Sequence[str]) -> str | None:
    """Return a hint about an unknown key at the top level, which may belong to a section: ``run.rounds``."""
    inside = {  # if two sections have the key, the first counts
        info.name: f"{section}.{info.name}" for section, kind in reversed(_PLAIN.items()) for info in parameters(kind)
    }
    close = nearest(key, inside)
    # A key that resembles one of the top level is probably a typing error there, unless a section has exactly this key.
    if close is None or (close != key and nearest(key, top) is not None):
        return suggest(key, top)
    return f"did you mean {inside[close]!r}?"


def _table(where: str, value: Any, hint: str | None = None) -> dict[str, Any]:
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, Mapping):
        plain = value is None or isinstance(value, (bool, int, float))
        # A frame or an array would fill the screen.
        got = short_repr(value) if plain else f"an object of type {type(value).__name__}"
        raise ConfigError(f"{where} must be a table or a name. Got {got}.", hint=hint)
    if not isinstance(value.get("name", ""), str):
        raise ConfigError(f"{where}: the name must be a string. Got {value['name']!r}.")
    return dict(value)


def _build(table: Table, sections: Iterable[str], parts: Parts) -> Parts:
    """Return ``parts`` with some sections of a configuration built; later sections may depend on earlier ones."""
    parts = dict(parts)
    for section in sections:
        value = table.get(section, {})
        if section == "data":
            parts[section] = _data(value, parts["task"].target)
        elif section == "scenario":
            parts[section] = _scenario(value, parts["data"])
        elif section == "rules" and not value:
            parts[section] = None  # having no rules differs from having empty ones
        elif section in _PLAIN:
            kind, values = _PLAIN[section], _table(f"The section [{section}]", value)
            _check_keys(f"The section [{section}]", values, [info.name for info in parameters(kind)])
            # LocalTraining insists on one length. A configuration that has none means one epoch.
            if kind is LocalTraining and not any(length in values for length in LENGTHS):
                values["epochs"] = 1
            with _errors_in(f"In the section [{section}]"):
                parts[section] = kind(**_with_absolute_name(section, values))
        else:
            values = _table(f"The section [{section}]", value)
            registry, default = _NAMED[section], _DEFAULTS[section]
            with _errors_in(f"In the section [{section}]"):
                parts[section] = registry.create(values.pop("name", default), **values)
    return parts


def _data(value: Any, target: str) -> DataOptions:
    if isinstance(value, Dataset):
        return DataOptions(name="memory", source=InMemory(value))
    values = _table("The section [data]", value, "from_arrays and from_pandas make a Dataset from arrays and frames")
    section = data_section(values.pop("name", "file" if "path" in values else "digits"))
    name, values = section.pop("name"), {**section, **values}
    places = {key: values.pop(key) for key in ("folder", "download") if key in values}
    if name == "file" and target != "class":
        values.setdefault("target", target)
    with _errors_in("In the section [data]"):
        source = DATASETS.create(name, **values)
        if isinstance(source, OwnFile):
            source = source.with_absolute_paths(places.pop("folder", None))
        # The reference of a class works from any folder.
        return DataOptions(name=DATASETS.reference(type(source)) or name, source=source, **places)


def _scenario(value: Any, data: DataOptions) -> Scenario:
    table = {"preset": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping):
        raise ConfigError(f"The section [scenario] must be a table or the name of a preset. Got {short_repr(value)}.")
    if _owners_are_clients(table, data):
        table = {**table, "partition": {"name": "natural"}}
    with _errors_in("In the section [scenario]"):
        return Scenario.from_dict(table)


def _changed_by(change: Table) -> list[str]:
    """Return the sections to build again for a setting: other data may name the clients of an unchanged scenario."""
    return [key for key in _OF_SETTINGS if key in change or (key == "scenario" and "data" in change)]


def _owners_are_clients(scenario: Any, data: DataOptions) -> bool:
    """Whether a scenario leaves the partition open and the data name the client of each sample."""
    chosen = isinstance(scenario, str) or "partition" in scenario or "preset" in scenario
    # A preset is a paper's federation, so it keeps its own partition even if the data name their clients.
    return not chosen and data.names_clients


# -- selectors, settings and runs ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Chosen:
    """An entry of ``[selectors]``: the selector, the sections it changes, and parts it needs if nobody names any."""

    name: str
    selector: Selector[Any]
    own: dict[str, Any]
    brought: Parts

    @classmethod
    def of(cls, label: str, raw: Any) -> _Chosen:
        entry = _table(f"[selectors.{label}]", raw)
        own = {key: entry.pop(key) for key in _OF_SELECTORS if key in entry}
        name = entry.pop("name", label)
        with _errors_in(f"In [selectors.{label}]"):
            selector: Selector[Any] = SELECTORS.create(name, **entry)
        with user_code_errors(f"The selector {name!r} cannot say what it requires", name):
            signals: object = selector.requires
        if not isinstance(signals, frozenset) or not all(isinstance(signal, Signal) for signal in signals):
            raise ConfigError(
                f"The selector {name!r} must require a frozenset of signals. Got {short_repr(signals)}.",
                hint="for example frozenset({Signal.LOSS})",
            )
        needed = {"filter": selector.default_filter} if Signal.KEPT in signals else {}
        if selector.aggregator not in (None, _DEFAULTS["aggregator"]):
            needed["aggregator"] = selector.aggregator
        brought = {}
        for section, part in needed.items():
            if not own.get(section):
                with _errors_in(f"The {section} that the selector {name!r} comes with"):
                    brought[section] = _NAMED[section].create(part)
        return cls(name, selector, own, brought)


@dataclass(frozen=True)
class _Setting:
    """One of ``[[settings]]``, or the whole configuration if it has none: its sections, built."""

    name: str
    change: dict[str, Any]
    table: dict[str, Any]
    parts: Parts
    own: dict[str, Parts]  # by selector: the parts that its table changes, or that it brought

    @classmethod
    def of(
        cls, table: Table, parts: Parts, name: str, change: dict[str, Any], selectors: Mapping[str, _Chosen]
    ) -> _Setting:
        _check_keys(f"The setting {name!r}", change, _OF_SETTINGS)
        if "data" in change and isinstance(table.get("data"), Dataset):
            raise ConfigError(f"The setting {name!r} cannot change data that were passed as arrays.")
        merged = merge_tables(table, change)
        parts = _build(merged, _changed_by(change), parts)
        own = {
            label: _build(merge_tables(merged, chosen.own), chosen.own, {})
            | {section: part for section, part in chosen.brought.items() if not merged.get(section)}
            for label, chosen in selectors.items()
        }
        return cls(name, change, merged, parts, own)


@dataclass(frozen=True)
class Configuration:
    """A configuration with every section built once. A change builds only what it changes.

    >>> base = Configuration.of({"run": {"rounds": 5}})
    >>> changed = base.with_section("run", {"rounds": 6})
    >>> changed.parts["scenario"] is base.parts["scenario"], changed.plans()[0].options.rounds
    (True, 6)
    """

    table: dict[str, Any]
    seeds: list[int]
    parts: Parts
    selectors: dict[str, _Chosen]
    settings: tuple[_Setting, ...]

    @classmethod
    def of(cls, table: Table) -> Configuration:
        """Check a table and build its sections."""
        _check_keys("The configuration", table, _TOP, _suggest_section)
        seeds, raw = _seeds(table.get("seeds", [0])), table.get("selectors") or {"uniform": {}}
        if not isinstance(raw, Mapping):
            raise ConfigError(
                f"[selectors] must hold one table per selector, [selectors.LABEL]. Got {short_repr(raw)}."
            )
        entries = expand_sweep(raw, table.get("sweep", {}))
        changes = table.get("settings", [])
        if not isinstance(changes, list) or not all(isinstance(item, Mapping) for item in changes):
            raise ConfigError(f"'settings' must be tables, [[settings]]. Got {short_repr(changes)}.")
        # Checked before anything is built, so that a typing error in a sweep cannot fill the memory with plans.
        counts = (max(len(changes), 1), len(entries), len(seeds))
        if math.prod(counts) > MAX_RUNS:
            raise ConfigError(
                f"An experiment has at most {MAX_RUNS:,} runs. Got {math.prod(counts):,}: {counts[0]} settings x "
                f"{counts[1]} selectors x {counts[2]} seeds."
            )
        # In this order: the task says what data are read as, and data may name the clients of a scenario.
        parts = _build(table, ["task", "data", "scenario", *_PLAIN, *_CHOICES], {})
        selectors = {label: _Chosen.of(label, entry) for label, entry in entries.items()}
        settings = []
        for number, item in enumerate(changes or [{"name": ""}]):
            change = dict(item)
            settings.append(_Setting.of(table, parts, str(change.pop("name", f"setting-{number}")), change, selectors))
        return cls(dict(table), seeds, parts, selectors, tuple(settings))

    def with_section(self, name: str, value: Table) -> Configuration:
        """Return the configuration with another section, which no selector changes."""
        table = {**self.table, name: value}
        parts = _build(table, [name], self.parts)
        settings = []
        for setting in self.settings:
            merged = merge_tables(table, setting.change)
            own = _build(merged, [name], setting.parts) if name in _changed_by(setting.change) else parts
            settings.append(replace(setting, table=merged, parts={**setting.parts, name: own[name]}))
        return replace(self, table=table, parts=parts, settings=tuple(settings))

    def with_selectors(self, labels: Iterable[str]) -> Configuration:
        """Return the configuration with only some of its selectors."""
        return replace(self, selectors={label: self.selectors[label] for label in labels})

    def combinations(self) -> Iterator[tuple[_Setting, str, Parts]]:
        """Yield each setting and label, with the parts that their runs share."""
        for setting in self.settings:
            for label in self.selectors:
                yield setting, label, {**setting.parts, **setting.own[label]}

    def plans(self) -> tuple[RunPlan, ...]:
        """Return a run for each setting, selector and seed, in this order."""
        plans: dict[str, RunPlan] = {}
        for setting, label, parts in self.combinations():
            stem, flat, options = _file_stem(label, setting.name), _flatten(setting.change), parts.pop("run")
            for shadow in options.shadows:
                _check_known("shadow", shadow, "label of a selector", list(self.selectors))
            parts |= {"label": label, "setting": flat, "setting_name": setting.name, "options": options}
            parts["selector"] = self.selectors[label].selector
            # A selector does not shadow its own runs.
            parts["shadows"] = {name: self.selectors[name].selector for name in options.shadows if name != label}
            for seed in self.seeds:
                # Files are named after it; two runs with one journal would destroy each other.
                if (name := f"{stem}-s{seed}") in plans:
                    raise ConfigError(
                        f"Two runs would both be called {name!r}.", hint="give settings and selectors different names"
                    )
                plans[name] = RunPlan(id=name, seed=seed, **parts)
        return tuple(plans.values())

    def experiment(self) -> Experiment:
        """Check what concerns several parts, and return the experiment."""
        name = self.table.get("name", "experiment")
        if not Text().admits(name):
            raise ConfigError(f"'name' must be a non-empty string. Got {name!r}.")
        plans, options = self.plans(), self.parts["run"]
        metric = self.parts["task"].judged_by
        wrong = [target for target in options.targets if metric.share and not 0 <= target <= 1]
        if wrong:
            raise ConfigError(
                f"In the section [run]: the 'targets' are values of {metric.name}, in [0, 1]. Got {wrong[0]:g}.",
                hint="62% is 0.62",
            )
        _check_known("baseline", options.baseline, "label of a selector", list(self.selectors))
        titles = [setting.name for setting in self.settings if setting.name]
        _check_known("reference", options.reference, "name of a setting", titles)
        complete = self._complete(name)
        # Written only when the experiment begins, but it must be known now whether that will work.
        try:
            to_toml(complete).encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"A configuration must be valid UTF-8. Got {error.object[error.start : error.end]!r}."
            ) from None
        return Experiment(name, complete, plans, options, self._notes(complete, plans))

    def _complete(self, name: str) -> dict[str, Any]:
        """Return the configuration with every default filled in, so that building it again gives the same runs."""
        table, parts = self.table, self.parts
        changes = table.get("settings", [])
        complete: dict[str, Any] = {"name": name, "seeds": self.seeds}
        source = parts["data"].source
        complete["data"] = {**values_of(parts["data"]), **values_of(source)}
        if isinstance(source, InMemory):  # the experiment writes it to this file
            integers = source.dataset.x_train.dtype.kind == "i"
            complete["data"] = {
                "name": "file",
                "path": MEMORY_FILE,
                "target": parts["task"].target,
                "integers": integers,
            }
        complete["task"] = _describe(TASKS, parts["task"])
        complete |= {section: values_of(parts[section]) for section in _PLAIN if parts[section] is not None}
        complete["scenario"] = parts["scenario"].to_dict()
        if any("scenario" in change for change in changes):
            # A setting that changes parts of a preset must still find the preset by name: no defaults are filled in.
            complete["scenario"] = table.get("scenario", {})
            if _owners_are_clients(complete["scenario"], parts["data"]):
                complete["scenario"] = {**complete["scenario"], "partition": {"name": "natural"}}
        # If only a setting names one, a default here would override what selectors bring in the other settings.
        named = {section for section in _REASONS if section in table or any(section in item for item in changes)}
        described = [section for section in _CHOICES if section not in named or table.get(section)]
        complete |= {section: _describe(_NAMED[section], parts[section]) for section in described}
        complete["selectors"] = {}
        for label, chosen in self.selectors.items():
            absolute = SELECTORS.reference(type(chosen.selector)) or chosen.name  # works from any folder
            own = {key: _with_absolute_name(key, value) for key, value in chosen.own.items()}
            own |= {key: _describe(_NAMED[key], part) for key, part in chosen.brought.items() if key not in named}
            complete["selectors"][label] = {"name": absolute, **values_of(chosen.selector), **own}
        if changes:
            complete["settings"] = [
                {key: _with_absolute_name(key, part) for key, part in change.items()} for change in changes
            ]
        return complete

    def _notes(self, complete: Table, plans: Sequence[RunPlan]) -> tuple[str, ...]:
        """Return notes about owners as clients, parts that selectors brought, and aggregators that do not suit them."""
        notes = []
        if any(_owners_are_clients(item.table.get("scenario", {}), item.parts["data"]) for item in self.settings):
            notes.append("the data name their clients, so the federation consists of these (partition 'natural')")
        notes += [
            f"{label} comes with the {section} {complete['selectors'][label][section]['name']!r}, because {reason}"
            for section, reason in _REASONS.items()
            for label, chosen in self.selectors.items()
            if section in chosen.brought and section in complete["selectors"][label]
        ]
        for plan in plans:
            needed, configured = plan.selector.aggregator, plan.aggregator.name
            if configured == needed or (needed is None and configured != InverseProbability.name):
                continue
            weights = "makes no weights for it" if needed is None else f"makes weights for the aggregator {needed!r}"
            what = f"{plan.label} is configured with the aggregator {configured!r} but {weights}"
            notes.append(f"{what}, so its average may be biased")
        return tuple(dict.fromkeys(notes))


_REASONS = {
    "filter": "it learns from which models a filter keeps",
    "aggregator": "its weights are unbiased only with this aggregator",
}


def _seeds(value: Any) -> list[int]:
    if Interval(int, 1, MAX_RUNS).admits(value):
        return list(range(value))
    if isinstance(value, list) and value and all(Interval(int, 0, MAX_SEED).admits(seed) for seed in value):
        if len(set(value)) != len(value):
            raise ConfigError(f"The seeds must differ. Got {value}.")
        return list(value)
    raise ConfigError(
        f"'seeds' must be a list of whole numbers from 0 to {MAX_SEED}, or their number, at most {MAX_RUNS:,}. "
        f"Got {short_repr(value)}."
    )


def _check_known(option: str, value: str | None, kind: str, known: list[str]) -> None:
    if value is not None and value not in known:
        raise ConfigError(
            f"The {option} {value!r} is not the {kind}. Known: {', '.join(known) or 'none'}.",
            hint=suggest(value, known),
        )


def _file_stem(label: str, title: str) -> str:
    """Return the beginning of the names of a run's files, for a selector in a setting."""
    # A label may have any characters, a file's name may not. Labels that become the same name are refused later.
    slugs = [re.sub(r"[^A-Za-z0-9_.+=-]+", "-", text).strip("-.") or "run" for text in (label, title) if text]
    stem = "-".join(slugs)
    if len(stem) > _MAX_NAME:
        names = " and ".join(short_repr(name, 60) for name in (label, title) if name)
        raise ConfigError(
            f"A run's files are named after its selector's label and its setting's name. Together these have "
            f"{len(stem)} characters, but at most {_MAX_NAME} are allowed. Got {names}.",
            hint="give the selector or the setting a shorter name",
        )
    return stem


def _flatten(table: Table, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


# -- plain values ----------------------------------------------------------------------------------------------


def values_of(thing: Any) -> dict[str, Any]:
    """Return the parameters of a configurable object as plain values, without those that are None."""
    # TOML has no None: a key that is left out means it.
    values = {info.name: getattr(thing, info.name) for info in parameters(type(thing))}
    return {key: _without_none(value) for key, value in values.items() if value is not None}


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return value


def _describe(registry: Registry[Any], built: Any) -> dict[str, Any]:
    """Return a part with its name and all its parameters, as plain values."""
    return {"name": registry.reference(type(built)) or built.name, **values_of(built)}


def _with_absolute_name(section: str, value: Any) -> Any:
    """Return a section in which a user's own class, ``file.py:Class``, has a name that works from any folder."""
    if section not in ("data", "model", "aggregator", "filter"):
        return value
    if isinstance(value, Mapping):
        return {**value, "name": _with_absolute_name(section, value["name"])} if "name" in value else value
    return resolve_reference(value)[1] if isinstance(value, str) and is_reference(value) else value
