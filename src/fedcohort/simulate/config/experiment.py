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

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

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
from fedcohort.simulate.config.toml import LENGTHS, ConfigError, merge_value, to_toml
from fedcohort.simulate.data import DATASETS, Dataset, InMemory, OwnFile, data_section
from fedcohort.simulate.label_sharing import LABEL_SHARING, LabelSharing
from fedcohort.simulate.tasks import TASKS, Classification, Task
from fedcohort.training.aggregators import AGGREGATORS, Aggregator, InverseProbability
from fedcohort.training.filters import FILTERS, Filter
from fedcohort.training.local import LocalTraining

T = TypeVar("T")
Table = Mapping[str, Any]  # a configuration, or part of one, that may not have been checked

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
        return Configuration(mapping(table, "A configuration")).experiment()


_SECTIONS: dict[str, type[Any]] = {
    "model": ModelOptions,
    "local": LocalTraining,
    "run": RunOptions,
    "rules": Rules,
}
_NAMED: dict[str, Registry[Any]] = {"aggregator": AGGREGATORS, "filter": FILTERS, "labels": LABEL_SHARING}
_TOP = ["name", "seeds", "data", "task", *_SECTIONS, "scenario", *_NAMED, "selectors", "sweep", "settings"]
_PER_SELECTOR = ["local", *_NAMED]
# Always the same objects, so that they are built once.
_EMPTY: dict[str, Any] = {}
_ONE_SEED = [0]
_UNIFORM: dict[str, Any] = {"uniform": {}}
_DEFAULTS = {"aggregator": "fedavg", "filter": "keep-all", "labels": "counts"}


# -- checks ----------------------------------------------------------------------------------------------------


@contextmanager
def _errors_in(where: str) -> Iterator[None]:
    """Turn an error about a value into a :class:`ConfigError` that says where the value is."""
    try:
        yield
    except (InputError, ParameterError, UnknownNameError) as error:
        raise ConfigError(f"{where}: {error.message}", hint=error.hint) from error


def _check_keys(
    where: str,
    table: Mapping[str, Any],
    known: Sequence[str],
    hint: Callable[[str, Sequence[str]], str | None] = suggest,
) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{where} has no key {key!r}. Known: {', '.join(known)}.", hint=hint(key, known))


def _suggest_section(key: str, top: Sequence[str]) -> str | None:
    """Return a hint about an unknown key at the top level, which may belong to a section: ``run.rounds``."""
    inside = {
        info.name: f"{section}.{info.name}"
        for section, kind in reversed(_SECTIONS.items())  # if two sections have the key, suggest the first
        for info in parameters(kind)
        if nearest(key, [info.name]) == info.name and info.name[:1] == key[:1]
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
        got = short_repr(value) if plain else f"an object of type {type(value).__name__}"
        raise ConfigError(f"{where} must be a table or a name. Got {got}.", hint=hint)
    return dict(value)


# -- sections --------------------------------------------------------------------------------------------------


def _section(name: str, value: Any) -> Any:
    """Build one of the sections that are plain dataclasses."""
    kind = _SECTIONS[name]
    values = _table(f"The section [{name}]", value)
    _check_keys(f"The section [{name}]", values, [info.name for info in parameters(kind)])
    # LocalTraining insists on one length. A configuration that has none means one epoch.
    if kind is LocalTraining and not any(length in values for length in LENGTHS):
        values["epochs"] = 1
    with _errors_in(f"In the section [{name}]"):
        if kind is ModelOptions and "name" in values:
            values["name"] = _absolute_name(values["name"])
        return kind(**values)


def _absolute_name(name: Any) -> Any:
    """Return a name, with a reference ``file.py:Class`` turned into one that works from any folder."""
    return resolve_reference(name)[1] if isinstance(name, str) and is_reference(name) else name


def _task(value: Any) -> Task:
    values = _table("The section [task]", value)
    task: Task = _create(TASKS, values.pop("name", "classification"), values, "In the section [task]")
    return task


def _data(value: Any, target: str = "class") -> DataOptions:
    if isinstance(value, Dataset):
        return DataOptions(name="memory", source=InMemory(value))
    values = _table("The section [data]", value, "from_arrays and from_pandas make a Dataset from arrays and frames")
    name = values.pop("name", "file" if "path" in values else "digits")
    if isinstance(name, str):
        section = data_section(name)
        name, values = section.pop("name"), {**section, **values}
    places = {key: values.pop(key) for key in ("folder", "download") if key in values}
    if name == "file" and target != "class":
        values.setdefault("target", target)
    source = _create(DATASETS, name, values, "In the section [data]")
    name = DATASETS.reference(type(source)) or name  # works from any folder
    if isinstance(source, OwnFile):
        source = source.with_absolute_paths(places.pop("folder", None))
    with _errors_in("In the section [data]"):
        return DataOptions(name=name, source=source, **places)


def _build_by_name(name: str, value: Any) -> Any:
    """Build one of the sections that a registry knows by name."""
    values = _table(f"The section [{name}]", value)
    return _create(_NAMED[name], values.pop("name", _DEFAULTS[name]), values, f"In the section [{name}]")


def _create(registry: Registry[Any], name: Any, values: Mapping[str, Any], where: str) -> Any:
    if not isinstance(name, str):
        raise ConfigError(f"{where}: the name must be a string. Got {name!r}.")
    with _errors_in(where):
        return registry.create(name, **values)


def _names_clients(data: DataOptions) -> bool:
    return data.source.names_clients(data.folder)


def _scenario(value: Any, data_name_clients: bool) -> Scenario:
    """Build a scenario. If it has no partition and the data name their clients, these are the federation's."""
    table = {"preset": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping):
        raise ConfigError(f"The section [scenario] must be a table or the name of a preset. Got {short_repr(value)}.")
    if data_name_clients and not _has_partition(table):
        table = {**table, "partition": {"name": "natural"}}
    with _errors_in("In the section [scenario]"):
        return Scenario.from_dict(table)


def _has_partition(scenario: Any) -> bool:
    return isinstance(scenario, str) or "partition" in scenario or "preset" in scenario


# -- runs ------------------------------------------------------------------------------------------------------


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+=-]+", "-", text).strip("-.") or "run"


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


