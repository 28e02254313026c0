"""Client selection on NVIDIA FLARE, with the same selectors and the same cohorts as in the simulator.

:class:`CohortController` is a FLARE workflow that decides which sites take part in each round. At a site,
:class:`CohortClient` replaces ``flare.receive`` and ``flare.send`` in a training script, and :class:`CohortExecutor`
wraps an Executor; both answer the questions of selectors. Needs nvflare 2.9 or newer.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fedcohort.core.errors import needs_extra

with needs_extra("fedcohort.hosts.flare needs NVIDIA FLARE, which is not installed.", "nvflare"):
    import nvflare  # noqa: F401

if TYPE_CHECKING:
    from fedcohort.hosts.answers import Answers, Facts
    from fedcohort.hosts.flare.client import CohortClient, CohortExecutor, seed_of, torch_answers, work_of
    from fedcohort.hosts.flare.controller import CohortController
    from fedcohort.hosts.flare.recipe import CohortRecipe
    from fedcohort.hosts.incidents import corrections, failures

__all__ = [
    "Answers",
    "CohortClient",
    "CohortController",
    "CohortExecutor",
    "CohortRecipe",
    "Facts",
    "corrections",
    "failures",
    "seed_of",
    "torch_answers",
    "work_of",
]
# Loaded on demand, so that a site does not import the server's modules.
_HOMES = {
    "fedcohort.hosts.answers": ("Answers", "Facts"),
    "fedcohort.hosts.incidents": ("corrections", "failures"),
    "fedcohort.hosts.flare.client": ("CohortClient", "CohortExecutor", "seed_of", "torch_answers", "work_of"),
    "fedcohort.hosts.flare.controller": ("CohortController",),
    "fedcohort.hosts.flare.recipe": ("CohortRecipe",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
