"""Learn to rank from demonstrations: which clients an expert chose, and which it left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray
from fedcohort.selectors.baselines.fedrank.network import FEATURES, Network


@dataclass(frozen=True, eq=False)
class Demonstration:
    """One decision of an expert."""

    features: FloatArray  # (c, F) of all candidates
    chosen: BoolArray  # (c,) whether it chose the candidate


def pairwise_loss(scores: FloatArray, chosen: BoolArray) -> tuple[float, FloatArray]:
    r"""Return RankNet's loss of scores (c,) and its derivative (c,).

    The mean of :math:`\log(1 + e^{-(q_i - q_j)})` over all pairs of a chosen client i and a client j left out.

    >>> loss, slope = pairwise_loss(np.array([1.0, 1.0]), np.array([True, False]))
    >>> round(loss, 6), slope  # log 2: the network cannot tell
    (0.693147, array([-0.5,  0.5]))
    """
    apart = scores[chosen][:, None] - scores[~chosen]
    slope = -1 / (1 + np.exp(np.clip(apart, -500, 500))) / max(apart.size, 1)
    derivative = np.zeros(len(scores))
    derivative[chosen] = slope.sum(axis=1)
    derivative[~chosen] = -slope.sum(axis=0)
    return float(np.logaddexp(0.0, -apart).mean()) if apart.size else 0.0, derivative


def gradient(network: Network, demonstrations: Sequence[Demonstration]) -> tuple[float, list[FloatArray]]:
    """Return the mean loss over demonstrations, and its derivatives with respect to weight, bias and output."""
    total = 0.0
    by_weight, by_bias, by_output = (np.zeros_like(part) for part in (network.weight, network.bias, network.output))
    for one in demonstrations:
        hidden = network.hidden(one.features)
        loss, by_score = pairwise_loss(hidden @ network.output, one.chosen)
        inner = by_score[:, None] * network.output * (1 - hidden**2)
        total += loss
        by_weight += one.features.T @ inner
        by_bias += inner.sum(axis=0)
        by_output += hidden.T @ by_score
    count = len(demonstrations)
    return total / count, [by_weight / count, by_bias / count, by_output / count]


def imitate(
    demonstrations: Sequence[Demonstration],
    rng: np.random.Generator,
    *,
    hidden: int = 12,
    steps: int = 2000,
    batch: int = 32,
    rate: float = 0.01,
) -> Network:
    """Train a network with Adam on batches of demonstrations."""
    parts = [
        rng.normal(size=(len(FEATURES), hidden)) / len(FEATURES) ** 0.5,
        np.zeros(hidden),
        rng.normal(size=hidden) / hidden**0.5,
    ]
    first, second = ([np.zeros_like(part) for part in parts] for _ in range(2))
    for step in range(1, steps + 1):
        picked = [demonstrations[i] for i in rng.integers(len(demonstrations), size=batch)]
        _, slopes = gradient(Network(*parts), picked)
        for i, slope in enumerate(slopes):
            first[i] = 0.9 * first[i] + 0.1 * slope
            second[i] = 0.999 * second[i] + 0.001 * slope**2
            scale = np.sqrt(second[i] / (1 - 0.999**step)) + 1e-8
            parts[i] = parts[i] - rate * (first[i] / (1 - 0.9**step)) / scale
    return Network(*parts)


def agreement(network: Network, demonstrations: Sequence[Demonstration]) -> float:
    """Return the share of pairs that the network puts in the expert's order; 0.5 is random."""
    shares = []
    for one in demonstrations:
        scores = network.score(one.features)
        apart = scores[one.chosen][:, None] - scores[~one.chosen]
        if apart.size:
            shares.append(float((apart > 0).mean() + (apart == 0).mean() / 2))
    return float(np.mean(shares))