class Configuration:
    """A configuration whose parts are checked and built when they are needed, each table once.

    A change gives a new configuration. It shares every part that stays the same, and these are not built again.

    >>> base = Configuration({"run": {"rounds": 5}})
    >>> changed = base.changed({"local": {"lr": 0.1}})
    >>> changed.plans[0].options is base.plans[0].options, changed.plans[0].local.lr
    (True, 0.1)
    """

    def __init__(self, table: Table, built: dict[tuple[Any, ...], Any] | None = None) -> None:
        _check_keys("The configuration", table, _TOP, _suggest_section)
        self.table = table
        self._built = {} if built is None else built

    def changed(self, change: Table) -> Configuration:
        """Return the configuration after a change, as :func:`~fedcohort.simulate.config.toml.merge_tables` makes it."""
        return self.replaced(self._merge(self.table, change))

    def replaced(self, table: Table) -> Configuration:
        """Return the configuration ``table``, which shares parts with this one."""
        return Configuration(table, self._built)

    def _once(self, build: Callable[..., T], *arguments: Any) -> T:
        """Return what ``build`` makes of these very objects; it is called once for them."""
        key = (build, *map(id, arguments))
        if key not in self._built:
            # The arguments are kept, because another object could get the id of one that is gone.
            self._built[key] = (build(*arguments), arguments)
        return self._built[key][0]  # type: ignore[no-any-return]

    def _merge(self, table: Table, change: Table) -> dict[str, Any]:
        # Once for each pair of tables, so that several selectors in one setting share the result.
        merged = {key: self._once(merge_value, key, table.get(key), value) for key, value in change.items()}
        return {**table, **merged}

    # -- sections ----------------------------------------------------------------------------------------------

    @property
    def task(self) -> Task:
        """The section ``[task]``, which settings cannot change."""
        return self._task(self.table)

    @property
    def data(self) -> DataOptions:
        """The section ``[data]``, which settings may change."""
        return self._data(self.table)

    @property
    def scenario(self) -> Scenario:
        """The section ``[scenario]``, which settings may change."""
        return self._scenario(self.table)

    def scenario_of(self, table: Table) -> Scenario:
        """Return the scenario of another configuration, whatever its data."""
        return self._once(_scenario, table.get("scenario", _EMPTY), False)

    @property
    def data_name_clients(self) -> bool:
        """Whether the data say which client each sample belongs to."""
        return self._once(_names_clients, self.data)

    def _task(self, table: Table) -> Task:
        return self._once(_task, table.get("task", _EMPTY))

    def _data(self, table: Table) -> DataOptions:
        return self._once(_data, table.get("data", _EMPTY), self._task(table).target)

    def _scenario(self, table: Table) -> Scenario:
        named = self._once(_names_clients, self._data(table))
        return self._once(_scenario, table.get("scenario", _EMPTY), named)

    def _section(self, name: str, table: Table) -> Any:
        return self._once(_section, name, table.get(name, _EMPTY))

    def _named(self, name: str, table: Table) -> Any:
        return self._once(_build_by_name, name, table.get(name, _EMPTY))

    # -- runs --------------------------------------------------------------------------------------------------

    @property
    def _seeds(self) -> list[int]:
        return self._once(_seeds, self.table.get("seeds", _ONE_SEED))

    @property
    def _selectors(self) -> dict[str, Any]:
        """The table of each selector by label, with every variant of a sweep as its own selector."""
        selectors = self.table.get("selectors") or _UNIFORM
        if not isinstance(selectors, Mapping):
            raise ConfigError(
                f"[selectors] must hold one table per selector, [selectors.LABEL]. Got {short_repr(selectors)}."
            )
        return self._once(expand_sweep, selectors, self.table.get("sweep", _EMPTY))

    @property
    def _settings(self) -> list[Table]:
        settings = self.table.get("settings", [])
        if not isinstance(settings, list) or not all(isinstance(item, Mapping) for item in settings):
            raise ConfigError(f"'settings' must be tables, [[settings]]. Got {short_repr(settings)}.")
        return settings

    @cached_property
    def plans(self) -> tuple[RunPlan, ...]:
        """A run for each setting, selector and seed, in this order."""
        seeds, selectors, settings = self._seeds, self._selectors, self._settings
        _check_count(max(len(settings), 1), len(selectors), len(seeds))
        plans: list[RunPlan] = []
        for number, setting in enumerate(settings or [{}]):
            change = dict(setting)
            title = str(change.pop("name", f"setting-{number}" if settings else ""))
            _check_keys(f"The setting {title!r}", change, ["name", "data", *_SECTIONS, "scenario", *_NAMED])
            if "data" in change and isinstance(self.table.get("data"), Dataset):
                raise ConfigError(f"The setting {title!r} cannot change data that were passed as arrays.")
            changed = self._merge(self.table, change)
            for label in selectors:
                parts = self._parts(changed, label)
                stem, flat = _file_stem(label, title), _flatten(change)
                plans += [
                    RunPlan(id=f"{stem}-s{seed}", label=label, seed=seed, setting=flat, setting_name=title, **parts)
                    for seed in seeds
                ]
        _check_ids(plans)
        return tuple(_with_shadows(plans))

    def _parts(self, table: Table, label: str) -> dict[str, Any]:
        """Return the parts that the runs of one selector in one setting share."""
        name, selector, own = self._once(_selector, label, self._selectors[label])
        merged = self._merge(table, own)
        for section, default in _parts_of(selector).items():
            if merged.get(section):
                continue
            merged[section] = default
            try:
                self._named(section, merged)
            except ConfigError as error:
                raise ConfigError(
                    f"The {section} that the selector {name!r} comes with cannot be used. {error.message}",
                    hint=error.hint,
                ) from error
        return {
            "selector": selector,
            "task": self._task(merged),
            "data": self._data(merged),
            "scenario": self._scenario(merged),
            **{key: self._section(key, merged) for key in ("model", "local")},
            **{key: self._named(key, merged) for key in _NAMED},
            "options": self._section("run", merged),
            "rules": self._section("rules", merged) if merged.get("rules") else None,
        }

    def experiment(self) -> Experiment:
        """Check what concerns several parts, and return the experiment."""
        name = self.table.get("name", "experiment")
        if not Text().admits(name):
            raise ConfigError(f"'name' must be a non-empty string. Got {name!r}.")
        options: RunOptions = self._section("run", self.table)
        plans = self.plans
        _check_targets(options.targets, self.task)
        titles = list(dict.fromkeys(plan.setting_name for plan in plans if plan.setting_name))
        _check_known("baseline", options.baseline, "label of a selector", list(self._selectors))
        _check_known("reference", options.reference, "name of a setting", titles)
        complete = self._complete(name)
        try:
            to_toml(complete).encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"A configuration must be valid UTF-8. Got {error.object[error.start : error.end]!r}."
            ) from None
        notes = _notes(complete, self._selectors, plans)
        if any(self._uses_named_clients(self._merge(self.table, setting)) for setting in self._settings or [{}]):
            notes = ("the data name their clients, so the federation consists of these (partition 'natural')", *notes)
        return Experiment(name, complete, plans, options, notes)

    def _uses_named_clients(self, table: Table) -> bool:
        return not _has_partition(table.get("scenario", _EMPTY)) and self._once(_names_clients, self._data(table))

    # -- the complete configuration ----------------------------------------------------------------------------

    def _complete(self, name: str) -> dict[str, Any]:
        """Return the configuration with every default filled in, so that building it again gives the same runs."""
        table, settings, task = self.table, self._settings, self.task
        complete: dict[str, Any] = {"name": name, "seeds": self._seeds, "data": _complete_data(self.data, task)}
        complete["task"] = {"name": TASKS.reference(type(task)) or task.name, **values_of(task)}
        # Having no rules differs from having empty ones.
        sections = [section for section in _SECTIONS if section != "rules" or table.get("rules")]
        complete |= {section: values_of(self._section(section, table)) for section in sections}
        complete["scenario"] = self._complete_scenario()
        # If only a setting names one, a default here would override what selectors bring in the other settings.
        named = {section for section in _REASONS if section in table or any(section in item for item in settings)}
        described = [section for section in _NAMED if section not in named or table.get(section)]
        complete |= {section: _describe(section, self._named(section, table)) for section in described}
        complete["selectors"] = {label: self._complete_selector(label, named) for label in self._selectors}
        if settings:
            complete["settings"] = [
                {key: _with_absolute_name(key, part) for key, part in setting.items()} for setting in settings
            ]
        return complete

    def _complete_scenario(self) -> dict[str, Any]:
        if not any("scenario" in setting for setting in self._settings):
            return self.scenario.to_dict()
        # A setting that changes parts of a preset must still find the preset by name, so defaults are not filled in.
        unfilled: dict[str, Any] = self.table.get("scenario", {})
        return {**unfilled, "partition": {"name": "natural"}} if self._uses_named_clients(self.table) else unfilled

    def _complete_selector(self, label: str, named: Container[str]) -> dict[str, Any]:
        """Return a selector's table with every parameter, and the parts it brings for sections not in ``named``."""
        name, selector, own = self._once(_selector, label, self._selectors[label])
        name = SELECTORS.reference(type(selector)) or name  # works from any folder
        own = {key: _with_absolute_name(key, value) for key, value in own.items()}
        for section, default in _parts_of(selector).items():
            if section not in named and section not in own:
                own[section] = _describe(section, self._named(section, {section: default}))
        return {"name": name, **values_of(selector), **own}


