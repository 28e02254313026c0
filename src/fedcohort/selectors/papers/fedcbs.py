r"""Fed-CBS: draw cohorts whose combined data is balanced over the classes.

.. [Zhang2023] J. Zhang, A. Li, M. Tang, J. Sun, X. Chen, F. Zhang, C. Chen, Y. Chen, H. Li, "Fed-CBS: A
   Heterogeneity-Aware Client Sampling Mechanism for Federated Learning via Class-Imbalance Reduction", ICML 2023.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import ClientTable, LabelCounts
from fedcohort.core.params import Interval, ParamSets, param
from fedcohort.core.protocol import Answer, Cohort, Outcome, Selector, Slate, per_client, register
from fedcohort.core.signals import Signal
from fedcohort.selectors.numerics.class_balance import NOTHING, RESOLUTION, ClassBalance, Past, group_of
from fedcohort.selectors.numerics.sampling import log_choice

_LOG_RESOLUTION = 53 * math.log(2)  # a uniform random double has 53 bits


@dataclass(frozen=True)
class _BalancedState:
    """What Fed-CBS remembers about each client."""

    pulls: FloatArray = per_client()  # (N,) T_n, how often the client was selected, plus 1


@register("fedcbs")
@dataclass(frozen=True, kw_only=True)
class FedCBS(Selector[_BalancedState]):
    r"""Draw clients one by one so that their combined data is balanced ([Zhang2023]_, Algorithm 1 and Sec. 3.3).

    .. math::

        QCID(M) &= \frac{\sum_{n, n' \in M} S_{nn'}}{(\sum_{n \in M} q_n)^2} - \frac{1}{B} \\
        P(c_1) &\propto QCID(M_1)^{-\beta_1} + \lambda \sqrt{3 \ln k / 2 T_{c_1}} \\
        P(c_m \mid c_1 \dots c_{m-1}) &\propto QCID(M_m)^{-\beta_m}, \quad m > 1

    Symbols: S = inner products of label counts, q_n = samples of client n, B = classes, M_m = the first m clients,
    k = round + 1, T_n = ``pulls``, lambda = ``exploration`` (the paper's experiments print it as gamma), L_b =
    ``floor``, a lower bound of QCID, beta_m = ``beta`` * m. The paper's denominators for m > 1 are the same for
    every candidate and cancel.

    Label information may be given as LabelCounts, a LabelFactor (S = F F') or a LabelGram (S itself). All give the same
    probabilities, so clients never have to reveal counts. One pick costs one product of the factor with a vector, or
    one row of S.

    In an asynchronous session, one client is chosen while others are busy. It is the first client of a group that
    already contains them, :math:`M_1 = \{n\} \cup` the busy clients.

    Deviations from the paper: none in the algorithm. A client without samples counts as fully imbalanced; the formula
    would divide by 0, or prefer it because it leaves a balanced cohort unchanged. A QCID below 4e-15, the rounding
    error of Theorem 3.1 in double precision, counts as 0.

    Two weaknesses of the paper's rule remain. L_b = 1e-20 gives an exactly balanced client the weight 1e20, which no
    exploration can match. And drawing one client at a time does not follow :math:`P(M) \propto QCID(M)^{-\beta_M}`,
    which the paper aims for. ``fedcbs-chance`` changes both.

    Examples
    --------
    Four clients have one class each, and one has both. The second pick balances the first.

    >>> from fedcohort import ClientTable, LabelCounts, Session
    >>> from fedcohort.core.protocol import RoundRequest
    >>> labels = LabelCounts([[8, 0], [9, 0], [0, 8], [0, 9], [5, 5]])
    >>> session = Session(FedCBS(), ClientTable(labels=labels), seed=3)
    >>> cohort = session.ask(RoundRequest(size=2, available=[0, 1, 2, 3]))
    >>> sorted(cohort.names), round(cohort.notes["qcid"], 3)
    (['0', '2'], 0.0)
    """

    requires = frozenset({Signal.LABEL_PRODUCTS, Signal.SIZES})

    one_at_a_time = True
    picks_by: ClassVar[str] = (
        "The cohort is drawn at random, place by place, with better odds for clients that balance the classes of those "
        "drawn before. The score is the logarithm of a client's last probability."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "balance": "how well it balances the classes of those drawn before",
        "exploration": "bonus for having been picked rarely",
    }

    checked_params: ClassVar[ParamSets] = {
        "no exploration": {"exploration": 0.0, "beta": 50.0},
        "high floor": {"floor": 0.5, "exploration": 1000000.0},
    }

    exploration: float = param(10.0, Interval(float, 0, None), "weight of rarely selected clients (lambda)")
    beta: float = param(1.0, Interval(float, 0, None, "neither"), "growth of the exponents, beta_m = beta * m (beta_m)")
    floor: float = param(1e-20, Interval(float, 0, 1, "neither"), "least value of QCID (L_b)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exploration == 0:
            object.__setattr__(self, "starves", "without exploration, the best-balanced clients lead every cohort")

    def init(self, clients: ClientTable, rng: np.random.Generator) -> _BalancedState:
        """Start with T_n = 1 for every client."""
        return _BalancedState(np.ones(clients.n))

    def select(
        self, state: _BalancedState, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, _BalancedState]:
        """Draw the cohort."""
        labels = slate.clients.labels
        group = group_of(
            labels,
            # Label counts say how many samples there are; the other forms do not.
            None if isinstance(labels, LabelCounts) else slate.clients.sizes,
            None if slate.everyone else slate.candidates,
            # Busy clients are members already, so a client chosen alone balances what they train on.
            NOTHING if slate.busy is None else Past(slate.busy, np.ones(len(slate.busy))),
        )
        bonus = exploration_bonus(self.exploration, slate.round + 1, slate.of_candidates(state.pulls))
        draw = self.draw(group, slate.size, bonus, rng)
        cohort = Cohort(
            clients=slate.candidates[draw.picks],
            candidates=slate.candidates,
            score=draw.log_probability,
            parts={"balance": draw.log_probability - draw.exploration, "exploration": draw.exploration},
            notes={"qcid": draw.qcid},
        )
        pulls = state.pulls.copy()
        pulls[cohort.clients] += 1  # T_n also counts selections that fail
        return cohort, _BalancedState(pulls)

    def draw(self, group: ClassBalance, size: int, bonus: FloatArray, rng: np.random.Generator) -> DrawnGroup:
        """Draw ``size`` clients into the empty ``group``, the first with the exploration ``bonus`` (c,)."""
        return draw_group(group, size, Weighting(beta=self.beta, floor=self.floor, exploration=bonus), rng)

    def update(self, state: _BalancedState, outcome: Outcome) -> _BalancedState:
        """Learn nothing."""
        return state


@dataclass(frozen=True)
class Weighting:
    r"""The logarithms of the weights of [Zhang2023]_ Sec. 3.3.

    The first client of round k has weight :math:`QCID(M_1)^{-\beta_1} + \lambda \sqrt{3 \ln k / 2 T_n}`, the m-th
    :math:`QCID(M_m)^{-\beta_m}`; factors that are the same for every candidate are left out.

    Attributes
    ----------
    beta : float
        beta_m = beta * m.
    floor : float
        L_b, the least value of QCID.
    exploration : (c,) float array or None
        lambda sqrt(3 ln k / 2 T_n) of every candidate; None: 0.
    """

    beta: float = 1.0
    floor: float = 1e-20
    exploration: FloatArray | None = None

    def imbalance(self, group: ClassBalance, out: FloatArray) -> FloatArray:
        """Write to ``out`` (c,) the QCID of a group with each candidate."""
        return group.qcid_with_each(out)

    def raise_to_floor(self, values: FloatArray) -> FloatArray:
        """Return QCID values, with the floor in place of values at or below it or rounding error."""
        return np.where(values > max(RESOLUTION, self.floor), values, self.floor)

    def balance(self, values: FloatArray, m: int) -> FloatArray:
        """Return -beta_m log QCID(M_m) of every candidate (m from 1); -inf for members."""
        return np.asarray(-self.beta * m * np.log(self.raise_to_floor(values)))

    def first(self, values: FloatArray) -> FloatArray:
        """Return the logarithms of the first client's weights, the only ones that contain the exploration."""
        balance = self.balance(values, 1)
        if self.exploration is None:
            return balance
        with np.errstate(divide="ignore"):  # no exploration in round 1, where ln k = 0
            return np.logaddexp(balance, np.log(self.exploration))


def exploration_bonus(strength: float, round_number: int, pulls: FloatArray) -> FloatArray:
    r"""Return :math:`\lambda \sqrt{3 \ln k / 2 T_n}` for round k, counted from 1."""
    return np.asarray(strength * np.sqrt(1.5 * math.log(round_number) / pulls))


def draw_next(values: FloatArray, m: int, weighting: Weighting, uniform: float) -> tuple[int, float]:
    r"""Draw a client with probability proportional to :math:`QCID(M_m)^{-\beta_m}`.

    Candidates whose weights sum to less than 2^-53 of the best weight are indistinguishable from 0 in double precision.
    These are the candidates with a QCID above (c 2^53)^(1 / beta_m) times the smallest. One comparison removes them,
    and logarithms and powers are computed only for the few that remain.

    Parameters
    ----------
    values : (c,) float array
        QCID(M_m) with each candidate; infinite for members.
    m : int
        Size of the group with the new client.
    weighting : Weighting
        Exponents and floor; the exploration is not used here.
    uniform : float
        A uniform random number in [0, 1).

    Returns
    -------
    position : int
    log_probability : float
    """
    lowest = float(values.min())
    # Up to the resolution, all are exactly balanced and have the floor's weight.
    lowest = max(lowest, weighting.floor) if lowest > RESOLUTION else weighting.floor
    reach = (math.log(len(values)) + _LOG_RESOLUTION) / (weighting.beta * m)
    cut = math.exp(min(math.log(lowest) + reach, 700.0))
    near = np.flatnonzero(values <= max(cut, RESOLUTION))
    position, log_probability = log_choice(weighting.balance(values[near], m), uniform)
    return int(near[position]), log_probability


class DrawnGroup(NamedTuple):
    """A group that was drawn, and the numbers behind it.

    Attributes
    ----------
    picks : (M,) int array
        Positions among the candidates, in the order of the draws.
    log_probability : (c,) float array
        Logarithm of the probability of being drawn: for members at their draw, for the others at the last draw.
    exploration : (c,) float array
        What the exploration bonus added to it; 0 except at the first draw.
    qcid : float
        QCID of the group.
    """

    picks: IntArray
    log_probability: FloatArray
    exploration: FloatArray
    qcid: float


def draw_group(group: ClassBalance, size: int, weighting: Weighting, rng: np.random.Generator) -> DrawnGroup:
    r"""Draw a group client by client ([Zhang2023]_ Sec. 3.3): c_1 by its weight with exploration, then c_2 ... c_M.

    Parameters
    ----------
    group : ClassBalance
        Empty; holds the drawn group afterwards.
    size : int
        M, at most the number of candidates.
    """
    values = np.empty(group.n)
    picks, chances = np.empty(size, dtype=np.int64), np.empty(size)
    first = weighting.first(weighting.imbalance(group, values))
    picks[0], chances[0] = log_choice(first, rng.random())
    # What the bonus added to the logarithm, for the explanation.
    explored = first - weighting.balance(values, 1)
    group.add(int(picks[0]))
    # One uniform number per pick, drawn here, so that cutting off hopeless candidates does not change the stream.
    for m in range(2, size + 1):
        picks[m - 1], chances[m - 1] = draw_next(weighting.imbalance(group, values), m, weighting, rng.random())
        group.add(int(picks[m - 1]))
    if size == 1:
        return drawn_group(group, picks, chances, first, explored)
    bonus = np.zeros(group.n)
    bonus[picks[0]] = explored[picks[0]]
    return drawn_group(group, picks, chances, weighting.balance(values, size), bonus)


def drawn_group(
    group: ClassBalance, picks: IntArray, chances: FloatArray, last: FloatArray, exploration: FloatArray
) -> DrawnGroup:
    """Return a drawn group, given the log probabilities of its draws (M,) and the log weights of the last one (c,)."""
    highest = float(last.max())
    log_probability = last - (highest + math.log(float(np.exp(last - highest).sum())))
    log_probability[picks] = chances
    return DrawnGroup(picks, log_probability, exploration, group.qcid())
