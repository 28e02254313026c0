"""What a client can tell a selector about its data, whatever carries the answer.

:class:`Answers` are the functions an app gives; hosts call them. :class:`TorchMeasures` computes them for a torch
classifier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.errors import InputError
from fedcohort.core.signals import LOSS_SIGNALS, Signal, losses_of, same_of_received
from fedcohort.core.validate import listing, refuse
from fedcohort.hosts.wire import Attribute, Description, plain, supplied_signals

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
        Label counts in an encrypted form instead; the server passes them on to the key holder
        (``CohortStrategy(labels=...)``).
    attributes : mapping of str to str, float, int or bool
        Anything else an operator's rules go by: ``{"battery": 80, "region": "north"}``.
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
        ``losses(params, received)`` returns losses of the model ``params`` on the client's data, by name (those of
        ``signals``). ``received`` is the model the round started with: pseudo-labels come from it. It is the same as
        ``params`` except after training.
    signals : set of Signal
        Which losses that function returns.
    gradient : callable, optional
        ``gradient(params)`` returns the (d,) full-batch gradient of the mean training loss.
    """

    facts: Callable[..., Facts] | None = None
    losses: Callable[..., Mapping[str, float]] | None = None
    signals: frozenset[Signal] = field(default_factory=lambda: frozenset({Signal.LOSS}))
    gradient: Callable[..., FloatArray] | None = None

    def __post_init__(self) -> None:
        found = listing(self.signals, "The signals of Answers", "losses")
        if not all(isinstance(signal, str) and signal in LOSS_SIGNALS for signal in found):
            raise refuse("The signals of Answers", f"among {', '.join(sorted(LOSS_SIGNALS))}", self.signals)
        object.__setattr__(self, "signals", frozenset(Signal.by_name(signal) for signal in found))

    @property
    def supplied(self) -> frozenset[Signal]:
        """Every signal a client with these answers can report or be asked for."""
        return supplied_signals(None if self.losses is None else self.signals, self.gradient is not None)

    def description(self, name: str, facts: Facts) -> Description:
        """Return what the server is told about the client before the first round."""
        return Description(
            name=name,
            size=None if facts.size is None else int(facts.size),
            label_counts=None if facts.label_counts is None else tuple(int(c) for c in facts.label_counts),
            sealed_labels=facts.sealed_labels,
            signals=self.supplied,
            attributes=dict(facts.attributes),
        )

    def measure(self, wanted: frozenset[Signal], *arguments: Any) -> dict[Signal, float]:
        """Return the losses that are wanted; ``arguments`` are those of the function ``losses``."""
        if not wanted:
            return {}
        if self.losses is None or not wanted <= self.signals:
            raise InputError(f"This client cannot measure {', '.join(sorted(wanted - self.signals))}.")
        values = self.losses(*arguments)
        lacking = [s for s in sorted(wanted) if s.value not in values]
        if lacking:
            raise InputError(f"The loss function must return {', '.join(sorted(wanted))}. It lacks '{lacking[0]}'.")
        return {signal: float(values[signal.value]) for signal in wanted}

    def measure_trained(self, wanted: frozenset[Signal], *arguments: Any) -> dict[Signal, float]:
        """Return those of the signals that are losses of a client's own model, after training."""
        # An app has one loss function for both models: "loss after" is "loss" of the model that was trained.
        after = {same_of_received(s): s for s in losses_of(wanted, "own")}
        return {after[signal]: value for signal, value in self.measure(frozenset(after), *arguments).items()}


_LABELS = ("label", "labels", "target", "targets", "y")  # columns, as datasets of Flower and Hugging Face call them


