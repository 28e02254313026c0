r"""How scores become a cohort: the top of them, as in the paper, or a draw among all that promise something.

.. [Chang2024] X. Chang et al., "FLASH: Federated Learning Across Simultaneous Heterogeneities", arXiv:2402.08769, 2024.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.params import Either, Interval, OneOf, param
from fedcohort.core.top import top_k


def pool_param() -> Any:
    """Declare the parameter ``pool``."""
    return param(
        0.8,
        Either(OneOf(("top",)), Interval(float, 0, 1)),
        "draw from all that promise a reward above 0, at least this share of the candidates; or take the top M_t (the "
        "paper)",
    )


def uniform_share_param() -> Any:
    """Declare the parameter ``uniform_share``."""
    return param(0.1, Interval(float, 0, 1), "chance that a place of the cohort is drawn from everybody (the paper: 0)")


@dataclass(frozen=True)
class Draw:
    """A way to choose by scores; see the parameters of the same names. In the ``first`` round the top is taken."""

    pool: float | Literal["top"]
    uniform_share: float
    first: bool

    def picks(
        self,
        score: FloatArray,
        reward: FloatArray,
        size: int,
        notes: dict[str, str | float | int],
        rng: np.random.Generator,
    ) -> IntArray:
        """Return up to ``size`` positions of candidates with scores and last rewards (c,); note how they came about."""
        count = len(score)
        if size >= count or self.first or self.pool == "top":
            picks = top_k(score, min(size, count), rng)
        else:
            pool = np.flatnonzero((score > 0) | (reward > 0))
            notes["promising"] = len(pool)
            least = max(size, math.ceil(self.pool * count))
            if len(pool) < least:
                pool = top_k(score, least, rng)
            notes["pool"] = len(pool)
            picks = rng.choice(pool, size, replace=False)
        places = rng.binomial(size, self.uniform_share) if size < count and self.uniform_share > 0 else 0
        if places and not self.first:
            kept = picks[: size - places]
            others = np.setdiff1d(np.arange(count), kept, assume_unique=True)
            picks = np.concatenate([kept, rng.choice(others, places, replace=False)])
            notes["drawn from everybody"] = places
        return picks
