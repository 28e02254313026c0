"""Networks with a leading axis of models: J parameter vectors, J batches, one program.

A :class:`StackedNet` computes logits and, from the derivative by the logits, the gradient of all J models at once.
Dense layers and convolutions are written out by hand as batched matrix products; images are channels-last, so that the
product of the unfolded patches with the kernels is the next layer's image with no permutation in between. Modules that
are no stack of known layers go through ``torch.func``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from fedcohort.simulate.engine.flat import FlatModel, Slot
from fedcohort.simulate.engine.layers import Convolution, Flatten, Pool, Relu, read_layers

_aten = torch.ops.aten
Saved = list[Any]


class StackedNet:
    """J models of one architecture. Vectors are (J, P) in the net's own order of elements, ``order``."""

    order: torch.Tensor  # (P,) own[i] = flat[order[i]]

    def logits(self, vectors: torch.Tensor, x: torch.Tensor, saved: Saved | None = None) -> torch.Tensor:
        """Return the logits (J, B, C) of ``x`` (J or 1, B, F); what the backward pass needs goes into ``saved``."""
        raise NotImplementedError(type(self).__name__)

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> None:
        """Write minus the gradient into ``out`` (J, P), given the derivative by the logits ``delta`` (J, B, C)."""
        raise NotImplementedError(type(self).__name__)


