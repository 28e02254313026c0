"""Clustered sampling: draw one client from each of m distributions that together keep the average unbiased.

.. [Fraboni2021] Y. Fraboni, R. Vidal, L. Kameni, M. Lorenzi, "Clustered Sampling: Low-Variance and Improved
   Representativity for Clients Selection in Federated Learning", ICML 2021, arXiv:2105.05883.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, OneOf, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.numerics.groups import angles, ward_groups
from fedcohort.selectors.numerics.recent import RecentVectors

_ROUNDING = 1e-9  # of a distribution's capacity


class _Allocation(NamedTuple):
    """The m distributions W_k: shares of clients' samples, ordered by distribution.

    Attributes
    ----------
    client : (a,) int array
        Position of the client that holds these samples.
    place : (a,) int array
        k, ascending.
    amount : (a,) float array
        Samples, out of the same capacity M for every distribution: r_ki = amount / M.
    """

    client: IntArray
    place: IntArray
    amount: FloatArray

    def draw(self, uniform: FloatArray) -> IntArray:
        """Return one client (m,) from each distribution, drawn with the ``uniform`` numbers (m,) in [0, 1)."""
        ends = np.cumsum(self.amount)
        last = np.searchsorted(self.place, np.arange(len(uniform)), side="right") - 1
        high = ends[last]
        low = np.concatenate([[0.0], high[:-1]])
        drawn = np.searchsorted(ends, low + uniform * (high - low), side="right")
        drawn = np.minimum(drawn, last)  # rounding can put a draw past the end of its distribution
        return np.asarray(self.client[drawn])


@register("clustered")
@dataclass(frozen=True, kw_only=True)
class Clustered(Selector[RecentVectors]):
    r"""Draw one client from each of m distributions :math:`W_k = (r_{k,i})_i` ([Fraboni2021]_, Algorithms 1 and 2).

    .. math:: \sum_i r_{k,i} = 1, \qquad \sum_{k=1}^m r_{k,i} = m p_i

    (Proposition 1). The second condition makes the mean of the drawn models unbiased. Each client weighs :math:`p_i` in
    expectation, as when m clients are drawn by size with replacement (``size-weighted``), and the variance of the
    weights is never larger. ``by`` says how the distributions are built:

    - ``"size"`` (Algorithm 1): clients in order of size fill one distribution after another.
    - ``"similarity"`` (Algorithm 2): Ward's tree over the angles :math:`\arccos(G_i, G_j)` between the clients' last
      updates is cut into at least m groups, none of which overfills a distribution. The m largest groups are the m
      distributions. The clients of the other groups fill the room that is left.

    Symbols: m = slate.size; n_i = clients.sizes, p_i = n_i / M; M = the sum of n_i over the candidates and the capacity
    of a distribution, to which client i brings m n_i samples; r_ki = ``_Allocation.amount`` / M;
    G_i = Signal.UPDATE_SKETCH of its last round; q_k = samples of a group.

    A client drawn from several distributions trains once and counts that often, so a cohort may be smaller than
    requested. **The weights** (``Cohort.weights``) make the average unbiased under the aggregator named by
    ``average``. Under ``mean``, the paper's, a weight is the number of draws. Under ``fedavg``, the library's default,
    it is the number of draws divided by the client's size, because ``fedavg`` itself multiplies by sizes. The named
    aggregator is the default for this selector.

    Deviations: angles are those of a random projection of the updates to 64 numbers (they are off by about 0.1 rad),
    because the server keeps no models. Only the ``memory`` clients that reported last are compared, since the cost of
    the tree grows with the square of their number. A client without a remembered update has no direction. The paper
    gives it a gradient of 0, which puts all such clients into one group that fits no distribution. Here they fill
    their own distributions by Algorithm 1. A client that brings more than M samples fills whole distributions first
    (as in Algorithm 1), and only the remainder is grouped. Ties in size are broken at random. Clients without data
    are drawn only when no client has any.

    Examples
    --------
    Two large clients have a distribution each. The four small ones share the third.

    >>> from fedcohort import ClientTable, Session
    >>> from fedcohort.core.protocol import RoundRequest
    >>> table = ClientTable(sizes=[40, 40, 10, 10, 10, 10])
    >>> [Session(Clustered(), table, seed=seed).ask(RoundRequest(size=3)).names for seed in range(3)]
    [('0', '1', '4'), ('0', '1', '5'), ('0', '1', '4')]
    """

    picks_by: ClassVar[str] = (
        "Each place is drawn at random from its own group. The score is how often a client is drawn on average."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "expected draws": "how often it is drawn on average, by its size",
        "group": "number of its group of similar clients, -1 if its update is unknown",
    }

    checked_params: ClassVar[ParamSets] = {
        "by similarity": {"by": "similarity", "average": "mean"},
        "short memory": {"by": "similarity", "memory": 2},
    }

    starves = "a client with no data is never picked"

    by: str = param("size", OneOf(("size", "similarity")), "how distributions are built: Algorithm 1 or 2")
    average: str = param(
        "fedavg", OneOf(("fedavg", "mean")), "the aggregator that the weights are for; the paper's is mean"
    )
    memory: int = param(1000, Interval(int, 2, None), "most clients whose last updates are compared")

    @property
    def requires(self) -> frozenset[Signal]:
        """Data sizes, and updates if they are compared."""
        return frozenset({Signal.SIZES} | ({Signal.UPDATE_SKETCH} if self.by == "similarity" else set()))

    @property
    def aggregator(self) -> str:
        """The aggregator that the weights are for."""
        return self.average

    def init(self, clients: ClientTable, rng: np.random.Generator) -> RecentVectors:
        """Start without updates."""
        return RecentVectors.empty()

    def select(
        self, state: RecentVectors, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, RecentVectors]:
        """Build the distributions, draw from each, and merge repeated draws."""
        sizes = np.asarray(slate.of_candidates(slate.clients.sizes), np.float64)
        if sizes.max() <= 0:
            sizes = np.ones(len(sizes))
        shuffled = rng.permutation(len(sizes))
        # Equal sizes keep the random order. Otherwise the same clients would always share a distribution.
        order = shuffled[np.argsort(-sizes[shuffled], kind="stable")]
        group = np.full(len(sizes), -1)
        if self.by == "similarity":
            rows = state.rows_of(slate.candidates)
            known = np.flatnonzero(rows >= 0)
            allocation, group[known] = _by_similarity(
                sizes, slate.size, order, known, angles(state.vectors[rows[known]])
            )
        else:
            allocation = _by_size(sizes, slate.size, order)
        drawn, counts = np.unique(allocation.draw(rng.random(slate.size)), return_counts=True)
        expected = slate.size * sizes / sizes.sum()
        parts = {"expected draws": expected}
        notes: dict[str, str | float | int] = {"distributions": slate.size}
        if self.by == "similarity":
            parts["group"] = group.astype(np.float64)
            notes["groups"] = int(group.max()) + 1
            notes["clients of which nothing is known"] = int((group < 0).sum())
        weights = counts.astype(np.float64)
        if self.average == "fedavg":
            # The aggregator will multiply by sizes. The mean size only keeps the weights near 1.
            weights = weights * sizes.mean() / sizes[drawn]
        cohort = Cohort(
            slate.candidates[drawn],
            candidates=slate.candidates,
            score=expected,
            parts=parts,
            weights=weights,
            notes=notes,
        )
        return cohort, state

    def update(self, state: RecentVectors, outcome: Outcome) -> RecentVectors:
        """Remember the updates if they are compared."""
        if self.by == "size":
            return state
        ok = outcome.ok
        return state.with_reports(outcome.clients[ok], outcome[Signal.UPDATE_SKETCH][ok], outcome.round, self.memory)


def _pour(amount: FloatArray, order: IntArray, room: FloatArray) -> _Allocation:
    """Pour clients' samples, in ``order``, into one distribution after another.

    Parameters
    ----------
    amount : (c,) float array
        Samples of each client.
    order : (a,) int array
        Positions of the clients to _pour, first to last.
    room : (m,) float array
        Free room in each distribution; its sum equals that of the samples, up to rounding.
    """
    poured, full = np.cumsum(amount[order]), np.cumsum(room)
    if not len(order) or not len(room) or full[-1] <= 0:
        return _Allocation(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
    full = full * (poured[-1] / full[-1])  # equal sums, although both were rounded
    # Every boundary, of a client or of a distribution, ends a piece. Its middle says to whom it belongs, safely inside.
    ends = np.union1d(poured, full)
    starts = np.concatenate([[0.0], ends[:-1]])
    middle = (starts + ends) / 2
    client = order[np.minimum(np.searchsorted(poured, middle), len(order) - 1)]
    place = np.minimum(np.searchsorted(full, middle), len(room) - 1)
    return _Allocation(client, place, ends - starts)


def _by_size(sizes: FloatArray, m: int, order: IntArray) -> _Allocation:
    """Return the distributions of Algorithm 1: client i pours m n_i samples, the largest client first."""
    return _pour(m * sizes, order, np.full(m, sizes.sum()))


def _by_similarity(
    sizes: FloatArray, m: int, order: IntArray, known: IntArray, angle: FloatArray
) -> tuple[_Allocation, IntArray]:
    """Return the distributions of Algorithm 2, and the group of each known client.

    Parameters
    ----------
    sizes : (c,) float array
        n_i.
    m : int
        Number of distributions.
    order : (c,) int array
        Clients from the largest to the smallest.
    known : (u,) int array
        Positions of the clients whose updates are known.
    angle : (u, u) float array
        Angles between their updates.

    Returns
    -------
    allocation : _Allocation
    group : (u,) int array
    """
    capacity = float(sizes.sum())
    amount = m * sizes
    whole = np.floor(amount / capacity * (1 + _ROUNDING)).astype(np.int64)  # distributions that a client fills alone
    rest = np.maximum(amount - whole * capacity, 0.0)
    rest[rest < _ROUNDING * capacity] = 0.0
    # Of m distributions, no more than m can be filled; rounding could give one too many.
    single = np.repeat(np.arange(len(sizes)), whole)[:m]  # the client of each distribution that one client fills
    places = m - len(single)
    unknown = np.ones(len(sizes), np.bool_)
    unknown[known] = False
    free = min(int(rest[unknown].sum() / capacity * (1 + _ROUNDING)), places)  # filled by unknown clients
    group = ward_groups(angle, places - free, rest[known], capacity * (1 + _ROUNDING))
    count = int(group.max(initial=-1)) + 1
    load = np.bincount(group, rest[known], count)
    # The largest groups are the distributions; the clients of the others fill what room is left (Algorithm 2).
    base = np.argsort(-load, kind="stable")[: places - free]
    place_of = np.full(count, -1)
    place_of[base] = np.arange(free, free + len(base))
    room = np.full(places, capacity)
    room[free : free + len(base)] -= load[base]
    grouped = np.full(len(sizes), -1)
    grouped[known] = place_of[group]
    inside = order[(grouped[order] >= 0) & (rest[order] > 0)]
    left = order[(grouped[order] < 0) & (rest[order] > 0)]
    # Unknown clients first, because the distributions kept free for them are the first ones.
    left = np.concatenate([left[unknown[left]], left[~unknown[left]]])
    poured = _pour(rest, left, np.maximum(room, 0.0))
    client = np.concatenate([poured.client, inside, single])
    place = np.concatenate([poured.place, grouped[inside], places + np.arange(len(single))])
    parts = np.concatenate([poured.amount, rest[inside], np.full(len(single), capacity)])
    by_place = np.argsort(place, kind="stable")
    return _Allocation(client[by_place], place[by_place], parts[by_place]), group
