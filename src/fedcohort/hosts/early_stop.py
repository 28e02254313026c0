"""End a live run when a metric of the global model no longer improves; the same on every host, with rounds and without.

Everything follows from the numbers in the journal, so a run that is started again after it has ended early ends at
once, and one that is interrupted ends after the same model as an unbroken one.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from fedcohort.core.params import Boolean, Interval, Text, check_values
from fedcohort.session.session import Session

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EarlyStop:
    """When a run ends before its last model.

    Parameters
    ----------
    metric : str
        The name under which the number is recorded: ``accuracy`` if the server's own evaluation returns it,
        ``evaluate/accuracy`` or ``train/accuracy`` if clients measure it. Clients can lie about what they measure, and
        so end a run or keep it going.
    models : int
        How many global models in a row must not improve it. Models that were not evaluated count too.
    min_improvement : float
        An improvement must be larger than this.
    minimise : bool
        Whether smaller is better, as for a loss.
    """

    metric: str
    models: int
    min_improvement: float = 0.0
    minimise: bool = False

    def __post_init__(self) -> None:
        amount = Interval(float, 0, None)
        checks = {"metric": Text(), "models": Interval(int, 1, None), "min_improvement": amount, "minimise": Boolean()}
        check_values(self, checks)


class Watch:
    """Follows a session's metric; without a rule, nothing ends a run early."""

    def __init__(self, session: Session, rule: EarlyStop | None) -> None:
        self._session = session
        self._rule = rule
        self._seen = -1  # the newest model whose number was read
        self._best, self._best_model = -math.inf, -1
        self._warned = False

    def reason(self) -> str | None:
        """Return why the run ends now, given what is committed, or None."""
        rule, session = self._rule, self._session
        if rule is None:
            return None
        recorded = session.journal.metrics(since=self._seen + 1)
        sign = -1.0 if rule.minimise else 1.0
        for model, numbers in recorded.items():
            value = sign * numbers.get(rule.metric, math.nan)
            if math.isfinite(value):  # a model that was not evaluated, or is nan, counts with the next one that was
                self._seen = model
                if self._best_model < 0 or value > self._best + rule.min_improvement:
                    self._best, self._best_model = value, model
        if self._best_model < 0:
            if session.round >= rule.models and not self._warned:
                self._warned = True
                names = sorted({name for numbers in recorded.values() for name in numbers})
                log.warning(
                    "%r is not recorded, so the run does not end early; recorded: %s", rule.metric, names or "nothing"
                )
            return None
        worse = self._seen - self._best_model
        if worse < rule.models:
            return None
        least = f" by more than {rule.min_improvement:g}" if rule.min_improvement else ""
        return (
            f"{rule.metric} has not improved{least} in {worse} models; "
            f"its best was {sign * self._best:.4g}, after model {self._best_model}"
        )
