"""How much of a federation does the training: a watch for selectors that keep to a small circle of clients.

A selector may starve clients on purpose, or because it met a federation it was not made for; either way whoever runs it
should know. :class:`Coverage` compares how many distinct clients carried the last rounds, and how many ever trained,
with what uniform cohorts of the same sizes would have reached. It says so and changes nothing.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedcohort.core.arrays import BoolArray, IntArray

log = logging.getLogger(__name__)

LEVEL = 0.5
"""A federation counts as badly covered when fewer than this share of the clients that uniform cohorts would have
reached took part."""

TURNS = 2.0  # the last rounds are those in which every client would have had two turns on average
FEWEST_ROUNDS = 20  # below, chance explains everything


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
        As many as uniform cohorts of the same sizes would have asked.
    never : int
        Members never asked to train in any round.
    expected_never : float
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
        '12 of 539 clients did all the training since round 40, uniform cohorts would have reached 466'
        """
        if not (self.narrow or self.starved):
            return None
        text = (
            f"{self.recent:,} of {self.clients:,} clients did all the training since round {self.since}, "
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
    '5 of 100 clients did all the training since round 10, uniform cohorts would have reached 87; 95 never trained'
    """

    def __init__(self, clients: int) -> None:
        self._last = np.full(clients, -1, np.int64)  # (N,) the round of its last turn, -1 before the first
        self._rounds = array("q")  # 16 bytes a round is all that a session remembers of its past
        self._sizes = array("q")

    def add(self, round_: int, cohort: IntArray) -> None:
        """Count a cohort; rounds come in order."""
        self._last[cohort] = round_
        self._rounds.append(round_)
        self._sizes.append(len(cohort))

    def grow(self, clients: int) -> None:
        """Make room for clients that joined."""
        self._last = np.concatenate([self._last, np.full(clients - len(self._last), -1, np.int64)])

    @classmethod
    def of(cls, clients: int, cohorts: Iterable[tuple[int, IntArray]]) -> Tally:
        """Count the cohorts of a record, (round, clients) in order."""
        tally = cls(clients)
        for round_, cohort in cohorts:
            tally.add(round_, cohort)
        return tally

    @classmethod
    def of_picks(cls, clients: int, rounds: IntArray, pick_round: IntArray, pick_client: IntArray) -> Tally:
        """Count the cohorts of (T,) ascending rounds, given as one pair (round, client) per pick, rounds ascending."""
        ends = np.searchsorted(pick_round, rounds, side="right")
        starts = np.searchsorted(pick_round, rounds, side="left")
        return cls.of(
            clients,
            ((r, pick_client[a:b]) for r, a, b in zip(rounds.tolist(), starts.tolist(), ends.tolist(), strict=True)),
        )

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
        window = min(self.window, len(sizes))
        since = self._rounds[-window] if window else 0
        return Coverage(
            clients=len(last),
            since=since,
            recent=int((last >= since).sum()) if window else 0,
            expected_recent=len(last) - _expected_left_out(len(last), sizes[len(sizes) - window :]),
            never=int((last < 0).sum()),
            expected_never=_expected_left_out(len(last), sizes),
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
    cohorts : iterable of (round, clients)
        What was asked before, in order.
    quiet : bool
        Whether the log gets it as information only: for a host that runs many sessions in one process and reports about
        each itself.
    """

    def __init__(
        self, selector: str, clients: int, cohorts: Iterable[tuple[int, IntArray]] = (), *, quiet: bool = False
    ) -> None:
        self._selector = selector
        self._tally = Tally.of(clients, cohorts)
        self._quiet = quiet
        self._warned = False
        self._next = max(self._tally.rounds + 1, FEWEST_ROUNDS)

    def add(self, round_: int, cohort: IntArray, active: BoolArray) -> None:
        """Count a cohort, and now and then look."""
        self._tally.add(round_, cohort)
        if self._tally.rounds < self._next:
            return
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
    ['flash: 5 of 50 clients did all the training since round 10, uniform cohorts would have reached 40; 45 never \
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


def _expected_left_out(clients: int, sizes: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Return how many clients uniform cohorts of these sizes leave out on average, N prod (1 - k / N)."""
    if clients == 0:
        return 0.0
    return float(clients * np.prod(1.0 - np.minimum(sizes / clients, 1.0)))
