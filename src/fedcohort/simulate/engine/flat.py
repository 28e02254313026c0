"""A model as one flat vector: what is trained first, then its buffers (running statistics), if any."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from fedcohort.core.errors import InputError


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
        return part.view(part.shape[:-1] + self.shape)


class FlatModel:
    """A module and the flat vectors it is loaded from and stored to.

    The first ``n_trainable`` of ``n_params`` numbers are the parameters that are trained, in the module's order. The
    rest are its buffers, which travel with the model but get no gradient. Frozen parameters (``requires_grad`` False)
    stay in the module: they are neither stored for each client, nor sent, nor averaged.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not trained or len({(p.dtype, p.device) for _, p in trained}) > 1:
            raise InputError(
                f"The model {type(module).__name__} must have parameters to train, all of one type and on one device.",
                hint="parameters with requires_grad=False are frozen",
            )
        buffers = [(name, buffer) for name, buffer in module.named_buffers() if _travels(module, name, buffer)]
        self.slots: list[Slot] = []
        self.n_trainable = sum(p.numel() for _, p in trained)
        self.n_params = 0
        for name, tensor in (*trained, *buffers):
            self.slots.append(Slot(name, self.n_params, tuple(tensor.shape)))
            self.n_params += tensor.numel()
        self.parameters = [p for _, p in trained]
        self._owners = [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name, _ in buffers]

    @property
    def _tensors(self) -> list[torch.Tensor]:
        # Buffers are looked up by name, because a module may put a new tensor in the place of an old one.
        return [*self.parameters, *(getattr(owner, name) for owner, name in self._owners)]

    @torch.no_grad()
    def load(self, vector: torch.Tensor) -> nn.Module:
        """Copy ``vector`` (P,) into the module and return it."""
        for slot, tensor in zip(self.slots, self._tensors, strict=True):
            tensor.copy_(_as_dtype(slot.of(vector), tensor.dtype))
        return self.module

    @torch.no_grad()
    def store(self, vector: torch.Tensor) -> None:
        """Copy the module into ``vector`` (P,)."""
        for slot, tensor in zip(self.slots, self._tensors, strict=True):
            slot.of(vector).copy_(tensor)

    def vector(self) -> torch.Tensor:
        """Return the module as a new flat vector (P,)."""
        result = torch.empty(self.n_params, dtype=self.parameters[0].dtype, device=self.parameters[0].device)
        self.store(result)
        return result

    def split(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the trained parts of a vector (P,) in the shapes of :attr:`parameters`."""
        return [slot.of(vector) for slot in self.slots[: len(self.parameters)]]

    def tensors(self, weights: torch.Tensor, state: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the module's tensors by name, as ``torch.func.functional_call`` takes them.

        Parameters
        ----------
        weights, state : (n_trainable,) and (n_params - n_trainable,) tensors
            The two parts of a vector. The result shares their memory, except for buffers of integers.
        """
        result = {}
        for slot, tensor in zip(self.slots, self._tensors, strict=True):
            if slot.offset < self.n_trainable:
                result[slot.name] = slot.of(weights)
            else:
                part = Slot(slot.name, slot.offset - self.n_trainable, slot.shape).of(state)
                result[slot.name] = _as_dtype(part, tensor.dtype)
        return result


def _travels(module: nn.Module, name: str, buffer: torch.Tensor) -> bool:
    """Whether a buffer is part of the vector: not if it is a mask, or a count that changes no result."""
    if buffer.dtype == torch.bool or not buffer.numel():
        return False
    owner = module.get_submodule(name.rpartition(".")[0])
    # Batch normalisation counts its batches, but only with momentum None does the count matter.
    counted = isinstance(owner, nn.modules.batchnorm._NormBase) and name.endswith("num_batches_tracked")
    return not counted or getattr(owner, "momentum", 0) is None


def _as_dtype(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # An average of equal whole numbers may be a little below them.
    return part.to(dtype) if dtype.is_floating_point else part.round().to(dtype)
