"""fedcohort: choose which clients train in each round of federated learning, and show why."""

import importlib
from typing import TYPE_CHECKING, Any

from fedcohort.core.clients import ClientTable, LabelCounts
from fedcohort.core.errors import FedcohortError
from fedcohort.core.params import Interval, param
from fedcohort.core.protocol import (
    SELECTORS,
    Answer,
    Cohort,
    Losses,
    Outcome,
    RoundReport,
    RoundRequest,
    Selector,
    Slate,
    Status,
    Trial,
    per_client,
    register,
)
from fedcohort.core.signals import LossMeasure, LossOf, OnServer, Signal, VectorOf
from fedcohort.core.top import top_k
from fedcohort.core.version import __version__ as __version__
from fedcohort.session.rules import Rules
from fedcohort.session.session import Session

if TYPE_CHECKING:
    from fedcohort.api import compare, extend, load, run
    from fedcohort.core import plots
    from fedcohort.hosts import flare as flare
    from fedcohort.hosts import flower as flower
    from fedcohort.simulate.data import from_arrays, from_pandas
    from fedcohort.testing import check_selector

# Names that need torch, Flower or the simulator are imported when they are first used.
_LAZY = {
    "compare": "fedcohort.api",
    "extend": "fedcohort.api",
    "load": "fedcohort.api",
    "run": "fedcohort.api",
    "check_selector": "fedcohort.testing",
    "from_arrays": "fedcohort.simulate.data",
    "from_pandas": "fedcohort.simulate.data",
}
# The hosts are not in __all__, because "import *" must work without them.
_LAZY_MODULES = {
    "flare": "fedcohort.hosts.flare",
    "flower": "fedcohort.hosts.flower",
    "plots": "fedcohort.core.plots",
}


def create(name: str, /, **params: object) -> "Selector[object]":
    """Build a selector by its name, for example ``create("power-of-choice", d=20)``."""
    return SELECTORS.create(name, **params)


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(_LAZY_MODULES[name])
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fedcohort' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_LAZY_MODULES, "__version__"])


__all__ = [
    "Answer",
    "ClientTable",
    "Cohort",
    "FedcohortError",
    "Interval",
    "LabelCounts",
    "LossMeasure",
    "LossOf",
    "Losses",
    "OnServer",
    "Outcome",
    "RoundReport",
    "RoundRequest",
    "Rules",
    "Selector",
    "Session",
    "Signal",
    "Slate",
    "Status",
    "Trial",
    "VectorOf",
    "check_selector",
    "compare",
    "create",
    "extend",
    "from_arrays",
    "from_pandas",
    "load",
    "param",
    "per_client",
    "plots",
    "register",
    "run",
    "top_k",
]
