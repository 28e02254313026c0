"""Methods that prefer clients with large losses or valuable models."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator

from fedcohort_bench.vectors.formulas.draws import (
    Entry,
    Expected,
    Row,
    Values,
    Vector,
    combinations,
    delivered,
    evenly,
    joined,
    largest,
    one_by_one,
    quantile,
)


def power_of_choice(v: Vector) -> Iterator[Expected]:
    """Cho 2020, Sec. 3.1: d clients are drawn by size and asked; the m largest losses are taken."""
    for entry in v["rounds"]:
        question, m = entry["question"], entry["size"]
        loss = dict(zip(question["asked"], question["loss"], strict=True))
        asked = one_by_one({c: v["sizes"][c] for c in entry["available"]}, min(2 * m, len(entry["available"])))
        yield Expected(largest(loss, m), loss, asked=asked)


def active_fl(v: Vector) -> Iterator[Expected]:
    """Goetz 2019, Algorithm 1: the alpha_1 N lowest valuations are dropped, then a softmax, then uniform places."""
    alpha1, alpha2, alpha3 = (v["parameters"][f"alpha{i}"] for i in (1, 2, 3))
    value: Values = {}
    for entry in v["rounds"]:
        here, m = entry["available"], entry["size"]
        top = max((value[c] for c in here if c in value), default=0.0)
        worth = {c: value.get(c, top) for c in here}
        stay = len(here) - min(int(alpha1 * len(here)), len(here) - m)
        edge = sorted(worth.values())[-stay]
        above, tied = [c for c in here if worth[c] > edge], [c for c in here if worth[c] == edge]
        groups = list(combinations(tied, stay - len(above)))
        chance: Values = {}
        for fewer, probability in ((0, 1 - alpha3 * m % 1), (1, alpha3 * m % 1)):
            places = m - int(alpha3 * m) - fewer
            for group in groups:
                by_value = one_by_one({c: math.exp(alpha2 * (worth[c] - top)) for c in [*above, *group]}, places)
                rest = (m - places) / (len(here) - places)
                each = {c: by_value.get(c, 0.0) for c in here}
                chance = joined(
                    (1.0, chance), (probability / len(groups), {c: p + (1 - p) * rest for c, p in each.items()})
                )
        kept = {c: alpha2 * worth[c] for c in [*above, *tied]}
        yield Expected(chance, kept if len(groups) == 1 else None)
        for row in delivered(entry):
            value[row["client"]] = math.sqrt(row["size"]) * row["loss"]


def greedyfed(v: Vector) -> Iterator[Expected]:
    """Singhal 2024, Algorithm 1: everybody once, then the largest mean Shapley values."""
    values: dict[int, list[float]] = {}
    asked: set[int] = set()
    for entry in v["rounds"]:
        here, m = entry["available"], entry["size"]
        new, old = [c for c in here if c not in asked], [c for c in here if c in asked]
        mean = {c: statistics.fmean(values[c]) if values.get(c) else 0.0 for c in here}
        if len(new) >= m:
            chance = evenly(new, m)
        else:
            chance = evenly(new, len(new)) | (evenly(old, m - len(new)) if new else largest(mean, m))
        first = max([0.0, *mean.values()]) + 1
        yield Expected(chance, {c: first if c in new else mean[c] for c in here})
        asked |= set(entry["cohort"])
        for row in delivered(entry):
            values.setdefault(row["client"], []).append(row["shapley-value"])


class _Oort:
    """Lai 2021, Algorithm 1 and Eq. 1; ``usual`` gives the seconds of a report for the usual work."""

    def __init__(self, v: Vector, usual: Callable[[Row], float]) -> None:
        self.v, self.of, self.usual = v, v["parameters"], usual
        self.utility, self.last, self.seconds = dict[int, float](), dict[int, int](), dict[int, float]()
        self.picks = dict.fromkeys(range(v["clients"]), 0)
        self.step, self.relaxed = 0.0, 0
        self.achieved: list[float] = []

    def expected(self, entry: Entry) -> Expected:
        of, m, r = self.of, entry["size"], entry["round"] + 1
        free = [c for c in entry["available"] if self.picks[c] < of["blacklist"]]
        if len(free) < m:
            raise NotImplementedError("no vector bars so many clients")
        known, unseen = [c for c in free if c in self.last], [c for c in free if c not in self.last]
        cap = quantile([self.utility[c] for c in known], of["clip"]) if known else 0.0
        preferred, scores = self.step * (1 + self.relaxed), dict[int, float]()
        for c in known:
            scores[c] = min(self.utility[c], cap) + math.sqrt(0.1 * math.log(r) / self.last[c])
            if self.seconds[c] > preferred > 0:
                scores[c] *= (preferred / self.seconds[c]) ** of["penalty"]
        epsilon = max(of["exploration"] * of["decay"] ** entry["round"], of["least_exploration"])
        more = epsilon * m % 1
        parts = ((int(epsilon * m), 1 - more), (int(epsilon * m) + 1, more))
        chance = joined(*((p, explored_and_exploited(scores, unseen, m, n, of["cut_off"])) for n, p in parts))
        return Expected(chance, scores)

    def learn(self, entry: Entry) -> None:
        for c in entry["cohort"]:
            self.picks[c] += 1
        gained = 0.0
        for row in delivered(entry):
            c = row["client"]
            self.utility[c], self.last[c] = row["size"] * row["loss_rms"], entry["round"] + 1
            self.seconds[c] = self.usual(row)
            gained += self.utility[c]
        if not self.step:
            self.step = statistics.median(self.usual(row) for row in delivered(entry))
        self.achieved.append(gained)
        w = self.of["window"]
        if len(self.achieved) >= 2 * w and sum(self.achieved[-2 * w : -w]) > sum(self.achieved[-w:]):
            self.relaxed += 1


def explored_and_exploited(scores: Values, unseen: list[int], m: int, exploring: int, cut_off: float) -> Values:
    """Return the chances if so many places explore, and the others go by score to clients near the best."""
    exploiting = min(m - min(exploring, len(unseen)), len(scores))
    pool = {}
    if exploiting:
        least = cut_off * sorted(scores.values())[-exploiting]
        pool = {c: s for c, s in scores.items() if s >= least}
    return one_by_one(pool, exploiting) | evenly(unseen, m - exploiting)


def oort(v: Vector) -> Iterator[Expected]:
    """Lai 2021."""
    method = _Oort(v, lambda row: float(row["duration"]))
    for entry in v["rounds"]:
        yield method.expected(entry)
        method.learn(entry)


def pyramidfl(v: Vector) -> Iterator[Expected]:
    """Li 2022: Oort's cohort; work 1 + min(e, (max t - t_i) / t_i)."""
    given: Values = {}
    method = _Oort(v, lambda row: float(row["duration"]) / given[row["client"]])
    for entry in v["rounds"]:
        timed = [method.seconds[c] for c in entry["cohort"] if c in method.seconds]
        given = dict.fromkeys(entry["cohort"], 1.0)
        for c in entry["cohort"]:
            if c in method.seconds:
                given[c] += min(v["parameters"]["most_extra"], max(timed) / method.seconds[c] - 1)
        expected = method.expected(entry)
        yield Expected(expected.chance, expected.scores, work=given)
        method.learn(entry)


