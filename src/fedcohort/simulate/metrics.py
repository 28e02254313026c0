"""Compute the papers' metrics from accuracy curves.

A curve is a pair (rounds, accuracy): the rounds (counted from 0) after which the model was evaluated, and the test
accuracy there. Reported rounds are counted from 1: a target reached in round t took t + 1 rounds of training, so
"rounds to target" is 1 if the first round suffices.

- *Rounds to target* (FedCor, FedACS, Fed-CBS): the first evaluated round at which accuracy reaches the target.
- *Best accuracy* (Fed-CBS): the maximum of the curve. *Early-stop accuracy* (FLASH, Section 3): the accuracy at the
  optimal round in hindsight, which is the same maximum; with a stopping rule it is the accuracy where the rule stopped.
- *Terminal accuracy* (FedACS): mean over the last 50 rounds.
- *Relative improvement* (FedACS): (terminal - baseline) / (IID - baseline), which is 100% if the IID reference is
  reached.

Others show who pays for a good average: the accuracy of the *worst group* and of the *worst tenth* of clients, the
*spread* (standard deviation) over clients, and *Jain's index* and the *longest absence* of participation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedcohort.core.arrays import FloatArray, IntArray

TERMINAL_ROUNDS = 50
_SHARES = ("accuracy", "token-accuracy")


@dataclass(frozen=True)
class Metric:
    """The metric that judges a model. Curves and leaderboards use scores, for which higher is always better.

    >>> rmse = Metric.of({"metric": "rmse", "higher_is_better": False})
    >>> rmse.score(0.5), rmse.natural(-0.5), rmse.value(-0.5), rmse.level(-0.5)
    (-0.5, 0.5, '0.5', 'rmse 0.5')
    >>> Metric().value(0.625), Metric().level(0.6)
    ('62.5%', '60%')
    """

    name: str = "accuracy"
    higher: bool = True
    share: bool = True  # in [0, 1], shown in percent

    @classmethod
    def of(cls, task: object) -> Metric:
        """Return the metric that the section ``[task]`` of a configuration names, by default accuracy."""
        if not isinstance(task, Mapping) or not isinstance(task.get("metric"), str):
            return cls()
        # A function of the user's is shown without the file it is in.
        name = task["metric"]
        return cls(name.rpartition(":")[2], bool(task.get("higher_is_better", True)), name in _SHARES)

    @property
    def is_accuracy(self) -> bool:
        """Whether it is the accuracy of a classifier, which has its own column in ``rounds/``."""
        return self.name == "accuracy" and self.share

    def score(self, value: Any) -> Any:
        """Return the metric as a score, for which higher is better."""
        return value if self.higher else -value

    def natural(self, score: Any) -> Any:
        """Return a score as the metric itself."""
        return self.score(score)

    def value(self, score: float) -> str:
        """Return a score as text, converted to the metric."""
        if np.isnan(score):
            return "unknown"
        return f"{100 * score:.1f}%" if self.share else f"{self.natural(score):.4g}"

    def level(self, score: float) -> str:
        """Return a target as text."""
        if np.isnan(score):
            return "unknown"
        if self.share:
            return f"{100 * score:.2f}".rstrip("0").rstrip(".") + "%"
        return f"{self.name} {self.natural(score):.4g}"

    def spread(self, std: float) -> str:
        """Return a standard deviation as text."""
        return f"±{100 * std:.1f}" if self.share else f"±{std:.2g}"


class Curve:
    """Test accuracy over rounds; rounds that were not evaluated are left out.

    >>> curve = Curve([0, 5, 10], [0.2, 0.6, 0.5])
    >>> curve.rounds_to(0.6), curve.best, curve.terminal(last=6)
    (6, 0.6, 0.55)
    """

    def __init__(self, rounds: ArrayLike, accuracy: ArrayLike) -> None:
        x, y = np.asarray(rounds, np.int64), np.asarray(accuracy, np.float64)
        # Rounds between two evaluations have no accuracy.
        evaluated = ~np.isnan(y)
        self.rounds: IntArray = x[evaluated]  # (e,) ascending, from 0
        self.accuracy: FloatArray = y[evaluated]  # (e,) or another score, for which higher is better

    def rounds_to(self, target: float) -> int | None:
        """Return how many rounds of training it took to reach ``target``, or None if it was never reached."""
        reached = self.accuracy >= target
        return int(self.rounds[int(reached.argmax())]) + 1 if reached.any() else None

    @property
    def best(self) -> float:
        """Largest accuracy; NaN for an empty curve."""
        return float(self.accuracy.max()) if len(self.accuracy) else float("nan")

    def early_stop(self, stopped: int | None = None) -> float:
        """Return the accuracy at the optimal round, or when a stopping rule stopped after ``stopped`` rounds."""
        if stopped is None:
            return self.best
        before = self.rounds < stopped
        return float(self.accuracy[before][-1]) if before.any() else float("nan")

    def terminal(self, last: int = TERMINAL_ROUNDS) -> float:
        """Return the mean accuracy of the evaluations that fall into the last ``last`` rounds."""
        if not len(self.accuracy):
            return float("nan")
        # Rounds are counted, not evaluations, so that the window does not depend on how often a run is evaluated.
        return float(self.accuracy[self.rounds > self.rounds[-1] - last].mean())


def relative_improvement(terminal: float, baseline: float, iid: float) -> float:
    """Return the share of the accuracy lost to non-IID data that is recovered; NaN if none was lost.

    >>> round(relative_improvement(0.725, 0.697, 0.74), 3)  # FedACS, Table I, low heterogeneity, from rounded figures
    0.651
    """
    # If a baseline loses nothing, there is nothing to recover.
    lost = iid - baseline
    return (terminal - baseline) / lost if lost else float("nan")


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (n - 1 in the denominator; 0 for one value) over seeds, and their number.

    >>> print(Spread.of([1.0, 2.0, 3.0]))
    2 +- 1
    """

    mean: float
    std: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread:
        """Summarise the values that are not None or NaN."""
        known = np.array([v for v in values if v is not None and not np.isnan(v)], dtype=np.float64)
        if not len(known):
            return cls(float("nan"), float("nan"), 0)
        return cls(float(known.mean()), float(known.std(ddof=1)) if len(known) > 1 else 0.0, len(known))

    def __str__(self) -> str:
        return f"{self.mean:.4g} +- {self.std:.2g}"


