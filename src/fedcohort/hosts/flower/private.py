"""Differential privacy at a Flower client: noise on its answers, recorded in the client's own ledger."""

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
    """The noise on what a client tells about its data.

    Parameters
    ----------
    ledger : callable
        ``ledger(context)`` returns the client's :class:`~fedcohort.privacy.ledger.Ledger`, in a file that outlives the
        process, because a SuperNode starts a new process for every message.
    counts : CountNoise
        Noise on label counts; geometric by default. It is drawn once. After that, the client repeats its answer at no
        cost, even if its data change; ``ledger.counts(..., refresh=True)`` draws again and is charged.
    losses : LossNoise, optional
        Noise on every loss that the client reports. Default: no losses are reported.
    """

    ledger: Callable[[Context], Ledger]
    counts: CountNoise = field(default_factory=GeometricNoise)
    losses: LossNoise | None = None

    def seal(self, context: Context, client: str, counts: Any) -> bytes:
        """Return noisy label counts in the form that is sent."""
        return pack_noisy_counts(client, self.ledger(context).counts(counts, self.counts))

    def loss(self, context: Context, losses: Any) -> float:
        """Return the noisy mean of the losses of samples."""
        if self.losses is None:
            raise BudgetError("This client does not report losses.", hint="give Private losses=LossNoise(...)")
        return self.ledger(context).loss(losses, self.losses)
