"""The layers that the fast backends know: read from a ``nn.Sequential``, computed for J models at once.

Dense layers and convolutions are written out as batched matrix products. Images are channels-last, so the product of
the unfolded patches with the kernels is the next layer's image, with no permutation in between. On a GPU, convolutions
are fused kernels instead; see :mod:`fedcohort.simulate.engine.fused`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from fedcohort.simulate.engine.flat import FlatModel, Slot

if TYPE_CHECKING:
    from fedcohort.simulate.engine.fused import FusedConvolution

Image = tuple[int, int, int]  # (channels, height, width)
Saved = list[Any]
_BUSY = 256  # independent pieces of a product that keep a large GPU busy


class Order:
    """A stack's own order of elements, filled tensor by tensor; each tensor begins at a multiple of 4 elements."""

    def __init__(self, n_params: int) -> None:
        self.n_params = n_params
        self.parts: list[torch.Tensor] = []
        self.size = 0
        self.folded: Image | None = None  # the image that the last flattening turned into a vector

    def add(self, slot: Slot, index: torch.Tensor | None = None) -> Slot:
        """Append a tensor, or the elements ``index`` of the flat vector, and return its place."""
        index = _positions(slot) if index is None else index
        place = Slot(slot.name, self.size, tuple(index.shape))
        self.parts.append(F.pad(index.reshape(-1), (0, -index.numel() % 4), value=self.n_params))
        self.size += len(self.parts[-1])
        return place


def _positions(slot: Slot) -> torch.Tensor:
    """Return where in the flat vector the elements of a tensor are, in its shape."""
    return torch.arange(slot.offset, slot.offset + slot.numel).view(slot.shape)


class Layer:
    """One layer of J models; its forward pass saves what its backward pass needs."""

    first = False  # whether this is the lowest layer with parameters, below which no derivative is needed

    def place(self, order: Order) -> None:
        """Give the layer's parameters their places in a stack; until then they are those in the flat vector."""

    def forward(self, vectors: torch.Tensor, x: torch.Tensor, saved: Saved | None) -> torch.Tensor:
        """Return the output for x (J or 1, B, ...)."""
        raise NotImplementedError(type(self).__name__)

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the parameters' gradient into ``out`` (J, Q), and return the derivative with respect to the input."""
        raise NotImplementedError(type(self).__name__)


class Dense(Layer):
    """Dense layer with bias; x (J or 1, B, inputs)."""

    def __init__(self, weight: Slot, bias: Slot) -> None:
        self.weight, self.bias = weight, bias  # (outputs, inputs), (outputs,)

    def place(self, order: Order) -> None:
        """Permute the weight if its inputs are an image, which is channels-last here."""
        index = _positions(self.weight)
        # An image was flattened channels-first when the module was written, and is flattened channels-last here.
        if order.folded is not None:
            index = index.view(-1, *order.folded).permute(0, 2, 3, 1).reshape(index.shape)
            order.folded = None
        self.weight, self.bias = order.add(self.weight, index), order.add(self.bias)

    def forward(self, vectors: torch.Tensor, x: torch.Tensor, saved: Saved | None) -> torch.Tensor:
        """Return (J, B, outputs)."""
        if saved is not None:
            saved.append(x)
        weight, bias = self.weight.of(vectors), self.bias.of(vectors).unsqueeze(1)
        return torch.baddbmm(bias, x.expand(len(vectors), -1, -1), weight.transpose(1, 2))

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the gradient."""
        torch.bmm(delta.transpose(1, 2), saved.pop(), out=self.weight.of(out))
        torch.sum(delta, 1, out=self.bias.of(out))
        return delta if self.first else torch.bmm(delta, self.weight.of(vectors))


# -- images (N, H, W, C) --------------------------------------------------------------------------------------------


def _patches(x: torch.Tensor, kernel: tuple[int, int], depth: int) -> torch.Tensor:
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


def _fold(spread: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Sum windows (N, high, wide, rows, columns, C) back onto the image (N, H, W, C) they were taken from."""
    n, high, wide, rows, columns, channels = spread.shape
    x = torch.zeros(n, height, width, channels, device=spread.device, dtype=spread.dtype)
    for row in range(rows):
        for column in range(columns):
            x[:, row : row + high, column : column + wide] += spread[:, :, :, row, column]
    return x


