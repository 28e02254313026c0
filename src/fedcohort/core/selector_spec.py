"""Describe a selector as data, and rebuild it from a description in a journal."""

from __future__ import annotations

import dataclasses
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
    """Return everything needed to rebuild a selector: registered name, class, reference, parameters."""
    cls = type(selector)
    return {
        "name": vars(cls).get("name"),
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "reference": SELECTORS.reference(cls),
        "params": {info.name: getattr(selector, info.name) for info in parameters(cls)},
    }


def current_name(spec: Mapping[str, Any]) -> str | None:
    """Return the registered name under which the selector of a description is found now.

    A variant that gave its name to the form of the paper says so in ``formerly``. Its journals are recognised by
    parameters that the paper's form does not have, or does not allow.
    """
    name: str | None = spec["name"]
    if name is None or name not in SELECTORS or _allows(SELECTORS.get(name), spec["params"]):
        return name
    kinds = {other: SELECTORS.get(other) for other in SELECTORS}
    later = (o for o, kind in kinds.items() if name in getattr(kind, "formerly", ()) and _allows(kind, spec["params"]))
    return next(later, name)


def _allows(kind: Any, params: Mapping[str, Any]) -> bool:
    constraints = {info.name: info.constraint for info in parameters(kind)} if isinstance(kind, type) else {}
    return all(name in constraints and constraints[name].admits(value) for name, value in params.items())


def class_of(spec: Mapping[str, Any]) -> type[Selector[Any]] | None:
    """Return the class that a description names, or None if it is neither registered nor imported.

    A journal is untrusted data, so a file or module it names is never imported because of it. A user who trusts the
    selector imports it first: with ``SELECTORS.get(reference)``, by importing its module, or with ``--selector`` on the
    command line.
    """
    name, reference = current_name(spec), spec.get("reference")
    found: Any = None
    if name is not None and name in SELECTORS:
        found = SELECTORS.get(name)
    elif reference is not None:
        found = SELECTORS.find_imported(reference)
    return found if isinstance(found, type) else None


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


def rebuild_selector(spec: Mapping[str, Any], given: Selector[Any] | None, path: Path | None) -> Selector[Any]:
    """Return the selector a journal was written with: built from the registry, or ``given`` if it is the same."""
    spec = {**spec, "name": current_name(spec)}
    if given is None:
        lacking = untrusted_reference(spec)
        if lacking is not None:
            raise JournalError(
                f"The journal {path} was written with the selector {lacking}, which is not one of fedcohort's; code is "
                "not imported because a journal names it.",
                hint=f"if you trust it, name it yourself: --selector {lacking} on the command line, "
                "Session.open(path, selector=...) in Python",
            )
        known = class_of(spec)
        assert known is not None
        _check_version(spec, known, path)
        return SELECTORS.create(spec["name"] if spec["name"] in SELECTORS else SELECTORS.reference(known) or "",
                                **_as_recorded(known, spec["params"], spec["params"]))  # fmt: skip
    now, recorded = describe(given), spec["params"]
    if spec["name"] == now["name"]:
        _check_version(spec, type(given), path)
        then = _as_recorded(type(given), recorded, now["params"])
        recorded = _as_recorded(type(given), recorded, recorded)
        if then != now["params"]:
            given = dataclasses.replace(given, **then)  # type: ignore[type-var]
            now = describe(given)
    ours = (spec["name"] or spec["class"], _plain(recorded))
    theirs = (now["name"] or now["class"], _plain(now["params"]))
    if ours != theirs:
        raise JournalError(
            f"The journal {path} was written with selector {ours[0]!r} {ours[1]}; it cannot be continued with "
            f"{theirs[0]!r} {theirs[1]}.",
            hint="open it without a selector, or start a new journal",
        )
    return given


def _check_version(spec: Mapping[str, Any], cls: type[Selector[Any]], path: Path | None) -> None:
    """Refuse a description with parameters, or values of them, that the selector of this version no longer has."""
    constraints = {info.name: info.constraint for info in parameters(cls)}
    gone = [
        f"{name}={value!r}"
        for name, value in sorted(spec["params"].items())
        if name not in constraints or not constraints[name].admits(value)
    ]
    if gone:
        raise JournalError(
            f"The journal {path} was written with {spec['name'] or spec['class']!r} of another version of fedcohort, "
            f"which had the parameter {gone[0]}; this version cannot continue it.",
            hint="finish it with the version that wrote it, or start a new journal",
        )


def _as_recorded(cls: type[Selector[Any]], recorded: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as they were in the version that wrote ``recorded``, before later ones got new defaults."""
    defaults = {info.name: info.default for info in parameters(cls)}
    # Only where the caller left the default: a value that was given is meant.
    later = [n for n in cls.added if n not in recorded and now.get(n, defaults[n]) == defaults[n]]
    return {**now, **{n: cls.added[n] for n in later}}


def _plain(params: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in params.items()}
