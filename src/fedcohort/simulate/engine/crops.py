"""Crop and mirror images with a table of where each pixel comes from, which all backends read."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from fedcohort.core.errors import InputError
from fedcohort.training.local import CROPS, PADDING


@functools.lru_cache(maxsize=8)
def crop_table(sample: tuple[int, ...]) -> torch.Tensor:
    """Return, for each crop of :func:`~fedcohort.training.local.crop_plan`, where each feature comes from.

    The shape is (CROPS, F). The number F, one beyond the last feature, stands for the zeros around the image.
    """
    if len(sample) != 3:
        raise InputError(
            f"Augmentation crops and mirrors images, but the samples are of shape {sample}.",
            hint="leave 'augment' of the local training at false, or give images as (n, H, W) or (n, H, W, C)",
        )
    channels, height, width = sample
    moves = torch.arange(2 * PADDING + 1)[:, None] - PADDING
    y, x = torch.arange(height) + moves, torch.arange(width) + moves
    x = torch.stack([x, x.flip(1)])  # (mirrored, right, W)
    y, x = y[None, :, None, None, :, None], x[:, None, :, None, None, :]
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    place = (torch.arange(channels)[:, None, None] * height + y) * width + x
    return torch.where(inside, place, channels * height * width).reshape(CROPS, -1)


def crop(x: torch.Tensor, table: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Crop and mirror each of the samples x (n, F) with its crop ``which`` (n,)."""
    return F.pad(x, (0, 1)).gather(1, table[which])  # the zero after the features is what lies outside the image
