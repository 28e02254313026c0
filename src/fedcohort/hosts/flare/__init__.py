"""Selection on NVIDIA FLARE: the same selectors, the same cohorts, at sites that FLARE connects.

:class:`CohortController` is a FLARE workflow that decides who takes part in each round. :class:`CohortClient` stands in
for ``flare.receive`` and ``flare.send`` in a training script, and :class:`CohortExecutor` wraps an Executor; either
answers what a selector may ask. nvflare 2.9 or newer.
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
    from fedcohort.hosts.incidents import corrections, failures

__all__ = [
    "Answers",
    "CohortClient",
    "CohortController",
    "CohortExecutor",
    "Facts",
    "corrections",
    "failures",
    "seed_of",
    "torch_answers",
    "work_of",
]
# A site need not import the server's side.
_HOMES = {
    "fedcohort.hosts.answers": ("Answers", "Facts"),
    "fedcohort.hosts.incidents": ("corrections", "failures"),
    "fedcohort.hosts.flare.client": ("CohortClient", "CohortExecutor", "seed_of", "torch_answers", "work_of"),
    "fedcohort.hosts.flare.controller": ("CohortController",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
