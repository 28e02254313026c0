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
from fedcohort.core.signals import Signal, metrics_of, vectors_of
from fedcohort.core.text import short_repr, shorten
from fedcohort.hosts.measures import Measures, Model, is_statistic, lacking, parameters, reported_signals
from fedcohort.hosts.wire import RECORD, Value, plain, read_gradient, read_report

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
        required = metrics_of(required)
        self._model = model
        self._reported = reported_signals(required)
        self._gradient = bool(vectors_of(required, "gradient"))
        self._parameters = sum(array.size for array in parameters(model).values())

    def check(self, name: str, result: FLModel, seconds: float) -> CheckedResult:
        """Return a site's result with its status."""
        meta = result.meta if isinstance(result.meta, Mapping) else {}
        record = record_of(result)
        values = {**read_report(record), Signal.DURATION: seconds}
        gradient = read_gradient(record) if self._gradient else None
        params: dict[str, AnyArray] = {}
        reason = self._read(result, params)
        weight = meta.get(WEIGHT, 1.0)  # the same default as FLARE's
        if not reason and not _is_weight(weight):
            reason = f"{WEIGHT!r} must be a number above 0, not {shorten(repr(weight), 40)}"
        reason = reason or lacking(self._reported, values, gradient, self._gradient)
        if not reason and gradient is not None and len(gradient) != self._parameters:
            reason = f"its gradient has {len(gradient)} entries, the model {self._parameters}"
        if reason:
            return CheckedResult(name, Status.INVALID, reason, values=values)
        return CheckedResult(name, Status.OK, "", params, float(weight), values, gradient, result)

    def _read(self, result: FLModel, params: dict[str, AnyArray]) -> str:
        """Fill ``params`` with the site's whole model; return what is wrong with it, or an empty string."""
        sent, received = self._model, result.params
        if not isinstance(received, Mapping) or not received:
            return "the result holds no model"
        if received.keys() != sent.keys():
            odd = min(received.keys() ^ sent.keys(), key=str)
            return f"the model's arrays have other names than the ones sent: {shorten(repr(odd), 80)}"
        is_diff = result.params_type == ParamsType.DIFF
        for key, before in sent.items():
            array = _whole_array(received[key], before, is_diff)
            if isinstance(array, str):
                return f"the array {key!r} {array}"
            params[key] = array
        return ""


def _whole_array(received: Any, before: AnyArray, is_diff: bool) -> AnyArray | str:
    """Return one array of a site's model, in the type it was sent in, or why it cannot be averaged."""
    try:
        array = plain(received)
    except Exception as error:  # a site may send anything in place of an array
        return f"cannot be read: {shorten(str(error), 80)}"
    if array.dtype.kind not in "biuf":
        return f"has the type {array.dtype} instead of {before.dtype}"
    if array.shape != before.shape:
        return f"has the shape {array.shape} instead of {before.shape}"
    if not np.isfinite(array).all() or (array.dtype == np.float64 and (np.abs(array) > _MAX_VALUE).any()):
        return "has NaN, infinite or huge entries"
    with np.errstate(over="ignore", invalid="ignore"):
        cast: AnyArray = (before + array if is_diff else array).astype(before.dtype)
    return cast if np.isfinite(cast).all() else f"has entries that {before.dtype} cannot hold"


def _is_weight(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= _MAX_WEIGHT


def measures_of(sent: Model, replies: Sequence[CheckedResult]) -> Measures:
    """Return the measures of replies to a model."""
    return Measures(replies, sent=lambda: sent, model=lambda reply: reply.params)


def move_update(model: Model, reply: CheckedResult, sent: Model) -> CheckedResult:
    """Return a valid reply with its update of the parameters of ``sent`` applied to ``model``.

    Its running statistics stay as they are: a sum of changes could make a variance negative.
    """
    moved = {
        key: (array + (reply.params[key] - sent[key])).astype(array.dtype) for key, array in parameters(model).items()
    }
    kept = {key: reply.params[key] if is_statistic(key) else array for key, array in model.items()}
    return reply._replace(params={**kept, **moved})


def to_aggregate(replies: Sequence[CheckedResult], sent: Model, weights: Mapping[str, float]) -> list[FLModel]:
    """Return valid replies in the form for FLARE's aggregation: all of one kind, each with its weight."""
    diff = all(reply.result is not None and reply.result.params_type == ParamsType.DIFF for reply in replies)
    models = [_weighted_model(reply, sent if diff else None, weights[reply.name]) for reply in replies]
    if any(model.metrics for model in models):
        for model in models:  # FLARE averages no metrics if those of one site are None
            model.metrics = model.metrics or {}
    return models


def _weighted_model(reply: CheckedResult, sent: Model | None, weight: float) -> FLModel:
    """Return a valid reply with its weight: the whole model, or its difference from the one ``sent``."""
    before = reply.result
    assert before is not None
    whole = dict(reply.params)
    return FLModel(
        params_type=ParamsType.FULL if sent is None else ParamsType.DIFF,
        params=whole if sent is None else {key: array - sent[key] for key, array in whole.items()},
        metrics=_numbers(before.metrics),
        current_round=before.current_round,
        total_rounds=before.total_rounds,
        meta={**before.meta, WEIGHT: weight, "client_name": reply.name},
    )


def _numbers(metrics: object) -> dict[str, float] | None:
    """Return the metrics that can be averaged: finite numbers."""
    if not isinstance(metrics, Mapping):
        return None
    return {str(key): float(value) for key, value in metrics.items() if _is_metric(value)}


def odd_metrics(metrics: object) -> list[str]:
    """Describe the metrics of a site that cannot be averaged."""
    if metrics is None:
        return []
    if not isinstance(metrics, Mapping):
        return [f"its metrics are {short_repr(metrics, 40)} and are left out"]
    odd = [key for key, value in metrics.items() if not _is_metric(value)]
    texts = [
        f"its metric {short_repr(key, 80)} is {short_repr(metrics[key], 40)} and is left out" for key in odd[:_NAMED]
    ]
    return texts + ([f"and {len(odd) - _NAMED} more of this kind"] if len(odd) > _NAMED else [])


def _is_metric(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and bool(-_MAX_METRIC < value < _MAX_METRIC)


def weighted_average(replies: Sequence[CheckedResult], weights: Mapping[str, float]) -> dict[str, AnyArray]:
    """Return the weighted mean of models, for trials."""
    total = math.fsum(weights.values())
    shares = {r.name: weights[r.name] / total if total > 0 else 1 / len(replies) for r in replies}
    mean = {}
    for key, like in replies[0].params.items():
        parts = [reply.params[key].astype(np.float64) * shares[reply.name] for reply in replies]
        mean[key] = np.asarray(sum(parts)).astype(like.dtype)
    return mean
