"""Convolutional networks on the CPU: one client after the other, written out by hand, no autograd and no optimiser.

On a CPU batching the convolutions of several models gains nothing, but much is lost around them. Here the first layer
is computed on 2x2 blocks of pixels where that helps: a 5x5 convolution of 3 channels followed by 2x2 pooling keeps the
vector units a quarter busy; as a 3x3 convolution of 12 channels (the pixels of a block) to 4 x as many outputs (the
positions inside a pooling window) it is the same numbers at more than twice the speed, and pooling becomes a maximum
over a leading axis. The blocks cost nothing, since the data is stored that way. Everything else is channels-last.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
import torch.nn.functional as F

from fedcohort.arrays import IntArray
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.groups import TrainTask
from fedcohort.simulate.engine.layers import Convolution, Dense, Flatten, Layer, Pool, Relu
from fedcohort.simulate.engine.losses import logit_derivative, sample_losses
from fedcohort.simulate.engine.program import Program
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.local import LocalTraining

_aten = torch.ops.aten
_EVALUATION_BATCH = 100  # samples of one forward pass: what stays in the cache


class _Step:
    """One stage of the network; it keeps what its backward pass needs until the next forward pass."""

    def forward(self, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(type(self).__name__)

    def backward(
        self, vector: torch.Tensor, delta: torch.Tensor, gradient: torch.Tensor, below: bool
    ) -> torch.Tensor | None:
        """Write the gradient's part of this stage; return the derivative by its input if ``below`` needs it."""
        raise NotImplementedError(type(self).__name__)


