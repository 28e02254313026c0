"""Checks replies before they are averaged, each by itself, so that one bad client cannot spoil a round.

Flower's strategies check replies together and abort the run if one differs. Here, a reply with an error, with NaN, with
arrays of another type or shape or without a usable weight gets a status with a reason, and the strategy sees only the
others. Entries with another precision than the model's are converted, so that no reply changes the model's type.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedcohort.core.arrays import AnyArray, FloatArray
from fedcohort.core.errors import InputError
from fedcohort.core.protocol import Status
from fedcohort.core.signals import Signal, vectors_of
from fedcohort.hosts.flower.exchange import GridReply
from fedcohort.hosts.flower.metrics import common_metrics
from fedcohort.hosts.flower.npy import BFLOAT16, Layout, convert, is_float, numbers, to_array, unreadable
from fedcohort.hosts.measures import Measures, is_statistic, lacking, reported_signals
from fedcohort.hosts.weights import bounded_weights
from fedcohort.hosts.wire import RECORD, Value, read_gradient, read_report

log = logging.getLogger("flwr.fedcohort")
# In Python 3.11, reading a member of an enumeration takes longer than comparing it.
_OK, _INVALID, _DURATION = Status.OK, Status.INVALID, Signal.DURATION
_NO_ARRAYS, _NO_METRICS = ArrayRecord(), MetricRecord()  # for replies that are not OK; never changed
_MAX_WEIGHT = 1 << 53  # larger numbers cannot be counts of samples, and their sums overflow


class CheckedMessage(NamedTuple):
    """One client's reply after the checks.

    Attributes
    ----------
    reason : str
        Why it is not OK; empty if it is.
    message : Message or None
        The reply without fedcohort's record, as the wrapped strategy sees it; it may be an error.
    arrays : ArrayRecord
        The model of an OK reply.
    metrics : MetricRecord
        The metrics of an OK reply.
    kind : tuple
        The names of its two records, and the sizes of the vectors that the selector needs.
    weight : float
        The weight of an OK reply: what the client sent, within its bounds.
    values : mapping of Signal to float or (V,) array
        What the client reported, and how long it took.
    gradient : (d,) array or None
        The full-batch gradient that the client reported.
    """

    name: str
    status: Status
    reason: str
    message: Message | None
    values: Mapping[Signal, Value]
    gradient: FloatArray | None
    arrays: ArrayRecord
    metrics: MetricRecord
    kind: tuple[Any, ...]
    weight: float = 0.0


def decode(arrays: ArrayRecord) -> dict[str, AnyArray]:
    """Return the arrays of a model in types that NumPy computes with."""
    return {key: numbers(array.numpy()) for key, array in arrays.items()}


def is_finite(values: AnyArray) -> bool:
    """Whether entries are finite, and doubles small enough to be squared; fastest for a vector."""
    values = numbers(values)
    kind = values.dtype.kind
    # NaN and infinity show in a sum of squares, which BLAS computes in one pass without a temporary array.
    if kind == "f" and values.ndim == 1 and values.itemsize >= 4 and math.isfinite(values.dot(values)):
        return True
    # Doubles whose squares overflow would make the norms and distances of all clients infinite.
    return kind not in "fc" or (values.dtype != np.float64 and bool(np.isfinite(values).all()))


class _Parts:
    """The parts of a reply: its last model and metrics, how many there are of each, and fedcohort's record."""

    __slots__ = ("arrays", "arrays_key", "metrics", "metrics_key", "model", "numbers", "ours")

    def __init__(self, content: RecordDict) -> None:
        self.model, self.arrays, self.arrays_key = _NO_ARRAYS, 0, ""
        self.numbers, self.metrics, self.metrics_key = _NO_METRICS, 0, ""
        self.ours: ConfigRecord | None = None
        for key, part in content.items():
            # Flower's records have exactly these types; isinstance with abstract classes would dominate the time here.
            if type(part) is ArrayRecord:
                self.model, self.arrays, self.arrays_key = part, self.arrays + 1, key
            elif type(part) is MetricRecord:
                self.numbers, self.metrics, self.metrics_key = part, self.metrics + 1, key
            elif key == RECORD and type(part) is ConfigRecord:
                self.ours = part


