"""What a client can tell a selector about its data, on any host.

:class:`Answers` holds the functions of an app that hosts call. :class:`TorchMeasures` computes the answers for a torch
classifier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.errors import InputError
from fedcohort.core.protocol import Losses, Trial
from fedcohort.core.signals import LossMeasure, Signal, losses_of, vectors_of
from fedcohort.core.validate import input_error, listing
from fedcohort.hosts.wire import Attribute, Description, Value, plain, report

if TYPE_CHECKING:
    import torch

    from fedcohort.training.local import LocalTraining


@dataclass(frozen=True)
class Facts:
    """What a client says about its data before the first round.

    Parameters
    ----------
    size : int, optional
        Training samples.
    label_counts : sequence of int, optional
        Samples per class; the server sees them in the clear.
    sealed_labels : bytes, optional
        Encrypted label counts instead; the server passes them on to the key holder (``CohortStrategy(labels=...)``).
    attributes : mapping of str to str, float, int or bool
        Anything else that an operator's rules use: ``{"battery": 80, "region": "north"}``.
    """

    size: int | None = None
    label_counts: Any = None
    sealed_labels: bytes | None = None
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


@dataclass(frozen=True)
class Answers:
    """What a client can tell a selector.

    Parameters
    ----------
    facts : callable, optional
        Returns :class:`Facts` about the client's data.
    losses : callable, optional
        ``losses(params, received)`` returns the losses of the model ``params`` on the client's data, by the names of
        ``signals``. ``received`` is the model that the round started with; pseudo-labels come from it. It is the same
        as ``params`` except after training.
    signals : set of Signal
        The losses that this function returns: those of fedcohort, or your own signals with ``how=LossOf(...)``.
    gradient : callable, optional
        ``gradient(params)`` returns the (d,) full-batch gradient of the mean training loss.
    reports : mapping of Signal or str to callable
        By signal, a function that is called after training, with the same arguments as ``losses``, and returns a
        number (or a vector, if the signal has a width). It is for signals of your own that only the client knows.
    """

    facts: Callable[..., Facts] | None = None
    losses: Callable[..., Mapping[str, float]] | None = None
    signals: frozenset[Signal] = field(default_factory=lambda: frozenset({Signal.LOSS}))
    gradient: Callable[..., FloatArray] | None = None
    reports: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        losses = losses_of(Signal.all(), "received").keys() | losses_of(Signal.all(), "own").keys()
        signals = listing(self.signals, "The signals of Answers", "losses")
        if not losses >= (found := frozenset(map(Signal.get, signals))):
            raise input_error("The signals of Answers", f"among {', '.join(map(str, sorted(losses)))}", self.signals)
        object.__setattr__(self, "signals", found)
        if not isinstance(self.reports, Mapping):
            raise input_error("The reports of Answers", "a mapping from signals to functions", self.reports)
        reports = {Signal.by_name(name): function for name, function in self.reports.items()}
        for signal, function in reports.items():
            if not signal.sent_by_clients or signal.how is not None:
                raise InputError(
                    f"The reports of Answers are for signals that only a client knows. Got '{signal}' "
                    f"({signal.meaning}).",
                    hint="losses come from 'losses' and 'signals', and what is computed from updates from the server",
                )
            if not callable(function):
                raise input_error(f"The report of '{signal}'", "a function", function)
        object.__setattr__(self, "reports", reports)

    @property
    def supplied(self) -> frozenset[Signal]:
        """Every signal that a client with these answers can supply."""
        signals: set[Signal] = set()
        if self.losses is not None:
            signals |= {s for s in Signal.all() if s.measure is not None and self._name_of(s.measure)}
            signals.add(Losses.needs)
            if Trial.measured in self.signals:
                signals.add(Trial.needs)
        if self.gradient is not None:
            signals |= vectors_of(Signal.all(), "gradient").keys()
        return frozenset(signals | self.reports.keys())

    def _name_of(self, measure: LossMeasure) -> str | None:
        """Return a name under which the function ``losses`` returns this loss, or None."""
        return next((s.name for s in sorted(self.signals) if s.measure == measure), None)

    def description(self, name: str, facts: Facts) -> Description:
        """Return what the client tells the server before the first round."""
        return Description(
            name=name,
            size=None if facts.size is None else int(facts.size),
            label_counts=None if facts.label_counts is None else tuple(int(c) for c in facts.label_counts),
            sealed_labels=facts.sealed_labels,
            signals=self.supplied,
            attributes=dict(facts.attributes),
        )

    def measure(self, signals: frozenset[Signal], *arguments: Any) -> dict[Signal, Value]:
        """Return those of the signals that are losses of the received model, before training.

        ``arguments`` are those of the function ``losses``.
        """
        return self._losses(losses_of(signals, "received"), arguments)

    def measure_trained(self, signals: frozenset[Signal], *arguments: Any) -> dict[Signal, Value]:
        """Return those of the signals that are known after training: losses of the client's own model, and reports."""
        # An app has one loss function for both models: "loss after" is the "loss" of the trained model.
        values = self._losses(losses_of(signals, "own"), arguments)
        for signal in sorted(signals & self.reports.keys()):
            values[signal] = self.reports[signal](*arguments)
        return values

    def _losses(self, asked: Mapping[Signal, LossMeasure], arguments: tuple[Any, ...]) -> dict[Signal, Value]:
        """Return these losses of one model."""
        if not asked:
            return {}
        names = {signal: self._name_of(measure) for signal, measure in asked.items()}
        unknown = sorted(signal for signal, name in names.items() if self.losses is None or name is None)
        if self.losses is None or unknown:
            raise InputError(f"This client cannot measure {', '.join(map(str, unknown))}.")
        values = self.losses(*arguments)
        lacking = sorted(str(name) for name in names.values() if name not in values)
        if lacking:
            returned = ", ".join(sorted(map(str, names.values())))
            raise InputError(f"The loss function must return {returned}. It lacks '{lacking[0]}'.")
        return {signal: float(values[str(name)]) for signal, name in names.items()}


