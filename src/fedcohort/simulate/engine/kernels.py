"""What convolutional networks do between their matrix products, for channels-last images (N, H, W, C).

:class:`TorchKernels` is made of torch's own operators and runs everywhere. On CUDA these move several times the memory
they need to, which then costs more than the products themselves; :class:`CudaKernels` does the same in one pass each.
Its source is compiled when it is first used, by torch's run-time compiler (which wants a CUDA toolkit's headers), is
checked against torch's operators, and is left aside where any of that fails.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

log = logging.getLogger(__name__)

_aten = torch.ops.aten


class TorchKernels:
    """The operations, in torch."""

    def patches(self, x: torch.Tensor, kernel: tuple[int, int], depth: int) -> torch.Tensor:
        """Return every window of ``x`` (N, H, W, C) as a row, (N, high, wide, depth), filled up with zeros."""
        rows, columns = kernel
        n, height, width, channels = x.shape
        high, wide = height - rows + 1, width - columns + 1
        s = x.stride()
        window = x.as_strided((n, high, wide, rows, columns, channels), (*s[:3], s[1], s[2], s[3]))
        out = torch.empty(n, high, wide, depth, dtype=x.dtype, device=x.device)
        used = rows * columns * channels
        out[..., :used].view(window.shape).copy_(window)
        if depth > used:
            out[..., used:].zero_()
        return out

    def fold(self, spread: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Sum windows (N, high, wide, rows, columns, C) back onto the image (N, H, W, C) they were taken from."""
        n, high, wide, rows, columns, channels = spread.shape
        x = torch.zeros(n, height, width, channels, device=spread.device, dtype=spread.dtype)
        for row in range(rows):
            for column in range(columns):
                x[:, row : row + high, column : column + wide] += spread[:, :, :, row, column]
        return x

    def pool(self, x: torch.Tensor, kernel: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the maximum of each window of ``x`` (N, H, W, C), and where it is, for :meth:`unpool`."""
        window = list(kernel)
        pooled, where = _aten.max_pool2d_with_indices(x.permute(0, 3, 1, 2), window, window)
        return pooled.permute(0, 2, 3, 1), where

    def unpool(
        self, delta: torch.Tensor, where: torch.Tensor, x: torch.Tensor, kernel: tuple[int, int]
    ) -> torch.Tensor:
        """Put each derivative where the maximum was; ``x`` is what was pooled."""
        window = list(kernel)
        back: torch.Tensor = _aten.max_pool2d_with_indices_backward(
            delta.permute(0, 3, 1, 2), x.permute(0, 3, 1, 2), window, window, [0, 0], [1, 1], False, where
        )
        return back.permute(0, 2, 3, 1)


_SOURCE = r"""
extern "C" __global__ void patches(const float* x, float* out, int n, int height, int width, int channels,
                                   int rows, int columns, int depth) {
    // One warp for each window; a row of it is a run of columns * channels numbers of the image.
    const int high = height - rows + 1, wide = width - columns + 1, run = columns * channels;
    const long long windows = (long long)n * high * wide;
    const long long stride = (long long)gridDim.x * blockDim.y;
    for (long long p = (long long)blockIdx.x * blockDim.y + threadIdx.y; p < windows; p += stride) {
        const int ox = (int)(p % wide), oy = (int)(p / wide % high);
        const long long image = p / wide / high;
        const float* from = x + ((image * height + oy) * width + ox) * channels;
        float* to = out + p * depth;
        if (channels % 4 == 0 && depth % 4 == 0) {
            for (int k = 4 * threadIdx.x; k < depth; k += 4 * blockDim.x) {
                const int row = k / run;
                float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
                if (row < rows) value = *(const float4*)(from + (long long)row * width * channels + (k - row * run));
                *(float4*)(to + k) = value;
            }
        } else {
            for (int k = threadIdx.x; k < depth; k += blockDim.x) {
                const int row = k / run;
                to[k] = row < rows ? from[(long long)row * width * channels + (k - row * run)] : 0.f;
            }
        }
    }
}

extern "C" __global__ void fold(const float* spread, float* x, int n, int height, int width, int channels,
                                int rows, int columns) {
    // One thread for each number of the image (four where channels allow): the sum of all windows it is in.
    const int high = height - rows + 1, wide = width - columns + 1;
    const int step = channels % 4 == 0 ? 4 : 1, groups = channels / step;
    const long long total = (long long)n * height * width * groups;
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += stride) {
        const int c = (int)(i % groups) * step, ix = (int)(i / groups % width), iy = (int)(i / groups / width % height);
        const long long image = i / groups / width / height;
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int r = 0; r < rows; ++r) {
            const int oy = iy - r;
            if (oy < 0 || oy >= high) continue;
            for (int s = 0; s < columns; ++s) {
                const int ox = ix - s;
                if (ox < 0 || ox >= wide) continue;
                const long long window = (image * high + oy) * wide + ox;
                const float* from = spread + ((window * rows + r) * columns + s) * channels + c;
                if (step == 4) {
                    const float4 value = *(const float4*)from;
                    sum.x += value.x; sum.y += value.y; sum.z += value.z; sum.w += value.w;
                } else sum.x += *from;
            }
        }
        float* to = x + ((image * height + iy) * width + ix) * channels + c;
        if (step == 4) *(float4*)to = sum; else *to = sum.x;
    }
}

