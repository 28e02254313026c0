"""Methods that look at durations and availability."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from fedcohort_bench.vectors.formulas.draws import (
    Expected,
    Values,
    Vector,
    combinations,
    delivered,
    evenly,
    joined,
    largest,
)


class _Durations:
    """The mean of about the last ten durations of each client."""

    def __init__(self) -> None:
        self.mean, self.count = dict[int, float](), dict[int, int]()

    def learn(self, client: int, seconds: float) -> None:
        self.count[client] = self.count.get(client, 0) + 1
        old = self.mean.get(client, 0.0)
        self.mean[client] = old + (seconds - old) / min(self.count[client], 10)


def fedcs(v: Vector) -> Iterator[Expected]:
    """Nishio 2019 without a deadline: of a random set twice as large as the cohort, the fastest."""
    known, asked = _Durations(), set[int]()
    for entry in v["rounds"]:
        here, m = entry["available"], entry["size"]
        slowest = max(known.mean.values(), default=1.0)
        speed = {c: -known.mean.get(c, slowest if c in asked else 0.0) for c in here}
        sets = list(combinations(here, min(math.ceil(v["parameters"]["asked"] * m), len(here))))
        yield Expected(joined(*((1 / len(sets), largest({c: speed[c] for c in drawn}, m)) for drawn in sets)))
        asked |= set(entry["cohort"])
        for row in delivered(entry):
            known.learn(row["client"], row["duration"])


def tifl(v: Vector) -> Iterator[Expected]:
    """Chai 2020, adaptive: a tier is drawn by its probability among those with credits, the cohort from that tier."""
    of = v["parameters"]
    count, credit = of["tiers"], of["credits"]
    known, asked = _Durations(), dict.fromkeys(range(v["clients"]), 0)
    loss: Values = {}
    chance_of = [1 / count] * count
    before: list[float | None] = [None] * count
    left, rounds, last = [credit * (count - t) for t in range(count)], 0, -1
    for entry in v["rounds"]:
        here, m = entry["available"], entry["size"]
        timed = sorted(known.mean.values())
        # The t-th edge is the least duration that a share t / T of the clients do not exceed.
        edges = [timed[math.ceil(Fraction(t, count) * len(timed)) - 1] for t in range(1, count)] if timed else []
        tier = {
            c: sum(edge < known.mean[c] for edge in edges) if c in known.mean else count - 1
            for c in range(v["clients"])
        }
        if rounds and rounds % of["interval"] == 0:
            losses = [[loss[c] for c in loss if tier[c] == t] for t in range(count)]
            now = [sum(x) / len(x) if x else None for x in losses]
            new_loss, old_loss = now[last], before[last]
            if new_loss is not None and old_loss is not None and new_loss >= old_loss:
                value = [-math.inf if x is None else x for x in now]
                rank = [1 + sum(y > x for y in value) + (sum(y == x for y in value) - 1) / 2 for x in value]
                chance_of = [2 * (count + 1 - r) / (count * (count + 1)) for r in rank]
            before = now
        new = [c for c in here if c not in known.mean and asked[c] < of["profile"]]
        old = [c for c in here if c not in new]
        if len(new) >= m:
            yield Expected(evenly(new, m), {c: float(c in new) for c in here})
        else:
            present = {tier[c] for c in old}
            if not any(left[t] for t in present):
                left = [credit * (count - t) for t in range(count)]
            weight = {t: chance_of[t] for t in present if left[t]}
            parts = (
                (w / sum(weight.values()), largest({c: -abs(tier[c] - t) for c in old}, m - len(new)))
                for t, w in weight.items()
            )
            yield Expected(evenly(new, len(new)) | joined(*parts))
            last, rounds = entry["notes"]["tier"] - 1, rounds + 1
            left[last] -= 1
        for c in entry["cohort"]:
            asked[c] += 1
        for row in delivered(entry):
            known.learn(row["client"], row["duration"])
            loss[row["client"]] = row["loss"]


def rbcs_f(v: Vector) -> Iterator[Expected]:
    """Huang 2021: of all cohorts, the one with the least V max tau - sum Z; tau by ridge regression, less a bound."""
    of = v["parameters"]
    seen: dict[int, list[tuple[float, float]]] = {c: [] for c in range(v["clients"])}  # took part before, duration
    queue, cohort = dict.fromkeys(seen, 0.0), set[int]()
    for entry in v["rounds"]:
        here, m = entry["available"], entry["size"]
        everything = [seconds for reports in seen.values() for _, seconds in reports]
        unit = sum(everything) / len(everything) if everything else 1.0
        bound = {}
        for c in here:
            x = np.array([[1.0, warm] for warm, _ in seen[c]]).reshape(-1, 2)
            h = of["ridge"] * np.eye(2) + x.T @ x
            now = np.array([1.0, float(c in cohort)])
            estimate = now @ np.linalg.solve(h, x.T @ np.array([seconds for _, seconds in seen[c]])) / unit
            bound[c] = max(float(estimate - of["exploration"] * math.sqrt(now @ np.linalg.solve(h, now))), 0.0)
        cost = {s: of["speed"] * max(bound[c] for c in s) - sum(queue[c] for c in s) for s in combinations(here, m)}
        least = [set(s) for s, value in cost.items() if value <= min(cost.values()) + 1e-9]
        yield Expected(
            # Of several best cohorts, any may be taken.
            dict.fromkeys(least[0], 1.0) if len(least) == 1 else None,
            {c: queue[c] - of["speed"] * bound[c] for c in here},
            possible=set.union(*least),
            always=set.intersection(*least),
        )
        means = [sum(t for _, t in reports) / len(reports) for reports in seen.values() if reports]
        slowest = max([*means, *(row["duration"] for row in delivered(entry))])
        for row in entry["reports"]:
            warm = float(row["client"] in cohort)
            seen[row["client"]].append((warm, row["duration"] if row["ok"] else slowest))
        cohort = set(entry["cohort"])
        for c in here:
            queue[c] = max(queue[c] + of["fairness"] * m / len(here) - (c in cohort), 0.0)


def refl(v: Vector) -> Iterator[Expected]:
    """Abdelmoniem 2023, IPS: who is least likely to be there in the next round; who was taken holds off."""
    memory, hold_off = v["parameters"]["memory"], v["parameters"]["hold_off"]
    stayed, gone = (dict.fromkeys(range(v["clients"]), 0.0) for _ in range(2))
    before, free = set[int](), dict.fromkeys(stayed, 0)
    for entry in v["rounds"]:
        here = set(entry["available"])
        for c in before:
            stayed[c] += (c in here) - stayed[c] / memory
            gone[c] += (c not in here) - gone[c] / memory
        score = {
            c: -(1 + stayed[c]) / (2 + stayed[c] + gone[c]) - 2 * max(free[c] - entry["round"], 0) for c in sorted(here)
        }
        yield Expected(largest(score, entry["size"]), score)
        before = here
        free |= dict.fromkeys(entry["cohort"], entry["round"] + 1 + hold_off)


def fedcompass(v: Vector) -> Iterator[Expected]:
    """Li 2024: who joins a group does what it can until the group is due; else a new group is timed by an old one."""
    of = v["parameters"]
    pace, now = dict[int, float](), 0.0
    for entry in v["rounds"]:
        known = {c: pace[c] for c in entry["available"] if c in pace}
        work, due, latest = dict[int, float](), dict[int, float](), dict[int, float]()
        for c in sorted(entry["cohort"], key=lambda c: pace.get(c, math.inf)):
            if c not in pace:
                work[c] = of["most"]
                continue
            joins = [(due[o] - now) / pace[c] for o in due]
            joins = [q for q in joins if of["least"] <= q <= of["most"]]
            if joins:
                work[c] = max(joins)
            else:
                starts = []
                for end in set(due.values()):
                    group = [o for o in due if due[o] == end]
                    last = max(latest[o] for o in group)
                    if last > now:
                        starts.append((last + min(pace[o] for o in group) * of["most"] - now) / pace[c])
                starts = [q for q in starts if q <= of["most"]]
                work[c] = max([of["least"], *starts]) if starts else of["most"]
            end = now + work[c] * pace[c]
            same = [o for o in due if math.isclose(due[o], end, rel_tol=1e-12)]
            due[c] = due[same[0]] if same else end
            latest[c] = latest[same[0]] if same else now + of["slack"] * work[c] * pace[c]
        yield Expected(evenly(entry["available"], entry["size"]), known, work=work)
        for row in delivered(entry):
            c, usual = row["client"], row["duration"] / work[row["client"]]
            pace[c] = (1 - of["momentum"]) * pace[c] + of["momentum"] * usual if c in pace else usual
        now = max([now, *(now + row["duration"] for row in delivered(entry))])
