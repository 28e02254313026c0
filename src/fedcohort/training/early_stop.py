r"""Stop a run when it begins to overfit: FLASH's rule, for selectors without a stopping rule.

.. [Chang2024] X. Chang et al., "FLASH: Federated Learning Across Simultaneous Heterogeneities", 2024, Sec. 3.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from fedcohort.core.params import Interval, Parameterized, param
from fedcohort.core.signals import Signal


class LossTrend(NamedTuple):
    """The last losses, and the number of rounds in a row in which they diverged."""

    training: float = math.nan
    validation: float = math.nan
    streak: int = 0


@dataclass(frozen=True, kw_only=True)
class EarlyStop(Parameterized):
    """Stop when the validation loss rose while the training loss fell, ``patience`` rounds in a row ([Chang2024]_).

    Deviations from the paper: none. The paper does not say what happens in a round in which losses are unknown or did
    not both change. Here, such a round restarts the count.

    Examples
    --------
    >>> rule, trend = EarlyStop(patience=2), LossTrend()
    >>> for training, validation in [(1.0, 1.0), (0.9, 0.95), (0.8, 0.96), (0.7, 0.99)]:
    ...     trend, reason = rule.after_round(trend, training, validation)
    >>> reason
    'the validation loss rose while the training loss fell, 2 rounds in a row'
    """

    watches: ClassVar[tuple[Signal, Signal]] = (Signal.LOSS, Signal.VALIDATION_LOSS)

    patience: int = param(5, Interval(int, 1, None), "rounds in a row (N; the paper: 0.5% to 1% of all rounds)")

    def after_round(self, trend: LossTrend, training: float, validation: float) -> tuple[LossTrend, str | None]:
        """Return the new trend and the reason to stop, or None to continue.

        Parameters
        ----------
        trend : LossTrend
            The result of the last call; ``LossTrend()`` at the start.
        training, validation : float
            Means of the two signals it ``watches``; NaN if they were not measured this round.
        """
        # "In a row" needs both losses of both rounds. The last known ones stay to compare with.
        if not (math.isfinite(training) and math.isfinite(validation)):
            return LossTrend(trend.training, trend.validation, 0), None
        diverged = validation > trend.validation and training < trend.training  # False while the trend is NaN
        streak = trend.streak + 1 if diverged else 0
        reason = None
        if streak >= self.patience:
            reason = (
                "the validation loss rose while the training loss fell, "
                f"{self.patience} round{'s' if self.patience > 1 else ''} in a row"
            )
        return LossTrend(training, validation, streak), reason