def samples_of(found: Any) -> tuple[Any, Any]:
    """Return inputs and labels: given as such, or as a DataLoader, or as several of which the first is for training."""
    if isinstance(found, (tuple, list)) and found and hasattr(found[0], "dataset"):
        found = found[0]
    if not hasattr(found, "dataset"):
        inputs, labels = found
        return inputs, labels
    import torch

    parts = [_batch(batch) for batch in found]
    if not parts:
        return torch.empty(0), torch.empty(0, dtype=torch.long)
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def _batch(batch: Any) -> tuple[Any, Any]:
    """Return inputs and labels of one batch of a DataLoader."""
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
    """What one client can measure of a torch classifier: cross-entropy losses and the full-batch gradient.

    Parameters
    ----------
    model : callable
        Returns a module whose ``state_dict`` fits the models of the federation.
    data : callable
        Returns the client's training inputs and integer labels, or a DataLoader of them; see :func:`samples_of`.
    validation : callable, optional
        Returns held-out inputs and labels of the client.
    robust : LocalTraining, optional
        Weights of FLASH's noise-robust loss; with it robust and pseudo-label losses can be measured.
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
            for signal, measure in losses_of(LOSS_SIGNALS, "received").items()
            if (validation or measure.part == "train") and (robust or measure.loss == "label")
        )

    def labels(self) -> IntArray:
        """(n,) the labels of the training samples."""
        found: IntArray = self._samples(self._data)[1].cpu().numpy().astype(np.int64)
        return found

    def losses(self, state: Mapping[str, Any], received: Mapping[str, Any]) -> dict[str, float]:
        """Return losses of the model ``state``, by name; pseudo-labels are those of the model ``received``."""
        import torch
        from torch.nn.functional import cross_entropy

        from fedcohort.training.losses import reduce_losses

        module = self._load_model(state)
        # Only losses with pseudo-labels ask another model, and loading one takes time.
        teacher = module if received is state or self._robust is None else self._load_model(received)
        values: dict[str, float] = {}
        for part, source in self._sources.items():
            every = losses_of(self._signals, "received").items()
            mine = {signal: measure for signal, measure in every if measure.part == part}
            x, y = self._samples(source)
            # Logits come back from the GPU batch by batch; labels must be where they are.
            y = y.cpu()
            if not len(y):
                values.update({signal.value: float("nan") for signal in mine})
                continue
            logits = self._logits(module, x)
            by_label = cross_entropy(logits, y, reduction="none")
            by_pseudo = None
            if any(measure.loss != "label" for measure in mine.values()):
                by_pseudo = cross_entropy(logits, self._logits(teacher, x).argmax(1), reduction="none")
            columns = reduce_losses(by_label, by_pseudo, torch.tensor([len(y)]), list(mine.values()), self._robust)
            values.update({signal.value: float(column) for signal, column in zip(mine, columns, strict=True)})
        return values

    def by_label(self, state: Mapping[str, Any]) -> FloatArray:
        """(n,) the cross-entropy of each training sample under the model ``state``."""
        from torch.nn.functional import cross_entropy

        x, y = self._samples(self._data)
        if not len(y):
            return np.empty(0)
        found: FloatArray = cross_entropy(self._logits(self._load_model(state), x), y.cpu(), reduction="none").numpy()
        return found

    def gradient(self, state: Mapping[str, Any]) -> FloatArray:
        """(d,) the gradient of the mean training loss at the model ``state``."""
        from torch.nn.functional import cross_entropy

        module = self._load_model(state)
        there = _device(module)
        x, y = self._samples(self._data)
        for start in range(0, len(y), self._batch_size):
            inputs, labels = (part[start : start + self._batch_size].to(there) for part in (x, y))
            # The gradient of a mean is the sum of the batches' gradients, however the last batch is cut.
            (cross_entropy(module(inputs), labels, reduction="sum") / len(y)).backward()  # type: ignore[no-untyped-call]
        return np.concatenate(
            [np.zeros(p.numel()) if p.grad is None else plain(p.grad).ravel() for p in module.parameters()]
        )

    def _samples(self, source: Callable[[], Any]) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        x, y = samples_of(source())
        return torch.as_tensor(x).detach(), torch.as_tensor(y).detach().long()

    def _load_model(self, state: Mapping[str, Any]) -> torch.nn.Module:
        module = self._model()
        module.load_state_dict(dict(state))
        return module.eval()

    def _logits(self, module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        import torch

        there = _device(module)
        parts = [x[start : start + self._batch_size] for start in range(0, len(x), self._batch_size)]
        with torch.no_grad():
            return torch.cat([module(part.to(there)).cpu() for part in parts])


def _device(module: torch.nn.Module) -> torch.device:
    """Return where the app made the model: there the data go, batch by batch."""
    import torch

    return next((p.device for p in module.parameters()), torch.device("cpu"))
