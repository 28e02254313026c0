r"""CMFL: drop updates whose signs disagree with the round's mean update.

.. [Wang2019] L. Wang, W. Wang, B. Li, "CMFL: Mitigating Communication Overhead for Federated Learning", ICDCS 2019.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcohort.core.params import Interval, param
from fedcohort.training.arithmetic import namespace
from fedcohort.training.filters.base import FILTERS, Filter, FilterDecision, Need, Replies


@FILTERS.register("cmfl")
@dataclass(frozen=True, kw_only=True)
class CMFL(Filter):
    r"""Keep updates whose sign agrees with the mean update in at least ``threshold`` of all coordinates ([Wang2019]_).

    .. math:: e_i = \frac{1}{P} \sum_{j=1}^{P} \mathbf 1[\mathrm{sgn}(u_{ij}) = \mathrm{sgn}(\bar u_j)] \ge v,
              \qquad \bar u = \frac{1}{m} \sum_i u_i

    Symbols: e_i = relevance, v = ``threshold``, P = number of parameters. Zero counts as a third sign.

    Deviations from the paper: it compares with the global update of the previous round, and clients decide before they
    upload. Here, updates are compared with the plain mean of the usable updates of this round, and the threshold is
    fixed at 0.7. The reference code of FedACS, which uses CMFL as a benchmark, does the same. If no update passes, the
    most relevant one is kept, the first among equals. Updates with NaN or infinite entries are never kept and do not
    enter the mean.

    Examples
    --------
    >>> updates = np.array([[1.0, 1, 1, -1], [1, 1, 1, 1], [-1, -1, -1, 1]])
    >>> CMFL().judge(Replies([True] * 3, updates=updates)).kept
    array([ True,  True, False])
    """

    needs = frozenset({Need.UPDATES})

    threshold: float = param(0.7, Interval(float, 0, 1), "least share of agreeing signs (v)")

    def judge(self, replies: Replies) -> FilterDecision:
        """Compare signs with the mean."""
        kept = np.zeros(len(replies), np.bool_)
        if not replies.ok.any():
            return FilterDecision(kept)
        updates = replies.updates
        xp = namespace(updates)
        if xp is not np:
            updates = updates.detach()
        usable = [i for i in np.flatnonzero(replies.ok).tolist() if bool(xp.isfinite(updates[i]).all())]
        if not usable:
            return FilterDecision(kept)
        # Plain and not by size: a large client's signs are no better evidence than a small one's.
        total = xp.zeros_like(updates[0])
        for i in usable:  # row by row, without a second array of this size
            total += updates[i]
        direction = xp.sign(total)  # the mean has the same sign
        relevance = np.array([int((xp.sign(updates[i]) == direction).sum()) for i in usable]) / max(len(direction), 1)
        passes = relevance >= self.threshold
        if not passes.any():  # a round that keeps no model would have to be repeated
            passes[int(np.argmax(relevance))] = True
        kept[usable] = passes
        return FilterDecision(
            kept, {"relevance mean": float(relevance.mean()), "relevance max": float(relevance.max())}
        )