class Checker:
    """The checks of one round.

    Parameters
    ----------
    model : ArrayRecord
        The model that was sent.
    weight_key : str
        The metric that is the weight of a reply.
    required : set of Signal
        What each OK reply must report.
    same_shapes : bool
        Whether replies must have the shapes of the model.
    """

    def __init__(
        self, model: ArrayRecord, weight_key: str, required: Iterable[Signal], same_shapes: bool = True
    ) -> None:
        self._weight_key = weight_key
        required = frozenset(required)
        self._reported = reported_signals(required)
        self._gradient = bool(vectors_of(required, "gradient"))
        self._same_shapes = same_shapes
        self._kind: tuple[Any, ...] = ("", "", ())  # of the last reply
        self._layouts: dict[str, Layout] = {}
        for key, array in model.items():
            layout = Layout.of(array)
            if layout is None:
                raise InputError(f"The global model's array {key!r} cannot be averaged: {unreadable(array)}.")
            self._layouts[key] = layout
        floats = [layout for layout in self._layouts.values() if is_float(layout.dtype)]
        self._parameters = sum(math.prod(layout.shape) for layout in floats) if same_shapes else None

    def check_all(self, replies: Iterable[GridReply]) -> list[CheckedMessage]:
        """Check replies, each by itself."""
        with np.errstate(over="ignore", invalid="ignore"):  # the squares of valid numbers may overflow
            return [self._check(reply) for reply in replies]

    def _check(self, reply: GridReply) -> CheckedMessage:
        message = reply.message
        if message.has_error():
            # A lost message is not the client's fault, so it counts as no answer.
            status = Status.MISSING if reply.expired else Status.FAILED
            return CheckedMessage(reply.name, status, reply.error or "", message, {}, None, _NO_ARRAYS, _NO_METRICS, ())
        content = message.content
        parts = _Parts(content)
        if parts.ours is not None:
            del content[RECORD]
        values = read_report(parts.ours)
        values[_DURATION] = reply.seconds
        gradient = read_gradient(parts.ours) if self._gradient else None
        rewritten: dict[str, Array] = {}
        reason = self._rejection_reason(parts, rewritten)
        # A gradient may be shorter than the model if clients train only some arrays; all must have the same length.
        if not reason and gradient is not None and self._parameters is not None and len(gradient) > self._parameters:
            reason = f"its gradient has {len(gradient)} entries, more than the model's {self._parameters}"
        reason = reason or lacking(self._reported, values, gradient, self._gradient)
        if reason:
            return CheckedMessage(reply.name, _INVALID, reason, message, values, gradient, _NO_ARRAYS, _NO_METRICS, ())
        model = parts.model
        if rewritten:
            model = content[parts.arrays_key] = ArrayRecord({**model, **rewritten})
        weight = float(parts.numbers[self._weight_key])  # type: ignore[arg-type]  # checked to be a number
        kind = self._kind_of(parts, values, gradient)
        return CheckedMessage(reply.name, _OK, "", message, values, gradient, model, parts.numbers, kind, weight)

    def _rejection_reason(self, parts: _Parts, rewritten: dict[str, Array]) -> str:
        """Return what is wrong with the model or its weight, or an empty string; ``rewritten`` as in `_nonfinite`."""
        if parts.arrays != 1:
            return f"the reply must carry exactly one ArrayRecord, not {parts.arrays}"
        if parts.metrics != 1:
            return f"the reply must carry exactly one MetricRecord, not {parts.metrics}"
        weight = parts.numbers.get(self._weight_key)
        reason = self._nonfinite(parts.model, rewritten)
        if not reason and not _is_weight(weight):
            return f"the metric {self._weight_key!r} must be a number of at least 0, not {str(weight)[:40]}"
        return reason

    def _kind_of(self, parts: _Parts, values: Mapping[Signal, Value], gradient: FloatArray | None) -> tuple[Any, ...]:
        """Return the names of records and sizes of vectors that :func:`with_common_names` compares."""
        widths = tuple(np.size(values[signal]) for signal in self._reported)
        if gradient is not None:
            widths = (*widths, len(gradient))
        usual = self._kind
        if usual[0] != parts.arrays_key or usual[1] != parts.metrics_key or usual[2] != widths:
            # Consecutive replies that agree share one object, which makes comparisons fast.
            usual = self._kind = (parts.arrays_key, parts.metrics_key, widths)
        return usual

    def _nonfinite(self, model: ArrayRecord, rewritten: dict[str, Array]) -> str:
        """Return what is wrong with a model's arrays, or an empty string.

        Arrays with another layout than the one sent are added to ``rewritten`` in the usual layout, because later
        readers trust the headers.
        """
        layouts = self._layouts
        if self._same_shapes and model.keys() != layouts.keys():
            odd = min(model.keys() ^ layouts.keys(), key=str)
            return f"the model's arrays have other names than the ones sent: {str(odd)[:80]!r}"
        for key, array in model.items():
            sent = layouts.get(key)
            values = None if sent is None else sent.entries(array)
            if values is None:  # another layout than the model's
                converted = self._convert(array, sent)
                if isinstance(converted, str):
                    return f"the array {key!r} {converted}"
                rewritten[key] = to_array(converted)
                values = converted.ravel(order="K")
            if not is_finite(values):
                return f"the array {key!r} has NaN or infinite entries"
        return ""

    def _convert(self, array: Array, sent: Layout | None) -> AnyArray | str:
        """Return an array in the type of the one that was ``sent``, or why this is not possible."""
        layout = Layout.of(array)
        if layout is None:
            return f"cannot be read: {unreadable(array)}"
        if sent is None:
            return layout.read(array)
        if self._same_shapes and layout.shape != sent.shape:
            return f"has the shape {layout.shape} instead of {sent.shape}"
        values = layout.read(array)
        if layout.dtype == sent.dtype:
            return values
        cast = _as_sent(values, sent.dtype)
        return f"has the type {layout.dtype} instead of {sent.dtype}" if cast is None else cast


