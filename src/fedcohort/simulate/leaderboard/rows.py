"""The rows of a leaderboard: what each selector reached over its seeds, and what it cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedcohort.simulate.leaderboard.significance import LEVEL, half_interval, holm, paired_t_test
from fedcohort.simulate.leaderboard.speed import Journey, Speed
from fedcohort.simulate.metrics import Spread

LOST = ("diverged", "failed")  # states of runs that have no terminal accuracy
# Columns of ``rounds/`` that show what accuracy hides, and how a run's rounds are summarised:
AT_THE_END = ("worst_group", "worst_tenth", "client_spread", "macro_f1", "worst_recall")  # as terminal accuracy
SO_FAR = ("jain", "longest_absence")  # at the last evaluation
FAIRNESS = (*AT_THE_END, *SO_FAR, "asked", "selection_seconds")  # the sum; the mean


@dataclass(frozen=True)
class PairedComparison:
    """A score compared with the baseline's, over the seeds in which both have one.

    Attributes
    ----------
    seeds : int
        Number of these seeds.
    difference : float
        Mean difference.
    half : float
        Half its 95% interval, for this comparison alone; NaN with fewer than two seeds.
    spread : float
        Standard deviation of the differences.
    wins : int
        Seeds in which this selector was strictly better.
    p : float
        Two-sided paired t-test, corrected over the comparisons of the table by Holm's method; NaN if there are fewer
        than two seeds or the differences do not vary.
    """

    seeds: int
    difference: float
    half: float
    spread: float
    wins: int
    p: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> PairedComparison:
        """Compare over the seeds whose difference is known; the p-value is not corrected yet."""
        values = np.asarray(differences, np.float64)
        # A seed that only one of the two ended says nothing about their difference.
        known = values[~np.isnan(values)]
        return cls(
            seeds=len(known),
            difference=float(known.mean()) if len(known) else math.nan,
            half=half_interval(known),
            spread=float(known.std(ddof=1)) if len(known) > 1 else math.nan,
            wins=int((known > 0).sum()),
            p=paired_t_test(known),
        )

    @staticmethod
    def corrected(tests: Sequence[PairedComparison]) -> list[PairedComparison]:
        """Return the comparisons of one table with p-values that hold for all of them together."""
        return [replace(test, p=p) for test, p in zip(tests, holm([test.p for test in tests]), strict=True)]

    @property
    def established(self) -> bool:
        """Whether the difference is not chance, after the correction; only then may a sentence claim it."""
        return self.p < LEVEL


@dataclass(frozen=True)
class SeedRow:
    """One run of a selector.

    Attributes
    ----------
    rounds : int
        Number of rounds so far.
    rounds_to : tuple of int or None
        Rounds to each target of the board; None if it was never reached.
    seconds_to : tuple of float or None
        Simulated seconds until then.
    megabytes_to : tuple of float or None
        Megabytes sent and received until then, including queries.
    best, early_stop, terminal : float
        Accuracies; terminal is NaN for a run that diverged or failed.
    window : int
        Number of last rounds that terminal accuracy averages.
    qcid : float
        Mean class imbalance of the cohorts.
    megabytes, query_megabytes : float
        Sent and received, by training and by queries.
    clock : float
        Simulated seconds of the whole run.
    fair : mapping of str to float
        Values for :data:`FAIRNESS`: accuracy of the worst group and of the worst tenth of clients, its standard
        deviation over clients, Jain's index of participation, the longest absence in rounds, the number of questions.
        Accuracies are NaN for a run that diverged or failed.
    """

    seed: int
    state: str
    rounds: int
    rounds_to: tuple[int | None, ...]
    seconds_to: tuple[float | None, ...]
    megabytes_to: tuple[float | None, ...]
    best: float
    early_stop: float
    terminal: float
    window: int
    qcid: float
    megabytes: float
    query_megabytes: float
    clock: float
    fair: Mapping[str, float] = field(default_factory=dict)

    @property
    def lost(self) -> bool:
        """Whether it diverged or failed."""
        return self.state in LOST

    def journey(self, measure: str, place: int = -1) -> Journey:
        """Return how it went to a target of the board, in "rounds", "seconds" or "bytes"."""
        arrivals, end = {
            "rounds": (self.rounds_to, self.rounds),
            "seconds": (self.seconds_to, self.clock),
            "bytes": (self.megabytes_to, self.megabytes + self.query_megabytes),
        }[measure]
        return arrivals[place], math.inf if self.lost else end


@dataclass(frozen=True)
class Arrivals:
    """When the runs of a selector reached a target.

    Attributes
    ----------
    median : float
        Over all seeds, infinite if half of them or more never arrive; NaN if it is unknown.
    count : int
        Seeds that arrived.
    """

    median: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Arrivals:
        """Summarise the seeds; None never arrived.

        >>> Arrivals.of([21, 30, None]), Arrivals.of([21, None])
        (Arrivals(median=30.0, count=2), Arrivals(median=inf, count=1))
        """
        return cls(
            float(np.median([math.inf if value is None else value for value in values])) if values else math.nan,
            sum(value is not None for value in values),
        )


@dataclass(frozen=True)
class ToTarget:
    """How long a selector took to reach a target, and how many times as fast as the baseline it was.

    ``speed`` is in simulated time if there is any, else in rounds; None for the baseline.
    """

    target: float
    rounds: Arrivals
    seconds: Arrivals
    speed: Speed | None


@dataclass(frozen=True)
class LeaderRow:
    """One selector's row of the leaderboard.

    ``improvement`` is the share of the baseline's loss against IID data that the selector recovers; NaN without a
    reference setting. ``paired`` compares terminal accuracy with the baseline's, ``paired_group`` the worst group's.
    """

    label: str
    selector: str
    baseline: bool
    seeds: tuple[SeedRow, ...]
    to_target: tuple[ToTarget, ...]
    improvement: float
    paired: PairedComparison | None
    paired_group: PairedComparison | None = None

    @property
    def runs(self) -> int:
        """Number of runs, including those that diverged or failed."""
        return len(self.seeds)

    @property
    def diverged(self) -> int:
        """Number of runs that diverged."""
        return sum(seed.state == "diverged" for seed in self.seeds)

    @property
    def failed(self) -> int:
        """Number of runs that failed."""
        return sum(seed.state == "failed" for seed in self.seeds)

    @property
    def lost(self) -> int:
        """Number of runs that diverged or failed; means over the others look too good."""
        return self.diverged + self.failed

    @property
    def main(self) -> ToTarget:
        """The highest target, which speed-ups refer to."""
        return self.to_target[-1]

    @property
    def best(self) -> Spread:
        """Best accuracy."""
        return Spread.of([seed.best for seed in self.seeds])

    @property
    def early_stop(self) -> Spread:
        """Accuracy when a stopping rule stopped the run, else the best accuracy."""
        return Spread.of([seed.early_stop for seed in self.seeds])

    @property
    def terminal(self) -> Spread:
        """Terminal accuracy."""
        return Spread.of([seed.terminal for seed in self.seeds])

    @property
    def qcid(self) -> Spread:
        """Mean class imbalance of the cohorts."""
        return Spread.of([seed.qcid for seed in self.seeds])

    @property
    def megabytes(self) -> Spread:
        """Megabytes sent and received, including queries."""
        return Spread.of([seed.megabytes + seed.query_megabytes for seed in self.seeds])

    @property
    def query_share(self) -> float:
        """Queries' share of all bytes."""
        total = sum(seed.megabytes + seed.query_megabytes for seed in self.seeds)
        return sum(seed.query_megabytes for seed in self.seeds) / total if total > 0 else math.nan

    @property
    def clock(self) -> Spread:
        """Simulated seconds of a whole run."""
        return Spread.of([seed.clock for seed in self.seeds])

    def fair(self, name: str) -> Spread:
        """Return one of :data:`FAIRNESS`."""
        return Spread.of([seed.fair.get(name) for seed in self.seeds])