extern "C" __global__ void pool(const float* x, float* out, unsigned char* where, int n, int height, int width,
                                int channels, int rows, int columns) {
    // One thread for each maximum (four where channels allow); the first of equals wins, NaN wins over all.
    const int high = height / rows, wide = width / columns;
    const int step = channels % 4 == 0 ? 4 : 1, groups = channels / step;
    const long long total = (long long)n * high * wide * groups;
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += stride) {
        const int c = (int)(i % groups) * step, ox = (int)(i / groups % wide), oy = (int)(i / groups / wide % high);
        const long long image = i / groups / wide / high;
        const long long corner = (image * height + (long long)oy * rows) * width + (long long)ox * columns;
        const float* from = x + corner * channels + c;
        const long long at = ((image * high + oy) * wide + ox) * channels + c;
        float best[4]; unsigned char place[4];
        for (int r = 0; r < rows; ++r) for (int s = 0; s < columns; ++s) {
            const float* here = from + ((long long)r * width + s) * channels;
            float value[4];
            if (step == 4) {
                const float4 four = *(const float4*)here;
                value[0] = four.x; value[1] = four.y; value[2] = four.z; value[3] = four.w;
            } else value[0] = *here;
            for (int q = 0; q < 4; ++q) {
                if (q >= step) break;
                if ((r == 0 && s == 0) || value[q] > best[q] || value[q] != value[q]) {
                    best[q] = value[q]; place[q] = (unsigned char)(r * columns + s);
                }
            }
        }
        if (step == 4) {
            *(float4*)(out + at) = make_float4(best[0], best[1], best[2], best[3]);
            *(uchar4*)(where + at) = make_uchar4(place[0], place[1], place[2], place[3]);
        } else { out[at] = best[0]; where[at] = place[0]; }
    }
}

