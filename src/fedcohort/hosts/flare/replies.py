"""Checks the results of sites before they are averaged, each by itself, so that one bad site cannot spoil a round.

FLARE's aggregation does not check results: a NaN or an array of another shape reaches the global model or ends the job.
Here, such a result gets a status with a reason, and the aggregation sees only the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from fedcohort.core.arrays import AnyArray, FloatArray
from fedcohort.core.protocol import Status
from fedcohort.core.signals import Signal, metrics_of
from fedcohort.core.text import short_repr, shorten
from fedcohort.hosts.measures import InvalidReplyError, Measures, Model, RequiredReport, is_statistic, parameters
from fedcohort.hosts.wire import RECORD, Value, plain

WEIGHT = FLMetaKey.NUM_STEPS_CURRENT_ROUND
_MAX_VALUE = 1e150  # the squares of larger doubles overflow, and so do distances between models
_MAX_WEIGHT = float(1 << 53)  # larger numbers cannot be counts of steps, and their sums are not exact
_MAX_METRIC = 1e30  # sums of larger numbers may overflow
_NAMED = 3  # how many metrics of one site to name


class CheckedResult(NamedTuple):
    """One site's result after the checks.

    Attributes
    ----------
    reason : str
        Why it is not OK.
    params : mapping of str to array
        The site's whole model, in the types of the one sent; empty if it is not OK.
    weight : float
        Its weight in an average, as the site sent it.
    values : mapping of Signal to float or (V,) array
        What the site reported, and how long it took.
    gradient : (d,) array or None
    result : FLModel or None
        The result as it arrived.
    """

    name: str
    status: Status
    reason: str = ""
    params: Model = MappingProxyType({})
    weight: float = 0.0
    values: Mapping[Signal, Value] = MappingProxyType({})
    gradient: FloatArray | None = None
    result: FLModel | None = None

    def moved(self, sent: Model, onto: Model) -> CheckedResult:
        """Return a valid result with its update of the parameters of ``sent`` applied to ``onto``.

        Its running statistics stay as they are: a sum of changes could make a variance negative.
        """
        params = {key: self.params[key] if is_statistic(key) else array for key, array in onto.items()}
        for key, array in parameters(onto).items():
            params[key] = (array + (self.params[key] - sent[key])).astype(array.dtype)
        return self._replace(params=params)


def arrays_of(params: Mapping[str, Any]) -> dict[str, AnyArray]:
    """Return parameters as NumPy arrays."""
    return {key: plain(value) for key, value in params.items()}


def record_of(result: FLModel | None) -> Mapping[str, Any] | None:
    """Return fedcohort's record in a site's result, or None."""
    meta = None if result is None else result.meta
    record = meta.get(RECORD) if isinstance(meta, Mapping) else None
    return record if isinstance(record, Mapping) else None


class ResultChecker:
    """The checks of one round.

    Parameters
    ----------
    model : mapping of str to array
        The model that was sent.
    required : set of Signal
        What each OK result must report.
    """

    def __init__(self, model: Model, required: Iterable[Signal]) -> None:
        self.model = model
        self._required = RequiredReport(metrics_of(required))
        self._parameters = sum(array.size for array in parameters(model).values())

    def check(self, name: str, result: FLModel, seconds: float) -> CheckedResult:
        """Return a site's result with its status."""
        try:
            return self._valid(name, result, seconds)
        except InvalidReplyError as error:
            return CheckedResult(name, Status.INVALID, str(error))

    def _valid(self, name: str, result: FLModel, seconds: float) -> CheckedResult:
        sent, received = self.model, result.params
        if not isinstance(received, Mapping) or not received:
            raise InvalidReplyError("the result holds no model")
        if received.keys() != sent.keys():
            odd = min(received.keys() ^ sent.keys(), key=str)
            raise InvalidReplyError(f"the model's arrays have other names than the ones sent: {shorten(repr(odd), 80)}")
        is_diff = result.params_type == ParamsType.DIFF
        params = {key: _whole_array(key, received[key], before, is_diff) for key, before in sent.items()}
        meta = result.meta if isinstance(result.meta, Mapping) else {}
        weight = meta.get(WEIGHT, 1.0)  # the same default as FLARE's
        if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not 0 < weight <= _MAX_WEIGHT:
            raise InvalidReplyError(f"{WEIGHT!r} must be a number above 0, not {shorten(repr(weight), 40)}")
        values, gradient = self._required.read(record_of(result), seconds)
        if gradient is not None and len(gradient) != self._parameters:
            raise InvalidReplyError(f"its gradient has {len(gradient)} entries, the model {self._parameters}")
        return CheckedResult(name, Status.OK, "", params, float(weight), values, gradient, result)


