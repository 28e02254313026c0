"""Checks replies before they are averaged, each by itself, so that one bad client cannot spoil a round.

Flower's strategies check replies together and abort the run if one differs. Here, a reply with an error, with NaN, with
arrays of another type or shape or without a usable weight gets a status with a reason, and the strategy sees only the
others. Entries with another precision than the model's are converted, so that no reply changes the model's type.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedcohort.core.arrays import AnyArray, FloatArray
from fedcohort.core.errors import InputError
from fedcohort.core.protocol import Status
from fedcohort.core.signals import Signal
from fedcohort.hosts.flower.exchange import GridReply
from fedcohort.hosts.flower.metrics import common_metrics
from fedcohort.hosts.flower.npy import Layout, convert, is_float, numbers, to_array
from fedcohort.hosts.measures import InvalidReplyError, Measures, RequiredReport, is_statistic
from fedcohort.hosts.weights import bounded_weights
from fedcohort.hosts.wire import RECORD, Value

_OK, _INVALID = Status.OK, Status.INVALID  # reading a member of an enumeration takes long in Python 3.11
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
    records : tuple of str
        The names of these two records.
    widths : tuple of int
        The sizes of the vectors that the selector needs.
    weight : float
        The weight of an OK reply: what the client sent, within its bounds.
    values : mapping of Signal to float or (V,) array
        What the client reported, and how long it took.
    gradient : (d,) array or None
        The full-batch gradient that the client reported.
    """

    name: str
    status: Status
    reason: str = ""
    message: Message | None = None
    arrays: ArrayRecord = ArrayRecord()
    metrics: MetricRecord = MetricRecord()
    records: tuple[str, str] = ("", "")
    widths: tuple[int, ...] = ()
    weight: float = 0.0
    values: Mapping[Signal, Value] = MappingProxyType({})
    gradient: FloatArray | None = None

    @property
    def content(self) -> RecordDict:
        """The content of an OK reply's message, which the strategy averages."""
        assert self.message is not None
        return self.message.content

    def with_metrics(self, metrics: MetricRecord) -> CheckedMessage:
        """Return an OK reply with other metrics; its message changes too."""
        self.content[self.records[1]] = metrics
        return self._replace(metrics=metrics)

    def with_weight(self, key: str, weight: float) -> CheckedMessage:
        """Return an OK reply with another weight; its message changes too."""
        return self.with_metrics(MetricRecord({**self.metrics, key: weight}))._replace(weight=weight)

    def with_records(self, arrays: str, metrics: str) -> CheckedMessage:
        """Return an OK reply with these names for its two records; its message changes too."""
        assert self.message is not None
        others = {k: v for k, v in self.content.items() if k not in (*self.records, arrays, metrics)}
        self.message.content = RecordDict({arrays: self.arrays, metrics: self.metrics, **others})
        return self._replace(records=(arrays, metrics))

    def shortened(self, sent: ArrayRecord, most: float) -> tuple[CheckedMessage, float]:
        """Return an OK reply whose update has at most the Euclidean norm ``most``, and the original norm.

        The update consists of the client's changes to floating-point arrays; other arrays stay as the client sent them.
        """
        steps = self._steps(sent)
        norm = math.sqrt(sum(float(np.vdot(step, step)) for step in steps.values()))
        return (self, norm) if norm <= most else (self._moved(steps, sent, most / norm), norm)

    def moved(self, sent: ArrayRecord, onto: ArrayRecord, factor: float) -> CheckedMessage:
        """Return an OK reply with its update of the model ``sent`` multiplied by ``factor`` and applied to ``onto``.

        Running statistics are mixed with those of ``onto`` instead and never go beyond the client's: a sum of changes
        could make a variance negative.
        """
        before = ArrayRecord({key: onto[key] if is_statistic(key) else array for key, array in sent.items()})
        share = min(max(factor, 0.0), 1.0)
        steps = {key: (share if is_statistic(key) else factor) * step for key, step in self._steps(before).items()}
        return self._moved(steps, onto, 1.0)

    def _steps(self, sent: ArrayRecord) -> dict[str, FloatArray]:
        """Return what the client added to each floating-point array of the model ``sent``."""
        before = {key: array.numpy() for key, array in sent.items()}
        return {
            key: numbers(self.arrays[key].numpy()).astype(np.float64) - numbers(array).astype(np.float64)
            for key, array in before.items()
            if is_float(array.dtype)
        }

    def _moved(self, steps: Mapping[str, FloatArray], model: ArrayRecord, factor: float) -> CheckedMessage:
        """Return a reply whose floating-point arrays are those of ``model`` plus ``factor`` times ``steps``."""
        moved = {}
        for key, step in steps.items():
            begin = model[key].numpy()
            moved[key] = to_array(convert(numbers(begin).astype(np.float64) + factor * step, begin.dtype))
        arrays = self.content[self.records[0]] = ArrayRecord({**self.arrays, **moved})
        return self._replace(arrays=arrays)


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
        self._required = RequiredReport(frozenset(required))
        self._same_shapes = same_shapes
        self._layouts: dict[str, Layout] = {}
        for key, array in model.items():
            try:
                self._layouts[key] = Layout.of(array)
            except ValueError as error:
                raise InputError(f"The global model's array {key!r} cannot be averaged: {error}.") from error
        floats = [layout for layout in self._layouts.values() if is_float(layout.dtype)]
        self._parameters = sum(math.prod(layout.shape) for layout in floats) if same_shapes else math.inf

    def check_all(self, replies: Iterable[GridReply]) -> list[CheckedMessage]:
        """Check replies, each by itself."""
        with np.errstate(over="ignore", invalid="ignore"):  # the squares of valid numbers may overflow
            return [self._check(reply) for reply in replies]

    def _check(self, reply: GridReply) -> CheckedMessage:
        message = reply.message
        if message.has_error():
            # A lost message is not the client's fault, so it counts as no answer.
            return CheckedMessage(
                reply.name, Status.MISSING if reply.expired else Status.FAILED, reply.error or "", message
            )
        try:
            return self._valid(reply, message.content)
        except InvalidReplyError as error:
            return CheckedMessage(reply.name, _INVALID, str(error), message)

    def _valid(self, reply: GridReply, content: RecordDict) -> CheckedMessage:
        ours = content.get(RECORD)
        if not isinstance(ours, ConfigRecord):
            ours = None
        else:
            del content[RECORD]
        # Flower's records have exactly these types; isinstance with abstract classes would dominate the time here.
        models = [(key, part) for key, part in content.items() if type(part) is ArrayRecord]
        measured = [(key, part) for key, part in content.items() if type(part) is MetricRecord]
        for kind, parts in (("ArrayRecord", models), ("MetricRecord", measured)):
            if len(parts) != 1:
                raise InvalidReplyError(f"the reply must carry exactly one {kind}, not {len(parts)}")
        ((arrays_key, arrays),), ((metrics_key, metrics),) = models, measured
        # Arrays with another layout than the model's are written anew, because later readers trust the headers.
        if rewritten := self._check_arrays(arrays):
            arrays = content[arrays_key] = ArrayRecord({**arrays, **rewritten})
        weight = metrics.get(self._weight_key)
        if not _is_weight(weight):
            raise InvalidReplyError(
                f"the metric {self._weight_key!r} must be a number of at least 0, not {str(weight)[:40]}"
            )
        values, gradient = self._required.read(ours, reply.seconds)
        widths = [np.size(values[signal]) for signal in self._required.signals]
        if gradient is not None:
            # It may be shorter than the model if clients train only some arrays; all must have the same length.
            if len(gradient) > self._parameters:
                raise InvalidReplyError(
                    f"its gradient has {len(gradient)} entries, more than the model's {self._parameters}"
                )
            widths.append(len(gradient))
        return CheckedMessage(
            reply.name, _OK, "", reply.message, arrays, metrics, (arrays_key, metrics_key), tuple(widths),
            float(weight), values, gradient,
        )  # fmt: skip

    def _check_arrays(self, model: ArrayRecord) -> dict[str, Array]:
        """Return the arrays of a valid model that have another layout than those sent, in the usual one."""
        layouts = self._layouts
        if self._same_shapes and model.keys() != layouts.keys():
            odd = min(model.keys() ^ layouts.keys(), key=str)
            raise InvalidReplyError(f"the model's arrays have other names than the ones sent: {str(odd)[:80]!r}")
        rewritten: dict[str, Array] = {}
        for key, array in model.items():
            sent = layouts.get(key)
            entries = None if sent is None else sent.entries(array)
            if entries is None:
                try:
                    converted = self._convert(array, sent)
                except ValueError as error:
                    raise InvalidReplyError(f"the array {key!r} {error}") from error
                rewritten[key] = to_array(converted)
                entries = converted.ravel(order="K")
            if not is_finite(entries):
                raise InvalidReplyError(f"the array {key!r} has NaN or infinite entries")
        return rewritten

    def _convert(self, array: Array, sent: Layout | None) -> AnyArray:
        """Return an array in the type of the one that was ``sent``; raise ValueError if this is not possible."""
        try:
            layout = Layout.of(array)
        except ValueError as error:
            raise ValueError(f"cannot be read: {error}") from error
        values = layout.read(array)
        if sent is None:
            return values
        if self._same_shapes and layout.shape != sent.shape:
            raise ValueError(f"has the shape {layout.shape} instead of {sent.shape}")
        if layout.dtype == sent.dtype:
            return values
        # Kind V is bfloat16.
        if {layout.dtype.kind, sent.dtype.kind} <= set("biufV") and layout.dtype.itemsize <= 8:
            with np.errstate(all="ignore"):  # integers that do not fit are found here, floats become infinite
                cast = convert(values, sent.dtype)
                if is_float(sent.dtype) or np.array_equal(cast, values):
                    return cast
        raise ValueError(f"has the type {layout.dtype} instead of {sent.dtype}")


def _is_weight(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and 0 <= value <= _MAX_WEIGHT


def with_common_names(replies: Sequence[CheckedMessage], arrays: str = "arrays") -> list[CheckedMessage]:
    """Give the records of OK replies the same names; make replies INVALID if their vectors differ in size from most.

    ``arrays`` is the name of models to prefer if two names are equally common.
    """
    common = list(replies)
    valid = [reply for reply in replies if reply.status is _OK]
    if len({(reply.records, reply.widths) for reply in valid}) <= 1:
        return common
    usual = tuple(
        _most_common([reply.records[i] for reply in valid], name) for i, name in enumerate((arrays, "metrics"))
    )
    # The larger of two equally common sizes, since no gradient is larger than the model.
    widths = _most_common([reply.widths for reply in valid])
    for i, reply in enumerate(replies):
        if reply.status is _OK and reply.widths != widths:
            why = "the vectors or the gradient it reported differ in size from those of most replies"
            common[i] = reply._replace(status=_INVALID, reason=why)
        elif reply.status is _OK and reply.records != usual:
            common[i] = reply.with_records(*usual)
    return common


def _most_common(values: Sequence[Any], preferred: Any = None) -> Any:
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value == preferred, value))


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
