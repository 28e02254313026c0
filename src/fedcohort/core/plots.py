"""Describe the pictures of what a selector has learned, as data that the report draws.

A selector class lists its :class:`Picture` objects in ``pictures``. Each has a function that reads a
:class:`SelectorRun` and returns a view: intervals per client, a map of clients, or lines over the rounds, with a
sentence built from the same numbers. Nothing here draws.

>>> from dataclasses import dataclass
>>> import numpy as np
>>> def waits(record):
...     since = record.rounds - record.state["since"]
...     longest = int(since.argmax())
...     return Intervals(since, since, since, text=f"Client {longest} has waited longest.")
>>> picture = Picture("waits", "How long clients have waited", "rounds", waits)
>>> picture.view(SelectorRun("mine", 0, 5, {"since": np.array([4.0, 1.0])})).text
'Client 1 has waited longest.'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class SelectorRun:
    """One run of a selector, as recorded in its journal.

    Attributes
    ----------
    label : str
        The selector's label in the experiment.
    rounds : int
        Number of recorded rounds.
    state : mapping
        Fields of the selector's state after the last round.
    notes : sequence of (round, notes)
        The notes of every cohort, in order.
    label_counts : (N, B) float array or None
        Samples per class of each client, if they are known.
    noise : (N,) float array or None
        Share of wrong labels of each client, if there are any.
    running : bool
        Whether the run has not finished yet.
    """

    label: str
    seed: int
    rounds: int
    state: Mapping[str, Any]
    notes: Sequence[tuple[int, Mapping[str, Any]]] = ()
    label_counts: FloatArray | None = None
    noise: FloatArray | None = None
    running: bool = False

    @property
    def opening(self) -> str:
        """The beginning of a sentence about this run: its selector, its seed, and the round if it is still running.

        >>> SelectorRun("mine", 0, 5, {}).opening, SelectorRun("mine", 0, 5, {}, running=True).opening
        ('With mine (seed 0)', 'After 5 rounds, with mine (seed 0)')
        """
        so_far = f"After {self.rounds:,} rounds, with" if self.running else "With"
        return f"{so_far} {self.label} (seed {self.seed})"


@dataclass(frozen=True, eq=False)
class Intervals:
    """One number per client with an interval; drawn from the largest to the smallest.

    Attributes
    ----------
    middle, low, high : (N,) float arrays
    notes : sequence of str
        An extra note about each client; empty for none.
    text : str
        What the picture shows, in a sentence or two.
    """

    middle: FloatArray
    low: FloatArray
    high: FloatArray
    notes: Sequence[str] = ()
    text: str = ""


@dataclass(frozen=True, eq=False)
class Points:
    """One point per client, drawn as a two-dimensional map in which neighbours stay close.

    Attributes
    ----------
    points : (N, d) float array
    groups : (N,) int array or None
        The group that sets each client's colour.
    group_names : sequence of str
        The name of each group.
    text : str
        What the picture shows, in a sentence or two.
    """

    points: FloatArray
    groups: IntArray | None = None
    group_names: Sequence[str] = ()
    text: str = ""


@dataclass(frozen=True, eq=False)
class Lines:
    """Numbers over the rounds, by name.

    Attributes
    ----------
    lines : mapping of name to (rounds, values)
    text : str
        What the picture shows, in a sentence or two.
    """

    lines: Mapping[str, tuple[Sequence[int], Sequence[float]]] = field(default_factory=dict)
    text: str = ""


View = Intervals | Points | Lines


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture of what a selector learned.

    Attributes
    ----------
    name : str
        Letters, digits and '-'. Selectors with the same picture (two versions of one method) share one drawing.
    quantity : str
        What the vertical axis shows; empty for a map.
    view : callable
        A function from a :class:`SelectorRun` to its view; it returns None if there is nothing to show yet.
    share : bool
        Whether the quantity is a share, shown in percent.
    """

    name: str
    title: str
    quantity: str
    view: Callable[[SelectorRun], View | None]
    share: bool = False


# -- sentences ------------------------------------------------------------------------------------------------------


WEAK = 0.2  # rank correlations closer to 0 than this mean nothing


def number_text(value: float) -> str:
    """Return a number with three significant digits.

    >>> number_text(0.081234), number_text(1234567.0), number_text(-2.0)
    ('0.0812', '1,234,567', '−2')
    """
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return text.replace("-", "−")


def count_text(what: str, part: float, whole: float) -> str:
    """Return how often something happened, as a phrase.

    >>> count_text("kept", 0.0, 1.0), count_text("kept", 3.0, 12.0)
    ('kept 0 of 1 time', 'kept 3 of 12 times')
    """
    return f"{what} {number_text(part)} of {number_text(whole)} time{'s' * (whole != 1)}"


def agreement_text(correlation: float, *, perfect: int, good: str, bad: str, none: str) -> str:
    """Return one of three phrases for a rank correlation, with its value and the perfect value.

    >>> agreement_text(-0.9, perfect=-1, good="as it should be", bad="the wrong way round", none="says little")
    'as it should be (rank correlation −0.90, −1 would be perfect)'
    """
    if math.isnan(correlation):
        return none
    right = correlation * perfect
    detail = f"rank correlation {correlation:+.2f}, {perfect:+d} would be perfect".replace("-", "−")
    return f"{good if right >= WEAK else bad if right <= -WEAK else none} ({detail})"


def rank_correlation(ours: FloatArray, theirs: FloatArray) -> float:
    """Return Spearman's rank correlation; tied values share their mean rank. NaN if one of the two does not vary.

    >>> rank_correlation(np.array([1.0, 2.0, 3.0, 3.0]), np.array([10.0, 20.0, 30.0, 30.0]))
    1.0
    """
    if len(ours) < 3 or np.ptp(ours) == 0 or np.ptp(theirs) == 0:
        return math.nan
    from scipy.stats import spearmanr  # takes half a second to import

    return round(float(spearmanr(ours, theirs).statistic), 12)  # 1.0, not 0.9999999999999999


def beta_interval(alpha: FloatArray, beta: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the 90% credible interval of Beta(alpha, beta)."""
    from scipy.special import betaincinv

    return np.asarray(betaincinv(alpha, beta, 0.05)), np.asarray(betaincinv(alpha, beta, 0.95))
