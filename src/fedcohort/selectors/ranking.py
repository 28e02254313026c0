"""Ranking clients by what a selector has learned of them: a capability some selectors have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from fedcohort.core.arrays import FloatArray, IntArray


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


class Ranker(ABC):
    """What a selector adds to its bases when it can rank the clients of a federation by skewness."""

    @classmethod
    @abstractmethod
    def for_ranking(cls) -> Self:
        """Return the selector with the parameters that suit ranking: everybody meets the same opponents.

        It learns from updates, each of which is one full-batch step.
        """

    @classmethod
    @abstractmethod
    def ranked(cls, state: Mapping[str, Any], level: float) -> Ranking:
        """Rank by the fields of a state, with credible intervals of this level."""
