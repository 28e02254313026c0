"""Score the benchmark's runs: gains over uniform, their mean, the worst of them, and ranks.

A sentence or a verdict is about a setting only if a paired t-test says so, corrected by Holm's method over all settings
and over mean and worst group: among selectors equal to uniform, one in twenty is said to gain or to lose anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

import fedcohort
from fedcohort.core.arrays import FloatArray
from fedcohort.core.errors import InputError
from fedcohort.simulate.leaderboard import Leaderboard, LeaderRow, SeedRow, SelectorRanking, rank_selectors
from fedcohort.simulate.leaderboard.numbers import speed
from fedcohort.simulate.leaderboard.rows import LOST
from fedcohort.simulate.leaderboard.significance import LEVEL, half_interval, holm, paired_t_test
from fedcohort.simulate.leaderboard.speed import Speed
from fedcohort.simulate.leaderboard.words import names
from fedcohort.simulate.store.results import Results
from fedcohort_bench.benchmark.frozen import Frozen, merge_frozen
from fedcohort_bench.benchmark.own import data_title
from fedcohort_bench.benchmark.suite import DATASETS, VERSION, kinds, purpose_of, rounds_of, suite

# The key of each speed in a submission.
_SPEEDS = {"rounds": "faster_in_rounds", "seconds": "faster_in_seconds", "bytes": "fewer_bytes"}
_Kinds = tuple[tuple[str, ...], ...]
_MARGIN = 0.5  # points that a selector may lose and still be called no worse
_VERDICTS = {-1: "worse", 0: "open", 1: "no worse"}


@dataclass(frozen=True)
class Claim:
    """Whether a selector loses more than half a point to uniform in one setting: "worse", "no worse" or "open".

    ``gain`` and ``minority`` are points by seed, on average and in the worst group (None if it is unknown).
    """

    setting: str
    gain: FloatArray
    verdict: str
    minority: FloatArray | None
    minority_verdict: str

    def to_dict(self) -> dict[str, Any]:
        """Return mean, half interval and verdict of both as plain values."""
        both = ((self.gain, self.verdict), (self.minority, self.minority_verdict))
        mean, group = (
            None if v is None else [float(v.mean()), _none_if_nan(half_interval(v)), word] for v, word in both
        )
        return {"mean": mean, "worst_group": group}


def _told_apart(values: Sequence[FloatArray], margin: float = 0.0) -> list[int]:
    """Return for each array (seeds,) whether its mean is above (1) or below (-1) a margin, or cannot be told (0).

    Corrected over all of them: if all are at the margin, some are told from it in one case of twenty.
    """
    tests = holm([paired_t_test(v - margin) for v in values])
    return [int(np.sign(v.mean() - margin)) if p < LEVEL else 0 for v, p in zip(values, tests, strict=True)]


def least_by_chance(values: Sequence[FloatArray]) -> float:
    """Return the lowest mean to expect of arrays (seeds,) with the same spreads but no true gain; NaN with one seed.

    >>> spread = np.array([-1.0, 0.0, 1.0])  # standard error 0.577
    >>> round(least_by_chance([spread]), 2), round(least_by_chance([spread] * 30), 2)
    (0.0, -1.18)
    """
    from scipy.special import ndtr

    errors = np.array([v.std(ddof=1) / math.sqrt(len(v)) if len(v) > 1 else math.nan for v in values])
    if np.isnan(errors).any():
        return math.nan
    # The lowest of some means: its expected value is the integral of P(all means > x).
    most = 8 * max(errors.max(), 1e-9)
    x = np.linspace(-most, most, 4001)
    above = np.prod(ndtr(-x[:, None] / np.maximum(errors, 1e-12)), axis=1)  # P(all means > x)
    return float(np.trapezoid(above, x) - most)


@dataclass(frozen=True)
class SelectorScore:
    """One selector's scores.

    Attributes
    ----------
    gain : mapping of setting to (seeds,) array
        Points of terminal accuracy above uniform with the same seed; a run that diverged counts as 0% accurate.
    faster : mapping of measure ("rounds", "seconds", "bytes") to mapping of setting to Speed
        How many times less than uniform it takes to reach the target, paired by seed; a bound where a run never
        arrived. Bytes include models in both directions and every question to a client.
    reached : mapping of setting to float
        Share of its seeds that reach the target.
    kinds : tuple of tuple of str
        Settings that count as one for the mean gain; see :func:`~fedcohort_bench.benchmark.suite.kinds`.
    minority : mapping of setting to (seeds,) array
        Points of the worst group's accuracy above that of uniform's worst group, in the seeds where both are known.
        With too many owners to be groups, the worst tenth of clients takes their place.
    lost : mapping of setting to int
        Seeds in which its run or uniform's diverged or failed. A mean with such a jump has no interval and no verdict.
    """

    label: str
    gain: Mapping[str, FloatArray]
    faster: Mapping[str, Mapping[str, Speed]] = field(default_factory=dict)
    reached: Mapping[str, float] = field(default_factory=dict)
    kinds: _Kinds = ()
    minority: Mapping[str, FloatArray] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)
    baseline: str = "uniform"

    @property
    def worst_minority(self) -> tuple[str, float]:
        """The setting whose worst group loses most against uniform's, and how much; NaN if unknown."""
        if not self.minority:
            return "", math.nan
        setting = min(self.minority, key=lambda name: float(self.minority[name].mean()))
        return setting, float(self.minority[setting].mean())

    @property
    def mean_minority(self) -> float:
        """Mean gain of the worst group over the kinds of settings, in points; NaN if unknown."""
        means = [
            np.mean([self.minority[n].mean() for n in kind if n in self.minority])
            for kind in self._kinds
            if any(n in self.minority for n in kind)
        ]
        return float(np.mean(means)) if means else math.nan

    def _sides(self, margin: float) -> tuple[dict[str, int], dict[str, int]]:
        """Return which gains and worst groups differ from the margin; a setting that lost runs is not judged."""
        both = [{k: v for k, v in values.items() if not self.lost.get(k)} for values in (self.gain, self.minority)]
        found = iter(_told_apart([v for values in both for v in values.values()], margin))
        mean, group = ({name: next(found) for name in values} for values in both)
        return mean, group

    @property
    def at_a_cost(self) -> tuple[str, ...]:
        """Settings in which it gains on average but loses in the worst group, both beyond chance."""
        mean, group = self._sides(0.0)
        return tuple(name for name, side in group.items() if side < 0 < mean[name])

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Whether it is worse than uniform, for each setting."""
        mean, group = self._sides(-_MARGIN)

        def verdict(found: Mapping[str, int], name: str) -> str:
            lost = self.lost.get(name)
            return f"{lost} of {len(self.gain[name])} lost" if lost else _VERDICTS[found.get(name, 0)]

        return tuple(
            Claim(name, gain, verdict(mean, name), self.minority.get(name), verdict(group, name))
            for name, gain in self.gain.items()
        )

    @property
    def _kinds(self) -> _Kinds:
        return self.kinds or tuple((name,) for name in self.gain)

    @property
    def _by_seed(self) -> FloatArray:
        """(seeds,) mean gain over the kinds of settings."""
        return np.asarray(
            np.mean([np.mean([self.gain[name] for name in kind], axis=0) for kind in self._kinds], axis=0)
        )

    @property
    def mean(self) -> float:
        """Mean gain over the kinds of settings, in points."""
        return float(self._by_seed.mean())

    @property
    def interval(self) -> float:
        """Half the 95% interval of the mean gain over seeds; NaN with one seed, or if a run was lost."""
        return math.nan if any(self.lost.values()) else half_interval(self._by_seed)

    @property
    def worst(self) -> tuple[str, float]:
        """The setting with the smallest gain, and that gain."""
        setting = min(self.gain, key=lambda name: float(self.gain[name].mean()))
        return setting, float(self.gain[setting].mean())

    @property
    def worst_by_chance(self) -> float:
        """What the smallest gain would be on average if nothing differed from uniform; NaN with one seed."""
        return least_by_chance([v for name, v in self.gain.items() if not self.lost.get(name)])

    @property
    def worst_run(self) -> float:
        """The smallest gain of any single run."""
        return float(min(values.min() for values in self.gain.values()))

    def speed(self, measure: str) -> Speed:
        """How many times faster it is over the settings that tell: the geometric mean, or the median of bounds."""
        with np.errstate(divide="ignore"):
            middle = Speed.of([(np.log(s.least), np.log(s.greatest)) for s in self._speeds(measure)])
        return Speed(middle.least, middle.greatest)  # settings are no sample, so there is no interval

    def covers(self, measure: str) -> int:
        """The number of settings in :meth:`speed`."""
        return len(self._speeds(measure))

    def _speeds(self, measure: str) -> list[Speed]:
        return [s for s in self.faster.get(measure, {}).values() if s.least > 0 or math.isfinite(s.greatest)]

    @property
    def reach_share(self) -> float:
        """Share of all runs that reach uniform's accuracy; NaN if unknown."""
        return float(np.mean(list(self.reached.values()))) if self.reached else math.nan

    @property
    def sentence(self) -> str:
        """A summary of where it gains and where it loses beyond chance."""
        width = "" if math.isnan(self.interval) else f" ± {self.interval:.1f}"
        start = f"{self.mean:+.1f}{width} points on average"
        if 0 <= self.reach_share < 1:
            start += f"; {self.reach_share:.0%} of its runs reach {self.baseline}'s accuracy"
        if len(next(iter(self.gain.values()))) < 2:
            return f"{start}; with one seed, everything is open."
        found = self._sides(0.0)[0]
        gains = {side: [name for name, each in found.items() if each == side] for side in (1, 0, -1)}
        parts = [f"gains in {names(gains[1], 4)}"] * bool(gains[1])
        parts += [f"loses in {names(gains[-1], 4)}"] * bool(gains[-1])
        parts += [f"at the worst group's cost in {names(self.at_a_cost, 4)}"] * bool(self.at_a_cost)
        parts += [f"cannot be told from {self.baseline} in {len(gains[0])} of {len(self.gain)} settings"] * bool(
            gains[0]
        )
        lost = [name for name, count in self.lost.items() if count]
        parts += [f"lost runs in {names(lost, 4)}"] * bool(lost)
        return f"{start}; {'; '.join(parts)}."

    def to_dict(self, rank: float, rank_interval: float) -> dict[str, Any]:
        """Return an entry of the submission as plain values; only all selectors together give the rank."""
        return {
            "label": self.label,
            "mean_gain": self.mean,
            "interval": _none_if_nan(self.interval),
            "worst_setting": self.worst[0],
            "worst_gain": self.worst[1],
            "worst_gain_by_chance": _none_if_nan(self.worst_by_chance),
            "worst_run": self.worst_run,
            "mean_rank": rank,
            "rank_interval": _none_if_nan(rank_interval),
            **{key: _bounds(self.speed(measure)) for measure, key in _SPEEDS.items()},
            "faster": {
                measure: {name: _bounds(value) for name, value in values.items()}
                for measure, values in self.faster.items()
            },
            "reached": dict(self.reached),
            "lost": dict(self.lost),
            "gains": {name: values.tolist() for name, values in self.gain.items()},
            "worst_group_gains": {name: values.tolist() for name, values in self.minority.items()},
            "not_worse_than_uniform": {claim.setting: claim.to_dict() for claim in self.claims},
            "use": self.sentence,
        }


