"""Decide which clients are available in a round.

.. [Zhang2023] J. Zhang et al., "Fed-CBS: A Heterogeneity-Aware Client Sampling Mechanism for Federated Learning via
   Class-Imbalance Reduction", ICML 2023, Sections 5.1 and 5.2, Appendix C.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcohort.core import rng
from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.errors import ScenarioError
from fedcohort.core.params import Interval, Optional, Sequence, param
from fedcohort.core.registry import Registry
from fedcohort.scenario.classwise import imbalanced_holders
from fedcohort.scenario.federation import Federation
from fedcohort.scenario.part import NamedPart
from fedcohort.scenario.partition import nearest

AVAILABILITIES: Registry[Availability] = Registry("availability")

_EACH_ROUND, _WHOLE_RUN = 0, 1  # positions in the availability stream

_SHARE = Interval(float, 0, 1, "right")


class Availability(NamedPart):
    """Which clients are available in each round: a pure function of seed, round and federation."""

    def mask(self, federation: Federation, *, seed: int, round: int) -> BoolArray:
        """Return which clients are available (N,)."""
        raise NotImplementedError(type(self).__name__)


def _to_mask(clients: int, available: IntArray) -> BoolArray:
    mask = np.zeros(clients, dtype=bool)
    mask[available] = True
    return mask


@AVAILABILITIES.register("always")
@dataclass(frozen=True, kw_only=True)
class Always(Availability):
    """All clients, in every round."""

    def mask(self, federation: Federation, *, seed: int, round: int) -> BoolArray:
        """Return all true."""
        return np.ones(len(federation), dtype=bool)


@AVAILABILITIES.register("uniform-share")
@dataclass(frozen=True, kw_only=True)
class UniformShare(Availability):
    """A fixed share of the clients, drawn uniformly in every round ([Zhang2023]_, Section 5.1).

    >>> federation = Federation.of([[0]] * 10, labels=[0], classes=1)
    >>> int(UniformShare(share=0.3).mask(federation, seed=0, round=2).sum())
    3
    """

    share: float = param(0.3, _SHARE, "share of the clients that is available; at least one is")

    def mask(self, federation: Federation, *, seed: int, round: int) -> BoolArray:
        """Draw the round's share without replacement."""
        clients = len(federation)
        draw = rng.stream(seed, rng.AVAILABILITY, _EACH_ROUND, round)
        count = max(1, nearest(self.share * clients))  # a round without any client would only pass time
        return _to_mask(clients, draw.choice(clients, size=count, replace=False, shuffle=False))


@AVAILABILITIES.register("class-biased")
@dataclass(frozen=True, kw_only=True)
class ClassBiased(Availability):
    """Random clients of each class, with frequent and rare classes in the ratio ``ratio`` : 1 ([Zhang2023]_, Case 2).

    A client belongs to its most frequent class. With 200 clients of one class each and a share of 30%, there are 9
    clients of each of the first five classes and 3 of each of the others (3 : 1), or 10 and 2 (5 : 1), drawn again in
    every round.

    >>> federation = Federation.of([[k] for k in range(200)], labels=np.arange(200) % 10, classes=10)
    >>> mask = ClassBiased(ratio=5).mask(federation, seed=0, round=0)
    >>> np.bincount(federation.main_class[mask])
    array([10, 10, 10, 10, 10,  2,  2,  2,  2,  2])
    """

    share: float = param(0.3, _SHARE, "share of the clients that is available")
    ratio: int = param(3, Interval(int, 1, None), "n_1 : n_2, frequent to rare classes among the available (r)")
    frequent: int | None = param(None, Optional(Interval(int, 1, None)), "how many classes are frequent; None is half")

    def mask(self, federation: Federation, *, seed: int, round: int) -> BoolArray:
        """Draw each class's clients without replacement."""
        clients = len(federation)
        total = nearest(self.share * clients)
        needed = imbalanced_holders(self.name, total, federation.classes, self.ratio, self.frequent)
        have = np.bincount(federation.main_class, minlength=federation.classes)
        if (needed > have).any():
            c = int(np.argmax(needed - have))
            raise ScenarioError(
                f"The availability 'class-biased' needs {int(needed[c])} clients of class {c}, but the federation has "
                f"{int(have[c])}.",
                hint="use a smaller share or ratio",
            )
        draw = rng.stream(seed, rng.AVAILABILITY, _EACH_ROUND, round)
        # A stable sort of a random order, so the first clients of each class are a random choice.
        shuffled = draw.permutation(clients)
        by_class = shuffled[np.argsort(federation.main_class[shuffled], kind="stable")]
        starts = np.concatenate([[0], np.cumsum(have)])
        return _to_mask(clients, np.concatenate([by_class[s : s + n] for s, n in zip(starts, needed, strict=False)]))


