"""FLASH's early stop for other selectors (Sec. 3.2, last paragraph)."""

import math

import pytest

from fedcohort.core.errors import ParameterError
from fedcohort.training.early_stop import EarlyStop, LossTrend


def run(patience, pairs):
    """Return the round after which it stops, counted from 0, or None."""
    rule, watch = EarlyStop(patience=patience), LossTrend()
    for t, (training, validation) in enumerate(pairs):
        watch, reason = rule.after_round(watch, training, validation)
        if reason:
            assert str(patience) in reason
            return t
    return None


def test_stops_after_patience_rounds_of_divergence():
    pairs = [(1.0, 1.0), (0.9, 0.9), (0.8, 0.91), (0.7, 0.92), (0.6, 0.93), (0.5, 0.94)]
    assert run(1, pairs) == 2
    assert run(3, pairs) == 4
    assert run(5, pairs) is None


def test_any_other_round_restarts_the_count():
    apart = [(1 - 0.1 * i, 1 + 0.1 * i) for i in range(3)]
    assert run(2, apart) == 2
    assert run(3, [*apart, (0.85, 1.3), (0.7, 1.29), (0.6, 1.35), (0.5, 1.36)]) is None
    both_fall = [(1.0, 1.0), (0.9, 1.1), (0.8, 1.0), (0.7, 1.1)]
    assert run(2, both_fall) is None
    standing_still = [(1.0, 1.0), (0.9, 1.1), (0.9, 1.1), (0.8, 1.2)]
    assert run(2, standing_still) is None


def test_unknown_losses_are_no_evidence():
    assert run(2, [(1.0, 1.0), (0.9, 1.1), (math.nan, 1.2), (0.8, 1.3)]) is None
    assert run(1, [(math.nan, 1.0), (0.9, 1.1), (0.8, 1.2)]) == 2
    assert run(1, [(1.0, 1.0), (0.9, math.inf)]) is None


def test_patience_is_checked():
    with pytest.raises(ParameterError, match="patience"):
        EarlyStop(patience=0)
