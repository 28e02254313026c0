"""How much of a federation does the training: a watch for selectors that keep to a small circle of clients.

A selector may starve clients on purpose, or because it met a federation it was not made for; either way its operator
should know. :class:`Coverage` compares how many distinct clients carried the last rounds, and how many ever trained,
with what uniform cohorts of the same sizes would have reached at least, drawn from as many candidates as there were in
each round. It says so and changes nothing.
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

# Not a test of significance: a selector that learns differs from uniform cohorts significantly, and on purpose.
LEVEL = 0.5
"""A federation counts as badly covered when fewer than this share of the clients that uniform cohorts would have
reached took part."""

TURNS = 2.0  # the last rounds are those in which every client would have had two turns on average
FEWEST_ROUNDS = 20  # below, chance explains everything
_ALL = 2**62  # candidates where all clients were: more than there will ever be


@dataclass(frozen=True)
class Coverage:
    """Who carried the training.

    Attributes
    ----------
    clients : int
        Members of the federation.
    since : int
        First of the last rounds, those in which everybody would have had two turns with uniform cohorts.
    recent : int
        Distinct members asked to train since then.
    expected_recent : float
        As many as uniform cohorts of the same sizes would have asked at least, from as many candidates.
    never : int
        Members never asked to train in any round.
    rounds : int
        Rounds looked at in all.
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
        return self.rounds >= FEWEST_ROUNDS and self.recent < LEVEL * self.expected_recent

    @property
    def starved(self) -> bool:
        """Whether fewer than half of the clients that uniform cohorts would have reached ever trained."""
        return self.rounds >= FEWEST_ROUNDS and self.clients - self.never < LEVEL * (self.clients - self.expected_never)

    @property
    def warning(self) -> str | None:
        """One sentence when the federation is badly covered, else None.

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
    """Counts the clients of every cohort; adding one costs O(cohort), a look O(N + rounds).

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
        self._last = np.full(clients, -1, np.int64)  # (N,) the round of its last turn, -1 before the first
        self._rounds = array("q")  # 24 bytes a round is all that a session remembers of its past
        self._sizes = array("q")
        self._candidates = array("q")

    def add(self, round_: int, cohort: IntArray, candidates: int | None = None) -> None:
        """Count a cohort, chosen from so many candidates, by default from all clients; rounds come in order."""
        self._last[cohort] = round_
        self._rounds.append(round_)
        self._sizes.append(len(cohort))
        self._candidates.append(_ALL if candidates is None else candidates)

    def grow(self, clients: int) -> None:
        """Make room for clients that joined."""
        self._last = np.concatenate([self._last, np.full(clients - len(self._last), -1, np.int64)])

    @classmethod
    def of(cls, clients: int, cohorts: Iterable[tuple[int, IntArray, int | None]]) -> Tally:
        """Count the cohorts of a record, (round, clients, number of candidates) in order."""
        tally = cls(clients)
        for round_, cohort, candidates in cohorts:
            tally.add(round_, cohort, candidates)
        return tally

    @classmethod
    def of_picks(
        cls, clients: int, rounds: IntArray, pick_round: IntArray, pick_client: IntArray, available: FloatArray
    ) -> Tally:
        """Count the cohorts of (T,) ascending rounds, given as one pair (round, client) per pick, rounds ascending.

        ``available`` (T,) is how many clients were there in each round; NaN where that is not known.
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
            return FEWEST_ROUNDS
        return max(FEWEST_ROUNDS, math.ceil(TURNS * len(self._last) * len(self._sizes) / picks))

    def coverage(self, active: BoolArray | None = None) -> Coverage:
        """Return how many clients carried the training.

        Parameters
        ----------
        active : (N,) bool array, optional
            Who is a member now; default everybody.
        """
        last = self._last if active is None else self._last[active]
        sizes = np.asarray(self._sizes, np.float64)
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
    """Watches a session's cohorts and puts a warning into the log when too few clients carry the training.

    It looks at every quarter of a window, so that a round costs O(cohort) on average, and speaks when the warning
    begins, not at every look.

    Parameters
    ----------
    selector : str
        Its name, for the log.
    clients : int
        N.
    cohorts : iterable of (round, clients, number of candidates)
        What was asked before, in order.
    quiet : bool
        Whether the log gets it as information only: for a host that runs many sessions in one process and reports about
        each itself.
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
        self._tally = Tally.of(clients, cohorts)
        self._quiet = quiet
        self._warned = False
        self._next = max(self._tally.rounds + 1, FEWEST_ROUNDS)

    def add(self, round_: int, cohort: IntArray, active: BoolArray, candidates: int) -> None:
        """Count a cohort, chosen from so many candidates, and now and then look."""
        self._tally.add(round_, cohort, candidates)
        if self._tally.rounds < self._next:
            return
        # A look costs O(N + rounds): at every quarter of a window that is O(cohort) a round.
        self._next = self._tally.rounds + max(1, min(self._tally.window, self._tally.rounds) // 4)
        warning = self.coverage(active).warning
        if warning is not None and not self._warned:
            log.log(logging.INFO if self._quiet else logging.WARNING, "selector %s: %s", self._selector, warning)
        self._warned = warning is not None

    def grow(self, clients: int) -> None:
        """Make room for clients that joined."""
        self._tally.grow(clients)

    def coverage(self, active: BoolArray) -> Coverage:
        """Return how many of the members carried the training so far."""
        return self._tally.coverage(active)


def sentences(runs: Iterable[tuple[str, Coverage]]) -> list[str]:
    """Return a sentence for each label that has badly covered runs: that of the first such run.

    >>> bad, good = Coverage(50, 10, 5, 40.0, 45, 1.0, 99), Coverage(50, 10, 41, 40.0, 0, 1.0, 99)
    >>> sentences([("flash", good), ("flash", bad), ("uniform", good)])
    ['flash: 5 of 50 clients did all the training since round 10; uniform cohorts would have reached 40; 45 never \
trained (1 of 2 runs).']
    """
    by_label: dict[str, list[str | None]] = {}
    for label, coverage in runs:
        by_label.setdefault(label, []).append(coverage.warning)
    found = []
    for label, warnings in by_label.items():
        bad = [warning for warning in warnings if warning is not None]
        if bad:
            share = f" ({len(bad)} of {len(warnings)} runs)" if len(warnings) > 1 else ""
            found.append(f"{label}: {bad[0]}{share}.")
    return found


def known_counts(numbers: FloatArray) -> list[int | None]:
    """Return numbers of clients as integers, None where one is NaN."""
    return [None if math.isnan(number) else int(number) for number in np.asarray(numbers, np.float64).tolist()]


def _expected_reach(sizes: FloatArray, candidates: IntArray) -> float:
    """Return how many clients uniform cohorts reach at least, on average.

    Each round draws k of the n candidates it has. Who they were does not matter: the fewest are reached if the
    candidates of a round are always among those of every round with more of them. A client's chance to be left out is
    exp(x), where x is the sum of log(1 - k / n) over the rounds it is a candidate in; the sum over all clients of
    1 - exp(x) is concave in the x, and nested candidates spread the same total over the clients least evenly.
    """
    kept = candidates > 0
    order = np.argsort(-candidates[kept], kind="stable")
    n, k = candidates[kept][order].astype(np.float64), sizes[kept][order]
    with np.errstate(divide="ignore"):
        left_out = np.exp(np.cumsum(np.log1p(-np.minimum(k / n, 1.0))))
    # Clients n[i + 1] to n[i] of the nesting are candidates in the first i + 1 of these rounds.
    return float(((n - np.append(n[1:], 0.0)) * (1.0 - left_out)).sum())
