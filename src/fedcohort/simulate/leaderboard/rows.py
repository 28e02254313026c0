"""The lines of a leaderboard: what each selector reached over its seeds, and what it cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedcohort.simulate.metrics import Spread

AT_THE_END = ("worst_group", "worst_tenth", "client_spread")  # means over the same rounds as terminal accuracy
SO_FAR = ("jain", "longest_absence")  # as the last evaluation found them
FAIRNESS = (*AT_THE_END, *SO_FAR, "asked")
"""Columns of ``rounds/`` that say who pays for an average."""


@dataclass(frozen=True)
class Paired:
    """Terminal accuracy against the baseline over the seeds in which both have one.

    Attributes
    ----------
    seeds : int
        How many such seeds.
    difference : float
        Mean difference.
    wins : int
        Seeds in which this selector was strictly better.
    p : float
        Two-sided paired t-test, corrected over the comparisons of the table by Holm's method; NaN when there are
        fewer than two seeds or the differences do not vary.
    """

    seeds: int
    difference: float
    wins: int
    p: float


@dataclass(frozen=True)
class SeedRow:
    """One run of a selector.

    Attributes
    ----------
    rounds : int
        How many rounds were run.
    rounds_to : tuple of int or None
        For each target of the board; None when it was never reached.
    seconds_to : tuple of float or None
        Simulated seconds until then.
    megabytes_to : tuple of float or None
        Sent and received until then, queries included.
    best, early_stop, terminal : float
        Accuracies; terminal is NaN for a run that diverged or failed.
    window : int
        How many last rounds terminal accuracy is the mean of.
    qcid : float
        Mean class imbalance of the cohorts.
    megabytes, query_megabytes : float
        Both ways, of training and of queries.
    clock : float
        Simulated seconds in all.
    fair : mapping of str to float
        By the names of :data:`FAIRNESS`: accuracy of the worst group and of the worst tenth of clients, its standard
        deviation over clients, Jain's index of participation, the longest absence in rounds, questions asked in all.
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


@dataclass(frozen=True)
class ToTarget:
    """How long a selector took to reach a target accuracy.

    Attributes
    ----------
    rounds, seconds : Spread
        Over the seeds that reached it; ``rounds.count`` says how many.
    speed_up : float
        The baseline's mean rounds divided by these; NaN unless all seeds of both reached it, because a mean over the
        lucky ones would flatter.
    """

    target: float
    rounds: Spread
    seconds: Spread
    speed_up: float


@dataclass(frozen=True)
class LeaderRow:
    """One selector's line of the leaderboard.

    ``improvement`` is the share of the baseline's loss against IID data that the selector recovers; NaN without a
    reference.
    """

    label: str
    selector: str
    baseline: bool
    seeds: tuple[SeedRow, ...]
    to_target: tuple[ToTarget, ...]
    improvement: float
    paired: Paired | None

    @property
    def runs(self) -> int:
        """How many there are, diverged and failed ones included."""
        return len(self.seeds)

    @property
    def diverged(self) -> int:
        """How many diverged."""
        return sum(seed.state == "diverged" for seed in self.seeds)

    @property
    def failed(self) -> int:
        """How many failed."""
        return sum(seed.state == "failed" for seed in self.seeds)

    @property
    def lost(self) -> int:
        """How many diverged or failed: the means over the others flatter."""
        return self.diverged + self.failed

    @property
    def main(self) -> ToTarget:
        """The highest target, which speed-ups are about."""
        return self.to_target[-1]

    @property
    def best(self) -> Spread:
        """Best accuracy."""
        return Spread.of([seed.best for seed in self.seeds])

    @property
    def early_stop(self) -> Spread:
        """Accuracy where a stopping rule stopped, else the best."""
        return Spread.of([seed.early_stop for seed in self.seeds])

    @property
    def terminal(self) -> Spread:
        """Accuracy at the end."""
        return Spread.of([seed.terminal for seed in self.seeds])

    @property
    def qcid(self) -> Spread:
        """Mean class imbalance of the cohorts."""
        return Spread.of([seed.qcid for seed in self.seeds])

    @property
    def megabytes(self) -> Spread:
        """Sent and received, queries included."""
        return Spread.of([seed.megabytes + seed.query_megabytes for seed in self.seeds])

    @property
    def query_share(self) -> float:
        """Part of all bytes that queries cost."""
        total = sum(seed.megabytes + seed.query_megabytes for seed in self.seeds)
        return sum(seed.query_megabytes for seed in self.seeds) / total if total > 0 else math.nan

    @property
    def clock(self) -> Spread:
        """Simulated seconds in all."""
        return Spread.of([seed.clock for seed in self.seeds])

    def fair(self, name: str) -> Spread:
        """One of :data:`FAIRNESS`."""
        return Spread.of([seed.fair.get(name) for seed in self.seeds])


@dataclass(frozen=True)
class RunProgress:
    """How far the runs of a setting are.

    Attributes
    ----------
    least, most : int
        Fewest and most rounds of the runs that are still going, or of all runs once they have ended.
    planned : int, optional
        Rounds planned for each run.
    running : int
        Runs that have not ended.
    """

    least: int
    most: int
    planned: int | None
    running: int

    @property
    def words(self) -> str:
        """Where the runs stand, for a sentence: "round 62 of 2,000"."""
        rounds = f"{self.least:,}" if self.least == self.most else f"{self.least:,} to {self.most:,}"
        return f"round {rounds}" + (f" of {self.planned:,}" if self.planned else "")
