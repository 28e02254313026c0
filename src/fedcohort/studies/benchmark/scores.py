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
from fedcohort.simulate.leaderboard.numbers import LOST
from fedcohort.simulate.leaderboard.words import names
from fedcohort.simulate.store.results import Results
from fedcohort.studies.benchmark.frozen import Frozen, together
from fedcohort.studies.benchmark.own import data_title
from fedcohort.studies.benchmark.suite import DATASETS, VERSION, kinds, purpose_of, rounds_of, suite

# What a submission calls each speed.
_SPEEDS = {"rounds": "faster_in_rounds", "seconds": "faster_in_seconds", "bytes": "fewer_bytes"}
_Kinds = tuple[tuple[str, ...], ...]
_CLEAR = 0.5  # points from which a gain or a loss is worth a word; the sentences call it half a point


@dataclass(frozen=True)
class MeanInterval:
    """A mean over seeds, and half of its 95% interval (NaN with one seed)."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: FloatArray) -> MeanInterval:
        """Return that of some values."""
        return cls(float(values.mean()), half_interval(values))

    def to_list(self) -> list[Any]:
        """Return mean, half interval and verdict as plain values."""
        return [self.mean, _plain(self.half), self.verdict]

    @property
    def text(self) -> str:
        """In points, with its interval where there is one."""
        return f"{self.mean:+.1f}" + ("" if math.isnan(self.half) else f" ± {self.half:.1f}")

    @property
    def verdict(self) -> str:
        """What the seeds say of half a point below uniform: "no worse", "worse", or "open" where both are possible."""
        half = 0.0 if math.isnan(self.half) else self.half
        if self.mean - half >= -_CLEAR:
            return "no worse"
        return "worse" if self.mean + half < -_CLEAR else "open"


@dataclass(frozen=True)
class Claim:
    """Never worse than uniform by more than half a point? One setting's answer, for the mean and the worst group."""

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
        the setting have in common: a run that does not arrive takes the whole horizon, and more is not known of it. NaN
        where neither arrives or nothing takes time. Bytes are those of models both ways and of every question to a
        client. Empty for scores of an earlier version, which counted runs that never arrive with their own end.
    reached : mapping of setting to float
        Share of its seeds that reach the target within the common horizon of rounds.
    minority : mapping of setting to (seeds,) array
        Points of the worst group's accuracy above that of uniform's worst group; of the worst tenth of clients where
        there are too many owners to be groups. Empty for scores of the first version.
    kinds : tuple of tuple of str
        Settings that count as one for the mean gain; see :func:`~fedcohort.studies.benchmark.suite.kinds`.
    """

    label: str
    gain: Mapping[str, FloatArray]
    faster: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    reached: Mapping[str, float] = field(default_factory=dict)
    kinds: tuple[tuple[str, ...], ...] = ()
    minority: Mapping[str, FloatArray] = field(default_factory=dict)

    @property
    def worst_minority(self) -> tuple[str, float]:
        """The setting whose worst group loses most against uniform's, and by how much; NaN where it is not known."""
        if not self.minority:
            return "", math.nan
        setting = min(self.minority, key=lambda name: float(self.minority[name].mean()))
        return setting, float(self.minority[setting].mean())

    @property
    def mean_minority(self) -> float:
        """Mean over the kinds of settings of what the worst group gains, in points; NaN where it is not known."""
        found = [
            np.mean([self.minority[n].mean() for n in kind if n in self.minority])
            for kind in self._kinds
            if any(n in self.minority for n in kind)
        ]
        return float(np.mean(found)) if found else math.nan

    @property
    def at_a_cost(self) -> tuple[str, ...]:
        """Settings in which it gains on average by losing half a point or more in the worst group."""
        return tuple(
            name
            for name, lost in self.minority.items()
            if float(lost.mean()) <= -_CLEAR and float(self.gain[name].mean()) > 0
        )

    @property
    def claims(self) -> tuple[Claim, ...]:
        """How it compares with uniform in every setting, for the mean and for the worst group."""
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
        """Half of the 95% interval of the mean gain, over the seeds; NaN with one seed."""
        return half_interval(self._by_seed)

    @property
    def worst(self) -> tuple[str, float]:
        """The setting with the smallest gain, and that gain."""
        setting = min(self.gain, key=lambda name: float(self.gain[name].mean()))
        return setting, float(self.gain[setting].mean())

    @property
    def shortfall(self) -> float:
        """By how many points it is worse than uniform at most, in the mean over the seeds of any setting."""
        return max(0.0, -self.worst[1])

    @property
    def worst_run(self) -> float:
        """The smallest gain of any single run."""
        return float(min(values.min() for values in self.gain.values()))

    def speed(self, measure: str) -> float:
        """Geometric mean over settings of how many times faster; NaN where no setting tells."""
        values = self._speeds(measure)
        return float(np.exp(np.log(values).mean())) if len(values) else math.nan

    def covers(self, measure: str) -> int:
        """How many settings :meth:`speed` is a mean over."""
        return len(self._speeds(measure))

    def _speeds(self, measure: str) -> FloatArray:
        values = np.array(list(self.faster.get(measure, {}).values()), np.float64)
        return values[np.isfinite(values)]

    @property
    def arrived(self) -> float:
        """Share of all runs that reach uniform's accuracy; NaN where it is not known."""
        return float(np.mean(list(self.reached.values()))) if self.reached else math.nan

    @property
    def _pace(self) -> str:
        """How it gets to uniform's accuracy, as a part of the sentence."""
        if self.arrived < 1:  # bytes are not compared then: what the missing runs would have taken is not known
            return f"; {self.arrived:.0%} of its runs reach uniform's accuracy"
        paid = self.speed("bytes")
        return "" if math.isnan(paid) else f"; reaches uniform's accuracy with {_compared(1 / paid)} bytes"

    @property
    def sentence(self) -> str:
        """When to use it, from the figures alone."""
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
        """Return plain values: an entry of the submission. The rank follows from all entries together."""
        return {
            "label": self.label,
            "mean_gain": self.mean,
            "interval": _plain(self.interval),
            "worst_setting": self.worst[0],
            "worst_gain": self.worst[1],
            "never_worse_than_uniform_by_more_than": self.shortfall,
            "worst_run": self.worst_run,
            "mean_rank": rank,
            "rank_interval": _plain(rank_interval),
            **{key: _plain(self.speed(measure)) for measure, key in _SPEEDS.items()},
            "faster": {
                measure: {name: _plain(value) for name, value in values.items()}
                for measure, values in self.faster.items()
            },
            "reached": dict(self.reached),
            "gains": {name: values.tolist() for name, values in self.gain.items()},
            "worst_group_gains": {name: values.tolist() for name, values in self.minority.items()},
            "not_worse_than_uniform": {claim.setting: claim.to_dict() for claim in self.claims},
            "use": self.sentence,
        }


