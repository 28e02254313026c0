"""What a selector sees: a round's outcome, and, for a shadow, its part of the session's answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedcohort.core.arrays import FloatArray, freeze
from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import Answer, Cohort, Losses, Outcome, Selector, Status
from fedcohort.core.signals import Signal
from fedcohort.journal import ReplyBlock


def in_cohort_order(cohort: Cohort, blocks: Sequence[ReplyBlock]) -> ReplyBlock:
    """Join reports that together name every client of a cohort once, in the order of the cohort."""
    (first, *others) = blocks
    if not others and (first.clients is cohort.clients or np.array_equal(first.clients, cohort.clients)):
        return first
    order = np.argsort(cohort.clients)
    status = np.full(cohort.size, Status.MISSING, np.int8)
    kept = np.zeros(cohort.size, np.bool_)
    metrics: dict[str, FloatArray] = {}
    for block in blocks:
        at = order[np.searchsorted(cohort.clients, block.clients, sorter=order)]
        status[at] = block.status
        kept[at] = block.kept
        for name, column in block.metrics.items():
            metrics.setdefault(name, np.full((cohort.size, *column.shape[1:]), np.nan))[at] = column
    return ReplyBlock(
        cohort.ticket,
        max(block.at for block in blocks),
        False,
        cohort.clients,
        freeze(status),
        freeze(kept),
        {name: freeze(column) for name, column in metrics.items()},
    )


def outcome_for(selector: Selector[Any], table: ClientTable, cohort: Cohort, replies: ReplyBlock) -> Outcome:
    """Return a complete round as ``selector`` sees it through ``table``, which grants only what it declared.

    ``replies`` has the cohort's clients in the cohort's order. A client whose reply lacks a number that this selector
    reads, for example because it was forgotten since, counts as invalid.
    """
    requires = selector.requires
    metrics: dict[Signal, FloatArray] = {}
    status = replies.status
    if reported := [signal for signal in requires if signal.reported]:
        ok = replies.status == Status.OK
        for signal in reported:
            column = replies.metrics.get(signal.name)
            if column is None:  # the number of classes is not known here, but there is at least one
                column = np.full(cohort.size if signal.width is None else (cohort.size, signal.numbers(1)), np.nan)
            elif (invalid := ok & ~np.isfinite(column.reshape(cohort.size, -1)).all(axis=1)).any():
                status = freeze(np.where(invalid, np.int8(Status.INVALID), status))
            metrics[signal] = freeze(np.where(ok if column.ndim == 1 else ok[:, None], column, np.nan))
    return Outcome(
        round=cohort.round,
        clients=cohort.clients,
        status=status,
        table=table,
        _kept=replies.kept,
        _metrics=metrics,
        _granted=requires,
    )


def answer_from_paid(question: Losses, answer: Answer, n: int) -> Answer:
    """Answer a shadow's question from the answer to the session's own selector, which covers it."""
    assert isinstance(answer.query, Losses)
    values = {}
    for signal in question.signals:
        losses = np.full(n, np.nan)
        losses[answer.query.clients] = answer[signal]
        values[signal] = losses[question.clients]
    return Answer(question, values)
