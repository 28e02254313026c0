"""FedSTaS: draw clients from strata with similar updates, more from strata that vary more.

.. [Slessor2024] J. Slessor, D. Kong, X. Tang, Z. E. Than, L. Kong, "FedSTaS: Client Stratification and Client Level
   Sampling for Efficient Federated Learning", arXiv 2412.14226, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.numerics.groups import distances, scale_down, ward_groups
from fedcohort.selectors.numerics.recent import RecentVectors
from fedcohort.selectors.numerics.sampling import inclusion_probabilities, systematic_sample

_LEAST_NORM = 1e-3  # least norm of a client relative to the mean of its stratum; bounds the weights


@register("fedstas")
@dataclass(frozen=True, kw_only=True)
class FedStas(Selector[RecentVectors]):
    r"""Divide clients into strata with similar updates, and draw from each stratum by norm ([Slessor2024]_).

    1. Clients are clustered into H strata by their compressed gradients :math:`Z_k`.
    2. Stratum h of :math:`N_h` clients gets

       .. math:: m_h = m \frac{N_h S_h}{\sum_{g=1}^{H} N_g S_g}, \qquad
                 S_h^2 = \frac{1}{N_h - 1} \sum_{k \in h} \|Z_k - \bar Z_h\|^2

       of the m places of the cohort (Neyman's allocation, which has the least variance).
    3. Within a stratum, client k is drawn with probability :math:`p_k = \|Z_k\| / \sum_{j \in h} \|Z_j\|`.
    4. The clients drawn train on a random share of their samples.
    5. In the average, every stratum has its share of all clients. Client k counts
       :math:`\frac{N_h}{N} \frac{1}{m_h} \frac{1}{N_h p_k}`.

    Symbols: Z_k = Signal.UPDATE_SKETCH, H = ``strata``, m = slate.size, the share of step 4 = ``data_share``.

    Deviations: **we could not get the paper itself.** This follows summaries of it and the authors' code. There, all
    clients send compressed gradients before every round. Here Z_k is a sketch of the client's last update, which costs
    nothing. Strata are cut from Ward's tree instead of k-means, which depends on its random start. Every stratum has
    at least one place and at most :math:`N_h`, because the average would be biased otherwise. With fewer places than
    strata, there are fewer strata. Places are whole numbers, so m_h is rounded to the nearest that fit. Within a
    stratum, exactly m_h clients are drawn, with probabilities :math:`\min(1, c \|Z_k\|)`. The weights of a stratum are
    divided by their sum and multiplied by its share of all *samples*, so that they sum to 1. Without this division, one
    client of a large stratum counts many times, and training diverged for some seeds on digits. Clients that have not
    reported yet (or were forgotten because more than ``memory`` others reported since) form a separate stratum with
    the mean :math:`S_h` of the others, and are equally likely. The share of the samples is a share of the local steps,
    which is the same if clients train for one epoch. The paper's private estimate of the number of samples is
    therefore not needed.

    **Aggregator**: one that multiplies the weights by each client's share of the samples, like the default ``fedavg``.

    Examples
    --------
    Four clients have the same update and four differ. Of the first four, one is enough.

    >>> from fedcohort import ClientTable, Session, Signal
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> session = Session(FedStas(strata=2), ClientTable(sizes=[10] * 8), seed=0)
    >>> everybody = session.ask(RoundRequest(size=8))
    >>> sketch = np.zeros((8, 64))
    >>> sketch[:4, 0] = 1.0
    >>> sketch[4:, 10] = -9.0
    >>> sketch[4:] += np.eye(4, 64)
    >>> report = {Signal.UPDATE_SKETCH: sketch[everybody.clients]}
    >>> session.tell(RoundReport(everybody.ticket, everybody.clients, metrics=report))
    >>> cohort = session.ask(RoundRequest(size=4))
    >>> int((cohort.clients < 4).sum()), cohort.weights[cohort.clients < 4]  # it counts for all four
    (1, array([4.]))
    """

    picks_by: ClassVar[str] = (
        "Clients are divided into strata with similar updates. Each stratum has its places, which are drawn at random."
        " The score is the probability of being drawn."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "norm": "length of its last update",
        "stratum": "number of its stratum; clients that have not reported yet share one",
    }

    checked_params: ClassVar[ParamSets] = {
        "one stratum": {"strata": 1, "data_share": 1.0},
        "short memory": {"memory": 2},
    }

    strata: int = param(10, Interval(int, 1, None), "number of strata (H)")
    data_share: float = param(0.5, Interval(float, 0, 1, "right"), "share of its samples that a client trains on")
    memory: int = param(1000, Interval(int, 2, None), "most clients whose last updates are compared")

    @property
    def requires(self) -> frozenset[Signal]:
        """Data sizes and sketches of updates."""
        return frozenset({Signal.SIZES, Signal.UPDATE_SKETCH})

    def init(self, clients: ClientTable, rng: np.random.Generator) -> RecentVectors:
        """Start without updates."""
        return RecentVectors.empty()

    def select(
        self, state: RecentVectors, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, RecentVectors]:
        """Form the strata, allocate the places, and draw."""
        rows = state.rows_of(slate.candidates)
        known = np.flatnonzero(rows >= 0)
        sketches = scale_down(state.vectors[rows[known]])
        has_unknown = len(known) < len(rows)
        stratum = np.zeros(len(rows), np.int64)  # unknown clients, if there are any, are stratum 0
        norm = np.ones(len(rows))
        if len(known):
            groups = ward_groups(distances(sketches), max(1, min(self.strata, slate.size - has_unknown)))
            stratum[known] = groups + has_unknown
            norm[known] = np.linalg.norm(sketches, axis=1)
            if slate.size < 2:
                stratum[:] = 0  # one place cannot be divided among strata
                norm[rows < 0] = norm[known].mean()
        spread = spreads(sketches, stratum[known], int(stratum.max()) + 1)
        places = allocation(np.bincount(stratum), spread, slate.size)
        chance = np.empty(len(rows))
        for h, count in enumerate(places):
            members = np.flatnonzero(stratum == h)
            least = _LEAST_NORM * float(norm[members].mean())
            chance[members] = inclusion_probabilities(np.maximum(norm[members], least), int(count))
        sizes = np.asarray(slate.of_candidates(slate.clients.sizes), np.float64)
        picked = np.concatenate(
            [np.flatnonzero(stratum == h)[systematic_sample(chance[stratum == h], rng)] for h in range(len(places))]
        )
        total = np.asarray(np.bincount(stratum, sizes), np.float64)
        cohort = Cohort(
            slate.candidates[picked],
            candidates=slate.candidates,
            score=chance,
            parts={"norm": norm, "stratum": stratum.astype(np.float64)},
            weights=stratum_weights(chance[picked], stratum[picked], sizes[picked], total),
            work=np.full(len(picked), self.data_share),
            notes={"strata": len(places), "clients not heard yet": int((rows < 0).sum())},
        )
        return cohort, state

    def update(self, state: RecentVectors, outcome: Outcome) -> RecentVectors:
        """Remember the sketches."""
        ok = outcome.ok
        return state.with_reports(outcome.clients[ok], outcome[Signal.UPDATE_SKETCH][ok], outcome.round, self.memory)


def stratum_weights(chance: FloatArray, stratum: IntArray, sizes: FloatArray, total: FloatArray) -> FloatArray:
    """Return the weight of each client drawn (k,), by which the aggregator multiplies its size.

    The clients of a stratum together count for all of its samples. Among them, a client counts 1 / ``chance``.

    Parameters
    ----------
    chance, stratum, sizes : (k,) arrays
        Of the clients drawn: the probability of being drawn, the stratum, the number of samples.
    total : (H,) float array
        Samples of each stratum.

    Examples
    --------
    >>> stratum_weights(np.array([0.5, 0.25, 1.0]), np.array([0, 0, 1]), np.array([10.0, 10.0, 5.0]), np.array([60, 5]))
    array([2., 4., 1.])
    """
    counted = np.bincount(stratum, sizes / chance, len(total))
    scale = np.divide(total, counted, out=np.ones(len(total)), where=counted > 0)
    return np.asarray(scale[stratum] / chance)


def spreads(vectors: FloatArray, stratum: IntArray, count: int) -> FloatArray:
    """Return S_h (count,) of vectors (n, V) in their strata; a stratum with fewer than two has the others' mean.

    >>> spreads(np.array([[0.0], [2.0], [5.0]]), np.array([1, 1, 2]), 3).round(3)
    array([1.414, 1.414, 1.414])
    """
    spread = np.full(count, np.nan)
    for h in range(count):
        stratum_vectors = vectors[stratum == h]
        if len(stratum_vectors) > 1:
            spread[h] = np.sqrt(
                ((stratum_vectors - stratum_vectors.mean(axis=0)) ** 2).sum() / (len(stratum_vectors) - 1)
            )
    known = ~np.isnan(spread)
    return np.where(known, spread, spread[known].mean() if known.any() else 1.0)


def allocation(sizes: IntArray, spread: FloatArray, m: int) -> IntArray:
    """Return how many of m places each stratum gets: in proportion to N_h S_h, at least one and at most N_h.

    After rounding, missing places go to the strata that lack most, and surplus places are taken where least is lacking.

    >>> allocation(np.array([10, 10, 2]), np.array([3.0, 1.0, 9.0]), 6)
    array([3, 1, 2])
    """
    m = min(m, int(sizes.sum()))
    weight = sizes * spread
    ideal = m * (weight / weight.sum() if weight.sum() > 0 else sizes / sizes.sum())
    places = np.clip(np.floor(ideal).astype(np.int64), 1, sizes)
    while places.sum() < m:
        places[np.argmax(np.where(places < sizes, ideal - places, -np.inf))] += 1
    while places.sum() > m:
        places[np.argmin(np.where(places > 1, ideal - places, np.inf))] -= 1
    return np.asarray(places)
