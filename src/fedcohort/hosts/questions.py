"""How a live host answers what a selector wants to know before it chooses; the same on every host.

A host says how a question travels: it asks clients for losses of a model, or lets a trial cohort train. What becomes of
the answers is written here once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from fedcohort.core import rng as streams
from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.protocol import Answer, Trial
from fedcohort.core.signals import Signal
from fedcohort.hosts.wire import read_report
from fedcohort.session.session import Session

_TRIAL = "trial"  # the stream of the seeds of trials
Model = TypeVar("Model")
Report = Mapping[str, object] | None


def read_losses(
    names: Sequence[str],
    signals: frozenset[Signal],
    reports: Mapping[str, Report | str],
    warn: Callable[[str, str], None],
) -> dict[Signal, FloatArray]:
    """Return losses by signal, each (q,) in the order of ``names``; NaN for a client that gave none.

    Parameters
    ----------
    reports : mapping of str to record or str
        What clients answered, by name; a text says why there is no answer, and so does a name that is missing.
    warn : callable
        Called with each client that gave no losses, and why.
    """
    values = {signal: np.full(len(names), np.nan) for signal in signals}
    for i, name in enumerate(names):
        found = reports.get(name, "no answer")
        if isinstance(found, str):
            warn(name, found)
            continue
        numbers = read_report(found)
        for signal in signals:
            values[signal][i] = numbers.get(signal, np.nan)
    return values


def try_out(
    session: Session,
    query: Trial,
    available: IntArray,
    *,
    model: Model,
    losses: Callable[[Model, Sequence[str]], FloatArray],
    train: Callable[[Sequence[str], int], Model | None],
) -> Answer:
    """Train each trial cohort, and ask everybody how its loss would change; nothing of it stays.

    Parameters
    ----------
    model
        The global model.
    losses : callable
        ``losses(model, names)`` asks clients for their losses of a model.
    train : callable
        ``train(names, seed)`` lets a cohort train, and returns the average of its models; None where there is none.
    """
    everyone = session.table.names_of(available)
    before = losses(model, everyone)
    changes = np.full((len(query.cohorts), session.table.n), np.nan)
    for row, clients in enumerate(query.cohorts):
        # Not the batches of the round itself, which may train the same clients.
        seed = int(streams.stream(session.seed, _TRIAL, session.round, row).integers(1 << 62))
        tried = train(session.table.names_of(clients), seed)
        if tried is not None:
            changes[row, available] = losses(tried, everyone) - before
    return Answer(query, {query.answered_with: changes})