def _bounds(speed: Speed) -> list[float | None]:
    """Return the least and the greatest ratio as plain values; None is infinite."""
    return [value if math.isfinite(value) else None for value in (speed.least, speed.greatest)]


def _read_speed(stored: Any) -> Speed:
    """Read :func:`_bounds`, or the single number of versions 2 and 3 of the suite (None if nothing was known)."""
    if not isinstance(stored, list):
        return Speed(0.0, math.inf) if stored is None else Speed(float(stored), float(stored))
    least, greatest = (math.inf if value is None else float(value) for value in stored)
    return Speed(least, greatest)


@dataclass(frozen=True)
class Scores:
    """The benchmark's result.

    Attributes
    ----------
    lines : tuple of SelectorScore
        Best mean gain first; the baseline is not among them.
    complete : bool
        Whether every run has finished.
    frozen : Frozen
        The version of the suite and the selectors, as recorded before the first round.
    stated_purpose : str
        The purpose that scores of an earlier version state; this version does not know their seeds and settings.
    left_out : tuple of str
        Seeds and selectors that are not in all settings, and so in no figure.
    restricted : bool
        Whether speeds are ratios of restricted means, as in stored scores of versions 2 and 3: a run that never arrived
        counts with the time that all runs of its setting have in common.
    """

    data: str
    seeds: tuple[int, ...]
    rounds: int
    settings: tuple[str, ...]
    lines: tuple[SelectorScore, ...]
    complete: bool
    frozen: Frozen
    stated_purpose: str = ""
    left_out: tuple[str, ...] = ()
    restricted: bool = False
    baseline: str = "uniform"

    @staticmethod
    def from_dict(submission: Mapping[str, Any]) -> Scores:
        """Read a submission."""
        grouped = kinds(submission["data"], submission["settings"])
        baseline = submission.get("baseline", "uniform")
        lines = [
            SelectorScore(
                entry["label"],
                {name: np.array(entry["gains"][name], np.float64) for name in submission["settings"]},
                {m: {k: _read_speed(v) for k, v in values.items()} for m, values in entry["faster"].items()},
                {name: math.nan if share is None else float(share) for name, share in entry["reached"].items()},
                grouped,
                {name: np.array(values, np.float64) for name, values in entry["worst_group_gains"].items()},
                entry.get("lost", {}),
                baseline,
            )
            for entry in submission["selectors"]
        ]
        return Scores(
            data=submission["data"],
            seeds=tuple(submission["seeds"]),
            rounds=submission["rounds"],
            settings=tuple(submission["settings"]),
            lines=tuple(lines),
            complete=submission["complete"],
            frozen=Frozen.from_dict(submission["frozen"]),
            stated_purpose=submission["purpose"],
            left_out=tuple(submission.get("left_out", ())),
            restricted="left_out" not in submission,
            baseline=baseline,
        )

    @property
    def purpose(self) -> str:
        """What the result may be used for: "report", "tuning", "own" seeds, or "trial" if it is not the whole suite."""
        if self.frozen.suite != VERSION:
            return self.stated_purpose
        whole = {setting.name for setting in suite(self.data)} if self.data in DATASETS else set(self.settings)
        # Fewer rounds or settings could have been chosen after a look at the results.
        if self.rounds != rounds_of(self.data) or set(self.settings) != whole:
            return "trial"
        return purpose_of(self.seeds)

    @property
    def _labels(self) -> list[str]:
        return [self.baseline, *(line.label for line in self.lines)]

    @cached_property
    def kinds(self) -> _Kinds:
        """Settings that count as one when accuracy is compared."""
        return kinds(self.data, self.settings)

    @cached_property
    def _gains(self) -> FloatArray:
        """(kinds, labels, seeds); the baseline gains nothing."""
        zero = np.zeros(len(self.seeds))
        return np.array(
            [
                [zero, *(np.mean([line.gain[setting] for setting in kind], axis=0) for line in self.lines)]
                for kind in self.kinds
            ]
        )

    @cached_property
    def ranks(self) -> dict[str, tuple[float, float]]:
        """Mean rank of every label, the baseline included (1 is best), and half its 95% interval over seeds."""
        if not self._gains.size:
            return {}
        from scipy.stats import rankdata

        by_seed = rankdata(-self._gains, axis=1).mean(axis=0)  # (labels, seeds)
        return {
            label: (float(row.mean()), half_interval(row)) for label, row in zip(self._labels, by_seed, strict=True)
        }

    @cached_property
    def ranking(self) -> SelectorRanking | None:
        """All selectors against each other, the baseline included, over the kinds of settings; seeds are averaged."""
        return rank_selectors(self._labels, self._gains.mean(axis=2) if self._gains.size else np.zeros((0, 1)))

    def to_dict(self) -> dict[str, Any]:
        """Return the submission as plain values."""
        return {
            "benchmark": self.frozen.suite,
            "fedcohort": fedcohort.__version__,
            "data": self.data,
            "seeds": list(self.seeds),
            "rounds": self.rounds,
            "purpose": self.purpose,
            "complete": self.complete,
            "frozen": self.frozen.to_dict(),
            "settings": list(self.settings),
            "left_out": list(self.left_out),
            "critical_difference": None if self.ranking is None else self.ranking.difference,
            "baseline": self.baseline,
            "baseline_rank": _none_if_nan(self.ranks[self.baseline][0]) if self.ranks else None,
            "selectors": [line.to_dict(*self.ranks[line.label]) for line in self.lines],
        }


