"""Samples that the server holds itself, for aggregators that learn at the server.

They are the server's validation set or a file of unlabelled samples. Gradients come from autograd and work for any
model. A round needs only a few dozen of them, so compiled code would not pay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedcohort.core import rng
from fedcohort.core.archives import DAMAGE
from fedcohort.core.arrays import AnyArray, BoolArray, FloatArray, IntArray
from fedcohort.core.errors import InputError
from fedcohort.simulate.engine import Engine
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.store import standardisation
from fedcohort.training.aggregators import Server

if TYPE_CHECKING:
    from fedcohort.simulate.data import Dataset

_STREAM = "server"


class Validation:
    """The server's validation set, V labelled samples of the training set that no client holds."""

    def __init__(self, engine: Engine, positions: AnyArray, labels: AnyArray) -> None:
        self._engine = engine
        self._positions = positions.astype(np.int64)
        self.labels = torch.as_tensor(np.asarray(labels, np.int64)[self._positions], device=engine.device)

    def logits(self, models: torch.Tensor) -> torch.Tensor:
        """(m, V, C) outputs of models (m, P)."""
        return self._engine.logits(models, self._positions)

    def losses(self, models: torch.Tensor) -> FloatArray:
        """(m,) mean cross-entropies of models (m, P)."""
        logits, labels = self.logits(models).double(), self.labels.repeat(len(models))
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
        return np.asarray(losses.view(len(models), -1).mean(dim=1).cpu().numpy())


def coalition_utilities(
    validation: Validation, sizes: FloatArray, old: torch.Tensor, models: torch.Tensor
) -> Callable[[BoolArray], FloatArray]:
    """Return the function from coalitions (s, m) of ``models`` (m, P) to their utilities (s,).

    The utility is minus the server's loss of the members' average, weighted by size. The empty coalition has the old
    global model.
    """
    sizes = sizes if sizes.sum() > 0 else np.ones(len(sizes))

    def utility(coalitions: BoolArray) -> FloatArray:
        weights = coalitions * np.maximum(sizes, np.finfo(np.float64).tiny)
        total = weights.sum(axis=1, keepdims=True)
        shares = torch.as_tensor(weights / np.where(total > 0, total, 1.0)).to(models)
        averages = shares @ models + torch.as_tensor(total[:, 0] == 0).to(models)[:, None] * old
        return -validation.losses(averages)

    return utility


class ServerSamples(Server):
    """V samples at the server of one lock-step group.

    A model's running statistics (batch normalisation) are not trained.

    Parameters
    ----------
    engine : Engine
        Supplies the model and the device.
    inputs : ``(V, *sample)`` tensor
        The samples, standardised.
    labels : (V,) int array, optional
        Their classes; None if they are unlabelled.
    """

    def __init__(self, engine: Engine, inputs: torch.Tensor, labels: AnyArray | None) -> None:
        if tuple(inputs.shape[1:]) != engine.sample:
            raise InputError(
                f"The server's samples must be of shape {engine.sample}, which the model takes. "
                f"Got {tuple(inputs.shape[1:])}."
            )
        self._flat = FlatModel(copy.deepcopy(engine.flat.module).to(engine.device).eval())
        self._inputs = inputs.to(engine.device)
        self._labels = None
        if labels is not None:
            places = torch.as_tensor(np.asarray(labels, np.int64), device=engine.device)
            self._labels = torch.nn.functional.one_hot(places, engine.classes).float()
        self._position = (0, 0)  # seed and round

    def in_round(self, seed: int, round: int) -> ServerSamples:
        """Return the same samples with the batches of one round of a run."""
        result = copy.copy(self)
        result._position = (seed, round)
        return result

    def __len__(self) -> int:
        return len(self._inputs)

    @property
    def labels(self) -> torch.Tensor:
        """(V, C) the samples' classes, one-hot."""
        if self._labels is None:
            raise InputError("The server's samples are unlabelled.")
        return self._labels

    def batches(self, size: int, steps: int) -> Iterator[IntArray]:
        """Yield batches from shuffled passes over the samples; the last batch of a pass may be short."""
        seed, round_ = self._position
        generator = rng.stream(seed, _STREAM, round_)
        done = 0
        while done < steps:
            order = generator.permutation(len(self))
            for start in range(0, min(len(self), (steps - done) * size), size):
                yield order[start : start + size]
                done += 1

    def _outputs(self, model: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        trained = self._flat.n_trainable
        tensors = self._flat.tensors(model[:trained], model[trained:].detach())  # running statistics have no gradient
        outputs: torch.Tensor = torch.func.functional_call(self._flat.module, tensors, (inputs,))
        return outputs

    def logits(self, models: torch.Tensor) -> torch.Tensor:
        """(m, V, C) outputs of models (m, P) on the samples."""
        with torch.no_grad():
            return torch.stack([self._outputs(model, self._inputs) for model in models])

    def gradient(self, model: torch.Tensor, targets: torch.Tensor, places: IntArray) -> torch.Tensor:
        """(P,) gradient of the mean cross-entropy with soft targets (b, C) on the samples ``places`` (b,)."""
        at = torch.as_tensor(places, device=self._inputs.device)
        with torch.enable_grad():
            vector = model.detach().requires_grad_(True)
            loss = torch.nn.functional.cross_entropy(self._outputs(vector, self._inputs[at]), targets)
            (gradient,) = torch.autograd.grad(loss, vector)
        return gradient


def server_samples(engine: Engine, dataset: Dataset, positions: IntArray, public: str | None) -> ServerSamples:
    """Return the samples in the .npy file ``public``, or the training samples at ``positions``."""
    if public is None:
        return ServerSamples(engine, engine.inputs(positions), np.asarray(dataset.y_train)[positions])
    return ServerSamples(engine, public_samples(Path(public), dataset.x_train, engine.sample), None)


def public_samples(path: Path, like: AnyArray, sample: tuple[int, ...]) -> torch.Tensor:
    """Read unlabelled samples that are shaped, and will be standardised, like the training set ``like``."""
    try:
        samples = np.load(path, allow_pickle=False)
    except DAMAGE as error:
        raise InputError(
            f"The public samples {str(path)!r} cannot be read: {error}.",
            hint="aggregator.public is a .npy file as numpy.save writes it",
        ) from error
    if not isinstance(samples, np.ndarray) or samples.shape[1:] != like.shape[1:] or not len(samples):
        got = f"an array of shape {samples.shape}" if isinstance(samples, np.ndarray) else "several arrays"
        raise InputError(
            f"The public samples {str(path)!r} must be an array of shape (n, {', '.join(map(str, like.shape[1:]))}) "
            f"with n at least 1, like the training data. Got {got}.",
            hint="resize or transpose them to match the training data",
        )
    if samples.dtype.kind not in "fiu" or (like.dtype == np.uint8) != (samples.dtype == np.uint8):
        wanted = "bytes (uint8)" if like.dtype == np.uint8 else "floating-point numbers"
        raise InputError(
            f"The public samples {str(path)!r} must be {wanted}, like the training data. Got {samples.dtype}."
        )
    if not np.isfinite(samples).all():
        raise InputError(f"The public samples {str(path)!r} hold NaN or infinite numbers.")
    shift, scale = standardisation(like)
    rows = (samples.astype(np.float32) - shift) * scale
    if rows.ndim == 4:
        rows = rows.transpose(0, 3, 1, 2)
    return torch.as_tensor(np.ascontiguousarray(rows)).view(len(rows), *sample)
