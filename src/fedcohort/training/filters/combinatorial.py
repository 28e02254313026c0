r"""FedCA: combinatorial averaging, which keeps the subset of models with the best joint validation score.

.. [Kim2020] T. Kim, S. Bae, J. Lee, S. Yun, "Accurate and Fast Federated Learning via Combinatorial Multi-Armed
   Bandits", arXiv:2012.03270, 2020.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from fedcohort.core.params import Interval, OneOf, param
from fedcohort.training.filters.base import FILTERS, Filter, FilterDecision, Need, Replies
from fedcohort.training.filters.subsets import Score, best_by_beam, best_of_all, finite_models, margins

log = logging.getLogger(__name__)


@FILTERS.register("fedca")
@dataclass(frozen=True, kw_only=True)
class FedCA(Filter):
    r"""Keep the subset whose mean logits score best on the server's validation set ([Kim2020]_, Eq. 4).

    .. math:: S_{opt} = \arg\max_{\emptyset \ne S' \subseteq S} u\Bigl(\mathcal X_{val},
              \frac{1}{|S'|} \sum_{s \in S'} g(x; w_s)\Bigr)

    with u the accuracy (the paper's Dirac delta) or minus the cross-entropy (its classification loss). The logits are
    averaged, not the weights. So every model is validated once, and every subset is a sum.

    Up to ``exact`` members, all 2^m - 1 subsets are tried. For more members there is a beam search with ``beam``
    subsets per size; it logs a warning, and the decision's notes contain "search": "beam".

    Deviations from the paper: it leaves a few things open, which are decided here. Among equally good subsets, the
    largest is kept, because it averages more data, then the one whose members come first in the cohort. A sample on
    which two classes tie for the largest mean logit counts as wrong. The cross-entropy is that of the softmax of the
    mean logits. Models with NaN or infinite logits are never kept. The weights of the average (Eq. 5) belong to the
    aggregator ``fedpdp``.

    Examples
    --------
    >>> labels = np.array([0, 0, 1, 1])
    >>> good = np.array([[2.0, 0], [0, 1], [0, 2], [0, 2]])  # wrong on the second sample
    >>> other = np.array([[1.0, 0], [2, 0], [0, 1], [1, 0]])  # wrong on the last one
    >>> biased = np.array([[0, 9.0], [0, 9], [0, 9], [0, 9]])  # everything is class 1
    >>> FedCA().judge(Replies([True] * 3, logits=np.stack([good, other, biased]), labels=labels)).kept
    array([ True,  True, False])
    """

    needs = frozenset({Need.LOGITS})

    score: Score = param("loss", OneOf(("accuracy", "loss")), "what a subset is judged by (u)")
    exact: int = param(16, Interval(int, 1, 20), "largest number of members for which all subsets are tried")
    beam: int = param(8, Interval(int, 1, None), "subsets kept per size by the beam search beyond that")

    def judge(self, replies: Replies) -> FilterDecision:
        """Find the best subset of the usable models."""
        kept = np.zeros(len(replies), np.bool_)
        if not replies.ok.any():
            return FilterDecision(kept)
        logits = replies.logits
        # One NaN would spoil the mean of every subset with that model.
        usable = np.flatnonzero(replies.ok & finite_models(logits))
        if not len(usable):
            log.warning("no model has finite outputs on the validation set; no model is kept")
            return FilterDecision(kept)
        differences = margins(logits[usable.tolist()], replies.labels)
        notes: dict[str, str | float | int] = {}
        if len(usable) <= self.exact:
            members, score = best_of_all(differences, self.score)
            notes["search"] = "all subsets"
        else:
            log.warning(
                "%d models have too many subsets to try all of them (the limit is %d); using a beam search of width %d",
                len(usable),
                self.exact,
                self.beam,
            )
            members, score = best_by_beam(differences, self.score, self.beam)
            notes["search"] = "beam"
        notes["validation " + self.score] = score if self.score == "accuracy" else -score
        kept[usable[members]] = True
        return FilterDecision(kept, notes)
