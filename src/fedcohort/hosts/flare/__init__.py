"""Selection on NVIDIA FLARE: the same selectors, the same cohorts, at sites that FLARE connects.

:class:`CohortController` is a FLARE workflow that decides who takes part in each round. :class:`CohortClient` stands in
for ``flare.receive`` and ``flare.send`` in a training script, and :class:`CohortExecutor` wraps an Executor; either
answers what a selector may ask. nvflare 2.9 or newer.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fedcohort.core.errors import MissingExtraError

try:
    import nvflare  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        "fedcohort.hosts.flare needs NVIDIA FLARE, which is not installed.", hint="pip install 'fedcohort[nvflare]'"
    ) from error

if TYPE_CHECKING:
    from fedcohort.hosts.answers import Facts
    from fedcohort.hosts.flare.client import Answers, CohortClient, CohortExecutor, torch_answers
    from fedcohort.hosts.flare.controller import CohortController

__all__ = ["Answers", "CohortClient", "CohortController", "CohortExecutor", "Facts", "torch_answers"]
# A site need not import the server's side.
_HOMES = {
    "fedcohort.hosts.answers": ("Facts",),
    "fedcohort.hosts.flare.client": ("Answers", "CohortClient", "CohortExecutor", "torch_answers"),
    "fedcohort.hosts.flare.controller": ("CohortController",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
