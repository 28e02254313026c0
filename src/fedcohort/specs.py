"""What it takes to build a selector again: its registered name, or the file or module of its class, and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcohort.errors import FedcohortError, JournalError
from fedcohort.params import parameters
from fedcohort.protocol import SELECTORS, Selector


def selector_name(selector: Selector[Any]) -> str:
    """Return how to call a selector in a message."""
    return repr(getattr(selector, "name", type(selector).__name__))


def describe(selector: Selector[Any]) -> dict[str, Any]:
    """Return what it takes to build a selector again: registered name, class, reference, parameters."""
    cls = type(selector)
    return {
        "name": vars(cls).get("name"),
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "reference": SELECTORS.reference(cls),
        "params": {info.name: getattr(selector, info.name) for info in parameters(cls)},
    }


def class_of(spec: Mapping[str, Any]) -> type[Selector[Any]] | None:
    """Return the class that a description is about, None where it is not known here.

    A class that came in by reference is imported again from where it was.
    """
    name, reference = spec["name"], spec.get("reference")
    found: Any = None
    if name is not None and name in SELECTORS:
        found = SELECTORS.get(name)
    elif reference is not None:
        found = SELECTORS.get(reference)
    return found if isinstance(found, type) else None


def rebuilt(spec: Mapping[str, Any], given: Selector[Any] | None, path: Path | None) -> Selector[Any]:
    """Return the selector a journal was written with, from the registry or checked against ``given``."""
    if given is None:
        try:
            known = class_of(spec)
        except FedcohortError as error:
            raise JournalError(
                f"The journal {path} was written with the selector {spec['reference']}: {error.message}",
                hint="put the file back, or pass the selector: Session.open(path, selector=...)",
            ) from error
        if known is None:
            raise JournalError(
                f"The journal {path} was written with the unregistered selector {spec['class']}.",
                hint="pass it: Session.open(path, selector=...)",
            )
        return SELECTORS.create(spec["name"] if spec["name"] in SELECTORS else spec["reference"], **spec["params"])
    now = describe(given)
    ours = (spec["name"] or spec["class"], _plain(spec["params"]))
    theirs = (now["name"] or now["class"], _plain(now["params"]))
    if ours != theirs:
        raise JournalError(
            f"The journal {path} was written with selector {ours[0]!r} {ours[1]}; it cannot be continued with "
            f"{theirs[0]!r} {theirs[1]}.",
            hint="open it without a selector, or start a new journal",
        )
    return given


def _plain(params: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in params.items()}
