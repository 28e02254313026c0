"""fedcohort: choose which clients train in each round of federated learning, and show why."""

import importlib
from typing import TYPE_CHECKING, Any

from fedcohort.core.clients import ClientTable, LabelCounts
from fedcohort.core.errors import FedcohortError
from fedcohort.core.protocol import (
    SELECTORS,
    Cohort,
    Losses,
    Outcome,
    Selector,
    Slate,
    Status,
    Trial,
    per_client,
    register,
)
from fedcohort.core.signals import Signal
from fedcohort.core.version import __version__ as __version__
from fedcohort.session.session import Session

if TYPE_CHECKING:
    from fedcohort.api import compare, extend, load, run
    from fedcohort.hosts import flower
    from fedcohort.simulate.data import from_arrays, from_pandas
    from fedcohort.testing import check_selector

# Names that need torch, Flower or the simulator are imported when they are first used.
_LAZY = {
    "compare": "fedcohort.api",
    "extend": "fedcohort.api",
    "load": "fedcohort.api",
    "run": "fedcohort.api",
    "check_selector": "fedcohort.testing",
    "flower": "fedcohort.hosts",
    "from_arrays": "fedcohort.simulate.data",
    "from_pandas": "fedcohort.simulate.data",
}


def create(name: str, /, **params: object) -> "Selector[object]":
    """Build a selector by its name, for example ``create("power-of-choice", d=20)``."""
    return SELECTORS.create(name, **params)


def __getattr__(name: str) -> Any:
    if name == "flower":
        return importlib.import_module("fedcohort.hosts.flower")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fedcohort' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


__all__ = [
    "ClientTable",
    "Cohort",
    "FedcohortError",
    "LabelCounts",
    "Losses",
    "Outcome",
    "Selector",
    "Session",
    "Signal",
    "Slate",
    "Status",
    "Trial",
    "check_selector",
    "compare",
    "create",
    "extend",
    "flower",
    "from_arrays",
    "from_pandas",
    "load",
    "per_client",
    "register",
    "run",
]
