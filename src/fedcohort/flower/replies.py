"""From what came back to what can be averaged: each reply is checked by itself, so one bad client spoils nothing.

Flower's strategies check replies together and abort the whole run when one differs. Here a reply with an error, with
NaN, with arrays of another shape or without a usable weight becomes a status with a reason; the strategy sees the rest.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord

from fedcohort.arrays import AnyArray, BoolArray, FloatArray, IntArray
from fedcohort.flower.exchange import Reply
from fedcohort.flower.npy import Layout
from fedcohort.flower.wire import GRADIENT_SIGNALS, RECORD, Value, reported, reported_gradient
from fedcohort.protocol import Status
from fedcohort.signals import METRIC_SIGNALS, Signal, VectorOf, vectors_of
from fedcohort.vectors import output_bias, taken

log = logging.getLogger("flwr.fedcohort")
MEASURED = frozenset(vectors_of(METRIC_SIGNALS, "update"))  # by the server, from the models
# In Python 3.11 reading a member from its enumeration takes longer than comparing it.
_OK, _INVALID, _DURATION = Status.OK, Status.INVALID, Signal.DURATION
_NO_ARRAYS, _NO_METRICS = ArrayRecord(), MetricRecord()


class Checked(NamedTuple):
    """One client's reply after the checks.

    Attributes
    ----------
    name : str
    status : Status
    reason : str
        Why it is not OK; empty when it is.
    message : Message or None
        The reply without fedcohort's own record, as the wrapped strategy sees it.
    arrays : ArrayRecord
        The model of an OK reply.
    metrics : MetricRecord
        The metrics of an OK reply.
    kind : tuple
        The names of its records and metrics, the sizes of its vectors; only replies of one kind can be averaged
        together.
    values : mapping of Signal to float or (V,) array
        What the client reported, and how long it took.
    gradient : (d,) array or None
        The full-batch gradient it reported.
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


def flat(arrays: ArrayRecord) -> FloatArray:
    """Return the floating-point arrays of a model as one vector; counters and other integers are no parameters."""
    parts = [array.numpy() for array in arrays.values()]
    floats = [part.astype(np.float64).ravel() for part in parts if part.dtype.kind == "f"]
    return np.concatenate(floats) if floats else np.empty(0)


def bias_of(arrays: ArrayRecord) -> slice:
    """Return where the output layer's bias stands in :func:`flat`; an error for a model without one."""
    shapes = {key: array.numpy() for key, array in arrays.items()}
    return output_bias({key: array.shape for key, array in shapes.items() if array.dtype.kind == "f"})


def _is_finite(values: AnyArray) -> bool:
    kind = values.dtype.kind
    # NaN and infinity survive into a sum of squares, which BLAS takes in one pass and without a temporary.
    if kind == "f" and values.ndim == 1 and values.itemsize >= 4 and math.isfinite(values.dot(values)):
        return True
    return kind not in "fc" or bool(np.isfinite(values).all())


