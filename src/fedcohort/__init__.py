"""fedcohort: choose which clients train in each round of federated learning, and show why."""

__version__ = "0.3.0"

from fedcohort.clients import ClientTable, LabelCounts, LabelFactor, LabelGram
from fedcohort.errors import FedcohortError
from fedcohort.protocol import (
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
from fedcohort.session import Session
from fedcohort.signals import Signal


def create(name: str, /, **params: object) -> "Selector[object]":
    """Build a registered selector by name, for example ``create("power-of-choice", d=20)``."""
    return SELECTORS.create(name, **params)


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
    "per_client",
    "register",
]
