"""Which cohort a session chooses next, and the random numbers it is chosen with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedcohort.core import rng as streams
from fedcohort.journal import Journal
from fedcohort.session.resume import next_round


@dataclass(frozen=True, slots=True)
class Turn:
    """The next cohort's place in the session.

    Parameters
    ----------
    seed : int
        The session's seed.
    round : int
        The number of the next round, counted from 0.
    attempt : int
        How often that round was abandoned before.
    ticket : int
        The number of the next cohort; every cohort has its own, even if its round is repeated.

    Examples
    --------
    >>> turn = Turn(seed=3)
    >>> turn.following()
    Turn(seed=3, round=1, attempt=0, ticket=1)
    """

    seed: int
    round: int = 0
    attempt: int = 0
    ticket: int = 0

    @classmethod
    def from_journal(cls, journal: Journal, seed: int) -> Turn:
        """Return the turn at which a session with this journal goes on."""
        round_, attempt = next_round(journal)
        return cls(seed, round_, attempt, journal.last()[1] + 1)

    def following(self) -> Turn:
        """Return the turn after this one."""
        return Turn(self.seed, self.round + 1, 0, self.ticket + 1)

    def at_round(self, round_: int, attempt: int) -> Turn:
        """Return the turn with another round: a round that was abandoned is repeated."""
        return replace(self, round=round_, attempt=attempt)

    def stream(self, kind: str, name: str = "") -> np.random.Generator:
        """Return the generator for one purpose; ``name`` is that of a shadow."""
        # An abandoned round must not draw the same cohort again.
        attempt = (self.attempt,) if self.attempt else ()
        return streams.stream(self.seed, f"{kind}:{name}" if name else kind, self.round, *attempt)
