"""Client selection on a live Flower federation, with the same selectors and the same cohorts as in the simulator.

:class:`CohortStrategy` wraps any Flower strategy and decides who takes part. :class:`AsyncCohortStrategy` does the same
without rounds. :func:`cohort_client` makes a ClientApp answer the questions of selectors. All of them work with
Flower's message API (flwr 1.41 or newer).
"""

import importlib
from typing import TYPE_CHECKING, Any

from fedcohort.core.errors import needs_extra

with needs_extra("fedcohort.hosts.flower needs Flower, which is not installed.", "flower"):
    import flwr  # noqa: F401

if TYPE_CHECKING:
    from fedcohort.hosts.answers import Facts
    from fedcohort.hosts.flower.async_strategy import AsyncCohortStrategy
    from fedcohort.hosts.flower.client import Answers, client_name, cohort_client, torch_answers
    from fedcohort.hosts.flower.private import Private
    from fedcohort.hosts.flower.strategy import CohortStrategy, FederationTimeoutError, RoundError, ServerValidation
    from fedcohort.hosts.incidents import Incident, corrections, failures

__all__ = [
    "Answers",
    "AsyncCohortStrategy",
    "CohortStrategy",
    "Facts",
    "FederationTimeoutError",
    "Incident",
    "Private",
    "RoundError",
    "ServerValidation",
    "client_name",
    "cohort_client",
    "corrections",
    "failures",
    "torch_answers",
]
# Loaded on demand: a SuperNode starts a process for every message, which should not import the server's modules.
_HOMES = {
    "fedcohort.hosts.incidents": ("Incident", "corrections", "failures"),
    "fedcohort.hosts.flower.async_strategy": ("AsyncCohortStrategy",),
    "fedcohort.hosts.flower.client": ("Answers", "Facts", "client_name", "cohort_client", "torch_answers"),
    "fedcohort.hosts.flower.private": ("Private",),
    "fedcohort.hosts.flower.strategy": ("CohortStrategy", "FederationTimeoutError", "RoundError", "ServerValidation"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