@AVAILABILITIES.register("bernoulli")
@dataclass(frozen=True, kw_only=True)
class Bernoulli(Availability):
    """Each client independently, with its own probability.

    The probabilities are listed, or all equal, or (with ``concentration``) drawn once per experiment from a Beta
    distribution of mean ``probability``. In some rounds no client may be available.

    >>> federation = Federation.of([[0]] * 3, labels=[0], classes=1)
    >>> Bernoulli(probabilities=(0.0, 1.0, 0.0)).mask(federation, seed=0, round=0)
    array([False,  True, False])
    """

    probability: float = param(0.5, _SHARE, "mean probability of being available")
    concentration: float | None = param(
        None, Optional(Interval(float, 0, None, "neither")), "a + b of the Beta distribution; None makes all equal"
    )
    probabilities: tuple[float, ...] | None = param(
        None, Optional(Sequence(Interval(float, 0, 1), least=1)), "every client's own probability"
    )

    def mask(self, federation: Federation, *, seed: int, round: int) -> BoolArray:
        """Draw for each client."""
        # The rates are drawn from another stream, once, so that clients differ in the same way in all rounds.
        draw = rng.stream(seed, rng.AVAILABILITY, _EACH_ROUND, round)
        available: BoolArray = draw.random(len(federation)) < self.rates(len(federation), seed)
        return available

    def rates(self, clients: int, seed: int) -> FloatArray:
        """Return every client's probability (N,)."""
        if self.probabilities is not None:
            if len(self.probabilities) != clients:
                raise ScenarioError(
                    f"The availability 'bernoulli' has {len(self.probabilities)} probabilities for {clients} clients."
                )
            return np.asarray(self.probabilities, dtype=np.float64)
        # A Beta distribution of mean 1 does not exist: its second parameter would be 0.
        if self.concentration is None or self.probability == 1:
            return np.full(clients, float(self.probability))
        draw = rng.stream(seed, rng.AVAILABILITY, _WHOLE_RUN)
        a, b = self.probability * self.concentration, (1 - self.probability) * self.concentration
        return draw.beta(a, b, size=clients)


@AVAILABILITIES.register("day-night")
@dataclass(frozen=True, kw_only=True)
class DayNight(Availability):
    """Each client is available for part of its day, which lasts ``period`` rounds and begins with its own morning.

    Mornings are spread at random over the day, or over ``zones`` time zones. With ``zones=1``, all clients come and go
    together.

    >>> federation = Federation.of([[0]] * 4, labels=[0], classes=1)
    >>> [int(DayNight(period=4, zones=1).mask(federation, seed=0, round=t).sum()) for t in range(4)]
    [4, 4, 0, 0]
    """

    period: int = param(24, Interval(int, 1, None), "rounds per day")
    awake: float = param(0.5, _SHARE, "share of the day in which a client is available")
    zones: int | None = param(None, Optional(Interval(int, 1, None)), "number of time zones; None spreads continuously")

    def mask(self, federation: Federation, *, seed: int, round: int) -> BoolArray:
        """Compare each client's local time with the length of its day."""
        # Wrapped at midnight, so that a client's day may begin in one day of the federation and end in the next.
        local = (round % self.period / self.period + self.mornings(len(federation), seed)) % 1.0
        awake: BoolArray = local < self.awake
        return awake

    def mornings(self, clients: int, seed: int) -> FloatArray:
        """Return how far into its day each client is at round 0, in [0, 1) (N,)."""
        draw = rng.stream(seed, rng.AVAILABILITY, _WHOLE_RUN)
        if self.zones is None:
            return draw.random(clients)
        return draw.integers(0, self.zones, clients) / self.zones
