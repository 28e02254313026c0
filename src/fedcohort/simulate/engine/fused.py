"""Fuse a convolution, its bias, ReLU and max-pooling into one Triton kernel for all models of a stack (CUDA only).

Unfolded patches are many times the size of the images they come from, and writing and reading them takes longer than
multiplying them. Here each program gathers the patches of its own tile from the images, so only images, pooled and
rectified, ever pass through memory. The backward pass reads where the maxima were, instead of spreading the derivative
over the larger image. Triton comes with torch's CUDA builds; without it, this module can be imported but not used.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

try:
    import triton  # type: ignore[import-not-found,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    triton = tl = None

log = logging.getLogger(__name__)

# Pipelining only slows down loads that go through registers anyway, to be transposed or selected from.
_LAUNCH = {"num_stages": 1}
_TILE = 64  # most outputs of a program
_WIDEST = 64  # most outputs of a layer
_BUSY = 4224  # programs that keep a large GPU busy; each waits for its patches, so a unit needs many


def _jit(function: Callable[..., Any]) -> Any:
    # Lengths that vary from call to call: without this, there would be one compilation for each divisibility.
    return function if triton is None else triton.jit(function, do_not_specialize=["batch", "apart", "each"])


@_jit
def _larger(value, place, other, at):  # type: ignore[no-untyped-def]
    # The first of equals wins, NaN wins over all, as in torch.
    take = (other > value) | ((other == value) & (at < place)) | ((other != other) & (value == value))  # noqa: PLR0124
    return tl.where(take, other, value), tl.where(take, at, place)


@_jit
def _patch(  # type: ignore[no-untyped-def]
    corner,  # (rows) addresses of the first pixel of each row's window, which may lie in the padding
    y,
    x,  # (rows) where in the image that pixel is
    inside,  # (rows) whether there is such a row
    k,  # (columns) which numbers of a window
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    PADDED: tl.constexpr,
):
    r, s = k // C // S, k // C % S
    ok = inside[:, None] & (k < R * S * C)[None, :]
    if PADDED:
        iy, ix = y[:, None] + r[None, :], x[:, None] + s[None, :]
        ok = ok & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
    return tl.load(corner[:, None] + ((r * W + s) * C + k % C)[None, :], mask=ok, other=0.0)


@_jit
def _forward(  # type: ignore[no-untyped-def]
    x,  # (J or 1, batch, H, W, C)
    vectors,  # (J, Q)
    out,  # (J, batch, PH, PW, N)
    where,  # the same
    batch,
    apart,  # images between those of one model and the next: batch, or 0 when all see the same
    Q: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    ABOVE: tl.constexpr,
    BESIDE: tl.constexpr,
    PR: tl.constexpr,
    PC: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    N: tl.constexpr,
    RELU: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    P: tl.constexpr = PR * PC
    K: tl.constexpr = R * S * C
    model = tl.program_id(1).to(tl.int64)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    # Rows of the product: the places of a window side by side, so that pooling is a reduction over neighbours.
    row = tl.program_id(0) * BM * P + tl.arange(0, BM * P)
    pixel, place = row // P, row % P
    image, py, px = pixel // (PH * PW), pixel // PW % PH, pixel % PW
    inside = image < batch
    oy, ox = py * PR + place // PC - ABOVE, px * PC + place % PC - BESIDE
    x += model * apart * (H * W * C)
    x += image * (H * W * C) + (oy * W + ox) * C
    weight = vectors + model * Q + WEIGHT
    sums = tl.zeros((BM * P, BN), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        patch = _patch(x, oy, ox, inside, k, H, W, C, R, S, ABOVE + BESIDE > 0)
        kernel = tl.load(weight + k[:, None] * N + n[None, :], mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        sums = tl.dot(patch, kernel, sums, input_precision=PRECISION)
    if P == 1:
        best, at = sums, tl.zeros((BM, BN), tl.int32)
    else:
        places = tl.broadcast_to(tl.arange(0, P)[None, :, None], (BM, P, BN))
        best, at = tl.reduce((tl.reshape(sums, (BM, P, BN)), places), 1, _larger)
    best += tl.load(vectors + model * Q + BIAS + n, mask=n < N, other=0.0)[None, :]
    if RELU:
        at = tl.where(best <= 0, 255, at)  # no place in the window: nothing got through
        best = tl.where(best <= 0, 0.0, best)
    pixel = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = pixel < batch * (PH * PW)
    to = (model * batch * (PH * PW) + pixel)[:, None] * N + n[None, :]
    ok = inside[:, None] & (n < N)[None, :]
    tl.store(out + to, best, mask=ok)
    tl.store(where + to, at.to(tl.uint8), mask=ok)


@_jit
def _input_gradient(  # type: ignore[no-untyped-def]
    delta,  # (J, batch, PH, PW, N)
    where,  # the same
    vectors,  # (J, Q)
    out,  # (J, batch, H, W, C)
    batch,
    Q: tl.constexpr,
    WEIGHT: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    ABOVE: tl.constexpr,
    BESIDE: tl.constexpr,
    PR: tl.constexpr,
    PC: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
):
    PARTS: tl.constexpr = (N + BK - 1) // BK
    model = tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    pixel = tl.program_id(0) * BM + tl.arange(0, BM)
    image, iy, ix = pixel // (H * W), pixel // W % H, pixel % W
    inside = (image < batch)[:, None]
    start = (model * batch + image)[:, None] * (PH * PW * N)
    weight = vectors + model * Q + WEIGHT
    sums = tl.zeros((BM, BC), tl.float32)
    for step in range(R * S * PARTS):
        r, s = step // PARTS // S, step // PARTS % S
        n = step % PARTS * BK + tl.arange(0, BK)
        oy, ox = (iy + ABOVE - r)[:, None], (ix + BESIDE - s)[:, None]
        py, px = oy // PR, ox // PC
        ok = inside & (oy >= 0) & (ox >= 0) & (py < PH) & (px < PW) & (n < N)[None, :]
        at = start + (py * PW + px) * N + n[None, :]
        # Both are loaded whatever the other is, so that neither waits for the other.
        place = tl.load(where + at, mask=ok, other=255).to(tl.int32)
        part = tl.load(delta + at, mask=ok, other=0.0)
        part = tl.where(place == (oy - py * PR) * PC + (ox - px * PC), part, 0.0)
        at = ((r * S + s) * C + c)[None, :] * N + n[:, None]
        kernel = tl.load(weight + at, mask=(n < N)[:, None] & (c < C)[None, :], other=0.0)
        sums = tl.dot(part, kernel, sums, input_precision=PRECISION)
    to = (model * batch * (H * W) + pixel)[:, None] * C + c[None, :]
    tl.store(out + to, sums, mask=inside & (c < C)[None, :])


@_jit
def _weight_gradient(  # type: ignore[no-untyped-def]
    x,  # (J or 1, batch, H, W, C)
    delta,  # (J, batch, PH, PW, N)
    where,  # the same
    out,  # (J, parts, STRIDE), weight and bias one after the other
    batch,
    apart,
    each,  # images of a part
    STRIDE: tl.constexpr,
    DEPTH: tl.constexpr,  # K and what fills it up
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    ABOVE: tl.constexpr,
    BESIDE: tl.constexpr,
    PR: tl.constexpr,
    PC: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    TILES: tl.constexpr = (N + BN - 1) // BN
    first, part, model = tl.program_id(0) // TILES * BK, tl.program_id(2), tl.program_id(1).to(tl.int64)
    k = first + tl.arange(0, BK)
    n = tl.program_id(0) % TILES * BN + tl.arange(0, BN)
    x += model * apart * (H * W * C)
    delta += model * batch * (PH * PW * N)
    where += model * batch * (PH * PW * N)
    begin = part * each * (PH * PW)
    end = tl.minimum((part + 1) * each, batch) * (PH * PW)
    sums = tl.zeros((BK, BN), tl.float32)
    total = tl.zeros((BN,), tl.float32)
    for start in range(begin, end, BM):
        pixel = start + tl.arange(0, BM)
        image, oy, ox = pixel // (PH * PW), pixel // PW % PH * PR - ABOVE, pixel % PW * PC - BESIDE
        inside = pixel < end
        at, ok = pixel[:, None] * N + n[None, :], inside[:, None] & (n < N)[None, :]
        d = tl.load(delta + at, mask=ok, other=0.0)
        place = tl.load(where + at, mask=ok, other=255).to(tl.int32)
        corner = x + image * (H * W * C) + (oy * W + ox) * C
        for here in tl.static_range(PR * PC):
            below, beside = here // PC, here % PC
            at = corner + (below * W + beside) * C
            patch = _patch(at, oy + below, ox + beside, inside, k, H, W, C, R, S, ABOVE + BESIDE > 0)
            mine = tl.where(place == here, d, 0.0)
            sums = tl.dot(tl.trans(patch), mine, sums, input_precision=PRECISION)
        if first == 0:
            total += tl.sum(tl.where(place == 255, 0.0, d), 0)
    out += (model * tl.num_programs(2) + part) * STRIDE
    tl.store(out + k[:, None] * N + n[None, :], sums, mask=(k < DEPTH)[:, None] & (n < N)[None, :])
    if first == 0:
        tl.store(out + DEPTH * N + n, total, mask=n < N)


@dataclass(frozen=True)
class Shape:
    """The sizes for which a convolution's kernels are compiled."""

    image: tuple[int, int, int]  # (H, W, C) of the input
    kernel: tuple[int, int]
    padding: tuple[int, int]
    outputs: int
    pool: tuple[int, int]  # (1, 1) for none
    relu: bool
    weight: int  # where the weight (depth, outputs) begins in a vector; the bias follows it
    depth: int

    @property
    def result(self) -> tuple[int, int, int]:
        """Height, width and channels of the output."""
        high, wide = (
            (side + 2 * pad - window + 1) // pool
            for side, pad, window, pool in zip(self.image, self.padding, self.kernel, self.pool, strict=False)
        )
        return high, wide, self.outputs

    @property
    def fits(self) -> bool:
        """Whether these kernels support the shape and are faster for it.

        The number of pixels in a pooling window must be a power of two, and one tile must hold all outputs, so that
        each patch is gathered once. In wider layers, products take longer than patches, and the vendor's products are
        faster.
        """
        places = self.pool[0] * self.pool[1]
        return places <= 16 and places & (places - 1) == 0 and self.outputs <= _WIDEST


