r"""FedACS: prefer clients whose data is not skewed, found out by letting their gradients duel.

.. [Wang2021] Z. Wang, Y. Zhu, D. Wang, Z. Han, "FedACS: Federated Skewness Analytics in Heterogeneous Decentralized
   Data Environments", IWQoS 2021.

Stand-alone, FedACS ranks a federation's clients by skewness: run rounds with ``pool_share=1`` (uniform cohorts, so that
everybody meets the same opponents), report the gradient distances, and call :func:`ranking` on the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import special

from fedcohort.arrays import AnyArray, FloatArray, IntArray, sealed
from fedcohort.clients import ClientTable
from fedcohort.errors import ParameterError
from fedcohort.numerics.dueling import duels
from fedcohort.numerics.thompson import beta_draws, repeated_argmax
from fedcohort.params import Interval, OneOf, param
from fedcohort.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.signals import Signal

EXACT_UP_TO = 20_000  # candidates; a pool of 0.4 of them takes about half a second then


@dataclass(frozen=True)
class FedAcsState:
    """The duels so far."""

    wins: FloatArray = per_client()  # (N,) A_i, times eta
    losses: FloatArray = per_client()  # (N,) B_i, times eta
    rounds: FloatArray = per_client()  # (N,) rounds in which the client duelled


@register("fedacs")
@dataclass(frozen=True, kw_only=True)
class FedAcs(Selector[FedAcsState]):
    r"""Draw the cohort from a pool of clients that win duels of skewness ([Wang2021]_, Algorithms 1 and 2).

    A client's reward in a round is minus the distance of its gradient to the cohort's mean gradient (Eq. 14),

    .. math:: R_i = -\lVert \Delta w_i - \overline{\Delta w} \rVert_2,

    which by Hoeffding's inequality is the smaller the more its labels are skewed. Every two clients of a cohort duel:
    the one with the larger reward gets A_i + eta, the other B_j + eta; equal rewards change nothing. A pool of
    lambda * N clients is formed by repeated Thompson sampling (draw :math:`\theta_i \sim Beta(A_i + 1, B_i + 1)` for
    everybody left, take the largest), and the cohort is drawn from the pool uniformly.

    Symbols: A_i = ``wins``, B_i = ``losses``, eta = ``eta``, lambda = ``pool_share``, kappa = the cohort's size,
    Delta w_i = ``insight``.

    Deviations from the paper: N in lambda * N is the number of candidates, since only they can be in the pool; the
    pool has at least kappa clients. The paper derives its reward for the full-batch gradient at the received model
    (Eqs. 6 to 8) and then takes the weight change after local training, which measures drift rather than skew; the
    gradient is the default here (``insight="gradient"``), the weight change is ``insight="update"``. A client that
    delivers no sound reply does not duel. The pool is drawn without the lambda * N * N draws of Algorithm 1 but exact
    in distribution (:func:`fedcohort.numerics.thompson.repeated_argmax`). Beyond 20,000 candidates it is the top of a
    single Thompson draw per candidate instead; the cohort's note "pool" says which of the two it was.

    Examples
    --------
    >>> import numpy as np
    >>> from fedcohort.clients import ClientTable
    >>> from fedcohort.protocol import Slate
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

    pool_share: float = param(
        0.4, Interval(float, 0, 1, "right"), "tolerance of skew: the pool's share of all candidates (lambda)"
    )
    eta: float = param(1.0, Interval(float, 0, None, "neither"), "what one duel counts (eta)")
    insight: str = param(
        "gradient", OneOf(("gradient", "update")), "what duels: gradient at the received model, or the local update"
    )

    @property
    def requires(self) -> frozenset[Signal]:
        """The distance to the cohort's mean, of gradients or of updates."""
        return frozenset({self._distance})

    @property
    def _distance(self) -> Signal:
        return Signal.GRADIENT_DISTANCE if self.insight == "gradient" else Signal.UPDATE_DISTANCE

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
        parts: dict[str, FloatArray] = {"win rate": alpha / (alpha + beta)}
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
            notes={"pool": how, "pool size": pool_size},
        )
        return cohort, state

    def update(self, state: FedAcsState, outcome: Outcome) -> FedAcsState:
        """Let everybody who delivered duel with everybody else (Algorithm 2)."""
        distance = outcome[self._distance]
        there = outcome.ok & np.isfinite(distance)
        who = outcome.clients[there]
        if len(who) < 2:
            return state
        won, lost = duels(-distance[there])
        wins, losses, rounds = state.wins.copy(), state.losses.copy(), state.rounds.copy()
        wins[who] += self.eta * won
        losses[who] += self.eta * lost
        rounds[who] += 1
        return FedAcsState(wins=sealed(wins), losses=sealed(losses), rounds=sealed(rounds))


