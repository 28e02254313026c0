"""An engine's data: one tensor of samples, and the clients of every federation as slots that point into it."""

from __future__ import annotations

import contextlib
import copy
import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch

from fedcohort.core.arrays import AnyArray, IntArray
from fedcohort.core.errors import InputError
from fedcohort.simulate.engine.types import ClientData, Spans

_LARGE = 1 << 24  # bytes from which large pages are requested
_CHUNK = 4096  # samples converted at a time, so that building the tensor needs little extra memory


class Store:
    """Samples, each of shape ``shape``, and clients.

    ``x`` holds the ``n_train`` training samples, the ``n_test`` test samples, and ``copies`` of some of them as some
    clients see them. A *slot* is one sample of one client of one federation: ``sample[slot]`` is its row in ``x``, and
    ``label[slot]`` is its label as that client sees it. If the task does not predict classes, the target is
    ``targets[sample[slot]]``, standardised on request; ``y_test`` is never standardised. Federation f has
    ``clients[f]`` clients, the largest of which trains on ``largest[f]`` slots. :meth:`spans` returns
    where a client's slots are.
    """

    def __init__(
        self,
        x_train: AnyArray,
        x_test: AnyArray,
        y_test: AnyArray,
        federations: Sequence[ClientData],
        targets: AnyArray | None = None,
        standardised: bool = False,
        copies: Sequence[AnyArray] = (),
    ) -> None:
        self.n_train, self.n_test = len(x_train), len(x_test)
        self.shape = sample_shape(x_train)
        self.x = _samples((x_train, x_test, *copies), math.prod(self.shape))
        self.y_test = torch.as_tensor(np.asarray(y_test, np.int64 if targets is None else targets.dtype))
        self.targets = None if targets is None else torch.as_tensor(targets)
        self.unit: tuple[torch.Tensor, torch.Tensor] | None = None  # mean and deviation of the targets
        if standardised and self.targets is not None:
            mean, deviation = self.targets.double().mean(0), self.targets.double().std(0, correction=0)
            self.unit = mean.float(), torch.where(deviation > 0, deviation, 1.0).float()
            self.targets = (self.targets - self.unit[0]) / self.unit[1]
        # All federations in one array: a job of any of them is a range of slots.
        self.sample = torch.from_numpy(np.concatenate([f.indices for f in federations]).astype(np.int64))
        self.label = torch.from_numpy(np.concatenate([f.labels for f in federations]).astype(np.int64))
        starts = np.cumsum([0, *(len(f.indices) for f in federations)])
        self.clients = np.array([f.n_clients for f in federations])
        # For the clients of all federations, one federation after another.
        self._before = np.cumsum(self.clients) - self.clients
        self._first = np.concatenate([start + f.offsets[:-1] for start, f in zip(starts, federations, strict=False)])
        self._size = np.concatenate([np.diff(f.offsets) for f in federations])
        self._train = self._size - np.concatenate([f.validation for f in federations])
        self.largest = np.maximum.reduceat(self._train, self._before)

    def to(self, device: torch.device) -> Store:
        """Return a store whose tensors are on ``device``; itself for the CPU."""
        if device.type == "cpu":
            return self
        result = copy.copy(self)
        for name in ("x", "sample", "label", "y_test"):
            setattr(result, name, getattr(self, name).to(device))
        result.targets = None if self.targets is None else self.targets.to(device)
        result.unit = None if self.unit is None else (self.unit[0].to(device), self.unit[1].to(device))
        return result

    def to_target_units(self, outputs: torch.Tensor) -> torch.Tensor:
        """Convert a model's outputs to the unit of the targets."""
        return outputs if self.unit is None else outputs * self.unit[1] + self.unit[0]

    def targets_of(self, first: int, count: int) -> torch.Tensor:
        """Return what to predict for the samples of ``count`` slots."""
        slots = slice(first, first + count)
        return self.label[slots] if self.targets is None else self.targets[self.sample[slots]]

    def spans(self, run: IntArray, federation: IntArray, client: IntArray, part: str = "train") -> Spans:
        """Return where the samples of clients are stored: those they train on, or those of their validation sets."""
        at = self._before[federation] + client
        first, count = self._first[at], self._train[at]
        # A client's validation samples are stored behind those it trains on.
        if part == "validation":
            first, count = first + count, self._size[at] - count
        return Spans(run, first, count)

    @property
    def x_test(self) -> torch.Tensor:
        """The test samples (n_test, F)."""
        return self.x[self.n_train : self.n_train + self.n_test]


def _samples(parts: Sequence[AnyArray], features: int) -> torch.Tensor:
    """Return the samples of all parts, flattened, and scaled so that the first part is standardised."""
    if parts[0].dtype.kind == "i":  # tokens and categories are not scaled
        return torch.from_numpy(np.concatenate([np.asarray(x, np.int64).reshape(len(x), -1) for x in parts]))
    # One matrix for all, so that a batch can have rows of any part.
    samples = _allocate(sum(map(len, parts)), features)
    shift, scale = standardisation(parts[0])
    first = 0
    for part in parts:
        _convert(part, samples[first : first + len(part)].numpy(), shift, scale)
        first += len(part)
    return samples


def _allocate(count: int, features: int) -> torch.Tensor:
    """Return an uninitialised matrix for samples, in large pages if the system has them.

    The samples of a batch are scattered over the matrix, each on another page. With small pages, looking one up can
    take the processor as long as fetching the sample, because its cache of pages (TLB) is too small for so many.
    """
    size = 4 * count * features
    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(count, features)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that was built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).view(count, features)


def sample_shape(x: AnyArray) -> tuple[int, ...]:
    """Return the shape of one sample, channels first: (F,), (1, H, W) or (C, H, W)."""
    if x.ndim == 2:
        return (x.shape[1],)
    if x.ndim == 3:
        return (1, x.shape[1], x.shape[2])
    if x.ndim == 4:
        return (x.shape[3], x.shape[1], x.shape[2])
    raise InputError(f"Samples must be (n, F), (n, H, W) or (n, H, W, C). Got an array of shape {x.shape}.")


def standardisation(x_train: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Return (shift, scale) per channel: ``(x - shift) * scale`` has mean 0 and deviation 1 over the training set.

    Bytes (images) are standardised; floating-point data is left unchanged.
    """
    if x_train.dtype != np.uint8 or not x_train.size:
        return np.zeros(1, np.float32), np.ones(1, np.float32)
    channels = x_train.shape[3] if x_train.ndim == 4 else 1
    total, square, count = np.zeros(channels), np.zeros(channels), 0
    for start in range(0, len(x_train), _CHUNK):
        part = x_train[start : start + _CHUNK].reshape(-1, channels)
        for channel in range(channels):
            # A histogram of 256 values is exact and cheaper than converting the images twice.
            seen = np.bincount(part[:, channel], minlength=256)
            total[channel] += seen @ np.arange(256.0)
            square[channel] += seen @ np.arange(256.0) ** 2
        count += len(part)
    mean = total / count
    deviation = np.sqrt(np.maximum(square / count - mean**2, 0))
    return mean.astype(np.float32), (1 / np.where(deviation > 0, deviation, 1)).astype(np.float32)


def _convert(x: AnyArray, out: AnyArray, shift: AnyArray, scale: AnyArray) -> None:
    for start in range(0, len(x), _CHUNK):
        part = x[start : start + _CHUNK].astype(np.float32)
        part -= shift
        part *= scale
        if part.ndim == 4:
            part = part.transpose(0, 3, 1, 2)
        part = part.reshape(len(part), -1)
        out[start : start + len(part)] = part
