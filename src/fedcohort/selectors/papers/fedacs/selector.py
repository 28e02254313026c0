r"""FedACS: prefer clients whose data is not skewed, found by duels of their gradients.

.. [Wang2021] Z. Wang, Y. Zhu, D. Wang, Z. Han, "FedACS: Federated Skewness Analytics in Heterogeneous Decentralized
   Data Environments", IWQoS 2021.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.params import Interval, OneOf, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.numerics.sampling import beta_draws
from fedcohort.selectors.papers.fedacs.plots import SKEWNESS
from fedcohort.selectors.papers.fedacs.pool import repeated_argmax

_EXACT_UP_TO = 20_000  # candidates; a pool of 40% of them takes about half a second


@dataclass(frozen=True)
class FedAcsState:
    """The duels so far."""

    wins: FloatArray = per_client()  # (N,) A_i, times eta
    losses: FloatArray = per_client()  # (N,) B_i, times eta
    rounds: FloatArray = per_client()  # (N,) rounds in which the client duelled


@register("fedacs")
@dataclass(frozen=True, kw_only=True)
class FedAcs(Selector[FedAcsState]):
    r"""Draw the cohort from a pool of clients that win duels for low skewness ([Wang2021]_, Algorithms 1 and 2).

    A client's reward in a round is minus the distance of its gradient from the cohort's mean gradient (Eq. 14),

    .. math:: R_i = -\lVert \Delta w_i - \overline{\Delta w} \rVert_2,

    which, by Hoeffding's inequality, is smaller the more its labels are skewed. Every two clients of a cohort duel:
    the one with the larger reward gets A_i + eta, the other B_j + eta. Equal rewards change nothing. A pool of
    lambda * N clients is formed by repeated Thompson sampling (draw :math:`\theta_i \sim Beta(A_i + 1, B_i + 1)` for
    every client left, take the largest), and the cohort is drawn uniformly from the pool.

    Symbols: A_i = ``wins``, B_i = ``losses``, eta = ``eta``, lambda = ``pool_share``, kappa = the cohort's size,
    Delta w_i = ``insight``.

    Deviations from the paper: with more than 20,000 candidates, the pool is the top of one Thompson draw per candidate,
    which costs N draws instead of lambda * N * N but has another distribution. The cohort's note "pool" says so. Up to
    20,000 candidates the pool has exactly the distribution of Algorithm 1, also without that many draws (``pool.py``).

    The paper leaves some points open. The reward is derived for the full-batch gradient at the received model (Eqs. 6
    to 8), but the paper also calls the weight change after local training a gradient, which measures drift rather than
    skew. The default is the gradient of the formulas (``insight="gradient"``); the weight change is
    ``insight="update"``. Every client counts once in the mean (Eq. 27). N in lambda * N is the number of candidates,
    since only they can be in the pool. The pool has at least kappa clients. A client that delivers no valid reply does
    not duel.

    If every client is skewed, gradients point apart and the shortest one wins, so clients whose classes the model has
    learnt fill the pool.

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

    picks_by: ClassVar[str] = (
        "Clients that win duels enter the pool (score 1) by a random draw from their posterior. The cohort is drawn "
        "from the pool at random."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "estimated win rate": "share of duels it is expected to win; the higher, the less skewed its labels",
        "draw": "the random draw from the posterior of its win rate",
    }

    checked_params: ClassVar[ParamSets] = {
        "update": {"insight": "update"},
        "smallest pool": {"pool_share": 1e-06, "eta": 100.0},
        "everybody": {"pool_share": 1.0, "eta": 1e-06},
    }

    starves = "a client that keeps losing its duels stays out of the pool on purpose"

    pictures = (SKEWNESS,)

    pool_share: float = param(
        0.4, Interval(float, 0, 1, "right"), "tolerance of skew: the pool as a share of all candidates (lambda)"
    )
    eta: float = param(1.0, Interval(float, 0, None, "neither"), "how much one duel counts (eta)")
    insight: str = param(
        "gradient",
        OneOf(("gradient", "update")),
        "what is compared in duels: the gradient at the received model, or the local update",
    )

    @property
    def requires(self) -> frozenset[Signal]:
        """The distance of gradients or updates from the cohort's mean."""
        return frozenset({Signal.GRADIENT_DISTANCE if self.insight == "gradient" else Signal.UPDATE_DISTANCE})

    def init(self, clients: ClientTable, rng: np.random.Generator) -> FedAcsState:
        """Start without duels."""
        zeros = np.zeros(clients.n)
        return FedAcsState(wins=zeros, losses=zeros, rounds=zeros)

    def select(
        self, state: FedAcsState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, FedAcsState]:
        """Form the pool and draw the cohort from it."""
        alpha = slate.of_candidates(state.wins) + 1
        beta = slate.of_candidates(state.losses) + 1
        count = len(slate.candidates)
        # At least the cohort: a small lambda would otherwise make it smaller than the host asked for.
        pool_size = min(max(slate.size, round(self.pool_share * count)), count)
        parts: dict[str, FloatArray] = {"estimated win rate": alpha / (alpha + beta)}
        # A pool of all needs no draws, and very large federations cannot afford the exact distribution.
        if pool_size == count:
            how, pool = "everybody", np.arange(count)
        elif count <= _EXACT_UP_TO:
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
            notes={"pool": how, "pool size": pool_size},
        )
        return cohort, state

    def update(self, state: FedAcsState, outcome: Outcome) -> FedAcsState:
        """Let the clients that delivered duel with each other (Algorithm 2)."""
        (signal,) = self.requires
        distance = outcome[signal]
        usable = outcome.ok & np.isfinite(distance)
        clients = outcome.clients[usable]
        # One client alone has nobody to duel with, and is at distance 0 from its own mean.
        if len(clients) < 2:
            return state
        won, lost = _duels(-distance[usable])
        wins, losses, rounds = state.wins.copy(), state.losses.copy(), state.rounds.copy()
        wins[clients] += self.eta * won
        losses[clients] += self.eta * lost
        rounds[clients] += 1
        return dataclasses.replace(state, wins=wins, losses=losses, rounds=rounds)


def _duels(rewards: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return how many others each reward beats, and how many beat it; ties count for neither. O(k log k).

    Parameters
    ----------
    rewards : (k,) float array
        Finite, higher is better.

    Returns
    -------
    wins, losses : (k,) float array

    Examples
    --------
    >>> wins, losses = _duels(np.array([3.0, 1.0, 3.0]))
    >>> wins.tolist(), losses.tolist()
    ([1.0, 0.0, 1.0], [0.0, 2.0, 0.0])
    """
    ordered = np.sort(rewards)
    wins = np.searchsorted(ordered, rewards, side="left")
    losses = len(rewards) - np.searchsorted(ordered, rewards, side="right")
    return wins.astype(np.float64), losses.astype(np.float64)
