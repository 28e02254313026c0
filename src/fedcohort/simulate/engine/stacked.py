"""Many networks computed at once, with a leading axis of models: J parameter vectors, J batches, one program.

A :class:`StackedNet` computes logits and, from the derivative with respect to the logits, all J models' gradients.
Dense layers and convolutions are written out by hand as batched matrix products; images are channels-last, so the
product of the unfolded patches with the kernels is the next layer's image, with no permutation in between. On a GPU,
convolutions are fused kernels instead; see :mod:`fedcohort.simulate.engine.fused`. Modules that are not a stack of
known layers go through ``torch.func``; see :mod:`fedcohort.simulate.engine.layer_rules`.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from fedcohort.simulate.engine.flat import FlatModel, Slot
from fedcohort.simulate.engine.images import fold, patches, pool, unpool
from fedcohort.simulate.engine.layer_rules import LayerRules, prepare_for_stack
from fedcohort.simulate.engine.layers import Convolution, Dense, MaxPool, Norm, Relu, read_layers
from fedcohort.simulate.engine.modules import draws_random_numbers
from fedcohort.simulate.engine.precision import autocast
from fedcohort.simulate.own_code import own_code

if TYPE_CHECKING:
    from fedcohort.simulate.engine.fused import FusedConvolution

_BUSY = 256  # independent pieces of a product that keep a large GPU busy
Saved = list[Any]


class StackedNet:
    """J models of one architecture. Vectors are (J, Q) in the net's own order of elements, ``order``.

    The first ``trainable`` elements are parameters; the rest are running statistics, which a training pass updates.
    """

    n_params: int  # P, length of a flat vector
    order: torch.Tensor  # (Q,) vector[i] = flat[order[i]], or zero if order[i] = P
    trainable: int  # T
    features: torch.Tensor | None = None  # (F,) how to permute the channels-first features of a sample
    draws = False  # whether training draws random numbers, and needs keys
    pads = True  # whether batches of different sizes can be padded to one
    couples = False  # whether an output depends on the other samples in evaluation, too

    def logits(
        self,
        vectors: torch.Tensor,
        x: torch.Tensor,
        saved: Saved | None = None,
        present: torch.Tensor | None = None,
        key: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits (J, B, C) of ``x`` (J or 1, B, F); what the backward pass needs goes into ``saved``.

        With ``present`` (J, B), this is a training pass: batches are normalised by their own statistics, and the
        running statistics follow. ``present`` is 1 for the samples of a batch and 0 for padding. ``key`` (J,) has the
        keys of random layers.
        """
        raise NotImplementedError(type(self).__name__)

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> None:
        """Write the gradient into ``out`` (J, Q), given the loss's derivative by the logits, ``delta`` (J, B, C)."""
        raise NotImplementedError(type(self).__name__)


class _WithState(nn.Module):
    """A module that also returns its buffers as they are after the pass, one vector."""

    def __init__(self, inner: nn.Module, buffers: list[str]) -> None:
        super().__init__()
        self.inner, self.names = inner, buffers

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self.inner(x)
        # Looked up only now, because a module may have put a new tensor in a buffer's place.
        state = [self.inner.get_buffer(name).detach().reshape(-1).float() for name in self.names]
        return outputs, torch.cat(state) if state else outputs.new_zeros(0)