def score(*results: Results, baseline: str | None = None) -> Scores:
    """Score experiments of :func:`fedcohort_bench.benchmark.suite.table`: one, or several with different settings.

    Gains are over ``baseline``; by default, over the one of their configuration, which is uniform in the suite.
    """
    frozen = merge_frozen([part.path for part in results])
    pairs = {(data_title(part.config["data"]), int(part.config["run"]["rounds"])) for part in results}
    if len(pairs) != 1:
        raise InputError(f"Results that are scored together must share dataset and rounds. Got {sorted(pairs)}.")
    ((data, rounds),) = pairs
    boards = [board for part in results for board in part.leaderboards(baseline=baseline)]
    if len({board.setting for board in boards}) < len(boards):
        raise InputError("Results that are scored together must have different settings.")
    tables = [[row.label for row in board.rows] for board in boards]
    every = list(dict.fromkeys(label for found in tables for label in found))
    labels = [label for label in every if all(label in found for found in tables)]
    absent = [label for label in every if label not in labels]
    base, *others = {board.baseline for board in boards}
    if others or base not in labels:
        raise InputError(
            f"Results that are scored together must share their baseline. Got {', '.join(sorted([base, *others]))}.",
            hint="--baseline names one that all of them have",
        )
    # Differences are paired by seed, so a seed counts only where every selector has it.
    seeds, missing = seeds_of(boards, labels)
    grouped = kinds(data, [board.setting for board in boards])
    lines = [_line(label, boards, seeds, grouped) for label in labels if label != base]
    return Scores(
        data=data,
        seeds=seeds,
        rounds=rounds,
        settings=tuple(board.setting for board in boards),
        lines=tuple(sorted(lines, key=lambda line: -line.mean)),
        complete=all(board.finished for board in boards),
        frozen=frozen,
        left_out=(*absent, *(f"seed {seed}" for seed in missing)),
        baseline=base,
    )


