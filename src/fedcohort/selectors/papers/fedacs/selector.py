r"""FedACS: prefer clients whose data is not skewed, found out by letting their gradients duel.

.. [Wang2021] Z. Wang, Y. Zhu, D. Wang, Z. Han, "FedACS: Federated Skewness Analytics in Heterogeneous Decentralized
   Data Environments", IWQoS 2021.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, sealed
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, OneOf, param
from fedcohort.core.plots import (
    Intervals,
    Picture,
    SelectorRun,
    agreement_text,
    beta_interval,
    number_text,
    rank_correlation,
)
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.numerics.thompson import beta_draws
from fedcohort.selectors.papers.fedacs.pool import repeated_argmax
from fedcohort.selectors.papers.fedacs.ranking import ranking
from fedcohort.selectors.ranking import Ranker, Ranking

EXACT_UP_TO = 20_000  # candidates; a pool of 0.4 of them takes about half a second then


@dataclass(frozen=True)
class FedAcsState:
    """The duels so far."""

    wins: FloatArray = per_client()  # (N,) A_i, times eta
    losses: FloatArray = per_client()  # (N,) B_i, times eta
    rounds: FloatArray = per_client()  # (N,) rounds in which the client duelled
    played: int = 0  # rounds in which duels were possible
    counted: int = 0  # those whose duels counted


def _skewness(record: SelectorRun) -> Intervals:
    """Show each client's chance to win a duel of low skewness, as its duels so far estimate it."""
    won, lost, rounds = record.state["wins"], record.state["losses"], record.state["rounds"]
    middle = (won + 1) / (won + lost + 2)
    low, high = beta_interval(won + 1, lost + 1)
    notes = [f"duelled in {number_text(count)} round{'s' * (count != 1)}" for count in rounds.tolist()]

    def record_of(client: int) -> str:
        fought = float(won[client] + lost[client])
        return f"won {won[client] / fought:.0%} of its duels" if fought else "never in a duel"

    order = np.argsort(-middle, kind="stable")
    first, last = int(order[0]), int(order[-1])
    text = (
        f"{record.opening} client {first} is ranked as the least skewed ({record_of(first)}) and client {last} as the "
        f"most ({record_of(last)})"
    )
    if record.label_counts is not None:
        share = record.label_counts / np.maximum(record.label_counts.sum(axis=1, keepdims=True), 1)
        text += "; " + _judged(rank_correlation(middle, ((share - 1 / share.shape[1]) ** 2).sum(axis=1)))
    return Intervals(middle, low, high, notes, text + ".")


def _judged(correlation: float) -> str:
    """Say whether winning goes with low skewness, as it should."""
    if math.isnan(correlation):
        return "but all clients are equally skewed, or all are ranked alike, so there is nothing to agree with"
    return agreement_text(
        correlation,
        perfect=-1,
        good="the more skewed a client truly is, the fewer duels it is expected to win, as it should be",
        bad="the more skewed a client truly is, the more duels it is expected to win, the wrong way round",
        none="the ranking says little about the clients' true skewness",
    )


