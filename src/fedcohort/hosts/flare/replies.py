"""From a site's result to a model that can be averaged: each is checked by itself, so one bad site spoils nothing.

FLARE's aggregation takes results as they come: a NaN or an array of another shape reaches the global model or ends the
job. Here it becomes a status with a reason, and the aggregation sees the rest.
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
from fedcohort.core.signals import METRIC_SIGNALS, Signal
from fedcohort.core.text import short_repr, shorten
from fedcohort.core.vectors import OutputLayer, output_layer
from fedcohort.hosts.measures import Measures, lacking, reported_signals
from fedcohort.hosts.wire import GRADIENT_SIGNALS, RECORD, Value, plain, read_gradient, read_report

Model = Mapping[str, AnyArray]
WEIGHT = FLMetaKey.NUM_STEPS_CURRENT_ROUND
_LARGEST = 1e150  # the square of a larger double overflows, and with it every distance between models
_LARGEST_WEIGHT = float(1 << 53)  # a count of steps beyond is none, and sums of them lose whole numbers
_LARGEST_METRIC = 1e30  # beyond it sums overflow
_NAMED = 3  # metrics of one site that are named


class CheckedResult(NamedTuple):
    """One site's result after the checks.

    Attributes
    ----------
    reason : str
        Why it is not OK.
    params : mapping of str to array
        The site's whole model, in the types of the one sent; empty when it is not OK.
    weight : float
        What it weighs in an average, as the site says.
    values : mapping of Signal to float or (V,) array
        What it reported, and how long it took.
    gradient : (d,) array or None
    result : FLModel or None
        As it came.
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
    """Return what a site sent for fedcohort beside its model, or None."""
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
        What the selector must learn from each site whose model counts.
    """

    def __init__(self, model: Model, required: Iterable[Signal]) -> None:
        wanted = frozenset(required) & METRIC_SIGNALS
        self._model = model
        self._reported = reported_signals(wanted)
        self._gradient = bool(wanted & GRADIENT_SIGNALS)
        self._parameters = sum(array.size for array in model.values() if array.dtype.kind == "f")

    def check(self, name: str, result: FLModel, seconds: float) -> CheckedResult:
        """Return a site's result as it may enter an average, or why it may not."""
        meta = result.meta if isinstance(result.meta, Mapping) else {}
        record = record_of(result)
        values = {**read_report(record), Signal.DURATION: seconds}
        gradient = read_gradient(record) if self._gradient else None
        params: dict[str, AnyArray] = {}
        reason = self._read(result, params)
        weight = meta.get(WEIGHT, 1.0)  # FLARE takes 1 where a site says nothing
        if not reason and not _is_weight(weight):
            reason = f"{WEIGHT!r} must be a number above 0, not {shorten(repr(weight), 40)}"
        reason = reason or self._missing_reports(values, gradient)
        if reason:
            return CheckedResult(name, Status.INVALID, reason, values=values)
        return CheckedResult(name, Status.OK, "", params, float(weight), values, gradient, result)

    def _read(self, result: FLModel, params: dict[str, AnyArray]) -> str:
        """Fill ``params`` with the site's whole model; return what is wrong with it, or an empty string."""
        sent, given = self._model, result.params
        if not isinstance(given, Mapping) or not given:
            return "the result holds no model"
        if given.keys() != sent.keys():
            odd = min(given.keys() ^ sent.keys(), key=str)
            return f"the model's arrays have other names than the ones sent: {shorten(repr(odd), 80)}"
        is_diff = result.params_type == ParamsType.DIFF
        for key, before in sent.items():
            found = _whole_array(given[key], before, is_diff)
            if isinstance(found, str):
                return f"the array {key!r} {found}"
            params[key] = found
        return ""

    def _missing_reports(self, values: Mapping[Signal, Value], gradient: FloatArray | None) -> str:
        reason = lacking(self._reported, values, gradient, self._gradient)
        if not reason and gradient is not None and len(gradient) != self._parameters:
            return f"its gradient has {len(gradient)} entries, the model {self._parameters}"
        return reason