def seeds_of(
    boards: Iterable[Leaderboard], labels: Sequence[str] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the seeds that all rows of the tables have, and those that only some have, both sorted."""
    rows = [row for board in boards for row in board.rows if labels is None or row.label in labels]
    found = [{seed.seed for seed in row.seeds} for row in rows]
    shared = set.intersection(*found)
    if not shared:
        raise InputError("No seed was run by every selector in every setting, so nothing can be compared.")
    return tuple(sorted(shared)), tuple(sorted(set.union(*found) - shared))


def _line(label: str, boards: Sequence[Leaderboard], seeds: Sequence[int], grouped: _Kinds) -> SelectorScore:
    gain: dict[str, FloatArray] = {}
    faster: dict[str, dict[str, Speed]] = {measure: {} for measure in _SPEEDS}
    reached: dict[str, float] = {}
    minority: dict[str, FloatArray] = {}
    lost: dict[str, int] = {}
    for board in boards:
        row = next(row for row in board.rows if row.label == label)
        ours, theirs = ([_by_seed(each)[seed] for seed in seeds] for each in (row, board.base))
        pairs = list(zip(ours, theirs, strict=True))
        gain[board.setting] = np.array([100 * (terminal_accuracy(a) - terminal_accuracy(b)) for a, b in pairs])
        for measure in _SPEEDS:
            faster[measure][board.setting] = speed(ours, theirs, measure)
        reached[board.setting] = float(np.mean([seed.rounds_to[-1] is not None for seed in ours]))
        groups = 100 * np.array([worst_group_accuracy(a) - worst_group_accuracy(b) for a, b in pairs])
        if np.isfinite(groups).any():
            minority[board.setting] = groups[np.isfinite(groups)]
        lost[board.setting] = sum(a.lost or b.lost for a, b in pairs)
    return SelectorScore(label, gain, faster, reached, grouped, minority, lost, boards[0].baseline)


def _by_seed(row: LeaderRow) -> dict[int, SeedRow]:
    return {seed.seed: seed for seed in row.seeds}


def terminal_accuracy(seed: SeedRow) -> float:
    """Return the terminal accuracy of a run; 0 if it diverged or failed."""
    # Leaving such runs out would reward a selector for those that it breaks.
    return 0.0 if math.isnan(seed.terminal) else seed.terminal


def worst_group_accuracy(seed: SeedRow) -> float:
    """Return the accuracy of a run's worst group, or of the worst tenth of clients if there are no groups.

    A run that diverged or failed is 0% accurate for everybody. NaN if neither is known.
    """
    if seed.state in LOST:
        return 0.0
    value = seed.fair.get("worst_group", math.nan)
    return seed.fair.get("worst_tenth", math.nan) if math.isnan(value) else value


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