class Checker:
    """The checks of one round.

    Parameters
    ----------
    model : ArrayRecord
        The model that was sent.
    weight_key : str
        The metric a reply is weighted by.
    required : set of Signal
        What the selector must learn from each OK client.
    same_shapes : bool
        Whether replies must have the shapes of the model.
    """

    def __init__(
        self, model: ArrayRecord, weight_key: str, required: Iterable[Signal], same_shapes: bool = True
    ) -> None:
        self._weight_key = weight_key
        wanted = frozenset(required)
        self._reported = sorted((wanted & METRIC_SIGNALS) - MEASURED - GRADIENT_SIGNALS)
        self._gradient = bool(wanted & GRADIENT_SIGNALS)
        self._shapes = {key: tuple(array.shape) for key, array in model.items()} if same_shapes else None
        self._kind: tuple[str, str, frozenset[str], tuple[int, ...]] = ("", "", frozenset(), ())  # of the last reply
        self._layouts = {key: Layout.of(array) for key, array in model.items()}

    def all(self, replies: Iterable[Reply]) -> list[Checked]:
        """Check replies, each by itself."""
        with np.errstate(over="ignore", invalid="ignore"):  # the sum of squares of sound numbers may overflow
            return [self._checked(reply) for reply in replies]

    def _checked(self, reply: Reply) -> Checked:
        message = reply.message
        if message.has_error():
            # Lost on the way is not the client's error: it is as if it had never answered.
            status = Status.MISSING if reply.expired else Status.FAILED
            return Checked(reply.name, status, _short(reply.error or ""), None, {}, None, _NO_ARRAYS, _NO_METRICS, ())
        content = message.content
        model, arrays, arrays_key = _NO_ARRAYS, 0, ""
        numbers, metrics, metrics_key = _NO_METRICS, 0, ""
        record: ConfigRecord | None = None
        for key, part in content.items():
            if key == RECORD and isinstance(part, ConfigRecord):
                record = part
            elif isinstance(part, ArrayRecord):
                model, arrays, arrays_key = part, arrays + 1, key
            elif isinstance(part, MetricRecord):
                numbers, metrics, metrics_key = part, metrics + 1, key
        if record is not None:
            del content[RECORD]
        values = reported(record)
        values[_DURATION] = reply.seconds
        gradient = reported_gradient(record) if self._gradient else None
        if arrays != 1:
            reason = f"the reply must carry exactly one ArrayRecord, not {arrays}"
        elif metrics != 1:
            reason = f"the reply must carry exactly one MetricRecord, not {metrics}"
        else:
            reason = self._unsound(model) or self._unusable(numbers) or self._unreported(values, gradient)
        if reason:
            return Checked(reply.name, _INVALID, reason, message, values, gradient, _NO_ARRAYS, _NO_METRICS, ())
        names = numbers.keys()
        kind = self._kind
        vectors = [value for value in values.values() if not isinstance(value, float)]
        widths = tuple(map(len, vectors if gradient is None else [*vectors, gradient]))
        if kind[0] != arrays_key or kind[1] != metrics_key or kind[2] != names or kind[3] != widths:
            kind = self._kind = (arrays_key, metrics_key, frozenset(names), widths)
        return Checked(reply.name, _OK, "", message, values, gradient, model, numbers, kind)

    def _unsound(self, model: ArrayRecord) -> str:
        """Return what is wrong with a model's arrays, or an empty string."""
        shapes, layouts = self._shapes, self._layouts
        if shapes is not None and model.keys() != shapes.keys():
            odd = min(model.keys() ^ shapes.keys())
            return f"the model's arrays have other names than the ones sent: {odd!r}"
        for key, array in model.items():
            layout = layouts.get(key)
            values = None if layout is None else layout.entries(array)
            if values is None:
                try:
                    values = array.numpy()
                except (ValueError, TypeError, EOFError, OSError) as error:
                    return f"the array {key!r} cannot be read: {_short(str(error))}"
                # What it holds counts, not what it says about itself.
                if shapes is not None and values.shape != shapes[key]:
                    return f"the array {key!r} has the shape {values.shape} instead of {shapes[key]}"
            if not _is_finite(values):
                return f"the array {key!r} has NaN or infinite entries"
        return ""

    def _unusable(self, metrics: MetricRecord) -> str:
        """Return why a reply could not be weighted, or an empty string."""
        weight = metrics.get(self._weight_key)
        if not isinstance(weight, (int, float)) or not math.isfinite(weight) or weight < 0:
            return f"the metric {self._weight_key!r} must be a number of at least 0, not {weight!r}"
        return ""

    def _unreported(self, values: Mapping[Signal, Value], gradient: FloatArray | None) -> str:
        """Return what the selector must learn and the client did not report, or an empty string."""
        for signal in self._reported:
            if signal not in values:
                return f"it reported no finite '{signal}' ({signal.meaning})"
        if self._gradient and (gradient is None or not np.isfinite(gradient).all()):
            return "it reported no finite gradient"
        return ""


def agreeing(replies: Sequence[Checked]) -> list[Checked]:
    """Make OK replies INVALID that differ from most in names or lengths: they could not be averaged together."""
    kinds = [reply.kind for reply in replies if reply.status is _OK]
    if not kinds or kinds.count(kinds[0]) == len(kinds):
        return list(replies)
    ((usual, _),) = Counter(kinds).most_common(1)
    reason = "its metrics, records, vectors or gradient are named or sized otherwise than those of most replies"
    return [
        reply._replace(status=_INVALID, reason=reason) if reply.status is _OK and reply.kind != usual else reply
        for reply in replies
    ]


