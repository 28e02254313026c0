"""Optimal client sampling: draw clients by the norm of their updates, with weights that keep the average unbiased.

.. [Chen2020] W. Chen, S. Horvath, P. Richtarik, "Optimal Client Sampling for Federated Learning", arXiv:2010.13723,
   Transactions on Machine Learning Research, 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.numerics.running import fill_with_mean
from fedcohort.selectors.numerics.sampling import inclusion_probabilities, scale_to_all_clients, systematic_sample

_MAX_NORM = 1e100  # larger norms are clipped, so that their sums stay finite


@dataclass(frozen=True)
class _NormState:
    """The norm of each client's last update."""

    norm: FloatArray = per_client()  # (N,) NaN before the client's first report


@register("gradnorm")
@dataclass(frozen=True, kw_only=True)
class GradNorm(Selector[_NormState]):
    r"""Draw clients with probabilities in proportion to the norm of their updates ([Chen2020]_, Algorithm 1).

    Client i takes part with probability

    .. math::

        p_i = \begin{cases} (m + l - n) \, u_i \big/ \sum_{j=1}^{l} u_{(j)} & \text{if } u_i \text{ is among the } l
        \text{ smallest} \\ 1 & \text{else,} \end{cases} \qquad u_i = w_i \|U_i\|

    with the largest l for which :math:`0 < m + l - n \le \sum_{j=1}^{l} u_{(j)} / u_{(l)}`, and counts
    :math:`w_i / p_i`. Of all samplings with m clients on average, this one is closest to the mean of all clients.

    Symbols: n = number of candidates, m = slate.size, U_i = the client's update, ||U_i|| = Signal.UPDATE_NORM,
    u_(1) <= ... <= u_(n), w_i = share of the samples (Signal.SIZES), 1 / p_i = ``Cohort.weights``, with which the
    aggregator multiplies its own w_i.

    Deviations: in the paper, every client trains in every round and reports its norm, and the clients drawn send their
    updates. Here only the clients drawn train, and the norm is that of a client's last update. The average is unbiased
    with any probabilities above 0, so old norms only cost variance. A client that has not reported yet has the mean
    norm of the others. No client's w_i ||U_i|| counts as less than ``floor`` times the mean of all, so that one whose
    last update was 0 can still be drawn. Exactly m clients are drawn, with the probabilities above (systematically, in
    random order). The paper decides about each client independently and gets m on average.

    **Aggregator**: ``inverse-probability``, as in the paper. It is the default. ``fedavg`` and
    others that divide by the sum of the weights are biased towards clients with large updates.

    Examples
    --------
    The client with the large update is certain. The others are half as likely and count twice.

    >>> from fedcohort import ClientTable, Session, Signal
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(GradNorm(), ClientTable(sizes=[10, 10, 10]), seed=0)
    >>> everybody = session.ask(RoundRequest(size=3))
    >>> norms = np.array([9.0, 1.0, 1.0])[everybody.clients]
    >>> session.tell(RoundReport(everybody.ticket, everybody.clients, metrics={Signal.UPDATE_NORM: norms}))
    >>> cohort = session.ask(RoundRequest(size=2))
    >>> cohort.clients[0], cohort.weights, cohort.score
    (np.int64(0), array([1., 2.]), array([1. , 0.5, 0.5]))
    """

    requires = frozenset({Signal.SIZES, Signal.UPDATE_NORM})
    aggregator = "inverse-probability"

    picks_by: ClassVar[str] = "Clients are drawn at random, and the score is the probability of being in the cohort."
    part_meanings: ClassVar[Mapping[str, str]] = {
        "norm": "length of its last update",
        "size": "its share of all data",
        "unknown": "1 if it has not reported yet and so has the mean norm",
    }

    checked_params: ClassVar[ParamSets] = {
        "norms alone": {"floor": 1e-09},
        "uniform": {"floor": 1.0},
    }

    floor: float = param(
        0.1,
        Interval(float, 0, 1, "right"),
        "least size times norm, as a share of the mean; limits the weights of rarely drawn clients",
    )

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _NormState:
        """Start without norms."""
        return _NormState(np.full(clients.n, np.nan))

    def select(
        self, state: _NormState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _NormState]:
        """Turn norms into probabilities and draw by them."""
        norm = slate.of_candidates(state.norm)
        unknown = np.isnan(norm)
        norm = fill_with_mean(norm)
        sizes = np.asarray(slate.of_candidates(slate.clients.sizes), np.float64)
        share = sizes / sizes.sum() if sizes.sum() > 0 else np.full(len(sizes), 1 / len(sizes))
        importance = share * norm
        # A client at 0 would never be drawn, and its norm never be measured again.
        importance = np.maximum(importance, self.floor * importance.mean())
        chance = inclusion_probabilities(importance, slate.size)
        picked = systematic_sample(chance, rng)
        # For the notes: the variance of this draw over that of uniform cohorts of the same size.
        squared = (importance / max(float(importance.max()), np.finfo(np.float64).tiny)) ** 2
        uniform = (len(chance) / slate.size - 1) * squared.sum()
        cohort = Cohort(
            slate.candidates[picked],
            candidates=slate.candidates,
            score=chance,
            parts={"norm": norm, "size": share, "unknown": unknown.astype(np.float64)},
            weights=scale_to_all_clients(slate.clients.weights, slate.candidates) / chance[picked],
            notes={
                "certain": int((chance == 1).sum()),
                "variance against uniform": float(((1 / chance - 1) * squared).sum() / uniform) if uniform > 0 else 1.0,
            },
        )
        return cohort, state

    def update(self, state: _NormState, outcome: Outcome) -> _NormState:
        """Remember the norms of the clients that trained."""
        norm = state.norm.copy()
        norm[outcome.clients[outcome.ok]] = np.clip(outcome[Signal.UPDATE_NORM][outcome.ok], 0.0, _MAX_NORM)
        return _NormState(norm)