class FunctionalNet(StackedNet):
    """Any module without state, by ``vmap`` over ``torch.func.vjp``."""

    def __init__(self, flat: FlatModel, sample: tuple[int, ...]) -> None:
        self.flat = flat
        self.sample = sample
        self.order = torch.arange(flat.n_params)

    def _one(self, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        tensors = {slot.name: slot.of(vector) for slot in self.flat.slots}
        result: torch.Tensor = torch.func.functional_call(self.flat.module, tensors, (x.view(len(x), *self.sample),))
        return result

    def logits(self, vectors: torch.Tensor, x: torch.Tensor, saved: Saved | None = None) -> torch.Tensor:
        """Return the logits (J, B, C)."""
        if saved is not None:
            saved.append(x)
        shared = x.shape[0] == 1 and len(vectors) != 1
        mapped = torch.func.vmap(self._one, in_dims=(0, None if shared else 0), randomness="error")
        result: torch.Tensor = mapped(vectors, x[0] if shared else x)
        return result

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> None:
        """Write minus the gradient."""

        def pull(vector: torch.Tensor, x: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.func.vjp(lambda v: self._one(v, x), vector)[1](cotangent)[0]
            return result

        torch.neg(torch.func.vmap(pull, randomness="error")(vectors, saved.pop(), delta), out=out)


class _Layer:
    """One layer of a stack: forward saves what its backward needs."""

    first = False  # the lowest layer with parameters, below which nobody needs a derivative

    def forward(self, vectors: torch.Tensor, x: torch.Tensor, saved: Saved | None) -> torch.Tensor:
        raise NotImplementedError(type(self).__name__)

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(type(self).__name__)


class _Dense(_Layer):
    """Dense layer; x (J or 1, B, inputs)."""

    def __init__(self, weight: Slot, bias: Slot) -> None:
        self.weight, self.bias = weight, bias

    def forward(self, vectors: torch.Tensor, x: torch.Tensor, saved: Saved | None) -> torch.Tensor:
        if saved is not None:
            saved.append(x)
        weight, bias = self.weight.of(vectors), self.bias.of(vectors).unsqueeze(1)
        return torch.baddbmm(bias, x.expand(len(vectors), -1, -1), weight.transpose(1, 2))

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        x = saved.pop()
        weight = self.weight.of(out)
        torch.baddbmm(weight, delta.transpose(1, 2), x, beta=0, alpha=-1, out=weight)
        torch.neg(delta.sum(1), out=self.bias.of(out))
        return delta if self.first else torch.bmm(delta, self.weight.of(vectors))


class _Relu(_Layer):
    """ReLU in place."""

    def forward(self, vectors: torch.Tensor, x: torch.Tensor, saved: Saved | None) -> torch.Tensor:
        x = x.relu_()
        if saved is not None:
            saved.append(x)
        return x

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _aten.threshold_backward(delta, saved.pop(), 0)
        return result


class _Convolution(_Layer):
    """Convolution of stride 1 on channels-last images x (J or 1, B, H, W, C), as a product with unfolded patches.

    Its weight in the net's own order is (kernel height, kernel width, inputs, outputs).
    """

    def __init__(self, weight: Slot, bias: Slot, kernel: tuple[int, int], padding: tuple[int, int]) -> None:
        self.weight, self.bias, self.kernel, self.padding = weight, bias, kernel, padding

    def forward(self, vectors: torch.Tensor, x: torch.Tensor, saved: Saved | None) -> torch.Tensor:
        rows, columns = self.kernel
        above, beside = self.padding
        if above or beside:
            x = F.pad(x, (0, 0, beside, beside, above, above))
        models, batch, height, width, channels = x.shape
        high, wide = height - rows + 1, width - columns + 1
        s = x.stride()
        window = x.as_strided((models, batch, high, wide, rows, columns, channels), (*s[:4], s[2], s[3], s[4]))
        patches = window.reshape(models, batch * high * wide, rows * columns * channels)
        if saved is not None:
            saved += [patches, (height, width)]
        j = len(vectors)
        weight = self.weight.of(vectors).view(j, rows * columns * channels, -1)
        bias = self.bias.of(vectors).unsqueeze(1)
        return torch.baddbmm(bias, patches.expand(j, -1, -1), weight).view(j, batch, high, wide, -1)

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        (height, width), patches = saved.pop(), saved.pop()
        j, batch, high, wide, outputs = delta.shape
        rows, columns = self.kernel
        flat = delta.reshape(j, batch * high * wide, outputs)
        weight = self.weight.of(out).view(j, patches.shape[2], outputs)
        torch.baddbmm(weight, patches.transpose(1, 2), flat, beta=0, alpha=-1, out=weight)
        torch.neg(flat.sum(1), out=self.bias.of(out))
        if self.first:
            return delta
        kernel = self.weight.of(vectors).view(j, patches.shape[2], outputs)
        spread = torch.bmm(flat, kernel.transpose(1, 2)).view(j, batch, high, wide, rows, columns, -1)
        x = torch.zeros(j, batch, height, width, spread.shape[-1], device=delta.device, dtype=delta.dtype)
        for row in range(rows):
            for column in range(columns):
                x[:, :, row : row + high, column : column + wide] += spread[:, :, :, :, row, column]
        above, beside = self.padding
        return x[:, :, above : height - above, beside : width - beside] if above or beside else x


class _Pool(_Layer):
    """Max-pooling with windows that do not overlap."""

    def __init__(self, kernel: tuple[int, int]) -> None:
        self.kernel = list(kernel)

    def forward(self, vectors: torch.Tensor, x: torch.Tensor, saved: Saved | None) -> torch.Tensor:
        images = x.flatten(0, 1).permute(0, 3, 1, 2)  # channels first by name, channels last in memory
        pooled, where = _aten.max_pool2d_with_indices(images, self.kernel, self.kernel)
        if saved is not None:
            saved += [images, where]
        result: torch.Tensor = pooled.permute(0, 2, 3, 1).unflatten(0, x.shape[:2])
        return result

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        where, images = saved.pop(), saved.pop()
        j = delta.shape[0]
        back = _aten.max_pool2d_with_indices_backward(
            delta.flatten(0, 1).permute(0, 3, 1, 2), images, self.kernel, self.kernel, [0, 0], [1, 1], False, where
        )
        result: torch.Tensor = back.permute(0, 2, 3, 1).unflatten(0, (j, -1))
        return result


class _Flatten(_Layer):
    """Image to vector, in the channels-last order; the next dense layer's weight is permuted to fit."""

    def forward(self, vectors: torch.Tensor, x: torch.Tensor, saved: Saved | None) -> torch.Tensor:
        if saved is not None:
            saved.append(x.shape)
        return x.flatten(2)

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        shape = saved.pop()
        return delta.view(delta.shape[0], *shape[1:])


class LayerNet(StackedNet):
    """A ``nn.Sequential`` of dense layers, convolutions of stride 1, ReLU, max-pooling and flattening."""

    def __init__(self, layers: list[_Layer], order: torch.Tensor, image: tuple[int, int, int] | None) -> None:
        self.layers = layers
        self.order = order
        self.image = image  # (H, W, C) of the input when the lowest layer is a convolution

    def logits(self, vectors: torch.Tensor, x: torch.Tensor, saved: Saved | None = None) -> torch.Tensor:
        """Return the logits (J, B, C)."""
        if self.image is not None:
            height, width, channels = self.image
            x = x.view(*x.shape[:2], channels, height, width).permute(0, 1, 3, 4, 2)
        for layer in self.layers:
            x = layer.forward(vectors, x, saved)
        return x

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> None:
        """Write minus the gradient."""
        for layer in reversed(self.layers):
            delta = layer.backward(vectors, saved, delta, out)
            if layer.first:
                return


def stack(flat: FlatModel, sample: tuple[int, ...]) -> StackedNet:
    """Return the stacked form of a module without state."""
    return _layer_net(flat, sample) or FunctionalNet(flat, sample)


def why_not_stacked(flat: FlatModel, sample: tuple[int, ...]) -> str | None:
    """Return why ``flat`` cannot be trained as a stack, or None when it can."""
    if flat.stateful:
        return "it keeps state of its own, such as the running statistics of BatchNorm"
    net = stack(flat, sample)
    if isinstance(net, LayerNet):
        return None
    vectors = flat.vector().expand(2, -1).clone()
    saved: Saved = []
    try:
        with torch.no_grad():
            logits = net.logits(vectors, torch.zeros(2, 2, math.prod(sample)), saved)
            net.backward(vectors, saved, torch.zeros_like(logits), torch.empty_like(vectors))
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return str(error).strip().partition("\n")[0]
    return None


def _layer_net(flat: FlatModel, sample: tuple[int, ...]) -> LayerNet | None:
    specification = read_layers(flat, sample)
    if specification is None:
        return None
    layers: list[_Layer] = []
    order: list[torch.Tensor] = []  # flat positions in the net's own order; every tensor keeps its place
    fold: tuple[int, int, int] | None = None  # the image the last flattening turned into a vector
    for layer in specification:
        if isinstance(layer, Relu):
            layers.append(_Relu())
        elif isinstance(layer, Pool):
            layers.append(_Pool(layer.kernel))
        elif isinstance(layer, Flatten):
            layers.append(_Flatten())
            fold = layer.image
        else:
            index = torch.arange(layer.weight.offset, layer.weight.offset + layer.weight.numel).view(layer.weight.shape)
            if isinstance(layer, Convolution):
                index = index.permute(2, 3, 1, 0)
                weight = Slot(layer.weight.name, layer.weight.offset, tuple(index.shape))
                layers.append(_Convolution(weight, layer.bias, layer.kernel, layer.padding))
            else:
                if fold is not None:
                    index = index.view(-1, *fold).permute(0, 2, 3, 1)
                    fold = None
                layers.append(_Dense(layer.weight, layer.bias))
            order.append(index.reshape(-1))
            order.append(torch.arange(layer.bias.offset, layer.bias.offset + layer.bias.numel))
    layers[0].first = True
    image = (sample[1], sample[2], sample[0]) if isinstance(layers[0], _Convolution) else None
    return LayerNet(layers, torch.cat(order), image)