def _check_count(settings: int, selectors: int, seeds: int) -> None:
    # Checked before anything is built, so that a typing error in a sweep cannot fill the memory with plans.
    count = settings * selectors * seeds
    if count > MAX_RUNS:
        raise ConfigError(
            f"An experiment has at most {MAX_RUNS:,} runs. Got {count:,}: {settings} settings x {selectors} selectors "
            f"x {seeds} seeds."
        )


def _check_ids(plans: Sequence[RunPlan]) -> None:
    ids: set[str] = set()
    for plan in plans:
        if plan.id in ids:
            raise ConfigError(
                f"Two runs would both be called {plan.id!r}.", hint="give settings and selectors different names"
            )
        ids.add(plan.id)


def _check_known(option: str, value: str | None, kind: str, known: list[str]) -> None:
    if value is not None and value not in known:
        raise ConfigError(
            f"The {option} {value!r} is not the {kind}. Known: {', '.join(known) or 'none'}.",
            hint=suggest(value, known),
        )


def _check_targets(targets: Sequence[float], task: Task) -> None:
    wrong = [target for target in targets if task.judged_by.share and not 0 <= target <= 1]
    if wrong:
        raise ConfigError(
            f"In the section [run]: the 'targets' are values of {task.judged_by.name}, in [0, 1]. Got {wrong[0]:g}.",
            hint="62% is 0.62",
        )


