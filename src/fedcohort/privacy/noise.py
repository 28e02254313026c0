r"""Differential privacy of label counts and losses: exact discrete noise, and the total cost of several releases.

OpenDP draws the noise from the system's secure randomness, without floating-point numbers. dp-accounting computes the
total cost.

Two data sets of a client are neighbours if they differ in the label of one sample. One count is then higher by 1 and
another lower by 1. The size is public, because Fed-CBS needs it and every strategy weights by it.

.. [Canonne2020] C. Canonne, G. Kamath, T. Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020.
.. [Ghosh2009] A. Ghosh, T. Roughgarden, M. Sundararajan, "Universally utility-maximizing privacy mechanisms",
   STOC 2009 (the geometric mechanism).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from fedcohort.core.arrays import AnyArray, FloatArray, IntArray
from fedcohort.core.errors import InputError, needs_extra
from fedcohort.core.params import Interval, Parameterized, param

_CHANGED = 2  # counts that change by 1 each if one sample changes its label
_FINEST, _LONGEST = 10, 18  # binary logarithms of the most steps in the smallest release, and in all together


# -- accounting ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Release:
    """One release of something about a client's data, and its cost.

    A release consists of equal, independent parts. Label counts have two parts, because one sample that changes its
    label changes two counts by 1.

    Parameters
    ----------
    kind : str
        What was released: "labels" or "loss".
    epsilon : float, optional
        Each part is epsilon-DP, by any mechanism.
    variance : float, optional
        Each part is a whole number that may differ by 1, with discrete Gaussian noise of this variance.
    """

    kind: str
    epsilon: float | None = None
    variance: float | None = None
    parts: int = 1

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.variance is None):
            raise InputError("A release must have either an epsilon or a variance.")
        size = self.variance if self.epsilon is None else self.epsilon
        # Zero or less would give budget back, and NaN would make every comparison pass.
        if not isinstance(size, (int, float)) or isinstance(size, bool) or not 0 < size < math.inf:
            raise InputError(f"The epsilon or variance of a release must be a finite number above 0. Got {size!r}.")
        if not isinstance(self.parts, int) or isinstance(self.parts, bool) or self.parts < 1:
            raise InputError(f"A release must have at least one part. Got parts={self.parts!r}.")


def _losses(releases: Iterable[Release]) -> Any:
    """Return the distribution of the total privacy loss of all releases, as dp-accounting's PLD."""
    with needs_extra("Adding up differential privacy with a delta needs dp-accounting.", "dp"):
        from dp_accounting.pld import privacy_loss_distribution as pld
    parts: Counter[tuple[float | None, float | None]] = Counter()
    for release in releases:
        parts[release.epsilon, release.variance] += release.parts
    # Losses are rounded up to multiples of a step: the smallest release divided by a power of two. The power is as
    # large as the sum of all releases allows. An epsilon that is a multiple of the step is not rounded at all.
    sizes = {part: part[0] or 1 / math.sqrt(part[1] or 1.0) for part in parts}
    together = math.fsum(count * sizes[part] for part, count in parts.items())
    least = min(sizes.values())
    step = least / 2.0 ** min(_FINEST, math.floor(math.log2(least / together) + _LONGEST))
    composed = None
    for (epsilon, variance), count in parts.items():
        one = (
            # As discrete Laplace noise on a number that differs by 1: no epsilon-DP mechanism composes worse.
            pld.from_discrete_laplace_mechanism(epsilon, value_discretization_interval=step)
            if epsilon is not None
            else pld.from_discrete_gaussian_mechanism(math.sqrt(variance or 0.0), value_discretization_interval=step)
        )
        same = one.self_compose(count)
        composed = same if composed is None else composed.compose(same)
    return composed


def total_epsilon(releases: Sequence[Release], delta: float) -> float:
    """Return the least epsilon for which all releases together are (epsilon, delta)-DP.

    With ``delta`` 0, epsilons add up. Otherwise the distributions of the privacy losses are convolved on a grid, which
    is nearly exact and never too low (extra ``dp``).

    Examples
    --------
    Ten releases of label counts with epsilon 0.25 each:

    >>> round(total_epsilon([Release("labels", epsilon=0.125, parts=2)] * 10, 1e-5), 2)
    2.08
    """
    epsilons = [None if release.epsilon is None else release.parts * release.epsilon for release in releases]
    # The sum is lower for a few epsilon-DP releases, the convolution for many.
    added = math.inf if None in epsilons else math.fsum(e for e in epsilons if e is not None)
    if delta == 0 or not releases:
        return added
    return min(added, float(_losses(releases).get_epsilon_for_delta(delta)))


