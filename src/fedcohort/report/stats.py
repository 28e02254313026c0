"""The leaderboard: the papers' metrics over seeds, and how sure a difference to the baseline is.

Definitions of the metrics are those of :mod:`fedcohort.simulate.metrics`. Comparisons are paired: only seeds that both
selectors ran count, because the same seed means the same federation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedcohort.arrays import FloatArray
from fedcohort.errors import InputError
from fedcohort.registry import nearest
from fedcohort.report.data import Group, RunCurve, Setting
from fedcohort.simulate.metrics import TERMINAL_ROUNDS, Curve, Spread, speed_up

FEW_SEEDS = 5  # below, a p-value says little and the report says so


@dataclass(frozen=True)
class Paired:
    """Terminal accuracy against the baseline over the seeds both ran.

    Attributes
    ----------
    seeds : int
        How many seeds both ran.
    difference : float
        Mean difference of terminal accuracy.
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
class LeaderRow:
    """One selector's line of the leaderboard."""

    label: str
    selector: str
    color: int
    baseline: bool
    runs: int
    diverged: int
    rounds_to_target: Spread
    rounds_to_lower: tuple[Spread, ...]
    best: Spread
    terminal: Spread
    speed_up: float
    seconds_to_target: Spread
    qcid: Spread
    paired: Paired | None


@dataclass(frozen=True)
class Leaderboard:
    """The table of one setting, best terminal accuracy first."""

    setting: str
    target: float
    target_source: str
    lower_targets: tuple[float, ...]
    terminal_rounds: int
    baseline: str
    rows: tuple[LeaderRow, ...]
    note: str

    @property
    def base(self) -> LeaderRow:
        """The baseline's row."""
        return next(row for row in self.rows if row.baseline)


def find_baseline(setting: Setting, name: str | None) -> Group:
    """Return the group everybody is compared with: the one named, else uniform, else the first."""
    if name is not None:
        for group in setting.groups:
            if name in (group.label, group.selector):
                return group
        labels = [group.label for group in setting.groups]
        near = nearest(name, labels)
        raise InputError(
            f"There is no selector {name!r} to compare with in the setting {setting.name!r}. Got: {', '.join(labels)}.",
            hint=f"did you mean {near!r}?" if near else None,
        )
    return next((g for g in setting.groups if g.selector == "uniform"), setting.groups[0])


