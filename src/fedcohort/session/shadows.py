"""Shadow selectors: they see the same requests and outcomes, and whatever goes wrong with one never disturbs a session.

A shadow's answers are exactly what the session's own selector paid for. One that needs more says so instead of naming
picks it cannot know; one that raises is recorded as failed and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcohort.core.arrays import IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError
from fedcohort.core.protocol import Answer, Cohort, Losses, Query, Selector, Slate, Status
from fedcohort.core.signals import METRIC_SIGNALS, Signal
from fedcohort.journal import Journal, ReplyBlock
from fedcohort.journal.codec import pack_many, sealed_state
from fedcohort.session.explain import recorded_scores
from fedcohort.session.outcomes import in_cohort_order, outcome_for, what_was_paid_for
from fedcohort.session.validation import check_cohort

EVENT = "shadow"
_NOBODY = np.empty(0, np.int64)


@dataclass(frozen=True)
class Pick:
    """What a shadow would have picked, ready to be recorded.

    Attributes
    ----------
    state : the shadow's state afterwards
    picked : (k,) int array
    scores : its scores as the journal stores them, or None
    note : why it names nobody, or None
    failed : whether it raised, so that it is to be dropped
    """

    state: Any
    picked: IntArray
    scores: bytes | None
    note: str | None
    failed: bool = False


def check_names(shadows: Mapping[str, Selector[Any]]) -> dict[str, Selector[Any]]:
    """Refuse a shadow without a name, or with one that is no text."""
    for name in shadows:
        if not isinstance(name, str) or not name or not name.isprintable():
            raise InputError(f"A shadow selector needs a name, a printable text that is not empty. Got {name!r}.")
    return dict(shadows)


def adapted(
    selector: Selector[Any],
    shadows: Mapping[str, Selector[Any]],
    clients: ClientTable,
    signals: frozenset[Signal] | None,
) -> tuple[Selector[Any], dict[str, Selector[Any]]]:
    """Return selectors as they work with what is supplied; shadows are shown only what the selector itself reads."""
    selector = selector.adapted(clients.signals | (signals or frozenset()))
    seen = clients.signals | selector.requires
    return selector, {name: shadow.adapted(seen) for name, shadow in shadows.items()}


def choose(
    shadow: Selector[Any],
    state: Any,
    slate: Callable[[], Slate],
    answer: Answer | None,
    streams: tuple[np.random.Generator, np.random.Generator],
    blind: str | None,
) -> Pick:
    """Let a shadow choose.

    Parameters
    ----------
    shadow : Selector
    state : its state
    slate : callable
        Returns the slate; called here, because the shadow's own ``size`` may raise.
    answer : Answer or None
        What the session's own selector asked and learnt.
    streams : two generators
        For its question and its choice.
    blind : str or None
        What it could not learn from the last round, if anything.
    """
    if blind is not None:
        return Pick(state, _NOBODY, None, blind)
    try:
        round_ = slate()
        question = shadow.query(state, round_, streams[0])
        known = None
        if question is not None:
            lacking = unpaid(question, answer)
            if lacking is not None:
                return Pick(state, _NOBODY, None, lacking)
            known = what_was_paid_for(question, answer, round_.n)
        cohort, after = shadow.select(state, round_, known, streams[1])
        check_cohort(shadow, cohort, round_)
        sealed_state(after, round_.n)
        arrays = recorded_scores(cohort)
        return Pick(after, cohort.clients, None if arrays is None else pack_many(arrays), None)
    except Exception as error:  # a shadow is somebody else's code on facts it did not choose
        return Pick(state, _NOBODY, None, f"failed: {error}", failed=True)


def unpaid(question: Query, answer: Answer | None) -> str | None:
    """Return what a shadow asks and nobody paid for, in words, or None when all of it was."""
    if not isinstance(question, Losses):
        return "lacked its signals: it asks for a trial of cohorts, which only the session's own selector can"
    wanted = ", ".join(sorted(question.signals))
    if answer is None or not isinstance(answer.query, Losses) or not question.signals <= answer.query.signals:
        return f"lacked its signals: it asks {len(question.clients)} clients for {wanted}, and nobody was asked"
    unasked = int((~np.isin(question.clients, answer.query.clients)).sum())
    if unasked:
        return (
            f"lacked its signals: {unasked} of the {len(question.clients)} clients it asks for {wanted} were not asked"
        )
    return None


def unreported(shadow: Selector[Any], replies: ReplyBlock) -> str | None:
    """Return which signals a shadow needs and no reply of a round brought, in words, or None."""
    needed = shadow.requires & METRIC_SIGNALS
    if needed and (replies.status == Status.OK).any():
        lacking = sorted(s.value for s in needed if s.value not in replies.metrics)
        if lacking:
            return f"lacked its signals: no client reported {', '.join(lacking)}"
    return None


def replayed(selector: Selector[Any], table: ClientTable, journal: Journal, rng: np.random.Generator) -> Any:
    """Return the state of a selector that has seen every outcome a journal holds.

    Rounds whose replies lack a signal the selector needs are passed over. ``table`` grants what it declared.
    """
    state = selector.init(table, rng)
    for row in journal.cohorts():
        blocks = [block for block in journal.reply_blocks(row.ticket) if not block.late]
        if row.told_at is None or not blocks:
            continue
        cohort = Cohort(row.clients, weights=row.weights, work=row.work, round=row.round, ticket=row.ticket)
        whole = in_cohort_order(cohort, blocks)
        if unreported(selector, whole) is None:
            state = sealed_state(selector.update(state, outcome_for(selector, table, cohort, whole)), table.n)
    return sealed_state(state, table.n)
