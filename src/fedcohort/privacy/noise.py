r"""Differential privacy of label counts and losses: exact discrete noise, and a ledger that refuses when it is spent.

Two data sets of a client are neighbours when one sample changes its label (the size is public: Fed-CBS needs it, and
every strategy weights by it). Counts then differ by 2 in the 1-norm and :math:`\sqrt 2` in the 2-norm.

.. [Canonne2020] C. Canonne, G. Kamath, T. Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020.
.. [Ghosh2009] A. Ghosh, T. Roughgarden, M. Sundararajan, "Universally utility-maximizing privacy mechanisms",
   STOC 2009 (the geometric mechanism).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq, minimize_scalar

from fedcohort.arrays import FloatArray, IntArray
from fedcohort.errors import InputError
from fedcohort.guard import guarded
from fedcohort.params import Interval, OneOf, Parameterized, param

Below = Callable[[int], int]
"""``below(n)`` returns a uniform integer from 0 to n - 1; :func:`secrets.randbelow` unless a simulation seeds it."""

_L1, _L2_SQUARED = 2, 2


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


def delta_of(rho: float, epsilon: float) -> float:
    """Return the delta for which rho-zCDP implies (epsilon, delta)-DP ([Canonne2020]_, Corollary 13)."""
    if rho == 0:
        return 0.0

    def log_delta(log_excess: float) -> float:
        alpha = 1 + math.exp(log_excess)
        return (alpha - 1) * (alpha * rho - epsilon) - math.log(alpha - 1) + alpha * math.log1p(-1 / alpha)

    best = minimize_scalar(log_delta, bounds=(-12.0, 12.0), method="bounded", options={"xatol": 1e-6})
    return min(1.0, math.exp(min(0.0, float(best.fun))))


def epsilon_of(rho: float, delta: float) -> float:
    """Return the least epsilon for which rho-zCDP implies (epsilon, delta)-DP."""
    if rho == 0 or delta_of(rho, 0.0) <= delta:
        return 0.0
    most = rho + 2 * math.sqrt(rho * math.log(1 / delta))  # Bun and Steinke 2016; never tighter
    return float(brentq(lambda e: math.log(max(delta_of(rho, e), 1e-300)) - math.log(delta), 0.0, most + 1e-9))


def rho_for(epsilon: float, delta: float) -> float:
    """Return the largest rho for which rho-zCDP implies (epsilon, delta)-DP."""
    high = epsilon
    while delta_of(high, epsilon) < delta:
        high *= 2
    return float(brentq(lambda rho: delta_of(rho, epsilon) - delta, 1e-12, high, xtol=1e-14))


@dataclass(frozen=True)
class Release:
    """One release of something about a client's data, and what it costs.

    Parameters
    ----------
    kind : str
        What was released: "labels" or "loss".
    epsilon : float or None
        Of pure differential privacy; None for a release that is only rho-zCDP.
    rho : float
        Of zero-concentrated differential privacy.
    """

    kind: str
    epsilon: float | None
    rho: float

    @classmethod
    def pure(cls, kind: str, epsilon: float) -> Release:
        """A release that is epsilon-DP, hence epsilon^2 / 2-zCDP."""
        return cls(kind, epsilon, epsilon * epsilon / 2)


def composed(releases: Sequence[Release], delta: float) -> float:
    """Return the epsilon all releases together have at ``delta``: the better of adding up and composing in zCDP."""
    through_zcdp = epsilon_of(sum(release.rho for release in releases), delta) if delta > 0 else math.inf
    epsilons = [release.epsilon for release in releases]
    added = math.inf if None in epsilons else math.fsum(e for e in epsilons if e is not None)
    return min(through_zcdp, added)


# -- mechanisms ---------------------------------------------------------------------------------------------------


@guarded(methods=True)
@dataclass(frozen=True, kw_only=True)
class CountNoise(Parameterized):
    """Integer noise on each label count.

    ``geometric`` is epsilon-DP (two-sided geometric, ratio exp(-epsilon / 2)); ``gaussian`` is (epsilon, delta)-DP
    (discrete Gaussian whose rho-zCDP is converted as tightly as is known).

    Examples
    --------
    >>> noise = CountNoise(epsilon=1.0, mechanism="gaussian", delta=1e-5)
    >>> round(noise.deviation, 2)
    5.72
    >>> noise.release.epsilon is None, round(composed([noise.release], 1e-5), 3)
    (True, 1.0)
    """

    epsilon: float = param(1.0, Interval(float, 0, None, "neither"), "of one release (epsilon)")
    mechanism: Literal["geometric", "gaussian"] = param(
        "geometric", OneOf(("geometric", "gaussian")), "which noise; gaussian needs delta, geometric has none"
    )
    delta: float = param(1e-5, Interval(float, 0, 1, "neither"), "of one release with gaussian noise (delta)")
    kind: ClassVar[str] = "labels"

    @property
    def _variance(self) -> Fraction:
        # Rounded up to a number with a small denominator, which only adds privacy.
        return Fraction(math.ceil(1024 * _L2_SQUARED / (2 * rho_for(self.epsilon, self.delta))), 1024)

    @property
    def _scale(self) -> Fraction:
        return Fraction(math.ceil(4096 * _L1 / self.epsilon), 4096)

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
            return Release(self.kind, None, float(_L2_SQUARED / (2 * self._variance)))
        return Release.pure(self.kind, float(_L1 / self._scale))

    def noisy(self, counts: ArrayLike, below: Below = secrets.randbelow) -> IntArray:
        """Return (B,) whole counts with noise; some may be negative."""
        values = np.asarray(counts)
        if (
            values.ndim != 1
            or not np.isfinite(values).all()
            or (values != np.floor(values)).any()
            or (values < 0).any()
        ):
            raise InputError(f"Noise is added to whole counts, not negative, of one client. Got {counts!r}.")
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
