"""The pool of FedACS: repeated Thompson sampling (Algorithm 1, lines 3 to 10) without a draw per client and step."""

from __future__ import annotations

import numpy as np
from scipy import special

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray

# How many arms should be under the threshold of a block on average. With fewer, empty steps (which cost a draw per arm)
# are more frequent; with more, every step costs more. The cost is flat between 6 and 16.
_UNDER_THRESHOLD = 10
_FIRST_BLOCK = 32  # steps; the size doubles after each block that completes


def repeated_argmax(alpha: FloatArray, beta: FloatArray, size: int, rng: np.random.Generator) -> IntArray:
    r"""Return ``size`` arms, each the argmax of new draws of all arms not taken yet; exact in distribution.

    The literal loop (draw :math:`\theta_i \sim Beta(\alpha_i, \beta_i)` for every arm left, take the largest, repeat)
    costs n draws per arm taken. Here blocks of steps share a threshold:

    1. One literal step sets a threshold :math:`c`, so that about ten arms of a step are above it.
    2. :math:`s_i = P(\theta_i > c)` is computed once per distinct :math:`(\alpha, \beta)`.
    3. Find which arms pass :math:`c` in which steps of the block. Arm i passes a step iff a Poisson variable with mean
       :math:`-\ln(1 - s_i)` is positive. So all passes of a block are a Poisson number of points thrown on
       (arm, step) pairs, O(points) instead of O(n * steps).
    4. Only the arms that pass are drawn, from the tail, by the inverse distribution function. The winner of a step is
       the largest draw of an arm that earlier steps of the block have not taken.
    5. A step that no remaining arm passes ends the block. It is drawn literally, under the condition that all arms are
       below :math:`c`, and sets the next threshold. Later steps of the old block are discarded unseen.

    Everything is computed with :math:`1 - \theta`, which is precise for the largest draws.

    Parameters
    ----------
    alpha, beta : (n,) float array
        Positive.
    size : int
        Number of arms to take; at most n.
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
    threshold = 0.0  # of 1 - theta; no arm is under 0, so the first step is unconditional
    block = _FIRST_BLOCK
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
    draws = rng.beta(beta, alpha)  # 1 - theta of Beta(alpha, beta)
    if threshold > 0:
        redraw = np.flatnonzero(draws <= threshold)
        if len(redraw):
            tail = special.betaincc(beta[redraw], alpha[redraw], threshold)
            draws[redraw] = special.betainccinv(beta[redraw], alpha[redraw], tail * (1 - rng.random(len(redraw))))
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
    """Do up to ``steps`` steps with one threshold; update ``taken`` and ``left``, and return how many were done."""
    arms = np.flatnonzero(left)
    under = special.betainc(pairs[0], pairs[1], threshold)  # (groups,) P(1 - theta <= threshold)
    # 1 - 2^-53 stands for certainty: the error is below the precision of any draw.
    rate = -np.log1p(-np.minimum(under, 1 - 2.0**-53))[group[arms]]
    edges = np.cumsum(rate)
    points = int(rng.poisson(edges[-1] * steps))
    arm = np.minimum(np.searchsorted(edges, rng.random(points) * edges[-1], side="right"), len(arms) - 1)
    step_of = rng.integers(steps, size=points)
    # An arm passes a step or does not; several points in one cell are one pass.
    cells = np.unique(step_of * len(arms) + arm)
    step_of, arm = np.divmod(cells, len(arms))
    pair = group[arms[arm]]
    draws = special.betaincinv(pairs[0, pair], pairs[1, pair], under[pair] * (1 - rng.random(len(cells))))
    # Cells are drawn for all steps at once, before it is known who is taken. A step's winner is the first in its order
    # that is still left, because the draws of arms that were taken are not part of the step.
    order = np.lexsort((draws, step_of))
    ends = np.searchsorted(step_of, np.arange(steps), side="right")  # cells are already ordered by step
    ranked = arms[arm[order]].tolist()
    begin = 0
    for step, end in enumerate(ends.tolist()):
        winner = next((candidate for candidate in ranked[begin:end] if left[candidate]), None)
        if winner is None:
            return step
        taken.append(winner)
        left[winner] = False
        begin = end
    return steps
