"""fedcohort: choose which clients train in each round of federated learning, and show why."""

__version__ = "0.3.0"

import importlib
from typing import TYPE_CHECKING, Any

from fedcohort.core.clients import ClientTable, LabelCounts, LabelFactor, LabelGram
from fedcohort.core.errors import FedcohortError
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
from fedcohort.core.signals import Signal
from fedcohort.session.session import Session

if TYPE_CHECKING:
    from fedcohort.simulate.data import from_arrays, from_pandas


def create(name: str, /, **params: object) -> "Selector[object]":
    """Build a registered selector by name, for example ``create("power-of-choice", d=20)``."""
    return SELECTORS.create(name, **params)


def __getattr__(name: str) -> Any:
    """Load what makes datasets only where somebody asks for it."""
    if name in ("from_arrays", "from_pandas"):
        return getattr(importlib.import_module("fedcohort.simulate.data"), name)
    raise AttributeError(f"module 'fedcohort' has no attribute {name!r}")


__all__ = [
    "SELECTORS",
    "Answer",
    "ClientTable",
    "Cohort",
    "FedcohortError",
    "LabelCounts",
    "LabelFactor",
    "LabelGram",
    "Losses",
    "Outcome",
    "RoundReport",
    "RoundRequest",
    "Selector",
    "Session",
    "Signal",
    "Slate",
    "Status",
    "Trial",
    "create",
    "from_arrays",
    "from_pandas",
    "per_client",
    "register",
]
