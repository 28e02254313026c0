"""Aggregation that survives errors of the wrapped strategy, and finds the reply that caused them.

The checks of single replies cannot know what a strategy will do with them: Krum may have too few models, trees may not
be JSON, an app's metric function may fail. If aggregation raises an error or its result is not finite, copies of the
strategy try the replies one by one and together. The replies that make the difference are left out and reported.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy

from fedcohort.core.text import shorten
from fedcohort.hosts.flower.npy import as_numpy, to_array
from fedcohort.hosts.flower.replies import CheckedMessage, is_finite
from fedcohort.hosts.flower.wrapped_strategy import WrappedStrategy

log = logging.getLogger("flwr.fedcohort")
_STARTS = 4  # how many replies to try as the start of a largest set that aggregates
_NOT_TOGETHER = "the strategy can aggregate the others, but not together with it"


@dataclass(frozen=True)
class Average:
    """The result of a round's aggregation.

    Attributes
    ----------
    arrays : ArrayRecord or None
        The next model; None if the round gives none.
    blamed : dict of str to str
        The clients whose replies made aggregation fail, each with the error.
    error : str
        What the strategy raised if no client could be blamed; empty if it raised nothing.
    """

    arrays: ArrayRecord | None = None
    metrics: MetricRecord | None = None
    blamed: dict[str, str] = field(default_factory=dict)
    error: str = ""


class _Attempt:
    """A strategy and a set of replies, to be aggregated several times from the same initial state."""

    def __init__(
        self, wrapped: WrappedStrategy, server_round: int, replies: Sequence[CheckedMessage], errors: Sequence[Message]
    ):
        self._wrapped = wrapped
        self._round = server_round
        self._errors = list(errors)
        # Some strategies change their state before they raise an error: moments, counters, pending privacy events.
        self._before = [_copy_tables(vars(level)) for level in wrapped.levels]
        self._contents = {reply.name: dict(reply.content) for reply in replies}

    def __call__(self, replies: Sequence[CheckedMessage], strategy: Strategy | None = None) -> Average:
        messages = [reply.message for reply in replies if reply.message is not None]
        for reply, message in zip(replies, messages, strict=True):
            # Each call gets copies, because strategies write into replies (clipping) or remove arrays (the median).
            parts = self._contents[reply.name].items()
            message.content = RecordDict({key: cast(Any, part.copy()) for key, part in parts})
        strategy = strategy or self._wrapped.strategy
        arrays, metrics = strategy.aggregate_train(self._round, [*messages, *self._errors])
        if arrays is not None:
            if missing := [key for key in replies[0].arrays if key not in arrays]:
                raise ValueError(f"the aggregated model lacks the array {missing[0]!r}")
            for key, array in arrays.items():
                if not is_finite(as_numpy(array).ravel()):
                    raise ValueError(f"the aggregated array {key!r} has NaN or infinite entries")
        return Average(arrays, metrics)

    def restore(self) -> None:
        """Restore the strategy's attributes."""
        for level, before in zip(self._wrapped.levels, self._before, strict=True):
            vars(level).clear()
            vars(level).update(_copy_tables(before))

    def fails(self, replies: Sequence[CheckedMessage]) -> str:
        """Return the error of a copy of the strategy on ``replies``, or an empty string."""
        try:
            average = self(replies, self._wrapped.copy().strategy)
        except Exception as error:
            return error_text(error)
        return "" if average.arrays is not None else "it gave no model"


def aggregate(
    wrapped: WrappedStrategy, server_round: int, replies: Sequence[CheckedMessage], errors: Sequence[Message] = ()
) -> Average:
    """Aggregate valid replies with the strategy; its errors are returned, not raised.

    Parameters
    ----------
    errors : sequence of Message
        The errors of other clients of the cohort, which some strategies need (those for differential privacy).
    """
    attempt = _Attempt(wrapped, server_round, replies, errors)
    try:
        return attempt(replies)
    except Exception as error:
        why = error_text(error)
        log.warning("%s could not aggregate round %d: %s", wrapped, server_round - 1, why)
        log.debug("aggregation failed", exc_info=True)
    attempt.restore()
    blamed = _find_culprits(attempt, replies)
    rest = [reply for reply in replies if reply.name not in blamed]
    # Under differential privacy, an average of fewer models than the noise is calibrated for must not be released.
    if not blamed or not rest or wrapped.private_size is not None:
        return Average(blamed=blamed, error="" if blamed else why)
    try:
        return replace(attempt(rest), blamed=blamed)
    except Exception as error:
        attempt.restore()
        return Average(blamed=blamed, error=error_text(error))


def with_integers(arrays: ArrayRecord, sent: ArrayRecord) -> ArrayRecord:
    """Return an averaged model whose counters and booleans are rounded and have the types they were sent in.

    Flower's strategies turn them into floats. BatchNorm's count of batches would then pass for a parameter and dominate
    the updates.
    """
    restored = {}
    for key, array in arrays.items():
        before = as_numpy(sent[key]).dtype if key in sent else None
        after = as_numpy(array)
        if before is not None and before.kind in "biu" and after.dtype.kind == "f":
            limits = (0, 1) if before.kind == "b" else (np.iinfo(before).min, np.iinfo(before).max)
            whole = np.rint(after.astype(np.float64))
            with np.errstate(invalid="ignore"):  # the largest 64-bit integer is not a double; see the next lines
                cast = np.asarray(whole.astype(before))
            cast[whole >= limits[1]] = limits[1]
            cast[whole <= limits[0]] = limits[0]
            restored[key] = to_array(cast)
    return ArrayRecord({**arrays, **restored}) if restored else arrays


def _find_culprits(attempt: _Attempt, replies: Sequence[CheckedMessage]) -> dict[str, str]:
    """Return the clients whose replies make aggregation fail, each with the error."""
    # One by one first, because most bad replies fail even without the others.
    errors = {reply.name: attempt.fails([reply]) for reply in replies}
    valid = [reply for reply in replies if not errors[reply.name]]
    best: list[CheckedMessage] = []  # the largest set that aggregates together, among those found
    for start in valid[:_STARTS]:  # several, because a bad reply may pass by itself and make all others fail
        others = [reply for reply in valid if reply is not start]
        best = max(best, _largest_group(attempt, [start], others), key=len)
        if len(best) == len(valid):
            break
    if best:
        fine = {reply.name for reply in best}
        return {
            name: f"the strategy cannot aggregate it: {error}" if error else _NOT_TOGETHER
            for name, error in errors.items()
            if name not in fine
        }
    # Some strategies need several models. For these, look for a reply without which the others aggregate.
    for reply in replies:
        if not attempt.fails([other for other in replies if other is not reply]):
            return {reply.name: _NOT_TOGETHER}
    return {}


def _largest_group(attempt: _Attempt, base: list[CheckedMessage], group: list[CheckedMessage]) -> list[CheckedMessage]:
    """Return ``base`` with as many of ``group`` as aggregate together with it, found by bisection."""
    if not group or not attempt.fails([*base, *group]):
        return [*base, *group]
    if len(group) == 1:
        return base
    middle = len(group) // 2
    return _largest_group(attempt, _largest_group(attempt, base, group[:middle]), group[middle:])


def _copy_tables(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes with copies of tables and records, from which a strategy may remove entries."""
    kinds = (dict, list, ArrayRecord)
    return {key: value.copy() if type(value) in kinds else value for key, value in attributes.items()}


def error_text(error: Exception) -> str:
    """Return an error with its type in one short line."""
    return shorten(f"{type(error).__name__}: {error}")