def oort_async(v: Vector) -> Iterator[Expected]:
    """Lai 2021 with Flame's numbers: the last pick counts, and a percentile of the durations is preferred."""
    of, sizes = v["parameters"], v["sizes"]
    utility, seconds = dict[int, float](), dict[int, float]()
    picked: dict[int, int] = {}
    achieved, models, percentile = dict[int, float](), 0, of["threshold"]
    for entry in v["rounds"]:
        here, m, r = entry["available"], entry["size"], entry["round"] + 1
        known, unseen = [c for c in here if c in utility], [c for c in here if c not in utility]
        cap = quantile([utility[c] for c in known], of["clip"]) if known else 0.0
        times = sorted(seconds.values())
        preferred = times[min(int(len(times) * percentile / 100), len(times) - 1)] if times else math.inf
        scores = {}
        for c in known:
            scores[c] = min(utility[c], cap) + math.sqrt(0.1 * math.log(r) / picked[c])
            if seconds[c] > preferred and percentile < 100:
                scores[c] *= (preferred / seconds[c]) ** of["penalty"]
        epsilon = max(of["exploration"] * of["decay"] ** entry["round"], of["least_exploration"])
        parts = ((n, math.comb(m, n) * epsilon**n * (1 - epsilon) ** (m - n)) for n in range(m + 1))
        chance = joined(*((p, explored_and_exploited(scores, unseen, m, n, of["cut_off"])) for n, p in parts))
        yield Expected(chance, scores)
        picked |= dict.fromkeys(entry["cohort"], r)
        rows = delivered(entry)
        now = int(entry["round"] + max((row["staleness"] for row in rows), default=-entry["round"]))
        w = of["window"]
        for model in range(models + 1, now + 1):  # all models before it are complete
            before = sum(achieved.get(i, 0.0) for i in range(model - 2 * w, model - w))
            after = sum(achieved.get(i, 0.0) for i in range(model - w, model))
            if model % w == 0 and model >= 2 * w and before > after:
                percentile = min(percentile + of["pace"], 100.0)
        models = max(models, now)
        for row in rows:
            utility[row["client"]] = sizes[row["client"]] * row["loss_rms"]
            seconds[row["client"]] = row["duration"]
            achieved[models] = achieved.get(models, 0.0) + utility[row["client"]]


def pisces(v: Vector) -> Iterator[Expected]:
    """Jiang 2022: size times loss over (mean of five stalenesses + 1)^beta; losses that DBSCAN rejects cost credits."""
    of = v["parameters"]
    loss, when = dict[int, float](), dict[int, int]()
    lags: dict[int, list[float]] = {}
    credits = dict.fromkeys(range(v["clients"]), of["credits"])
    for entry in v["rounds"]:
        here, m = entry["available"], entry["size"]
        trusted = [c for c in here if credits[c] > 0]
        trusted = trusted if len(trusted) >= m else here
        worth = {
            c: v["sizes"][c] * loss[c] / (statistics.fmean(lags[c][-5:]) + 1) ** of["discount"]
            for c in here
            if c in loss
        }
        known, unseen = {c: worth[c] for c in trusted if c in worth}, [c for c in trusted if c not in worth]
        epsilon = max(of["exploration"] * of["decay"] ** entry["round"], of["least_exploration"])
        chance: Values = {}
        for n in range(m + 1):
            exploiting = min(m - min(n, len(unseen)), len(known))
            part = largest(known, exploiting) | evenly(unseen, m - exploiting)
            chance = joined((1.0, chance), (math.comb(m, n) * epsilon**n * (1 - epsilon) ** (m - n), part))
        yield Expected(chance, worth)
        for row in delivered(entry):
            c = row["client"]
            loss[c], when[c] = row["loss_rms"], entry["round"]
            lags.setdefault(c, []).append(row["staleness"])
        recent = {c: loss[c] for c in loss if when[c] > entry["round"] - 5}
        if len(recent) >= m:
            near = {c: [i for i in recent if abs(recent[i] - recent[c]) <= of["radius"]] for c in recent}
            core = {c for c in recent if len(near[c]) >= max(m // 2, 1)}
            for row in delivered(entry):
                credits[row["client"]] -= not core.intersection(near[row["client"]])
