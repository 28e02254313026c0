"""Draw how long each client takes.

.. [Chang2024] X. Chang et al., "FLASH: Federated Learning Across Simultaneous Heterogeneities", Section 3.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcohort.core import rng
from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.params import Interval, param
from fedcohort.core.registry import Registry
from fedcohort.scenario.counter_rng import log_normals, uniforms
from fedcohort.scenario.part import NamedPart

LATENCIES: Registry[Latency] = Registry("latency")

_EACH_ROUND, _WHOLE_RUN = 0, 1  # positions in the latency stream


class Latency(NamedPart):
    """How many simulated seconds clients take for their work in a round."""

    def durations(
        self, sizes: IntArray, clients: IntArray, *, seed: int, round: int, work: float | FloatArray = 1.0
    ) -> FloatArray:
        """Return the seconds each client takes, independent of the other clients.

        Parameters
        ----------
        sizes : (N,) int
            Samples of every client of the federation.
        clients : (k,) int
            The clients whose durations are returned.
        seed, round : int
            Which experiment, which round.
        work : float or (k,) array
            Share of the usual local work that each client does.

        Returns
        -------
        (k,) float64
        """
        raise NotImplementedError(type(self).__name__)


@LATENCIES.register("none")
@dataclass(frozen=True, kw_only=True)
class NoLatency(Latency):
    """No work takes any time.

    >>> NoLatency().durations(np.array([5, 9]), np.array([1]), seed=0, round=0)
    array([0.])
    """

    def durations(
        self, sizes: IntArray, clients: IntArray, *, seed: int, round: int, work: float | FloatArray = 1.0
    ) -> FloatArray:
        """Return zeros."""
        return np.zeros(len(clients))


@LATENCIES.register("shifted-exponential")
@dataclass(frozen=True, kw_only=True)
class ShiftedExponential(Latency):
    r"""Client i takes :math:`T_i = \alpha N_i + E_i`, :math:`E_i \sim Exp` of mean :math:`\lambda N_i` ([Chang2024]_).

    N_i is the client's number of samples. In the paper, time is in milliseconds, alpha is 1 and lambda is 1, 10 or 100.
    ``spread`` is an extension: every client has its own speed for the whole experiment, a log-normal factor of mean 1.

    >>> latency = ShiftedExponential(straggling=10)
    >>> sizes = np.array([600, 600, 60])
    >>> bool((latency.durations(sizes, np.arange(3), seed=0, round=4) >= 0.001 * sizes).all())
    True
    """

    shift: float = param(1.0, Interval(float, 0, None), "fixed time per sample (alpha)")
    straggling: float = param(1.0, Interval(float, 0, None), "mean of the random time per sample (lambda)")
    unit: float = param(1e-3, Interval(float, 0, None, "neither"), "seconds per unit of time; the paper's is 1 ms")
    spread: float = param(0.0, Interval(float, 0, None), "standard deviation of the log of the clients' own speeds")

    def durations(
        self, sizes: IntArray, clients: IntArray, *, seed: int, round: int, work: float | FloatArray = 1.0
    ) -> FloatArray:
        """Draw by hashing (seed, round, client), in O(k) and independently of the other clients."""
        # By inversion; log1p, because a uniform number near 0 has few exact digits in 1 - u.
        exponential = -np.log1p(-uniforms(seed, rng.LATENCY, clients, _EACH_ROUND, round))
        seconds: FloatArray = self.unit * sizes[clients] * (self.shift + self.straggling * exponential) * work
        return seconds * self.slowness(clients, seed) if self.spread else seconds

    def slowness(self, clients: IntArray, seed: int) -> FloatArray:
        """Return each client's own factor (k,), which is the same in all rounds."""
        return log_normals(self.spread, uniforms(seed, rng.LATENCY, clients, _WHOLE_RUN))