extern "C" __global__ void unpool(const float* delta, const unsigned char* where, float* out, int n, int height,
                                  int width, int channels, int rows, int columns) {
    // One thread for each number of the image (four where channels allow), every one of which is written.
    const int high = height / rows, wide = width / columns;
    const int step = channels % 4 == 0 ? 4 : 1, groups = channels / step;
    const long long total = (long long)n * height * width * groups;
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += stride) {
        const int c = (int)(i % groups) * step, ix = (int)(i / groups % width), iy = (int)(i / groups / width % height);
        const long long image = i / groups / width / height;
        const int oy = iy / rows, ox = ix / columns;
        float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
        if (oy < high && ox < wide) {
            const int place = (iy - oy * rows) * columns + (ix - ox * columns);
            const long long at = ((image * high + oy) * wide + ox) * channels + c;
            if (step == 4) {
                const uchar4 mine = *(const uchar4*)(where + at);
                const float4 four = *(const float4*)(delta + at);
                value.x = mine.x == place ? four.x : 0.f; value.y = mine.y == place ? four.y : 0.f;
                value.z = mine.z == place ? four.z : 0.f; value.w = mine.w == place ? four.w : 0.f;
            } else value.x = where[at] == place ? delta[at] : 0.f;
        }
        float* to = out + ((image * height + iy) * width + ix) * channels + c;
        if (step == 4) *(float4*)to = value; else *to = value.x;
    }
}
"""

_BLOCKS = 132 * 32  # enough to fill a large GPU; what is left over the threads loop


class CudaKernels(TorchKernels):
    """The operations, one pass over the memory each."""

    def __init__(self) -> None:
        compile_kernel: Any = torch.cuda._compile_kernel  # absent in older versions of torch
        self._kernels = {name: compile_kernel(_SOURCE, name) for name in ("patches", "fold", "pool", "unpool")}

    def _launch(self, name: str, work: int, args: list[torch.Tensor | int]) -> None:
        self._kernels[name](grid=(max(1, min(-(-work // 256), _BLOCKS)), 1, 1), block=(256, 1, 1), args=args)

    def patches(self, x: torch.Tensor, kernel: tuple[int, int], depth: int) -> torch.Tensor:
        """Return every window of ``x`` as a row, filled up with zeros."""
        x = x.contiguous()
        n, height, width, channels = x.shape
        high, wide = height - kernel[0] + 1, width - kernel[1] + 1
        out = torch.empty(n, high, wide, depth, device=x.device)
        grid = max(1, min(-(-n * high * wide // 8), _BLOCKS))
        args = [x, out, n, height, width, channels, *kernel, depth]
        self._kernels["patches"](grid=(grid, 1, 1), block=(32, 8, 1), args=args)
        return out

    def fold(self, spread: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Sum windows back onto the image they were taken from."""
        n, _, _, rows, columns, channels = spread.shape
        out = torch.empty(n, height, width, channels, device=spread.device)
        step = 4 if channels % 4 == 0 else 1
        args: list[torch.Tensor | int] = [spread.contiguous(), out, n, height, width, channels, rows, columns]
        self._launch("fold", out.numel() // step, args)
        return out

    def pool(self, x: torch.Tensor, kernel: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the maximum of each window, and which of its numbers it is."""
        if kernel[0] * kernel[1] > 256:
            return super().pool(x, kernel)
        x = x.contiguous()
        n, height, width, channels = x.shape
        out = torch.empty(n, height // kernel[0], width // kernel[1], channels, device=x.device)
        where = torch.empty(out.shape, dtype=torch.uint8, device=x.device)
        step = 4 if channels % 4 == 0 else 1
        self._launch("pool", out.numel() // step, [x, out, where, n, height, width, channels, *kernel])
        return out, where

    def unpool(
        self, delta: torch.Tensor, where: torch.Tensor, x: torch.Tensor, kernel: tuple[int, int]
    ) -> torch.Tensor:
        """Put each derivative where the maximum was."""
        if where.dtype != torch.uint8:
            return super().unpool(delta, where, x, kernel)
        n, height, width, channels = x.shape
        out = torch.empty(n, height, width, channels, device=x.device)
        step = 4 if channels % 4 == 0 else 1
        args: list[torch.Tensor | int] = [delta.contiguous(), where, out, n, height, width, channels, *kernel]
        self._launch("unpool", out.numel() // step, args)
        return out


@functools.cache
def cuda_kernels(device: int) -> TorchKernels:
    """Return the fast kernels for a CUDA device when they compile and agree with torch's operators, else those."""
    plain = TorchKernels()
    try:
        with torch.cuda.device(device):
            fast = CudaKernels()
            for channels in (3, 8):
                x = torch.randn(2, 9, 10, channels, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
                x[0, :2] = 0.5  # equal numbers: the first must win
                pairs = [(fast.patches(x, (3, 2), 48), plain.patches(x, (3, 2), 48))]
                spread = pairs[0][1][..., : 6 * channels].reshape(2, 7, 9, 3, 2, channels)
                pairs.append((fast.fold(spread, 9, 10), plain.fold(spread, 9, 10)))
                (mine, at), (theirs, where) = fast.pool(x, (2, 2)), plain.pool(x, (2, 2))
                pairs += [(mine, theirs), (fast.unpool(mine, at, x, (2, 2)), plain.unpool(theirs, where, x, (2, 2)))]
                if not all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs):
                    raise RuntimeError("the compiled kernels disagree with torch's operators")
    except Exception as error:
        log.info("convolutional networks use torch's own operators between products: %s", error)
        return plain
    return fast