def _parts_of(selector: Selector[Any]) -> dict[str, str]:
    """Return the filter and aggregator that a selector needs, for a configuration that names none."""
    parts = {}
    if Signal.KEPT in selector.requires:
        parts["filter"] = selector.default_filter
    if selector.aggregator is not None and selector.aggregator != _DEFAULTS["aggregator"]:
        parts["aggregator"] = selector.aggregator
    return parts


_REASONS = {
    "filter": "it learns from which models a filter keeps",
    "aggregator": "its weights are unbiased only with this aggregator",
}


def _notes(complete: Mapping[str, Any], selectors: Mapping[str, Any], plans: Sequence[RunPlan]) -> tuple[str, ...]:
    """Return notes about parts that selectors brought themselves, and about aggregators that do not suit them."""
    notes = [
        f"{label} comes with the {section} {entry[section]['name']!r}, because {reason}"
        for section, reason in _REASONS.items()
        for label, entry in complete["selectors"].items()
        if section in entry and section not in _table(label, selectors[label])
    ]
    for plan in plans:
        needed, configured = plan.selector.aggregator, plan.aggregator.name
        if configured == needed or (needed is None and configured != InverseProbability.name):
            continue
        weights = "makes no weights for it" if needed is None else f"makes weights for the aggregator {needed!r}"
        notes.append(
            f"{plan.label} is configured with the aggregator {configured!r} but {weights}, so its average may be biased"
        )
    return tuple(dict.fromkeys(notes))


