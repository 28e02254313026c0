"""Read a ``nn.Sequential`` of well-known layers into a list, from which the fast backends are built."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fedcohort.simulate.engine.flat import FlatModel, Slot

Image = tuple[int, int, int]  # (channels, height, width)


@dataclass(frozen=True)
class Dense:
    """Dense layer with bias."""

    weight: Slot  # (outputs, inputs)
    bias: Slot


@dataclass(frozen=True)
class Convolution:
    """Convolution of stride 1 with bias, and the pooling and ReLU that follow it, which commute."""

    weight: Slot  # (outputs, inputs, rows, columns)
    bias: Slot
    kernel: tuple[int, int]
    padding: tuple[int, int]
    image: Image  # shape of its input
    pool: tuple[int, int] = (1, 1)
    relu: bool = False


@dataclass(frozen=True)
class Relu:
    """Rectified linear unit."""


@dataclass(frozen=True)
class MaxPool:
    """Max-pooling with windows that do not overlap; rows and columns that fill no window are dropped."""

    kernel: tuple[int, int]


@dataclass(frozen=True)
class Flatten:
    """Image to vector, channels first."""

    image: Image


@dataclass(frozen=True)
class Norm:
    """Batch normalisation with scale, shift and running statistics."""

    weight: Slot  # (channels,)
    bias: Slot
    mean: Slot  # running
    variance: Slot
    epsilon: float
    momentum: float

    @property
    def parameters(self) -> dict[str, Slot]:
        """What is trained."""
        return {"weight": self.weight, "bias": self.bias}

    @property
    def statistics(self) -> dict[str, Slot]:
        """What is updated from the batches."""
        return {"mean": self.mean, "variance": self.variance}


Layer = Dense | Convolution | Relu | MaxPool | Flatten | Norm


def read_layers(flat: FlatModel, sample: tuple[int, ...]) -> list[Layer] | None:
    """Return the layers of a module that is a stack of those above and ends with a dense layer, otherwise None.

    Flattening before any convolution is left out, because samples are stored flat. A layer may appear several times,
    unless it has weights.
    """
    if not isinstance(flat.module, nn.Sequential):
        return None
    slots = {slot.name: slot for slot in flat.slots}
    chain = _Chain(sample)
    for name, layer in flat.module.named_modules(remove_duplicate=False):
        if not name or "." in name:
            continue  # the module itself, and what is inside its layers
        if next(layer.parameters(), None) is not None and f"{name}.weight" not in slots:
            return None  # a layer with weights appears twice
        weights = {key.removeprefix(f"{name}."): slot for key, slot in slots.items() if key.startswith(f"{name}.")}
        if not chain.append(layer, weights):
            return None
    return chain.layers if chain.layers and isinstance(chain.layers[-1], Dense) else None


class _Chain:
    """The layers read so far, and the shape of the last one's output."""

    def __init__(self, sample: tuple[int, ...]) -> None:
        self.layers: list[Layer] = []
        self.shape = sample

    def append(self, layer: nn.Module, slots: Mapping[str, Slot]) -> bool:
        """Add a layer with its weights by name; return False if it is unknown, or unsupported in this position."""
        # By its exact type: a subclass may compute something else.
        match type(layer):
            case nn.Flatten:
                return self._flatten(layer)
            case nn.ReLU:
                return self._relu()
            case nn.Linear:
                return self._dense(layer, slots)
            case nn.Conv2d:
                return self._convolution(layer, slots)
            case nn.BatchNorm1d | nn.BatchNorm2d:
                return self._norm(layer, slots)
            case nn.MaxPool2d:
                return self._pool(layer)
        return False

    @property
    def _is_image(self) -> bool:
        return len(self.shape) == 3

    def _flatten(self, layer: Any) -> bool:
        if (layer.start_dim, layer.end_dim) != (1, -1):
            return False
        if self.layers and self._is_image:
            self.layers.append(Flatten((self.shape[0], self.shape[1], self.shape[2])))
        self.shape = (math.prod(self.shape),)
        return True

    def _relu(self) -> bool:
        if not self.layers:  # the backends apply ReLU in place, and the samples must not change
            return False
        last = self.layers[-1]
        if isinstance(last, Convolution):  # done in the same pass over the image
            self.layers[-1] = replace(last, relu=True)
        else:
            self.layers.append(Relu())
        return True

    def _dense(self, layer: Any, slots: Mapping[str, Slot]) -> bool:
        if layer.bias is None or len(self.shape) != 1:
            return False
        self.layers.append(Dense(slots["weight"], slots["bias"]))
        self.shape = (layer.out_features,)
        return True

    def _norm(self, layer: Any, slots: Mapping[str, Slot]) -> bool:
        if not self.layers or not _is_supported_norm(layer, len(self.shape)):
            return False
        weight, bias, mean, variance = (slots[part] for part in ("weight", "bias", "running_mean", "running_var"))
        self.layers.append(Norm(weight, bias, mean, variance, layer.eps, float(layer.momentum or 0)))
        return True

    def _convolution(self, layer: Any, slots: Mapping[str, Slot]) -> bool:
        if not self._is_image or not _is_supported_convolution(layer):
            return False
        channels, height, width = self.shape
        kernel = (layer.kernel_size[0], layer.kernel_size[1])
        padding = (int(layer.padding[0]), int(layer.padding[1]))
        self.layers.append(Convolution(slots["weight"], slots["bias"], kernel, padding, (channels, height, width)))
        sides = zip((height, width), padding, kernel, strict=True)
        self.shape = (layer.out_channels, *(side + 2 * pad - window + 1 for side, pad, window in sides))
        return True

    def _pool(self, layer: Any) -> bool:
        window = _pool_window(layer)
        if not self.layers or not self._is_image or window is None:
            return False
        last = self.layers[-1]
        if isinstance(last, Convolution) and last.pool == (1, 1):  # pooled while its rows are still in the cache
            self.layers[-1] = replace(last, pool=window)
        else:
            self.layers.append(MaxPool(window))
        self.shape = (self.shape[0], self.shape[1] // window[0], self.shape[2] // window[1])
        return True


def _is_supported_norm(layer: nn.BatchNorm1d | nn.BatchNorm2d, dimensions: int) -> bool:
    fits = type(layer) is (nn.BatchNorm1d if dimensions == 1 else nn.BatchNorm2d)
    return fits and layer.affine and layer.track_running_stats and layer.momentum is not None


def _is_supported_convolution(layer: nn.Conv2d) -> bool:
    return (
        layer.bias is not None
        and tuple(layer.stride) == (1, 1)
        and tuple(layer.dilation) == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def _pool_window(layer: nn.MaxPool2d) -> tuple[int, int] | None:
    kernel = layer.kernel_size if isinstance(layer.kernel_size, tuple) else (layer.kernel_size,) * 2
    stride = layer.stride if isinstance(layer.stride, tuple) else (layer.stride,) * 2
    simple = stride == kernel and layer.padding in (0, (0, 0)) and layer.dilation in (1, (1, 1)) and not layer.ceil_mode
    return (kernel[0], kernel[1]) if simple else None