def _compared(ratio: float) -> str:
    """Return an amount as compared with uniform's.

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
    frozen : Frozen or None
        What was run, as it was written down before the first round.
    version : int
        Of the suite.
    """

    data: str
    seeds: tuple[int, ...]
    rounds: int
    settings: tuple[str, ...]
    lines: tuple[SelectorScore, ...]
    complete: bool
    frozen: Frozen | None = None
    version: int = VERSION
    stated_purpose: str = ""  # by scores of an earlier version, whose seeds and settings this version does not know

    @staticmethod
    def from_dict(submission: Mapping[str, Any]) -> Scores:
        """Return the scores a submission holds; one of an earlier version has no speeds."""

        def numbers(values: Mapping[str, float | None]) -> dict[str, float]:
            return {name: math.nan if value is None else float(value) for name, value in values.items()}

        grouped = kinds(submission["data"], submission["settings"])
        lines = [
            SelectorScore(
                entry["label"],
                {name: np.array(entry["gains"][name], np.float64) for name in submission["settings"]},
                {measure: numbers(values) for measure, values in entry.get("faster", {}).items()},
                numbers(entry.get("reached", {})),
                grouped,
                {name: np.array(values, np.float64) for name, values in entry.get("worst_group_gains", {}).items()},
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
            frozen=None if submission.get("frozen") is None else Frozen.from_dict(submission["frozen"]),
            version=submission["benchmark"],
            stated_purpose=submission["purpose"],
        )

    @property
    def purpose(self) -> str:
        """What the result is good for: "report", "tuning", "own" seeds, or "trial" where it is not the whole suite."""
        if self.version != VERSION:
            return self.stated_purpose
        whole = {setting.name for setting in suite(self.data)} if self.data in DATASETS else set(self.settings)
        if self.rounds != rounds_of(self.data) or set(self.settings) != whole:
            return "trial"
        return purpose_of(self.seeds)

    @property
    def _labels(self) -> list[str]:
        return ["uniform", *(line.label for line in self.lines)]

    @cached_property
    def kinds(self) -> tuple[tuple[str, ...], ...]:
        """Settings that count as one where accuracy is compared."""
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
        """Mean rank of every label, uniform included (1 is best), and half of its 95% interval over the seeds."""
        if not self._gains.size:
            return {}
        from scipy.stats import rankdata

        by_seed = rankdata(-self._gains, axis=1).mean(axis=0)  # (labels, seeds)
        return {
            label: (float(row.mean()), half_interval(row)) for label, row in zip(self._labels, by_seed, strict=True)
        }

    @cached_property
    def ranking(self) -> SelectorRanking | None:
        """All against all, uniform included, over the kinds of settings, each with its mean over the seeds."""
        return rank_selectors(self._labels, self._gains.mean(axis=2) if self._gains.size else np.zeros((0, 1)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: the submission."""
        return {
            "benchmark": self.version,
            "fedcohort": fedcohort.__version__,
            "data": self.data,
            "seeds": list(self.seeds),
            "rounds": self.rounds,
            "purpose": self.purpose,
            "complete": self.complete,
            "frozen": None if self.frozen is None else self.frozen.to_dict(),
            "settings": list(self.settings),
            "critical_difference": None if self.ranking is None else self.ranking.difference,
            "uniform_rank": _plain(self.ranks["uniform"][0]) if self.ranks else None,
            "selectors": [line.to_dict(*self.ranks[line.label]) for line in self.lines],
        }


def score(*results: Results) -> Scores:
    """Score experiments of :func:`fedcohort.studies.benchmark.suite.table`: one, or several with different settings."""
    frozen = together([part.path for part in results])
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
        version=VERSION if frozen is None else frozen.suite,
    )


def _data_and_rounds(results: Sequence[Results]) -> tuple[str, int]:
    found = {(data_title(part.config["data"]), int(part.config["run"]["rounds"])) for part in results}
    if len(found) != 1:
        raise InputError(f"Results that are scored together must be of one dataset and length. Got {sorted(found)}.")
    return found.pop()


def _check_boards(boards: Sequence[Leaderboard]) -> list[str]:
    """Refuse tables that cannot be scored together; return the selectors' labels."""
    if len({board.setting for board in boards}) < len(boards):
        raise InputError("Results that are scored together must have different settings.")
    labels = [row.label for row in boards[0].rows] if boards else []
    if "uniform" not in labels:
        raise InputError("The benchmark compares with 'uniform', which these results lack.")
    return labels


def seeds_of(boards: Iterable[Leaderboard]) -> tuple[int, ...]:
    """Return all seeds of some tables, sorted."""
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
        reached[board.setting] = _share_arrived(board, row)
        lost = [worst_group_accuracy(ours[seed]) - worst_group_accuracy(theirs[seed]) for seed in seeds]
        if np.isfinite(lost).all():
            minority[board.setting] = 100 * np.array(lost)
    return SelectorScore(label, gain, faster, reached, grouped, minority)


def _times_faster(board: Leaderboard, row: LeaderRow, measure: str) -> float:
    """Return how many times less than the baseline a row takes to the target; NaN where that cannot be said."""
    limit = horizon(board, measure)
    mine, base = (restricted_mean(which, measure, limit) for which in (row, board.base))
    # Where neither arrives both take the whole horizon: a ratio of 1 would claim that they are equally fast.
    tells = mine > 0 and base > 0 and min(mine, base) < limit
    return base / mine if tells else math.nan


def _share_arrived(board: Leaderboard, row: LeaderRow) -> float:
    limit = horizon(board, "rounds")
    times = [_cost_to_target(seed, "rounds")[0] for seed in row.seeds]
    return float(np.mean([time is not None and time <= limit for time in times]))


def horizon(board: Leaderboard, measure: str) -> float:
    """Return how long every run of a setting was watched, in rounds, seconds or megabytes; NaN where that is unknown.

    Runs that diverged or failed do not shorten it, because they will never reach the target.
    """
    ends = [_cost_to_target(seed, measure)[1] for row in board.rows for seed in row.seeds if seed.state not in LOST]
    return float(min(ends)) if ends else math.nan


def restricted_mean(row: LeaderRow, measure: str, limit: float) -> float:
    """Return the mean time to the target, counting at most ``limit``, also for runs that never reach it.

    This is the restricted mean time of survival analysis, for runs that are all censored at the same moment.
    """
    times = [_cost_to_target(seed, measure)[0] for seed in row.seeds]
    return float(np.mean([limit if time is None else min(time, limit) for time in times]))


def _cost_to_target(seed: SeedRow, measure: str) -> tuple[float | None, float]:
    """Return what a run took to reach the target, None where it did not, and what it took in all."""
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
    """Return where a run ends; 0 for one that diverged or failed."""
    return 0.0 if math.isnan(seed.terminal) else seed.terminal


def worst_group_accuracy(seed: SeedRow) -> float:
    """Return how accurate a run is for its worst group, or for the worst tenth of clients where groups are single ones.

    A run that diverged or failed is 0% accurate for everybody; NaN where it is not known.
    """
    if seed.state in LOST:
        return 0.0
    value = seed.fair.get("worst_group", math.nan)
    return seed.fair.get("worst_tenth", math.nan) if math.isnan(value) else value


def half_interval(values: FloatArray) -> float:
    """Return half of the 95% interval of the mean of ``values`` (n,); NaN for fewer than two.

    >>> round(half_interval(np.array([1.0, 3.0])), 2)
    12.71
    """
    if len(values) < 2:
        return math.nan
    from scipy.stats import t

    # Student's t, not a normal: with five seeds the interval is 40% wider.
    return float(t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else value
