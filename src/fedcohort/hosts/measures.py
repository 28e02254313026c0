"""What the server learns from a round's replies: what clients reported, and what it computes from their models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray, FloatArray, IntArray
from fedcohort.core.protocol import Status
from fedcohort.core.signals import OnServer, Signal, VectorOf, vectors_of
from fedcohort.core.vectors import OutputLayer, needs_output_layer, output_layer, vector_signal
from fedcohort.hosts.wire import Value, read_gradient, read_report
from fedcohort.training.filters import Filter, KeepAll, Replies, checked_decision

Model = Mapping[str, AnyArray]  # arrays by name, of types that NumPy computes with
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked", "moving_mean", "moving_variance")


def is_statistic(name: str) -> bool:
    """Whether an array holds running statistics of a normalisation layer: its name ends as in torch or Keras."""
    return name.endswith(_STATISTICS)


def parameters(model: Model) -> Model:
    """Return the floating-point arrays that are trained: neither running statistics nor counters."""
    return {name: array for name, array in model.items() if array.dtype.kind == "f" and not is_statistic(name)}


class InvalidReplyError(Exception):
    """A client's reply cannot be averaged; the text says why."""


class RequiredReport:
    """What each client of a round must report, because the selector needs it.

    Attributes
    ----------
    signals : list of Signal
        The numbers and vectors to report; the server measures the other signals itself.
    gradient : bool
        Whether the full-batch gradient is needed.
    """

    def __init__(self, required: Iterable[Signal]) -> None:
        measured = (VectorOf, OnServer)
        self.signals = sorted(
            s for s in required if s.is_metric and not isinstance(s.how, measured) and s != Signal.DURATION
        )
        self.gradient = bool(vectors_of(required, "gradient"))

    def read(
        self, record: Mapping[str, object] | None, seconds: float
    ) -> tuple[dict[Signal, Value], FloatArray | None]:
        """Return what a client reported, with how long it took, and its gradient if one is needed."""
        values = read_report(record)
        values[Signal.DURATION] = seconds
        for signal in self.signals:
            if signal not in values:
                raise InvalidReplyError(f"it reported no finite '{signal}' ({signal.meaning})")
        if not self.gradient:
            return values, None
        gradient = read_gradient(record)
        if gradient is None or not np.isfinite(gradient).all():
            raise InvalidReplyError("it reported no finite gradient")
        return values, gradient


def flat(model: Model) -> FloatArray:
    """Return a model's parameters as one vector."""
    floats = [array.astype(np.float64).ravel() for array in parameters(model).values()]
    return np.concatenate(floats) if floats else np.empty(0)


def output_of(model: Model) -> OutputLayer:
    """Return the position of the output layer in :func:`flat`; raise an error if the layer has no bias."""
    return output_layer({key: array.shape for key, array in parameters(model).items()})


class _CheckedReply(Protocol):
    """A reply after a host's checks."""

    @property
    def status(self) -> Status:
        """OK if the model may enter the average."""

    @property
    def values(self) -> Mapping[Signal, Value]:
        """What the client reported, and how long it took."""

    @property
    def gradient(self) -> FloatArray | None:
        """The full-batch gradient that the client reported."""

    @property
    def weight(self) -> float:
        """Its weight in an average: how many samples it counts for."""


class Measures:
    """The signals of a round's replies, each computed when it is first read.

    Parameters
    ----------
    replies : sequence of r _CheckedReply
    sent : callable
        Returns the model that was sent.
    model : callable
        Returns the model of a valid reply.
    """

    def __init__(
        self,
        replies: Sequence[_CheckedReply],
        *,
        sent: Callable[[], Model],
        model: Callable[[Any], Model],
    ) -> None:
        self.ok: BoolArray = np.array([reply.status is Status.OK for reply in replies], np.bool_)
        self.all_ok = bool(self.ok.all())
        self._replies = replies
        self._samples = np.array([r.weight if r.status is Status.OK else 0.0 for r in replies], np.float64)
        # Functions, because reading the models takes time and most selectors do not need them.
        self._sent = sent
        self._model = model

    @cached_property
    def updates(self) -> FloatArray:
        """(r, P) each client's model minus the one sent; zeros for replies that are not valid."""
        before = flat(self._sent())
        rows = [
            flat(self._model(r)) - before if r.status is Status.OK else np.zeros_like(before) for r in self._replies
        ]
        return np.stack(rows) if rows else np.empty((0, len(before)))

    @cached_property
    def rows(self) -> IntArray:
        """(m,) the positions of the valid replies."""
        return np.arange(len(self.ok)) if self.all_ok else np.flatnonzero(self.ok)

    def column(self, signal: Signal) -> FloatArray:
        """(r,) one signal of all replies, or (r, V) if it is a vector; NaN if a reply is not valid."""
        how = signal.how
        if isinstance(how, VectorOf):
            gradients = [reply.gradient for reply in self._replies]
            rows = self.updates if how.vector == "update" else self._stack(gradients, 0.0, (0,))
            # Only if needed, because a model without a recognisable output layer raises an error.
            output = output_of(self._sent()) if needs_output_layer({signal}) else None
            values = np.asarray(vector_signal(how, rows, self.ok, output, self._samples), np.float64)
        else:
            values = self._stack([reply.values.get(signal) for reply in self._replies], np.nan)
        return values if self.all_ok else np.where(self.ok if values.ndim == 1 else self.ok[:, None], values, np.nan)

    def _stack(self, reported: Sequence[Value | None], missing: float, shape: tuple[int, ...] = ()) -> FloatArray:
        """Return what clients reported, with ``missing`` for those without a valid reply or without a value."""
        valid = [value if ok else None for value, ok in zip(reported, self.ok.tolist(), strict=True)]
        shape = next((np.shape(value) for value in valid if value is not None), shape)
        empty = np.full(shape, missing)
        rows = [empty if value is None else value for value in valid]
        return np.array(rows, np.float64).reshape(len(rows), *shape)

    def common_signals(self) -> frozenset[Signal]:
        """Return the signals that every valid reply contains in the same shape, even if they were not asked for."""
        reports = [self._replies[row].values for row in self.rows.tolist()]
        common = frozenset(reports[0] if reports else ()).intersection(*reports[1:])
        return frozenset(s for s in common if len({np.shape(report[s]) for report in reports}) == 1)

    def apply_filter(
        self,
        filter_: Filter,
        logits: Callable[[int], AnyArray] | None = None,
        labels: AnyArray | None = None,
    ) -> BoolArray:
        """(r,) whether a filter keeps each reply.

        Parameters
        ----------
        logits : callable, optional
            ``logits(row)`` returns the (V, C) outputs of a reply's model on the server's validation set.
        labels : (V,) array, optional
            The classes of that set.
        """
        rows = self.rows
        # The default filter needs no updates, so none are computed for it.
        if not len(rows) or type(filter_) is KeepAll:
            return self.ok
        decision = checked_decision(
            filter_,
            Replies(
                np.ones(len(rows), np.bool_),
                updates=lambda: self.updates[rows],
                logits=None if logits is None else lambda: np.stack([logits(row) for row in rows.tolist()]),
                labels=labels,
            ),
        )
        kept = np.zeros(len(self.ok), np.bool_)
        kept[rows] = decision.kept
        return kept
