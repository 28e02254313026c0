"""From what came back to what can be averaged: each reply is checked by itself, so one bad client spoils nothing.

Flower's strategies check replies together and abort the whole run when one differs. Here a reply with an error, with
NaN, with arrays of another type or shape or without a usable weight becomes a status with a reason; the strategy sees
the rest. Entries of another precision than the model's are converted, so that no reply changes the model's type.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedcohort.core.arrays import AnyArray, FloatArray
from fedcohort.core.errors import InputError
from fedcohort.core.protocol import Status
from fedcohort.core.signals import Signal
from fedcohort.core.vectors import OutputLayer, output_layer
from fedcohort.hosts.flower.exchange import GridReply
from fedcohort.hosts.flower.metrics import common_metrics
from fedcohort.hosts.flower.npy import BFLOAT16, Layout, convert, is_float, numbers, to_array, unreadable
from fedcohort.hosts.measures import Measures, lacking, reported_signals
from fedcohort.hosts.weights import bounded_weights
from fedcohort.hosts.wire import GRADIENT_SIGNALS, RECORD, Value, read_gradient, read_report

log = logging.getLogger("flwr.fedcohort")
# In Python 3.11 reading a member from its enumeration takes longer than comparing it.
_OK, _INVALID, _DURATION = Status.OK, Status.INVALID, Signal.DURATION
_NO_ARRAYS, _NO_METRICS = ArrayRecord(), MetricRecord()  # of replies that are not OK; never changed
_LARGEST_WEIGHT = 1 << 53  # a count of samples beyond is none, and sums of them overflow


class Checked(NamedTuple):
    """One client's reply after the checks.

    Attributes
    ----------
    reason : str
        Why it is not OK; empty when it is.
    message : Message or None
        The reply without fedcohort's own record, as the wrapped strategy sees it; an error where it was one.
    arrays : ArrayRecord
        The model of an OK reply.
    metrics : MetricRecord
        The metrics of an OK reply.
    kind : tuple
        The names of its two records, and the sizes of the vectors the selector needs.
    weight : float
        What an OK reply weighs: what the client sent, within its bounds.
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
    weight: float = 0.0


def flat(arrays: ArrayRecord) -> FloatArray:
    """Return the floating-point arrays of a model as one vector; counters and other integers are not parameters."""
    parts = [array.numpy() for array in arrays.values()]
    floats = [numbers(part).astype(np.float64).ravel() for part in parts if is_float(part.dtype)]
    return np.concatenate(floats) if floats else np.empty(0)


def output_of(arrays: ArrayRecord) -> OutputLayer:
    """Return where the output layer stands in :func:`flat`; an error for a model whose output layer has no bias."""
    shapes = {key: array.numpy() for key, array in arrays.items()}
    return output_layer({key: array.shape for key, array in shapes.items() if is_float(array.dtype)})


def is_finite(values: AnyArray) -> bool:
    """Whether entries are finite, and doubles small enough to be squared; one vector is looked through fastest."""
    values = numbers(values)
    kind = values.dtype.kind
    # NaN and infinity survive into a sum of squares, which BLAS takes in one pass and without a temporary.
    if kind == "f" and values.ndim == 1 and values.itemsize >= 4 and math.isfinite(values.dot(values)):
        return True
    # Doubles whose squares overflow would make norms and distances of all clients infinite.
    return kind not in "fc" or (values.dtype != np.float64 and bool(np.isfinite(values).all()))


