"""What convolutional networks do between matrix products, for channels-last images (N, H, W, C)."""

from __future__ import annotations

import torch


def patches(x: torch.Tensor, kernel: tuple[int, int], depth: int) -> torch.Tensor:
    """Return every window of ``x`` (N, H, W, C) as a row, (N, high, wide, depth), padded with zeros."""
    rows, columns = kernel
    n, height, width, channels = x.shape
    high, wide = height - rows + 1, width - columns + 1
    s = x.stride()
    # A view of all windows without a copy; a single copy then stores them as rows.
    window = x.as_strided((n, high, wide, rows, columns, channels), (*s[:3], s[1], s[2], s[3]))
    out = torch.empty(n, high, wide, depth, dtype=x.dtype, device=x.device)
    used = rows * columns * channels
    out[..., :used].view(window.shape).copy_(window)
    if depth > used:
        out[..., used:].zero_()
    return out


def fold(spread: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Sum windows (N, high, wide, rows, columns, C) back onto the image (N, H, W, C) they were taken from."""
    n, high, wide, rows, columns, channels = spread.shape
    x = torch.zeros(n, height, width, channels, device=spread.device, dtype=spread.dtype)
    for row in range(rows):
        for column in range(columns):
            x[:, row : row + high, column : column + wide] += spread[:, :, :, row, column]
    return x


def pool(x: torch.Tensor, kernel: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maximum of each window of ``x`` (N, H, W, C), and where it is, for :func:`unpool`."""
    window = list(kernel)
    pooled, where = torch.ops.aten.max_pool2d_with_indices(x.permute(0, 3, 1, 2), window, window)
    return pooled.permute(0, 2, 3, 1), where


def unpool(delta: torch.Tensor, where: torch.Tensor, x: torch.Tensor, kernel: tuple[int, int]) -> torch.Tensor:
    """Put each derivative where the maximum was; ``x`` is the input of :func:`pool`."""
    window = list(kernel)
    back: torch.Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
        delta.permute(0, 3, 1, 2), x.permute(0, 3, 1, 2), window, window, [0, 0], [1, 1], False, where
    )
    return back.permute(0, 2, 3, 1)
