"""Differential privacy at a Flower client: noise on what it tells, booked in a ledger of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context

from fedcohort.core.errors import BudgetError
from fedcohort.privacy.label_decoders import pack_noisy_counts
from fedcohort.privacy.ledger import Ledger
from fedcohort.privacy.noise import CountNoise, GeometricNoise, LossNoise


@dataclass(frozen=True)
class Private:
    """What a client tells about its data, and how loudly.

    Parameters
    ----------
    ledger : callable
        ``ledger(context)`` returns the client's own :class:`~fedcohort.privacy.ledger.Ledger`, in a file that outlives
        the process: a SuperNode starts a new one for every message.
    counts : CountNoise
        Noise on label counts; geometric by default. It is drawn once, and the client repeats its answer at no cost,
        whatever the data are by then; ``ledger.counts(..., refresh=True)`` draws again and is charged.
    losses : LossNoise, optional
        Noise on every loss that is answered or reported. Default: no losses are reported.
    """

    ledger: Callable[[Context], Ledger]
    counts: CountNoise = field(default_factory=GeometricNoise)
    losses: LossNoise | None = None

    def seal(self, context: Context, client: str, counts: Any) -> bytes:
        """Return noisy label counts as they travel."""
        return pack_noisy_counts(client, self.ledger(context).counts(counts, self.counts))

    def loss(self, context: Context, losses: Any) -> float:
        """Return a noisy mean of samples' losses."""
        if self.losses is None:
            raise BudgetError("This client does not report losses.", hint="give Private losses=LossNoise(...)")
        return self.ledger(context).loss(losses, self.losses)
