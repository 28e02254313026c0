"""The section ``[selectors]`` for the selectors that a user names or passes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from fedcohort.core.errors import FedcohortError, InputError
from fedcohort.core.protocol import SELECTORS, Selector
from fedcohort.core.registry import is_reference
from fedcohort.core.text import short_repr
from fedcohort.simulate.config.experiment import Table, values_of

_SELECTORS = "names, selectors or selector classes, or a mapping from labels to parameters"


def selector_entries(selectors: object, known: Table | None = None) -> dict[str, Any]:
    """Return the section ``[selectors]`` for names, selectors, classes, or a mapping from labels to parameters.

    Parameters
    ----------
    selectors : object
        One or several of these.
    known : mapping, optional
        ``[selectors]`` of the configuration to start from. A name in it keeps its parameters.

    Examples
    --------
    >>> selector_entries(["uniform", {"eager": {"name": "fedcor", "warmup": 5}}])
    {'uniform': {}, 'eager': {'name': 'fedcor', 'warmup': 5}}
    """
    # A text is iterable, too, and so is a mapping.
    if isinstance(selectors, (str, Mapping, Selector, type)):
        selectors = [selectors]
    entries: dict[str, Any] = {}
    for item in selectors if isinstance(selectors, Iterable) else ():
        if isinstance(item, Mapping):
            if not all(isinstance(label, str) and label.strip() for label in item):
                raise InputError(f"The label of a selector must be a string. Got {short_repr(list(item))}.")
            named = {label: _entry(label, value) for label, value in item.items()}
        elif isinstance(item, str) and is_reference(item):
            named = {str(getattr(SELECTORS.get(item), "name", item)): {"name": item}}
        elif isinstance(item, str):
            named = {item: _entry(item, (known or {}).get(item))}
        else:
            cls = item if isinstance(item, type) else type(item)
            named = {str(getattr(cls, "name", cls.__name__)): _entry(type(item).__name__, item)}
        for name, entry in named.items():
            # Two files may each have a class of this name.
            label = item if name in entries and isinstance(item, str) and is_reference(item) else name
            if label in entries:
                raise InputError(
                    f"'selectors' has two entries called {label!r}.",
                    hint='give each its own label: {"first": {"name": "oort"}, ...}; on the command line, --sweep '
                    "compares values of a parameter, and a configuration has a section for each label",
                )
            entries[label] = entry
    if not entries:
        raise InputError(f"'selectors' must be {_SELECTORS}. Got {short_repr(selectors)}.")
    return entries


def _entry(label: str, value: object) -> dict[str, Any]:
    """Return an entry of ``[selectors]`` for a name, parameters, a selector or a selector class."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Selector):
        return {"name": _name_of(type(value)), **values_of(value)}
    if isinstance(value, type) and issubclass(value, Selector):
        return {"name": _name_of(value)}
    raise InputError(
        f"The selector {label!r} must be a name, parameters, a Selector or its class. Got {short_repr(value)}."
    )


def _name_of(cls: type[Selector[Any]]) -> str:
    """Return the name or reference by which a configuration and other processes find a selector class."""
    name = vars(cls).get("name")
    if isinstance(name, str) and name in SELECTORS and SELECTORS.get(name) is cls:
        return name
    # What cannot be found by name could not be continued from the configuration, nor in another process.
    reference = SELECTORS.reference(cls) or f"{cls.__module__}:{cls.__qualname__}"
    if cls.__module__ != "__main__" and cls.__qualname__.isidentifier() and not inspect.isabstract(cls):
        try:
            if SELECTORS.get(reference) is cls:
                return reference
        except FedcohortError:
            pass
    raise InputError(
        f"A configuration names its selectors, but {cls.__qualname__} in {cls.__module__} cannot be found by name.",
        hint='register it with @register("a-name"), or save it in a file and pass "file.py:Class"',
    )
