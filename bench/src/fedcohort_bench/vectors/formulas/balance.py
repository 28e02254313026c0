"""Methods that balance classes: label counts, or what updates of the output layer's bias say about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from fedcohort_bench.vectors.formulas.draws import (
    Entry,
    Expected,
    Floats,
    Values,
    Vector,
    best,
    delivered,
    evenly,
    greedy,
    inclusion,
    joined,
    one_by_one,
    step_by_step,
)

_ROUNDING = 4e-15  # a QCID below it is rounding


def _divergence(masses: Sequence[float]) -> float:
    """Kullback-Leibler divergence of shares from the uniform ones."""
    total = sum(masses)
    return math.log(len(masses)) + sum(x / total * math.log(x / total) for x in masses if x > 0)


def _sum(rows: Mapping[int, Sequence[float]], clients: Collection[int]) -> list[float]:
    return [math.fsum(column) for column in zip(*(rows[c] for c in clients), strict=True)]


def _grown(
    rows: Mapping[int, Sequence[float]], start: frozenset[int], allowed: Collection[int], k: int
) -> dict[frozenset[int], float]:
    """Return ``start`` with ``k`` clients more, each the one that leaves the sum closest to uniform."""
    return greedy(
        k,
        lambda chosen: {c: -_divergence(_sum(rows, [*start, *chosen, c])) for c in allowed if c not in start | chosen},
    )


def _with_each(
    rows: Mapping[int, Sequence[float]], steps: Sequence[tuple[int, Collection[int]]], start: Sequence[int] = ()
) -> Values:
    """Return minus the divergence with each client instead of the last; ``steps`` are members and who was allowed."""
    members, values = list(start), dict[int, float]()
    for member, allowed in steps:
        values |= {c: -_divergence(_sum(rows, [*members, c])) for c in allowed if c not in members}
        members.append(member)
    return values | dict.fromkeys(members, -_divergence(_sum(rows, members)))


def astraea(v: Vector) -> Iterator[Expected]:
    """Duan 2019: the client that leaves the labels closest to uniform; each has one turn in every pass."""
    counts = dict(enumerate(v["label_counts"]))
    taken: set[int] = set()
    for entry in v["rounds"]:
        here, m = entry["available"], entry["size"]
        left = [c for c in here if c not in taken]
        within = min(m, len(left))
        sets: dict[frozenset[int], float] = {}
        for first, p in _grown(counts, frozenset(), left, within).items():
            for rest, q in _grown(counts, first, here, m - within).items():
                sets[first | rest] = sets.get(first | rest, 0.0) + p * q
        cohort = entry["cohort"]  # in the order of the choice
        steps = [(c, left if i < within else here) for i, c in enumerate(cohort)]
        yield Expected(inclusion(sets), _with_each(counts, steps))
        if within < m:
            taken -= set(here)
            cohort = cohort[within:]
        taken |= set(cohort)


def _softmax(values: Sequence[float], temperature: float) -> list[float]:
    most = max(values)
    powers = [math.exp((x - most) / temperature) for x in values]
    return [x / sum(powers) for x in powers]


def _label_shares(entry: Entry, temperature: float) -> dict[int, list[float]]:
    """Return softmax(update of the bias / T), T relative to the root mean square of the cohort's updates."""
    moved = {row["client"]: row["output-bias-update"] for row in delivered(entry)}
    squares = [(x - sum(row) / len(row)) ** 2 for row in moved.values() for x in row]
    scale = math.sqrt(sum(squares) / len(squares))
    return {c: _softmax(row, temperature * scale) for c, row in moved.items()}


