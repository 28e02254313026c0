"""The number of the next cohort and its random streams."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedcohort.core import rng as streams
from fedcohort.journal import Journal
from fedcohort.session.resume import is_asynchronous, next_round


@dataclass(frozen=True, slots=True)
class Turn:
    """The next cohort's place in the session.

    Parameters
    ----------
    seed : int
        The session's seed.
    round : int
        The number of the next round, from 0; in an asynchronous session, the number of the newest global model.
    attempt : int
        How often that round was abandoned before; in an asynchronous session, how many cohorts it has had.
    ticket : int
        The number of the next cohort, which is never used again, even if the round is repeated.
    asynchronous : bool
        Whether a round lasts until there is a new model, however many cohorts it has.

    Examples
    --------
    >>> turn = Turn(seed=3)
    >>> turn.following()
    Turn(seed=3, round=1, attempt=0, ticket=1, asynchronous=False)
    """

    seed: int
    round: int = 0
    attempt: int = 0
    ticket: int = 0
    asynchronous: bool = False

    @classmethod
    def from_journal(cls, journal: Journal, seed: int) -> Turn:
        """Return the turn at which a session with this journal continues."""
        round_, attempt = next_round(journal)
        return cls(seed, round_, attempt, journal.last()[1] + 1, is_asynchronous(journal))

    def following(self) -> Turn:
        """Return the turn after a cohort."""
        if self.asynchronous:
            return Turn(self.seed, self.round, self.attempt + 1, self.ticket + 1, True)
        return Turn(self.seed, self.round + 1, 0, self.ticket + 1)

    def with_new_model(self) -> Turn:
        """Return the turn after a new global model."""
        return replace(self, round=self.round + 1, attempt=0)

    def at_round(self, round_: int, attempt: int) -> Turn:
        """Return the turn at another round, for example to repeat an abandoned one."""
        return replace(self, round=round_, attempt=attempt)

    def stream(self, kind: str, name: str = "") -> np.random.Generator:
        """Return the generator for one purpose; ``name`` is the shadow's, if it is for a shadow."""
        # Every cohort of a round needs its own random numbers.
        attempt = (self.attempt,) if self.attempt else ()
        return streams.stream(self.seed, f"{kind}:{name}" if name else kind, self.round, *attempt)
