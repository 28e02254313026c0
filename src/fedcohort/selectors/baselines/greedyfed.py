"""GreedyFed: take the clients whose models have improved the average most so far.

.. [Singhal2024] P. Singhal, S. R. Pandey, P. Popovski, "Greedy Shapley Client Selection for Communication-Efficient
   Federated Learning", IEEE Networking Letters 6, 2024 (arXiv 2312.09108), Algorithm 1.
.. [Liu2022] Z. Liu et al., "GTG-Shapley: Efficient and Accurate Participant Contribution Evaluation in Federated
   Learning", ACM TIST 13, 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, Optional, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import OnServer, Signal, Utility
from fedcohort.core.top import top_k

_TRUNCATION = 1e-4  # a smaller difference of utility counts as none
_MAX_ORDERS = 50  # per member
_MIN_ORDERS = 20  # before the values may count as settled
_WINDOW, _SETTLED = 10, 0.01  # settled: the mean change over the last 10 orders is below 1%


def _gtg_shapley(utility: Utility, members: int, rng: np.random.Generator) -> FloatArray:
    """Estimate the Shapley value of each member of a coalition from permutations ([Liu2022]_).

    The value of member i is the mean, over all orders in which members may join, of what i adds to the members before
    it. Orders are drawn in cycles in which every member is first once. Two truncations save work. If all members
    together change the utility by less than ``_TRUNCATION``, all values are 0. Once the members that have joined are
    worth as much as all members, the rest of that order adds nothing. Drawing ends when the values settle: when their
    mean change over the last 10 orders is below 1% of their mean size, but after at most 50 orders per member. No
    coalition is evaluated twice. With up to seven members, evaluating all coalitions is no more work than twenty
    orders, so the values are computed exactly.

    Parameters
    ----------
    utility : callable
        Takes coalitions (s, m), one per row, and returns the utility of each, (s,).
    members : int
        The number of members (m).
    rng : numpy.random.Generator

    Returns
    -------
    (m,) float array
        Without truncation, they sum to the utility of all members minus that of the empty coalition.

    Examples
    --------
    Two members that each add 1, and 4 more together: 3 each. The others add nothing.

    >>> def utility(coalitions):
    ...     return 1.0 * coalitions[:, 0] + coalitions[:, 1] + 4.0 * (coalitions[:, 0] & coalitions[:, 1])
    >>> _gtg_shapley(utility, 4, np.random.default_rng(0)).round(3)
    array([3., 3., 0., 0.])
    """
    if members == 0:
        return np.zeros(0)
    nobody, everybody = np.zeros((1, members), np.bool_), np.ones((1, members), np.bool_)
    first, last = (float(value) for value in utility(np.concatenate([nobody, everybody])))
    if members == 1:
        return np.array([last - first])
    if abs(last - first) < _TRUNCATION:  # the paper's truncation between rounds
        return np.zeros(members)
    if 2**members <= _MIN_ORDERS * members:
        return _exact_shapley(utility, members)
    return _from_orders(utility, members, rng, {nobody.tobytes(): first, everybody.tobytes(): last}, first, last)


def _from_orders(
    utility: Utility, members: int, rng: np.random.Generator, known: dict[bytes, float], first: float, last: float
) -> FloatArray:
    """(m,) the mean gain of each member over random orders, which are drawn until the means settle.

    ``known`` collects the utilities of coalitions. ``first`` is that of the empty coalition, ``last`` that of all.
    """
    total, drawn = np.zeros(members), 0
    recent: list[FloatArray] = []  # the estimates after the last orders
    while drawn < _MAX_ORDERS * members:
        # Guided sampling: the first places matter most, and every member has them equally often.
        others = (rng.permutation(np.delete(np.arange(members), i)) for i in range(members))
        orders = np.stack([np.concatenate([[i], rest]) for i, rest in enumerate(others)])
        for gains in _gains(orders, utility, known, first, last):
            total += gains
            drawn += 1
            recent = [*recent[-_WINDOW:], total / drawn]
        now = recent[-1]
        change = np.mean([np.abs(before - now).mean() for before in recent[:-1]])
        if drawn >= _MIN_ORDERS and change < _SETTLED * np.abs(now).mean():
            break
    return np.asarray(total / drawn)


def _exact_shapley(utility: Utility, members: int) -> FloatArray:
    """Return the Shapley values (m,) by their definition, from all 2^m coalitions."""
    # A coalition is a number whose bits are its members, so the one without member k is found by flipping a bit.
    numbers = np.arange(2**members)
    coalitions = (numbers[:, None] >> np.arange(members)) & 1 == 1
    value, size = utility(coalitions), coalitions.sum(axis=1)
    # The share of orders in which exactly these s - 1 others come before the member: (s - 1)! (m - s)! / m!.
    chance = np.array([1 / (members * comb(members - 1, s - 1)) if s else 0.0 for s in range(members + 1)])
    shapley = np.empty(members)
    for k in range(members):
        with_k = numbers[coalitions[:, k]]
        shapley[k] = ((value[with_k] - value[with_k ^ (1 << k)]) * chance[size[with_k]]).sum()
    return shapley


def _gains(orders: IntArray, utility: Utility, known: dict[bytes, float], first: float, last: float) -> FloatArray:
    """(r, m) what each member adds in each of ``orders`` (r, m), computed for all orders at once, step by step."""
    count, members = orders.shape
    joined = np.zeros((count, members), np.bool_)
    before = np.full(count, first)
    gains = np.zeros((count, members))
    rows = np.arange(count)
    for step in range(members):
        joined[rows, orders[:, step]] = True
        unfinished = np.flatnonzero(np.abs(last - before) >= _TRUNCATION)  # the paper's truncation within an order
        new = {joined[row].tobytes(): joined[row] for row in unfinished if joined[row].tobytes() not in known}
        if new:
            values = utility(np.stack(list(new.values())))
            known.update(zip(new, (float(value) for value in values), strict=True))
        after = before.copy()
        after[unfinished] = [known[joined[row].tobytes()] for row in unfinished]
        gains[rows, orders[:, step]] = after - before
        before = after
    return gains


SHAPLEY_VALUE = Signal(
    "shapley-value",
    meaning="Shapley value of the client's model in the round's average, by the loss on the server's own samples",
    how=OnServer(_gtg_shapley, stream="shapley"),
    supplied_by="in the simulator set scenario.server_validation; Flower does not supply it",
)


@dataclass(frozen=True)
class _ShapleyState:
    """What GreedyFed remembers about each client."""

    value: FloatArray = per_client()  # (N,) SV_k, mean of its Shapley values
    rounds: FloatArray = per_client()  # (N,) N_k, rounds in which it was valued
    asked: FloatArray = per_client()  # (N,) rounds in which it was picked


@register("greedyfed")
@dataclass(frozen=True, kw_only=True)
class GreedyFed(Selector[_ShapleyState]):
    r"""Ask every client once, then take those with the largest mean Shapley values ([Singhal2024]_, Algorithm 1).

    After each round the server values every model w_k of the cohort S by its Shapley value

    .. math:: SV_k^{(t)} = \frac{1}{|S|} \sum_{A \subseteq S \setminus k} \binom{|S| - 1}{|A|}^{-1}
              \left[ U(A \cup k) - U(A) \right],

    where U(A) is minus the loss, on the server's own samples, of the size-weighted average of the models of A (of the
    old global model if A is empty), estimated by GTG-Shapley. Then

    .. math:: SV_k \leftarrow \frac{(N_k - 1) SV_k + SV_k^{(t)}}{N_k} \quad \text{or} \quad
              SV_k \leftarrow \alpha SV_k + (1 - \alpha) SV_k^{(t)}.

    The first rounds go to clients that were never asked. Then the m clients with the largest :math:`SV_k` are taken.

    Symbols: SV_k^(t) = ``SHAPLEY_VALUE``, N_k = ``_ShapleyState.rounds``, alpha = ``memory``, m = slate.size.

    Deviations: at first, the paper asks clients in a fixed order; here the order is random. The last of these rounds is
    filled up at random, as in the authors' code. Clients that were asked and never delivered have the value 0. Values
    are measured with an average by size, whatever the aggregator is.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(GreedyFed(), ClientTable(sizes=[10] * 4), seed=0)
    >>> for _ in range(2):
    ...     cohort = session.ask(RoundRequest(size=2))
    ...     value = np.array([0.1, 0.5, -0.2, 0.3])[cohort.clients]
    ...     session.tell(RoundReport(cohort.ticket, cohort.clients, metrics={SHAPLEY_VALUE: value}))
    >>> session.ask(RoundRequest(size=2)).names
    ('1', '3')
    """

    requires = frozenset({SHAPLEY_VALUE})

    picks_by: ClassVar[str] = (
        "Clients that were never asked come first. Then those with the highest value are picked; ties are broken at"
        " random."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "value": "what its models contributed, the mean of its Shapley values",
        "never asked": "1 if it was never asked and so comes first",
    }

    starves = "once all clients have been asked, those that contributed little are not asked again"
    checked_params: ClassVar[ParamSets] = {"exponential mean": {"memory": 0.8}}

    memory: float | None = param(
        None,
        Optional(Interval(float, 0, 1, "left")),
        "weight of the past in an exponential mean of values (alpha); None: the plain mean",
    )

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _ShapleyState:
        """Start with no client asked."""
        return _ShapleyState(*(np.zeros(clients.n) for _ in range(3)))

    def select(
        self, state: _ShapleyState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _ShapleyState]:
        """Take clients that were never asked while there are any, then the most valuable ones."""
        value, asked = slate.of_candidates(state.value), slate.of_candidates(state.asked)
        new = np.flatnonzero(asked == 0)
        if len(new):
            picked = rng.permutation(new)[: slate.size]
            rest = rng.permutation(np.flatnonzero(asked > 0))[: slate.size - len(picked)]
            picked = np.concatenate([picked, rest])
        else:
            picked = top_k(value, slate.size, rng)
        asked_now = state.asked.copy()
        asked_now[slate.candidates[picked]] += 1
        # A client that was never asked comes first, so its score is above all values.
        cohort = Cohort(
            slate.candidates[picked],
            candidates=slate.candidates,
            score=np.where(asked == 0, np.maximum(value.max(), 0.0) + 1.0, value),
            parts={"value": value, "never asked": (asked == 0).astype(np.float64)},
            notes={"asked for the first time": int(min(len(new), slate.size))},
        )
        return cohort, _ShapleyState(state.value, state.rounds, asked_now)

    def update(self, state: _ShapleyState, outcome: Outcome) -> _ShapleyState:
        """Update the values of the clients whose models arrived."""
        clients = outcome.clients[outcome.ok]
        new = outcome[SHAPLEY_VALUE][outcome.ok]
        value, rounds = state.value.copy(), state.rounds.copy()
        rounds[clients] += 1
        # In the plain mean the first value replaces the starting 0; in the exponential one it is mixed with it.
        past = (rounds[clients] - 1) / rounds[clients] if self.memory is None else self.memory
        value[clients] = past * value[clients] + (1 - past) * new
        return _ShapleyState(value, rounds, state.asked)
