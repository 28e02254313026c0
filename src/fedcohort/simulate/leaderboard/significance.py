"""How certain a difference is: paired t-tests against the baseline, and ranks of all selectors.

Two questions, two tests. *Is this selector better than the baseline here?* is answered in the leaderboard by a paired
t-test over the seeds both ran. *Which selectors differ at all?* is answered by Friedman's test over blocks, followed by
Nemenyi's critical difference [Demsar2006]_. Blocks must be independent: of several settings each is one block, with the
mean over its seeds, and the verdict is about settings like these; of a single setting each seed is one, and the verdict
is about other seeds of that setting. Ranks were chosen because accuracies of different settings cannot be averaged, and
Nemenyi over pairwise Wilcoxon tests because those cannot reach p < 0.05 with five blocks or fewer, however clear the
difference (their smallest p is 2 / 2^5 = 0.0625). Its price: the verdict on a pair depends on the
other selectors in the comparison.

.. [Demsar2006] J. Demšar, "Statistical Comparisons of Classifiers over Multiple Data Sets", JMLR 7, 2006.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedcohort.core.arrays import FloatArray

LEVEL = 0.05  # probability of calling equals different


def paired_t_test(difference: FloatArray) -> float:
    """Return the two-sided p-value that paired differences have mean zero; NaN when there is no test.

    >>> round(paired_t_test(np.array([1.0, 2.0, 3.0])), 4)
    0.0742
    """
    n = len(difference)
    if n < 2:
        return math.nan
    spread = float(difference.std(ddof=1))
    # Differences that are equal but for rounding would give an absurdly small p.
    if spread <= 1e-12 * max(1.0, float(np.abs(difference).max())):
        return math.nan
    from scipy.special import stdtr  # scipy.stats takes seconds to import

    return float(2 * stdtr(n - 1, -abs(difference.mean()) / (spread / math.sqrt(n))))


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's step-down method; NaN stays NaN and does not count.

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
        What the blocks are, and what the verdict is about: "setting" or "seed".
    friedman : float
        p of Friedman's test that all selectors are alike.
    difference : float
        Critical difference: two selectors differ at the 5% level when their mean ranks are this far apart.
    p : mapping of (label, label) to float
        Nemenyi's p of each pair, in both orders.
    alike : tuple of tuple of str
        The largest runs of selectors of which no two differ; all of them where Friedman's test finds them alike.
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
        """Whether two selectors differ at the 5% level, if any do."""
        return self.friedman < LEVEL and self.p[one, other] < LEVEL


def rank_selectors(labels: Sequence[str], results: FloatArray, over: str = "setting") -> SelectorRanking | None:
    """Rank selectors over blocks.

    Parameters
    ----------
    labels : sequence of str
        k of them, at least two.
    results : (n, k) float array
        A block in each row, higher is better; equal ones share their mean rank. A run that diverged is -inf: last.
    over : str
        What a block is, "setting" or "seed".

    Returns
    -------
    Ranking, or None with fewer than two selectors or blocks
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
    # Nemenyi's test follows Friedman's: where that finds all alike, no two selectors differ.
    alike = _alike(names, sorted_ranks, difference) if friedman < LEVEL else (names,)
    return SelectorRanking(names, tuple(sorted_ranks), n, over, friedman, difference, p, alike)


def _alike(names: Sequence[str], ranks: Sequence[float], difference: float) -> tuple[tuple[str, ...], ...]:
    """Return the largest stretches of the ranking no wider than the critical difference, two selectors or more."""
    found: list[tuple[int, int]] = []
    for first in range(len(ranks)):
        last = max(j for j in range(first, len(ranks)) if ranks[j] - ranks[first] < difference)
        if last > first and not any(a <= first and last <= b for a, b in found):
            found.append((first, last))
    return tuple(tuple(names[a : b + 1]) for a, b in found)


def _friedman(ranks: FloatArray) -> float:
    """Return the p-value of Friedman's test over ranks (n, k); of two selectors it is a sign test, and exact."""
    from scipy import stats

    if ranks.shape[1] == 2:
        wins, losses = int((ranks[:, 0] < ranks[:, 1]).sum()), int((ranks[:, 0] > ranks[:, 1]).sum())
        return float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    if (ranks == ranks[:, :1]).all():
        return 1.0  # all alike everywhere
    return float(stats.friedmanchisquare(*ranks.T).pvalue)
