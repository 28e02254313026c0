"""Compute the papers' metrics from accuracy curves.

A curve is a pair (rounds, accuracy): the rounds (counted from 0) after which the model was evaluated, and the test
accuracy there. Reported rounds are counted from 1: a target reached in round t took t + 1 rounds of training, so
"rounds to target" is 1 if the first round suffices.

- *Rounds to target* (FedCor, FedACS, Fed-CBS): the first evaluated round at which accuracy reaches the target.
- *Best accuracy* (Fed-CBS): the maximum of the curve. *Early-stop accuracy* (FLASH, Section 3): the accuracy at the
  optimal round in hindsight, which is the same maximum; with a stopping rule it is the accuracy where the rule stopped.
- *Terminal accuracy* (FedACS): mean over the last 50 rounds.
- *Relative improvement* (FedACS): (terminal - baseline) / (IID - baseline), 100% where the IID reference is reached.
  Without an IID reference the plain relative gain (terminal - baseline) / baseline is given and named as such.
- *Speed-up* (FedACS): the baseline's rounds to target divided by the method's.

Who pays for an average is in four more: the *worst group's* accuracy, the accuracy of the *worst tenth* of clients, the
*spread* (standard deviation) over clients, and who took part: *Jain's index* and the *longest absence*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.errors import InputError

TERMINAL_ROUNDS = 50
_SHARES = ("accuracy", "token-accuracy")


@dataclass(frozen=True)
class Metric:
    """The metric that judges a model. Curves and leaderboards use scores, for which higher is always better.

    >>> rmse = Metric.of({"metric": "rmse", "higher_is_better": False})
    >>> rmse.score(0.5), rmse.natural(-0.5), rmse.value(-0.5), rmse.level(-0.5), rmse.difference(0.25)
    (-0.5, 0.5, '0.5', 'rmse 0.5', '−0.25')
    >>> Metric().value(0.625), Metric().level(0.6), Metric().difference(0.1)
    ('62.5%', '60%', '+10.0 pts')
    """

    name: str = "accuracy"
    higher: bool = True
    share: bool = True  # in 0 .. 1, shown in percent

    @classmethod
    def of(cls, task: object) -> Metric:
        """Return the metric that the section ``[task]`` of a configuration names; accuracy without one."""
        if not isinstance(task, Mapping) or not isinstance(task.get("metric"), str):
            return cls()
        name = task["metric"]
        return cls(name.rpartition(":")[2], bool(task.get("higher_is_better", True)), name in _SHARES)

    @property
    def is_accuracy(self) -> bool:
        """Whether it is the accuracy of a classifier, which has a column of its own."""
        return self.name == "accuracy" and self.share

    def score(self, value: Any) -> Any:
        """Return the metric as a score, for which higher is better."""
        return value if self.higher else -value

    def natural(self, score: Any) -> Any:
        """Return a score as the metric itself."""
        return self.score(score)

    def value(self, score: float) -> str:
        """Return a score as text, as the metric itself."""
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

    def difference(self, scores: float) -> str:
        """Return a difference of scores as text, as one of the metric."""
        if np.isnan(scores):
            return "–"
        # A real minus sign: a hyphen may be broken from its number at the end of a line.
        text = f"{100 * scores:+.1f} pts" if self.share else f"{self.natural(scores):+.3g}"
        return text.replace("-", "−")


@dataclass(frozen=True, eq=False)
class Curve:
    """Test accuracy over rounds; rounds that were not evaluated are left out.

    >>> curve = Curve([0, 5, 10], [0.2, 0.6, 0.5])
    >>> curve.rounds_to(0.6), curve.best, curve.terminal(last=6)
    (6, 0.6, 0.55)
    """

    rounds: IntArray  # (e,) ascending, from 0
    accuracy: FloatArray  # (e,) or another score, of which more is better

    def __init__(self, rounds: ArrayLike, accuracy: ArrayLike) -> None:
        at, value = np.asarray(rounds, np.int64), np.asarray(accuracy, np.float64)
        if at.ndim != 1 or at.shape != value.shape:
            raise InputError(f"A curve needs one accuracy per round. Got {at.shape} rounds, {value.shape} accuracies.")
        if len(at) and (at[0] < 0 or (np.diff(at) <= 0).any()):
            raise InputError("The rounds of a curve must ascend from 0 or later, each once.")
        evaluated = ~np.isnan(value)
        object.__setattr__(self, "rounds", at[evaluated])
        object.__setattr__(self, "accuracy", value[evaluated])

    def rounds_to(self, target: float) -> int | None:
        """Return how many rounds of training it took to reach ``target``, or None when it never did."""
        reached = self.accuracy >= target
        return int(self.rounds[int(reached.argmax())]) + 1 if reached.any() else None

    @property
    def best(self) -> float:
        """Largest accuracy; NaN for an empty curve."""
        return float(self.accuracy.max()) if len(self.accuracy) else float("nan")

    @property
    def last(self) -> float:
        """Accuracy at the last evaluation; NaN for an empty curve."""
        return float(self.accuracy[-1]) if len(self.accuracy) else float("nan")

    def early_stop(self, stopped: int | None = None) -> float:
        """Return the accuracy at the optimal round, or where a stopping rule stopped after ``stopped`` rounds."""
        if stopped is None:
            return self.best
        before = self.rounds < stopped
        return float(self.accuracy[before][-1]) if before.any() else float("nan")

    def terminal(self, last: int = TERMINAL_ROUNDS) -> float:
        """Return the mean accuracy of the evaluations that fall into the last ``last`` rounds."""
        if last < 1:
            raise InputError(f"Terminal accuracy is a mean over at least one round. Got last={last}.")
        if not len(self.accuracy):
            return float("nan")
        # Rounds, not evaluations: a run evaluated every fifth round has a fifth as many numbers in the same window.
        return float(self.accuracy[self.rounds > self.rounds[-1] - last].mean())


def relative_improvement(terminal: float, baseline: float, iid: float | None = None) -> float:
    """Return the share of the non-IID loss of accuracy that is recovered; without ``iid``, the plain relative gain.

    >>> round(relative_improvement(0.725, 0.697, 0.74), 3)  # FedACS, Table I, low heterogeneity, from rounded figures
    0.651
    """
    lost = baseline if iid is None else iid - baseline
    return (terminal - baseline) / lost if lost else float("nan")


def speed_up(rounds: float | None, baseline: float | None) -> float:
    """Return how many times fewer rounds than the baseline; NaN when either never reached the target.

    >>> round(speed_up(155, 365), 1)  # FedACS, Table II, high heterogeneity
    2.4
    """
    return float("nan") if not rounds or not baseline else baseline / rounds


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds (n - 1 in the denominator; 0 for a single one), and how many.

    >>> print(Spread.of([1.0, 2.0, 3.0]))
    2 +- 1
    """

    mean: float
    std: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread:
        """Summarise the known values; None and NaN are left out and not counted."""
        known = np.array([v for v in values if v is not None and not np.isnan(v)], dtype=np.float64)
        if not len(known):
            return cls(float("nan"), float("nan"), 0)
        return cls(float(known.mean()), float(known.std(ddof=1)) if len(known) > 1 else 0.0, len(known))

    def __str__(self) -> str:
        return f"{self.mean:.4g} +- {self.std:.2g}"


