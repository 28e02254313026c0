"""Training in machine code: a chain of convolutions and dense layers, one client after the other (``csrc/train.c``)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.groups import TrainTask
from fedcohort.simulate.engine.layers import Convolution, Dense, Flatten, Layer, Pool, Relu, read_layers
from fedcohort.simulate.engine.library import address, compiled, load
from fedcohort.simulate.engine.program import Program
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.local import LocalTraining

_WIDTH = 64  # samples of one forward pass outside training
_MOST_LAYERS = 32  # as in csrc/network.h
_MOST_ROWS = 4096
_MOST_FEATURES = 2**16  # between convolutions and dense layers
_ALIGNMENT = 64  # bytes


def describe(layers: list[Layer]) -> list[int] | None:
    """Return the numbers from which ``csrc/train.c`` builds the network, or None if it has something else in it.

    They are: the number of convolutions; for each of them channels, height, width, outputs, rows, columns, padding (2),
    pooling (2), ReLU; the number of dense layers; their widths from the input to the classes.
    """
    rest = list(layers)
    images: list[int] = []
    convolutions = 0
    offset = 0
    while rest and isinstance(layer := rest[0], Convolution):
        del rest[0]
        pool, relu = (1, 1), False
        while rest and isinstance(after := rest[0], Pool | Relu):
            if isinstance(after, Relu) and not relu:
                relu = True
            elif isinstance(after, Pool) and pool == (1, 1):
                pool = after.kernel
            else:
                return None
            del rest[0]
        if (layer.weight.offset, layer.bias.offset) != (offset, offset + layer.weight.numel):
            return None
        offset += layer.weight.numel + layer.bias.numel
        images += [*layer.image, layer.result[0], *layer.kernel, *layer.padding, *pool, int(relu)]
        convolutions += 1
    if convolutions and (not rest or not isinstance(rest.pop(0), Flatten)):
        return None
    widths: list[int] = []
    for position, dense in enumerate(rest):
        if position % 2:
            if not isinstance(dense, Relu):
                return None
            continue
        if not isinstance(dense, Dense) or (dense.weight.offset, dense.bias.offset) != (
            offset,
            offset + dense.weight.numel,
        ):
            return None
        offset += dense.weight.numel + dense.bias.numel
        outputs, inputs = dense.weight.shape
        widths += [outputs] if widths else [inputs, outputs]
    if max(convolutions, len(widths)) > _MOST_LAYERS or (convolutions and widths[0] > _MOST_FEATURES):
        return None
    return [convolutions, *images, len(widths) - 1, *widths]


class NativeProgram(Program):
    """A chain of convolutions and dense layers, one client after the other, in machine code."""

    def __init__(
        self,
        flat: FlatModel,
        sample: tuple[int, ...],
        local: LocalTraining,
        description: list[int],
        library: ctypes.CDLL,
    ) -> None:
        super().__init__(flat, sample, local)
        self._library = library
        self._description = np.array(description, dtype=np.int64)
        self._classes = description[-1]
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._room = 0  # samples of a batch the scratch is large enough for
        self._opened = (0, 0)
        robust = (local.robust_alpha, local.robust_beta, local.robust_log_zero)
        self._settings = np.array([0.0, local.weight_decay, local.momentum, *robust])
        self._where = address(self._settings)

    @staticmethod
    def of(flat: FlatModel, sample: tuple[int, ...], local: LocalTraining, layers: list[Layer]) -> NativeProgram | None:
        """Return the program if the network and the machine allow it."""
        description = describe(layers)
        if description is None or local.batch_size > _MOST_ROWS:
            return None
        library = compiled("train")
        return None if library is None else NativeProgram(flat, sample, local, description, library)

    def train(self, task: TrainTask, store: Store) -> None:
        """Train each job of the group."""
        table = task.table
        row = 4 * self.flat.n_params  # bytes of a flat vector
        data, models, out = address(store.x), address(task.models), address(task.out)
        samples, labels = address(store.sample), address(store.label)
        corrections = None if task.correction is None else address(task.correction)
        self._settings[0] = task.prox
        for job in task.jobs.tolist():
            run, first, n = int(table.run[job]), int(table.first[job]), int(table.n[job])
            if table.steps[job] == 0:
                task.out[job] = task.models[run]
                continue
            pseudo = None
            if self.local.loss == "robust":
                pseudo = self.scores(task.models[run], store.x[store.sample[first : first + n]]).argmax(0)
            plan = table.plan(job, self.local)
            rates = table.rates(job, self.local)
            steps, width = plan.indices.shape
            task.first_loss[job] = self._library.fedcohort_train(
                *self._opening(width),
                data,
                samples + 8 * first,
                labels + 8 * first,
                None if pseudo is None else address(pseudo),
                address(plan.indices),
                address(plan.counts),
                address(rates),
                steps,
                width,
                models + run * row,
                out + job * row,
                None if corrections is None else corrections + job * row,
                self._where,
            )

    def scores(self, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the transposed logits (C, n)."""
        x = x.contiguous()
        out = torch.empty(self._classes, len(x))
        opening = self._opening(_WIDTH)
        self._library.fedcohort_scores(*opening, address(vector), address(x), len(x), _WIDTH, address(out))
        return out

    def gradient(self, vector: torch.Tensor, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        """Write the full-batch gradient, summed over chunks."""
        x, y = x.contiguous(), y.contiguous()
        self._library.fedcohort_gradient(
            *self._opening(_WIDTH), address(vector), address(x), address(y), len(x), _WIDTH, address(out)
        )

    def _opening(self, width: int) -> tuple[int, int]:
        """Return the addresses of the description and of scratch enough for batches of ``width`` samples."""
        if width > self._room:
            size = self._library.fedcohort_scratch(address(self._description), width)
            self._scratch = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
            self._room = width
            aligned = -(-self._scratch.data_ptr() // _ALIGNMENT) * _ALIGNMENT
            self._opened = address(self._description), aligned
        return self._opened


def try_out(path: str) -> None:
    """Raise unless the library at ``path`` computes the gradient of a small network as torch does."""
    torch.manual_seed(0)
    sample = (3, 13, 11)
    module = nn.Sequential(
        nn.Conv2d(3, 7, (3, 5), padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(7, 5, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(40, 37), nn.ReLU(), nn.Linear(37, 10),
    )  # fmt: skip
    flat = FlatModel(module)
    layers = read_layers(flat, sample)
    description = describe(layers or [])
    if description is None:
        raise RuntimeError("the network of the trial is not understood")
    program = NativeProgram(flat, sample, LocalTraining(steps=1), description, load("train", Path(path)))
    x, y = torch.randn(70, *sample), torch.randint(10, (70,))
    logits = module(x)
    wanted = torch.autograd.grad(nn.functional.cross_entropy(logits, y), list(module.parameters()))
    vector, got = flat.vector(), torch.empty(flat.n_params)
    program.gradient(vector, x.flatten(1), y, got)
    if not torch.allclose(program.scores(vector, x.flatten(1)).t(), logits, rtol=1e-4, atol=1e-5):
        raise RuntimeError("its logits differ from torch's")
    if not torch.allclose(got, torch.cat([part.reshape(-1) for part in wanted]), rtol=1e-3, atol=1e-6):
        raise RuntimeError("its gradient differs from torch's")
