r"""DivFL with members weighted by the data of the clients they represent.

.. [Balakrishnan2022] R. Balakrishnan et al., "Diverse Client Selection for Federated Learning via Submodular
   Maximization", ICLR 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import register
from fedcohort.core.signals import Signal
from fedcohort.selectors.baselines.divfl import DivFL


@register("divfl-by-data")
@dataclass(frozen=True, kw_only=True)
class DivFLByData(DivFL):
    r"""DivFL for federations in which clients weigh by their data.

    :class:`~fedcohort.selectors.baselines.divfl.DivFL` ([Balakrishnan2022]_) weights a member by how many clients it
    represents. Here it is weighted by their data. The aggregator multiplies ``Cohort.weights`` by the member's own
    share of the data (Signal.SIZES), so the weights are :math:`\sum_k n_k / n_i` over the clients k that i represents.

    Examples
    --------
    There are three kinds of clients. The cohort has one of each, weighted by the data of the clients it represents.

    >>> from fedcohort import Session
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> kind = np.array([0, 0, 0, 1, 1, 2])
    >>> session = Session(DivFLByData(), ClientTable(sizes=[10, 10, 10, 20, 20, 30]), seed=1)
    >>> everybody = session.ask(RoundRequest(size=6))
    >>> sketches = np.eye(3, 64)[kind[everybody.clients]]
    >>> session.tell(RoundReport(everybody.ticket, everybody.clients, metrics={Signal.UPDATE_SKETCH: sketches}))
    >>> cohort = session.ask(RoundRequest(size=3))
    >>> kind[cohort.clients], cohort.weights
    (array([0, 1, 2]), array([3., 2., 1.]))
    """

    @property
    def requires(self) -> frozenset[Signal]:
        """Sketches of updates, and data sizes."""
        return frozenset({Signal.UPDATE_SKETCH, Signal.SIZES})

    @property
    def aggregator(self) -> str | None:
        """Any aggregator that weighs by size, as the default does."""
        return None

    def representation(self, apart: FloatArray, itself: IntArray, known: IntArray, clients: ClientTable) -> FloatArray:
        """(k,) the data of the clients that each member represents, as a multiple of its own."""
        sizes = np.asarray(clients.sizes, np.float64)[known]
        return data_represented(apart, itself, sizes, sizes[itself])


def data_represented(apart: FloatArray, itself: IntArray, sizes: FloatArray, own: FloatArray) -> FloatArray:
    """(k,) the data of the clients that each member represents, as a multiple of its own.

    Parameters
    ----------
    apart : (v, k) float array
        Distance of every client to every member.
    itself : (k,) int array
        The row of each member.
    sizes : (v,) float array
        Samples of every client.
    own : (k,) float array
        Samples of every member. A member without data represents no client, because no weight makes it count.

    Examples
    --------
    >>> place = np.array([0.0, 1.0, 9.0])
    >>> sizes = np.array([20.0, 60.0, 20.0])
    >>> data_represented(np.abs(place[:, None] - place[[0, 2]]), np.array([0, 2]), sizes, sizes[[0, 2]])
    array([4., 1.])
    """
    has_data = own > 0
    if not has_data.any():
        return np.ones(len(own))
    nearest = np.where(has_data, apart, np.inf).argmin(axis=1)
    nearest[itself[has_data]] = np.flatnonzero(has_data)  # of equal updates, each member represents itself
    data = np.bincount(nearest, sizes, len(own))
    return np.divide(data, own, out=np.ones(len(own)), where=has_data)