@dataclass(frozen=True)
class Ranking:
    """A federation ranked by skewness. Arrays are by client, except ``order``.

    Attributes
    ----------
    order : (N,) int array
        Clients from the least skewed to the most.
    win_rate, low, high : (N,) float array
        Probability to win a duel: posterior mean and credible interval.
    best_rank, worst_rank : (N,) int array
        Ranks, counted from 1, that the intervals leave open: nobody whose interval lies wholly above a client's can
        come after it.
    rounds : (N,) float array
        Rounds in which the client duelled; 0 for those nothing is known about.
    """

    order: IntArray
    win_rate: FloatArray
    low: FloatArray
    high: FloatArray
    best_rank: IntArray
    worst_rank: IntArray
    rounds: FloatArray


def ranking(state: FedAcsState, level: float = 0.95, unit: Literal["round", "duel"] = "round") -> Ranking:
    r"""Rank all clients by skewness, with credible intervals of their probability to win a duel.

    The duels of one round share the client's one reward and are not independent, so counting each as an observation
    gives intervals that are too narrow. By default a round counts as one observation whose value is the share of duels
    won, :math:`Beta(1 + T_i \hat p_i, 1 + T_i (1 - \hat p_i))` with :math:`\hat p_i = A_i / (A_i + B_i)` and T_i
    rounds: since the share of a round never varies more than a coin of the same mean, these are on the safe side.

    Parameters
    ----------
    state : FedAcsState
        From rounds with uniform cohorts (``pool_share=1``). Cohorts the bandit chose pit good clients against each
        other, which narrows the differences.
    level : float
        Of the credible intervals.
    unit : "round" or "duel"
        What counts as one observation; "duel" gives the bandit's own posterior (eta should be 1 then).

    Returns
    -------
    Ranking

    Examples
    --------
    >>> wins, losses = np.array([2.0, 80.0]), np.array([70.0, 5.0])
    >>> found = ranking(FedAcsState(wins=wins, losses=losses, rounds=np.array([9.0, 9.0])))
    >>> found.order
    array([1, 0])
    >>> found.best_rank, found.worst_rank
    (array([2, 1]), array([2, 1]))
    """
    if not 0 < level < 1:
        raise ParameterError(f"The 'level' of a credible interval must be a number in (0, 1). Got {level!r}.")
    if unit not in ("round", "duel"):
        raise ParameterError(f"The 'unit' of a ranking must be one of 'round', 'duel'. Got {unit!r}.")
    fought = state.wins + state.losses
    if unit == "round":
        scale = np.divide(state.rounds, fought, out=np.zeros(len(fought)), where=fought > 0)
        alpha, beta = 1 + scale * state.wins, 1 + scale * state.losses
    else:
        alpha, beta = 1 + state.wins, 1 + state.losses
    tail = (1 - level) / 2
    rate: FloatArray = alpha / (alpha + beta)
    low: FloatArray = special.betaincinv(alpha, beta, tail)
    high: FloatArray = special.betainccinv(alpha, beta, tail)
    return Ranking(
        order=sealed(np.argsort(-rate, kind="stable")),
        win_rate=sealed(rate),
        low=sealed(low),
        high=sealed(high),
        best_rank=sealed(1 + _count_above(low, high)),
        worst_rank=sealed(len(rate) - _count_above(-high, -low)),
        rounds=state.rounds,
    )


def _count_above(values: FloatArray, bounds: FloatArray) -> AnyArray:
    """(n,) how many of ``values`` are larger than each bound."""
    return len(values) - np.searchsorted(np.sort(values), bounds, side="right")
