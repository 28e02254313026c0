"""Describe a selector as data, and rebuild it from a description in a journal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedcohort.core.errors import JournalError
from fedcohort.core.params import parameters
from fedcohort.core.protocol import SELECTORS, Selector
from fedcohort.core.registry import is_reference


def selector_name(selector: Selector[Any]) -> str:
    """Return a selector's name for messages, in quotes."""
    return repr(getattr(selector, "name", type(selector).__name__))


def describe(selector: Selector[Any]) -> dict[str, Any]:
    """Return all that is needed to rebuild a selector: registered name, class, reference, parameters."""
    cls = type(selector)
    return {
        "name": vars(cls).get("name"),
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "reference": SELECTORS.reference(cls),
        "params": {info.name: getattr(selector, info.name) for info in parameters(cls)},
    }


def described_name(spec: Any) -> str:
    """Return the name in a description as a journal holds it, or else the class."""
    return str(spec.get("name") or spec.get("class") or "unknown") if isinstance(spec, Mapping) else str(spec)


def class_of(spec: Mapping[str, Any]) -> type[Selector[Any]] | None:
    """Return the class that a description names, or None if it is neither registered nor imported.

    A journal is untrusted data, so nothing is imported just because a journal names it. A user who trusts the selector
    imports it first: with ``SELECTORS.get(reference)``, by importing its module, or with ``--selector`` on the command
    line.
    """
    name, reference = spec["name"], spec.get("reference")
    kind: Any = None
    if name is not None and name in SELECTORS:
        kind = SELECTORS.get(name)
    elif reference is not None:
        kind = SELECTORS.find_imported(reference)
    return kind if isinstance(kind, type) else None


def untrusted_reference(spec: Mapping[str, Any]) -> str | None:
    """Return the first reference in a description that has not been imported yet, or None; see :func:`class_of`."""
    if class_of(spec) is None:
        return str(spec.get("reference") or spec["class"])
    # A selector that wraps another has a reference to it among its parameters.
    references = (text for text in _texts(spec["params"]) if is_reference(text))
    return next((text for text in references if SELECTORS.find_imported(text) is None), None)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def rebuild_selector(spec: Mapping[str, Any], selector: Selector[Any] | None, path: Path | None) -> Selector[Any]:
    """Return the selector a journal was written with: built from the registry, or ``selector`` if it is the same."""
    if selector is None:
        untrusted = untrusted_reference(spec)
        if untrusted is not None:
            raise JournalError(
                f"The journal {path} was written with the selector {untrusted}, which is not one of fedcohort's; code "
                "is not imported just because a journal names it.",
                hint=f"if you trust it, name it yourself: --selector {untrusted} on the command line, "
                "Session.open(path, selector=...) in Python",
            )
        kind = class_of(spec)
        assert kind is not None
        _check_version(spec, kind, path)
        name = spec["name"] if spec["name"] in SELECTORS else SELECTORS.reference(kind)
        return SELECTORS.create(name or "", **spec["params"])
    now = describe(selector)
    if spec["name"] == now["name"]:
        _check_version(spec, type(selector), path)
    original = (spec["name"] or spec["class"], _tuples_as_lists(spec["params"]))
    current = (now["name"] or now["class"], _tuples_as_lists(now["params"]))
    if original != current:
        raise JournalError(
            f"The journal {path} was written with selector {original[0]!r} {original[1]}; it cannot be continued with "
            f"{current[0]!r} {current[1]}.",
            hint="open it without a selector, or start a new journal",
        )
    return selector


def _check_version(spec: Mapping[str, Any], cls: type[Selector[Any]], path: Path | None) -> None:
    """Raise an error if the selector of this version has other parameters, or does not accept a recorded value."""
    known, recorded = {info.name: info.constraint for info in parameters(cls)}, spec["params"]
    for name in sorted(known.keys() | recorded.keys()):
        if name in known and name in recorded and known[name].admits(recorded[name]):
            continue
        had = f"had the parameter {name}={recorded[name]!r}" if name in recorded else f"had no parameter {name}"
        raise JournalError(
            f"The journal {path} was written with {spec['name'] or spec['class']!r} of another version of fedcohort, "
            f"which {had}; this version cannot continue it.",
            hint="finish it with the version that wrote it, or start a new journal",
        )


def _tuples_as_lists(params: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in params.items()}
