"""Read a ``nn.Sequential`` of well-known layers into a list, from which the fast backends are built."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
    image: Image  # its input
    pool: tuple[int, int] = (1, 1)
    relu: bool = False


@dataclass(frozen=True)
class Relu:
    """Rectifier."""


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
        """What follows the batches."""
        return {"mean": self.mean, "variance": self.variance}


Layer = Dense | Convolution | Relu | MaxPool | Flatten | Norm


def read_layers(flat: FlatModel, sample: tuple[int, ...]) -> list[Layer] | None:
    """Return the layers of a module that is a stack of those above and ends with a dense one, else None.

    Flattening an input that no convolution has touched is left out: samples are stored flat. A layer may stand in
    several places, unless it has weights.
    """
    if not isinstance(flat.module, nn.Sequential):
        return None
    slots = {slot.name: slot for slot in flat.slots}
    layers: list[Layer] = []
    shape = sample
    for name, layer in flat.module.named_modules(remove_duplicate=False):
        last = layers[-1] if layers else None
        if not name or "." in name:
            continue  # the module itself, and what is inside its layers
        if next(layer.parameters(), None) is not None and f"{name}.weight" not in slots:
            return None  # a layer with weights appears twice
        if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            if layers and len(shape) == 3:
                layers.append(Flatten((shape[0], shape[1], shape[2])))
            shape = (math.prod(shape),)
        elif type(layer) is nn.ReLU and isinstance(last, Convolution):
            layers[-1] = replace(last, relu=True)
        elif type(layer) is nn.ReLU and layers:
            layers.append(Relu())
        elif type(layer) is nn.Linear and layer.bias is not None and len(shape) == 1:
            layers.append(Dense(slots[f"{name}.weight"], slots[f"{name}.bias"]))
            shape = (layer.out_features,)
        elif type(layer) is nn.Conv2d and _plain_convolution(layer) and len(shape) == 3:
            kernel = (layer.kernel_size[0], layer.kernel_size[1])
            padding = (int(layer.padding[0]), int(layer.padding[1]))
            weight, bias = slots[f"{name}.weight"], slots[f"{name}.bias"]
            layers.append(Convolution(weight, bias, kernel, padding, (shape[0], shape[1], shape[2])))
            sides = zip(shape[1:], padding, kernel, strict=True)
            shape = (layer.out_channels, *(side + 2 * pad - window + 1 for side, pad, window in sides))
        elif isinstance(layer, _NORMS) and layers and _plain_norm(layer, len(shape)):
            weight, bias, mean, variance = (
                slots[f"{name}.{part}"] for part in ("weight", "bias", "running_mean", "running_var")
            )
            layers.append(Norm(weight, bias, mean, variance, layer.eps, float(layer.momentum or 0)))
        elif type(layer) is nn.MaxPool2d and layers and len(shape) == 3 and (window := _plain_pool(layer)) is not None:
            if isinstance(last, Convolution) and last.pool == (1, 1):
                layers[-1] = replace(last, pool=window)
            else:
                layers.append(MaxPool(window))
            shape = (shape[0], shape[1] // window[0], shape[2] // window[1])
        else:
            return None
    return layers if layers and isinstance(layers[-1], Dense) else None


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


def _plain_norm(layer: nn.BatchNorm1d | nn.BatchNorm2d, dimensions: int) -> bool:
    fits = type(layer) is (nn.BatchNorm1d if dimensions == 1 else nn.BatchNorm2d)
    return fits and layer.affine and layer.track_running_stats and layer.momentum is not None


def _plain_convolution(layer: nn.Conv2d) -> bool:
    return (
        layer.bias is not None
        and tuple(layer.stride) == (1, 1)
        and tuple(layer.dilation) == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def _plain_pool(layer: nn.MaxPool2d) -> tuple[int, int] | None:
    kernel = layer.kernel_size if isinstance(layer.kernel_size, tuple) else (layer.kernel_size,) * 2
    stride = layer.stride if isinstance(layer.stride, tuple) else (layer.stride,) * 2
    simple = stride == kernel and layer.padding in (0, (0, 0)) and layer.dilation in (1, (1, 1)) and not layer.ceil_mode
    return (kernel[0], kernel[1]) if simple else None