def _whole_array(given: Any, before: AnyArray, is_diff: bool) -> AnyArray | str:
    """Return one array of a site's model, in the type it was sent in, or in words why it cannot be averaged."""
    try:
        array = plain(given)
    except Exception as error:  # whatever a site sends in the place of an array
        return f"cannot be read: {shorten(str(error), 80)}"
    if array.dtype.kind not in "biuf":
        return f"has the type {array.dtype} instead of {before.dtype}"
    if array.shape != before.shape:
        return f"has the shape {array.shape} instead of {before.shape}"
    if not np.isfinite(array).all() or (array.dtype == np.float64 and (np.abs(array) > _LARGEST).any()):
        return "has NaN, infinite or huge entries"
    with np.errstate(over="ignore", invalid="ignore"):
        cast: AnyArray = (before + array if is_diff else array).astype(before.dtype)
    return cast if np.isfinite(cast).all() else f"has entries that {before.dtype} cannot hold"


def _is_weight(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= _LARGEST_WEIGHT


def flat(model: Model) -> FloatArray:
    """Return the floating-point arrays of a model as one vector."""
    floats = [array.astype(np.float64).ravel() for array in model.values() if array.dtype.kind == "f"]
    return np.concatenate(floats) if floats else np.empty(0)


def output_of(model: Model) -> OutputLayer:
    """Return where the output layer stands in :func:`flat`; an error for a model whose output layer has no bias."""
    return output_layer({key: array.shape for key, array in model.items() if array.dtype.kind == "f"})


def measures_of(sent: Model, replies: Sequence[CheckedResult]) -> Measures:
    """Return what the server can measure of the OK replies to a model."""
    weights = np.array([r.weight if r.status is Status.OK else 0.0 for r in replies], np.float64)
    return Measures(
        replies, weights, sent=lambda: flat(sent), model=lambda r: flat(r.params), output=lambda: output_of(sent)
    )


def move_update(model: Model, reply: CheckedResult, sent: Model) -> CheckedResult:
    """Return a sound reply to the model ``sent`` as one to ``model``: what the site added to floating-point arrays."""
    params = {
        key: (array + (reply.params[key] - sent[key])).astype(array.dtype) if array.dtype.kind == "f" else array
        for key, array in model.items()
    }
    return reply._replace(params=params)


def to_aggregate(replies: Sequence[CheckedResult], sent: Model, weights: Mapping[str, float]) -> list[FLModel]:
    """Return sound replies as FLARE's aggregation takes them: all of one kind, each with its weight."""
    diff = all(reply.result is not None and reply.result.params_type == ParamsType.DIFF for reply in replies)
    found = [_weighted_model(reply, sent if diff else None, weights[reply.name]) for reply in replies]
    if any(model.metrics for model in found):
        for model in found:  # FLARE averages no metrics at all when one site has none
            model.metrics = model.metrics or {}
    return found


def _weighted_model(reply: CheckedResult, sent: Model | None, weight: float) -> FLModel:
    """Return a sound reply with its weight: as a whole model, or as what the site added to the one ``sent``."""
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
    """Return in words what a site sent as metrics and cannot be averaged."""
    if metrics is None:
        return []
    if not isinstance(metrics, Mapping):
        return [f"its metrics are {short_repr(metrics, 40)} and are left out"]
    odd = [key for key, value in metrics.items() if not _is_metric(value)]
    found = [
        f"its metric {short_repr(key, 80)} is {short_repr(metrics[key], 40)} and is left out" for key in odd[:_NAMED]
    ]
    return found + ([f"and {len(odd) - _NAMED} more of this kind"] if len(odd) > _NAMED else [])


def _is_metric(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and bool(-_LARGEST_METRIC < value < _LARGEST_METRIC)


def weighted_average(replies: Sequence[CheckedResult], weights: Mapping[str, float]) -> dict[str, AnyArray]:
    """Return the mean of models by weight, for trials."""
    total = math.fsum(weights.values())
    shares = {r.name: weights[r.name] / total if total > 0 else 1 / len(replies) for r in replies}
    found = {}
    for key, like in replies[0].params.items():
        parts = [reply.params[key].astype(np.float64) * shares[reply.name] for reply in replies]
        found[key] = np.asarray(sum(parts)).astype(like.dtype)
    return found
