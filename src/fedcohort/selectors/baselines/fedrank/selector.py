"""FedRank: rank clients with a network that learned from other selectors.

.. [Tian2024] C. Tian, Z. Shi, X. Qin, L. Li, C. Xu, "Ranking-based Client Selection with Imitation Learning for
   Efficient Federated Learning", ICML 2024 (arXiv 2405.04122).
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
from fedcohort.core.top import top_k
from fedcohort.selectors.baselines.fedrank.network import FEATURES, features, shipped_network


@dataclass(frozen=True)
class RankState:
    """What is known about each client."""

    loss: FloatArray = per_client()  # (N,) at the last report; NaN before
    seconds: FloatArray = per_client()  # (N,) at the last report; NaN before
    last: FloatArray = per_client()  # (N,) round of the last report; NaN before
    picks: FloatArray = per_client()  # (N,) cohorts it was in

    @classmethod
    def fresh(cls, n: int) -> RankState:
        """Return the state before the first round."""
        unknown = np.full(n, np.nan)
        return cls(loss=unknown, seconds=unknown, last=unknown, picks=np.zeros(n))

    def features(self, slate: Slate) -> FloatArray:
        """(c, F) the features of the candidates."""
        return features(
            size=np.asarray(slate.of_candidates(slate.clients.sizes), np.float64),
            loss=slate.of_candidates(self.loss),
            seconds=slate.of_candidates(self.seconds),
            last=slate.of_candidates(self.last),
            picks=slate.of_candidates(self.picks),
            round_=slate.round,
        )

    def after_choice(self, cohort: Cohort) -> RankState:
        """Return the state with the picks counted."""
        picks = self.picks.copy()
        picks[cohort.clients] += 1
        return RankState(self.loss, self.seconds, self.last, picks)

    def after_report(self, outcome: Outcome) -> RankState:
        """Return the state with the reported losses and durations."""
        clients = outcome.clients[outcome.ok]
        loss, seconds, last = self.loss.copy(), self.seconds.copy(), self.last.copy()
        loss[clients] = outcome[Signal.LOSS][outcome.ok]
        seconds[clients] = np.maximum(outcome[Signal.DURATION][outcome.ok], 0.0)
        last[clients] = outcome.round
        return RankState(loss, seconds, last, self.picks)


@register("fedrank")
@dataclass(frozen=True, kw_only=True)
class FedRank(Selector[RankState]):
    r"""Take the clients that a network ranks highest; it imitates other selectors ([Tian2024]_, abstract).

    A network :math:`Q(x_i)` scores each client by what is known about its data and its speed. It was trained on
    decisions of analytical selectors in simulated federations, to rank the clients they chose above those they left
    out. For a chosen client i and a client j left out, RankNet's loss is

    .. math:: \log\left(1 + e^{-(Q(x_i) - Q(x_j))}\right).

    The cohort has the clients with the highest scores. A share of its places goes to clients drawn at random.

    The network sees (``FEATURES``) a client's rank among the candidates by size, last loss, last duration, rounds since
    its last report, and picks; whether it never reported; and how early the round is. Because it sees ranks instead of
    values, it fits federations of any scale. ``bench/scripts/fedrank_pretrain.py`` trains the weights that come with
    the library (12 hidden units) on decisions of ``oort``, ``active-fl`` and ``power-of-choice`` on synthetic data.

    Symbols: Q = :class:`.network.Network`, the random share = ``exploration``.

    Deviations: **we could read only the paper's abstract, introduction and summaries of it.** They say that clients are
    ranked by a network that is pre-trained to imitate analytical selectors with a pairwise loss, that it sees data and
    system facts at runtime, and that it keeps learning by reinforcement while in use. The features, the experts and
    the network are ours. The weights do not change in use, because we do not know the paper's rewards. The paper
    probes clients with a first local epoch for their loss and speed. Here both come from the last report.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session, Signal
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(FedRank(exploration=0.0), ClientTable(sizes=[10] * 4), seed=1)
    >>> everybody = session.ask(RoundRequest(size=4))
    >>> metrics = {Signal.LOSS: [0.1, 2.0, 0.2, 2.0], Signal.DURATION: [1.0, 1.0, 1.0, 9.0]}
    >>> session.tell(RoundReport(everybody.ticket, [0, 1, 2, 3], metrics=metrics))
    >>> session.ask(RoundRequest(size=1)).clients  # the faster of the two with large losses
    array([1])
    """

    picks_by: ClassVar[str] = (
        "A small network scores the clients, and the highest scores are picked. A few places are filled at random."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "size": "its rank among the candidates by number of samples",
        "loss": "its rank by last loss",
        "duration": "its rank by last duration",
        "age": "its rank by rounds since its last report",
        "picks": "its rank by how often it was picked",
        "unheard": "1 if it has not reported yet",
        "begin": "how early the round is, the same for all",
    }
    checked_params: ClassVar[ParamSets] = {"always random": {"exploration": 1.0}}

    exploration: float = param(0.1, Interval(float, 0, 1), "share of each cohort that is drawn at random")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exploration == 0:
            object.__setattr__(self, "starves", "without exploration, a client that ranks low is not picked")

    @property
    def requires(self) -> frozenset[Signal]:
        """Sizes, losses and durations."""
        return frozenset({Signal.SIZES, Signal.LOSS, Signal.DURATION})

    def init(self, clients: ClientTable, rng: np.random.Generator) -> RankState:
        """Start without reports."""
        return RankState.fresh(clients.n)

    def select(
        self, state: RankState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, RankState]:
        """Take the highest scores, and some clients at random."""
        columns = state.features(slate)
        score = shipped_network().score(columns)
        expected = self.exploration * slate.size
        random = min(int(expected) + int(rng.random() < expected % 1.0), slate.size)
        best = top_k(score, slate.size - random, rng)
        rest = np.setdiff1d(np.arange(len(score)), best)
        picked = np.concatenate([best, rng.permutation(rest)[:random]])
        cohort = Cohort(
            slate.candidates[picked],
            candidates=slate.candidates,
            score=score,
            parts=dict(zip(FEATURES, columns.T, strict=True)),
            notes={"drawn at random": random},
        )
        return cohort, state.after_choice(cohort)

    def update(self, state: RankState, outcome: Outcome) -> RankState:
        """Remember what the cohort reported."""
        return state.after_report(outcome)