def _with_shadows(plans: Sequence[RunPlan]) -> list[RunPlan]:
    """Give each run the selectors that shadow it; a selector does not shadow its own runs."""
    selectors = {plan.label: plan.selector for plan in plans}
    for label in dict.fromkeys(label for plan in plans for label in plan.options.shadows):
        _check_known("shadow", label, "label of a selector", list(selectors))
    return [
        replace(plan, shadows={label: selectors[label] for label in plan.options.shadows if label != plan.label})
        for plan in plans
    ]


def _file_stem(label: str, title: str) -> str:
    """Return the beginning of the names of a run's files, for a selector in a setting."""
    stem = _slug(label) + (f"-{_slug(title)}" if title else "")
    if len(stem) > _MAX_NAME:
        names = " and ".join(short_repr(name, 60) for name in (label, title) if name)
        raise ConfigError(
            f"A run's files are named after its selector's label and its setting's name. Together these have "
            f"{len(stem)} characters, but at most {_MAX_NAME} are allowed. Got {names}.",
            hint="give the selector or the setting a shorter name",
        )
    return stem


def _selector(label: str, raw: Any) -> tuple[str, Selector[Any], dict[str, Any]]:
    """Return the name and the selector of ``[selectors.LABEL]``, and the sections in it."""
    entry = _table(f"[selectors.{label}]", raw)
    own = {key: entry.pop(key) for key in _PER_SELECTOR if key in entry}
    name = entry.pop("name", label)
    selector = _create(SELECTORS, name, entry, f"In [selectors.{label}]")
    _check_requires(selector, name)
    return name, selector, own


def _check_requires(selector: Selector[Any], name: str) -> None:
    with user_code_errors(f"The selector {name!r} cannot say what it requires", name):
        signals: object = selector.requires
    if not isinstance(signals, frozenset) or not all(isinstance(signal, Signal) for signal in signals):
        raise ConfigError(
            f"The selector {name!r} must require a frozenset of signals. Got {short_repr(signals)}.",
            hint="for example frozenset({Signal.LOSS})",
        )


# -- the complete configuration --------------------------------------------------------------------------------


def values_of(thing: Any) -> dict[str, Any]:
    """Return the parameters of a configurable object as plain values, without those that are None."""
    values = {info.name: getattr(thing, info.name) for info in parameters(type(thing))}
    return {key: _without_none(value) for key, value in values.items() if value is not None}


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return value


def _describe(section: str, built: Any) -> dict[str, Any]:
    """Return a section with its name and all its parameters, as plain values."""
    return {"name": _NAMED[section].reference(type(built)) or built.name, **values_of(built)}


def _with_absolute_name(section: str, value: Any) -> Any:
    """Return a section in which a user's own class has a name that works from any folder."""
    if section not in ("data", "model", "aggregator", "filter"):
        return value
    if isinstance(value, Mapping):
        return {**value, "name": _absolute_name(value["name"])} if "name" in value else value
    return _absolute_name(value)


def _complete_data(data: DataOptions, task: Task) -> dict[str, Any]:
    """Return the section ``[data]``; for data in memory it names the file that the experiment writes them to."""
    if not isinstance(data.source, InMemory):
        return {**values_of(data), **values_of(data.source)}
    integers = data.source.dataset.x_train.dtype.kind == "i"
    return {"name": "file", "path": MEMORY_FILE, "target": task.target, "integers": integers}
