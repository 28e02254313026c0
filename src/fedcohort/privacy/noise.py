r"""Differential privacy of label counts and losses: exact discrete noise, and a ledger that refuses when it is spent.

Two data sets of a client are neighbours when one sample changes its label (the size is public: Fed-CBS needs it, and
every strategy weights by it). One count is then higher by 1 and another lower by 1.

.. [Canonne2020] C. Canonne, G. Kamath, T. Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020.
.. [Ghosh2009] A. Ghosh, T. Roughgarden, M. Sundararajan, "Universally utility-maximizing privacy mechanisms",
   STOC 2009 (the geometric mechanism).
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.errors import InputError, MissingExtraError
from fedcohort.core.guard import guarded
from fedcohort.core.params import Interval, OneOf, Parameterized, param

Below = Callable[[int], int]
"""``below(n)`` returns a uniform integer from 0 to n - 1; :func:`secrets.randbelow` unless a simulation seeds it."""

_CHANGED = 2  # counts that differ, by 1 each, when one sample has another label
_FINEST, _LONGEST = 10, 18  # binary logarithms: steps in the smallest release, and in all together
_HAIR = 0.9995


# -- exact samplers -----------------------------------------------------------------------------------------------


def _bernoulli(p: Fraction, below: Below) -> bool:
    return below(p.denominator) < p.numerator


def _bernoulli_exp(gamma: Fraction, below: Below) -> bool:
    """Return True with probability exp(-gamma), without a floating-point number ([Canonne2020]_, Algorithm 1)."""
    while gamma > 1:
        if not _bernoulli_exp(Fraction(1), below):
            return False
        gamma -= 1
    k = 1
    while _bernoulli(gamma / k, below):
        k += 1
    return k % 2 == 1


def discrete_laplace(scale: Fraction, below: Below = secrets.randbelow) -> int:
    """Return an integer y with probability proportional to ``exp(-|y| / scale)`` ([Canonne2020]_, Algorithm 2)."""
    s, t = scale.denominator, scale.numerator
    while True:
        u = below(t)
        if not _bernoulli_exp(Fraction(u, t), below):
            continue
        v = 0
        while _bernoulli_exp(Fraction(1), below):
            v += 1
        y = (u + t * v) // s
        negative = below(2) == 1
        if not (negative and y == 0):
            return -y if negative else y


def discrete_gaussian(variance: Fraction, below: Below = secrets.randbelow) -> int:
    """Return an integer y with probability proportional to exp(-y^2 / 2 variance) ([Canonne2020]_, Algorithm 3)."""
    t = math.isqrt(variance.numerator // variance.denominator) + 1
    while True:
        y = discrete_laplace(Fraction(t), below)
        if _bernoulli_exp((abs(y) - variance / t) ** 2 / (2 * variance), below):
            return y


# -- accounting ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Release:
    """One release of something about a client's data, and what it costs.

    A release consists of equal, independent parts: one sample that changes its label changes two label counts by 1.

    Parameters
    ----------
    kind : str
        What was released: "labels" or "loss".
    epsilon : float, optional
        Each part is epsilon-DP.
    variance : float, optional
        Each part is a whole number that may differ by 1, with discrete Gaussian noise of this variance.
    parts : int
    """

    kind: str
    epsilon: float | None = None
    variance: float | None = None
    parts: int = 1

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.variance is None):
            raise InputError("A release has either an epsilon or a variance.")
        loud = self.variance if self.epsilon is None else self.epsilon
        # What is not above 0 would give budget back, and NaN would make every sum pass.
        if not isinstance(loud, (int, float)) or isinstance(loud, bool) or not 0 < loud < math.inf:
            raise InputError(f"The epsilon or variance of a release must be a finite number above 0. Got {loud!r}.")
        if not isinstance(self.parts, int) or isinstance(self.parts, bool) or self.parts < 1:
            raise InputError(f"A release has at least one part. Got parts={self.parts!r}.")

    @classmethod
    def pure(cls, kind: str, epsilon: float) -> Release:
        """A release that is epsilon-DP, by whatever mechanism."""
        return cls(kind, epsilon)


def _losses(releases: Iterable[Release]) -> Any:
    """Return the distribution of the privacy loss of all releases together, as dp-accounting's PLD."""
    pld = _library()
    parts: Counter[tuple[float | None, float | None]] = Counter()
    for release in releases:
        parts[release.epsilon, release.variance] += release.parts
    # Losses are rounded up to multiples of a step: of the smallest release so fine a part as all together admit. A
    # power of two, so that an epsilon is a multiple of it and its loss is not rounded at all.
    sizes = {part: part[0] or 1 / math.sqrt(part[1] or 1.0) for part in parts}
    together = math.fsum(count * sizes[part] for part, count in parts.items())
    least = min(sizes.values())
    step = least / 2.0 ** min(_FINEST, math.floor(math.log2(least / together) + _LONGEST))
    composed = None
    for (epsilon, variance), count in parts.items():
        one = (
            # Discrete Laplace noise on a number that differs by 1: no epsilon-DP mechanism composes worse.
            pld.from_discrete_laplace_mechanism(epsilon, value_discretization_interval=step)
            if epsilon is not None
            else pld.from_discrete_gaussian_mechanism(math.sqrt(variance or 0.0), value_discretization_interval=step)
        )
        same = one.self_compose(count)
        composed = same if composed is None else composed.compose(same)
    return composed


