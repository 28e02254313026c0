"""How a live host answers a selector's questions; the same on every host.

A host asks clients for the losses of a model, or lets a trial cohort train. The functions here turn the results into
answers.
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

_TRIAL = "trial"  # the random stream for the seeds of trials
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
        By name, what a client answered, or a text that says why there is no answer. A missing name means no answer.
    warn : callable
        ``warn(name, reason)`` is called for each client that gave no losses.
    """
    values = {signal: np.full(len(names), np.nan) for signal in signals}
    for i, name in enumerate(names):
        report = reports.get(name, "no answer")
        if isinstance(report, str):
            # NaN stays: a selector must do without a client that does not answer, and may not wait for it.
            warn(name, report)
            continue
        numbers = read_report(report)
        for signal in signals:
            values[signal][i] = numbers.get(signal, np.nan)
    return values


def try_out(
    session: Session,
    query: Trial,
    available: IntArray,
    *,
    model: Model,
    losses: Callable[[Model, Sequence[str], frozenset[Signal]], Mapping[Signal, FloatArray]],
    train: Callable[[Sequence[str], int], Model | None],
) -> Answer:
    """Train each trial cohort, measure how everybody's loss changes, and discard the models.

    Parameters
    ----------
    model
        The global model.
    losses : callable
        ``losses(model, names, signals)`` asks clients for these losses of a model.
    train : callable
        ``train(names, seed)`` lets a cohort train and returns the average of its models, or None if there are none.
    """
    everyone, signals = session.table.names_of(available), frozenset({query.measured})
    before = losses(model, everyone, signals)[query.measured]
    changes = np.full((len(query.cohorts), session.table.n), np.nan)
    for row, clients in enumerate(query.cohorts):
        # The round itself may train the same clients, and must use other batches.
        seed = int(streams.stream(session.seed, _TRIAL, session.round, row).integers(1 << 62))
        trained = train(session.table.names_of(clients), seed)
        if trained is not None:
            changes[row, available] = losses(trained, everyone, signals)[query.measured] - before
    return Answer(query, {query.answered_with: changes})
