"""Measure how much of a federation takes part, to warn about selectors that use only a few clients.

A selector may starve clients on purpose, or because it was not made for this federation. Either way, its operator
should know. :class:`Coverage` counts the distinct clients of the last rounds and of all rounds. It compares them with
the number that uniform cohorts of the same sizes would have reached at least, drawn from as many candidates in each
round.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray

log = logging.getLogger(__name__)

# Not a test of significance: a selector that learns differs from uniform cohorts significantly, and should.
LEVEL = 0.5
"""There is a warning if fewer clients took part than this share of what uniform cohorts would have reached."""

TURNS = 2.0  # the last rounds are those in which every client would have had two turns on average
MIN_ROUNDS = 20  # with fewer rounds, chance explains everything
_ALL = 2**62  # stands for "all clients were candidates"; larger than any federation


@dataclass(frozen=True)
class Coverage:
    """How many clients carried the training.

    Attributes
    ----------
    clients : int
        Members of the federation.
    since : int
        First of the last rounds, in which every client would have had two turns with uniform cohorts.
    recent : int
        Distinct members asked to train since then.
    expected_recent : float
        The least that uniform cohorts of the same sizes, from as many candidates, would have asked on average.
    never : int
        Members never asked to train in any round.
    expected_never : float
        The most that uniform cohorts would never have asked, on average.
    rounds : int
        Number of all rounds.
    """

    clients: int
    since: int
    recent: int
    expected_recent: float
    never: int
    expected_never: float
    rounds: int

    @property
    def narrow(self) -> bool:
        """Whether the last rounds reached fewer than half of the clients that uniform cohorts would have."""
        return self.rounds >= MIN_ROUNDS and self.recent < LEVEL * self.expected_recent

    @property
    def starved(self) -> bool:
        """Whether all rounds reached fewer than half of the clients that uniform cohorts would have."""
        return self.rounds >= MIN_ROUNDS and self.clients - self.never < LEVEL * (self.clients - self.expected_never)

    @property
    def warning(self) -> str | None:
        """One sentence if too few clients carried the training, else None.

        >>> Coverage(539, 40, 12, 466.3, 0, 63.0, 300).warning
        '12 of 539 clients did all the training since round 40; uniform cohorts would have reached 466'
        """
        if not (self.narrow or self.starved):
            return None
        text = (
            f"{self.recent:,} of {self.clients:,} clients did all the training since round {self.since}; "
            f"uniform cohorts would have reached {self.expected_recent:,.0f}"
        )
        return text + (f"; {self.never:,} never trained" if self.never else "")


class Tally:
    """Count the clients of every cohort. Adding a cohort costs O(cohort), :meth:`coverage` O(N + rounds).

    Parameters
    ----------
    clients : int
        N.

    Examples
    --------
    >>> tally = Tally(100)
    >>> for round_ in range(50):
    ...     tally.add(round_, np.array([3, 4, 7, 8, 9]))
    >>> tally.coverage().warning
    '5 of 100 clients did all the training since round 10; uniform cohorts would have reached 87; 95 never trained'
    """

    def __init__(self, clients: int) -> None:
        self._last = np.full(clients, -1, np.int64)  # (N,) the round of each client's last turn, -1 before the first
        self._rounds = array("q")  # 24 bytes per round, in these three arrays
        self._sizes = array("q")
        self._candidates = array("q")

    def add(self, round_: int, cohort: IntArray, candidates: int | None = None) -> None:
        """Count a cohort chosen from a number of candidates, by default all clients; rounds come in order."""
        self._last[cohort] = round_
        self._rounds.append(round_)
        self._sizes.append(len(cohort))
        self._candidates.append(_ALL if candidates is None else candidates)

    def grow(self, clients: int) -> None:
        """Make room for clients that joined."""
        self._last = np.concatenate([self._last, np.full(clients - len(self._last), -1, np.int64)])

    @classmethod
    def of(cls, clients: int, cohorts: Iterable[tuple[int, IntArray, int | None]]) -> Tally:
        """Count recorded cohorts, each (round, clients, number of candidates), in order."""
        tally = cls(clients)
        for round_, cohort, candidates in cohorts:
            tally.add(round_, cohort, candidates)
        return tally

    @classmethod
    def of_picks(
        cls, clients: int, rounds: IntArray, pick_round: IntArray, pick_client: IntArray, available: FloatArray
    ) -> Tally:
        """Count the cohorts of (T,) ascending rounds, from one pair (round, client) per pick, by ascending rounds.

        ``available`` (T,) is how many clients were available in each round; NaN if that is not known.
        """
        ends = np.searchsorted(pick_round, rounds, side="right").tolist()
        starts = np.searchsorted(pick_round, rounds, side="left").tolist()
        rows = zip(rounds.tolist(), starts, ends, known_counts(available), strict=True)
        return cls.of(clients, ((round_, pick_client[a:b], candidates) for round_, a, b, candidates in rows))

    @property
    def rounds(self) -> int:
        """How many cohorts were counted."""
        return len(self._rounds)

    @property
    def window(self) -> int:
        """How many rounds give every client two turns on average, with cohorts of the mean size."""
        picks = sum(self._sizes)
        if picks == 0:
            return MIN_ROUNDS
        return max(MIN_ROUNDS, math.ceil(TURNS * len(self._last) * len(self._sizes) / picks))

    def coverage(self, active: BoolArray | None = None) -> Coverage:
        """Return how many clients carried the training.

        Parameters
        ----------
        active : (N,) bool array, optional
            Which clients are members now; default all.
        """
        last = self._last if active is None else self._last[active]
        sizes = np.asarray(self._sizes, np.float64)
        # Members that left since are neither counted nor expected.
        candidates = np.minimum(self._candidates, len(last))
        window = min(self.window, len(sizes))
        since = self._rounds[-window] if window else 0
        return Coverage(
            clients=len(last),
            since=since,
            recent=int((last >= since).sum()) if window else 0,
            expected_recent=_expected_reach(sizes[len(sizes) - window :], candidates[len(sizes) - window :]),
            never=int((last < 0).sum()),
            expected_never=len(last) - _expected_reach(sizes, candidates),
            rounds=len(sizes),
        )


class CoverageMonitor:
    """Watch a session's cohorts and log a warning when too few clients begin to carry the training.

    It checks after every quarter of a window, so that a round costs O(cohort) on average.

    Parameters
    ----------
    selector : str
        Its name, for the log.
    clients : int
        N.
    cohorts : iterable of (round, clients, number of candidates)
        Earlier cohorts, in order.
    quiet : bool
        Whether to log the warning as information only, for a host that runs many sessions and reports on each itself.
    """

    def __init__(
        self,
        selector: str,
        clients: int,
        cohorts: Iterable[tuple[int, IntArray, int | None]] = (),
        *,
        quiet: bool = False,
    ) -> None:
        self._selector = selector
        self.tally = Tally.of(clients, cohorts)
        self._level = logging.INFO if quiet else logging.WARNING
        self._warned = False
        self._next = max(self.tally.rounds + 1, MIN_ROUNDS)

    def add(self, round_: int, cohort: IntArray, active: BoolArray, candidates: int) -> None:
        """Count a cohort chosen from a number of candidates, and check the coverage if it is time to."""
        tally = self.tally
        tally.add(round_, cohort, candidates)
        if tally.rounds < self._next or not log.isEnabledFor(self._level):
            return
        # One check takes O(N + rounds), so it may not come in every round.
        self._next = tally.rounds + max(1, min(tally.window, tally.rounds) // 4)
        warning = tally.coverage(active).warning
        if warning is not None and not self._warned:
            log.log(self._level, "selector %s: %s", self._selector, warning)
        self._warned = warning is not None


def sentences(runs: Iterable[tuple[str, Coverage]]) -> list[str]:
    """Return for each label the first warning of its runs, if there is one, as a sentence.

    >>> bad, good = Coverage(50, 10, 5, 40.0, 45, 1.0, 99), Coverage(50, 10, 41, 40.0, 0, 1.0, 99)
    >>> sentences([("flash", good), ("flash", bad), ("uniform", good)])
    ['flash: 5 of 50 clients did all the training since round 10; uniform cohorts would have reached 40; 45 never \
trained (1 of 2 runs).']
    """
    by_label: dict[str, list[str | None]] = {}
    for label, coverage in runs:
        by_label.setdefault(label, []).append(coverage.warning)
    result = []
    for label, warnings in by_label.items():
        bad = [warning for warning in warnings if warning is not None]
        if bad:
            share = f" ({len(bad)} of {len(warnings)} runs)" if len(warnings) > 1 else ""
            result.append(f"{label}: {bad[0]}{share}.")
    return result


def known_counts(numbers: FloatArray) -> list[int | None]:
    """Return numbers of clients as integers, with None for NaN."""
    return [None if math.isnan(number) else int(number) for number in np.asarray(numbers, np.float64).tolist()]


def _expected_reach(sizes: FloatArray, candidates: IntArray) -> float:
    """Return how many clients uniform cohorts reach at least, on average.

    Each round draws k of its n candidates. Their identities are not needed for a lower bound: the fewest clients are
    reached if the candidates of every round are also candidates in every larger round. A client's chance to be left out
    is exp(x), where x is the sum of log(1 - k / n) over the rounds in which it is a candidate. The sum over all clients
    of 1 - exp(x) is concave in the x, and nested candidates spread the same total over the clients least evenly.
    """
    used = candidates > 0
    order = np.argsort(-candidates[used], kind="stable")
    n, k = candidates[used][order].astype(np.float64), sizes[used][order]
    with np.errstate(divide="ignore"):
        left_out = np.exp(np.cumsum(np.log1p(-np.minimum(k / n, 1.0))))
    # In this nesting, clients n[i + 1] to n[i] are candidates in the first i + 1 rounds.
    return float(((n - np.append(n[1:], 0.0)) * (1.0 - left_out)).sum())
