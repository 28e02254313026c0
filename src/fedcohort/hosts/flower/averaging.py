"""Aggregation that no reply can end: what the wrapped strategy raises is contained, and the reply behind it found.

The checks of single replies cannot know what a strategy will make of them: a Krum that is short of models, trees that
are no JSON, a metric function of the app's own. When aggregation raises or its result is not finite, copies of the
strategy try the replies one by one and together; whoever makes the difference is left out and named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy

from fedcohort.core.text import shorten
from fedcohort.hosts.flower.npy import as_numpy, to_array
from fedcohort.hosts.flower.replies import Checked, is_finite
from fedcohort.hosts.flower.wrapped_strategy import levels, private_cohort_size, strategy_copy

log = logging.getLogger("flwr.fedcohort")
_STARTS = 4  # from so many replies a largest set that aggregates is searched
_NOT_TOGETHER = "the strategy can aggregate the others, but not together with it"


@dataclass(frozen=True)
class Average:
    """What came out of a round's aggregation.

    Attributes
    ----------
    arrays : ArrayRecord or None
        The next model; None when the round brings none.
    blamed : dict of str to str
        The clients whose replies made aggregation fail, each with what went wrong.
    error : str
        What the strategy raised when nobody could be blamed; empty when it raised nothing.
    """

    arrays: ArrayRecord | None = None
    metrics: MetricRecord | None = None
    blamed: dict[str, str] = field(default_factory=dict)
    error: str = ""


class _Attempt:
    """One strategy, one set of replies: each call sees the strategy and the messages as they were at first."""

    def __init__(self, strategy: Strategy, server_round: int, replies: Sequence[Checked], errors: Sequence[Message]):
        self._strategy = strategy
        self._round = server_round
        self._errors = list(errors)
        self._levels = levels(strategy)
        # Some strategies change themselves before they raise: moments, counters, pending privacy events.
        self._before = [_copy_tables(vars(level)) for level in self._levels]
        self._contents = {reply.name: dict(reply.message.content) for reply in replies if reply.message is not None}

    def __call__(self, replies: Sequence[Checked], strategy: Strategy | None = None) -> Average:
        messages = [reply.message for reply in replies if reply.message is not None]
        for reply, message in zip(replies, messages, strict=True):
            # Strategies write into replies (clipping) and take their arrays out (the median): each call gets its own.
            parts = self._contents[reply.name].items()
            message.content = RecordDict({key: cast(Any, part.copy()) for key, part in parts})
        arrays, metrics = (strategy or self._strategy).aggregate_train(self._round, [*messages, *self._errors])
        if arrays is not None:
            _check_model(arrays, replies[0].arrays)
        return Average(arrays, metrics)

    def restore(self) -> None:
        """Put the strategy's attributes back."""
        for level, before in zip(self._levels, self._before, strict=True):
            vars(level).clear()
            vars(level).update(_copy_tables(before))

    def fails(self, replies: Sequence[Checked]) -> str:
        """Return what a copy of the strategy raises on ``replies``, or an empty string."""
        try:
            found = self(replies, strategy_copy(self._strategy))
        except Exception as error:
            return _error_text(error)
        return "" if found.arrays is not None else "it gave no model"


def _check_model(arrays: ArrayRecord, like: ArrayRecord) -> None:
    """Raise ValueError for an aggregated model that lacks an array of the others, or is not finite."""
    lost = [key for key in like if key not in arrays]
    if lost:
        raise ValueError(f"the aggregated model lacks the array {lost[0]!r}")
    for key, array in arrays.items():
        if not is_finite(as_numpy(array).ravel()):
            raise ValueError(f"the aggregated array {key!r} has NaN or infinite entries")