def _whole_array(key: str, received: Any, before: AnyArray, is_diff: bool) -> AnyArray:
    """Return one array of a site's model, in the type it was sent in."""
    try:
        array = plain(received)
    except Exception as error:  # a site may send anything in place of an array
        raise InvalidReplyError(f"the array {key!r} cannot be read: {shorten(str(error), 80)}") from error
    if array.dtype.kind not in "biuf":
        raise InvalidReplyError(f"the array {key!r} has the type {array.dtype} instead of {before.dtype}")
    if array.shape != before.shape:
        raise InvalidReplyError(f"the array {key!r} has the shape {array.shape} instead of {before.shape}")
    if not np.isfinite(array).all() or (array.dtype == np.float64 and (np.abs(array) > _MAX_VALUE).any()):
        raise InvalidReplyError(f"the array {key!r} has NaN, infinite or huge entries")
    with np.errstate(over="ignore", invalid="ignore"):
        cast: AnyArray = (before + array if is_diff else array).astype(before.dtype)
    if not np.isfinite(cast).all():
        raise InvalidReplyError(f"the array {key!r} has entries that {before.dtype} cannot hold")
    return cast


def measures_of(sent: Model, replies: Sequence[CheckedResult]) -> Measures:
    """Return the measures of replies to a model."""
    return Measures(replies, sent=lambda: sent, model=lambda reply: reply.params)


def to_aggregate(replies: Sequence[CheckedResult], sent: Model, weights: Mapping[str, float]) -> list[FLModel]:
    """Return valid replies in the form for FLARE's aggregation: all of one kind, each with its weight."""
    results = [reply.result for reply in replies if reply.result is not None]
    diff = all(result.params_type == ParamsType.DIFF for result in results)
    metrics = [_usable_metrics(result.metrics)[0] for result in results]
    return [
        FLModel(
            params_type=ParamsType.DIFF if diff else ParamsType.FULL,
            params={key: array - sent[key] if diff else array for key, array in reply.params.items()},
            # FLARE averages no metrics if those of one site are None.
            metrics=numbers if any(metrics) else None,
            current_round=result.current_round,
            total_rounds=result.total_rounds,
            meta={**result.meta, WEIGHT: weights[reply.name], "client_name": reply.name},
        )
        for reply, result, numbers in zip(replies, results, metrics, strict=True)
    ]


def _usable_metrics(metrics: object) -> tuple[dict[str, float], list[object]]:
    """Return the metrics that can be averaged, finite numbers, and the names of the others."""
    usable: dict[str, float] = {}
    odd: list[object] = []
    for key, value in metrics.items() if isinstance(metrics, Mapping) else ():
        if isinstance(value, (int, float, np.integer, np.floating)) and -_MAX_METRIC < value < _MAX_METRIC:
            usable[str(key)] = float(value)
        else:
            odd.append(key)
    return usable, odd


def odd_metrics(metrics: object) -> list[str]:
    """Describe the metrics of a site that cannot be averaged."""
    if metrics is None:
        return []
    if not isinstance(metrics, Mapping):
        return [f"its metrics are {short_repr(metrics, 40)} and are left out"]
    odd = _usable_metrics(metrics)[1]
    texts = [
        f"its metric {short_repr(key, 80)} is {short_repr(metrics[key], 40)} and is left out" for key in odd[:_NAMED]
    ]
    return texts + ([f"and {len(odd) - _NAMED} more of this kind"] if len(odd) > _NAMED else [])


def weighted_average(replies: Sequence[CheckedResult], weights: Mapping[str, float]) -> dict[str, AnyArray]:
    """Return the weighted mean of models, for trials."""
    total = math.fsum(weights.values())
    shares = {r.name: weights[r.name] / total if total > 0 else 1 / len(replies) for r in replies}
    mean = {}
    for key, like in replies[0].params.items():
        parts = [reply.params[key].astype(np.float64) * shares[reply.name] for reply in replies]
        mean[key] = np.asarray(sum(parts)).astype(like.dtype)
    return mean
