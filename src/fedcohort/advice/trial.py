"""Play several ways to run a federation on many twins, and compare them pair by pair.

Every twin is one draw of the clients and of how hard learning is, with two seeds of its own. All ways see the same
twins. How many times as fast a way is as the recorded one is the ratio of their times to the same accuracies: 70%, 85%
and 95% of what the recorded way gains on that twin. The interval is for one more twin, which may be the true
federation, so it does not shrink to nothing with more twins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.advice.fit import Fit
from fedcohort.advice.twin import FEWEST_ROUNDS, SEEDS, Learning, Stand, base, played, scenario, scores, smooth
from fedcohort.core.arrays import FloatArray
from fedcohort.core.errors import FedcohortError
from fedcohort.core.protocol import SELECTORS
from fedcohort.simulate.config.toml import merge_tables
from fedcohort.simulate.leaderboard.significance import LEVEL
from fedcohort.simulate.leaderboard.words import quantity
from fedcohort.simulate.store.results import Results, RunInfo

LEVELS = (0.7, 0.85, 0.95)
RECORDED = "as recorded"
FACTORS = (0.25, 0.5, 2.0, 4.0)  # cohort sizes to try
SHORT_LIST = ("uniform", "balanced", "oort", "power-of-choice")
KNEE = 1.15  # the smallest size that is at most this many times as slow as the fastest
PROMISING = 1.1  # times as fast, which is worth a word
_LONGER = 4  # a way may have so many times as many rounds as the record, in the same time


@dataclass(frozen=True)
class Way:
    """One way to run the federation: a selector, a cohort size, rounds or not.

    Attributes
    ----------
    change : dict
        What it changes in a twin's configuration.
    size : int or None
        Its cohort size, if nothing else distinguishes it from the recorded way.
    how : str
        How to do it.
    """

    name: str
    change: dict[str, Any]
    size: int | None = None
    how: str = ""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a way achieved.

    Attributes
    ----------
    logs : (t,) float array
        By twin, the log of how many times as fast it is as the recorded way.
    missed : float
        Share of the runs that did not get to the last level in the same time, so the ratio is at most that.
    seconds, work : (t,) float array
        Time and seconds of client work to the last level; in rounds and models without clocks.
    slowest, worst : (t,) float array
        Share of all participation of the slowest quarter of clients, and accuracy of the worst group at the end.
    even : (t,) float array
        Jain's index of participation.
    """

    way: Way
    logs: FloatArray
    missed: float
    seconds: FloatArray
    work: FloatArray
    slowest: FloatArray
    worst: FloatArray
    even: FloatArray

    def interval(self, comparisons: int = 1) -> tuple[float, float, float]:
        """Return how many times as fast, and the 95% interval for one more twin."""
        return predicted(self.logs, comparisons)


def predicted(logs: FloatArray, comparisons: int = 1) -> tuple[float, float, float]:
    """Return the geometric mean of ratios, and the 95% interval of one more ratio.

    >>> [round(x, 2) for x in predicted(np.log([1.0, 2.0, 4.0]))]
    [2.0, 0.06, 62.61]
    """
    n, middle = len(logs), float(logs.mean())
    if n < 2:
        return math.exp(middle), 0.0, math.inf
    from scipy.special import stdtrit

    half = float(stdtrit(n - 1, 1 - LEVEL / 2 / comparisons) * logs.std(ddof=1) * math.sqrt(1 + 1 / n))
    return math.exp(middle), math.exp(middle - half), math.exp(min(middle + half, 700.0))


