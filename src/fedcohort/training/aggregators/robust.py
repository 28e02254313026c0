r"""Averages that a minority of liars cannot move far.

.. [Yin2018] D. Yin, Y. Chen, K. Ramchandran, P. Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal
   Statistical Rates" (Definitions 1 and 2).
.. [Blanchard2017] P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer, "Machine Learning with Adversaries:
   Byzantine Tolerant Gradient Descent" (Section 4).

Every kept model counts once, because a liar could claim any size or multiplicity. The papers combine gradients. Here,
models that started from the same global model are combined, which differs only in the number of local steps. Running
statistics are treated like parameters: a liar can lie about them too, and the results stay in the range of the models.
With label skew, honest clients are far from each other too, and these rules discard what only a few of them know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.params import Interval, Optional, param
from fedcohort.training.aggregators.base import AGGREGATORS, Aggregator, Combined, Members, Memory, Server
from fedcohort.training.arithmetic import ascending, average, doubles, to_numpy

_LIARS = Interval(float, 0, 0.5, "left")


def _equal(count: int) -> FloatArray:
    return np.full(count, 1.0 / count)


@AGGREGATORS.register("median")
@dataclass(frozen=True, kw_only=True)
class Median(Aggregator):
    r"""Coordinate-wise median, :math:`w^j \leftarrow \operatorname{med}_k w_k^j` ([Yin2018]_, Definition 1).

    For an even number of values it is the mean of the two in the middle; for one or two models, their mean. Deviations:
    models instead of gradients. The recorded weights are equal, because the weights differ from coordinate to
    coordinate.
    """

    whole_models: ClassVar[bool] = True

    def combine(
        self, old: Any, models: Any, members: Members, memory: Memory | None = None, server: Server | None = None
    ) -> Combined:
        """Take the median of every coordinate."""
        rows, count = ascending(models), len(members)
        return Combined((rows[(count - 1) // 2] + rows[count // 2]) / 2, _equal(count))


@AGGREGATORS.register("trimmed-mean")
@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Aggregator):
    r"""Coordinate-wise trimmed mean ([Yin2018]_, Definition 2).

    In every coordinate the :math:`\lfloor \beta k \rfloor` smallest and as many largest of the k values are dropped.
    The others are averaged. So in a cohort of fewer than 1 / beta models nothing is dropped. Deviations: models instead
    of gradients; beta k is rounded down. The recorded weights are equal, as with ``median``.
    """

    whole_models: ClassVar[bool] = True

    beta: float = param(0.2, _LIARS, "share of the values dropped at each end (beta)")

    def combine(
        self, old: Any, models: Any, members: Members, memory: Memory | None = None, server: Server | None = None
    ) -> Combined:
        """Average the remaining values of every coordinate."""
        count = len(members)
        # In each coordinate on its own: no model is dropped as a whole.
        dropped = _share(self.beta, count)
        rows = ascending(models)[dropped : count - dropped]
        return Combined(rows.mean(0), _equal(count))


def _share(part: float, count: int) -> int:
    """Return floor(part * count), with a margin for products that rounding puts just below an integer."""
    return math.floor(part * count + 1e-9)


def _krum_scores(updates: Any, liars: int) -> FloatArray:
    """Return s(i), each vector's sum of squared distances to its k - f - 2 closest others ([Blanchard2017]_, Sec. 4).

    Parameters
    ----------
    updates : (k, P)
    liars : int
        f, with k - f - 2 at least 1.

    Examples
    --------
    >>> _krum_scores(np.array([[0.0], [1.0], [3.0], [100.0]]), 1)
    array([1.000e+00, 1.000e+00, 4.000e+00, 9.409e+03])
    """
    rows = doubles(updates)  # in single precision, distant liars would drown the distances between the others
    products = to_numpy(rows @ rows.T)
    squares = np.diag(products)
    distances = np.maximum(squares[:, None] + squares[None, :] - 2.0 * products, 0.0)
    np.fill_diagonal(distances, np.inf)
    closest = np.sort(distances, axis=1)[:, : len(products) - liars - 2]
    return np.asarray(closest.sum(axis=1), np.float64)


@dataclass(frozen=True, kw_only=True)
class _Krum(Aggregator):
    """The base of Krum and Multi-Krum, which differ in how many models they average."""

    whole_models: ClassVar[bool] = True

    liars: float = param(0.2, _LIARS, "share of the kept models that may be liars (f / k)")

    def _models_to_average(self, count: int, liars: int) -> int:
        """Return how many of ``count`` models to average."""
        return 1

    def best(self, updates: Any) -> IntArray:
        """Return the indices of the models that are averaged, best first; among equal scores, in order of index."""
        count = len(updates)
        # Two models are equally far from each other, so neither can be told to be the wrong one.
        if count < 3:
            return np.arange(count)
        # The paper's 2 f + 2 < k, solved for f.
        liars = min(_share(self.liars, count), (count - 3) // 2)
        order = np.argsort(_krum_scores(updates, liars), kind="stable")
        return np.asarray(order[: self._models_to_average(count, liars)], np.int64)

    def combine(
        self, old: Any, models: Any, members: Members, memory: Memory | None = None, server: Server | None = None
    ) -> Combined:
        """Average the models with the best scores."""
        # Distances between updates are those between models, but small numbers lose fewer digits.
        chosen = self.best(models - old)
        weights = np.zeros(len(members))
        weights[chosen] = 1.0 / len(chosen)
        return Combined(average(weights[chosen], [models[i] for i in chosen.tolist()]), weights)


@AGGREGATORS.register("krum")
@dataclass(frozen=True, kw_only=True)
class Krum(_Krum):
    r"""The model that is closest to its neighbours ([Blanchard2017]_, Section 4).

    :math:`\arg\min_i \sum_{j \in N_i} \|w_i - w_j\|^2`, N_i the k - f - 2 models closest to i, f the number of liars.
    The paper needs 2 f + 2 < k. If the cohort is too small for ``liars``, f is lowered accordingly. Fewer than three
    models cannot be told apart and are averaged. Deviations: models instead of gradients; f is a share, because cohorts
    shrink when clients fail.
    """


@AGGREGATORS.register("multi-krum")
@dataclass(frozen=True, kw_only=True)
class MultiKrum(_Krum):
    r"""The mean of the m models with the best scores of ``krum`` ([Blanchard2017]_, Section 4, Multi-Krum).

    By default m = k - f: all but the presumed liars. Small cohorts and deviations are as with ``krum``.
    """

    averaged: int | None = param(
        None, Optional(Interval(int, 1, None)), "how many models are averaged (m), at most all; None: all but the liars"
    )

    def _models_to_average(self, count: int, liars: int) -> int:
        return count - liars if self.averaged is None else min(self.averaged, count)
