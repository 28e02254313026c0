"""Exact chances of small draws, by going through all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = dict[str, Any]
Entry = dict[str, Any]  # of a vector's list "rounds"
Row = dict[str, Any]  # of an entry's list "reports"
Floats = NDArray[np.float64]
Values = dict[int, float]  # by client

_TIE = 1e-12  # values that differ by less, relatively, are equal up to rounding


@dataclass(frozen=True)
class Expected:
    """What a paper's formula says about one round.

    Attributes
    ----------
    chance : by client, the probability of being in the cohort; clients that are left out have none
        None: any client of ``possible`` may be in it, with a probability that the paper leaves open.
    scores : by client; None if they are random, or no quantity of the paper
    draws : number of random draws behind ``chance``; None: it is exact
    possible, always : the clients that may be, and that must be in the cohort, where ``chance`` is None
    asked : by client, the probability of being asked a question
    weights, work : by client, of the cohort that was then chosen
    """

    chance: Mapping[int, float] | None
    scores: Mapping[int, float] | None = None
    draws: int | None = None
    possible: Collection[int] = ()
    always: Collection[int] = ()
    asked: Mapping[int, float] | None = None
    weights: Mapping[int, float] | None = None
    work: Mapping[int, float] | None = None


def evenly(clients: Collection[int], k: float) -> Values:
    """Return the chances if ``k`` clients are drawn uniformly."""
    return {c: min(k / len(clients), 1.0) for c in clients} if k > 0 else {}


def joined(*parts: tuple[float, Mapping[int, float]]) -> Values:
    """Return the chances of a mixture, given the probability and the chances of each of its parts."""
    total: Values = {}
    for probability, chances in parts:
        for c, chance in chances.items():
            total[c] = total.get(c, 0.0) + probability * chance
    return total


def step_by_step(k: int, weights: Callable[[frozenset[int]], Mapping[int, float]]) -> dict[frozenset[int], float]:
    """Return every set of ``k`` clients with its chance; ``weights`` are those of the next one, given a set."""
    sets = {frozenset[int](): 1.0}
    for _ in range(k):
        longer: dict[frozenset[int], float] = {}
        for chosen, chance in sets.items():
            following = weights(chosen)
            total = math.fsum(following.values())
            for c, weight in following.items():
                if weight > 0:
                    longer[chosen | {c}] = longer.get(chosen | {c}, 0.0) + chance * weight / total
        sets = longer
    return sets


def inclusion(sets: Mapping[frozenset[int], float]) -> Values:
    """Return the chance of every client to be in the set."""
    return joined(*((chance, dict.fromkeys(chosen, 1.0)) for chosen, chance in sets.items()))


def one_by_one(weights: Mapping[int, float], k: int) -> Values:
    """Return the chances if ``k`` clients are drawn one after the other in proportion to weights."""
    return inclusion(step_by_step(k, lambda chosen: {c: w for c, w in weights.items() if c not in chosen}))


def best(values: Iterable[tuple[int, float]]) -> list[int]:
    """Return the clients with the largest value."""
    values = list(values)
    most = max(value for _, value in values)
    return [c for c, value in values if value >= most - _TIE * max(1.0, abs(most))]


def greedy(k: int, value: Callable[[frozenset[int]], Mapping[int, float]]) -> dict[frozenset[int], float]:
    """Return the sets of ``k`` clients, each the one with the largest value given those before, ties at random."""
    return step_by_step(k, lambda chosen: dict.fromkeys(best(value(chosen).items()), 1.0))


def largest(values: Mapping[int, float], k: int) -> Values:
    """Return the chances if the ``k`` largest values are taken, ties at random."""
    left, chances = dict(values), dict[int, float]()
    while left and k > len(chances):
        tied, places = best(left.items()), k - len(chances)
        chances |= evenly(tied, places)
        if len(tied) >= places:
            break
        left = {c: v for c, v in left.items() if c not in tied}
    return chances


def in_proportion(values: Mapping[int, float], m: int) -> Values:
    """Return chances min(1, x times the value) that sum to ``m``, x found by bisection."""
    if m >= len(values):
        return dict.fromkeys(values, 1.0)
    low, high = 0.0, 1e12
    for _ in range(300):
        x = (low + high) / 2
        low, high = (x, high) if sum(min(1.0, x * v) for v in values.values()) < m else (low, x)
    return {c: min(1.0, high * v) for c, v in values.items()}


def combinations(clients: Iterable[int], k: int) -> Iterable[tuple[int, ...]]:
    """Return all sets of ``k`` clients."""
    return itertools.combinations(sorted(clients), k)


def quantile(values: Iterable[float], share: float) -> float:
    """Return the quantile, interpolated between the two nearest values."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low, high = ordered[int(at)], ordered[min(int(at) + 1, len(ordered) - 1)]
    return low + (high - low) * (at - int(at))


def delivered(entry: Entry) -> list[Row]:
    """Return the reports of the clients whose models arrived."""
    return [row for row in entry["reports"] if row["ok"]]


def for_all_data(v: Vector, entry: Entry) -> float:
    """Return the factor with which the data of the available clients stand for those of all."""
    return float(sum(v["sizes"]) / sum(v["sizes"][c] for c in entry["available"]))
