"""What it takes to build a selector again: its registered name or class, and its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcohort.errors import JournalError
from fedcohort.params import parameters
from fedcohort.protocol import SELECTORS, Selector


def selector_name(selector: Selector[Any]) -> str:
    """Return how to call a selector in a message."""
    return repr(getattr(selector, "name", type(selector).__name__))


def describe(selector: Selector[Any]) -> dict[str, Any]:
    """Return what it takes to build a selector again: registered name, class, parameters."""
    cls = type(selector)
    return {
        "name": getattr(cls, "name", None),
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "params": {info.name: getattr(selector, info.name) for info in parameters(cls)},
    }


def rebuilt(spec: Mapping[str, Any], given: Selector[Any] | None, path: Path | None) -> Selector[Any]:
    """Return the selector a journal was written with, from the registry or checked against ``given``."""
    if given is None:
        if spec["name"] is None:
            raise JournalError(
                f"The journal {path} was written with the unregistered selector {spec['class']}.",
                hint="pass it: Session.open(path, selector=...)",
            )
        return SELECTORS.create(spec["name"], **spec["params"])
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