@register("fedacs")
@dataclass(frozen=True, kw_only=True)
class FedAcs(Selector[FedAcsState], Ranker):
    r"""Draw the cohort from a pool of clients that win duels of skewness ([Wang2021]_, Algorithms 1 and 2).

    A client's reward in a round is minus the distance of its gradient to the cohort's mean gradient (Eq. 14),

    .. math:: R_i = -\lVert \Delta w_i - \overline{\Delta w} \rVert_2,

    which by Hoeffding's inequality is the smaller the more its labels are skewed. Every two clients of a cohort duel:
    the one with the larger reward gets A_i + eta, the other B_j + eta; equal rewards change nothing. A pool of
    lambda * N clients is formed by repeated Thompson sampling (draw :math:`\theta_i \sim Beta(A_i + 1, B_i + 1)` for
    everybody left, take the largest), and the cohort is drawn from the pool uniformly.

    **When duels count.** The distance to the mean tells skewness only where the mean is what unskewed clients have.
    Where every client is skewed, gradients point apart and the shortest wins, so that clients whose classes the model
    has learnt fill the pool and the others are forgotten. So by default (``duels="near"``) a round's duels count when
    at least two clients are *near* the others, that is nearer to the mean gradient of the others than no gradient at
    all would be,

    .. math:: \lVert \Delta w_i - \overline{\Delta w}_{-i} \rVert < \lVert \overline{\Delta w}_{-i} \rVert.

    In a federation that has unskewed clients that is so in nearly every round; in one that has none nearly never, and
    cohorts are then uniform. The paper counts every duel (``duels="all"``).

    Symbols: A_i = ``wins``, B_i = ``losses``, eta = ``eta``, lambda = ``pool_share``, kappa = the cohort's size,
    Delta w_i = ``insight``.

    Deviations from the paper: which duels count, as above. Every client counts once in the mean, where Appendix B
    weights it by samples (``mean="samples"``): its estimate of the mean gradient is the better for it, but the bound
    that ranks clients by their distances needs equal sample numbers, and a weighted mean lies nearest to those with the
    most samples, skewed or not. With equal sizes, as in the paper's experiments, the two are the same. N in lambda * N
    is the number of candidates, since only they can be in the pool; the pool has at least kappa clients. The paper
    derives its reward for the full-batch gradient at the received model (Eqs. 6 to 8) and then takes the weight change
    after local training, which measures drift rather than skew; the gradient is the default here
    (``insight="gradient"``), the weight change is ``insight="update"``. A client that delivers no sound reply does not
    duel. The pool is drawn without the lambda * N * N draws of Algorithm 1 but exact in distribution (``pool.py``).
    Beyond 20,000 candidates it is the top of one Thompson draw per candidate; the note "pool" of the cohort says which
    of the two it was.

    Examples
    --------
    >>> import numpy as np
    >>> from fedcohort.core.clients import ClientTable
    >>> from fedcohort.core.protocol import Slate
    >>> state = FedAcsState(
    ...     wins=np.array([90.0, 5.0, 80.0, 20.0]), losses=np.array([10.0, 95.0, 20.0, 80.0]), rounds=np.full(4, 33.0)
    ... )
    >>> slate = Slate(round=99, size=1, candidates=np.arange(4), clients=ClientTable(n=4))
    >>> cohort, _ = FedAcs(pool_share=0.5).select(state, slate, None, np.random.default_rng(0))
    >>> cohort.score  # clients 0 and 2 are the pool
    array([1., 0., 1., 0.])
    >>> int(cohort.clients[0]) in (0, 2)
    True
    """

    starves = "a client that keeps losing its duels stays out of the pool on purpose"

    pictures = (
        Picture(
            "fedacs-skewness",
            "FedACS: clients ranked by skewness",
            "chance to win a duel of low skew",
            _skewness,
            share=True,
        ),
    )

    pool_share: float = param(
        0.4, Interval(float, 0, 1, "right"), "tolerance of skew: the pool's share of all candidates (lambda)"
    )
    eta: float = param(1.0, Interval(float, 0, None, "neither"), "what one duel counts (eta)")
    duels: str = param(
        "near",
        OneOf(("near", "all")),
        "whose rounds' duels count: those in which two clients are near the others, or all, as in the paper",
    )
    insight: str = param(
        "gradient", OneOf(("gradient", "update")), "what duels: gradient at the received model, or the local update"
    )
    mean: str = param(
        "clients", OneOf(("clients", "samples")), "what counts once in the cohort's mean: a client, or a sample"
    )

    @property
    def requires(self) -> frozenset[Signal]:
        """The distance to the cohort's mean, of gradients or of updates; unless all duels count what shows who is near.

        That is the norm, and where the mean is one of samples the sizes.
        """
        if self.duels == "all":
            return frozenset({self._distance})
        return frozenset({self._distance, self._norm} | ({Signal.SIZES} if self.mean == "samples" else set()))

    @property
    def _norm(self) -> Signal:
        return Signal.GRADIENT_NORM if self.insight == "gradient" else Signal.UPDATE_NORM

    @classmethod
    def for_ranking(cls) -> Self:
        """Return FedACS with uniform cohorts, whose clients duel by their updates."""
        return cls(pool_share=1.0, insight="update", duels="all")

    @classmethod
    def ranked(cls, state: Mapping[str, Any], level: float) -> Ranking:
        """Rank by the duels on record."""
        return ranking(FedAcsState(**state), level)

    @property
    def _distance(self) -> Signal:
        if self.mean == "clients":
            return Signal.GRADIENT_DISTANCE if self.insight == "gradient" else Signal.UPDATE_DISTANCE
        return Signal.WEIGHTED_GRADIENT_DISTANCE if self.insight == "gradient" else Signal.WEIGHTED_UPDATE_DISTANCE

    def init(self, clients: ClientTable, rng: np.random.Generator) -> FedAcsState:
        """Nobody has duelled."""
        zeros = sealed(np.zeros(clients.n))
        return FedAcsState(wins=zeros, losses=zeros, rounds=zeros)

    def select(
        self, state: FedAcsState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, FedAcsState]:
        """Form the pool and draw the cohort from it."""
        alpha = slate.of_candidates(state.wins) + 1
        beta = slate.of_candidates(state.losses) + 1
        count = len(slate.candidates)
        pool_size = min(max(slate.size, round(self.pool_share * count)), count)
        parts: dict[str, FloatArray] = {"estimated win rate": alpha / (alpha + beta)}
        if pool_size == count:
            how, pool = "everybody", np.arange(count)
        elif count <= EXACT_UP_TO:
            how, pool = "exact", repeated_argmax(alpha, beta, pool_size, rng)
        else:
            parts["draw"] = beta_draws(alpha, beta, rng)
            how = "one draw per client"
            pool = np.argpartition(parts["draw"], count - pool_size)[count - pool_size :]
        member = np.zeros(count)
        member[pool] = 1
        cohort = Cohort(
            clients=slate.candidates[rng.choice(pool, slate.size, replace=False)],
            candidates=slate.candidates,
            score=member,
            parts=parts,
            notes={"pool": how, "pool size": pool_size, "duels counted": f"{state.counted} of {state.played} rounds"},
        )
        return cohort, state

    def update(self, state: FedAcsState, outcome: Outcome) -> FedAcsState:
        """Let everybody who delivered duel with everybody else (Algorithm 2)."""
        distance = outcome[self._distance]
        there = outcome.ok & np.isfinite(distance)
        if self.duels == "near":
            norm = outcome[self._norm]
            there &= np.isfinite(norm)
        who = outcome.clients[there]
        if len(who) < 2:
            return state
        if self.duels == "near":
            samples = outcome.table.sizes[who] if self.mean == "samples" else np.ones(len(who))
            if near(distance[there], norm[there], samples).sum() < 2:
                return dataclasses.replace(state, played=state.played + 1)
        won, lost = duels(-distance[there])
        wins, losses, rounds = state.wins.copy(), state.losses.copy(), state.rounds.copy()
        wins[who] += self.eta * won
        losses[who] += self.eta * lost
        rounds[who] += 1
        return FedAcsState(
            wins=sealed(wins),
            losses=sealed(losses),
            rounds=sealed(rounds),
            played=state.played + 1,
            counted=state.counted + 1,
        )