def terminal_window(setting: Setting, asked: int | None = None) -> int:
    """Return over how many last rounds terminal accuracy is taken: 50 as in FedACS, a fifth of shorter runs."""
    return asked or min(TERMINAL_ROUNDS, max(1, setting.rounds // 5))


def choose_target(baseline: Group, targets: Sequence[float], window: int) -> tuple[float, str]:
    """Return the target accuracy that speed-ups are about, and where it comes from."""
    for target in targets:
        if not 0 < target <= 1:
            raise InputError(f"A target accuracy must be in (0, 1]. Got {target:g}.", hint="62% is 0.62")
    if targets:
        return max(targets), "as asked for"
    level = Spread.of([curve(run).terminal(window) for run in baseline.runs]).mean
    if math.isnan(level):
        return math.nan, "unknown, the baseline was never evaluated"
    return math.floor(level * 100) / 100, f"where {baseline.label} ends"


def curve(run: RunCurve) -> Curve:
    """Return a run's accuracy curve."""
    return Curve(run.round, run.values["accuracy"])


def leaderboard(
    setting: Setting, *, targets: Sequence[float] = (), baseline: str | None = None, terminal: int | None = None
) -> Leaderboard:
    """Compute the leaderboard of a setting.

    Parameters
    ----------
    setting : Setting
    targets : sequence of float
        Accuracies to reach, in (0, 1]; the highest is the one speed-ups are about. Default: the baseline's mean
        terminal accuracy, rounded down to a whole percent.
    baseline : str, optional
        Label or selector to compare with; default uniform.
    terminal : int, optional
        Over how many last rounds terminal accuracy is taken; default 50, or a fifth of a shorter run.
    """
    base = find_baseline(setting, baseline)
    window = terminal_window(setting, terminal)
    level, source = choose_target(base, targets, window)
    lower = tuple(sorted({t for t in targets if t != level}))
    base_rounds = _mean_if_all([curve(run).rounds_to(level) for run in base.runs])
    ends = {g.label: {run.seed: curve(run).terminal(window) for run in g.runs} for g in setting.groups}
    paired = {g.label: _paired(ends[g.label], ends[base.label]) for g in setting.groups if g.label != base.label}
    corrected = dict(zip(paired, holm([p.p for p in paired.values()]), strict=True))
    rows = []
    for group in setting.groups:
        curves = [curve(run) for run in group.runs]
        reached = [c.rounds_to(level) for c in curves]
        test = paired.get(group.label)
        rows.append(
            LeaderRow(
                label=group.label,
                selector=group.selector,
                color=group.color,
                baseline=group.label == base.label,
                runs=len(curves),
                diverged=sum(run.state == "diverged" for run in group.runs),
                rounds_to_target=Spread.of([_float(r) for r in reached]),
                rounds_to_lower=tuple(Spread.of([_float(c.rounds_to(t)) for c in curves]) for t in lower),
                best=Spread.of([c.best for c in curves]),
                terminal=Spread.of([c.terminal(window) for c in curves]),
                speed_up=speed_up(_mean_if_all(reached), base_rounds),
                seconds_to_target=Spread.of([_seconds_to(run, level) for run in group.runs]),
                qcid=Spread.of([_mean(run.values["qcid"]) for run in group.runs]),
                paired=None if test is None else Paired(test.seeds, test.difference, test.wins, corrected[group.label]),
            )
        )
    rows.sort(key=lambda r: (-r.terminal.mean if not math.isnan(r.terminal.mean) else math.inf, r.label))
    return Leaderboard(setting.name, level, source, lower, window, base.label, tuple(rows), _note(base.label, rows))


def _note(baseline: str, rows: Sequence[LeaderRow]) -> str:
    """Return what a reader must know about the p-values of this table."""
    seeds = [row.paired.seeds for row in rows if row.paired is not None]
    if not seeds:
        return "There is nothing to compare with."
    fewest = min(seeds)
    common = (
        f"Against {baseline}: mean difference of terminal accuracy over the seeds both ran, wins among those seeds, "
        "and p of a two-sided paired t-test, Holm-corrected over the rows."
    )
    if fewest < 2:
        return common + " With one common seed there is no test: a difference may be chance."
    if fewest < FEW_SEEDS:
        return common + (
            f" With only {fewest} common seeds the test leans on the differences being normal and has little power; "
            f"read the wins, and run at least {FEW_SEEDS} seeds before claiming a difference."
        )
    return common


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)


def _mean(values: FloatArray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _mean_if_all(values: Sequence[int | None]) -> float | None:
    """Return the mean, or None when a seed never got there: a mean over the lucky ones would flatter."""
    if not values or any(v is None for v in values):
        return None
    return float(np.mean([v for v in values if v is not None]))


def _seconds_to(run: RunCurve, target: float) -> float | None:
    reached = np.flatnonzero(np.nan_to_num(run.values["accuracy"], nan=-1.0) >= target)
    return float(run.values["clock"][reached[0]]) if len(reached) else None


def _paired(ours: dict[int, float], theirs: dict[int, float]) -> Paired:
    seeds = [s for s in ours if s in theirs and not math.isnan(ours[s]) and not math.isnan(theirs[s])]
    difference = np.array([ours[s] - theirs[s] for s in seeds], np.float64)
    if not len(difference):
        return Paired(0, math.nan, 0, math.nan)
    return Paired(len(seeds), float(difference.mean()), int((difference > 0).sum()), paired_t_test(difference))


def paired_t_test(difference: FloatArray) -> float:
    """Return the two-sided p-value that paired differences have mean zero; NaN when it cannot be had.

    >>> round(paired_t_test(np.array([1.0, 2.0, 3.0])), 4)
    0.0742
    """
    n = len(difference)
    if n < 2:
        return math.nan
    spread = float(difference.std(ddof=1))
    if spread <= 1e-12 * max(1.0, float(np.abs(difference).max())):
        return math.nan
    from scipy.special import stdtr  # scipy.stats takes seconds to import

    return float(2 * stdtr(n - 1, -abs(difference.mean()) / (spread / math.sqrt(n))))


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's step-down method; NaN stays NaN and does not count.

    >>> [round(x, 3) for x in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    known = [i for i, value in enumerate(p) if not math.isnan(value)]
    corrected = [math.nan] * len(p)
    highest = 0.0
    for step, i in enumerate(sorted(known, key=lambda i: p[i])):
        highest = max(highest, min(1.0, p[i] * (len(known) - step)))
        corrected[i] = highest
    return corrected


def gini(counts: FloatArray) -> float:
    """Return the Gini coefficient of participation: 0 when all clients were picked equally often, near 1 when one was.

    >>> round(gini(np.array([1.0, 1.0, 1.0, 1.0])), 6), gini(np.array([0.0, 0.0, 0.0, 4.0]))
    (0.0, 0.75)
    """
    ordered = np.sort(np.asarray(counts, np.float64))
    total = ordered.sum()
    if total <= 0:
        return math.nan
    n = len(ordered)
    return float(2 * (np.arange(1, n + 1) @ ordered) / (n * total) - (n + 1) / n)
