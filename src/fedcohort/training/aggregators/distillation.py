r"""Distillation at the server: the next global model learns the clients' predictions on unlabelled samples.

.. [Lin2020] T. Lin, L. Kong, S. U. Stich, M. Jaggi, "Ensemble Distillation for Robust Model Fusion in Federated
   Learning" (FedDF), Algorithm 1.
.. [Fang2022] X. Fang, M. Ye, "Robust Federated Learning with Noisy and Heterogeneous Clients" (RHFL).

Symbols: f(w, x) the logits of model w on a sample x, sigma the softmax, S the kept cohort. The samples are the server's
validation set, whose labels are not read, or a file of unlabelled samples (``public``).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.params import Interval, Optional, Text, param
from fedcohort.core.signals import Signal
from fedcohort.training.aggregators.base import AGGREGATORS, Aggregator, Combined, Members, Memory, Server
from fedcohort.training.arithmetic import average, softmax, zeros

_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8  # Adam's defaults
_MIN_LOSS = 1e-8  # keeps the quality 1 / L finite for a client that has memorised its data


def _distil(model: Any, targets: Any, server: Server, *, steps: int, batch_size: int, rate: float) -> Any:
    r"""Return the student (P,) after ``steps`` of Adam on :math:`KL(t \,\|\, \sigma(f(w, x)))`.

    The step size falls from ``rate`` to 0 along a cosine, :math:`\frac{rate}{2} (1 + \cos(\pi j / steps))` in step j.

    Parameters
    ----------
    model : (P,) where the student starts
    targets : (V, C) probabilities
        The teachers' prediction for each sample of the server.
    """
    first = second = zeros(model)
    for step, places in enumerate(server.batches(batch_size, steps)):
        gradient = server.gradient(model, targets[places], places)
        first = _BETA1 * first + (1.0 - _BETA1) * gradient
        second = _BETA2 * second + (1.0 - _BETA2) * gradient * gradient
        # Adam's bias correction, because both moments start at zero.
        root = (second / (1.0 - _BETA2 ** (step + 1))) ** 0.5
        size = rate * (1.0 + math.cos(math.pi * step / steps)) / 2.0
        model = model - size / (1.0 - _BETA1 ** (step + 1)) * first / (root + _EPSILON)
    return model


def _confidences(before: FloatArray, after: FloatArray, impact: float) -> FloatArray:
    r"""Return RHFL's client confidences, (k,) summing to 1 ([Fang2022]_, client confidence re-weighting).

    Label quality :math:`Q_k = 1 / L_k` times learning efficiency :math:`P_k`, the drop of the loss in local training,
    gives :math:`F_k = Q_k P_k`; :math:`w_k = \frac{1}{K - 1} + \eta F_k / \sum_j F_j`, and the confidence is the
    softmax of w. The first term is the same for all clients and cancels, so a single client is no special case.

    Parameters
    ----------
    before, after : (k,) float array
        Losses L_k at the received model and after local training.
    impact : float
        eta.

    Examples
    --------
    >>> _confidences(np.array([2.0, 2.0]), np.array([1.0, 2.0]), np.log(3.0)).round(6)
    array([0.75, 0.25])
    """
    with np.errstate(invalid="ignore"):
        scores = np.maximum(before - after, 0.0) / np.maximum(after, _MIN_LOSS)
    # A diverged client may report infinity or NaN. It earns no confidence instead of spoiling everybody's.
    scores = np.where(np.isfinite(scores), scores, 0.0)
    total = float(scores.sum())
    powers = np.exp(impact * scores / total) if total > 0 else np.ones(len(scores))
    return np.asarray(powers / powers.sum())


@dataclass(frozen=True, kw_only=True)
class _Distilled(Aggregator):
    """The base of FedDF and RHFL: average the models, then distil on unlabelled samples at the server."""

    needs_server: ClassVar[bool] = True

    batch_size: int = param(128, Interval(int, 1, None), "unlabelled samples of one step")
    rate: float = param(0.001, Interval(float, 0, None, "neither"), "first step size of Adam (eta)")
    public: str | None = param(
        None,
        Optional(Text()),
        "a .npy file of unlabelled samples, shaped like the training data; None: the server's validation set",
    )
    steps: int = param(50, Interval(int, 0, None), "distillation steps a round (N)")

    @abstractmethod
    def _weights(self, members: Members) -> FloatArray:
        """(k,) the weights of the models in their mean."""

    @abstractmethod
    def _targets(self, logits: Any, members: Members, weights: FloatArray) -> Any:
        """(V, C) the probabilities that the student learns, from the models' ``logits`` (k, V, C)."""

    def combine(
        self, old: Any, models: Any, members: Members, memory: Memory | None = None, server: Server | None = None
    ) -> Combined:
        """Average, then distil."""
        server = self._server(server)
        weights = self._weights(members)
        student = average(weights, models)
        # A single model would only learn its own predictions.
        if len(members) > 1 and self.steps:
            targets = self._targets(server.logits(models), members, weights)
            student = _distil(student, targets, server, steps=self.steps, batch_size=self.batch_size, rate=self.rate)
        return Combined(student, weights)


