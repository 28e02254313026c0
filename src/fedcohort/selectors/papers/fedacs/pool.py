"""FedACS's pool: repeated Thompson sampling (Algorithm 1, lines 3 to 10) without a draw per client and step."""

from __future__ import annotations

import numpy as np
from scipy import special

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray

# How many arms should lie under the threshold of a block on average. Fewer make empty steps (which cost a draw per
# arm) more frequent, more make every step dearer; the cost is flat between 6 and 16.
_UNDER_THRESHOLD = 10
FIRST_BLOCK = 32  # steps; blocks double while they last


def repeated_argmax(alpha: FloatArray, beta: FloatArray, size: int, rng: np.random.Generator) -> IntArray:
    r"""Return ``size`` arms, each the argmax of fresh draws of all arms not taken before it; exact in distribution.

    The literal loop (draw :math:`\theta_i \sim Beta(\alpha_i, \beta_i)` for every arm left, take the largest, repeat)
    costs n draws per arm taken. Here steps are done in blocks that share a threshold:

    1. One literal step sets a threshold :math:`c`, such that about ten arms of a step lie above it.
    2. :math:`s_i = P(\theta_i > c)`, once per distinct :math:`(\alpha, \beta)`: equal arms are exchangeable.
    3. Which arms pass :math:`c` in which of the block's steps: arm i passes a step iff a Poisson variable of mean
       :math:`-\ln(1 - s_i)` is positive. So all passes of a block are one Poisson number of points thrown on
       (arm, step) pairs, O(points) instead of O(n * steps).
    4. Only the arms that pass are drawn, from the tail, by the inverse distribution function. The winner of a step is
       the largest of those that earlier steps of the block have not taken.
    5. A step in which nobody left passes ends the block. It is drawn literally, under the condition that everybody
       lies below :math:`c`, and sets the next threshold. Later steps of the old block are thrown away unseen.

    Everything is done with :math:`1 - \theta`, which keeps its relative precision where the largest draws are.

    Parameters
    ----------
    alpha, beta : (n,) float array
        Positive.
    size : int
        How many arms; at most n.
    rng : Generator

    Returns
    -------
    (size,) int array
        Positions in the order in which they were taken.
    """
    n = len(alpha)
    taken: list[int] = []
    if size <= 0:
        return np.empty(0, np.int64)
    pairs, group = np.unique(np.stack([beta, alpha]), axis=1, return_inverse=True)
    group = group.reshape(-1)
    left = np.ones(n, np.bool_)
    threshold = 0.0  # of 1 - theta: nobody lies under 0, so the first step is unconditional
    block = FIRST_BLOCK
    while len(taken) < size:
        arms = np.flatnonzero(left)
        draws = _above(alpha[arms], beta[arms], threshold, rng)
        lowest = np.argpartition(draws, min(_UNDER_THRESHOLD, len(arms) - 1))[: _UNDER_THRESHOLD + 1]
        threshold = float(draws[lowest].max())
        winner = int(arms[lowest[np.argmin(draws[lowest])]])
        taken.append(winner)
        left[winner] = False
        steps = min(block, size - len(taken))
        if steps == 0:
            break
        done = _block(pairs, group, left, threshold=threshold, steps=steps, taken=taken, rng=rng)
        if done == steps:
            threshold = 0.0  # nothing is known about the next step
            block *= 2
        else:
            block = max(16, done)
    return np.array(taken, np.int64)


def _above(alpha: FloatArray, beta: FloatArray, threshold: float, rng: np.random.Generator) -> FloatArray:
    """Draw 1 - theta of every arm, given that it is larger than ``threshold``."""
    draws = rng.beta(beta, alpha)
    if threshold > 0:
        wrong = np.flatnonzero(draws <= threshold)
        if len(wrong):
            tail = special.betaincc(beta[wrong], alpha[wrong], threshold)
            draws[wrong] = special.betainccinv(beta[wrong], alpha[wrong], tail * (1 - rng.random(len(wrong))))
    return draws


def _block(
    pairs: FloatArray,
    group: IntArray,
    left: BoolArray,
    *,
    threshold: float,
    steps: int,
    taken: list[int],
    rng: np.random.Generator,
) -> int:
    """Do up to ``steps`` steps under one threshold; append to ``taken``, clear ``left``, return how many were done."""
    arms = np.flatnonzero(left)
    under = special.betainc(pairs[0], pairs[1], threshold)  # (groups,) P(1 - theta <= threshold)
    # 1 - 2^-53 stands for certainty: the error is below the precision of any draw.
    rate = -np.log1p(-np.minimum(under, 1 - 2.0**-53))[group[arms]]
    edges = np.cumsum(rate)
    points = int(rng.poisson(edges[-1] * steps))
    who = np.minimum(np.searchsorted(edges, rng.random(points) * edges[-1], side="right"), len(arms) - 1)
    when = rng.integers(steps, size=points)
    cells = np.unique(when * len(arms) + who)
    when, who = np.divmod(cells, len(arms))
    of = group[arms[who]]
    draws = special.betaincinv(pairs[0, of], pairs[1, of], under[of] * (1 - rng.random(len(cells))))
    order = np.lexsort((draws, when))
    ends = np.searchsorted(when, np.arange(steps), side="right")  # cells are ordered by step already
    ranked = arms[who[order]].tolist()
    begin = 0
    for step, end in enumerate(ends.tolist()):
        winner = next((arm for arm in ranked[begin:end] if left[arm]), None)
        if winner is None:
            return step
        taken.append(winner)
        left[winner] = False
        begin = end
    return steps