@lru_cache(maxsize=256)
def _least_deviation(epsilon: float, delta: float) -> float:
    """Return the smallest deviation, a multiple of 1/1024, that makes noisy counts (epsilon, delta)-DP."""

    def enough(n: int) -> bool:
        return total_epsilon([Release("labels", variance=(n / 1024) ** 2, parts=_CHANGED)], delta) <= epsilon

    # Double it until it is enough, then bisect: the accountant has no formula to invert.
    high = 1024
    while not enough(high):
        high *= 2
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high / 1024


# -- mechanisms ---------------------------------------------------------------------------------------------------


def _opendp() -> Any:
    with needs_extra("Noise on labels and losses needs OpenDP, which draws it.", "dp"):
        import opendp.prelude
    opendp.prelude.enable_features("contrib")  # where OpenDP keeps its discrete noise
    return opendp.prelude


@dataclass(frozen=True, kw_only=True)
class CountNoise(Parameterized, ABC):
    """Integer noise on each label count: :class:`GeometricNoise` or :class:`GaussianNoise`."""

    epsilon: float = param(1.0, Interval(float, 0, None, "neither"), "of one release (epsilon)")

    @property
    @abstractmethod
    def question(self) -> tuple[float, str, float]:
        """Epsilon, mechanism and delta. A ledger gives the same answer to the same question."""

    @property
    @abstractmethod
    def deviation(self) -> float:
        """Standard deviation of the noise on one count."""

    @property
    @abstractmethod
    def release(self) -> Release:
        """The cost of one release."""

    @property
    @abstractmethod
    def measurement(self) -> Any:
        """The mechanism as OpenDP's measurement, from a list of counts to a list of noisy counts (extra ``dp``)."""

    @abstractmethod
    def _draw_repeatable(self, size: int, rng: np.random.Generator) -> IntArray:
        """Return (size,) noise for a simulation."""

    @staticmethod
    def check(counts: ArrayLike) -> None:
        """Raise InputError unless these are whole counts of one client."""
        values = private_numbers(counts)
        if (
            values is None
            or values.ndim != 1
            or not np.isfinite(values).all()
            or (values != np.floor(values)).any()
            or (values < 0).any()
        ):
            # The message must not contain the counts: a client's errors are sent to the server.
            kind = type(counts).__name__ if values is None else f"shape {values.shape} and type {values.dtype}"
            raise InputError(
                f"Noise is added to whole, nonnegative counts of one client. Got something else, of {kind}."
            )

    def noisy(self, counts: ArrayLike) -> IntArray:
        """Return (B,) whole counts with noise from the system's secure randomness; some may be negative."""
        self.check(counts)
        return np.array(self.measurement(np.asarray(counts).astype(np.int64).tolist()), np.int64)

    def simulate(self, counts: ArrayLike, rng: np.random.Generator) -> IntArray:
        """Return counts with noise of the same distribution, for repeatable simulations.

        This protects no labels, because the random numbers are predictable and of limited precision.
        """
        self.check(counts)
        values = np.asarray(counts).astype(np.int64)
        return values + self._draw_repeatable(len(values), rng)


@dataclass(frozen=True, kw_only=True)
class GeometricNoise(CountNoise):
    """Two-sided geometric noise of ratio exp(-epsilon / 2) on each label count: epsilon-DP."""

    @property
    def _scale(self) -> float:
        # Rounded up to a multiple of 1/4096, so that there is never less noise than epsilon requires.
        return math.ceil(4096 * _CHANGED / self.epsilon) / 4096

    @property
    def question(self) -> tuple[float, str, float]:
        """Epsilon, mechanism and delta (0)."""
        return self.epsilon, "geometric", 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on one count."""
        q = math.exp(-1 / self._scale)
        return math.sqrt(2 * q) / (1 - q)

    @property
    def release(self) -> Release:
        """The cost of one release."""
        return Release("labels", 1 / self._scale, parts=_CHANGED)

    @property
    def measurement(self) -> Any:
        """OpenDP's discrete Laplace mechanism."""
        dp = _opendp()
        counts = dp.vector_domain(dp.atom_domain(T="i64"))
        return dp.m.make_laplace(counts, dp.l1_distance(T="i64"), scale=self._scale)

    def _draw_repeatable(self, size: int, rng: np.random.Generator) -> IntArray:
        return _simulated_laplace(self._scale, size, rng)


