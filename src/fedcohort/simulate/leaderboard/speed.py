"""How many times as fast one selector reaches the target as another, seed by seed.

A run that never reaches the target leaves its ratio with a bound only: with a baseline that arrives after 40 rounds, a
run that has not arrived after 60 is at most 40/60 times as fast. Taking 60 for its time would print the bound as if it
were measured. So each seed has a least and a greatest ratio, and what is shown of all seeds is marked as a bound where
it is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.simulate.leaderboard.significance import half_interval

_UNKNOWN = (-math.inf, math.inf)


# How far a run got, in rounds, seconds or megabytes: when it reached the target (None if it did not), and where it
# ended (infinite if it diverged or failed, because it will never arrive).
Journey = tuple[float | None, float]


def log_ratio(ours: Journey, theirs: Journey) -> tuple[float, float]:
    """Return the least and the greatest logarithm of how many times as fast ``ours`` is as ``theirs``.

    >>> [round(math.exp(x), 2) for x in log_ratio((20, 60), (40, 60))]
    [2.0, 2.0]
    >>> [round(math.exp(x), 2) for x in log_ratio((None, 60), (40, 60))]
    [0.0, 0.67]
    """
    (arrival, end), (their_arrival, their_end) = ours, theirs
    if arrival == 0 or their_arrival == 0:  # arrived before anything was measured, such as seconds without clocks
        return _UNKNOWN
    if arrival is not None:
        if their_arrival is not None:
            return (ratio := math.log(their_arrival / arrival)), ratio
        return (math.log(their_end / arrival) if math.isfinite(their_end) else math.inf), math.inf
    if their_arrival is not None:
        return -math.inf, (math.log(their_arrival / end) if math.isfinite(end) else -math.inf)
    return _UNKNOWN


@dataclass(frozen=True)
class Speed:
    """How many times as fast, over several seeds.

    Attributes
    ----------
    least, greatest : float
        Equal if the ratio is known: the geometric mean over the seeds, or the median if some seeds have only a bound.
    low, high : float
        The 95% interval of the geometric mean; NaN for a median, and with one seed.
    """

    least: float
    greatest: float
    low: float = math.nan
    high: float = math.nan

    @classmethod
    def of(cls, logs: Sequence[tuple[float, float]] | FloatArray) -> Speed:
        """Summarise the seeds' least and greatest logarithms (n, 2).

        >>> print(Speed.of([(0.0, 0.0)] * 3), Speed.of([(-math.inf, 0.0)] * 2), Speed.of([_UNKNOWN]))
        1.00× ≤1.00× –
        """
        bounds = np.array(logs, np.float64).reshape(len(logs), 2)
        if not len(bounds):
            return cls(0.0, math.inf)
        if np.isfinite(bounds).all() and (bounds[:, 0] == bounds[:, 1]).all():
            middle, half = float(bounds[:, 0].mean()), half_interval(bounds[:, 0])
            mean = math.exp(middle)
            return cls(mean, mean, math.exp(middle - half), math.exp(middle + half))
        # A mean would need the ratios that nobody saw; the median only needs to know on which side they are.
        with np.errstate(invalid="ignore"):
            least, greatest = np.median(bounds, axis=0)
        return cls(float(np.exp(least)), float(np.exp(greatest)))

    @property
    def interval(self) -> str:
        """The interval in brackets; empty if there is none."""
        return "" if math.isnan(self.low) else f"[{self.low:.2f}, {self.high:.2f}]"

    def __str__(self) -> str:
        if self.greatest == 0:
            return "never"
        if self.least == self.greatest and math.isfinite(self.least):
            return f"{self.least:.2f}×"
        if self.least > 0:
            return f"≥{self.least:.2f}×" if math.isfinite(self.least) else "only this one"
        return f"≤{self.greatest:.2f}×" if math.isfinite(self.greatest) else "–"
