"""Many networks computed at once, with a leading axis of models: J parameter vectors, J batches, one program.

A :class:`StackedNet` computes logits and, from the derivative with respect to the logits, all J models' gradients. A
stack of known layers is computed by the layers themselves; see :mod:`fedcohort.simulate.engine.layers`. All other
modules go through ``torch.func``; see :mod:`fedcohort.simulate.engine.layer_rules`.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.layer_rules import LayerRules, prepare_for_stack
from fedcohort.simulate.engine.layers import Convolution, Layer, Norm, Order, Saved, read_layers
from fedcohort.simulate.engine.modules import draws_random_numbers
from fedcohort.simulate.engine.precision import autocast
from fedcohort.simulate.own_code import own_code


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
        # Tried on the original, because the copy computes some layers by our rules.
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


class LayerNet(StackedNet):
    """A ``nn.Sequential`` of the layers that :func:`read_layers` knows, computed by them."""

    def __init__(self, layers: list[Layer], n_params: int, sample: tuple[int, ...]) -> None:
        order = Order(n_params)
        for layer in layers:
            layer.place(order)
        self.trainable = order.size
        for layer in layers:
            if isinstance(layer, Norm):
                layer.place_statistics(order)
        layers[0].first = True
        self.layers, self.n_params, self.order = layers, n_params, torch.cat(order.parts)
        self.image: tuple[int, ...] | None = None  # (H, W, C) of the input if the lowest layer is a convolution
        if isinstance(layers[0], Convolution):
            channels, height, width = sample
            self.image = height, width, channels
            self.features = torch.arange(math.prod(sample)).view(sample).permute(1, 2, 0).reshape(-1)

    def fuse(self, precision: str) -> None:
        """Let convolutions use fused kernels of this precision, if there are any for their shape."""
        for layer in self.layers:
            if isinstance(layer, Convolution):
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
            if isinstance(layer, Norm):
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
    layers = read_layers(flat, sample) if precision != "bf16" and dtype == torch.float32 else None
    if layers is None:
        return FunctionalNet(flat, sample, dtype, precision)
    return LayerNet(layers, flat.n_params, sample)


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