class _DenseStep(_Step):
    def __init__(self, layer: Dense) -> None:
        self.layer = layer

    def forward(self, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.x = x
        return torch.addmm(self.layer.bias.of(vector), x, self.layer.weight.of(vector).t())

    def backward(
        self, vector: torch.Tensor, delta: torch.Tensor, gradient: torch.Tensor, below: bool
    ) -> torch.Tensor | None:
        torch.mm(delta.t(), self.x, out=self.layer.weight.of(gradient))
        torch.sum(delta, 0, out=self.layer.bias.of(gradient))
        return torch.mm(delta, self.layer.weight.of(vector)) if below else None


class _ReluStep(_Step):
    def forward(self, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.y = x.relu_()
        return self.y

    def backward(
        self, vector: torch.Tensor, delta: torch.Tensor, gradient: torch.Tensor, below: bool
    ) -> torch.Tensor | None:
        result: torch.Tensor = _aten.threshold_backward(delta, self.y, 0)
        return result


class _PoolStep(_Step):
    def __init__(self, layer: Pool) -> None:
        self.kernel = list(layer.kernel)

    def forward(self, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.x = x
        pooled, self.where = _aten.max_pool2d_with_indices(x, self.kernel, self.kernel)
        result: torch.Tensor = pooled
        return result

    def backward(
        self, vector: torch.Tensor, delta: torch.Tensor, gradient: torch.Tensor, below: bool
    ) -> torch.Tensor | None:
        result: torch.Tensor = _aten.max_pool2d_with_indices_backward(
            delta, self.x, self.kernel, self.kernel, [0, 0], [1, 1], False, self.where
        )
        return result


class _FlattenStep(_Step):
    def __init__(self, layer: Flatten) -> None:
        self.image = layer.image

    def forward(self, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(len(x), -1)

    def backward(
        self, vector: torch.Tensor, delta: torch.Tensor, gradient: torch.Tensor, below: bool
    ) -> torch.Tensor | None:
        return delta.view(len(delta), *self.image).contiguous(memory_format=torch.channels_last)


class _ConvolutionStep(_Step):
    """Convolution, channels-last."""

    def __init__(self, layer: Convolution) -> None:
        self.layer = layer
        # With few input channels the library is faster the other way round where it computes their derivative.
        self.narrow = layer.image[0] < 16

    def forward(self, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.x = x.contiguous(memory_format=torch.channels_last)
        weight = self.layer.weight.of(vector)
        return F.conv2d(self.x, weight, self.layer.bias.of(vector), padding=self.layer.padding)

    def backward(
        self, vector: torch.Tensor, delta: torch.Tensor, gradient: torch.Tensor, below: bool
    ) -> torch.Tensor | None:
        weight = self.layer.weight.of(vector)
        apart = below and self.narrow
        back, by_weight, _ = self._backward(delta, self.x, weight, below and not apart, True)
        self.layer.weight.of(gradient).copy_(by_weight)
        torch.sum(delta, (0, 2, 3), out=self.layer.bias.of(gradient))
        if apart:
            back, _, _ = self._backward(delta.contiguous(), self.x.contiguous(), weight, True, False)
        result: torch.Tensor | None = back
        return result

    def _backward(
        self, delta: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, by_input: bool, by_weight: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _aten.convolution_backward(
            delta,
            x,
            weight,
            None,
            [1, 1],
            list(self.layer.padding),
            [1, 1],
            False,
            [0, 0],
            1,
            [by_input, by_weight, False],
        )
        return result


class _BlockStep(_Step):
    """First convolution, 2x2 pooling and ReLU together, on an image stored as 2x2 blocks of pixels.

    With s = 2, output (2i + a, 2j + b) of kernel o is the sum over blocks (i + m, j + n), pixels (c, d) of a block and
    channels of W[o, :, 2m + c - a, 2n + d - b] times the pixel, where that index exists: a convolution of the blocks
    whose outputs are numbered by (a, b, o).
    """

    def __init__(self, layer: Convolution) -> None:
        channels, height, width = layer.image
        outputs = layer.result[0]
        rows, columns = layer.kernel
        self.layer = layer
        self.image = (4 * channels, height // 2, width // 2)
        high, wide = (rows + 1) // 2, (columns + 1) // 2
        self.shape = (4 * outputs, 4 * channels, high, wide)
        # Where each element of the block kernel is found in the kernel; the last position holds a zero.
        nowhere = layer.weight.numel
        source = np.full((2, 2, outputs, 2, 2, channels, high, wide), nowhere, dtype=np.int64)
        number = np.arange(nowhere).reshape(layer.weight.shape)
        for a, b, c, d, m, n in itertools.product((0, 1), (0, 1), (0, 1), (0, 1), range(high), range(wide)):
            row, column = 2 * m + c - a, 2 * n + d - b
            if 0 <= row < rows and 0 <= column < columns:
                source[a, b, :, c, d, :, m, n] = number[:, :, row, column]
        flat = source.reshape(-1)
        self.source = torch.from_numpy(flat)
        # Each element of the kernel stands in exactly four places, one for each position in the pooling window.
        places = np.argsort(flat, kind="stable")[: 4 * nowhere].reshape(nowhere, 4)
        self.places = torch.from_numpy(places.reshape(-1).copy())
        self.padded = torch.zeros(nowhere + 1)

    @staticmethod
    def fits(layers: list[Layer]) -> bool:
        """Whether the network begins with what this step replaces, and gains from it."""
        if len(layers) < 3 or not isinstance(layers[0], Convolution):
            return False
        first = layers[0]
        return (
            {type(layer) for layer in layers[1:3]} == {Relu, Pool}
            and next(layer for layer in layers[1:3] if isinstance(layer, Pool)).kernel == (2, 2)
            and first.padding == (0, 0)
            and all(side % 2 == 0 for side in (*first.image[1:], *first.result[1:]))
            and min(first.kernel) >= 5
            and first.image[0] <= 4
        )

    def order(self) -> IntArray:
        """Return the permutation of a channels-first image's features into (pixel of the block, channel, block)."""
        channels, height, width = self.layer.image
        index = np.arange(channels * height * width).reshape(channels, height // 2, 2, width // 2, 2)
        return np.ascontiguousarray(index.transpose(2, 4, 0, 1, 3).reshape(-1))

    def forward(self, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.x = x.view(len(x), *self.image)
        self.padded[:-1] = self.layer.weight.of(vector).reshape(-1)
        self.kernel = self.padded.index_select(0, self.source).view(self.shape)
        self.z = F.conv2d(self.x, self.kernel, self.layer.bias.of(vector).repeat(4))
        # Pooling before ReLU is the same as after it, on a quarter of the numbers.
        self.z = self.z.view(len(x), 4, -1)
        self.y = torch.amax(self.z, 1).relu_()
        return self.y.view(len(x), self.shape[0] // 4, self.layer.result[1] // 2, self.layer.result[2] // 2)

    def backward(
        self, vector: torch.Tensor, delta: torch.Tensor, gradient: torch.Tensor, below: bool
    ) -> torch.Tensor | None:
        delta = delta.contiguous()
        torch.sum(
            _aten.threshold_backward(delta, self.y.view_as(delta), 0), (0, 2, 3), out=self.layer.bias.of(gradient)
        )
        rest = _aten.threshold_backward(delta.view_as(self.y), self.y, 0)
        # The first maximum of a window gets it all, as in torch; z is overwritten by its derivative.
        for position in range(3):
            mine = self.z[:, position]
            mine.eq_(self.y).mul_(rest)
            rest.sub_(mine)
        self.z[:, 3] = rest
        result = self.layer.result
        spread = self.z.view(len(delta), self.shape[0], result[1] // 2, result[2] // 2)
        _, by_kernel, _ = _aten.convolution_backward(
            spread, self.x, self.kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]
        )
        folded = by_kernel.reshape(-1).index_select(0, self.places).view(-1, 4).sum(1)
        self.layer.weight.of(gradient).copy_(folded.view(self.layer.weight.shape))
        return None


class ConvolutionalProgram(Program):
    """A stack of convolutions and dense layers, one client after the other."""

    def __init__(self, flat: FlatModel, sample: tuple[int, ...], local: LocalTraining, layers: list[Layer]) -> None:
        super().__init__(flat, sample, local)
        self.steps: list[_Step] = []
        if _BlockStep.fits(layers):
            assert isinstance(layers[0], Convolution)
            block = _BlockStep(layers[0])
            self.order = block.order()
            self.steps.append(block)
            layers = layers[3:]
        for layer in layers:
            if isinstance(layer, Dense):
                self.steps.append(_DenseStep(layer))
            elif isinstance(layer, Convolution):
                self.steps.append(_ConvolutionStep(layer))
            elif isinstance(layer, Pool):
                self.steps.append(_PoolStep(layer))
            elif isinstance(layer, Flatten):
                self.steps.append(_FlattenStep(layer))
            else:
                self.steps.append(_ReluStep())
        self._rows = torch.empty(0)
        self._vectors: dict[str, torch.Tensor] = {}

    def _forward(self, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.steps[0], _BlockStep):
            x = x.view(len(x), *self.sample)
        for step in self.steps:
            x = step.forward(vector, x)
        return x

    def _backward(self, vector: torch.Tensor, delta: torch.Tensor, gradient: torch.Tensor) -> None:
        derivative: torch.Tensor | None = delta
        for position in range(len(self.steps) - 1, -1, -1):
            assert derivative is not None
            derivative = self.steps[position].backward(vector, derivative, gradient, position > 0)

    def _vector(self, purpose: str) -> torch.Tensor:
        if purpose not in self._vectors:
            self._vectors[purpose] = torch.zeros(self.flat.n_params)
        return self._vectors[purpose]

    def train(self, task: TrainTask, store: Store) -> None:
        """Train each job of the group."""
        for job in task.jobs:
            self._train_one(task, int(job), store)

    def _train_one(self, task: TrainTask, job: int, store: Store) -> None:
        table, local = task.table, self.local
        vector = task.out[job]
        vector.copy_(task.models[table.run[job]])
        if table.steps[job] == 0:
            return
        plan, rates = table.plan(job, local), table.rates(job, local)
        first, n = int(table.first[job]), int(table.n[job])
        positions, labels = store.sample[first : first + n], store.label[first : first + n]
        pseudo = self.scores(vector, store.x[positions]).argmax(0) if local.loss == "robust" else None
        gradient = self._vector("gradient")
        pull = self._pull(task, job, vector)
        velocity = self._vector("velocity").zero_() if local.momentum else None
        decay = local.weight_decay + task.prox
        width = plan.indices.shape[1]
        if len(self._rows) < width:
            self._rows = torch.empty(width, store.x.shape[1])
        for step, (count, rate) in enumerate(zip(plan.counts.tolist(), rates.tolist(), strict=True)):
            batch = torch.from_numpy(plan.indices[step, :count])
            x = torch.index_select(store.x, 0, positions[batch], out=self._rows[:count])
            y, z = labels[batch], None if pseudo is None else pseudo[batch]
            logits = self._forward(vector, x)
            if step == 0:
                task.first_loss[job] = float(sample_losses(logits, y, z, local).mean())
            delta = logit_derivative(logits, y, z, local).mul_(1 / count)
            self._backward(vector, delta, gradient)
            if velocity is None:
                vector.mul_(1 - rate * decay).add_(gradient, alpha=-rate)
                if pull is not None:
                    vector.add_(pull, alpha=rate)
            else:
                velocity.mul_(local.momentum).add_(gradient)
                if decay:
                    velocity.add_(vector, alpha=decay)
                if pull is not None:
                    velocity.sub_(pull)
                vector.add_(velocity, alpha=-rate)

    def _pull(self, task: TrainTask, job: int, start: torch.Tensor) -> torch.Tensor | None:
        """Return the part of the gradient that stays the same for the whole round, prox * w_global - correction."""
        if not task.prox and task.correction is None:
            return None
        pull = torch.mul(start, task.prox, out=self._vector("pull"))
        return pull if task.correction is None else pull.sub_(task.correction[job])

    def scores(self, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the transposed logits (C, n)."""
        parts = [self._forward(vector, part) for part in torch.split(x, _EVALUATION_BATCH)]
        return torch.cat(parts).t().contiguous()

    def gradient(self, vector: torch.Tensor, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        """Write the full-batch gradient, summed over chunks."""
        out.zero_()
        part = self._vector("gradient")
        chunks = zip(torch.split(x, _EVALUATION_BATCH), torch.split(y, _EVALUATION_BATCH), strict=True)
        for rows, labels in chunks:
            delta = logit_derivative(self._forward(vector, rows), labels, None, self.local).mul_(1 / len(x))
            self._backward(vector, delta, part)
            out.add_(part)
