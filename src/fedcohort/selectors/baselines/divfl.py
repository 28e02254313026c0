"""DivFL: choose the clients whose updates together represent those of all clients.

.. [Balakrishnan2022] R. Balakrishnan, T. Li, T. Zhou, N. Himayat, V. Smith, J. Bilmes, "Diverse Client Selection for
   Federated Learning via Submodular Maximization", ICLR 2022.
.. [Minoux1978] M. Minoux, "Accelerated greedy algorithms for maximizing submodular set functions", 1978.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Boolean, Interval, Optional, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.numerics.groups import distances, scale_down
from fedcohort.selectors.numerics.recent import AskedVectors


@register("divfl")
@dataclass(frozen=True, kw_only=True)
class DivFL(Selector[AskedVectors]):
    r"""Choose the cohort whose updates best represent the updates of all clients ([Balakrishnan2022]_, Sec. 3).

    Every client k is represented by the member of the cohort S whose gradient is nearest. The sum of distances

    .. math:: G(S) = \sum_{k \in V} \min_{i \in S} \|\nabla F_k - \nabla F_i\|

    bounds the error of replacing the full gradient by one in which each member counts for all clients it represents,
    :math:`\gamma_i = |\{k : i = \arg\min_{j \in S} \|\nabla F_k - \nabla F_j\|\}|`. Minus G, up to a constant, is a
    facility-location function, monotone and submodular, so the greedy choice is within 1 - 1/e of the best. It is
    computed lazily ([Minoux1978]_). A client's gain can only shrink as S grows, so it is recomputed only when it could
    be the largest. The result is the same as that of the plain greedy algorithm. With ``sample``, each greedy step
    considers only that many candidates, drawn at random (Algorithm 1).

    Symbols: V = the clients whose updates are known, gradient of F_k = Signal.UPDATE_SKETCH of the client's last round,
    ``|S|`` = K = slate.size, s = ``sample``, gamma = ``Cohort.weights``.

    **Aggregator**: ``mean``, under which all clients weigh the same, as in the paper's objective. It is the default.

    ``by_data=True``, which is ours, is for federations in which clients weigh by their data. A member then counts for
    the data of the clients it represents. An aggregator that weighs by size, like ``fedavg``, multiplies
    ``Cohort.weights`` by the member's own share of the data (Signal.SIZES), so the weights are
    :math:`\sum_k n_k / n_i` over the clients k that i represents.

    Deviations: the paper's main form asks all clients for a gradient before every round. This is its cheaper form, in
    which a client's gradient is that of the round it last took part in. Every client is asked once before clients are
    chosen by their updates. Distances are those of a random projection of the updates to 64 numbers. Only the
    ``memory`` clients that reported last are compared. Ties, as between equal updates, are broken at random. A
    client without a remembered update represents only itself. Of members with equal updates, the first represents all
    clients near them, and each of the others has a weight of 1.

    Examples
    --------
    There are three kinds of clients. The cohort has one of each, weighted by how many clients it represents.

    >>> from fedcohort import ClientTable, Session, Signal
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> kind = np.array([0, 0, 0, 1, 1, 2])
    >>> session = Session(DivFL(), ClientTable(sizes=[10] * 6), seed=1)
    >>> everybody = session.ask(RoundRequest(size=6))
    >>> sketches = np.eye(3, 64)[kind[everybody.clients]]
    >>> session.tell(RoundReport(everybody.ticket, everybody.clients, metrics={Signal.UPDATE_SKETCH: sketches}))
    >>> cohort = session.ask(RoundRequest(size=3))
    >>> kind[cohort.clients], cohort.weights
    (array([0, 1, 2]), array([3., 2., 1.]))
    """

    picks_by: ClassVar[str] = (
        "Clients that were never asked come first. Then each place goes to the client whose update best represents "
        "those not yet represented. The score is what a client would add after all picks."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "representation": "how much closer it brings the other clients to the nearest member of the cohort",
        "never asked": "1 if it was never asked and so comes first",
    }

    checked_params: ClassVar[ParamSets] = {
        "sample": {"sample": 1},
        "short memory": {"memory": 2},
        "by data": {"by_data": True},
    }

    starves = "a client whose last update is represented by another client is not asked again"

    sample: int | None = param(
        None,
        Optional(Interval(int, 1, None)),
        "random candidates that a greedy step considers (s); None: all",
    )
    memory: int = param(1000, Interval(int, 2, None), "most clients whose last updates are compared")
    by_data: bool = param(
        False, Boolean(), "whether a member counts for the data of the clients it represents, not their number (ours)"
    )

    @property
    def requires(self) -> frozenset[Signal]:
        """Sketches of updates, and sizes if members count for data."""
        return frozenset({Signal.UPDATE_SKETCH} | ({Signal.SIZES} if self.by_data else set()))

    @property
    def aggregator(self) -> str | None:
        """The plain mean, in which all clients weigh the same; any that weighs by size if members count for data."""
        return None if self.by_data else "mean"

    def init(self, clients: ClientTable, rng: np.random.Generator) -> AskedVectors:
        """Start with no client asked."""
        return AskedVectors.empty(asked=np.zeros(clients.n, np.bool_))

    def select(
        self, state: AskedVectors, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, AskedVectors]:
        """Take clients that were never asked, then those that represent the others."""
        candidates = slate.candidates
        rows = state.rows_of(candidates)
        fresh = ~slate.of_candidates(state.asked) & (rows < 0)  # a shadow also sees reports of clients it did not pick
        new = np.flatnonzero(fresh)
        picks = rng.choice(new, min(len(new), slate.size), replace=False)
        gain = np.zeros(len(candidates))
        weights = np.ones(slate.size)
        notes: dict[str, str | float | int] = {"asked for the first time": len(picks)}
        known = rng.permutation(np.flatnonzero(rows >= 0))  # the first in this order wins a tie
        by_update = min(slate.size - len(picks), len(known))
        if by_update > 0:
            # Rows are all remembered clients: those that are away now should be represented too.
            apart = distances(scale_down(state.vectors))[:, rows[known]]
            if self.sample is None:
                chosen, gain[known] = _lazy_greedy(apart, by_update)
            else:
                chosen, gain[known] = _stochastic_greedy(apart, by_update, self.sample, rng)
            members = rows[known[chosen]]
            if self.by_data:
                sizes = slate.clients.sizes[state.known]
                represented = _data_represented(apart[:, chosen], members, sizes, sizes[members])
            else:
                represented = np.maximum(np.bincount(apart[:, chosen].argmin(axis=1), minlength=by_update), 1)
            weights[len(picks) : len(picks) + by_update] = represented
            picks = np.concatenate([picks, known[chosen]])
            notes["represented"] = len(state.known)
            notes["mean distance to a representative"] = float(apart[:, chosen].min(axis=1).mean())
        if len(picks) < slate.size:  # the rest were asked before, but no update is remembered
            others = np.setdiff1d(np.arange(len(candidates)), picks)
            picks = np.concatenate([picks, rng.choice(others, slate.size - len(picks), replace=False)])
        # When it is asked and not when it reports: a client that always fails must not keep coming first.
        asked = state.asked.copy()
        asked[candidates[picks]] = True
        cohort = Cohort(
            candidates[picks],
            candidates=candidates,
            score=np.where(fresh, gain.max() + 1.0, gain),
            parts={"representation": gain, "never asked": fresh.astype(np.float64)},
            weights=weights,
            notes=notes,
        )
        return cohort, AskedVectors(state.known, state.when, state.vectors, asked)

    def update(self, state: AskedVectors, outcome: Outcome) -> AskedVectors:
        """Remember the updates."""
        ok = outcome.ok
        return state.with_reports(outcome.clients[ok], outcome[Signal.UPDATE_SKETCH][ok], outcome.round, self.memory)


def _data_represented(apart: FloatArray, itself: IntArray, sizes: FloatArray, own: FloatArray) -> FloatArray:
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
    >>> _data_represented(np.abs(place[:, None] - place[[0, 2]]), np.array([0, 2]), sizes, sizes[[0, 2]])
    array([4., 1.])
    """
    # The aggregator multiplies by a member's own data, so one without data counts for nothing whatever its weight.
    has_data = own > 0
    if not has_data.any():
        return np.ones(len(own))
    nearest = np.where(has_data, apart, np.inf).argmin(axis=1)
    nearest[itself[has_data]] = np.flatnonzero(has_data)  # of equal updates, each member represents itself
    data = np.bincount(nearest, sizes, len(own))
    return np.divide(data, own, out=np.ones(len(own)), where=has_data)