def _is_weight(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= _MAX_WEIGHT


def _as_sent(values: AnyArray, dtype: np.dtype[Any]) -> AnyArray | None:
    """Return ``values`` in the type that the model was sent in, or None if that would change them."""
    if any(kind.kind not in "biuf" and kind != BFLOAT16 for kind in (values.dtype, dtype)) or values.itemsize > 8:
        return None
    with np.errstate(all="ignore"):  # integers that do not fit are found below, floats that do not fit become infinite
        cast = convert(values, dtype)
        if not is_float(dtype) and not np.array_equal(cast, values):
            return None
    return cast


def with_common_names(
    replies: Sequence[CheckedMessage], records: Sequence[str] = ("arrays", "metrics")
) -> list[CheckedMessage]:
    """Give the records of OK replies the same names; make replies INVALID if their vectors differ in size from most.

    ``records`` are the names to prefer if two names are equally common.
    """
    common = list(replies)
    kinds = [reply.kind for reply in replies if reply.status is _OK]
    if not kinds or kinds.count(kinds[0]) == len(kinds):
        return common
    usual = [_most_common([kind[i] for kind in kinds], name) for i, name in enumerate(records)]
    # The larger of two equally common sizes, since no gradient is larger than the model.
    widths = _most_common([kind[2] for kind in kinds])
    reason = "the vectors or the gradient it reported differ in size from those of most replies"
    for i, reply in enumerate(replies):
        if reply.status is not _OK:
            continue
        if reply.kind[2] != widths:
            common[i] = reply._replace(status=_INVALID, reason=reason)
        elif [*reply.kind[:2]] != usual:
            common[i] = _with_records(reply, *usual)
    return common


def _most_common(values: Sequence[Any], preferred: Any = None) -> Any:
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value == preferred, value))


def _with_records(reply: CheckedMessage, arrays: str, metrics: str) -> CheckedMessage:
    """Return a reply with these names for its two records."""
    assert reply.message is not None
    others = {k: v for k, v in reply.message.content.items() if k not in (*reply.kind[:2], arrays, metrics)}
    reply.message.content = RecordDict({arrays: reply.arrays, metrics: reply.metrics, **others})
    return reply._replace(kind=(arrays, metrics, reply.kind[2]))


def with_metrics(reply: CheckedMessage, metrics: MetricRecord) -> CheckedMessage:
    """Return an OK reply with other metrics; its message changes too."""
    assert reply.message is not None
    reply.message.content[reply.kind[1]] = metrics
    return reply._replace(metrics=metrics)


def with_weight(reply: CheckedMessage, key: str, weight: float) -> CheckedMessage:
    """Return an OK reply with another weight; its message changes too."""
    return with_metrics(reply, MetricRecord({**reply.metrics, key: weight}))._replace(weight=weight)


def clip_update(reply: CheckedMessage, sent: ArrayRecord, most: float) -> tuple[CheckedMessage, float]:
    """Return an OK reply whose update has at most the Euclidean norm ``most``, and the original norm.

    The update consists of the client's changes to floating-point arrays; other arrays stay as the client sent them.
    """
    steps = _steps(reply, sent)
    norm = math.sqrt(sum(float(np.vdot(step, step)) for step in steps.values()))
    return (reply, norm) if norm <= most else (_apply_steps(reply, steps, sent, most / norm), norm)


