"""Score the benchmark's runs: gains over uniform, their mean, the worst of them, and ranks."""

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
from fedcohort.simulate.leaderboard import (
    Leaderboard,
    LeaderRow,
    SeedRow,
    SelectorRanking,
    rank_selectors,
)
from fedcohort.simulate.leaderboard.rows import LOST
from fedcohort.simulate.leaderboard.words import names
from fedcohort.simulate.store.results import Results
from fedcohort_bench.benchmark.frozen import Frozen, merge_frozen
from fedcohort_bench.benchmark.own import data_title
from fedcohort_bench.benchmark.suite import DATASETS, VERSION, kinds, purpose_of, rounds_of, suite

# The key of each speed in a submission.
_SPEEDS = {"rounds": "faster_in_rounds", "seconds": "faster_in_seconds", "bytes": "fewer_bytes"}
_Kinds = tuple[tuple[str, ...], ...]
_CLEAR = 0.5  # points from which a gain or a loss is mentioned; the sentences say "half a point"


@dataclass(frozen=True)
class MeanInterval:
    """A mean over seeds and half its 95% interval (NaN with one seed)."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: FloatArray) -> MeanInterval:
        """Compute both from a value for each seed."""
        return cls(float(values.mean()), half_interval(values))

    def to_list(self) -> list[Any]:
        """Return mean, half interval and verdict as plain values."""
        return [self.mean, _none_if_nan(self.half), self.verdict]

    @property
    def text(self) -> str:
        """The mean in points, with its interval if there is one."""
        return f"{self.mean:+.1f}" + ("" if math.isnan(self.half) else f" ± {self.half:.1f}")

    @property
    def verdict(self) -> str:
        """Whether the mean is more than half a point below uniform: "worse", "no worse", or "open" if unclear."""
        half = 0.0 if math.isnan(self.half) else self.half
        if self.mean - half >= -_CLEAR:
            return "no worse"
        return "worse" if self.mean + half < -_CLEAR else "open"


@dataclass(frozen=True)
class Claim:
    """Whether a selector loses more than half a point to uniform in one setting, on average and in its worst group."""

    setting: str
    mean: MeanInterval
    minority: MeanInterval | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "mean": self.mean.to_list(),
            "worst_group": None if self.minority is None else self.minority.to_list(),
        }


@dataclass(frozen=True)
class SelectorScore:
    """One selector's scores.

    Attributes
    ----------
    gain : mapping of setting to (seeds,) array
        Points of terminal accuracy above uniform with the same seed; a run that diverged counts as 0% accurate.
    faster : mapping of measure ("rounds", "seconds", "bytes") to mapping of setting to float
        How many times less than uniform it takes to reach the target, on average within the horizon that all runs of
        the setting share. A run that never reaches the target takes the whole horizon. NaN if neither selector reaches
        it, or if the setting has no time. Bytes include models in both directions and every question to a client.
    reached : mapping of setting to float
        Share of its seeds that reach the target within the common horizon of rounds.
    kinds : tuple of tuple of str
        Settings that count as one for the mean gain; see :func:`~fedcohort_bench.benchmark.suite.kinds`.
    minority : mapping of setting to (seeds,) array
        Points of the worst group's accuracy above that of uniform's worst group. With too many owners to be groups,
        the worst tenth of clients takes their place.
    """

    label: str
    gain: Mapping[str, FloatArray]
    faster: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    reached: Mapping[str, float] = field(default_factory=dict)
    kinds: _Kinds = ()
    minority: Mapping[str, FloatArray] = field(default_factory=dict)

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

    @property
    def at_a_cost(self) -> tuple[str, ...]:
        """Settings in which it gains on average but loses half a point or more in the worst group."""
        return tuple(
            name
            for name, lost in self.minority.items()
            if float(lost.mean()) <= -_CLEAR and float(self.gain[name].mean()) > 0
        )

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Whether it is worse than uniform, for each setting."""
        return tuple(
            Claim(
                name, MeanInterval.of(values), MeanInterval.of(self.minority[name]) if name in self.minority else None
            )
            for name, values in self.gain.items()
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
        """Half the 95% interval of the mean gain over seeds; NaN with one seed."""
        return half_interval(self._by_seed)

    @property
    def worst(self) -> tuple[str, float]:
        """The setting with the smallest gain, and that gain."""
        setting = min(self.gain, key=lambda name: float(self.gain[name].mean()))
        return setting, float(self.gain[setting].mean())

    @property
    def shortfall(self) -> float:
        """The largest loss against uniform in any setting, in points, as the mean over its seeds."""
        return max(0.0, -self.worst[1])

    @property
    def worst_run(self) -> float:
        """The smallest gain of any single run."""
        return float(min(values.min() for values in self.gain.values()))

    def speed(self, measure: str) -> float:
        """How many times faster it is, the geometric mean over settings; NaN if no setting tells."""
        values = self._speeds(measure)
        return float(np.exp(np.log(values).mean())) if len(values) else math.nan

    def covers(self, measure: str) -> int:
        """The number of settings in :meth:`speed`."""
        return len(self._speeds(measure))

    def _speeds(self, measure: str) -> FloatArray:
        values = np.array(list(self.faster.get(measure, {}).values()), np.float64)
        return values[np.isfinite(values)]

    @property
    def reach_share(self) -> float:
        """Share of all runs that reach uniform's accuracy; NaN if unknown."""
        return float(np.mean(list(self.reached.values()))) if self.reached else math.nan

    @property
    def _pace(self) -> str:
        """The part of the sentence about reaching uniform's accuracy."""
        if self.reach_share < 1:  # bytes cannot be compared: nobody knows what the missing runs would have taken
            return f"; {self.reach_share:.0%} of its runs reach uniform's accuracy"
        paid = self.speed("bytes")
        return "" if math.isnan(paid) else f"; reaches uniform's accuracy with {_compared(1 / paid)} bytes"

    @property
    def sentence(self) -> str:
        """A summary of where it gains and where it loses, made from the figures."""
        gains = {name: float(values.mean()) for name, values in self.gain.items()}
        good = sorted((name for name in gains if gains[name] >= _CLEAR), key=lambda name: -gains[name])
        bad = sorted((name for name in gains if gains[name] <= -_CLEAR), key=gains.__getitem__)
        start = f"{self.mean:+.1f} points on average{self._pace}"
        worst = f"(worst {self.worst[1]:+.1f} in {self.worst[0]})"
        cost = f"; at a minority's cost in {names(self.at_a_cost, 4)}" if self.at_a_cost else ""
        if not good and not bad:
            return f"{start}; never gains or loses half a point {worst}{cost}."
        helps = f"gains half a point or more in {names(good, 4)}" if good else "never gains half a point"
        if not bad:
            return f"{start}; {helps}, and never loses half a point {worst}{cost}."
        return f"{start}; {helps}, but loses in {names(bad, 4)} {worst}{cost}."

    def to_dict(self, rank: float, rank_interval: float) -> dict[str, Any]:
        """Return an entry of the submission as plain values; only all selectors together give the rank."""
        return {
            "label": self.label,
            "mean_gain": self.mean,
            "interval": _none_if_nan(self.interval),
            "worst_setting": self.worst[0],
            "worst_gain": self.worst[1],
            "never_worse_than_uniform_by_more_than": self.shortfall,
            "worst_run": self.worst_run,
            "mean_rank": rank,
            "rank_interval": _none_if_nan(rank_interval),
            **{key: _none_if_nan(self.speed(measure)) for measure, key in _SPEEDS.items()},
            "faster": {
                measure: {name: _none_if_nan(value) for name, value in values.items()}
                for measure, values in self.faster.items()
            },
            "reached": dict(self.reached),
            "gains": {name: values.tolist() for name, values in self.gain.items()},
            "worst_group_gains": {name: values.tolist() for name, values in self.minority.items()},
            "not_worse_than_uniform": {claim.setting: claim.to_dict() for claim in self.claims},
            "use": self.sentence,
        }


def _compared(ratio: float) -> str:
    """Compare an amount with uniform's, in words.

    >>> _compared(0.61), _compared(1.2), _compared(3.4), _compared(1.001)
    ('39% fewer', '20% more', '3.4 times the', 'as many')
    """
    if round(100 * ratio) == 100:
        return "as many"
    if ratio >= 2:
        return f"{ratio:.2g} times the"
    return f"{1 - ratio:.0%} fewer" if ratio < 1 else f"{ratio - 1:.0%} more"


@dataclass(frozen=True)
class Scores:
    """The benchmark's result.

    Attributes
    ----------
    lines : tuple of SelectorScore
        Best mean gain first; ``uniform`` is not among them.
    complete : bool
        Whether every run has finished.
    frozen : Frozen
        The version of the suite and the selectors, as recorded before the first round.
    stated_purpose : str
        The purpose that scores of an earlier version state; this version does not know their seeds and settings.
    """

    data: str
    seeds: tuple[int, ...]
    rounds: int
    settings: tuple[str, ...]
    lines: tuple[SelectorScore, ...]
    complete: bool
    frozen: Frozen
    stated_purpose: str = ""

    @staticmethod
    def from_dict(submission: Mapping[str, Any]) -> Scores:
        """Read a submission."""

        def numbers(values: Mapping[str, float | None]) -> dict[str, float]:
            return {name: math.nan if value is None else float(value) for name, value in values.items()}

        grouped = kinds(submission["data"], submission["settings"])
        lines = [
            SelectorScore(
                entry["label"],
                {name: np.array(entry["gains"][name], np.float64) for name in submission["settings"]},
                {measure: numbers(values) for measure, values in entry["faster"].items()},
                numbers(entry["reached"]),
                grouped,
                {name: np.array(values, np.float64) for name, values in entry["worst_group_gains"].items()},
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
        )

    @property
    def purpose(self) -> str:
        """What the result may be used for: "report", "tuning", "own" seeds, or "trial" if it is not the whole suite."""
        if self.frozen.suite != VERSION:
            return self.stated_purpose
        whole = {setting.name for setting in suite(self.data)} if self.data in DATASETS else set(self.settings)
        if self.rounds != rounds_of(self.data) or set(self.settings) != whole:
            return "trial"
        return purpose_of(self.seeds)

    @property
    def _labels(self) -> list[str]:
        return ["uniform", *(line.label for line in self.lines)]

    @cached_property
    def kinds(self) -> _Kinds:
        """Settings that count as one when accuracy is compared."""
        return kinds(self.data, self.settings)

    @cached_property
    def _gains(self) -> FloatArray:
        """(kinds, labels, seeds); uniform gains nothing."""
        zero = np.zeros(len(self.seeds))
        return np.array(
            [
                [zero, *(np.mean([line.gain[setting] for setting in kind], axis=0) for line in self.lines)]
                for kind in self.kinds
            ]
        )

    @cached_property
    def ranks(self) -> dict[str, tuple[float, float]]:
        """Mean rank of every label, uniform included (1 is best), and half its 95% interval over seeds."""
        if not self._gains.size:
            return {}
        from scipy.stats import rankdata

        by_seed = rankdata(-self._gains, axis=1).mean(axis=0)  # (labels, seeds)
        return {
            label: (float(row.mean()), half_interval(row)) for label, row in zip(self._labels, by_seed, strict=True)
        }

    @cached_property
    def ranking(self) -> SelectorRanking | None:
        """All selectors against each other, uniform included, over the kinds of settings; seeds are averaged."""
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
            "critical_difference": None if self.ranking is None else self.ranking.difference,
            "uniform_rank": _none_if_nan(self.ranks["uniform"][0]) if self.ranks else None,
            "selectors": [line.to_dict(*self.ranks[line.label]) for line in self.lines],
        }


def score(*results: Results) -> Scores:
    """Score experiments of :func:`fedcohort_bench.benchmark.suite.table`: one, or several with different settings."""
    frozen = merge_frozen([part.path for part in results])
    data, rounds = _data_and_rounds(results)
    boards = [board for part in results for board in part.leaderboards()]
    labels = _check_boards(boards)
    seeds = seeds_of(boards)
    grouped = kinds(data, [board.setting for board in boards])
    lines = [_line(label, boards, seeds, grouped) for label in labels if label != "uniform"]
    return Scores(
        data=data,
        seeds=seeds,
        rounds=rounds,
        settings=tuple(board.setting for board in boards),
        lines=tuple(sorted(lines, key=lambda line: -line.mean)),
        complete=all(board.finished for board in boards),
        frozen=frozen,
    )


def _data_and_rounds(results: Sequence[Results]) -> tuple[str, int]:
    pairs = {(data_title(part.config["data"]), int(part.config["run"]["rounds"])) for part in results}
    if len(pairs) != 1:
        raise InputError(f"Results that are scored together must share dataset and rounds. Got {sorted(pairs)}.")
    return pairs.pop()


def _check_boards(boards: Sequence[Leaderboard]) -> list[str]:
    """Check that tables can be scored together; return the selectors' labels."""
    if len({board.setting for board in boards}) < len(boards):
        raise InputError("Results that are scored together must have different settings.")
    labels = [row.label for row in boards[0].rows] if boards else []
    if "uniform" not in labels:
        raise InputError("The benchmark compares with 'uniform', which these results lack.")
    return labels


def seeds_of(boards: Iterable[Leaderboard]) -> tuple[int, ...]:
    """Return all seeds of the tables, sorted."""
    return tuple(sorted({seed.seed for board in boards for row in board.rows for seed in row.seeds}))


def _line(label: str, boards: Sequence[Leaderboard], seeds: Sequence[int], grouped: _Kinds) -> SelectorScore:
    gain: dict[str, FloatArray] = {}
    faster: dict[str, dict[str, float]] = {measure: {} for measure in _SPEEDS}
    reached: dict[str, float] = {}
    minority: dict[str, FloatArray] = {}
    for board in boards:
        row = next(row for row in board.rows if row.label == label)
        ours, theirs = _by_seed(row), _by_seed(board.base)
        gain[board.setting] = np.array(
            [100 * (terminal_accuracy(ours[seed]) - terminal_accuracy(theirs[seed])) for seed in seeds]
        )
        for measure in _SPEEDS:
            faster[measure][board.setting] = _times_faster(board, row, measure)
        reached[board.setting] = _reach_share(board, row)
        lost = [worst_group_accuracy(ours[seed]) - worst_group_accuracy(theirs[seed]) for seed in seeds]
        if np.isfinite(lost).all():
            minority[board.setting] = 100 * np.array(lost)
    return SelectorScore(label, gain, faster, reached, grouped, minority)


def _times_faster(board: Leaderboard, row: LeaderRow, measure: str) -> float:
    """Return how many times less than the baseline a row takes to reach the target; NaN if they cannot be compared."""
    limit = horizon(board, measure)
    row_mean, base = (restricted_mean(each, measure, limit) for each in (row, board.base))
    # If neither reaches the target, both take the whole horizon; a ratio of 1 would say that they are equally fast.
    comparable = row_mean > 0 and base > 0 and min(row_mean, base) < limit
    return base / row_mean if comparable else math.nan


def _reach_share(board: Leaderboard, row: LeaderRow) -> float:
    limit = horizon(board, "rounds")
    times = [_cost_to_target(seed, "rounds")[0] for seed in row.seeds]
    return float(np.mean([time is not None and time <= limit for time in times]))


def horizon(board: Leaderboard, measure: str) -> float:
    """Return how far every run of a setting got, in rounds, seconds or megabytes; NaN if all runs were lost.

    Runs that diverged or failed do not shorten it, because they will never reach the target.
    """
    ends = [_cost_to_target(seed, measure)[1] for row in board.rows for seed in row.seeds if seed.state not in LOST]
    return float(min(ends)) if ends else math.nan


def restricted_mean(row: LeaderRow, measure: str, limit: float) -> float:
    """Return the mean time to the target; runs that take longer or never reach it count with ``limit``.

    This is the restricted mean survival time, for runs that are all censored at the same moment.
    """
    times = [_cost_to_target(seed, measure)[0] for seed in row.seeds]
    return float(np.mean([limit if time is None else min(time, limit) for time in times]))


def _cost_to_target(seed: SeedRow, measure: str) -> tuple[float | None, float]:
    """Return what a run took to reach the target (None if it did not), and what it took in total."""
    match measure:
        case "rounds":
            return seed.rounds_to[-1], seed.rounds
        case "seconds":
            return seed.seconds_to[-1], seed.clock
        case _:
            return seed.megabytes_to[-1], seed.megabytes + seed.query_megabytes


def _by_seed(row: LeaderRow) -> dict[int, SeedRow]:
    return {seed.seed: seed for seed in row.seeds}


def terminal_accuracy(seed: SeedRow) -> float:
    """Return the terminal accuracy of a run; 0 if it diverged or failed."""
    return 0.0 if math.isnan(seed.terminal) else seed.terminal


def worst_group_accuracy(seed: SeedRow) -> float:
    """Return the accuracy of a run's worst group, or of the worst tenth of clients if there are no groups.

    A run that diverged or failed is 0% accurate for everybody. NaN if neither is known.
    """
    if seed.state in LOST:
        return 0.0
    value = seed.fair.get("worst_group", math.nan)
    return seed.fair.get("worst_tenth", math.nan) if math.isnan(value) else value


def half_interval(values: FloatArray) -> float:
    """Return half the 95% interval of the mean of ``values`` (n,); NaN for fewer than two.

    >>> round(half_interval(np.array([1.0, 3.0])), 2)
    12.71
    """
    if len(values) < 2:
        return math.nan
    from scipy.stats import t

    # Student's t: with five seeds its interval is 40% wider than the normal one.
    return float(t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
