"""HiCS-FL: prefer clients with balanced labels, estimated from updates of the output layer's bias.

.. [Chen2024] H. Chen, H. Vikalo, "Heterogeneity-Guided Client Sampling: Towards Fast and Efficient Non-IID Federated
   Learning", NeurIPS 2024, arXiv:2310.00198.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, Optional, ParamSets, param
from fedcohort.core.plots import Intervals, Picture, SelectorRun, number_text
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.numerics.groups import angles, ward_groups
from fedcohort.selectors.numerics.recent import AskedVectors
from fedcohort.selectors.numerics.sampling import weighted_sample


def _label_entropy(updates: FloatArray, temperature: float) -> FloatArray:
    r"""Return :math:`H(\mathrm{softmax}(\Delta b / T))` (n,) of bias updates (n, C), in nats ([Chen2024]_, Eq. 7).

    >>> _label_entropy(np.array([[0.0, 0.0], [0.0, 100.0]]), 1.0).round(6) + 0.0
    array([0.693147, 0.      ])
    """
    with np.errstate(over="ignore"):  # e to the power of anything below -1000 is 0
        logits = np.maximum((updates - updates.max(axis=1, keepdims=True)) / temperature, -1000.0)
    share = np.exp(logits)
    total = share.sum(axis=1, keepdims=True)
    return np.asarray(-(share / total * (logits - np.log(total))).sum(axis=1))


def _hics_distance(updates: FloatArray, entropy: FloatArray, weight: float) -> FloatArray:
    """Return the distances (n, n) of Eq. 9 between bias updates (n, C) with estimated entropies (n,)."""
    return np.asarray(angles(updates) + weight * np.abs(entropy[:, None] - entropy))


def _sampling_chances(cluster: IntArray, entropy: FloatArray, sizes: FloatArray, preference: float) -> FloatArray:
    """Return pi_m p_k / sum of the cluster's p_j (n,) (Eq. 10); clients of a cluster without data are equally likely.

    >>> _sampling_chances(np.array([0, 0, 1]), np.array([1.0, 1.0, 1.0]), np.array([1.0, 3.0, 2.0]), 4.0)
    array([0.125, 0.375, 0.5  ])
    """
    _, group = np.unique(cluster, return_inverse=True)
    members = np.bincount(group)
    mean = np.bincount(group, entropy) / members
    # Minus the largest, so that no power overflows; it cancels in the division.
    pi = np.exp(preference * (mean - mean.max()))
    total = np.bincount(group, sizes)
    share = np.where(total[group] > 0, sizes / np.where(total > 0, total, 1.0)[group], 1 / members[group])
    return np.asarray((pi / pi.sum())[group] * share)


def _entropies(record: SelectorRun) -> Intervals | None:
    """Show the estimated label entropy of each client."""
    known, vectors = record.state["known"], record.state["vectors"]
    used = [notes["temperature"] for _, notes in record.notes if "temperature" in notes]
    if len(known) < 2 or not used:
        return None
    estimate = _label_entropy(vectors, float(used[-1]))
    middle = np.full(len(record.state["asked"]), float(estimate.mean()))
    middle[known] = estimate
    text = (
        f"{record.opening} the estimated entropy of clients' labels is between {number_text(float(estimate.min()))} "
        f"and {number_text(float(estimate.max()))}; balanced labels would have "
        f"{number_text(float(np.log(vectors.shape[1])))}. "
        f"Clients that have not reported yet are shown at the mean."
    )
    return Intervals(middle, middle, middle, text=text)


_ENTROPIES = Picture("hics-entropy", "HiCS-FL: estimated balance of clients' labels", "entropy", _entropies)


@register("hics-fl")
@dataclass(frozen=True, kw_only=True)
class HicsFL(Selector[AskedVectors]):
    r"""Draw a cluster by its mean label entropy, then a client from it by size ([Chen2024]_, Algorithm 1).

    The update of the output layer's bias shows how balanced a client's labels are (Eq. 6). The entropy estimate is
    (Eq. 7)

    .. math:: \hat H_k = H(\mathrm{softmax}(\Delta b^{(k)} / T)).

    1. In the first rounds, clients are drawn at random from those never drawn before, until all have been drawn.
    2. Then all clients are grouped into M clusters (Ward's method) by (Eq. 9)

       .. math:: \arccos\frac{\Delta b^{(u)} \cdot \Delta b^{(k)}}{\|\Delta b^{(u)}\| \|\Delta b^{(k)}\|} + \lambda
                 |\hat H_u - \hat H_k|

    3. Until K clients are found: draw cluster m with probability :math:`\pi_m \propto \exp(\gamma_t \bar H_m)`, then
       client k of it with probability :math:`p_k / \sum_{j \in m} p_j` (Eq. 10), where :math:`\gamma_t = \gamma_0 (1 -
       t / T_{rounds})`. In the end, all clusters are equally likely.

    Step 3 draws again when it hits a member of the cohort. This equals drawing without replacement by :math:`\pi_m
    p_k / \sum p_j`, which is done in one pass here and cannot loop forever.

    Symbols: Delta b = Signal.OUTPUT_BIAS_UPDATE of the client's last round, T = ``temperature``, lambda =
    ``entropy_weight``, M = ``clusters``, K = slate.size, gamma_0 = ``preference``,
    :math:`T_{rounds}` (a calligraphic T in the paper) = ``rounds``, t = round + 1, p_k = the client's size.

    The paper's temperatures, 0.0025 for Fashion-MNIST (the default) and 0.0015 for CIFAR-10, belong to a learning rate
    of 0.001. Updates grow with the learning rate and the number of steps. At a learning rate of 0.1, these temperatures
    give every client an entropy of 0.

    Deviations: a last warm-up round with fewer than K new clients is filled from the clusters; the paper leaves it
    smaller. Clients that were asked but have no estimate (they failed, or more than ``memory`` clients reported after
    them) form a separate cluster with the mean entropy; the paper's initial Delta b = 0 would give them the highest
    entropy. The paper averages the models equally (aggregator ``mean``). The authors' public code uses means of the
    output layer's weight rows instead of the bias, and switches to plain clustered sampling when the estimates vary
    little. Neither is in Algorithm 1, so neither is done here.

    Examples
    --------
    Clients 0 and 1 have balanced labels, the other ten have one class each.

    >>> from fedcohort import ClientTable, Session, Signal
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> bias = np.vstack([np.zeros((2, 5)), np.eye(5), np.eye(5)]) + 0.01 * np.arange(12)[:, None] * np.arange(5)
    >>> bias *= 0.025  # as at a small learning rate
    >>> session = Session(HicsFL(clusters=3, preference=20.0), ClientTable(sizes=[10] * 12), seed=1)
    >>> everybody = session.ask(RoundRequest(size=12))
    >>> report = {Signal.OUTPUT_BIAS_UPDATE: bias[everybody.clients]}
    >>> session.tell(RoundReport(everybody.ticket, everybody.clients, metrics=report))
    >>> sorted(session.ask(RoundRequest(size=2)).names)
    ['0', '1']
    """

    requires = frozenset({Signal.SIZES, Signal.OUTPUT_BIAS_UPDATE})

    picks_by: ClassVar[str] = (
        "Clients that were never asked come first. The others are drawn at random, first the cluster and then the "
        "client. The score is the probability of being drawn."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "entropy": "estimated evenness of its labels",
        "cluster": "number of its cluster of similar clients, -1 if none",
        "never asked": "1 if it was never asked and so comes first",
    }

    checked_params: ClassVar[ParamSets] = {
        "hot": {"temperature": 1e06},
        "one cluster": {"clusters": 1, "entropy_weight": 0.0},
        "no preference": {"preference": 0.0, "rounds": 1},
        "short memory": {"memory": 2},
    }

    pictures = (_ENTROPIES,)

    temperature: float = param(
        0.0025,
        Interval(float, 0, None, "neither"),
        "divides the bias updates before the softmax (T); the paper: 0.0025 or 0.0015 at learning rate 0.001",
    )
    entropy_weight: float = param(10.0, Interval(float, 0, None), "weight of the entropies in distances (lambda)")
    clusters: int | None = param(
        None, Optional(Interval(int, 1, None)), "number of clusters (M); None: the size of the cohort"
    )
    preference: float = param(
        4.0, Interval(float, 0, None), "preference for balanced clusters at the start (gamma_0; the paper: 4 or 2)"
    )
    rounds: int = param(
        200, Interval(int, 1, None), "rounds after which the preference has vanished (in the paper, 200)"
    )
    memory: int = param(1000, Interval(int, 2, None), "most clients whose last updates are compared")

    def init(self, clients: ClientTable, rng: np.random.Generator) -> AskedVectors:
        """Start with all clients in S_0."""
        return AskedVectors.empty(asked=np.zeros(clients.n, np.bool_))

    def select(
        self, state: AskedVectors, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, AskedVectors]:
        """Take clients from S_0 while there are any, then draw by cluster."""
        candidates, asked = slate.candidates, slate.of_candidates(state.asked)
        new = np.flatnonzero(~asked)
        picks = rng.choice(new, min(len(new), slate.size), replace=False)
        chance = np.where(asked, 0.0, 1.0)
        entropy, cluster = np.full(len(candidates), np.nan), np.full(len(candidates), -1)
        annealed = self.preference * max(0.0, 1 - (slate.round + 1) / self.rounds)
        notes: dict[str, str | float | int] = {"asked for the first time": len(picks), "gamma": annealed}
        if len(picks) < slate.size:
            rows = state.rows_of(candidates)
            known = np.flatnonzero(asked & (rows >= 0))
            if len(known):
                vectors = state.vectors[rows[known]]
                entropy[known] = _label_entropy(vectors, self.temperature)
                apart = _hics_distance(vectors, entropy[known], self.entropy_weight)
                cluster[known] = ward_groups(apart, self.clusters or slate.size)
                notes |= {"temperature": self.temperature, "clusters": int(cluster.max()) + 1}
            rest = np.flatnonzero(asked)
            sizes = np.asarray(slate.of_candidates(slate.clients.sizes), np.float64)[rest]
            # Clients without an estimate are one cluster of mean entropy, neither favoured nor left out.
            mean = float(np.nanmean(entropy)) if len(known) else 0.0
            estimate = np.where(np.isnan(entropy[rest]), mean, entropy[rest])
            chance[rest] = _sampling_chances(cluster[rest], estimate, sizes, annealed)
            drawn = weighted_sample(chance[rest], slate.size - len(picks), rng)
            picks = np.concatenate([picks, rest[drawn]])
        # S_0 is left when a client is asked. One that always fails would otherwise keep the warm-up from ending.
        now = state.asked.copy()
        now[candidates[picks]] = True
        cohort = Cohort(
            candidates[picks],
            candidates=candidates,
            score=chance,
            parts={
                "entropy": np.where(np.isnan(entropy), 0.0, entropy),
                "cluster": cluster.astype(np.float64),
                "never asked": (~asked).astype(np.float64),
            },
            notes=notes,
        )
        return cohort, AskedVectors(state.known, state.when, state.vectors, now)

    def update(self, state: AskedVectors, outcome: Outcome) -> AskedVectors:
        """Remember the bias updates."""
        ok = outcome.ok
        return state.with_reports(
            outcome.clients[ok], outcome[Signal.OUTPUT_BIAS_UPDATE][ok], outcome.round, self.memory
        )