def move_update(reply: CheckedMessage, sent: ArrayRecord, onto: ArrayRecord, factor: float) -> CheckedMessage:
    """Return an OK reply with its update of the model ``sent`` multiplied by ``factor`` and applied to ``onto``.

    Running statistics are mixed with those of ``onto`` instead and never go beyond the client's: a sum of changes
    could make a variance negative.
    """
    before = ArrayRecord({key: onto[key] if is_statistic(key) else array for key, array in sent.items()})
    share = min(max(factor, 0.0), 1.0)
    steps = {key: (share if is_statistic(key) else factor) * step for key, step in _steps(reply, before).items()}
    return _apply_steps(reply, steps, onto, 1.0)


def _steps(reply: CheckedMessage, sent: ArrayRecord) -> dict[str, FloatArray]:
    """Return what a client added to each floating-point array of the model ``sent``."""
    before = {key: array.numpy() for key, array in sent.items()}
    return {
        key: numbers(reply.arrays[key].numpy()).astype(np.float64) - numbers(array).astype(np.float64)
        for key, array in before.items()
        if is_float(array.dtype)
    }


def _apply_steps(
    reply: CheckedMessage, steps: Mapping[str, FloatArray], model: ArrayRecord, factor: float
) -> CheckedMessage:
    """Return an OK reply whose floating-point arrays are those of ``model`` plus ``factor`` times ``steps``."""
    moved = {}
    for key, step in steps.items():
        begin = model[key].numpy()
        moved[key] = to_array(convert(numbers(begin).astype(np.float64) + factor * step, begin.dtype))
    arrays = ArrayRecord({**reply.arrays, **moved})
    assert reply.message is not None
    reply.message.content[reply.kind[0]] = arrays
    return reply._replace(arrays=arrays)


def measures_of(model: ArrayRecord, replies: Sequence[CheckedMessage]) -> Measures:
    """Return the measures of replies to ``model``."""
    return Measures(replies, sent=lambda: decode(model), model=lambda reply: decode(reply.arrays))


def weighted_average(
    replies: Sequence[CheckedMessage], needed: Callable[[str], bool] = lambda name: True
) -> ArrayRecord:
    """Return the weighted mean of those arrays of models whose names are ``needed``, as in FedAvg."""
    weights = np.maximum([reply.weight for reply in replies], 0.0)
    weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(weights), 1 / len(weights))
    mean = {}
    for name in filter(needed, replies[0].arrays):
        parts = [reply.arrays[name].numpy() for reply in replies]
        total = sum(numbers(part) * weight for part, weight in zip(parts, weights.tolist(), strict=True))
        mean[name] = to_array(convert(np.rint(total) if parts[0].dtype.kind in "biu" else total, parts[0].dtype))
    return ArrayRecord(mean)


def evaluations(
    messages: Mapping[str, Message], key: str, sizes: Mapping[str, int | None], max_share: float | None
) -> tuple[list[Message], dict[str, list[str]]]:
    """Return the evaluation replies that can be averaged, and by client what was changed or left out.

    Parameters
    ----------
    messages : mapping of str to Message
        By client, without errors.
    key : str
        The metric that is the weight.
    sizes : mapping of str to int or None
        The number of samples that each client declared.
    max_share : float or None
        Largest share of the weights that one client may have.
    """
    metrics: dict[str, MetricRecord] = {}
    remarks: dict[str, list[str]] = {}
    names: list[str] = []
    for client, message in messages.items():
        records = message.content.metric_records
        if len(records) != 1 or not _is_weight(next(iter(records.values())).get(key)):
            remarks[client] = [f"its evaluation is left out: it has no usable metric {key!r}"]
            continue
        ((name, metrics[client]),) = records.items()
        names.append(name)
    weights, lowered = bounded_weights({c: float(r[key]) for c, r in metrics.items()}, sizes, max_share)  # type: ignore[arg-type]
    if not any(weights.values()):
        return [], remarks
    metrics.update({client: MetricRecord({**metrics[client], key: weights[client]}) for client in lowered})
    common, changes = common_metrics(metrics, key)
    for client, texts in [*((c, [text]) for c, text in lowered.items()), *changes.items()]:
        remarks.setdefault(client, []).extend(texts)
    usual = _most_common(names, "metrics")
    for client, record in common.items():
        content = messages[client].content
        others = {k: v for k, v in content.items() if not isinstance(v, MetricRecord) and k != usual}
        messages[client].content = RecordDict({usual: record, **others})
    return [messages[client] for client in common], remarks