def _library() -> Any:
    try:
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError as error:
        raise MissingExtraError(
            f"Adding up differential privacy with a delta needs dp-accounting, which is not installed ({error}).",
            hint="pip install 'fedcohort[dp]'; with delta 0 and geometric noise epsilons simply add up",
        ) from error
    return privacy_loss_distribution


def composed(releases: Sequence[Release], delta: float) -> float:
    """Return the least epsilon for which all releases together are (epsilon, delta)-DP.

    With ``delta`` 0 epsilons add up. Otherwise the distributions of the releases' privacy losses are convolved, which
    is exact up to a grid that never understates (extra ``dp``).

    Examples
    --------
    Ten releases of label counts with epsilon 0.25 each:

    >>> round(composed([Release("labels", epsilon=0.125, parts=2)] * 10, 1e-5), 2)
    2.08
    """
    epsilons = [None if release.epsilon is None else release.parts * release.epsilon for release in releases]
    added = math.inf if None in epsilons else math.fsum(e for e in epsilons if e is not None)
    if delta == 0 or not releases:
        return added
    return min(added, float(_losses(releases).get_epsilon_for_delta(delta)))


def _gaussian_delta(variance: float, epsilon: float, deviations: float) -> float:
    """Return the delta at ``epsilon`` of discrete Gaussian noise on two counts that differ by 1 each.

    Exact, but for what lies more than so many deviations away.
    """
    width = math.ceil(deviations * math.sqrt(variance)) + 2
    y = np.arange(-width, width + 1)
    one = np.exp(-(y**2) / (2 * variance))
    both = np.convolve(one / one.sum(), one / one.sum())  # of the sum of both counts' noise
    loss = (1 - np.arange(-2 * width, 2 * width + 1)) / variance
    return float((both * np.maximum(-np.expm1(np.minimum(epsilon - loss, 0.0)), 0.0)).sum())


@lru_cache(maxsize=256)
def _least_variance(epsilon: float, delta: float) -> Fraction:
    """Return the least variance, a multiple of 1/1024, that makes noisy counts (epsilon, delta)-DP."""

    def enough(n: int) -> bool:
        # A hair below epsilon, because :func:`composed` rounds a little up.
        return _gaussian_delta(n / 1024, _HAIR * epsilon, 5 + math.sqrt(-2 * math.log(delta))) <= delta

    high = 1024
    while not enough(high):
        high *= 2
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return Fraction(high, 1024)


# -- mechanisms ---------------------------------------------------------------------------------------------------


