r"""FedACS that counts duels only in rounds in which the mean gradient shows skewness.

.. [Wang2021] Z. Wang et al., "FedACS: Federated Skewness Analytics in Heterogeneous Decentralized Data Environments",
   IWQoS 2021.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import OneOf, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Slate, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.papers.fedacs.selector import FedAcs, FedAcsState


@dataclass(frozen=True)
class NearState(FedAcsState):
    """The duels, and how many rounds counted."""

    played: int = 0  # rounds in which duels were possible
    counted: int = 0  # rounds whose duels counted


@register("fedacs-near")
@dataclass(frozen=True, kw_only=True)
class FedAcsNear(FedAcs):
    r"""FedACS whose duels count only in rounds in which at least two clients are near the others.

    The distance from the mean shows skewness only if the mean is close to the gradient of unskewed clients. If every
    client is skewed, gradients point apart and the shortest one wins. Clients whose classes the model has learnt then
    fill the pool of :class:`~fedcohort.selectors.papers.fedacs.FedAcs` ([Wang2021]_), and the others are forgotten. So
    a round's duels count only if at least two clients are *near* the others, that is, closer to the mean gradient of
    the others than no gradient at all would be,

    .. math:: \lVert \Delta w_i - \overline{\Delta w}_{-i} \rVert < \lVert \overline{\Delta w}_{-i} \rVert.

    With unskewed clients in the federation, this is the case in nearly every round. Without any, it is almost never the
    case, and cohorts are then uniform.

    Appendix B of the paper weights clients by samples (``mean="samples"``). This improves the estimate of the mean
    gradient. But the bound that ranks clients by distance assumes equal sample numbers, and a weighted mean is closest
    to the clients with the most samples, skewed or not. With equal sizes, as in the paper's experiments, both are the
    same.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(FedAcsNear(), ClientTable(n=2), seed=0)
    >>> cohort = session.ask(RoundRequest(size=2))
    >>> apart = {Signal.GRADIENT_DISTANCE: [1.0, 1.5], Signal.GRADIENT_NORM: [1.0, 1.5]}  # they point apart
    >>> session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=apart))
    >>> session.state.wins
    array([0., 0.])
    """

    checked_params: ClassVar[ParamSets] = {
        "samples": {"mean": "samples"},
        "updates": {"mean": "samples", "insight": "update"},
        "smallest pool": {"pool_share": 1e-06, "eta": 100.0},
        "everybody": {"pool_share": 1.0, "eta": 1e-06},
    }

    mean: str = param(
        "clients", OneOf(("clients", "samples")), "what counts once in the cohort's mean: a client, or a sample"
    )

    @property
    def requires(self) -> frozenset[Signal]:
        """The distance from the cohort's mean, norms, and sizes for a mean of samples."""
        return frozenset({self._distance, self._norm} | ({Signal.SIZES} if self.mean == "samples" else set()))

    @property
    def _distance(self) -> Signal:
        if self.mean == "clients":
            return super()._distance
        return Signal.WEIGHTED_GRADIENT_DISTANCE if self.insight == "gradient" else Signal.WEIGHTED_UPDATE_DISTANCE

    @property
    def _norm(self) -> Signal:
        return Signal.GRADIENT_NORM if self.insight == "gradient" else Signal.UPDATE_NORM

    def init(self, clients: ClientTable, rng: np.random.Generator) -> NearState:
        """Start without duels."""
        return NearState(**vars(super().init(clients, rng)))

    def select(
        self, state: FedAcsState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, FedAcsState]:
        """Select as FedACS does, and say how many rounds counted so far."""
        assert isinstance(state, NearState)
        cohort, _ = super().select(state, slate, answer, rng)
        counted = {"duels counted": f"{state.counted} of {state.played} rounds"}
        return dataclasses.replace(cohort, notes={**cohort.notes, **counted}), state

    def update(self, state: FedAcsState, outcome: Outcome) -> FedAcsState:
        """Let the clients that delivered duel with each other, if two of them are near the others."""
        assert isinstance(state, NearState)
        distance, norm = outcome[self._distance], outcome[self._norm]
        usable = outcome.ok & np.isfinite(distance) & np.isfinite(norm)
        clients = outcome.clients[usable]
        if len(clients) < 2:
            return state
        samples = outcome.table.sizes[clients] if self.mean == "samples" else np.ones(len(clients))
        counts = int(near(distance[usable], norm[usable], samples).sum()) >= 2
        state = dataclasses.replace(state, played=state.played + 1, counted=state.counted + counts)
        return self.duel(state, clients, distance[usable]) if counts else state


def near(distance: FloatArray, norm: FloatArray, samples: FloatArray) -> BoolArray:
    r"""Return which vectors are closer to the mean of the others than the origin is.

    Only lengths are needed. With vectors :math:`g_i` of weights :math:`p_i` that sum to 1, mean :math:`m = \sum_i
    p_i g_i`, norms :math:`n_i` and distances :math:`d_i = \lVert g_i - m \rVert`:

    .. math::

        \lVert m \rVert^2 &= \textstyle\sum_i p_i (n_i^2 - d_i^2), \qquad
        g_i^\top m = (n_i^2 + \lVert m \rVert^2 - d_i^2) / 2 \\
        m_{-i} &= (m - p_i g_i) / (1 - p_i), \qquad \lVert g_i - m_{-i} \rVert = d_i / (1 - p_i)

    Parameters
    ----------
    distance, norm : (k,) float array
        Of at least two vectors: distances from their mean, and lengths.
    samples : (k,) float array
        Weight of each vector in the mean. A vector with all the weight is not near the others. If all are zero, they
        count as equal.

    Examples
    --------
    Three vectors nearly agree, and one is far off.

    >>> vectors = np.array([[1.0, 0.1], [1.0, -0.1], [1.0, 0.0], [0.0, 3.0]])
    >>> distance = np.linalg.norm(vectors - vectors.mean(axis=0), axis=1)
    >>> near(distance, np.linalg.norm(vectors, axis=1), np.ones(4))
    array([ True,  True,  True, False])
    """
    total = float(samples.sum())
    p = samples / total if total > 0 else np.full(len(samples), 1.0 / len(samples))
    mean = max(0.0, float(p @ (norm**2 - distance**2)))
    product = (norm**2 + mean - distance**2) / 2
    others = mean - 2 * p * product + (p * norm) ** 2  # times (1 - p)^2, like the distance
    return np.asarray((distance**2 < others) & (p < 1))
