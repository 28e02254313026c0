"""The leaderboard's numbers: the papers' metrics over seeds, and how certain a difference to the baseline is.

:mod:`fedcohort.simulate.metrics` defines the metrics. Comparisons are paired: only seeds that both selectors ran count,
because the same seed means the same federation. A run that diverged keeps what it reached before (best accuracy, rounds
to a target), but has no terminal accuracy, and it is counted and shown as diverged. The same holds for a run that
failed with an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.errors import InputError
from fedcohort.core.registry import suggest
from fedcohort.simulate.leaderboard.rows import (
    AT_THE_END,
    FAIRNESS,
    LOST,
    SO_FAR,
    Arrivals,
    LeaderRow,
    PairedComparison,
    SeedRow,
    ToTarget,
)
from fedcohort.simulate.leaderboard.speed import Speed, log_ratio
from fedcohort.simulate.leaderboard.table import Leaderboard
from fedcohort.simulate.metrics import (
    TERMINAL_ROUNDS,
    Curve,
    Metric,
    Spread,
    relative_improvement,
)


@dataclass(frozen=True)
class RunNumbers:
    """What the leaderboard needs to know about a run: its identity, and its columns over the rounds so far.

    Attributes
    ----------
    label, selector : str
        What the configuration calls the selector, and its registered name.
    state : str
        Running, finished, stopped, diverged or failed.
    round : (T,) int array
        Finished rounds, ascending from 0.
    values : mapping of column name to (T,) float array
        NaN where nothing was recorded; "accuracy" is the score of the task's metric.
    """

    label: str
    selector: str
    seed: int
    state: str
    round: IntArray
    values: Mapping[str, FloatArray]

    @property
    def rounds(self) -> int:
        """The number of rounds so far."""
        return int(self.round[-1]) + 1 if len(self.round) else 0


@dataclass(frozen=True)
class Options:
    """How to compare; everything has a default.

    Attributes
    ----------
    targets : tuple of float
        Accuracies to reach, in (0, 1]. Default: where the baseline ends, rounded down to a whole percent.
    terminal : int, optional
        Number of last rounds that terminal accuracy averages. Default: 50, or a fifth of a run shorter than 250.
    baseline : str, optional
        Label or selector that the others are compared with. Default: uniform, else the first.
    reference : str, optional
        Setting with IID data.
    strict : bool
        Whether a missing baseline is an error.
    metric : Metric
        What models are judged by. Targets are its scores, which are negative if lower is better.
    planned : int, optional
        Rounds planned for each run.
    """

    targets: tuple[float, ...] = ()
    terminal: int | None = None
    baseline: str | None = None
    reference: str | None = None
    strict: bool = False
    metric: Metric = Metric()
    planned: int | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], setting: Mapping[str, Any] | None = None) -> Options:
        """Return the options in ``[run]`` of a configuration, with the keys that a setting changes.

        >>> Options.of({"run": {"rounds": 9, "targets": [0.5]}}, {"name": "1spc", "run.targets": [0.6]}).targets
        (0.6,)
        """
        run = config.get("run")
        run = dict(run) if isinstance(run, Mapping) else {}
        run |= {key.removeprefix("run."): value for key, value in (setting or {}).items() if key.startswith("run.")}
        targets, terminal, planned = run.get("targets", ()), run.get("terminal"), run.get("rounds")
        metric = Metric.of(config.get("task"))
        return cls(
            targets=tuple(metric.score(float(t)) for t in targets) if isinstance(targets, (list, tuple)) else (),
            metric=metric,
            terminal=terminal if isinstance(terminal, int) and terminal > 0 else None,
            baseline=run.get("baseline"),
            reference=run.get("reference"),
            planned=planned if isinstance(planned, int) else None,
        )

    def override(self, targets: Sequence[float] | None, baseline: str | None) -> Options:
        """Return these options with the caller's targets and baseline, if there are any."""
        return replace(
            self,
            targets=tuple(self.metric.score(t) for t in targets) if targets else self.targets,
            baseline=baseline or self.baseline,
            strict=baseline is not None,
        )


# -- one setting ----------------------------------------------------------------------------------------------------


def find_baseline(labels: Mapping[str, str], options: Options, setting: str) -> str:
    """Return the label that the others are compared with: the configured one, else uniform, else the first.

    Parameters
    ----------
    labels : mapping of label to selector
    setting : name of the setting, for the error
    """
    name = options.baseline
    if name is not None:
        for label, selector in labels.items():
            if name in (label, selector):
                return label
        if options.strict:
            raise InputError(
                f"There is no selector {name!r} to compare with in the setting {setting!r}. Got: {', '.join(labels)}.",
                hint=suggest(name, labels),
            )
    return next((label for label, selector in labels.items() if selector == "uniform"), next(iter(labels)))