@AGGREGATORS.register("feddf")
@dataclass(frozen=True, kw_only=True)
class FedDf(_Distilled):
    r"""FedDF: the mean by size, distilled from the ensemble of the kept models ([Lin2020]_, Algorithm 1).

    The student starts at :math:`\sum_k p_k w_k` and makes ``steps`` steps of Adam, its rate annealed along a cosine, on
    :math:`KL(\sigma(\frac{1}{|S|} \sum_k f(w_k, x)) \,\|\, \sigma(f(w, x)))`. A single model would be its own teacher
    and is returned unchanged. Deviations: the number of steps is fixed, while the paper makes up to 10,000 and stops
    early by the accuracy on a labelled validation set; models no better than chance are not dropped (a filter can do
    that); all clients have the same architecture; multiplicities count in both means.
    """

    def _weights(self, members: Members) -> FloatArray:
        return members.by_size

    def _targets(self, logits: Any, members: Members, weights: FloatArray) -> Any:
        # The softmax of the mean logits and not the mean of the softmaxes: the paper's ensemble.
        return softmax(average(members.by_count, logits))


@AGGREGATORS.register("rhfl")
@dataclass(frozen=True, kw_only=True)
class Rhfl(_Distilled):
    r"""RHFL: mean and distillation, both weighted by the confidence in each client ([Fang2022]_).

    RHFL has three parts, of which two are implemented here. *Client confidence re-weighting*: see
    :func:`_confidences`. *Alignment on public data*: the student makes ``steps`` steps on
    :math:`\sum_k W_k KL(\sigma(f(w_k, x)) \,\|\, \sigma(f(w, x)))`, whose gradient is that of the cross-entropy with
    the mixture :math:`\sum_k W_k \sigma(f(w_k, x))`. The *symmetric loss* belongs to local training:
    ``local = {loss = "robust", robust_alpha = 0}`` is cross-entropy plus reverse cross-entropy with log 0 = -4. The
    confidences are always computed from losses of that kind, whatever loss is minimised.

    Deviations: the paper has no global model. Each client has its own model, perhaps of another architecture, and
    learns from the others' outputs. As an aggregation, which is how FLASH's Table 1 compares it, RHFL has a global
    model that starts at :math:`\sum_k W_k w_k` and learns from all clients. P_k is the drop within the round, because
    a client is not in every round. A loss that rises counts as no drop. If no loss falls, or none is reported (a trial
    cohort), all confidences are equal. A ``robust_alpha`` other than 0 adds FLASH's pseudo-labels to the losses.
    """

    requires = frozenset({Signal.ROBUST_LOSS, Signal.ROBUST_LOSS_AFTER})

    steps: int = param(1, Interval(int, 0, None), "steps of alignment on public data a round")
    impact: float = param(0.5, Interval(float, 0, None), "how much confidences differ (eta)")

    def _weights(self, members: Members) -> FloatArray:
        if not self.requires <= members.metrics.keys():
            return members.by_count
        losses = members.metrics[Signal.ROBUST_LOSS], members.metrics[Signal.ROBUST_LOSS_AFTER]
        weights = _confidences(*losses, self.impact) * members.multiplicity
        return np.asarray(weights / weights.sum())

    def _targets(self, logits: Any, members: Members, weights: FloatArray) -> Any:
        return average(weights, softmax(logits))