def ways(fit: Fit) -> list[Way]:
    """Return the recorded way, and those that are worth a try with this federation."""
    record = fit.record
    size, most = record.cohort, max(1, round(len(record.names) * float(fit.share.mean())))
    found = [Way(RECORDED, {}, None if record.buffer is not None and record.timed else size, "go on as you do")]
    for name, params in {**{name: {} for name in SHORT_LIST}, **record.shadowed}.items():
        if name == record.selector or not _supplied(fit, name, params):
            continue
        if record.buffer is not None and not SELECTORS.create(name, **params).one_at_a_time:
            continue
        how = f"fedcohort journal selector {record.name}.sqlite {name}"
        if params and SELECTORS.create(name, **params) != SELECTORS.create(name):
            how = f"start the run with the selector of your shadow {name}"
        found.append(Way(name, {"selectors": {name: dict(params)}}, None, how))
    rounds: dict[str, Any] = {"run": {"mode": "sync"}, "aggregator": {"name": "fedavg"}}
    for factor in FACTORS:
        other = max(1, round(size * factor))
        if other != size and other <= most and other not in [way.size for way in found]:
            how = f"ask {quantity(other, 'client')} a round"
            found.append(Way(quantity(other, "client"), merge_tables(rounds, {"run": {"cohort": other}}), other, how))
    if not record.timed:
        return found
    if record.buffer is not None:
        found.append(Way("in rounds", merge_tables(rounds, {"run": {"cohort": size}}), size, "run rounds"))
    elif size > 1 and not record.automatic:
        spares = max(1, math.ceil(0.3 * size))
        change = {"run": {"deadline": "auto", "spares": spares}}
        found.append(Way("automatic deadline", change, None, f'set deadline="auto" and spares={spares}'))
    one_by_one = record.selector in SELECTORS and SELECTORS.create(record.selector).one_at_a_time
    for factor, part in ((1.0, 0.5), (2.0, 0.5), (1.0, 0.2)):
        busy = max(1, round(size * factor))
        buffer = max(1, round(busy * part))
        if busy > most or (busy, buffer) == (size, record.buffer):
            continue
        change = {"run": {"mode": "async", "cohort": busy, "buffer": buffer}, "aggregator": {"name": "fedbuff"}}
        if not one_by_one:
            change["selectors"] = {"uniform": {}}
        name = f"{busy} at work, {buffer} per model"
        if name not in [way.name for way in found]:
            found.append(
                Way(
                    name, change, None, f"run without rounds, as Flower and own hosts can: busy={busy}, buffer={buffer}"
                )
            )
    return found


def _supplied(fit: Fit, name: str, params: Mapping[str, Any]) -> bool:
    """Whether the recorded host can supply what a selector needs; facts about clients count if they are on record."""
    have = {"staleness", *fit.record.signals}  # the session itself knows how stale an answer is
    if fit.record.sizes is not None:
        have.add("sizes")
    if fit.record.classes is not None:
        have |= {"label-counts", "label-products"}
    elif name == "balanced":
        return False  # without labels it is uniform with turns
    if name not in SELECTORS:  # somebody's own; nothing is imported because a journal names it
        return False
    try:
        return all(signal.name in have for signal in SELECTORS.create(name, **params).requires)
    except FedcohortError:  # parameters of another version
        return False


def play(
    fit: Fit,
    stand: Stand,
    learning: Learning,
    model: str | None,
    folder: Path,
    twins: int,
    say: Callable[[str], None],
) -> list[Outcome]:
    """Play all ways on ``twins`` twins, or continue in ``folder``."""
    rng = np.random.default_rng([fit.record.models, len(fit.record.client), 11])
    table = {**base(fit, stand, model), "seeds": SEEDS}
    settings: list[dict[str, Any]] = []
    for i in range(twins):
        choice = learning.choices[int(rng.choice(len(learning.choices), p=learning.chances))]
        settings.append({"name": f"{i}", **scenario(fit, fit.draw(rng), stand, choice)})
    tried = ways(fit)
    say(f"1 of {len(tried)}: {RECORDED}")
    reference = played({**table, "settings": settings}, folder / RECORDED.replace(" ", "-"), own_seeds=True)
    rounds = int(table["run"]["rounds"])
    goals = [Goal.of(reference, runs, fit.overhead) for runs in _grouped(reference)]
    outcomes = [_measure(tried[0], reference, goals, fit)]
    for number, way in enumerate(tried[1:], start=2):
        say(f"{number} of {len(tried)}: {way.name}")
        changed = merge_tables(table, {k: v for k, v in way.change.items() if k != "selectors"})
        changed["selectors"] = way.change.get("selectors", table["selectors"])
        if changed["run"].get("mode") == "async":
            changed["run"] = {k: v for k, v in changed["run"].items() if k not in ("deadline", "spares")}
        if changed["run"].get("mode") == "sync" and table["run"].get("mode") == "async":
            changed["run"] = {k: v for k, v in changed["run"].items() if k != "buffer"}
        if fit.record.timed:
            changed["run"] = {**changed["run"], "rounds": rounds * _LONGER}
            own = [{**s, "run": {"seconds": max(goal.limit, 1e-3)}} for s, goal in zip(settings, goals, strict=True)]
            if changed["run"].get("mode") == "async" or changed["run"].get("deadline") == "auto":
                # Neither has the recorded deadline.
                own = [{**s, "scenario": {k: v for k, v in s["scenario"].items() if k != "deadline"}} for s in own]
        else:
            own = settings
        results = played(
            {**changed, "settings": own}, folder / way.name.replace(" ", "-").replace(",", ""), own_seeds=True
        )
        outcomes.append(_measure(way, results, goals, fit))
    return outcomes