def fed_cucb(v: Vector) -> Iterator[Expected]:
    """Yang 2020: the highest bound first, then who balances it best; unseen clients come before all."""
    of, classes = v["parameters"], len(v["label_counts"][0])
    seen: dict[int, list[list[float]]] = {}
    for entry in v["rounds"]:
        here, m, t = entry["available"], entry["size"], entry["round"] + 1
        known, new = [c for c in here if c in seen], [c for c in here if c not in seen]
        rows = {c: [1 / classes] * classes for c in here}
        bound = {}
        for c in known:
            weight = [of["forgetting"] ** j for j in reversed(range(len(seen[c])))]
            rows[c] = [
                sum(w * r[b] for w, r in zip(weight, seen[c], strict=True)) / sum(weight) for b in range(classes)
            ]
            reward = sum(w / max(_divergence(r), 1e-6) for w, r in zip(weight, seen[c], strict=True)) / sum(weight)
            bound[c] = reward + of["exploration"] * math.sqrt(1.5 * math.log(t) / len(seen[c]))
        if len(new) >= m:
            yield Expected(evenly(new, m))
        else:
            starts = [frozenset(new)] if new else [frozenset([c]) for c in best(bound.items())]
            grown = [(start, _grown(rows, start, known, m - len(start))) for start in starts]
            chance = joined(
                *((p / len(starts), dict.fromkeys(s | r, 1.0)) for s, rest in grown for r, p in rest.items())
            )
            first = max(len(new), 1)
            steps = [(c, known) for c in entry["cohort"][first:]]
            yield Expected(chance, _with_each(rows, steps, entry["cohort"][:first]))
        for c, shares in _label_shares(entry, of["temperature"]).items():
            seen.setdefault(c, []).append(shares)


def _qcid(total: Sequence[float]) -> float:
    """Squared distance of the label shares from uniform."""
    size = sum(total)
    value = sum((x / size - 1 / len(total)) ** 2 for x in total)
    return value if value > _ROUNDING else 0.0


def _balanced_draw(
    v: Vector,
    rows_of: Callable[[], Mapping[int, Sequence[float]]],
    least: Callable[[Sequence[float]], float],
    learn: Callable[[Entry], None] = lambda entry: None,
) -> Iterator[Expected]:
    """Zhang 2023, Sec. 3.3: weights QCID(M_m)^(-m beta), for the first with lambda sqrt(3 ln k / 2 T_n) added."""
    of = v["parameters"]
    pulls = dict.fromkeys(range(v["clients"]), 1)
    for entry in v["rounds"]:
        here, rows = entry["available"], rows_of()

        def weights(
            chosen: frozenset[int],
            here: Sequence[int] = here,
            rows: Mapping[int, Sequence[float]] = rows,
            k: int = entry["round"] + 1,
        ) -> Values:
            found = {}
            for c in here:
                if c not in chosen:
                    total = _sum(rows, [*chosen, c])
                    found[c] = max(_qcid(total), least(total)) ** (-of["beta"] * (len(chosen) + 1))
                    if not chosen:
                        found[c] += of["exploration"] * math.sqrt(1.5 * math.log(k) / pulls[c])
            return found

        yield Expected(inclusion(step_by_step(entry["size"], weights)))
        for c in entry["cohort"]:
            pulls[c] += 1
        learn(entry)


def fedcbs(v: Vector) -> Iterator[Expected]:
    """Zhang 2023, Algorithm 1."""
    counts = dict(enumerate(v["label_counts"]))
    return _balanced_draw(v, lambda: counts, lambda total: float(v["parameters"]["floor"]))


def fedcbs_chance(v: Vector) -> Iterator[Expected]:
    """The same with a floor set by chance, (1 - 1/B) / samples."""
    counts = dict(enumerate(v["label_counts"]))
    return _balanced_draw(v, lambda: counts, lambda total: (1 - 1 / len(total)) / sum(total))


def fedcbs_blind(v: Vector) -> Iterator[Expected]:
    """The same with mean label shares estimated from updates; who was never seen counts as balanced."""
    seen: dict[int, list[list[float]]] = {}
    classes = len(v["label_counts"][0])

    def rows() -> dict[int, list[float]]:
        mean = {c: [sum(column) / len(seen[c]) for column in zip(*seen[c], strict=True)] for c in seen}
        return {c: [n * x for x in mean.get(c, [1 / classes] * classes)] for c, n in enumerate(v["sizes"])}

    def learn(entry: Entry) -> None:
        for c, shares in _label_shares(entry, v["parameters"]["temperature"]).items():
            seen.setdefault(c, []).append(shares)

    return _balanced_draw(v, rows, lambda total: float(v["parameters"]["floor"]), learn)


def _angle(a: Floats, b: Floats) -> float:
    return math.acos(min(1.0, max(-1.0, float(a @ b) / math.sqrt(float(a @ a) * float(b @ b)))))