def terminal_window(rounds: int, configured: int | None = None) -> int:
    """Return the number of last rounds that terminal accuracy averages.

    By default these are 50, as in FedACS, but at most a fifth of the run. A run that is not longer than the configured
    window also uses a fifth, because the mean over a whole curve does not say where it ends.

    >>> terminal_window(2000), terminal_window(40), terminal_window(40, 20), terminal_window(40, 50)
    (50, 8, 20, 8)
    """
    fifth = max(1, rounds // 5)
    if configured is None:
        return min(TERMINAL_ROUNDS, fifth)
    return configured if configured < rounds else fifth


def leaderboard(
    setting: str,
    runs: Sequence[RunNumbers],
    options: Options | None = None,
    *,
    ideal: float | None = None,
) -> Leaderboard:
    """Compute the leaderboard of one setting.

    Parameters
    ----------
    setting : str
        Its name.
    runs : sequence of RunNumbers
        At least one; runs with the same label differ in their seed.
    ideal : float, optional
        Terminal accuracy of the baseline on IID data.
    """
    options = options or Options()
    for target in options.targets:
        if options.metric.share and not 0 < target <= 1:
            raise InputError(f"A target accuracy must be in (0, 1]. Got {target:g}.", hint="62% is 0.62")
    labels = {run.label: run.selector for run in runs}
    base = find_baseline(labels, options, setting)
    level, source = _default_target(
        base, [terminal_accuracy(run, options) for run in runs if run.label == base], options.metric
    )
    # Ascending, because speed-ups refer to the last.
    targets = tuple(sorted(set(options.targets))) or (level,)
    by_label = {
        label: sorted((_seed(run, targets, options) for run in runs if run.label == label), key=lambda s: s.seed)
        for label in labels
    }
    paired = _paired_with(base, by_label, lambda seed: seed.terminal)
    paired_groups = _paired_with(base, by_label, lambda seed: seed.fair["worst_group"])
    base_end = _mean_end(by_label[base])
    # Where time is simulated it leads, because rounds of different selectors take differently long.
    leading = "seconds" if any(seed.clock > 0 for seed in by_label[base]) else "rounds"
    rows = []
    for label, seeds in by_label.items():
        is_base = label == base
        to_target = tuple(
            ToTarget(
                target,
                Arrivals.of([seed.rounds_to[place] for seed in seeds]),
                Arrivals.of([seed.seconds_to[place] for seed in seeds]),
                None if is_base else speed(seeds, by_label[base], leading, place),
            )
            for place, target in enumerate(targets)
        )
        gained = math.nan
        if ideal is not None and not is_base:
            gained = relative_improvement(_mean_end(seeds), base_end, ideal)
        compared = paired.get(label), paired_groups.get(label)
        rows.append(LeaderRow(label, labels[label], is_base, tuple(seeds), to_target, gained, *compared))
    # A selector that lost a run comes after all others: the mean of the runs that it kept looks too good. So does one
    # that was not evaluated yet.
    rows.sort(key=lambda r: (r.lost > 0, -r.terminal.mean if r.terminal.count else math.inf, r.label))
    longest = max(seed.rounds for row in rows for seed in row.seeds)
    going = [run.rounds for run in runs if run.state == "running"]
    so_far = ""
    if going:
        rounds = f"{min(going):,}" if min(going) == max(going) else f"{min(going):,} to {max(going):,}"
        so_far = f"So far (round {rounds}{f' of {options.planned:,}' if options.planned else ''}): "
    return Leaderboard(
        setting=setting,
        targets=targets,
        target_source="as configured" if options.targets else source,
        window=terminal_window(longest, options.terminal),
        window_source=_window_source(longest, options.terminal),
        baseline=base,
        reference=options.reference if ideal is not None else None,
        rows=tuple(rows),
        so_far=so_far,
        metric=options.metric,
    )


def _paired_with(
    base: str, by_label: Mapping[str, Sequence[SeedRow]], score: Callable[[SeedRow], float]
) -> dict[str, PairedComparison]:
    """Compare every other label with the baseline, with p-values corrected over all comparisons."""
    # By seed, because only the same seed means the same federation.
    theirs = {seed.seed: score(seed) for seed in by_label[base]}
    paired = {
        label: PairedComparison.of([score(seed) - theirs.get(seed.seed, math.nan) for seed in seeds])
        for label, seeds in by_label.items()
        if label != base
    }
    return dict(zip(paired, PairedComparison.corrected(list(paired.values())), strict=True))


def _mean_end(seeds: Sequence[SeedRow]) -> float:
    return Spread.of([seed.terminal for seed in seeds]).mean


def _window_source(rounds: int, configured: int | None) -> str:
    if configured is not None and configured < rounds:
        return "as configured"
    fifth = f"a fifth of {rounds:,}"
    if configured is not None:
        return f"{fifth}; the {configured} configured are the whole run"
    return fifth if rounds // 5 < TERMINAL_ROUNDS else "as in FedACS"


def _default_target(base: str, ends: Sequence[float], metric: Metric) -> tuple[float, str]:
    level = Spread.of(list(ends)).mean
    if math.isnan(level):
        return math.nan, f"unknown, {base} has no terminal {metric.name}"
    # A whole percent is easier to cite than 86.43%; of numbers near 0 nothing would be left.
    step = 100 if abs(level) >= 0.01 else 10_000
    # Rounded down, so that the baseline itself reaches it. 1e-9 keeps 0.29, which is 28.999... percent in binary.
    rounded = "rounded down" if metric.higher else "rounded up"
    return math.floor(level * step + 1e-9) / step, f"where {base} ends, {rounded}"


def _curve(run: RunNumbers) -> Curve:
    # Files store accuracies as 32-bit floats. Without rounding, 0.7 would not reach a target of 0.7.
    return Curve(run.round, np.round(np.asarray(run.values["accuracy"], np.float64), 6))


def terminal_accuracy(run: RunNumbers, options: Options) -> float:
    """Return where a run ends; NaN for one that diverged or failed."""
    return math.nan if run.state in LOST else _curve(run).terminal(terminal_window(run.rounds, options.terminal))


def _seed(run: RunNumbers, targets: Sequence[float], options: Options) -> SeedRow:
    curve, window = _curve(run), terminal_window(run.rounds, options.terminal)
    rounds_to = tuple(None if math.isnan(target) else curve.rounds_to(target) for target in targets)
    clock = run.values.get("clock")
    trained, asked = _sent(run, "bytes_down", "bytes_up"), _sent(run, "query_bytes_down", "query_bytes_up")
    sent = [part for part in (trained, asked) if part is not None]
    megabytes = np.cumsum(np.sum(sent, axis=0)) / 1e6 if sent else None

    def at(total: FloatArray | None, rounds: int | None) -> float | None:
        """Return the value of a running total after ``rounds`` rounds."""
        if rounds is None or total is None:
            return None
        return float(total[int(np.searchsorted(run.round, rounds - 1))])

    qcid = run.values.get("qcid", np.zeros(0))
    known = qcid[np.isfinite(qcid)]
    fair = {}
    for name in FAIRNESS:
        values = np.asarray(run.values.get(name, ()), np.float64)
        measured = values[np.isfinite(values)]
        # Where a lost run stood when it was lost is no end, and would flatter its selector.
        if not len(measured) or (name in AT_THE_END and run.state in LOST):
            fair[name] = math.nan
        elif name in AT_THE_END:
            fair[name] = Curve(run.round, values).terminal(window)
        elif name in SO_FAR:
            fair[name] = float(measured[-1])
        else:
            fair[name] = float(measured.mean() if name == "selection_seconds" else measured.sum())
    return SeedRow(
        seed=run.seed,
        state=run.state,
        rounds=run.rounds,
        rounds_to=rounds_to,
        seconds_to=tuple(at(clock, rounds) for rounds in rounds_to),
        megabytes_to=tuple(at(megabytes, rounds) for rounds in rounds_to),
        best=curve.best,
        early_stop=curve.early_stop(run.rounds if run.state == "stopped" else None),
        terminal=terminal_accuracy(run, options),
        window=window,
        qcid=float(known.mean()) if len(known) else math.nan,
        megabytes=math.nan if trained is None else float(trained.sum()) / 1e6,
        query_megabytes=math.nan if asked is None else float(asked.sum()) / 1e6,
        clock=float(clock[-1]) if clock is not None and len(clock) else math.nan,
        fair=fair,
    )


def _sent(run: RunNumbers, *names: str) -> FloatArray | None:
    """Return the sum of some columns of bytes in each round; None if they are unknown."""
    columns = [run.values[name] for name in names if name in run.values]
    if not columns or not np.isfinite(columns).any():
        return None
    return np.asarray(np.nansum(columns, axis=0), np.float64)


def speed(seeds: Sequence[SeedRow], base: Sequence[SeedRow], measure: str, place: int = -1) -> Speed:
    """Return how many times as fast as a baseline a selector reaches a target, over the seeds that both ran."""
    theirs = {seed.seed: seed.journey(measure, place) for seed in base}
    return Speed.of(
        [log_ratio(seed.journey(measure, place), theirs[seed.seed]) for seed in seeds if seed.seed in theirs]
    )