def aggregate(
    strategy: Strategy, server_round: int, replies: Sequence[Checked], errors: Sequence[Message] = ()
) -> Average:
    """Aggregate sound replies as the strategy does; never raises what the strategy raises.

    Parameters
    ----------
    replies : sequence of Checked
        The replies that shall enter the average.
    errors : sequence of Message
        The errors of other clients of the cohort, which some strategies judge (those for differential privacy).
    """
    if not replies:
        return Average()
    attempt = _Attempt(strategy, server_round, replies, errors)
    try:
        return attempt(replies)
    except Exception as error:
        log.warning(
            "%s could not aggregate round %d: %s", type(strategy).__name__, server_round - 1, _error_text(error)
        )
        log.debug("aggregation failed", exc_info=True)
        attempt.restore()
        blamed = _find_culprits(attempt, replies)
        rest = [reply for reply in replies if reply.name not in blamed]
        # Under differential privacy fewer models than the noise was made for must not be released.
        if not blamed or not rest or private_cohort_size(strategy) is not None:
            return Average(blamed=blamed, error="" if blamed else _error_text(error))
    try:
        found = attempt(rest)
    except Exception as error:
        attempt.restore()
        return Average(blamed=blamed, error=_error_text(error))
    return Average(found.arrays, found.metrics, blamed)


def with_integers(arrays: ArrayRecord, sent: ArrayRecord) -> ArrayRecord:
    """Return an averaged model in which counters and booleans have the type they were sent in, rounded.

    Flower's strategies make floats of them. Taken for parameters from then on, BatchNorm's count of batches would be
    most of what updates differ by.
    """
    found = {}
    for key, array in arrays.items():
        before = as_numpy(sent[key]).dtype if key in sent else None
        after = as_numpy(array)
        if before is not None and before.kind in "biu" and after.dtype.kind == "f":
            limits = (0, 1) if before.kind == "b" else (np.iinfo(before).min, np.iinfo(before).max)
            whole = np.rint(after.astype(np.float64))
            with np.errstate(invalid="ignore"):  # the largest of 64 bits is no double; the next lines put it right
                cast = np.asarray(whole.astype(before))
            cast[whole >= limits[1]] = limits[1]
            cast[whole <= limits[0]] = limits[0]
            found[key] = to_array(cast)
    return ArrayRecord({**arrays, **found}) if found else arrays


def _find_culprits(attempt: _Attempt, replies: Sequence[Checked]) -> dict[str, str]:
    """Return whose replies make aggregation fail, with what it raises because of each."""
    # Each alone first: most of what a strategy cannot take, it cannot take from one client either.
    alone = {reply.name: attempt.fails([reply]) for reply in replies}
    sound = [reply for reply in replies if not alone[reply.name]]
    best = {reply.name for reply in _best_group(attempt, sound)}
    if best:
        return {
            name: f"the strategy cannot aggregate it: {said}" if said else _NOT_TOGETHER
            for name, said in alone.items()
            if name not in best
        }
    # Some strategies need several models: then find the replies that make the others fail.
    for reply in replies:
        if not attempt.fails([other for other in replies if other is not reply]):
            return {reply.name: _NOT_TOGETHER}
    return {}


def _best_group(attempt: _Attempt, sound: Sequence[Checked]) -> list[Checked]:
    """Return a largest set of replies that aggregate together, as far as a few starts find it."""
    best: list[Checked] = []
    for start in sound[:_STARTS]:  # a bad reply may pass alone and then make all others fail
        others = [reply for reply in sound if reply is not start]
        best = max(best, _largest_group(attempt, [start], others), key=len)
        if len(best) == len(sound):
            break
    return best


def _largest_group(attempt: _Attempt, base: list[Checked], group: list[Checked]) -> list[Checked]:
    """Return ``base`` with as many of ``group`` as aggregate together with it, found by halves."""
    if not group or not attempt.fails([*base, *group]):
        return [*base, *group]
    if len(group) == 1:
        return base
    middle = len(group) // 2
    return _largest_group(attempt, _largest_group(attempt, base, group[:middle]), group[middle:])


def _copy_tables(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes such that what a strategy takes out of a table or record of its own can be put back."""
    kinds = (dict, list, ArrayRecord)
    return {key: value.copy() if type(value) in kinds else value for key, value in attributes.items()}


def value_or_none(what: str, call: Callable[[], MetricRecord | None]) -> MetricRecord | None:
    """Return what ``call`` returns, or None when it raises; the error is logged."""
    try:
        return call()
    except Exception as error:
        log.warning("%s failed and is left out: %s", what, _error_text(error))
        log.debug("%s failed", what, exc_info=True)
        return None


def _error_text(error: Exception) -> str:
    return shorten(f"{type(error).__name__}: {error}")
