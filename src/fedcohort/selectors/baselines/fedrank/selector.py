"""FedRank: clients ranked by a network that has learned from other selectors.

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
from fedcohort.selectors.baselines.fedrank.network import FEATURES, features, shipped

_LARGEST = 1e100  # losses and durations are cut off here


@dataclass(frozen=True)
class RankState:
    """What is known of each client."""

    loss: FloatArray = per_client()  # (N,) at the last report; NaN before
    seconds: FloatArray = per_client()  # (N,) at the last report; NaN before
    last: FloatArray = per_client()  # (N,) round of the last report; NaN before
    picks: FloatArray = per_client()  # (N,) cohorts it was in

    @classmethod
    def fresh(cls, n: int) -> RankState:
        """Nothing is known."""
        unknown = np.full(n, np.nan)
        return cls(loss=unknown, seconds=unknown, last=unknown, picks=np.zeros(n))

    def features(self, slate: Slate) -> FloatArray:
        """(c, F) what the network sees of the candidates."""
        return features(
            size=np.asarray(slate.of_candidates(slate.clients.sizes), np.float64),
            loss=slate.of_candidates(self.loss),
            seconds=slate.of_candidates(self.seconds),
            last=slate.of_candidates(self.last),
            picks=slate.of_candidates(self.picks),
            round_=slate.round,
        )

    def after_choice(self, cohort: Cohort) -> RankState:
        """Count the picks."""
        picks = self.picks.copy()
        picks[cohort.clients] += 1
        return RankState(self.loss, self.seconds, self.last, picks)

    def after_report(self, outcome: Outcome) -> RankState:
        """Take in losses and durations."""
        who = outcome.clients[outcome.ok]
        loss, seconds, last = self.loss.copy(), self.seconds.copy(), self.last.copy()
        loss[who] = np.clip(outcome[Signal.LOSS][outcome.ok], -_LARGEST, _LARGEST)
        seconds[who] = np.clip(outcome[Signal.DURATION][outcome.ok], 0.0, _LARGEST)
        last[who] = outcome.round
        return RankState(loss, seconds, last, self.picks)


@register("fedrank")
@dataclass(frozen=True, kw_only=True)
class FedRank(Selector[RankState]):
    r"""The top of the scores of a network that was trained by imitation ([Tian2024]_).

    A network :math:`Q(x_i)` scores each client by what is known of its data and its speed. It was trained on decisions
    of analytical selectors in simulated federations, to put clients they chose before clients they left: for a chosen i
    and a client j that was left, RankNet's loss is

    .. math:: \log\left(1 + e^{-(Q(x_i) - Q(x_j))}\right).

    The cohort is the top of the scores; a share of its places goes to clients drawn at random.

    What the network sees (``FEATURES``): the place of a client among the candidates by size, last loss, last duration,
    rounds since its last report and picks; whether it was never heard; and how early the round is. Places instead of
    values make it fit federations of any scale. ``bench/fedrank_pretrain.py`` makes the weights that come with the
    library (12 hidden units) from decisions of ``oort``, ``active-fl`` and ``power-of-choice`` on synthetic data.

    Symbols: Q = :class:`.network.Network`, the random share = ``exploration``.

    Deviations: **of the paper only abstract, introduction and summaries could be read.** They say that clients are
    ranked by a network, pre-trained by imitation of analytical selectors with a pairwise loss, that it sees data and
    system at runtime, and that it goes on to learn by reinforcement while it is used. The features, the experts and the
    network are ours. The weights do not change while it is used, because the paper's rewards are not known here. The
    paper probes clients with a first local epoch for their loss and speed; here both are those of the last report.

    Examples
    --------
    >>> from fedcohort import ClientTable, Session, Signal
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(FedRank(exploration=0.0), ClientTable(sizes=[10] * 4), seed=1)
    >>> everybody = session.ask(RoundRequest(size=4))
    >>> metrics = {Signal.LOSS: [0.1, 2.0, 0.2, 2.0], Signal.DURATION: [1.0, 1.0, 1.0, 9.0]}
    >>> session.tell(RoundReport(everybody.ticket, [0, 1, 2, 3], metrics=metrics))
    >>> session.ask(RoundRequest(size=1)).clients  # the faster one of those with large losses
    array([1])
    """

    picks_by: ClassVar[str] = (
        "A small network scores the clients and the highest scores are picked; a few places are filled by chance."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "size": "its place among the candidates by number of samples",
        "loss": "its place by last loss",
        "duration": "its place by last duration",
        "age": "its place by rounds since its last report",
        "picks": "its place by how often it was picked",
        "unheard": "1 if it has not reported yet",
        "begin": "how early the round is, the same for all",
    }
    checked_params: ClassVar[ParamSets] = {"always random": {"exploration": 1.0}}

    exploration: float = param(0.1, Interval(float, 0, 1), "share of each cohort that is drawn at random")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exploration == 0:
            object.__setattr__(self, "starves", "without exploration a client that ranks low is not picked")

    @property
    def requires(self) -> frozenset[Signal]:
        """Sizes, losses and durations."""
        return frozenset({Signal.SIZES, Signal.LOSS, Signal.DURATION})

    def init(self, clients: ClientTable, rng: np.random.Generator) -> RankState:
        """Nothing is known."""
        return RankState.fresh(clients.n)

    def select(
        self, state: RankState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, RankState]:
        """Take the top of the scores, and some at random."""
        seen = state.features(slate)
        score = shipped().score(seen)
        wanted = self.exploration * slate.size
        chance = min(int(wanted) + int(rng.random() < wanted % 1.0), slate.size)
        best = top_k(score, slate.size - chance, rng)
        rest = np.setdiff1d(np.arange(len(score)), best)
        picked = np.concatenate([best, rng.permutation(rest)[:chance]])
        cohort = Cohort(
            slate.candidates[picked],
            candidates=slate.candidates,
            score=score,
            parts=dict(zip(FEATURES, seen.T, strict=True)),
            notes={"drawn at random": chance},
        )
        return cohort, state.after_choice(cohort)

    def update(self, state: RankState, outcome: Outcome) -> RankState:
        """Take in what the cohort reported."""
        return state.after_report(outcome)