class _Parts:
    """What a reply carries: its last model and metrics, how many there are of each, and fedcohort's own record."""

    __slots__ = ("arrays", "arrays_key", "metrics", "metrics_key", "model", "numbers", "ours")

    def __init__(self, content: RecordDict) -> None:
        self.model, self.arrays, self.arrays_key = _NO_ARRAYS, 0, ""
        self.numbers, self.metrics, self.metrics_key = _NO_METRICS, 0, ""
        self.ours: ConfigRecord | None = None
        for key, part in content.items():
            # Flower's records are of these very types; asking abstract classes takes longer than all else here.
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
        self._reported = reported_signals(wanted)
        self._gradient = bool(wanted & GRADIENT_SIGNALS)
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

    def check_all(self, replies: Iterable[GridReply]) -> list[Checked]:
        """Check replies, each by itself."""
        with np.errstate(over="ignore", invalid="ignore"):  # the sum of squares of sound numbers may overflow
            return [self._check(reply) for reply in replies]

    def _check(self, reply: GridReply) -> Checked:
        message = reply.message
        if message.has_error():
            # Lost on the way is not the client's error: it is as if it had never answered.
            status = Status.MISSING if reply.expired else Status.FAILED
            return Checked(reply.name, status, reply.error or "", message, {}, None, _NO_ARRAYS, _NO_METRICS, ())
        content = message.content
        parts = _Parts(content)
        if parts.ours is not None:
            del content[RECORD]
        values = read_report(parts.ours)
        values[_DURATION] = reply.seconds
        gradient = read_gradient(parts.ours) if self._gradient else None
        rewritten: dict[str, Array] = {}
        reason = self._flaw(parts, rewritten) or self._missing_signals(values, gradient)
        if reason:
            return Checked(reply.name, _INVALID, reason, message, values, gradient, _NO_ARRAYS, _NO_METRICS, ())
        model = parts.model
        if rewritten:
            model = content[parts.arrays_key] = ArrayRecord({**model, **rewritten})
        weight = float(parts.numbers[self._weight_key])  # type: ignore[arg-type]  # a number, as was seen
        kind = self._kind_of(parts, values, gradient)
        return Checked(reply.name, _OK, "", message, values, gradient, model, parts.numbers, kind, weight)

    def _flaw(self, parts: _Parts, rewritten: dict[str, Array]) -> str:
        """Return what is wrong with the model or its weight, or an empty string; ``rewritten`` as in `_unsound`."""
        if parts.arrays != 1:
            return f"the reply must carry exactly one ArrayRecord, not {parts.arrays}"
        if parts.metrics != 1:
            return f"the reply must carry exactly one MetricRecord, not {parts.metrics}"
        weight = parts.numbers.get(self._weight_key)
        reason = self._unsound(parts.model, rewritten)
        if not reason and not _is_weight(weight):
            return f"the metric {self._weight_key!r} must be a number of at least 0, not {str(weight)[:40]}"
        return reason

    def _kind_of(self, parts: _Parts, values: Mapping[Signal, Value], gradient: FloatArray | None) -> tuple[Any, ...]:
        """Return what :func:`with_common_names` compares: names of records and sizes of vectors."""
        widths = tuple(np.size(values[signal]) for signal in self._reported)
        if gradient is not None:
            widths = (*widths, len(gradient))
        usual = self._kind
        if usual[0] != parts.arrays_key or usual[1] != parts.metrics_key or usual[2] != widths:
            # One object for all that agree in a row: compared fast.
            usual = self._kind = (parts.arrays_key, parts.metrics_key, widths)
        return usual

    def _unsound(self, model: ArrayRecord, rewritten: dict[str, Array]) -> str:
        """Return what is wrong with a model's arrays, or an empty string.

        ``rewritten`` takes up the arrays that are laid out otherwise than they were sent, written anew: whoever reads
        them later believes their headers.
        """
        layouts = self._layouts
        if self._same_shapes and model.keys() != layouts.keys():
            odd = min(model.keys() ^ layouts.keys(), key=str)
            return f"the model's arrays have other names than the ones sent: {str(odd)[:80]!r}"
        for key, array in model.items():
            sent = layouts.get(key)
            values = None if sent is None else sent.entries(array)
            if values is None:  # not laid out like the model: judged by its header before anything is read
                found = self._convert(array, sent)
                if isinstance(found, str):
                    return f"the array {key!r} {found}"
                rewritten[key] = to_array(found)
                values = found.ravel(order="K")
            if not is_finite(values):
                return f"the array {key!r} has NaN or infinite entries"
        return ""

    def _convert(self, array: Array, sent: Layout | None) -> AnyArray | str:
        """Return an array in the type of the one that was ``sent``, or in words why it cannot be that array."""
        layout = Layout.of(array)
        if layout is None:
            return f"cannot be read: {unreadable(array)}"
        if sent is None:
            return layout.read(array)
        # What it holds counts, not what it says about itself.
        if self._same_shapes and layout.shape != sent.shape:
            return f"has the shape {layout.shape} instead of {sent.shape}"
        values = layout.read(array)
        if layout.dtype == sent.dtype:
            return values
        cast = _as_sent(values, sent.dtype)
        return f"has the type {layout.dtype} instead of {sent.dtype}" if cast is None else cast

    def _missing_signals(self, values: Mapping[Signal, Value], gradient: FloatArray | None) -> str:
        """Return what the selector must learn and the client did not report, or an empty string."""
        # Fewer than the model's are fine: a client may train some of its arrays. Other clients' must be as many.
        if gradient is not None and self._parameters is not None and len(gradient) > self._parameters:
            return f"its gradient has {len(gradient)} entries, more than the model's {self._parameters}"
        return lacking(self._reported, values, gradient, self._gradient)