class Measurement:
    """What a client measures for the server while it trains one model.

    Parameters
    ----------
    signals : set of Signal
        What the server asks for.
    received : object
        The model before training.
    *context
        What the functions of ``answers`` get in addition to models.
    """

    def __init__(self, answers: Answers, signals: frozenset[Signal], received: Any, *context: Any) -> None:
        self._answers = answers
        self._signals = signals
        self._received = received
        self._context = context
        self._values = answers.measure(signals, received, *context, received)
        self._gradient = None
        if vectors_of(signals, "gradient") and answers.gradient is not None:
            self._gradient = plain(answers.gradient(received, *context))
        self._begun = time.monotonic()  # only the training is timed, so that our questions make no client look slow

    def report(self, name: str, trained: Callable[[], Any]) -> dict[str, Any]:
        """Return the report after the training; ``trained`` returns the client's model, or None if it has none."""
        seconds = time.monotonic() - self._begun
        known_after = losses_of(self._signals, "own") or self._signals & self._answers.reports.keys()
        if known_after and (model := trained()) is not None:
            arguments = (model, *self._context, self._received)
            self._values.update(self._answers.measure_trained(self._signals, *arguments))
        return report(name, self._values, seconds, self._gradient)


_LABELS = ("label", "labels", "target", "targets", "y")  # names of columns in datasets of Flower and Hugging Face