class FunctionalNet(StackedNet):
    """Any module, by ``vmap`` over a functional call of it, with :class:`LayerRules`.

    Parameters
    ----------
    flat : FlatModel
        The architecture; copied.
    sample : tuple of int
        Shape of a sample.
    dtype : torch.dtype
        Of the samples.
    """

    def __init__(self, flat: FlatModel, sample: tuple[int, ...], dtype: torch.dtype, precision: str) -> None:
        self.flat = FlatModel(prepare_for_stack(copy.deepcopy(flat.module)))
        self.sample, self.dtype, self.precision = sample, dtype, precision
        self.n_params, self.trainable = flat.n_params, flat.n_trainable
        self.order = torch.arange(flat.n_params)
        buffers = [slot.name for slot in flat.slots if slot.offset >= flat.n_trainable]
        self._module = _WithState(self.flat.module, buffers)
        self.draws = draws_random_numbers(flat.module, sample, dtype)[0]
        self._try_out()

    def to(self, device: torch.device) -> None:
        """Move what is not in the vectors, such as frozen parameters, to a device."""
        self._module.to(device)

    def _one(
        self, weights: torch.Tensor, state: torch.Tensor, x: torch.Tensor, present: Any, key: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = {f"inner.{name}": value for name, value in self.flat.tensors(weights, state).items()}
        rules = LayerRules(key, stacked=True, present=present if self.pads else None)
        with own_code(), autocast(self.precision, x.device), rules:
            outputs, after = torch.func.functional_call(self._module, tensors, (x.view(len(x), *self.sample),))
        return outputs.float(), after

    def logits(
        self,
        vectors: torch.Tensor,
        x: torch.Tensor,
        saved: Saved | None = None,
        present: torch.Tensor | None = None,
        key: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the outputs (J, B, ...)."""
        self._module.train(present is not None)
        weights, state = vectors[:, : self.trainable].detach(), vectors[:, self.trainable :].clone()
        if saved is not None:
            weights.requires_grad_()
        shared = x.shape[0] == 1 and len(vectors) != 1
        arguments = (weights, state, x[0] if shared else x, present, key)
        places = (0, 0, None if shared else 0, None if present is None else 0, None if key is None else 0)
        with torch.set_grad_enabled(saved is not None):
            mapped = torch.func.vmap(self._one, in_dims=places, randomness="error")
            outputs, after = mapped(*arguments)
        if saved is not None:
            # A job that is done, or has no such step, keeps its state.
            state = vectors[:, self.trainable :]
            if present is not None:
                state = torch.where(present.amax(1, keepdim=True) == 0, state, after)
            saved += [weights, outputs, state]
        result: torch.Tensor = outputs.detach()
        return result

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> None:
        """Write the gradient."""
        state, outputs, weights = saved.pop(), saved.pop(), saved.pop()
        # Jobs do not depend on each other, so the derivative of their sum has every job's own gradient.
        (gradient,) = torch.autograd.grad(outputs, weights, delta)
        out[:, : self.trainable].copy_(gradient)
        # Only now: the backward pass needs the vectors as they were in the forward pass.
        vectors[:, self.trainable :] = state

    def _try_out(self) -> None:
        """Compare a small stack with the plain loop, and see what padding changes; raise if it has no stacked form."""
        shape = (3, math.prod(self.sample))
        x = torch.linspace(-2, 2, math.prod(shape)).sin() if self.dtype.is_floating_point else torch.zeros(shape)
        x = x.view(shape).to(self.dtype)
        alone = self._pass(x[:2], torch.ones(2))
        if not self._near(self._plain_pass(x[:2]), [part[0] for part in alone]):
            raise NotImplementedError("its stacked form computes something else")
        # Padding comes after the samples, so what is drawn for them stays the same, if the batch is the first axis.
        self.pads = True
        padded = self._pass(x, torch.tensor([1.0, 1.0, 0.0]))
        self.pads = self._near([padded[0][:, :2], *padded[1:]], alone)
        vectors = self.flat.vector().expand(2, -1)
        with torch.no_grad():
            self.couples = not self._near([self.logits(vectors, x[None])[:, :2]], [self.logits(vectors, x[None, :2])])

    def _near(self, one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
        tolerance = 0.05 if self.precision == "bf16" else 1e-3
        return all((a - b).norm() <= tolerance * b.norm() + 1e-6 for a, b in zip(one, other, strict=True))

    def _pass(self, x: torch.Tensor, present: torch.Tensor) -> list[torch.Tensor]:
        """Do one pass of training for two models; return their outputs, gradients and next vectors."""
        vectors = torch.stack([self.flat.vector(), 0.5 * self.flat.vector()])
        saved: Saved = []
        key = torch.arange(2) if self.draws else None
        gradient = torch.zeros_like(vectors)
        outputs = self.logits(vectors, x.expand(2, *x.shape), saved, present.expand(2, -1), key)
        self.backward(vectors, saved, _slopes(outputs) * present.view(-1, *(1,) * (outputs.ndim - 2)), gradient)
        return [outputs, gradient, vectors]

    def _plain_pass(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Do the same for the first model in the plain loop."""
        flat = FlatModel(copy.deepcopy(self.flat.module).train())
        gradient, after = torch.zeros(flat.n_params), torch.empty(flat.n_params)
        rules = LayerRules(torch.tensor(0) if self.draws else None)
        with torch.enable_grad(), own_code(), autocast(self.precision, x.device), rules:
            outputs = flat.module(x.view(len(x), *self.sample)).float()
        for total, part in zip(
            flat.split(gradient),
            torch.autograd.grad(outputs, flat.parameters, _slopes(outputs), allow_unused=True),
            strict=True,
        ):
            if part is not None:
                total.copy_(part)
        flat.store(after)
        return [outputs.detach(), gradient, after]


def _slopes(outputs: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(outputs).cumsum(-1).cos()


class _Layer:
    """One layer of a stack; its forward pass saves what its backward pass needs."""

    first = False  # whether this is the lowest layer with parameters, below which no derivative is needed

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
        torch.bmm(delta.transpose(1, 2), saved.pop(), out=self.weight.of(out))
        torch.sum(delta, 1, out=self.bias.of(out))
        return delta if self.first else torch.bmm(delta, self.weight.of(vectors))


class _Relu(_Layer):
    """ReLU in place."""

    def forward(self, vectors: torch.Tensor, x: torch.Tensor, saved: Saved | None) -> torch.Tensor:
        x = x.relu_()
        if saved is not None:
            saved.append(x)
        return x

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.aten.threshold_backward(delta, saved.pop(), 0)
        return result


class _Convolution(_Layer):
    """Convolution of stride 1 on channels-last images x (J or 1, B, H, W, C), with the pooling and ReLU that follow.

    Its weight in the net's own order is (kernel height x kernel width x inputs, rounded up; outputs): rows of patches
    start at aligned addresses, and the rows of zeros that pad them stay zero. By default it is a product with unfolded
    patches; on a GPU, it uses kernels that never store the patches.
    """

    def __init__(self, layer: Convolution, weight: Slot, bias: Slot) -> None:
        self.weight, self.bias, self.kernel, self.padding = weight, bias, layer.kernel, layer.padding
        self.pool, self.relu = layer.pool, layer.relu
        self.depth = layer.kernel[0] * layer.kernel[1] * layer.image[0]
        self.image = (*layer.image[1:], layer.image[0])
        self.fused: FusedConvolution | None = None

    def fuse(self, precision: str) -> None:
        """Use fused kernels from now on, if there are any for this shape."""
        from fedcohort.simulate.engine.fused import FusedConvolution, Shape  # loads a compiler

        shape = Shape(
            image=self.image,
            kernel=self.kernel,
            padding=self.padding,
            outputs=self.weight.shape[1],
            pool=self.pool,
            relu=self.relu,
            weight=self.weight.offset,
            depth=self.weight.shape[0],
        )
        assert self.bias.offset == self.weight.offset + self.weight.numel
        if shape.fits:
            self.fused = FusedConvolution(shape, precision)

    def forward(self, vectors: torch.Tensor, x: torch.Tensor, saved: Saved | None) -> torch.Tensor:
        if self.fused is not None:
            y, alive = self.fused.forward(vectors, x)
            if saved is not None:
                saved += [x, alive]
            return y
        above, beside = self.padding
        if above or beside:
            x = F.pad(x, (0, 0, beside, beside, above, above))
        models, batch, height, width, _ = x.shape
        windows = patches(x.flatten(0, 1), self.kernel, self.weight.shape[0])
        high, wide = windows.shape[1:3]
        windows = windows.view(models, batch * high * wide, -1)
        if saved is not None:
            saved += [windows, (height, width)]
        j = len(vectors)
        y = torch.bmm(windows.expand(j, -1, -1), self.weight.of(vectors)).view(j * batch, high, wide, -1)
        # ReLU and max-pooling commute, and the bias is the same for a whole window. If pooling comes first, bias and
        # ReLU touch only a quarter of the numbers.
        if self.pool != (1, 1):
            pooled, where = pool(y, self.pool)
            if saved is not None:
                saved += [y, where]
            y = pooled
        y = y.reshape(j, batch, *y.shape[1:]).add_(self.bias.of(vectors)[:, None, None, None])
        if self.relu:
            y = y.relu_()
            if saved is not None:
                saved.append(y)
        return y

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if self.fused is not None:
            alive, x = saved.pop(), saved.pop()
            self.fused.backward(x, alive, delta, out)
            return delta if self.first else self.fused.input_gradient(vectors, alive, delta)
        j, batch = delta.shape[:2]
        if self.relu:
            delta = torch.ops.aten.threshold_backward(delta, saved.pop(), 0)
        torch.sum(delta, (1, 2, 3), out=self.bias.of(out))
        images = delta.flatten(0, 1)
        if self.pool != (1, 1):
            where, pooled = saved.pop(), saved.pop()
            images = unpool(images, where, pooled, self.pool)
        (height, width), windows = saved.pop(), saved.pop()
        _, high, wide, outputs = images.shape
        flat = images.reshape(j, batch * high * wide, outputs)
        self._weight_gradient(windows, flat, batch, self.weight.of(out))
        if self.first:
            return delta
        spread = torch.bmm(flat, self.weight.of(vectors)[:, : self.depth].transpose(1, 2))
        x = fold(spread.view(j * batch, high, wide, *self.kernel, -1), height, width)
        x = x.view(j, batch, height, width, -1)
        above, beside = self.padding
        return x[:, :, above : height - above, beside : width - beside] if above or beside else x

    @staticmethod
    def _weight_gradient(windows: torch.Tensor, delta: torch.Tensor, batch: int, out: torch.Tensor) -> None:
        """Write the product over all pixels of all samples, cut into parts so that a few models keep a GPU busy."""
        j, pixels, depth = windows.shape
        # A block of a product covers a tile of about 128 x 64; with fewer than _BUSY tiles, some units are idle.
        tiles = j * -(-depth // 128) * -(-delta.shape[2] // 64)
        parts = next((part for part in range(1, batch + 1) if batch % part == 0 and part * tiles >= _BUSY), batch)
        if parts == 1:
            torch.bmm(windows.transpose(1, 2), delta, out=out)
            return
        left = windows.view(j * parts, pixels // parts, depth).transpose(1, 2)
        right = delta.view(j * parts, pixels // parts, -1)
        torch.sum(torch.bmm(left, right).view(j, parts, depth, -1), 1, out=out)


class _Pool(_Layer):
    """Max-pooling that does not directly follow a convolution."""

    def __init__(self, kernel: tuple[int, int]) -> None:
        self.kernel = kernel

    def forward(self, vectors: torch.Tensor, x: torch.Tensor, saved: Saved | None) -> torch.Tensor:
        images = x.flatten(0, 1)
        pooled, where = pool(images, self.kernel)
        if saved is not None:
            saved += [images, where]
        return pooled.reshape(*x.shape[:2], *pooled.shape[1:])

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        where, images = saved.pop(), saved.pop()
        back = unpool(delta.flatten(0, 1), where, images, self.kernel)
        return back.reshape(*delta.shape[:2], *images.shape[1:])


class _Norm(_Layer):
    """Batch normalisation of x (J or 1, B, ..., C); in training, over the samples that are present.

    ``torch.nn.functional.batch_norm`` with J x C channels would do the same, except for padded batches.
    """

    def __init__(self, slots: dict[str, Slot], layer: Norm) -> None:
        self.slots, self.epsilon, self.momentum = slots, layer.epsilon, layer.momentum
        self.present: torch.Tensor | None = None  # (J, B) in the current training pass

    def forward(self, vectors: torch.Tensor, x: torch.Tensor, saved: Saved | None) -> torch.Tensor:
        inner = (1,) * (x.ndim - 2)  # samples and pixels
        weight, bias, mean, variance = (self.slots[name].of(vectors) for name in ("weight", "bias", "mean", "variance"))
        there, n = None, None
        if self.present is not None:
            over = tuple(range(1, x.ndim - 1))
            there = self.present.view(*self.present.shape, *inner)
            n = (self.present.sum(1, keepdim=True) * math.prod(x.shape[2:-1])).clamp(min=1)  # (J, 1)
            batch_mean = (x * there).sum(over) / n
            spread = ((x - batch_mean.view(len(batch_mean), *inner, -1)).square_() * there).sum(over) / n
            # A model without a batch keeps its statistics.
            pace = self.momentum * self.present.amax(1, keepdim=True)
            mean += pace * (batch_mean - mean)
            variance += pace * (spread * (n / (n - 1).clamp(min=1)) - variance)
            mean, variance = batch_mean, spread
        models = len(vectors)
        scale = (variance + self.epsilon).rsqrt().view(models, *inner, -1)
        normal = (x - mean.view(models, *inner, -1)) * scale
        if saved is not None:
            saved += [normal, scale, there, n]
        return normal * weight.view(models, *inner, -1) + bias.view(models, *inner, -1)

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        n, there, scale, normal = saved.pop(), saved.pop(), saved.pop(), saved.pop()
        over = tuple(range(1, delta.ndim - 1))
        shape = (len(delta), *(1,) * (delta.ndim - 2), -1)
        by_bias, by_weight = delta.sum(over), (delta * normal).sum(over)
        self.slots["bias"].of(out).copy_(by_bias)
        self.slots["weight"].of(out).copy_(by_weight)
        factor: torch.Tensor = scale * self.slots["weight"].of(vectors).view(shape)
        if there is None:
            return delta * factor
        # The statistics of a batch depend on each of its samples, and on no others.
        through = (by_bias / n).view(shape) + normal * (by_weight / n).view(shape)
        result: torch.Tensor = (delta - through) * factor * there
        return result


class _Flatten(_Layer):
    """Image to vector in channels-last order; the weight of the next dense layer is permuted to match."""

    def forward(self, vectors: torch.Tensor, x: torch.Tensor, saved: Saved | None) -> torch.Tensor:
        if saved is not None:
            saved.append(x.shape)
        return x.flatten(2)

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        shape = saved.pop()
        return delta.view(delta.shape[0], *shape[1:])


class LayerNet(StackedNet):
    """A ``nn.Sequential`` of dense layers, convolutions of stride 1, ReLU, max-pooling and flattening."""

    def __init__(
        self, layers: list[_Layer], n_params: int, order: torch.Tensor, trainable: int, image: tuple[int, ...] | None
    ) -> None:
        self.layers, self.n_params, self.order, self.trainable = layers, n_params, order, trainable
        self.image = image  # (H, W, C) of the input if the lowest layer is a convolution
        if image is not None:
            height, width, channels = image
            self.features = torch.arange(math.prod(image)).view(channels, height, width).permute(1, 2, 0).reshape(-1)

    def fuse(self, precision: str) -> None:
        """Let convolutions use fused kernels of this precision, if there are any for their shape."""
        for layer in self.layers:
            if isinstance(layer, _Convolution):
                layer.fuse(precision)

    def logits(
        self,
        vectors: torch.Tensor,
        x: torch.Tensor,
        saved: Saved | None = None,
        present: torch.Tensor | None = None,
        key: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits (J, B, C)."""
        if self.image is not None:
            x = x.view(*x.shape[:2], *self.image)
        for layer in self.layers:
            if isinstance(layer, _Norm):
                layer.present = present
            x = layer.forward(vectors, x, saved)
        return x

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> None:
        """Write the gradient."""
        for layer in reversed(self.layers):
            delta = layer.backward(vectors, saved, delta, out)
            if layer.first:
                return


def stack(
    flat: FlatModel, sample: tuple[int, ...], dtype: torch.dtype = torch.float32, precision: str = "tf32"
) -> StackedNet:
    """Return the stacked form of a module for which :func:`stacking_obstacle` returns None."""
    # The layers written by hand have no bfloat16.
    layers = _layer_net(flat, sample) if precision != "bf16" and dtype == torch.float32 else None
    return layers or FunctionalNet(flat, sample, dtype, precision)


def stacking_obstacle(
    flat: FlatModel, sample: tuple[int, ...], dtype: torch.dtype = torch.float32, precision: str = "tf32"
) -> str | None:
    """Return why ``flat`` cannot be trained as a stack, and in which layer, or None if it can."""
    path: list[str] = []  # the layers that are being computed, the innermost last
    hooks = []
    for name, layer in flat.module.named_modules():
        label = f"{name} ({type(layer).__name__})"
        hooks.append(layer.register_forward_pre_hook(lambda *_, label=label: path.append(label)))
        hooks.append(layer.register_forward_hook(lambda *_: path.pop() and None))
    # Tried, because vmap fails only when it is used; the copies in the stack have the hooks, too.
    try:
        stack(flat, sample, dtype, precision)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        return f"in the layer {path[-1].lstrip()}: {reason}" if path else reason
    finally:
        for hook in hooks:
            hook.remove()
    return None


def _layer_net(flat: FlatModel, sample: tuple[int, ...]) -> LayerNet | None:
    specification = read_layers(flat, sample)
    if specification is None:
        return None
    builder = _Builder(flat.n_params)
    layers: list[_Layer] = []
    norms: list[tuple[dict[str, Slot], Norm]] = []
    fold: tuple[int, int, int] | None = None  # shape of the image that the last flattening turned into a vector
    for layer in specification:
        if isinstance(layer, Convolution):
            index = builder.index(layer.weight).permute(2, 3, 1, 0).reshape(-1, layer.weight.shape[0])
            weight = builder.add(layer.weight.name, F.pad(index, (0, 0, 0, -len(index) % 4), value=flat.n_params))
            bias = builder.add(layer.bias.name, builder.index(layer.bias))
            layers.append(_Convolution(layer, weight, bias))
        elif isinstance(layer, Dense):
            index = builder.index(layer.weight)
            if fold is not None:
                index = index.view(-1, *fold).permute(0, 2, 3, 1).reshape(index.shape)
                fold = None
            weight = builder.add(layer.weight.name, index)
            layers.append(_Dense(weight, builder.add(layer.bias.name, builder.index(layer.bias))))
        elif isinstance(layer, Norm):
            if fold is not None:  # its channels would be permuted
                return None
            norm = {part: builder.add(slot.name, builder.index(slot)) for part, slot in layer.parameters.items()}
            layers.append(_Norm(norm, layer))
            norms.append((norm, layer))
        elif isinstance(layer, MaxPool):
            layers.append(_Pool(layer.kernel))
        elif isinstance(layer, Relu):
            layers.append(_Relu())
        else:
            layers.append(_Flatten())
            fold = layer.image
    layers[0].first = True
    trainable = builder.size
    for norm, known in norms:  # after all parameters
        norm.update({part: builder.add(slot.name, builder.index(slot)) for part, slot in known.statistics.items()})
    image = (sample[1], sample[2], sample[0]) if isinstance(layers[0], _Convolution) else None
    return LayerNet(layers, flat.n_params, torch.cat(builder.order), trainable, image)


class _Builder:
    """Collects the net's own order, tensor by tensor; each tensor begins at a multiple of 4 elements."""

    def __init__(self, n_params: int) -> None:
        self.n_params = n_params
        self.order: list[torch.Tensor] = []
        self.size = 0

    @staticmethod
    def index(slot: Slot) -> torch.Tensor:
        """Return the flat positions of a tensor, in its shape."""
        return torch.arange(slot.offset, slot.offset + slot.numel).view(slot.shape)

    def add(self, name: str, index: torch.Tensor) -> Slot:
        """Append a tensor and return its place."""
        slot = Slot(name, self.size, tuple(index.shape))
        filled = F.pad(index.reshape(-1), (0, -index.numel() % 4), value=self.n_params)
        self.order.append(filled)
        self.size += len(filled)
        return slot