def worst_tenth(values: FloatArray) -> float:
    """Return the mean of the lowest tenth of the values (at least one), without those that are not finite.

    >>> worst_tenth(np.array([0.9, 0.2, 0.8, np.nan]))
    0.2
    """
    known = np.sort(values[np.isfinite(values)])
    return float(known[: max(1, int(0.1 * len(known)))].mean()) if len(known) else float("nan")


def jain(participations: FloatArray | IntArray) -> float:
    """Return Jain's index of participations (N,): 1 if all clients took part equally often, 1 / N if only one did.

    >>> jain(np.array([4, 4, 4, 4])), jain(np.array([8, 0, 0, 0]))
    (1.0, 0.25)
    """
    counts = np.asarray(participations, np.float64)
    square = float(counts @ counts)
    return float(counts.sum()) ** 2 / (len(counts) * square) if square > 0 else float("nan")


class Participation:
    """Counts who took part: O(cohort) for each round, O(N) for each result.

    >>> seen = Participation(3)
    >>> for round_, cohort in enumerate([[0, 1], [0], [0], [0, 1]]):
    ...     seen.add(round_, np.array(cohort))
    >>> seen.longest_absence(4), round(seen.jain, 3)
    (4, 0.6)
    """

    def __init__(self, clients: int) -> None:
        self.counts = np.zeros(clients, np.int64)
        self._last = np.full(clients, -1, np.int64)
        self._longest = 0  # longest absence that has ended

    def add(self, round_: int, cohort: IntArray) -> None:
        """Count the cohort of a round; rounds come in order."""
        # An absence ends when a client takes part again; one that still lasts is counted when somebody asks.
        if len(cohort):
            self._longest = max(self._longest, round_ - 1 - int(self._last[cohort].min()))
            self.counts[cohort] += 1
            self._last[cohort] = round_

    def longest_absence(self, rounds: int) -> int:
        """Return the most consecutive rounds, out of the first ``rounds``, in which a client did not take part."""
        return max(self._longest, rounds - 1 - int(self._last.min(initial=rounds - 1)))

    @property
    def jain(self) -> float:
        """Jain's index of participation."""
        return jain(self.counts)

    def array(self) -> IntArray:
        """Return all counts as one array, for a checkpoint."""
        return np.concatenate([self.counts, self._last, [self._longest]])

    @classmethod
    def of(cls, array: IntArray) -> Participation:
        """Restore the counts that :meth:`array` returned."""
        restored = cls(len(array) // 2)
        restored.counts, restored._last = (part.astype(np.int64) for part in np.split(array[:-1], 2))
        restored._longest = int(array[-1])
        return restored


def imbalance(counts: FloatArray) -> float:
    """Return QCID, the squared distance of pooled label counts (B,) from the balanced distribution (Fed-CBS, Eq. 2).

    >>> imbalance(np.array([5.0, 5.0])), imbalance(np.array([10.0, 0.0]))
    (0.0, 0.5)
    """
    total = counts.sum()
    if total <= 0:
        return float("nan")
    share = counts / total - 1.0 / len(counts)
    return float(share @ share)