def _ward(apart: Floats, count: int) -> list[list[int]]:
    """Merge the two closest groups until ``count`` are left; distances by Lance and Williams' formula for Ward."""
    groups = {i: [i] for i in range(len(apart))}
    square = {(i, j): float(apart[i, j]) ** 2 for i in groups for j in groups if i < j}
    while len(groups) > count:
        i, j = min(square, key=square.__getitem__)
        between, a, b = square[i, j], len(groups[i]), len(groups[j])
        for k, group in groups.items():
            if k not in (i, j):
                c, to_i, to_j = len(group), (min(i, k), max(i, k)), (min(j, k), max(j, k))
                square[to_i] = ((a + c) * square[to_i] + (b + c) * square[to_j] - c * between) / (a + b + c)
        groups[i] += groups.pop(j)
        square = {pair: value for pair, value in square.items() if j not in pair}
    return list(groups.values())


def hics_fl(v: Vector) -> Iterator[Expected]:
    """Chen 2024, Algorithm 1: clusters by angle and entropy (Eq. 9), drawn by mean entropy, then by size (Eq. 10)."""
    of = v["parameters"]
    asked: set[int] = set()
    update: dict[int, Floats] = {}
    for entry in v["rounds"]:
        here, m = entry["available"], entry["size"]
        new, old = [c for c in here if c not in asked], [c for c in here if c in asked]
        if len(new) >= m:
            yield Expected(evenly(new, m), {c: float(c in new) for c in here})
        else:
            known = [c for c in old if c in update]
            entropy = {}
            for c in known:
                share = _softmax(update[c].tolist(), of["temperature"])
                entropy[c] = -sum(x * math.log(x) for x in share if x > 0)
            apart = [
                [
                    0.0
                    if a == b
                    else _angle(update[a], update[b]) + of["entropy_weight"] * abs(entropy[a] - entropy[b])
                    for b in known
                ]
                for a in known
            ]
            clusters = [[known[i] for i in group] for group in _ward(np.array(apart), of["clusters"] or m)]
            usual = sum(entropy.values()) / len(entropy)
            clusters += [group] if (group := [c for c in old if c not in update]) else []
            gamma = of["preference"] * max(0.0, 1 - (entry["round"] + 1) / of["rounds"])
            pi = [math.exp(gamma * sum(entropy.get(c, usual) for c in group) / len(group)) for group in clusters]
            chance = {
                c: weight / sum(pi) * v["sizes"][c] / sum(v["sizes"][i] for i in group)
                for weight, group in zip(pi, clusters, strict=True)
                for c in group
            }
            drawn = one_by_one(chance, m - len(new))
            yield Expected(evenly(new, len(new)) | drawn, dict.fromkeys(new, 1.0) | chance)
        asked |= set(entry["cohort"])
        update |= {row["client"]: np.array(row["output-bias-update"]) for row in delivered(entry)}


def divfl(v: Vector) -> Iterator[Expected]:
    """Balakrishnan 2022: everybody once, then greedily the members to whose updates all known ones are closest."""
    asked: set[int] = set()
    update: dict[int, Floats] = {}
    for entry in v["rounds"]:
        here, m = entry["available"], entry["size"]
        new, known = [c for c in here if c not in asked], [c for c in here if c in update]
        apart = {(a, b): float(np.linalg.norm(update[a] - update[b])) for a in update for b in known}
        places = min(max(m - len(new), 0), len(known))

        def closeness(
            chosen: frozenset[int],
            everybody: list[int] = list(update),  # noqa: B006  # of this round
            known: list[int] = known,
            apart: dict[tuple[int, int], float] = apart,
        ) -> Values:
            return {
                c: -sum(min(apart[a, b] for b in [*chosen, c]) for a in everybody) for c in known if c not in chosen
            }

        picked = inclusion(greedy(places, closeness))
        rest = [c for c in here if c in asked and c not in update]
        chance = evenly(new, m) | picked | evenly(rest, m - min(len(new), m) - places)
        members = [c for c in entry["cohort"] if c in known][:places]
        nearest = [min(members, key=lambda b: apart[a, b]) for a in update] if members else []
        yield Expected(chance, weights={c: max(nearest.count(c), 1) for c in entry["cohort"]})
        asked |= set(entry["cohort"])
        update |= {row["client"]: np.array(row["update-sketch"]) for row in delivered(entry)}