def _lazy_greedy(apart: FloatArray, size: int) -> tuple[IntArray, FloatArray]:
    """Choose columns one by one so that every row is close to its nearest chosen column.

    Parameters
    ----------
    apart : (v, c) float array
        Distance of every client to every candidate.
    size : int
        Number of candidates to choose, at most c.

    Returns
    -------
    chosen : (size,) int array
        In the order of choice; of equal gains the lower position wins.
    gain : (c,) float array
        How much each candidate lowered the sum of distances when it was chosen; for the others, the last value
        computed, which is an upper bound. Before the first choice, all distances count as the largest one.

    Examples
    --------
    >>> place = np.array([0.0, 1.0, 2.0, 10.0])
    >>> _lazy_greedy(np.abs(place[:, None] - place), 2)[0]
    array([1, 3])
    """
    # Before the first choice, every client is as far away as any can be. Any larger number chooses the same.
    nearest = np.full(len(apart), float(apart.max(initial=0.0)))
    gain = np.asarray((nearest[:, None] - apart).sum(axis=0))
    queue = [(-value, at) for at, value in enumerate(gain.tolist())]
    heapq.heapify(queue)
    current = np.zeros(len(gain), np.int64)  # the number of members a gain was computed with
    chosen: list[int] = []
    while len(chosen) < size:
        _, at = heapq.heappop(queue)
        # A gain from an earlier step is an upper bound. If it is still the largest after an update, it is the best.
        if current[at] != len(chosen):
            gain[at] = np.maximum(nearest - apart[:, at], 0.0).sum()
            current[at] = len(chosen)
            heapq.heappush(queue, (-float(gain[at]), at))
            continue
        chosen.append(at)
        nearest = np.minimum(nearest, apart[:, at])
    return np.array(chosen, np.int64), gain


def _stochastic_greedy(
    apart: FloatArray, size: int, sample: int, rng: np.random.Generator
) -> tuple[IntArray, FloatArray]:
    """Do the same, but consider only ``sample`` random candidates in every step; gains never computed are 0."""
    nearest = np.full(len(apart), float(apart.max(initial=0.0)))
    gain = np.zeros(apart.shape[1])
    left = np.arange(apart.shape[1])
    chosen: list[int] = []
    while len(chosen) < size:
        # Sorted, so that of equal gains the lower position wins, as in the lazy algorithm.
        considered = np.sort(rng.choice(left, min(sample, len(left)), replace=False))
        gain[considered] = np.maximum(nearest[:, None] - apart[:, considered], 0.0).sum(axis=0)
        best = int(considered[gain[considered].argmax()])
        chosen.append(best)
        left = left[left != best]
        nearest = np.minimum(nearest, apart[:, best])
    return np.array(chosen, np.int64), gain