def _is_weight(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= _LARGEST_WEIGHT


def _as_sent(values: AnyArray, dtype: np.dtype[Any]) -> AnyArray | None:
    """Return ``values`` in the type the model was sent in, or None where that would change what they say."""
    given = values.dtype
    if any(kind.kind not in "biuf" and kind != BFLOAT16 for kind in (given, dtype)) or given.itemsize > 8:
        return None
    with np.errstate(all="ignore"):  # a number that does not fit is infinite or another, and found below
        cast = convert(values, dtype)
        if not is_float(dtype) and not np.array_equal(cast, values):
            return None
    return cast


def with_common_names(replies: Sequence[Checked], records: Sequence[str] = ("arrays", "metrics")) -> list[Checked]:
    """Give the records of OK replies the same names; make replies INVALID whose vectors have other sizes than most.

    ``records`` are the names that count where as many replies have one as another.
    """
    found = list(replies)
    kinds = [reply.kind for reply in replies if reply.status is _OK]
    if not kinds or kinds.count(kinds[0]) == len(kinds):
        return found
    usual = [_most_common([kind[i] for kind in kinds], name) for i, name in enumerate(records)]
    # Of two sizes that are as common the larger one: no gradient is larger than the model.
    widths = _most_common([kind[2] for kind in kinds])
    reason = "the vectors or the gradient it reported differ in size from those of most replies"
    for i, reply in enumerate(replies):
        if reply.status is not _OK:
            continue
        if reply.kind[2] != widths:
            found[i] = reply._replace(status=_INVALID, reason=reason)
        elif [*reply.kind[:2]] != usual:
            found[i] = _with_records(reply, *usual)
    return found


def _most_common(values: Sequence[Any], preferred: Any = None) -> Any:
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value == preferred, value))


def _with_records(reply: Checked, arrays: str, metrics: str) -> Checked:
    """Return a reply whose two records have these names."""
    assert reply.message is not None
    others = {k: v for k, v in reply.message.content.items() if k not in (*reply.kind[:2], arrays, metrics)}
    reply.message.content = RecordDict({arrays: reply.arrays, metrics: reply.metrics, **others})
    return reply._replace(kind=(arrays, metrics, reply.kind[2]))


def with_metrics(reply: Checked, metrics: MetricRecord) -> Checked:
    """Return an OK reply with other metrics, in its message too."""
    assert reply.message is not None
    reply.message.content[reply.kind[1]] = metrics
    return reply._replace(metrics=metrics)


def with_weight(reply: Checked, key: str, weight: float) -> Checked:
    """Return an OK reply that weighs something else than it says."""
    return with_metrics(reply, MetricRecord({**reply.metrics, key: weight}))._replace(weight=weight)


def clip_update(reply: Checked, sent: ArrayRecord, most: float) -> tuple[Checked, float]:
    """Return an OK reply whose update has at most the Euclidean norm ``most``, and the norm it had.

    The update is what a client changed in the floating-point arrays; the rest of the model stays as it sent it.
    """
    steps = _steps(reply, sent)
    norm = math.sqrt(sum(float(np.vdot(step, step)) for step in steps.values()))
    return (reply, norm) if norm <= most else (_apply_steps(reply, steps, sent, most / norm), norm)


def move_update(reply: Checked, sent: ArrayRecord, onto: ArrayRecord, factor: float) -> Checked:
    """Return an OK reply to the model ``sent`` as one to the model ``onto``, its update multiplied by ``factor``."""
    return _apply_steps(reply, _steps(reply, sent), onto, factor)


def _steps(reply: Checked, sent: ArrayRecord) -> dict[str, FloatArray]:
    """Return what a client added to each floating-point array of the model ``sent``."""
    before = {key: array.numpy() for key, array in sent.items()}
    return {
        key: numbers(reply.arrays[key].numpy()).astype(np.float64) - numbers(array).astype(np.float64)
        for key, array in before.items()
        if is_float(array.dtype)
    }