def _clock(results: Results, info: RunInfo, overhead: float) -> FloatArray:
    """Return the time after each round, in seconds, or in rounds if no time passes."""
    clock, rounds = results.column(info, "clock").astype(float), results.column(info, "round").astype(float)
    if not len(clock):
        return np.ones(1)
    return clock + overhead * (rounds + 1) if clock[-1] > 0 else rounds + 1


def arrivals(results: Results, info: RunInfo, overhead: float, levels: Sequence[float]) -> FloatArray:
    """Return when the smoothed accuracy of a run reaches each level, infinity if never."""
    x, y = scores(results, info)
    clock, rounds = _clock(results, info, overhead), results.column(info, "round").astype(float)
    curve = np.maximum.accumulate(smooth(y))
    at = np.array([int(np.searchsorted(curve, level)) for level in levels])
    times = np.interp(x, rounds, clock) if len(rounds) else np.ones(1)
    return np.array([times[i] if i < len(times) else math.inf for i in at])


@dataclass(frozen=True, eq=False)
class Goal:
    """What the ways are measured by on one twin.

    Attributes
    ----------
    levels : list of float
        The accuracies to reach: parts of the way from the start to where the recorded way ends.
    limit : float
        The time that there is: until the recorded way ends.
    arrivals : tuple of (3,) float array
        By seed, when the recorded way reaches each level.
    """

    levels: list[float]
    limit: float
    arrivals: tuple[FloatArray, ...]

    @classmethod
    def of(cls, results: Results, infos: Sequence[RunInfo], overhead: float) -> Goal:
        """Return the goal that the recorded way's runs on one twin set."""
        curves = [smooth(scores(results, info)[1]) for info in infos]
        start, end = float(np.mean([c[0] for c in curves])), float(np.mean([c[-3:].mean() for c in curves]))
        levels = [start + level * (end - start) for level in LEVELS]
        limit = max(float(_clock(results, info, overhead)[-1]) for info in infos)
        return cls(levels, limit, tuple(arrivals(results, info, overhead, levels) for info in infos))

    def times_as_fast(self, times: FloatArray, seed: int) -> FloatArray:
        """Return the logs; a run that does not arrive needs longer than all the time there was."""
        logs: FloatArray = np.log(np.minimum(self.arrivals[seed], self.limit) / np.minimum(times, self.limit))
        return logs


