r"""FedCM: client selection as a combinatorial bandit; a client is rewarded if its model was kept.

.. [Kim2020] T. Kim, S. Bae, J. Lee, S. Yun, "Accurate and Fast Federated Learning via Combinatorial Multi-Armed
   Bandits", arXiv:2012.03270, 2020.

The paper's whole method is one of these selectors together with the filter ``fedca`` (its Eq. 4). Any filter works,
because the selectors only see which models were kept. Without a filter, every model that arrives is kept, and the
selectors can only learn which clients fail.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.core.top import top_k
from fedcohort.selectors.numerics.sampling import beta_draws
from fedcohort.selectors.papers.fedcm.plots import ARMS


@dataclass(frozen=True)
class _UcbState:
    """What FedCM-UCB knows about each client."""

    mean: FloatArray = per_client()  # (N,) mu_hat_k, share of rounds in which the client's model was kept
    pulls: FloatArray = per_client()  # (N,) a_k, rounds in which it was asked, plus 1


@register("fedcm-ucb")
@dataclass(frozen=True, kw_only=True)
class FedCmUcb(Selector[_UcbState]):
    r"""Take the clients with the largest upper confidence bound of being kept ([Kim2020]_, Algorithm 2).

    .. math:: \bar\mu_k = \hat\mu_k + \sqrt{\frac{3 \ln t}{2 a_k}}, \qquad
              (\hat\mu_k, a_k) \leftarrow \left(\frac{a_k \hat\mu_k + r_k}{a_k + 1},\; a_k + 1\right)

    Symbols: t = round + 1; :math:`a_k` = ``pulls``; :math:`\hat\mu_k` = ``mean``; r_k = 1 if the filter kept the
    model (k in S_opt). The start is a_k = 1 and a mean drawn from Bernoulli(1/2) (Appendix C), so the first round
    picks from the clients that drew a 1.

    Deviations from the paper: equal bounds, which Algorithm 2 leaves open, are ordered at random. A client that was
    asked and did not deliver a valid model in time counts as not kept, r_k = 0, because it is in S^t and not in S_opt.
    (If it were ignored, a dead client with a high bound would keep its place in the cohort forever.)

    Examples
    --------
    >>> import numpy as np
    >>> from fedcohort.core.clients import ClientTable
    >>> from fedcohort.core.protocol import Slate
    >>> state = _UcbState(mean=np.array([0.5, 0.9, 0.4]), pulls=np.array([20.0, 20.0, 2.0]))
    >>> slate = Slate(round=30, size=2, candidates=np.arange(3), clients=ClientTable(n=3))
    >>> cohort, _ = FedCmUcb().select(state, slate, None, np.random.default_rng(0))
    >>> cohort.clients  # client 2 is hardly known, client 1 was nearly always kept
    array([2, 1])
    """

    requires = frozenset({Signal.KEPT})

    picks_by: ClassVar[str] = "The clients with the highest scores are picked; ties are broken at random."
    part_meanings: ClassVar[Mapping[str, str]] = {
        "estimate": "share of its models that were kept",
        "exploration": "bonus for having been picked rarely",
    }

    pictures = (ARMS,)

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _UcbState:
        """Start with one imaginary pull per client, kept with probability 1/2."""
        mean = rng.integers(0, 2, clients.n).astype(np.float64)
        return _UcbState(mean=mean, pulls=np.ones(clients.n))

    def select(
        self, state: _UcbState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _UcbState]:
        """Take the largest upper confidence bounds."""
        mean = slate.of_candidates(state.mean)
        # In place, which saves an array of the size of the federation.
        exploration = 1.5 * math.log(slate.round + 1) / slate.of_candidates(state.pulls)
        np.sqrt(exploration, out=exploration)
        score = mean + exploration
        chosen = slate.candidates[top_k(score, slate.size, rng)]
        cohort = Cohort(
            clients=chosen,
            candidates=slate.candidates,
            score=score,
            parts={"estimate": mean, "exploration": exploration},
        )
        return cohort, state

    def update(self, state: _UcbState, outcome: Outcome) -> _UcbState:
        """Update the mean of each client that was asked."""
        clients = outcome.clients
        mean, pulls = state.mean.copy(), state.pulls.copy()
        # All that were asked, not only those that delivered; see the deviations.
        mean[clients] = (pulls[clients] * mean[clients] + outcome.kept) / (pulls[clients] + 1)
        pulls[clients] += 1
        return _UcbState(mean=mean, pulls=pulls)


@dataclass(frozen=True)
class _ThompsonState:
    """What FedCM-TS knows about each client."""

    kept: FloatArray = per_client()  # (N,) alpha_k, rounds in which its model was kept, plus 1
    dropped: FloatArray = per_client()  # (N,) beta_k, rounds in which it was not, plus 1


@register("fedcm-ts")
@dataclass(frozen=True, kw_only=True)
class FedCmTs(Selector[_ThompsonState]):
    r"""Take the clients with the largest draw from their posterior of being kept ([Kim2020]_, Algorithm 3).

    .. math:: \hat\theta_k \sim Beta(\alpha_k, \beta_k), \qquad
              (\alpha_k, \beta_k) \leftarrow (\alpha_k + r_k,\; \beta_k + 1 - r_k)

    Symbols: :math:`\alpha_k` = ``kept`` and :math:`\beta_k` = ``dropped``, both 1 at the start; r_k = 1 if the filter
    kept the model.

    Deviations from the paper: line 4 compares a count with the sampling *ratio*. It is read as in Algorithm 2: the
    largest draws are taken. A client that was asked and did not deliver a valid model in time counts as not kept,
    r_k = 0.

    Examples
    --------
    >>> import numpy as np
    >>> from fedcohort.core.clients import ClientTable
    >>> from fedcohort.core.protocol import Slate
    >>> state = _ThompsonState(kept=np.array([5.0, 90.0, 60.0]), dropped=np.array([95.0, 10.0, 40.0]))
    >>> slate = Slate(round=30, size=2, candidates=np.arange(3), clients=ClientTable(n=3))
    >>> cohort, _ = FedCmTs().select(state, slate, None, np.random.default_rng(0))
    >>> cohort.clients
    array([1, 2])
    """

    requires = frozenset({Signal.KEPT})

    picks_by: ClassVar[str] = (
        "The clients with the highest scores are picked. A score is a random draw from the client's posterior."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "estimate": "estimated chance that its model is kept",
        "exploration": "what the random draw added to the estimate",
    }

    pictures = (ARMS,)

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _ThompsonState:
        """Start with Beta(1, 1) for every client."""
        ones = np.ones(clients.n)
        return _ThompsonState(kept=ones, dropped=ones)

    def select(
        self, state: _ThompsonState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _ThompsonState]:
        """Take the largest of one draw per candidate."""
        kept, dropped = slate.of_candidates(state.kept), slate.of_candidates(state.dropped)
        draw = beta_draws(kept, dropped, rng)
        mean = kept / (kept + dropped)
        chosen = slate.candidates[top_k(draw, slate.size, rng)]
        cohort = Cohort(
            clients=chosen,
            candidates=slate.candidates,
            score=draw,
            parts={"estimate": mean, "exploration": draw - mean},
        )
        return cohort, state

    def update(self, state: _ThompsonState, outcome: Outcome) -> _ThompsonState:
        """Count each client that was asked as kept or dropped."""
        kept, dropped = state.kept.copy(), state.dropped.copy()
        kept[outcome.clients] += outcome.kept
        dropped[outcome.clients] += ~outcome.kept
        return _ThompsonState(kept=kept, dropped=dropped)
