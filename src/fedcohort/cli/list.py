"""``fedcohort list``: show everything that can be used by name."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from fedcohort.cli.options import FormatOption
from fedcohort.cli.output import Format, out, print_json, table
from fedcohort.core.params import parameters
from fedcohort.core.registry import Registry
from fedcohort.core.terminal import say


class Kind(StrEnum):
    """What can be listed."""

    SELECTORS = "selectors"
    FILTERS = "filters"
    AGGREGATORS = "aggregators"
    LABELS = "labels"
    PARTITIONS = "partitions"
    PRESETS = "presets"
    DATASETS = "datasets"
    TASKS = "tasks"
    MODELS = "models"


# Names instead of imports: half of these modules import torch, which takes seconds, and only one is needed.
_REGISTRIES = {
    Kind.SELECTORS: "fedcohort.core.protocol:SELECTORS",
    Kind.FILTERS: "fedcohort.training.filters:FILTERS",
    Kind.AGGREGATORS: "fedcohort.training.aggregators:AGGREGATORS",
    Kind.LABELS: "fedcohort.simulate.label_sharing:LABEL_SHARING",
    Kind.PARTITIONS: "fedcohort.scenario:PARTITIONS",
    Kind.DATASETS: "fedcohort.simulate.data:DATASETS",
    Kind.TASKS: "fedcohort.simulate.tasks:TASKS",
    Kind.MODELS: "fedcohort.simulate.models:MODELS",
}


def registry(kind: Kind) -> Registry[Any]:
    """Return the registry of a kind."""
    module, _, name = _REGISTRIES[kind].partition(":")
    result: Registry[Any] = getattr(importlib.import_module(module), name)
    return result


def _summary(item: Any) -> str:
    text = (inspect.getdoc(item) or "").split("\n\n")[0].replace("\n", " ")
    text = re.sub(r"\[(\w+)\]_", r"\1", text)
    text = re.sub(r":math:`([^`]*)`", lambda found: _without_tex(found[1]), text)
    return re.sub(r":\w+:`~?(?:[\w.]+\.)?([^`]+)`", r"\1", text).replace("``", "")


def _without_tex(formula: str) -> str:
    """Return a formula as plain text."""
    plain = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", formula)
    return re.sub(r"\\[,;! ]|[{}]", "", plain).replace("\\", "")


_ORIGINS = {
    "fedcohort.selectors.papers": "paper",  # one of the five papers
    "fedcohort.selectors.baselines": "baseline",  # of the literature
    "fedcohort.selectors.ours": "ours",
}


def _origin(item: Any) -> str:
    module = str(getattr(item, "__module__", ""))
    return next((kind for package, kind in _ORIGINS.items() if module.startswith(f"{package}.")), "yours")


def _entry(name: str, item: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "summary": _summary(item)}
    if isinstance(item, type):
        entry["parameters"] = [
            {
                "name": info.name,
                "default": None if info.default is dataclasses.MISSING else info.default,
                "required": info.default is dataclasses.MISSING,
                "allowed": info.constraint.describe(),
                "meaning": info.meaning,
            }
            for info in parameters(item)
        ]
        if hasattr(item, "requires"):
            entry["origin"] = _origin(item)
        if hasattr(item, "requires") and not any(p["required"] for p in entry["parameters"]):
            instance = item()
            entry["signals"] = sorted(s.name for s in instance.requires)
            if getattr(instance, "aggregator", None):
                entry["aggregator"] = instance.aggregator
        reason = getattr(item, "starves", None)
        if reason:
            entry["starves"] = reason
    return entry


def _presets(name: str | None) -> list[dict[str, Any]]:
    from fedcohort.scenario import PRESETS, preset

    if name is not None:
        preset(name)  # an unknown name is an error that suggests the nearest one
    chosen = PRESETS if name is None else {name: PRESETS[name]}
    return [
        {
            "name": key,
            "summary": f"{item.meaning} ({item.source})",
            "cohort": item.cohort,
            "scenario": item.scenario.describe().splitlines(),
        }
        for key, item in chosen.items()
    ]


def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.")] = Kind.SELECTORS,
    name: Annotated[str | None, typer.Argument(help="Show only this one, with its parameters.")] = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """List selectors, datasets, presets, models and more, by name.

    For example:

    - fedcohort list
    - fedcohort list selectors fedcor
    - fedcohort list datasets --format json
    """
    if kind is Kind.PRESETS:
        entries = _presets(name)
    else:
        things = registry(kind)
        entries = [_entry(n, things.get(n)) for n in (things.names() if name is None else [name])]
    if format is Format.JSON:
        print_json(entries if name is None else entries[0])
    elif name is not None:
        _print_entry(entries[0])
    elif kind is Kind.SELECTORS:
        rows = [(e["name"], e["origin"], e["summary"], ", ".join(e.get("signals", []))) for e in entries]
        out().print(table(["name", "from", "what it does", "needs"], rows))
    else:
        out().print(table(["name", "what it does"], [(e["name"], e["summary"]) for e in entries]))


def _print_entry(entry: Mapping[str, Any]) -> None:
    """Print one entry with its parameters."""
    console = out()
    say(console, f": {entry['summary']}", lead=entry["name"])
    if entry.get("origin"):
        say(console, f"from: {entry['origin']}")
    if entry.get("signals"):
        say(console, f"needs: {', '.join(entry['signals'])}")
    if entry.get("aggregator"):
        say(console, f"unbiased with the aggregator: {entry['aggregator']}")
    if entry.get("starves"):
        say(console, f"may leave clients out: {entry['starves']}")
    for line in entry.get("scenario", []):
        say(console, line)
    if entry.get("parameters"):
        parts = [(p["name"], repr(p["default"]), p["allowed"], p["meaning"]) for p in entry["parameters"]]
        console.print(table(["parameter", "default", "allowed", "meaning"], parts))
