"""What a selector is shown: a round's outcome, and to a shadow the part of an answer somebody else paid for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedcohort.arrays import FloatArray, sealed
from fedcohort.clients import ClientTable
from fedcohort.journal import ReplyRow
from fedcohort.protocol import Answer, Cohort, Losses, Outcome, Query, Selector, Status, Trial
from fedcohort.signals import REPORT_SIGNALS, Signal


def outcome_for(
    selector: Selector[Any], table: ClientTable, cohort: Cohort, replies: Mapping[int, ReplyRow]
) -> Outcome:
    """Return a complete round as ``selector`` may see it through ``table``, which grants only what it declared."""
    rows = [replies[int(c)] for c in cohort.clients]
    status = np.array([row.status for row in rows], np.int8)
    metrics: dict[Signal, FloatArray] = {}
    for signal in selector.requires & REPORT_SIGNALS:
        values = [row.metrics.get(signal.value, np.nan) if row.status == Status.OK else np.nan for row in rows]
        metrics[signal] = sealed(np.array(values, np.float64))
    return Outcome(
        round=cohort.round,
        clients=cohort.clients,
        status=sealed(status),
        table=table,
        _kept=sealed(np.array([row.kept for row in rows], np.bool_)),
        _metrics=metrics,
        _granted=selector.requires,
    )


def what_was_paid_for(question: Query, answer: Answer | None, n: int) -> Answer:
    """Answer a shadow's question from what the session's own selector paid for; the rest is NaN."""
    if isinstance(question, Trial):
        nothing = np.full((len(question.cohorts), n), np.nan)
        return Answer(question, {Signal.LOSS_CHANGE: nothing})
    values = {signal: np.full(len(question.clients), np.nan) for signal in question.signals}
    if answer is not None and isinstance(answer.query, Losses):
        known = np.full(n, np.nan)
        for signal in question.signals & answer.query.signals:
            known[:] = np.nan
            known[answer.query.clients] = answer[signal]
            values[signal] = known[question.clients]
    return Answer(question, values)
