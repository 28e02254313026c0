"""A model as one flat vector: parameters first, then floating-point buffers (running statistics), if any."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Slot:
    """Where one tensor of a module lives in the flat vector."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def of(self, vectors: torch.Tensor) -> torch.Tensor:
        """View this tensor in ``vectors``, (P,) or (M, P)."""
        part = vectors[..., self.offset : self.offset + self.numel]
        return part.view(*part.shape[:-1], *self.shape)


class FlatModel:
    """A module and the flat vector it is loaded from and stored to.

    The first ``n_trainable`` of ``n_params`` numbers are parameters, in the module's order; the rest are its
    floating-point buffers, which travel with the model but get no gradient.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.slots: list[Slot] = []
        offset = 0
        tensors: list[tuple[str, torch.Tensor]] = list(module.named_parameters())
        self.n_trainable = sum(p.numel() for _, p in tensors)
        tensors += [(name, b) for name, b in module.named_buffers() if b.is_floating_point()]
        for name, tensor in tensors:
            self.slots.append(Slot(name, offset, tuple(tensor.shape)))
            offset += tensor.numel()
        self.n_params = offset
        self._tensors = [tensor.data for _, tensor in tensors]  # .data, because autograd does not record copies into it

    @property
    def stateful(self) -> bool:
        """Whether the module has buffers, so that a forward pass in training changes it."""
        return next(self.module.buffers(), None) is not None

    def load(self, vector: torch.Tensor) -> nn.Module:
        """Copy ``vector`` (P,) into the module and return it."""
        for slot, tensor in zip(self.slots, self._tensors, strict=True):
            tensor.copy_(slot.of(vector))
        return self.module

    def store(self, vector: torch.Tensor) -> None:
        """Copy the module into ``vector`` (P,)."""
        for slot, tensor in zip(self.slots, self._tensors, strict=True):
            slot.of(vector).copy_(tensor)

    def vector(self) -> torch.Tensor:
        """Return the module as a new flat vector (P,)."""
        result = torch.empty(self.n_params, dtype=self._tensors[0].dtype)
        self.store(result)
        return result