def _measure(way: Way, results: Results, goals: Sequence[Goal], fit: Fit) -> Outcome:
    overhead = 0.0 if way.change.get("run", {}).get("mode") == "async" else fit.overhead
    n = len(fit.record.names)
    speeds = fit.draw(None).seconds
    slow = np.arange(n) if speeds is None else np.argsort(speeds)[n - max(1, n // 4) :]
    rows = []  # a row for each run
    for goal, runs in zip(goals, _grouped(results), strict=True):
        for seed, info in enumerate(runs):
            times = arrivals(results, info, overhead, goal.levels)
            end = min(float(times[-1]), goal.limit)
            picked = np.bincount(results.members(info)["client"], minlength=n).astype(float)
            total = max(picked.sum(), 1.0)
            groups = results.column(info, "worst_group").astype(float)
            groups = groups[np.isfinite(groups)]
            rows.append((
                goal.times_as_fast(times, seed).mean(),
                math.isinf(times[-1]),
                end,
                _work_until(results, info, end, overhead),
                picked[slow].sum() / total,
                groups[-5:].mean() if len(groups) else math.nan,
                total**2 / (n * max((picked**2).sum(), 1.0)),
            ))  # fmt: skip
    by_twin = np.array(rows, np.float64).reshape(len(goals), -1, 7).mean(axis=1)
    logs, missed, *others = by_twin.T
    return Outcome(way, logs, float(missed.mean()), *others)


def _grouped(results: Results) -> list[list[RunInfo]]:
    """Return the runs by twin, in the order of seeds."""
    found: dict[int, list[RunInfo]] = {}
    for info in sorted(results.runs, key=lambda info: info.seed):
        found.setdefault(int(info.setting["name"]), []).append(info)
    return [found[i] for i in sorted(found)]


def _work_until(results: Results, info: RunInfo, time: float, overhead: float) -> float:
    clock = _clock(results, info, overhead)
    column = results.column(info, "client_seconds").astype(float)
    if not column.any():  # no clocks: count the models
        column = np.array([len(d) for d in results.per_client(info, "durations")], np.float64)
    return float(column[: int(np.searchsorted(clock, time, side="right"))].sum())


@dataclass(frozen=True)
class Verdict:
    """What to do.

    Attributes
    ----------
    best : Outcome or None
        The way that is faster for certain, if there is one.
    headline : str
    missing : tuple of str
        What the journal lacks to tell more.
    knee : int or None
        The smallest cohort size that is nearly as fast as the fastest size.
    promising : Outcome or None
        If none is faster for certain, the one that probably is.
    """

    best: Outcome | None
    headline: str
    missing: tuple[str, ...]
    knee: int | None
    promising: Outcome | None = None


def judge(fit: Fit, learning: Learning, outcomes: Sequence[Outcome], drift: Sequence[str]) -> Verdict:
    """Choose a way; chance and an unknown federation claim nothing."""
    record, others = fit.record, outcomes[1:]
    missing = lacking(fit)
    if not learning.fits:
        missing.append("a test accuracy (or loss) of the global model after each round, ten rounds or more")
    if drift:
        missing.append("a record of the time after the last change")
    sizes = sorted((o for o in outcomes if o.way.size is not None), key=lambda o: o.way.size or 0)
    knee = None
    if len(sizes) > 1 and min(o.missed for o in sizes) < 0.5:
        means = [float(np.exp(np.log(np.maximum(o.seconds, 1e-9)).mean())) for o in sizes]
        knee = next(o.way.size for o, mean in zip(sizes, means, strict=True) if mean <= KNEE * min(means))
    sure = [o for o in others if o.interval(len(others))[1] > 1]
    unit = "time" if record.timed else "rounds"
    if fit.failed.sum() == fit.asked.sum():
        return Verdict(None, "This journal cannot tell: nobody has ever returned a model.", tuple(missing), None)
    if not learning.fits or drift:
        reason = "the federation changed while it was recorded" if drift else "the twins do not learn as it does"
        if len(record.curve) < FEWEST_ROUNDS:
            reason = f"it has {quantity(len(record.curve), 'round')} with an accuracy or loss of the model"
        return Verdict(None, f"This journal cannot tell which way is faster: {reason}.", tuple(missing), None)
    if not sure:
        text = f"Go on as you do: of {len(others)} other ways, none is faster for certain."
        guess = max(others, key=lambda o: o.interval()[1], default=None)
        promising = guess if guess is not None and guess.interval()[0] > PROMISING else None
        return Verdict(None, text, tuple(missing), knee, promising)
    best = max(sure, key=lambda o: o.interval()[1])
    mean, low, high = best.interval()
    text = (
        f"Use {best.way.name}: {mean:.2f} times as fast by {unit} as what you do, 95% interval {low:.2f} to {high:.2f}."
    )
    return Verdict(best, text, tuple(missing), knee)


def lacking(fit: Fit) -> list[str]:
    """Return what to record so that more can be told."""
    record = fit.record
    found = []
    if not record.timed:
        found.append("how long each client takes (Signal.DURATION in the report), for deadlines and without rounds")
    if record.sizes is None:
        found.append("how many samples each client has (sizes in the client table)")
    if fit.alpha is None:
        found.append("label counts, or sealed ones (fedcohort privacy), for selectors that balance classes")
    if record.online is None:
        found.append("who was online: the journal was pruned")
    if (fit.asked < 3).mean() > 0.5:
        found.append("more rounds: more than half of the clients were asked less than three times")
    return found
