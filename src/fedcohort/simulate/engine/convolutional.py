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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(type(self).__name__)

    def backward(self, delta: torch.Tensor, below: bool) -> torch.Tensor | None:
        """Write the gradient's part of this stage; return the derivative by its input if ``below`` needs it."""
        raise NotImplementedError(type(self).__name__)


class _WeightedStep(_Step):
    """A stage with parameters, bound once to the vector it computes with and to the one its gradient goes to."""

    def __init__(self, layer: Dense | Convolution, vector: torch.Tensor, gradient: torch.Tensor) -> None:
        self.weight, self.bias = layer.weight.of(vector), layer.bias.of(vector)
        self.by_weight, self.by_bias = layer.weight.of(gradient), layer.bias.of(gradient)


class _DenseStep(_WeightedStep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.x = x
        return torch.addmm(self.bias, x, self.weight.t())

    def backward(self, delta: torch.Tensor, below: bool) -> torch.Tensor | None:
        torch.mm(delta.t(), self.x, out=self.by_weight)
        torch.sum(delta, 0, out=self.by_bias)
        return torch.mm(delta, self.weight) if below else None


class _ReluStep(_Step):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.y = x.relu_()
        return self.y

    def backward(self, delta: torch.Tensor, below: bool) -> torch.Tensor | None:
        result: torch.Tensor = _aten.threshold_backward(delta, self.y, 0)
        return result


class _PoolStep(_Step):
    def __init__(self, layer: Pool) -> None:
        self.kernel = list(layer.kernel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.x = x
        pooled, self.where = _aten.max_pool2d_with_indices(x, self.kernel, self.kernel)
        result: torch.Tensor = pooled
        return result

    def backward(self, delta: torch.Tensor, below: bool) -> torch.Tensor | None:
        result: torch.Tensor = _aten.max_pool2d_with_indices_backward(
            delta, self.x, self.kernel, self.kernel, [0, 0], [1, 1], False, self.where
        )
        return result


class _FlattenStep(_Step):
    def __init__(self, layer: Flatten) -> None:
        self.image = layer.image

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(len(x), -1)

    def backward(self, delta: torch.Tensor, below: bool) -> torch.Tensor | None:
        return delta.view(len(delta), *self.image).contiguous(memory_format=torch.channels_last)


class _ConvolutionStep(_WeightedStep):
    """Convolution, channels-last."""

    def __init__(self, layer: Convolution, vector: torch.Tensor, gradient: torch.Tensor) -> None:
        super().__init__(layer, vector, gradient)
        self.padding = list(layer.padding)
        # With few input channels the library is faster the other way round where it computes their derivative.
        self.narrow = layer.image[0] < 16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.x = x.contiguous(memory_format=torch.channels_last)
        return F.conv2d(self.x, self.weight, self.bias, padding=self.padding)

    def backward(self, delta: torch.Tensor, below: bool) -> torch.Tensor | None:
        apart = below and self.narrow
        back, by_weight = self._backward(delta, self.x, below and not apart, True)
        self.by_weight.copy_(by_weight)
        torch.sum(delta, (0, 2, 3), out=self.by_bias)
        if apart:
            # Of the input only the shape is used, but its memory format decides which algorithm is taken.
            back, _ = self._backward(delta.contiguous(), torch.empty(self.x.shape), True, False)
        return back

    def _backward(
        self, delta: torch.Tensor, x: torch.Tensor, by_input: bool, by_weight: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = [by_input, by_weight, False]
        result = _aten.convolution_backward(
            delta, x, self.weight, None, [1, 1], self.padding, [1, 1], False, [0, 0], 1, wanted
        )
        return result[0], result[1]


class _BlockStep(_WeightedStep):
    """First convolution, 2x2 pooling and ReLU together, on an image stored as 2x2 blocks of pixels.

    With s = 2, output (2i + a, 2j + b) of kernel o is the sum over blocks (i + m, j + n), pixels (c, d) of a block and
    channels of W[o, :, 2m + c - a, 2n + d - b] times the pixel, where that index exists: a convolution of the blocks
    whose outputs are numbered by (a, b, o).
    """

    def __init__(self, layer: Convolution, vector: torch.Tensor, gradient: torch.Tensor) -> None:
        super().__init__(layer, vector, gradient)
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.x = x.view(len(x), *self.image)
        self.padded[:-1] = self.weight.view(-1)
        self.kernel = self.padded.index_select(0, self.source).view(self.shape)
        self.z = F.conv2d(self.x, self.kernel, self.bias.repeat(4))
        # Pooling before ReLU is the same as after it, on a quarter of the numbers.
        self.z = self.z.view(len(x), 4, -1)
        self.y = torch.amax(self.z, 1).relu_()
        return self.y.view(len(x), self.shape[0] // 4, self.layer.result[1] // 2, self.layer.result[2] // 2)

    def backward(self, delta: torch.Tensor, below: bool) -> torch.Tensor | None:
        rest = _aten.threshold_backward(delta.contiguous().view_as(self.y), self.y, 0)
        torch.sum(rest.view(len(rest), len(self.bias), -1), (0, 2), out=self.by_bias)
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
        self.by_weight.copy_(folded.view(self.weight.shape))
        return None


class ConvolutionalProgram(Program):
    """A stack of convolutions and dense layers, one client after the other."""

    def __init__(self, flat: FlatModel, sample: tuple[int, ...], local: LocalTraining, layers: list[Layer]) -> None:
        super().__init__(flat, sample, local)
        self._vectors: dict[str, torch.Tensor] = {}
        self._rows = torch.empty(0)
        bound = self._vector("weights"), self._vector("gradient")
        self.steps: list[_Step] = []
        if _BlockStep.fits(layers):
            assert isinstance(layers[0], Convolution)
            block = _BlockStep(layers[0], *bound)
            self.order = block.order()
            self.steps.append(block)
            layers = layers[3:]
        for layer in layers:
            if isinstance(layer, Dense):
                self.steps.append(_DenseStep(layer, *bound))
            elif isinstance(layer, Convolution):
                self.steps.append(_ConvolutionStep(layer, *bound))
            elif isinstance(layer, Pool):
                self.steps.append(_PoolStep(layer))
            elif isinstance(layer, Flatten):
                self.steps.append(_FlattenStep(layer))
            else:
                self.steps.append(_ReluStep())

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.order is None:
            x = x.view(len(x), *self.sample)
        for step in self.steps:
            x = step.forward(x)
        return x

    def _backward(self, delta: torch.Tensor) -> None:
        """Fill the gradient."""
        derivative: torch.Tensor | None = delta
        for position in range(len(self.steps) - 1, -1, -1):
            assert derivative is not None
            derivative = self.steps[position].backward(derivative, position > 0)

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
        vector = self._vector("weights").copy_(task.models[table.run[job]])
        if table.steps[job] == 0:
            task.out[job] = vector
            return
        plan, rates = table.plan(job, local), table.rates(job, local)
        first, n = int(table.first[job]), int(table.n[job])
        positions, labels = store.sample[first : first + n], store.label[first : first + n]
        pseudo = self._scores(store.x[positions]).argmax(0) if local.loss == "robust" else None
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
            logits = self._forward(x)
            if step == 0:
                task.first_loss[job] = float(sample_losses(logits, y, z, local).mean())
            delta = logit_derivative(logits, y, z, local).mul_(1 / count)
            self._backward(delta)
            if velocity is None:
                if decay:
                    vector.mul_(1 - rate * decay)
                vector.add_(gradient, alpha=-rate)
                if pull is not None:
                    vector.add_(pull, alpha=rate)
            else:
                velocity.mul_(local.momentum).add_(gradient)
                if decay:
                    velocity.add_(vector, alpha=decay)
                if pull is not None:
                    velocity.sub_(pull)
                vector.add_(velocity, alpha=-rate)
        task.out[job] = vector

    def _pull(self, task: TrainTask, job: int, start: torch.Tensor) -> torch.Tensor | None:
        """Return the part of the gradient that stays the same for the whole round, prox * w_global - correction."""
        if not task.prox and task.correction is None:
            return None
        pull = torch.mul(start, task.prox, out=self._vector("pull"))
        return pull if task.correction is None else pull.sub_(task.correction[job])

    def scores(self, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the transposed logits (C, n)."""
        self._vector("weights").copy_(vector)
        return self._scores(x)

    def _scores(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._forward(part) for part in torch.split(x, _EVALUATION_BATCH)]).t().contiguous()

    def gradient(self, vector: torch.Tensor, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        """Write the full-batch gradient, summed over chunks."""
        self._vector("weights").copy_(vector)
        part = self._vector("gradient")
        out.zero_()
        chunks = zip(torch.split(x, _EVALUATION_BATCH), torch.split(y, _EVALUATION_BATCH), strict=True)
        for rows, labels in chunks:
            self._backward(logit_derivative(self._forward(rows), labels, None, self.local).mul_(1 / len(x)))
            out.add_(part)