@dataclass(frozen=True, kw_only=True)
class GaussianNoise(CountNoise):
    """Discrete Gaussian noise on each label count, with the smallest variance that is (epsilon, delta)-DP.

    Examples
    --------
    >>> noise = GaussianNoise(epsilon=1.0, delta=1e-5)
    >>> round(noise.deviation, 2)
    5.28
    >>> round(total_epsilon([noise.release], 1e-5), 2)
    1.0
    """

    delta: float = param(1e-5, Interval(float, 0, 1, "neither"), "of one release (delta)")

    @property
    def question(self) -> tuple[float, str, float]:
        """Epsilon, mechanism and delta."""
        return self.epsilon, "gaussian", self.delta

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on one count."""
        return _least_deviation(self.epsilon, self.delta)

    @property
    def release(self) -> Release:
        """The cost of one release."""
        return Release("labels", variance=self.deviation**2, parts=_CHANGED)

    @property
    def measurement(self) -> Any:
        """OpenDP's discrete Gaussian mechanism."""
        dp = _opendp()
        counts = dp.vector_domain(dp.atom_domain(T="i64"))
        return dp.m.make_gaussian(counts, dp.l2_distance(T="f64"), scale=self.deviation)

    def _draw_repeatable(self, size: int, rng: np.random.Generator) -> IntArray:
        sigma = self.deviation
        scale = math.floor(sigma) + 1
        draws = np.zeros(0, np.int64)
        while len(draws) < size:  # rejection, [Canonne2020]_, Algorithm 3
            y = _simulated_laplace(scale, 2 * size, rng)
            chance = np.exp(-((np.abs(y) - sigma**2 / scale) ** 2) / (2 * sigma**2))
            draws = np.append(draws, y[rng.random(len(y)) < chance])
        return draws[:size]


def _simulated_laplace(scale: float, size: int, rng: np.random.Generator) -> IntArray:
    stop = -math.expm1(-1 / scale)
    return rng.geometric(stop, size) - rng.geometric(stop, size)


def private_numbers(values: ArrayLike) -> AnyArray | None:
    """Return an array, or None if these are not numbers. No error shows them: it would be sent to the server."""
    try:
        array = np.asarray(values)
    except Exception:  # NumPy runs the object's own code, which may raise anything
        return None
    return array if array.dtype.kind in "biuf" else None


def fit_counts(noisy: ArrayLike, size: float) -> FloatArray:
    """Return the nonnegative counts with sum ``size`` that are nearest to the noisy counts.

    This costs no privacy, because it uses only the noisy counts and the size, which is public.

    >>> fit_counts([9, -2, 4], 10)
    array([7.5, 0. , 2.5])
    """
    values = np.asarray(noisy, np.float64)
    if not size > 0:
        return np.zeros(len(values))
    # Projection onto a simplex: what exceeds a common threshold.
    ordered = np.sort(values)[::-1]
    excess = (np.cumsum(ordered) - size) / np.arange(1, len(values) + 1)
    threshold = float(excess[np.flatnonzero(ordered > excess)[-1]])
    return np.maximum(values - threshold, 0.0)


def fit_rows(noisy: AnyArray, sizes: AnyArray) -> FloatArray:
    """Return :func:`fit_counts` of each client's row of an (N, B) array."""
    return np.array([fit_counts(row, size) for row, size in zip(noisy, sizes, strict=True)])


@dataclass(frozen=True, kw_only=True)
class LossNoise(Parameterized):
    """Noise on the mean of samples' losses, each clipped to [0, ``bound``].

    The sum of clipped losses is rounded to a grid of bound / 2^20 and gets discrete Laplace noise. So no bit of a
    floating-point number reveals more than the mechanism promises (Mironov 2012).
    """

    epsilon: float = param(0.1, Interval(float, 0, None, "neither"), "of one answer (epsilon)")
    bound: float = param(5.0, Interval(float, 0, None, "neither"), "largest loss of a sample that counts")
    _GRID: ClassVar[int] = 1 << 20

    @property
    def _scale(self) -> float:
        return float(math.ceil(self._GRID / self.epsilon))

    @property
    def release(self) -> Release:
        """The cost of one answer."""
        return Release("loss", self._GRID / self._scale)

    @property
    def measurement(self) -> Any:
        """The mechanism as OpenDP's measurement, from a sum of losses on the grid to a noisy sum (extra ``dp``)."""
        dp = _opendp()
        return dp.m.make_laplace(dp.atom_domain(T="i64"), dp.absolute_distance(T="i64"), scale=self._scale)

    def noisy_mean(self, losses: ArrayLike) -> float:
        """Return the noisy mean of a client's (n,) losses; NaN if there are none."""
        array = private_numbers(losses)
        if array is None or array.ndim != 1:
            raise InputError(f"Noise is added to the losses of one client's samples. Got a {type(losses).__name__}.")
        if not len(array):
            return float("nan")
        # NaN counts as the largest loss. If such samples were left out, one sample could also change their number.
        values = np.nan_to_num(array.astype(np.float64), nan=self.bound, posinf=self.bound)
        steps = np.rint(np.clip(values, 0.0, self.bound) * (self._GRID / self.bound)).astype(np.int64)
        return float(self.measurement(int(steps.sum())) / self._GRID * self.bound / len(values))
