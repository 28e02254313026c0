"""What the server learns from a round's replies: what clients reported, and what it works out from their models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.signals import METRIC_SIGNALS, Signal, VectorOf, vectors_of
from fedcohort.core.vectors import OutputLayer, needs_output_layer, vector_signal
from fedcohort.hosts.wire import Value

MEASURED = frozenset(vectors_of(METRIC_SIGNALS, "update"))
"""What the server works out from models, without any client's help."""


class Measures:
    """The signals of a round's replies, each computed when it is first read.

    Parameters
    ----------
    ok : (r,) bool array
        Which replies are sound.
    values : sequence of r mappings of Signal to float or (V,) array
        What each client reported, and how long it took.
    samples : (r,) float array
        How many samples each reply counts for; 0 where it is not sound.
    updates : callable
        Returns (r, P): each client's model less the one sent; zeros for replies that are not sound.
    gradients : sequence of r (d,) arrays or None
        What each client reported of its full-batch gradient.
    output : callable
        Returns where the output layer stands in an update.
    """

    def __init__(
        self,
        ok: BoolArray,
        values: Sequence[Mapping[Signal, Value]],
        samples: FloatArray,
        *,
        updates: Callable[[], FloatArray],
        gradients: Sequence[FloatArray | None],
        output: Callable[[], OutputLayer],
    ) -> None:
        self.ok = ok
        self.all_ok = bool(ok.all())
        self._values = values
        self._samples = samples
        self._make_updates = updates
        self._sent_gradients = gradients
        self._output = output

    @cached_property
    def updates(self) -> FloatArray:
        """(r, P) each client's model less the one sent; zeros for replies that are not sound."""
        return self._make_updates()

    @cached_property
    def _gradients(self) -> FloatArray:
        sound = [gradient if ok else None for gradient, ok in zip(self._sent_gradients, self.ok.tolist(), strict=True)]
        width = next((len(gradient) for gradient in sound if gradient is not None), 0)
        rows = [np.zeros(width) if gradient is None else gradient for gradient in sound]
        return np.stack(rows) if rows else np.empty((0, width))

    @cached_property
    def rows(self) -> IntArray:
        """(m,) where the sound replies stand."""
        return np.arange(len(self.ok)) if self.all_ok else np.flatnonzero(self.ok)

    def column(self, signal: Signal) -> FloatArray:
        """(r,) one signal over the replies, or (r, V) where it is a vector; NaN where a reply is not sound."""
        if isinstance(signal.how, VectorOf):
            rows = self.updates if signal.how.vector == "update" else self._gradients
            output = self._output() if needs_output_layer({signal}) else None
            values = np.asarray(vector_signal(signal.how, rows, self.ok, output, self._samples), np.float64)
        else:
            found = [
                given.get(signal) if ok else None for given, ok in zip(self._values, self.ok.tolist(), strict=True)
            ]
            if any(value is None for value in found):
                shape = next((np.shape(value) for value in found if value is not None), ())
                nothing = np.full(shape, np.nan)
                found = [nothing if value is None else value for value in found]
            values = np.array(found, np.float64)
        return values if self.all_ok else np.where(self.ok if values.ndim == 1 else self.ok[:, None], values, np.nan)