def _batch(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and labels of one batch of a DataLoader."""
    if isinstance(batch, Mapping):
        key = next((key for key in _LABELS if key in batch), None)
        others = [k for k in batch if k != key]
        if key is None or len(others) != 1:
            raise InputError(
                f"A batch that is a table must have one column of labels ({', '.join(_LABELS)}) and one of inputs. "
                f"Got {', '.join(map(str, batch))}.",
                hint="return inputs and labels from 'data', or rename the columns",
            )
        return batch[others[0]], batch[key]
    inputs, labels = batch
    return inputs, labels


class TorchMeasures:
    """Measures a torch classifier on one client's data: cross-entropy losses and the full-batch gradient.

    Parameters
    ----------
    model : callable
        Returns a module whose ``state_dict`` fits the models of the federation.
    data : callable
        Returns the client's training inputs and integer labels, a DataLoader of them, or several DataLoaders.
    validation : callable, optional
        Returns the client's held-out inputs and labels.
    robust : LocalTraining, optional
        Weights of FLASH's noise-robust loss, needed for robust and pseudo-label losses.
    batch_size : int
        How many samples are evaluated at once.
    """

    def __init__(
        self,
        model: Callable[[], torch.nn.Module],
        data: Callable[[], Any],
        *,
        validation: Callable[[], Any] | None = None,
        robust: LocalTraining | None = None,
        batch_size: int = 1024,
    ) -> None:
        self._model = model
        self._data = data
        self._robust = robust
        self._batch_size = batch_size
        self._sources = {"train": data} if validation is None else {"train": data, "validation": validation}
        self._signals = self.signals(validation is not None, robust is not None)

    @staticmethod
    def signals(validation: bool, robust: bool) -> frozenset[Signal]:
        """Return which losses can be measured, with or without held-out samples and the noise-robust loss."""
        return frozenset(
            signal
            for signal in Signal.all()
            if (measure := signal.measure) is not None
            and (validation or measure.part == "train")
            and (robust or measure.loss == "label")
        )

    def labels(self) -> IntArray:
        """(n,) the labels of the training samples."""
        labels: IntArray = self._samples(self._data)[1].cpu().numpy().astype(np.int64)
        return labels

    def losses(self, state: Mapping[str, Any], received: Mapping[str, Any]) -> dict[str, float]:
        """Return losses of the model ``state``, by name; pseudo-labels come from the model ``received``."""
        import torch
        from torch.nn.functional import cross_entropy

        from fedcohort.training.losses import reduce_losses

        module = self._load_model(state)
        # Only pseudo-labels need a second model, and loading it takes time.
        teacher = module if received is state or self._robust is None else self._load_model(received)
        values: dict[str, float] = {}
        for part, source in self._sources.items():
            names = {s.name: s.measure for s in sorted(self._signals) if s.measure is not None}
            names = {name: measure for name, measure in names.items() if measure.part == part}
            measures = list(dict.fromkeys(names.values()))  # several names may mean the same loss
            x, y = self._samples(source)
            y = y.cpu()  # where the logits are
            if not len(y):
                values.update(dict.fromkeys(names, float("nan")))
                continue
            logits = self._logits(module, x)
            by_label = cross_entropy(logits, y, reduction="none")
            by_pseudo = None
            if any(measure.loss != "label" for measure in measures):
                by_pseudo = cross_entropy(logits, self._logits(teacher, x).argmax(1), reduction="none")
            columns = reduce_losses(by_label, by_pseudo, torch.tensor([len(y)]), measures, self._robust)
            found = dict(zip(measures, map(float, columns), strict=True))
            values.update({name: found[measure] for name, measure in names.items()})
        return values

    def by_label(self, state: Mapping[str, Any]) -> FloatArray:
        """(n,) the cross-entropy of each training sample under the model ``state``."""
        from torch.nn.functional import cross_entropy

        x, y = self._samples(self._data)
        if not len(y):
            return np.empty(0)
        losses: FloatArray = cross_entropy(self._logits(self._load_model(state), x), y.cpu(), reduction="none").numpy()
        return losses

    def gradient(self, state: Mapping[str, Any]) -> FloatArray:
        """(d,) the gradient of the mean training loss at the model ``state``."""
        from torch.nn.functional import cross_entropy

        module = self._load_model(state)
        device = _device(module)
        x, y = self._samples(self._data)
        for start in range(0, len(y), self._batch_size):
            inputs, labels = (part[start : start + self._batch_size].to(device) for part in (x, y))
            # A sum divided by the number of all samples, because the last batch may be smaller.
            (cross_entropy(module(inputs), labels, reduction="sum") / len(y)).backward()  # type: ignore[no-untyped-call]
        return np.concatenate(
            [np.zeros(p.numel()) if p.grad is None else plain(p.grad).ravel() for p in module.parameters()]
        )

    def _samples(self, source: Callable[[], Any]) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        data = source()
        if isinstance(data, (tuple, list)) and data and hasattr(data[0], "dataset"):
            data = data[0]  # the first of several DataLoaders is for training
        if hasattr(data, "dataset"):
            batches = [_batch(batch) for batch in data]
            nothing = torch.empty(0), torch.empty(0, dtype=torch.long)
            x, y = map(torch.cat, zip(*batches, strict=True)) if batches else nothing
        else:
            x, y = data
        return torch.as_tensor(x).detach(), torch.as_tensor(y).detach().long()

    def _load_model(self, state: Mapping[str, Any]) -> torch.nn.Module:
        module = self._model()
        module.load_state_dict(dict(state))
        return module.eval()

    def _logits(self, module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        import torch

        device = _device(module)
        batches = [x[start : start + self._batch_size] for start in range(0, len(x), self._batch_size)]
        with torch.no_grad():
            return torch.cat([module(batch.to(device)).cpu() for batch in batches])


def _device(module: torch.nn.Module) -> torch.device:
    """Return the device on which the app created the model."""
    import torch

    return next((p.device for p in module.parameters()), torch.device("cpu"))
