"""How certain a difference is: paired t-tests against the baseline, and ranks of all selectors.

*Is this selector better than the baseline in this setting?* The leaderboard answers with a paired t-test over the seeds
that both ran. *Which selectors differ at all?* Friedman's test over blocks answers, followed by Nemenyi's critical
difference [Demsar2006]_.

Blocks must be independent. With several settings, each is a block with the mean over its seeds, and the verdict is
about settings like these. With a single setting, each seed is a block, and the verdict is about other seeds of that
setting. We use ranks because accuracies of different settings cannot be averaged. We use Nemenyi's test because
pairwise Wilcoxon tests cannot reach p < 0.05 with five blocks or fewer, however clear the difference: their smallest p
is 2 / 2^5 = 0.0625. The price is that the verdict on a pair depends on the other selectors in the comparison.

.. [Demsar2006] J. Demšar, "Statistical Comparisons of Classifiers over Multiple Data Sets", JMLR 7, 2006.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedcohort.core.arrays import FloatArray

LEVEL = 0.05  # significance level
MAX_SEEDS = 1000  # nobody runs more, so nobody is told how many more


def half_interval(values: FloatArray) -> float:
    """Return half the 95% interval of the mean of ``values`` (n,); NaN for fewer than two.

    >>> round(half_interval(np.array([1.0, 3.0])), 2)
    12.71
    """
    n = len(values)
    if n < 2:
        return math.nan
    from scipy.special import stdtrit  # scipy.stats takes seconds to import

    # Student's t: with five seeds its interval is 40% wider than the normal one.
    return float(stdtrit(n - 1, 1 - LEVEL / 2) * values.std(ddof=1) / math.sqrt(n))


def paired_t_test(difference: FloatArray) -> float:
    """Return the two-sided p-value of paired differences having mean zero; NaN if no test is possible.

    >>> round(paired_t_test(np.array([1.0, 2.0, 3.0])), 4)
    0.0742
    """
    n = len(difference)
    if n < 2:
        return math.nan
    spread = float(difference.std(ddof=1))
    # Differences that are equal up to rounding would give an absurdly small p.
    if spread <= 1e-12 * max(1.0, float(np.abs(difference).max())):
        return math.nan
    from scipy.special import stdtr

    return float(2 * stdtr(n - 1, -abs(difference.mean()) / (spread / math.sqrt(n))))


def seeds_needed(difference: float, spread: float, comparisons: int = 1) -> int:
    """Return how many seeds show a difference with this standard deviation over seeds in four of five cases.

    >>> seeds_needed(0.3, 0.5), seeds_needed(0.3, 0.5, comparisons=5)
    (24, 36)
    """
    from scipy.special import stdtrit

    for n in range(3, MAX_SEEDS):
        sure, often = stdtrit(n - 1, 1 - LEVEL / 2 / comparisons), stdtrit(n - 1, 0.8)
        if (sure + often) * spread / math.sqrt(n) <= abs(difference):
            return n
    return MAX_SEEDS


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's step-down method; NaN stays NaN and is not counted.

    >>> [round(x, 3) for x in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    known = [i for i, value in enumerate(p) if not math.isnan(value)]
    corrected = [math.nan] * len(p)
    highest = 0.0
    for step, i in enumerate(sorted(known, key=lambda i: p[i])):
        highest = max(highest, min(1.0, p[i] * (len(known) - step)))
        corrected[i] = highest
    return corrected


@dataclass(frozen=True)
class SelectorRanking:
    """All selectors against each other.

    Attributes
    ----------
    labels : tuple of str
        Best mean rank first.
    ranks : tuple of float
        Mean rank of each over the blocks, 1 is best.
    blocks : int
        Settings, or seeds of one setting, in which every selector ran.
    over : str
        What a block is, "setting" or "seed", and so what the verdict is about.
    friedman : float
        p of Friedman's test that all selectors are equal.
    difference : float
        Critical difference: two selectors differ at the 5% level if their mean ranks are this far apart.
    p : mapping of (label, label) to float
        Nemenyi's p of each pair, in both orders.
    alike : tuple of tuple of str
        The largest groups of neighbouring selectors of which no two differ; one group if Friedman's test finds no
        difference.
    """

    labels: tuple[str, ...]
    ranks: tuple[float, ...]
    blocks: int
    over: str
    friedman: float
    difference: float
    p: Mapping[tuple[str, str], float]
    alike: tuple[tuple[str, ...], ...]

    def differ(self, one: str, other: str) -> bool:
        """Whether two selectors differ at the 5% level in both Friedman's and Nemenyi's test."""
        return self.friedman < LEVEL and self.p[one, other] < LEVEL


def rank_selectors(labels: Sequence[str], results: FloatArray, over: str = "setting") -> SelectorRanking | None:
    """Rank selectors over blocks.

    Parameters
    ----------
    labels : sequence of str
        The k selectors.
    results : (n, k) float array
        A row for each block; higher is better, and equal results share their mean rank. A run that diverged is -inf.
    over : str
        What a block is, "setting" or "seed".

    Returns
    -------
    The ranking, or None with fewer than two selectors or blocks.
    """
    n, k = results.shape
    if n < 2 or k < 2:
        return None
    from scipy import stats

    ranks = stats.rankdata(-results, axis=1)
    mean = ranks.mean(axis=0)
    friedman = _friedman(ranks)
    unit = math.sqrt(k * (k + 1) / (6 * n))  # standard error of a difference of mean ranks, Demsar's Section 3.2.2
    order = np.argsort(mean, kind="stable")
    p = {
        (labels[i], labels[j]): float(
            stats.studentized_range.sf(math.sqrt(2) * abs(mean[i] - mean[j]) / unit, k, np.inf)
        )
        for i in range(k)
        for j in range(k)
        if i != j
    }
    difference = float(stats.studentized_range.ppf(1 - LEVEL, k, np.inf)) / math.sqrt(2) * unit
    sorted_ranks = [float(mean[i]) for i in order]
    names = tuple(labels[i] for i in order)
    # Nemenyi's test only follows a significant Friedman test; otherwise no two selectors differ.
    alike = _alike(names, sorted_ranks, difference) if friedman < LEVEL else (names,)
    return SelectorRanking(names, tuple(sorted_ranks), n, over, friedman, difference, p, alike)


def _alike(names: Sequence[str], ranks: Sequence[float], difference: float) -> tuple[tuple[str, ...], ...]:
    """Return the longest stretches of two or more selectors whose ranks lie within the critical difference."""
    stretches: list[tuple[int, int]] = []
    for first in range(len(ranks)):
        last = max(j for j in range(first, len(ranks)) if ranks[j] - ranks[first] < difference)
        if last > first and not any(a <= first and last <= b for a, b in stretches):
            stretches.append((first, last))
    return tuple(tuple(names[a : b + 1]) for a, b in stretches)


def _friedman(ranks: FloatArray) -> float:
    """Return the p-value of Friedman's test over ranks (n, k); for two selectors, of an exact sign test."""
    from scipy import stats

    if ranks.shape[1] == 2:
        wins, losses = int((ranks[:, 0] < ranks[:, 1]).sum()), int((ranks[:, 0] > ranks[:, 1]).sum())
        return float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    if (ranks == ranks[:, :1]).all():
        return 1.0  # all selectors are equal in every block
    return float(stats.friedmanchisquare(*ranks.T).pvalue)