@guarded(methods=True)
@dataclass(frozen=True, kw_only=True)
class CountNoise(Parameterized):
    """Integer noise on each label count.

    ``geometric`` is epsilon-DP (two-sided geometric, ratio exp(-epsilon / 2)); ``gaussian`` is (epsilon, delta)-DP
    (discrete Gaussian, of the least variance that is).

    Examples
    --------
    >>> noise = CountNoise(epsilon=1.0, mechanism="gaussian", delta=1e-5)
    >>> round(noise.deviation, 2)
    5.28
    >>> round(composed([noise.release], 1e-5), 2)
    1.0
    """

    epsilon: float = param(1.0, Interval(float, 0, None, "neither"), "of one release (epsilon)")
    mechanism: Literal["geometric", "gaussian"] = param(
        "geometric", OneOf(("geometric", "gaussian")), "which noise; gaussian needs delta, geometric has none"
    )
    delta: float = param(1e-5, Interval(float, 0, 1, "neither"), "of one release with gaussian noise (delta)")
    kind: ClassVar[str] = "labels"

    @property
    def _variance(self) -> Fraction:
        return _least_variance(self.epsilon, self.delta)

    @property
    def _scale(self) -> Fraction:
        return Fraction(math.ceil(4096 * _CHANGED / self.epsilon), 4096)

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on one count."""
        if self.mechanism == "gaussian":
            return math.sqrt(self._variance)
        q = math.exp(-1 / self._scale)
        return math.sqrt(2 * q) / (1 - q)

    @property
    def release(self) -> Release:
        """What one release costs."""
        if self.mechanism == "gaussian":
            return Release(self.kind, variance=float(self._variance), parts=_CHANGED)
        return Release(self.kind, float(1 / self._scale), parts=_CHANGED)

    @staticmethod
    def check(counts: ArrayLike) -> None:
        """Refuse what are not whole counts of one client."""
        values = np.asarray(counts)
        if (
            values.ndim != 1
            or not np.isfinite(values).all()
            or (values != np.floor(values)).any()
            or (values < 0).any()
        ):
            # Not the counts themselves: what a client raises is sent to the server.
            raise InputError(
                f"Noise is added to whole counts, not negative, of one client. Got something else, of shape "
                f"{values.shape} and type {values.dtype}."
            )

    def noisy(self, counts: ArrayLike, below: Below = secrets.randbelow) -> IntArray:
        """Return (B,) whole counts with noise; some may be negative."""
        self.check(counts)
        values = np.asarray(counts)
        if self.mechanism == "gaussian":
            variance = self._variance
            draws = [discrete_gaussian(variance, below) for _ in range(len(values))]
        else:
            scale = self._scale
            draws = [discrete_laplace(scale, below) for _ in range(len(values))]
        return values.astype(np.int64) + np.array(draws, np.int64)


def plausible(noisy: ArrayLike, size: float) -> FloatArray:
    """Return the counts, not negative and with sum ``size``, nearest to noisy ones. Free: it looks at nothing else.

    >>> plausible([9, -2, 4], 10)
    array([7.5, 0. , 2.5])
    """
    values = np.asarray(noisy, np.float64)
    # Projection onto a simplex: what exceeds a common threshold.
    ordered = np.sort(values)[::-1]
    excess = (np.cumsum(ordered) - size) / np.arange(1, len(values) + 1)
    last = int(np.flatnonzero(ordered > excess)[-1]) if size > 0 else 0
    return np.maximum(values - excess[last], 0.0) if size > 0 else np.zeros(len(values))


@guarded(methods=True)
@dataclass(frozen=True, kw_only=True)
class LossNoise(Parameterized):
    """Noise on the mean of samples' losses, each clipped to [0, ``bound``].

    The sum of clipped losses is rounded to a grid of bound / 2^20 and gets discrete Laplace noise, so that no bit of a
    floating-point number tells more than the mechanism promises (Mironov 2012).
    """

    epsilon: float = param(0.1, Interval(float, 0, None, "neither"), "of one answer (epsilon)")
    bound: float = param(5.0, Interval(float, 0, None, "neither"), "largest loss of a sample that counts")
    kind: ClassVar[str] = "loss"
    _GRID: ClassVar[int] = 1 << 20

    @property
    def _scale(self) -> Fraction:
        return Fraction(math.ceil(self._GRID / self.epsilon))

    @property
    def release(self) -> Release:
        """What one answer costs."""
        return Release.pure(self.kind, float(self._GRID / self._scale))

    def noisy_mean(self, losses: ArrayLike, below: Below = secrets.randbelow) -> float:
        """Return the mean of a client's (n,) losses with noise; NaN when it has none."""
        values = np.nan_to_num(np.asarray(losses, np.float64), nan=self.bound, posinf=self.bound)
        if not len(values):
            return float("nan")
        steps = np.rint(np.clip(values, 0.0, self.bound) * (self._GRID / self.bound)).astype(np.int64)
        total = int(steps.sum()) + discrete_laplace(self._scale, below)
        return total / self._GRID * self.bound / len(values)
