"""Power-of-Choice: ask d clients for their losses and take the largest.

.. [Cho2020] Y. J. Cho, J. Wang, G. Joshi, "Client Selection in Federated Learning: Convergence Analysis and
   Power-of-Choice Selection Strategies", arXiv:2010.01243.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.params import Interval, Optional, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Losses, Query, Slate, register
from fedcohort.core.signals import Signal
from fedcohort.core.top import top_k
from fedcohort.selectors.baselines.uniform import NoState, Stateless
from fedcohort.selectors.numerics.sampling import weighted_sample


@register("power-of-choice")
@dataclass(frozen=True, kw_only=True)
class PowerOfChoice(Stateless):
    r"""Ask d random clients for their losses and take those with the largest ([Cho2020]_, Sec. 3.1).

    The cohort is the m largest of :math:`F_k(w), k \in A`. Symbols: A = the d clients asked, drawn without replacement
    with probability p_k; m = slate.size; F_k(w) = Signal.LOSS of the current global model. Deviations: a client that
    does not answer is taken only when too few do. A d below m is raised to m.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session, Signal
    >>> from fedcohort.core.protocol import Answer, RoundRequest
    >>> session = Session(PowerOfChoice(d=4), ClientTable(sizes=[1, 1, 1, 1]), seed=1)
    >>> request = RoundRequest(size=1)
    >>> query = session.query(request)
    >>> losses = query.clients.astype(float)       # client 3 has the largest loss
    >>> session.ask(request, Answer(query, {Signal.LOSS: losses})).clients
    array([3])
    """

    requires = frozenset({Signal.SIZES, Signal.LOSS_QUERY})

    one_at_a_time = True
    picks_by: ClassVar[str] = (
        "Some clients are drawn at random and asked for their loss. Those with the highest losses are picked. "
        "Clients that were not asked have no score."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "loss": "its loss under the current model",
    }

    checked_params: ClassVar[ParamSets] = {
        "one": {"d": 1},
        "all": {"d": 10_000},
    }

    d: int | None = param(None, Optional(Interval(int, 1, None)), "clients asked per round (d); None: twice the cohort")

    def query(self, state: NoState, slate: Slate, rng: np.random.Generator) -> Query:
        """Ask d clients for their losses, drawn in proportion to size."""
        # With fewer answers than places, some places would have to be filled blindly.
        d = 2 * slate.size if self.d is None else max(self.d, slate.size)
        sizes = slate.of_candidates(slate.clients.sizes)
        asked = weighted_sample(sizes, min(d, len(slate.candidates)), rng)
        return Losses(np.sort(slate.candidates[asked]))

    def select(
        self, state: NoState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, NoState]:
        """Take the clients with the largest losses."""
        assert answer is not None
        assert isinstance(answer.query, Losses)
        loss = answer[Signal.LOSS]
        # A client that did not answer will hardly train either, but is better than an empty place.
        score = np.where(np.isnan(loss), -np.inf, loss)
        picked = top_k(score, slate.size, rng)
        asked = answer.query.clients
        return Cohort(asked[picked], candidates=asked, score=score, parts={"loss": loss}), state
