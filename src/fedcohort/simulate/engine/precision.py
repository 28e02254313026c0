"""How precisely to compute: full single precision, TF32 in CUDA's matrix products, or bfloat16."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Let torch compute a forward pass, and the backward pass of it, in ``precision`` ("single", "tf32" or "bf16").

    Weights, updates and averages stay in single precision: with the 8 bits of bfloat16, small steps would be lost.
    """
    if precision != "bf16":
        return contextlib.nullcontext()
    # Without its cache, which keeps the weights of the step before when they are changed in place.
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


@contextlib.contextmanager
def products(precision: str, device: torch.device) -> Iterator[None]:
    """Let CUDA's matrix products round their factors to TF32, unless ``precision`` is "single"."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "single"
    try:
        with torch.cuda.device(device):  # kernels compiled here go to the current device
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