def _pool(x: torch.Tensor, kernel: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maximum of each window of ``x`` (N, H, W, C), and where it is, for :func:`_unpool`."""
    window = list(kernel)
    pooled, where = torch.ops.aten.max_pool2d_with_indices(x.permute(0, 3, 1, 2), window, window)
    return pooled.permute(0, 2, 3, 1), where


def _unpool(delta: torch.Tensor, where: torch.Tensor, x: torch.Tensor, kernel: tuple[int, int]) -> torch.Tensor:
    """Put each derivative where the maximum was; ``x`` is the input of :func:`_pool`."""
    window = list(kernel)
    back: torch.Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
        delta.permute(0, 3, 1, 2), x.permute(0, 3, 1, 2), window, window, [0, 0], [1, 1], False, where
    )
    return back.permute(0, 2, 3, 1)


class Relu(Layer):
    """ReLU in place."""

    def forward(self, vectors: torch.Tensor, x: torch.Tensor, saved: Saved | None) -> torch.Tensor:
        """Rectify x."""
        x = x.relu_()
        if saved is not None:
            saved.append(x)
        return x

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return the derivative where x was positive."""
        result: torch.Tensor = torch.ops.aten.threshold_backward(delta, saved.pop(), 0)
        return result


class Convolution(Layer):
    """Convolution of stride 1 with bias, and the pooling and ReLU that follow it; x (J or 1, B, H, W, C).

    Its weight in a stack is (kernel height x kernel width x inputs, rounded up; outputs): rows of patches start at
    aligned addresses, and the rows of zeros that pad them stay zero. By default it is a product with unfolded patches;
    on a GPU, it uses kernels that never store the patches.
    """

    def __init__(
        self, weight: Slot, bias: Slot, kernel: tuple[int, int], padding: tuple[int, int], image: Image
    ) -> None:
        self.weight, self.bias, self.kernel, self.padding = weight, bias, kernel, padding
        self.image = image  # of the input
        self.outputs = weight.shape[0]
        self.pool, self.relu = (1, 1), False
        self.fused: FusedConvolution | None = None

    def place(self, order: Order) -> None:
        """Turn the kernels into columns."""
        index = _positions(self.weight).permute(2, 3, 1, 0).reshape(-1, self.outputs)
        index = F.pad(index, (0, 0, 0, -len(index) % 4), value=order.n_params)
        self.weight, self.bias = order.add(self.weight, index), order.add(self.bias)

    def fuse(self, precision: str) -> None:
        """Use fused kernels from now on, if there are any for this shape."""
        from fedcohort.simulate.engine.fused import FusedConvolution, Shape  # loads a compiler

        channels, height, width = self.image
        shape = Shape(
            image=(height, width, channels),
            kernel=self.kernel,
            padding=self.padding,
            outputs=self.outputs,
            pool=self.pool,
            relu=self.relu,
            weight=self.weight.offset,
            depth=self.weight.shape[0],
        )
        # The kernels read a bias behind its weight, which place() guarantees.
        assert self.bias.offset == self.weight.offset + self.weight.numel
        if shape.fits:
            self.fused = FusedConvolution(shape, precision)

    def forward(self, vectors: torch.Tensor, x: torch.Tensor, saved: Saved | None) -> torch.Tensor:
        """Return (J, B, high, wide, outputs)."""
        if self.fused is not None:
            y, alive = self.fused.forward(vectors, x)
            if saved is not None:
                saved += [x, alive]
            return y
        above, beside = self.padding
        if above or beside:
            x = F.pad(x, (0, 0, beside, beside, above, above))
        models, batch, height, width, _ = x.shape
        windows = _patches(x.flatten(0, 1), self.kernel, self.weight.shape[0])
        high, wide = windows.shape[1:3]
        windows = windows.view(models, batch * high * wide, -1)
        if saved is not None:
            saved += [windows, (height, width)]
        j = len(vectors)
        y = torch.bmm(windows.expand(j, -1, -1), self.weight.of(vectors)).view(j * batch, high, wide, -1)
        # ReLU and max-pooling commute, and the bias is the same for a whole window. If pooling comes first, bias and
        # ReLU touch only a quarter of the numbers.
        if self.pool != (1, 1):
            pooled, where = _pool(y, self.pool)
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
        """Write the gradient."""
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
            images = _unpool(images, where, pooled, self.pool)
        (height, width), windows = saved.pop(), saved.pop()
        _, high, wide, outputs = images.shape
        flat = images.reshape(j, batch * high * wide, outputs)
        _pixel_product(windows, flat, batch, self.weight.of(out))
        if self.first:
            return delta
        depth = self.kernel[0] * self.kernel[1] * self.image[0]
        spread = torch.bmm(flat, self.weight.of(vectors)[:, :depth].transpose(1, 2))
        x = _fold(spread.view(j * batch, high, wide, *self.kernel, -1), height, width)
        x = x.view(j, batch, height, width, -1)
        above, beside = self.padding
        return x[:, :, above : height - above, beside : width - beside] if above or beside else x


def _pixel_product(windows: torch.Tensor, delta: torch.Tensor, batch: int, out: torch.Tensor) -> None:
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


class MaxPool(Layer):
    """Max-pooling that does not directly follow a convolution.

    Its windows do not overlap; rows and columns that fill no window are dropped.
    """

    def __init__(self, kernel: tuple[int, int]) -> None:
        self.kernel = kernel

    def forward(self, vectors: torch.Tensor, x: torch.Tensor, saved: Saved | None) -> torch.Tensor:
        """Return the maxima."""
        images = x.flatten(0, 1)
        pooled, where = _pool(images, self.kernel)
        if saved is not None:
            saved += [images, where]
        return pooled.reshape(*x.shape[:2], *pooled.shape[1:])

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return the derivative, which is 0 beside the maxima."""
        where, images = saved.pop(), saved.pop()
        back = _unpool(delta.flatten(0, 1), where, images, self.kernel)
        return back.reshape(*delta.shape[:2], *images.shape[1:])


class Norm(Layer):
    """Batch normalisation of x (J or 1, B, ..., C); in training, over the samples that are present.

    ``torch.nn.functional.batch_norm`` with J x C channels would do the same, except for padded batches. The general
    form in :mod:`~fedcohort.simulate.engine.layer_rules` takes several times as long in small layers.
    """

    def __init__(self, weight: Slot, bias: Slot, mean: Slot, variance: Slot, epsilon: float, momentum: float) -> None:
        self.weight, self.bias, self.mean, self.variance = weight, bias, mean, variance  # (C,) each
        self.epsilon, self.momentum = epsilon, momentum
        self.present: torch.Tensor | None = None  # (J, B) in the current training pass

    def place(self, order: Order) -> None:
        """Leave out the running statistics, which come after all parameters."""
        self.weight, self.bias = order.add(self.weight), order.add(self.bias)

    def place_statistics(self, order: Order) -> None:
        """Give the running statistics their places."""
        self.mean, self.variance = order.add(self.mean), order.add(self.variance)

    def forward(self, vectors: torch.Tensor, x: torch.Tensor, saved: Saved | None) -> torch.Tensor:
        """Normalise x, and in training update the running statistics."""
        inner = (1,) * (x.ndim - 2)  # samples and pixels
        mean, variance = self.mean.of(vectors), self.variance.of(vectors)
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
        weight, bias = (slot.of(vectors).view(models, *inner, -1) for slot in (self.weight, self.bias))
        return normal * weight + bias

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the gradient."""
        n, there, scale, normal = saved.pop(), saved.pop(), saved.pop(), saved.pop()
        over = tuple(range(1, delta.ndim - 1))
        shape = (len(delta), *(1,) * (delta.ndim - 2), -1)
        by_bias, by_weight = delta.sum(over), (delta * normal).sum(over)
        self.bias.of(out).copy_(by_bias)
        self.weight.of(out).copy_(by_weight)
        factor: torch.Tensor = scale * self.weight.of(vectors).view(shape)
        if there is None:
            return delta * factor
        # The statistics of a batch depend on each of its samples, and on no others.
        through = (by_bias / n).view(shape) + normal * (by_weight / n).view(shape)
        result: torch.Tensor = (delta - through) * factor * there
        return result


class Flatten(Layer):
    """Image to vector in channels-last order; the weight of the next dense layer is permuted to match."""

    def __init__(self, image: Image) -> None:
        self.image = image

    def place(self, order: Order) -> None:
        """Tell the next dense layer."""
        order.folded = self.image

    def forward(self, vectors: torch.Tensor, x: torch.Tensor, saved: Saved | None) -> torch.Tensor:
        """Return (J, B, features)."""
        if saved is not None:
            saved.append(x.shape)
        return x.flatten(2)

    def backward(self, vectors: torch.Tensor, saved: Saved, delta: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return an image again."""
        shape = saved.pop()
        return delta.view(delta.shape[0], *shape[1:])


def read_layers(flat: FlatModel, sample: tuple[int, ...]) -> list[Layer] | None:
    """Return the layers of a ``nn.Sequential`` of those above that ends with a dense layer; None for other modules.

    Flattening before any convolution is left out, because samples are stored flat. A layer may appear several times,
    unless it has weights.
    """
    # Any other module may do more between its layers than apply one after another.
    if not isinstance(flat.module, nn.Sequential):
        return None
    slots = {slot.name: slot for slot in flat.slots}
    layers: list[Layer] = []
    shape, folded = sample, False  # of the last layer's output: its shape, and whether it is a flattened image
    name: str
    layer: Any
    for name, layer in flat.module.named_modules(remove_duplicate=False):
        if not name or "." in name:
            continue  # the module itself, and what is inside its layers
        # A weight that is frozen, or was met before, is in no slot.
        own = [slots.get(f"{name}.{part}") for part in ("weight", "bias", "running_mean", "running_var")]
        weight, bias, mean, variance = own
        last = layers[-1] if layers else None
        is_image = len(shape) == 3
        # By its exact type: a subclass may compute something else.
        match type(layer):
            case nn.Flatten if (layer.start_dim, layer.end_dim) == (1, -1):
                if last is not None and is_image:
                    layers.append(Flatten((shape[0], shape[1], shape[2])))
                    folded = True
                shape = (math.prod(shape),)
            case nn.Linear if weight and bias and len(shape) == 1:
                layers.append(Dense(weight, bias))
                shape, folded = (weight.shape[0],), False
            case nn.Conv2d if weight and bias and is_image and _is_plain_convolution(layer):
                kernel, padding = _pair(layer.kernel_size), _pair(layer.padding)
                layers.append(Convolution(weight, bias, kernel, padding, (shape[0], shape[1], shape[2])))
                sides = zip(shape[1:], padding, kernel, strict=True)
                shape = (weight.shape[0], *(side + 2 * pad - window + 1 for side, pad, window in sides))
            # What follows changes its input in place, and the samples must not change.
            case nn.ReLU if isinstance(last, Convolution):  # done in the same pass over the image
                last.relu = True
            case nn.ReLU if last is not None:
                layers.append(Relu())
            case nn.BatchNorm1d | nn.BatchNorm2d if (
                weight and bias and mean and variance and layer.momentum is not None
            ):
                fits = type(layer) is (nn.BatchNorm2d if is_image else nn.BatchNorm1d)
                if last is None or not fits or folded:  # of a flattened image, the channels would be permuted
                    return None
                layers.append(Norm(weight, bias, mean, variance, layer.eps, float(layer.momentum)))
            case nn.MaxPool2d if last is not None and is_image and _is_plain_pool(layer):
                window = _pair(layer.kernel_size)
                if isinstance(last, Convolution) and last.pool == (
                    1,
                    1,
                ):  # pooled while its rows are still in the cache
                    last.pool = window
                else:
                    layers.append(MaxPool(window))
                shape = (shape[0], shape[1] // window[0], shape[2] // window[1])
            case _:
                return None
    return layers if layers and isinstance(layers[-1], Dense) else None


def _pair(value: Any) -> tuple[int, int]:
    return (value[0], value[1]) if isinstance(value, tuple) else (value, value)


def _is_plain_convolution(layer: nn.Conv2d) -> bool:
    return (
        _pair(layer.stride) == _pair(layer.dilation) == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def _is_plain_pool(layer: nn.MaxPool2d) -> bool:
    apart = _pair(layer.stride) == _pair(layer.kernel_size)
    return apart and _pair(layer.padding) == (0, 0) and _pair(layer.dilation) == (1, 1) and not layer.ceil_mode
