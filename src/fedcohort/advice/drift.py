"""Whether a federation changed while it was recorded: permutation tests for a change at an unknown moment.

A record is cut into up to 20 stretches of successive rounds. If nothing changed, the stretches could have come in any
order. The statistic is the largest cumulated deviation from the mean (CUSUM), and the tests are corrected by Holm's
method. Within a stretch, neighbouring rounds may be as alike as they like. Presence is tested by days.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcohort.advice.record import Record
from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.protocol import Status
from fedcohort.scenario.devices import DAY
from fedcohort.simulate.leaderboard.significance import LEVEL, holm

_STRETCHES = 20
_FEWEST = 8  # with fewer stretches no order is rare enough
_PERMUTATIONS = 1999


@dataclass(frozen=True)
class Change:
    """One test: what was tested, its corrected p, and the round (or day) at which it seems to have changed."""

    what: str
    p: float
    round: int

    @property
    def found(self) -> bool:
        """Whether chance does not explain it."""
        return self.p < LEVEL

    def __str__(self) -> str:
        unit = "day" if "online" in self.what else "round"
        return f"{self.what} changed around {unit} {self.round} (p = {self.p:.3f}, corrected)"


def changes(record: Record) -> list[Change]:
    """Test durations, failures, presence and the model's curve."""
    rng = np.random.default_rng(7)
    found: list[tuple[str, float, int]] = []
    timed = record.answered & np.isfinite(record.seconds) & (record.seconds > 0)
    if timed.any():
        logs = _own(record.client[timed], np.log(record.seconds[timed]))
        if logs.std() > 1e-3:  # otherwise every client always takes the same time
            found.append(_tested("How long clients take", record.round[timed], logs, rng))
    failed = np.isin(record.status, (int(Status.FAILED), int(Status.MISSING))).astype(float)
    if 0 < failed.mean() < 1:
        found.append(_tested("How often clients fail", record.round, _own(record.client, failed), rng))
    if record.online is not None and record.online.mean() < 1:
        # By days, because every hour has its own crowd, and whoever is there now will be there in a minute.
        day = ((record.asked - record.midnight) // DAY).astype(int)
        found.append(_tested("How many clients are online", day, record.online.mean(axis=1), rng))
    if len(record.curve) >= _FEWEST:
        # A model that learns improves; what the best rising curve does not explain should have no pattern.
        score = record.curve[:, 1]
        found.append(_tested("How well the model does", record.curve[:, 0].astype(int), score - rising(score), rng))
    known = [entry for entry in found if entry[1] <= 1]
    corrected = holm([p for _, p, _ in known])
    return [Change(what, p, at) for (what, _, at), p in zip(known, corrected, strict=True)]


def _own(client: IntArray, values: FloatArray) -> FloatArray:
    """Return the values minus each client's mean."""
    count = np.maximum(np.bincount(client), 1)
    return np.asarray(values - (np.bincount(client, values) / count)[client])


def _tested(what: str, rounds: IntArray, values: FloatArray, rng: np.random.Generator) -> tuple[str, float, int]:
    """Return p of no change, 2 if there is too little to tell, and the round of the likeliest change."""
    distinct = np.unique(rounds)
    stretches = min(_STRETCHES, len(distinct))
    if stretches < _FEWEST:
        return what, 2.0, 0
    stretch = np.searchsorted(distinct, rounds) * stretches // len(distinct)
    sums, counts = np.bincount(stretch, values, stretches), np.bincount(stretch, minlength=stretches)
    deviations = sums - counts * values.mean()
    cumulated = np.abs(np.cumsum(deviations))
    orders = np.argsort(rng.random((_PERMUTATIONS, stretches)), axis=1)
    by_chance = np.abs(np.cumsum(deviations[orders], axis=1)).max(axis=1)
    p = (1 + int((by_chance >= cumulated.max() - 1e-12).sum())) / (1 + _PERMUTATIONS)
    place = int(cumulated[:-1].argmax()) + 1
    return what, p, int(distinct[place * len(distinct) // stretches])


def rising(values: FloatArray) -> FloatArray:
    """Return the closest curve that never falls (isotonic regression, pool adjacent violators).

    >>> rising(np.array([1.0, 3.0, 2.0, 4.0]))
    array([1. , 2.5, 2.5, 4. ])
    """
    means: list[float] = []
    counts: list[int] = []
    for value in values.tolist():
        means.append(value)
        counts.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            count = counts[-2] + counts[-1]
            means[-2:] = [(means[-2] * counts[-2] + means[-1] * counts[-1]) / count]
            counts[-2:] = [count]
    return np.repeat(means, counts)