def _apply_steps(reply: Checked, steps: Mapping[str, FloatArray], model: ArrayRecord, factor: float) -> Checked:
    """Return an OK reply whose floating-point arrays are those of ``model`` plus ``factor`` times ``steps``."""
    moved = {}
    for key, step in steps.items():
        begin = model[key].numpy()
        moved[key] = to_array(convert(numbers(begin).astype(np.float64) + factor * step, begin.dtype))
    arrays = ArrayRecord({**reply.arrays, **moved})
    assert reply.message is not None
    reply.message.content[reply.kind[0]] = arrays
    return reply._replace(arrays=arrays)


def measures_of(model: ArrayRecord, replies: Sequence[Checked], samples: FloatArray) -> Measures:
    """Return what the server can measure of the OK replies to ``model``; ``samples`` are from :func:`sample_counts`."""
    return Measures(
        replies, samples, sent=lambda: flat(model), model=lambda r: flat(r.arrays), output=lambda: output_of(model)
    )


def weight_of(reply: Checked, key: str) -> float:
    """Return the weight of an OK reply in an average."""
    return float(reply.metrics[key])  # type: ignore[arg-type]  # the checks let only numbers through


def sample_counts(replies: Sequence[Checked]) -> FloatArray:
    """(r,) the weights of replies in an average as the clients sent them; 0 where a reply is not OK."""
    return np.array([reply.weight if reply.status is _OK else 0.0 for reply in replies], np.float64)


def scale_weight(reply: Checked, key: str, factor: float) -> None:
    """Let a client count ``factor`` times in the average."""
    reply.metrics[key] = weight_of(reply, key) * factor


def weighted_average(replies: Sequence[Checked], key: str) -> ArrayRecord:
    """Return the mean of models weighted by ``key``, as FedAvg takes it."""
    weights = np.array([weight_of(reply, key) for reply in replies])
    weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(weights), 1 / len(weights))
    mean = {}
    for name in replies[0].arrays:
        parts = [reply.arrays[name].numpy() for reply in replies]
        total = sum(numbers(part) * weight for part, weight in zip(parts, weights.tolist(), strict=True))
        mean[name] = to_array(convert(np.asarray(total), parts[0].dtype))
    return ArrayRecord(mean)


def _replace_metrics(message: Message, name: str, record: MetricRecord) -> None:
    """Let a message carry one MetricRecord, under this name; what else it carries stays."""
    others = {k: v for k, v in message.content.items() if not isinstance(v, MetricRecord) and k != name}
    message.content = RecordDict({name: record, **others})


def evaluations(
    messages: Mapping[str, Message], key: str, sizes: Mapping[str, int | None], max_share: float | None
) -> tuple[list[Message], dict[str, list[str]]]:
    """Return the evaluation replies that can be averaged, with metrics that can, and what was changed about each.

    Parameters
    ----------
    messages : mapping of str to Message
        By client; none is an error.
    key : str
        The metric they are weighted by.
    sizes : mapping of str to int or None
        The samples each client declared.
    max_share : float or None
        Largest share of the weights that one client may have.
    """
    found: dict[str, MetricRecord] = {}
    remarks: dict[str, list[str]] = {}
    names: list[str] = []
    for client, message in messages.items():
        records = message.content.metric_records
        if len(records) != 1 or not _is_weight(next(iter(records.values())).get(key)):
            remarks[client] = [f"its evaluation is left out: it has no usable metric {key!r}"]
            continue
        ((name, found[client]),) = records.items()
        names.append(name)
    weights, lowered = bounded_weights({c: float(r[key]) for c, r in found.items()}, sizes, max_share)  # type: ignore[arg-type]
    if not any(weights.values()):
        return [], remarks
    found.update({client: MetricRecord({**found[client], key: weights[client]}) for client in lowered})
    even, odd = common_metrics(found, key)
    for client, texts in [*((c, [text]) for c, text in lowered.items()), *odd.items()]:
        remarks.setdefault(client, []).extend(texts)
    usual = _most_common(names, "metrics")
    for client, record in even.items():
        _replace_metrics(messages[client], usual, record)
    return [messages[client] for client in even], remarks