WORST_SHARE = 0.1


def worst_tenth(values: FloatArray) -> float:
    """Return the mean of the lowest tenth of some numbers, of at least one; NaN are left out.

    >>> worst_tenth(np.array([0.9, 0.2, 0.8, np.nan]))
    0.2
    """
    known = np.sort(values[np.isfinite(values)])
    return float(known[: max(1, int(WORST_SHARE * len(known)))].mean()) if len(known) else float("nan")


def jain(participations: FloatArray | IntArray) -> float:
    """Return Jain's index of how often clients took part (N,): 1 if all did equally often, 1 / N if one did alone.

    >>> jain(np.array([4, 4, 4, 4])), jain(np.array([8, 0, 0, 0]))
    (1.0, 0.25)
    """
    counts = np.asarray(participations, np.float64)
    square = float(counts @ counts)
    return float(counts.sum()) ** 2 / (len(counts) * square) if square > 0 else float("nan")


class Participation:
    """Who took part, counted round after round: O(cohort) a round, O(N) a look.

    >>> seen = Participation(3)
    >>> for round_, cohort in enumerate([[0, 1], [0], [0], [0, 1]]):
    ...     seen.add(round_, np.array(cohort))
    >>> seen.longest_absence(4), round(seen.jain, 3)
    (4, 0.6)
    """

    def __init__(self, clients: int) -> None:
        self.counts = np.zeros(clients, np.int64)
        self._last = np.full(clients, -1, np.int64)
        self._longest = 0  # absence that has ended

    def add(self, round_: int, cohort: IntArray) -> None:
        """Count the cohort of a round; rounds come in order."""
        if len(cohort):
            self._longest = max(self._longest, round_ - 1 - int(self._last[cohort].min()))
            self.counts[cohort] += 1
            self._last[cohort] = round_

    def longest_absence(self, rounds: int) -> int:
        """Return the most rounds in a row that any client was without a turn, after so many rounds in all."""
        return max(self._longest, rounds - 1 - int(self._last.min(initial=rounds - 1)))

    @property
    def jain(self) -> float:
        """Jain's index of participation."""
        return jain(self.counts)

    def array(self) -> IntArray:
        """Return all of it as one array, for a checkpoint."""
        return np.concatenate([self.counts, self._last, [self._longest]])

    @classmethod
    def of(cls, array: IntArray) -> Participation:
        """Take over :meth:`array`."""
        found = cls(len(array) // 2)
        found.counts, found._last = (part.astype(np.int64) for part in np.split(array[:-1], 2))
        found._longest = int(array[-1])
        return found


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
