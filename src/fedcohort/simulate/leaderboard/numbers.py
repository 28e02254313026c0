"""The leaderboard's numbers: the papers' metrics over seeds, and how sure a difference to the baseline is.

Definitions of the metrics are those of :mod:`fedcohort.simulate.metrics`. Comparisons are paired: only
seeds that both selectors ran count, because the same seed means the same federation. A run that
diverged keeps what it reached before (best accuracy, rounds to a target), but has no terminal accuracy; it is counted
and shown as diverged. So is one that failed because something of its own raised an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.errors import InputError
from fedcohort.core.registry import nearest
from fedcohort.simulate.leaderboard.significance import holm, paired_t_test
from fedcohort.simulate.metrics import (
    TERMINAL_ROUNDS,
    Curve,
    Metric,
    Spread,
    relative_improvement,
    speed_up,
)

LOST = ("diverged", "failed")  # states of runs that have no terminal accuracy
_BYTES = ("bytes_down", "bytes_up")
_QUERY_BYTES = ("query_bytes_down", "query_bytes_up")
_AT_THE_END = ("worst_group", "worst_tenth", "client_spread")  # means over the same rounds as terminal accuracy
_SO_FAR = ("jain", "longest_absence")  # as the last evaluation found them
FAIRNESS = (*_AT_THE_END, *_SO_FAR, "asked")
"""Columns of ``rounds/`` that say who pays for an average."""
CLEAR = 0.005  # of accuracy: what a minority loses beyond it is worth a sentence


class RunNumbers(Protocol):
    """What the leaderboard needs of a run: its identity, and its columns over the rounds so far."""

    @property
    def label(self) -> str:
        """What the configuration calls the selector."""

    @property
    def selector(self) -> str:
        """Its registered name."""

    @property
    def seed(self) -> int:
        """Of the run."""

    @property
    def state(self) -> str:
        """Running, finished, stopped, diverged or failed."""

    @property
    def round(self) -> IntArray:
        """(T,) finished rounds, ascending from 0."""

    @property
    def values(self) -> Mapping[str, FloatArray]:
        """(T,) columns by name, NaN where nothing was recorded; "accuracy" is the score of whatever metric there is."""


@dataclass(frozen=True)
class Options:
    """How to compare; everything has a default.

    Attributes
    ----------
    targets : tuple of float
        Accuracies to reach, in (0, 1]. Default: where the baseline ends, rounded down to a whole percent.
    terminal : int, optional
        How many last rounds terminal accuracy is the mean of. Default: 50, or a fifth of a run shorter than 250.
    baseline : str, optional
        Label or selector that the others are compared with. Default: uniform, else the first.
    reference : str, optional
        Setting that stands for IID data.
    strict : bool
        Whether a missing baseline is an error.
    metric : Metric
        What models are judged by. Targets are its scores: negative where less of it is better.
    fixed : frozenset of str
        Options the caller gave, which a setting's own values do not replace.
    """

    targets: tuple[float, ...] = ()
    terminal: int | None = None
    baseline: str | None = None
    reference: str | None = None
    strict: bool = False
    metric: Metric = Metric()
    fixed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Options:
        """Return what the section ``[run]`` of a configuration says."""
        run = config.get("run")
        run = run if isinstance(run, Mapping) else {}
        targets, terminal = run.get("targets", ()), run.get("terminal")
        metric = Metric.of(config.get("task"))
        return cls(
            targets=tuple(metric.score(float(t)) for t in targets) if isinstance(targets, (list, tuple)) else (),
            metric=metric,
            terminal=terminal if isinstance(terminal, int) and terminal > 0 else None,
            baseline=run.get("baseline"),
            reference=run.get("reference"),
        )

    def override(
        self, targets: Sequence[float] | None, terminal: int | None, baseline: str | None, reference: str | None
    ) -> Options:
        """Return these options with the caller's in place of the configuration's."""
        return replace(
            self,
            targets=tuple(self.metric.score(t) for t in targets) if targets else self.targets,
            terminal=terminal or self.terminal,
            baseline=baseline or self.baseline,
            reference=reference or self.reference,
            strict=self.strict or baseline is not None,
            fixed=frozenset(name for name, value in (("targets", targets), ("terminal", terminal)) if value),
        )


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


@dataclass(frozen=True)
class Leaderboard:
    """The table of one setting, best terminal accuracy first; selectors that lost a run come after all others.

    Attributes
    ----------
    targets : tuple of float
        Ascending; the highest is the one speed-ups are about.
    target_source : str
        Where that one comes from.
    window : int
        How many last rounds terminal accuracy is the mean of, in the longest run.
    window_source : str
        Why so many.
    progress : Progress
    metric : Metric
        What "best" and "terminal" are scores of.
    """

    setting: str
    targets: tuple[float, ...]
    target_source: str
    window: int
    window_source: str
    baseline: str
    reference: str | None
    rows: tuple[LeaderRow, ...]
    progress: RunProgress
    metric: Metric = Metric()

    @property
    def target(self) -> float:
        """The accuracy that speed-ups are about; NaN when the baseline was never evaluated."""
        return self.targets[-1]

    @property
    def base(self) -> LeaderRow:
        """The baseline's row."""
        return next(row for row in self.rows if row.baseline)

    @property
    def finished(self) -> bool:
        """Whether every run has ended."""
        return self.progress.running == 0

    @property
    def at_a_cost(self) -> tuple[tuple[LeaderRow, float], ...]:
        """Selectors that gain on average and lose in the worst group, each with that loss (negative)."""
        base = {seed.seed: seed.fair.get("worst_group", math.nan) for seed in self.base.seeds}
        found = []
        for row in self.rows:
            lost = Spread.of([s.fair.get("worst_group", math.nan) - base.get(s.seed, math.nan) for s in row.seeds])
            if row.paired is not None and row.paired.difference > 0 and lost.mean < -CLEAR:
                found.append((row, lost.mean))
        return tuple(found)

    @property
    def note(self) -> str:
        """What a reader must know about target, window, spread and p-values."""
        from fedcohort.simulate.leaderboard.table import note

        return note(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain values, None where a number is not known."""
        from fedcohort.simulate.leaderboard.table import to_dict

        return to_dict(self)

    def __str__(self) -> str:
        from fedcohort.simulate.leaderboard.formats import to_text
        from fedcohort.simulate.leaderboard.table import leaderboard_table

        return to_text(leaderboard_table(self))

    def _repr_html_(self) -> str:
        from fedcohort.simulate.leaderboard.formats import notebook
        from fedcohort.simulate.leaderboard.table import leaderboard_table

        return notebook([leaderboard_table(self)])


# -- one setting ----------------------------------------------------------------------------------------------------


def find_baseline(labels: Mapping[str, str], options: Options, setting: str) -> str:
    """Return the label that the others are compared with: the one named, else uniform, else the first.

    Parameters
    ----------
    labels : mapping of label to selector
    setting : name of the setting, for the error
    """
    name = options.baseline
    if name is not None:
        for label, selector in labels.items():
            # where two experiments use one label, theirs are followed by the experiment's name
            if name in (label, selector) or label.startswith(f"{name} ("):
                return label
        if options.strict:
            near = nearest(name, list(labels))
            raise InputError(
                f"There is no selector {name!r} to compare with in the setting {setting!r}. Got: {', '.join(labels)}.",
                hint=f"did you mean {near!r}?" if near else None,
            )
    return next((label for label, selector in labels.items() if selector == "uniform"), next(iter(labels)))


def terminal_window(rounds: int, asked: int | None = None) -> int:
    """Return how many last rounds terminal accuracy is the mean of.

    As many as requested; by default 50, as in FedACS, but at most a fifth of the run. A run no longer than the
    requested window uses a fifth too, because the mean over a whole curve is not where it ends.

    >>> terminal_window(2000), terminal_window(40), terminal_window(40, asked=20), terminal_window(40, asked=50)
    (50, 8, 20, 8)
    """
    fifth = max(1, rounds // 5)
    if asked is None:
        return min(TERMINAL_ROUNDS, fifth)
    return asked if asked < rounds else fifth


def leaderboard(
    setting: str,
    runs: Sequence[RunNumbers],
    options: Options | None = None,
    *,
    planned: int | None = None,
    ideal: float | None = None,
) -> Leaderboard:
    """Compute the leaderboard of one setting.

    Parameters
    ----------
    setting : str
        Its name.
    runs : sequence of RunNumbers
        At least one; runs of one label differ in their seed.
    planned : int, optional
        Rounds planned for each run.
    ideal : float, optional
        Terminal accuracy of the baseline on IID data.
    """
    options = options or Options()
    labels = {run.label: run.selector for run in runs}
    base = find_baseline(labels, options, setting)
    for target in options.targets:
        if options.metric.share and not 0 < target <= 1:
            raise InputError(f"A target accuracy must be in (0, 1]. Got {target:g}.", hint="62% is 0.62")
    ends = {(run.label, run.seed): terminal_accuracy(run, options) for run in runs}
    level, source = _default_target(base, [end for (label, _), end in ends.items() if label == base], options.metric)
    targets = tuple(sorted(set(options.targets))) or (level,)
    by_label = {label: [_seed(run, targets, options) for run in runs if run.label == label] for label in labels}
    against = {seed.seed: seed.terminal for seed in by_label[base]}
    paired = {
        label: _compare_pairs({s.seed: s.terminal for s in seeds}, against)
        for label, seeds in by_label.items()
        if label != base
    }
    corrected = dict(zip(paired, holm([p.p for p in paired.values()]), strict=True))
    own = Spread.of(list(against.values())).mean
    rows = []
    for label, seeds in by_label.items():
        seeds.sort(key=lambda seed: seed.seed)
        end = Spread.of([seed.terminal for seed in seeds]).mean
        better = math.nan if ideal is None or label == base else relative_improvement(end, own, ideal)
        rows.append(
            LeaderRow(
                label=label,
                selector=labels[label],
                baseline=label == base,
                seeds=tuple(seeds),
                to_target=tuple(_to_target(seeds, by_label[base], i, t) for i, t in enumerate(targets)),
                improvement=better,
                paired=None if label == base else replace(paired[label], p=corrected[label]),
            )
        )
    rows.sort(key=lambda r: (r.lost > 0, -r.terminal.mean if not math.isnan(r.terminal.mean) else math.inf, r.label))
    longest = max(seed.rounds for row in rows for seed in row.seeds)
    return Leaderboard(
        setting=setting,
        targets=targets,
        target_source="as configured" if options.targets else source,
        window=terminal_window(longest, options.terminal),
        window_source=_window_source(longest, options.terminal),
        baseline=base,
        reference=options.reference if ideal is not None else None,
        rows=tuple(rows),
        progress=_progress(runs, planned),
        metric=options.metric,
    )


def _progress(runs: Sequence[RunNumbers], planned: int | None) -> RunProgress:
    going = [_rounds_of(run) for run in runs if run.state == "running"]
    rounds = going or [_rounds_of(run) for run in runs]
    return RunProgress(min(rounds), max(rounds), planned, len(going))


def _rounds_of(run: RunNumbers) -> int:
    return int(run.round[-1]) + 1 if len(run.round) else 0


def _window_source(rounds: int, asked: int | None) -> str:
    if asked is not None and asked < rounds:
        return "as configured"
    fifth = f"a fifth of {rounds:,}"
    if asked is not None:
        return f"{fifth}; the {asked} configured are the whole run"
    return fifth if rounds // 5 < TERMINAL_ROUNDS else "as in FedACS"


def _default_target(base: str, ends: Sequence[float], metric: Metric) -> tuple[float, str]:
    level = Spread.of(list(ends)).mean
    if math.isnan(level):
        return math.nan, f"unknown, {base} has no terminal {metric.name}"
    step = 100 if abs(level) >= 0.01 else 10_000
    rounded = "rounded down" if metric.higher else "rounded up"
    return math.floor(level * step + 1e-9) / step, f"where {base} ends, {rounded}"


def _curve(run: RunNumbers) -> Curve:
    # Files keep 32 bits of an accuracy; without rounding 0.7 would lie below a target of 0.7.
    return Curve(run.round, np.round(np.asarray(run.values["accuracy"], np.float64), 6))


def terminal_accuracy(run: RunNumbers, options: Options) -> float:
    """Return where a run ends; NaN for one that diverged or failed."""
    return math.nan if run.state in LOST else _curve(run).terminal(terminal_window(_rounds_of(run), options.terminal))


def _seed(run: RunNumbers, targets: Sequence[float], options: Options) -> SeedRow:
    curve = _curve(run)
    rounds_to = tuple(None if math.isnan(target) else curve.rounds_to(target) for target in targets)
    clock = run.values.get("clock")
    sent = _megabytes_sent(run)
    return SeedRow(
        seed=run.seed,
        state=run.state,
        rounds=_rounds_of(run),
        rounds_to=rounds_to,
        seconds_to=tuple(_at(run.round, clock, rounds) for rounds in rounds_to),
        megabytes_to=tuple(_at(run.round, sent, rounds) for rounds in rounds_to),
        best=curve.best,
        early_stop=curve.early_stop(_rounds_of(run) if run.state == "stopped" else None),
        terminal=terminal_accuracy(run, options),
        window=terminal_window(_rounds_of(run), options.terminal),
        qcid=_mean(run.values.get("qcid")),
        megabytes=_sum(run, _BYTES) / 1e6,
        query_megabytes=_sum(run, _QUERY_BYTES) / 1e6,
        clock=float(clock[-1]) if clock is not None and len(clock) else math.nan,
        fair=_fair(run, options),
    )


def _fair(run: RunNumbers, options: Options) -> dict[str, float]:
    window = terminal_window(_rounds_of(run), options.terminal)
    found = {}
    for name in FAIRNESS:
        values = np.asarray(run.values.get(name, ()), np.float64)
        known = values[np.isfinite(values)]
        if not len(known) or (name in _AT_THE_END and run.state in LOST):
            found[name] = math.nan
        elif name in _AT_THE_END:
            found[name] = Curve(run.round, values).terminal(window)
        else:
            found[name] = float(known[-1] if name in _SO_FAR else known.sum())
    return found


def _at(round_: IntArray, running: FloatArray | None, rounds: int | None) -> float | None:
    """Return the value of a running total, such as the clock, after so many rounds."""
    if rounds is None or running is None:
        return None
    return float(running[int(np.searchsorted(round_, rounds - 1))])


def _megabytes_sent(run: RunNumbers) -> FloatArray | None:
    """Return the megabytes of all rounds so far, both ways and queries included; None where they are unknown."""
    columns = [run.values[name] for name in (*_BYTES, *_QUERY_BYTES) if name in run.values]
    if not columns or not any(np.isfinite(column).any() for column in columns):
        return None
    return np.asarray(np.cumsum(np.nansum(columns, axis=0)) / 1e6, np.float64)


def _mean(values: FloatArray | None) -> float:
    known = np.zeros(0) if values is None else values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _sum(run: RunNumbers, names: Sequence[str]) -> float:
    columns = [run.values[name] for name in names if name in run.values]
    if not columns or not any(np.isfinite(column).any() for column in columns):
        return math.nan
    return float(sum(np.nansum(column) for column in columns))


def _to_target(seeds: Sequence[SeedRow], base: Sequence[SeedRow], place: int, target: float) -> ToTarget:
    ours, theirs = (_mean_if_all([seed.rounds_to[place] for seed in rows]) for rows in (seeds, base))
    return ToTarget(
        target=target,
        rounds=Spread.of([seed.rounds_to[place] for seed in seeds]),
        seconds=Spread.of([seed.seconds_to[place] for seed in seeds]),
        speed_up=speed_up(ours, theirs),
    )


def _mean_if_all(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def _compare_pairs(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Paired:
    seeds = [s for s in ours if s in theirs and not math.isnan(ours[s]) and not math.isnan(theirs[s])]
    difference = np.array([ours[s] - theirs[s] for s in seeds], np.float64)
    if not len(difference):
        return Paired(0, math.nan, 0, math.nan)
    return Paired(len(seeds), float(difference.mean()), int((difference > 0).sum()), paired_t_test(difference))