class FusedConvolution:
    """Convolution, pooling, bias and ReLU of J models, forward and backward.

    Parameters
    ----------
    shape : Shape
        All sizes.
    precision : str
        "tf32"; "tf32x3" for three products in place of one and nearly the accuracy of single precision; or "ieee".
    """

    def __init__(self, shape: Shape, precision: str) -> None:
        self.shape, self.precision = shape, precision
        height, width, channels = shape.image
        high, wide, outputs = shape.result
        self._sizes: dict[str, Any] = {"H": height, "W": width, "C": channels}
        self._sizes |= {"R": shape.kernel[0], "S": shape.kernel[1]}
        self._sizes |= {"ABOVE": shape.padding[0], "BESIDE": shape.padding[1]}
        self._sizes |= {"PR": shape.pool[0], "PC": shape.pool[1], "PH": high, "PW": wide, "N": outputs}
        self._sizes |= {"PRECISION": precision}
        # The fastest tiles for the layers of LeNet and of FedCor's network, with 30 to 300 models.
        places, tile = shape.pool[0] * shape.pool[1], _power(outputs, _TILE)
        rows = 256 if places > 1 and tile == _TILE else 128
        self._forward = {"BM": rows // places, "BN": tile, "BK": _power(shape.depth, 32), "num_warps": 4}
        self._input = {"BM": 128, "BC": _power(channels, 64), "BK": _power(outputs, 32), "num_warps": 4}
        edge, warps = (32, 2) if places > 1 else (64, 4)
        self._weight = {"BM": edge, "BN": tile, "BK": edge, "num_warps": warps}

    def forward(self, vectors: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output (J, B, PH, PW, N) for images x (J or 1, B, H, W, C), and what the backward passes need."""
        shape, tiles, models, batch = self.shape, self._forward, len(vectors), x.shape[1]
        # The kernels compute addresses from sizes alone, without strides.
        vectors = vectors.contiguous()
        out = torch.empty(models, batch, *shape.result, device=x.device)
        where = torch.empty(out.shape, dtype=torch.uint8, device=x.device)
        high, wide, outputs = shape.result
        grid = (-(-batch * high * wide // tiles["BM"]), models, -(-outputs // tiles["BN"]))
        _forward[grid](
            x.contiguous(),
            vectors,
            out,
            where,
            batch,
            0 if len(x) == 1 else batch,
            Q=vectors.stride(0),
            WEIGHT=shape.weight,
            BIAS=shape.weight + shape.depth * outputs,
            RELU=shape.relu,
            **self._sizes,
            **tiles,
            **_LAUNCH,
        )
        return out, where

    def backward(self, x: torch.Tensor, where: torch.Tensor, delta: torch.Tensor, out: torch.Tensor) -> None:
        """Write the gradient of weight and bias into ``out`` (J, Q), given that of the output (J, B, PH, PW, N)."""
        shape, tiles, models, batch = self.shape, self._weight, len(out), x.shape[1]
        size = (shape.depth + 1) * shape.outputs
        programs = -(-shape.depth // tiles["BK"]) * -(-shape.outputs // tiles["BN"])
        # A few models would leave units idle, so the sum over the images is cut into parts.
        parts = max(1, min(batch, _BUSY // (programs * models)))
        each = -(-batch // parts)
        parts = -(-batch // each)
        assert out.is_contiguous()
        gradient = out[:, shape.weight : shape.weight + size]
        result = gradient if parts == 1 else torch.empty(models, parts, size, device=x.device)
        _weight_gradient[(programs, models, parts)](
            x.contiguous(),
            delta.contiguous(),
            where,
            result,
            batch,
            0 if len(x) == 1 else batch,
            each,
            STRIDE=out.stride(0) if parts == 1 else size,
            DEPTH=shape.depth,
            **self._sizes,
            **tiles,
            **_LAUNCH,
        )
        if parts > 1:
            torch.sum(result, 1, out=gradient)

    def input_gradient(self, vectors: torch.Tensor, where: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Return the derivative with respect to the input (J, B, H, W, C)."""
        shape, tiles, vectors = self.shape, self._input, vectors.contiguous()
        models, batch = delta.shape[:2]
        height, width, channels = shape.image
        out = torch.empty(models, batch, height, width, channels, device=delta.device)
        grid = (-(-batch * height * width // tiles["BM"]), models, -(-channels // tiles["BC"]))
        _input_gradient[grid](
            delta.contiguous(),
            where,
            vectors,
            out,
            batch,
            Q=vectors.stride(0),
            WEIGHT=shape.weight,
            **self._sizes,
            **tiles,
            **_LAUNCH,
        )
        return out


def _power(size: int, most: int) -> int:
    """Return the power of two from 16 to ``most`` that covers ``size`` best."""
    return min(most, max(16, 1 << (size - 1).bit_length()))


@functools.cache
def usable(device: int, precision: str) -> bool:
    """Return whether these kernels compile for a CUDA device and agree with torch's operators."""
    # Older devices have no TF32, for which the tiles were chosen.
    if triton is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        with torch.cuda.device(device):
            _check(precision)
    except Exception as error:  # a compiler may raise anything, and there is another way to compute the same
        log.info("convolutional networks are computed without fused kernels: %s", error)
        return False
    return True


def _check(precision: str) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).bfloat16().float()  # exact in TF32

    # Sides that differ and do not fill the tiles, with padding and pooling: whatever is confused shows.
    fused = FusedConvolution(Shape((9, 10, 4), (3, 3), (1, 1), 8, (2, 2), True, 0, 36), precision)
    vectors, x, delta = draw(2, 37 * 8), draw(2, 3, 9, 10, 4), draw(2, 3, 4, 5, 8)
    y, where = fused.forward(vectors, x)
    gradient = torch.empty_like(vectors)
    fused.backward(x, where, delta, gradient)
    below = fused.input_gradient(vectors, where, delta)
    for model in range(2):
        leaves = [x[model].permute(0, 3, 1, 2), vectors[model, :288].view(3, 3, 4, 8).permute(3, 2, 0, 1)]
        leaves = [leaf.detach().clone().requires_grad_() for leaf in (*leaves, vectors[model, 288:])]
        with torch.enable_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            want = torch.nn.functional.conv2d(leaves[0], leaves[1], leaves[2], padding=1)
            want = torch.nn.functional.max_pool2d(want, 2).relu()
            found = torch.autograd.grad(want, leaves, delta[model].permute(0, 3, 1, 2))
        pairs = [(y[model], want.permute(0, 2, 3, 1)), (below[model], found[0].permute(0, 2, 3, 1))]
        pairs += [(gradient[model, :288], found[1].permute(2, 3, 1, 0).reshape(-1)), (gradient[model, 288:], found[2])]
        if not all(torch.allclose(ours, expected, rtol=1e-3, atol=1e-3) for ours, expected in pairs):
            raise RuntimeError("the fused kernels disagree with torch's operators")