def near(distance: FloatArray, norm: FloatArray, samples: FloatArray) -> BoolArray:
    r"""Return whose vector is nearer to the mean of the others' than the origin is.

    Nothing but lengths is needed. With vectors :math:`g_i` of weights :math:`p_i` that sum to 1, mean :math:`m = \sum_i
    p_i g_i`, norms :math:`n_i` and distances :math:`d_i = \lVert g_i - m \rVert`:

    .. math::

        \lVert m \rVert^2 &= \textstyle\sum_i p_i (n_i^2 - d_i^2), \qquad
        g_i^\top m = (n_i^2 + \lVert m \rVert^2 - d_i^2) / 2 \\
        m_{-i} &= (m - p_i g_i) / (1 - p_i), \qquad \lVert g_i - m_{-i} \rVert = d_i / (1 - p_i)

    Parameters
    ----------
    distance, norm : (k,) float array
        Of at least two vectors: distances to their mean, and lengths.
    samples : (k,) float array
        How often each counts in the mean. Who has all of them is not near the others, who have none; all zero counts as
        all equal.

    Examples
    --------
    Three vectors that nearly agree, and one far off.

    >>> vectors = np.array([[1.0, 0.1], [1.0, -0.1], [1.0, 0.0], [0.0, 3.0]])
    >>> distance = np.linalg.norm(vectors - vectors.mean(axis=0), axis=1)
    >>> near(distance, np.linalg.norm(vectors, axis=1), np.ones(4))
    array([ True,  True,  True, False])
    """
    total = float(samples.sum())
    p = samples / total if total > 0 else np.full(len(samples), 1.0 / len(samples))
    mean = max(0.0, float(p @ (norm**2 - distance**2)))
    product = (norm**2 + mean - distance**2) / 2
    others = mean - 2 * p * product + (p * norm) ** 2  # times (1 - p)^2, as the distance
    return np.asarray((distance**2 < others) & (p < 1))


def duels(rewards: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return how many others each one beats and by how many it is beaten; equals do neither. O(k log k).

    Parameters
    ----------
    rewards : (k,) float array
        Finite, higher is better.

    Returns
    -------
    wins, losses : (k,) float array

    Examples
    --------
    >>> wins, losses = duels(np.array([3.0, 1.0, 3.0]))
    >>> wins.tolist(), losses.tolist()
    ([1.0, 0.0, 1.0], [0.0, 2.0, 0.0])
    """
    ordered = np.sort(rewards)
    wins = np.searchsorted(ordered, rewards, side="left")
    losses = len(rewards) - np.searchsorted(ordered, rewards, side="right")
    return wins.astype(np.float64), losses.astype(np.float64)
