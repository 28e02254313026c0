"""``fedcohort list``: show everything that can be used by name."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from enum import StrEnum
from typing import Annotated, Any

import typer

from fedcohort.cli import options
from fedcohort.cli.output import Format, out, print_json, table
from fedcohort.core.params import parameters
from fedcohort.core.registry import Registry
from fedcohort.core.terminal import say


class _Kind(StrEnum):
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
    _Kind.SELECTORS: "fedcohort.core.protocol:SELECTORS",
    _Kind.FILTERS: "fedcohort.training.filters:FILTERS",
    _Kind.AGGREGATORS: "fedcohort.training.aggregators:AGGREGATORS",
    _Kind.LABELS: "fedcohort.simulate.label_sharing:LABEL_SHARING",
    _Kind.PARTITIONS: "fedcohort.scenario:PARTITIONS",
    _Kind.DATASETS: "fedcohort.simulate.data:DATASETS",
    _Kind.TASKS: "fedcohort.simulate.tasks:TASKS",
    _Kind.MODELS: "fedcohort.simulate.models:MODELS",
}


def _summary(item: Any) -> str:
    """Return the first paragraph of an item's documentation as plain text, without reST and TeX."""
    text = (inspect.getdoc(item) or "").split("\n\n")[0].replace("\n", " ")
    text = re.sub(r"\[(\w+)\]_", r"\1", text)
    text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", text)
    text = re.sub(r":math:`([^`]*)`", lambda found: re.sub(r"\\[,;! ]|[{}]", "", found[1]).replace("\\", ""), text)
    return re.sub(r":\w+:`~?(?:[\w.]+\.)?([^`]+)`", r"\1", text).replace("``", "")


_ORIGINS = {
    "fedcohort.selectors.papers.": "paper",  # one of the five papers
    "fedcohort.selectors.baselines.": "baseline",  # of the literature
    "fedcohort.selectors.ours.": "ours",
}


def _entry(name: str, item: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "summary": _summary(item)}
    if not isinstance(item, type):
        return entry
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
        origins = (kind for package, kind in _ORIGINS.items() if item.__module__.startswith(package))
        entry["origin"] = next(origins, "yours")
        if not any(p["required"] for p in entry["parameters"]):
            instance = item()
            entry["signals"] = sorted(s.name for s in instance.requires)
            if getattr(instance, "aggregator", None):
                entry["aggregator"] = instance.aggregator
    if reason := getattr(item, "starves", None):
        entry["starves"] = reason
    return entry


def list_(
    kind: Annotated[_Kind, typer.Argument(help="What to list.")] = _Kind.SELECTORS,
    name: Annotated[str | None, typer.Argument(help="Show only this one, with its parameters.")] = None,
    format: options.FormatOption = Format.TABLE,
) -> None:
    """List selectors, datasets, presets, models and more, by name.

    For example:

    - fedcohort list
    - fedcohort list selectors fedcor
    - fedcohort list datasets --format json
    """
    if kind is _Kind.PRESETS:
        from fedcohort.scenario import PRESETS
        from fedcohort.scenario.presets import find_preset

        entries: list[dict[str, Any]] = [
            {
                "name": key,
                "summary": f"{item.meaning} ({item.source})",
                "cohort": item.cohort,
                "scenario": item.scenario.describe().splitlines(),
            }
            for key, item in (PRESETS if name is None else {name: find_preset(name)}).items()
        ]
    else:
        module, _, attribute = _REGISTRIES[kind].partition(":")
        things: Registry[Any] = getattr(importlib.import_module(module), attribute)
        entries = [_entry(n, things.get(n)) for n in (things.names() if name is None else [name])]
    if format is Format.JSON:
        print_json(entries if name is None else entries[0])
    elif name is not None:
        _print_entry(entries[0])
    elif kind is _Kind.SELECTORS:
        rows = [(e["name"], e["origin"], e["summary"], ", ".join(e.get("signals", []))) for e in entries]
        out().print(table(["name", "from", "what it does", "needs"], rows))
    else:
        out().print(table(["name", "what it does"], [(e["name"], e["summary"]) for e in entries]))


def _print_entry(entry: dict[str, Any]) -> None:
    """Print one entry with its parameters."""
    console = out()
    say(console, f": {entry['summary']}", lead=entry["name"])
    facts = {"origin": "from", "signals": "needs", "aggregator": "unbiased with the aggregator"}
    for key, title in {**facts, "starves": "may leave clients out"}.items():
        if value := entry.get(key):
            say(console, f"{title}: {', '.join(value) if isinstance(value, list) else value}")
    for line in entry.get("scenario", []):
        say(console, line)
    if entry.get("parameters"):
        parts = [(p["name"], repr(p["default"]), p["allowed"], p["meaning"]) for p in entry["parameters"]]
        console.print(table(["parameter", "default", "allowed", "meaning"], parts))