class Measures:
    """Numbers the server computes from the models of the OK replies, each when it is first read."""

    def __init__(self, model: ArrayRecord, replies: Sequence[Checked]) -> None:
        self._model = model
        self._replies = replies

    @cached_property
    def updates(self) -> FloatArray:
        """(r, P) each client's model less the one sent; zeros for replies that are not OK."""
        sent = flat(self._model)
        rows = [flat(r.arrays) - sent if r.status is _OK else np.zeros_like(sent) for r in self._replies]
        return np.stack(rows) if rows else np.empty((0, len(sent)))

    @cached_property
    def _gradients(self) -> FloatArray:
        width = max((len(r.gradient) for r in self._replies if r.gradient is not None), default=0)
        rows = [r.gradient if r.status is _OK and r.gradient is not None else np.zeros(width) for r in self._replies]
        return np.stack(rows) if rows else np.empty((0, width))

    @cached_property
    def ok(self) -> BoolArray:
        """(r,) which replies are OK."""
        return np.array([r.status is _OK for r in self._replies], np.bool_)

    @cached_property
    def all_ok(self) -> bool:
        """Whether all replies are OK."""
        return all(r.status is _OK for r in self._replies)

    @cached_property
    def rows(self) -> IntArray:
        """(m,) where the OK replies stand."""
        return np.arange(len(self._replies)) if self.all_ok else np.flatnonzero(self.ok)

    def column(self, signal: Signal) -> FloatArray:
        """(r,) one signal over the replies, or (r, V) where it is a vector; NaN where a reply is not OK."""
        if isinstance(signal.how, VectorOf):
            rows = self.updates if signal.how.vector == "update" else self._gradients
            bias = bias_of(self._model) if signal.how.take == "output-bias" else None
            values = np.asarray(taken(signal.how, rows, self.ok, bias), np.float64)
        else:
            found = [reply.values.get(signal) for reply in self._replies]
            widths = [np.shape(value) for value in found if value is not None]
            nothing = np.full(widths[0] if widths else (), np.nan)
            values = np.array([nothing if value is None else value for value in found], np.float64)
        return values if self.all_ok else np.where(self.ok if values.ndim == 1 else self.ok[:, None], values, np.nan)


def weight_of(reply: Checked, key: str) -> float:
    """Return the weight of an OK reply in an average."""
    return float(reply.metrics[key])  # type: ignore[arg-type]  # the checks let only numbers through


def scale_weight(reply: Checked, key: str, factor: float) -> None:
    """Let a client count ``factor`` times in the average."""
    reply.metrics[key] = weight_of(reply, key) * factor


def averaged(replies: Sequence[Checked], key: str) -> ArrayRecord:
    """Return the mean of models weighted by ``key``, as FedAvg takes it."""
    weights = np.array([weight_of(reply, key) for reply in replies])
    weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(weights), 1 / len(weights))
    mean = {}
    for name in replies[0].arrays:
        parts = [reply.arrays[name].numpy() for reply in replies]
        total = sum((part * weight for part, weight in zip(parts, weights.tolist(), strict=True)), start=0 * parts[0])
        mean[name] = Array(np.asarray(total).astype(parts[0].dtype))
    return ArrayRecord(mean)


def alike(messages: Sequence[Message], key: str) -> list[Message]:
    """Return the evaluation replies whose metrics can be averaged together: those named as in the first usable one."""
    usual: frozenset[str] | None = None
    found = []
    for message in messages:
        records = list(message.content.metric_records.values())
        if len(records) != 1 or not isinstance(records[0].get(key), (int, float)):
            log.info("\t> node %d sent no metric %r", message.metadata.src_node_id, key)
            continue
        usual = frozenset(records[0]) if usual is None else usual
        if frozenset(records[0]) == usual:
            found.append(message)
        else:
            log.info("\t> node %d sent metrics of other names", message.metadata.src_node_id)
    return found


def _short(text: str, limit: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
