"""Training in machine code: chains of convolutions and dense layers, a client per thread (``csrc/train.c``)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedcohort.arrays import FloatArray, IntArray
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.groups import JobTable
from fedcohort.simulate.engine.layers import Convolution, Dense, Flatten, Layer, Pool, Relu, read_layers
from fedcohort.simulate.engine.library import address, compiled, load
from fedcohort.simulate.engine.losses import robust_of
from fedcohort.simulate.engine.processes import one_torch_thread
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.engine.types import ClientData
from fedcohort.simulate.local import LocalTraining

_TRAIN, _SCORE, _DIFFERENTIATE = range(3)  # kinds of work
_WIDTH = 64  # samples of one forward pass outside training
_CHUNK = 1000  # samples of one unit of evaluation
_SCORED_AT_ONCE = 2**20  # samples whose logits are held at once
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


class NativeBackend:
    """Trains and evaluates in machine code, with a thread per core.

    Parameters
    ----------
    store : Store
        The data.
    local : LocalTraining
        How clients train.
    description : list of int
        The network, see :func:`describe`.
    library : CDLL
        The compiled ``csrc/train.c``.
    threads : int
        How many threads compute.
    """

    def __init__(
        self, store: Store, local: LocalTraining, description: list[int], library: ctypes.CDLL, threads: int
    ) -> None:
        self.local = local
        self.threads = threads
        self._store = store
        self._library = library
        self._description = np.array(description, dtype=np.int64)
        self._classes = description[-1]
        robust = (local.robust_alpha, local.robust_beta, local.robust_log_zero)
        self._settings = np.array([0.0, local.weight_decay, local.momentum, *robust])
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._room = self._width = 0  # bytes for each thread, enough for batches of so many samples
        self._test = torch.arange(store.shape.n_train, store.shape.n_train + store.shape.n_test)
        # A second thread of torch would gain little in what is left to do between calls, and would go on spinning for
        # milliseconds on a core that is needed here.
        self._borrowed = one_torch_thread() if threads > 1 else None

    @staticmethod
    def of(store: Store, local: LocalTraining, layers: list[Layer], threads: int) -> NativeBackend | None:
        """Return the backend if the network and the machine allow it."""
        description = describe(layers)
        if description is None or local.batch_size > _MOST_ROWS:
            return None
        library = compiled("train")
        return None if library is None else NativeBackend(store, local, description, library, threads)

    def close(self) -> None:
        """Give torch its threads back."""
        if self._borrowed is not None:
            torch.set_num_threads(self._borrowed)
            self._borrowed = None

    def __del__(self) -> None:
        if getattr(self, "_borrowed", None) is not None:
            self.close()

    # -- what the engine asks for --------------------------------------------------------------------------------

    def train(
        self, table: JobTable, models: torch.Tensor, prox: float, correction: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Train every job; return vectors (J, P) and first losses (J,)."""
        store, local = self._store, self.local
        models = models.contiguous()
        out = torch.empty(len(table), models.shape[1])
        first_loss = np.full(len(table), np.nan)
        idle = np.flatnonzero(table.steps == 0)
        out[idle] = models[table.run[idle]]
        # The longest first, so that the last ones to finish are short.
        width = np.minimum(table.n, local.batch_size)
        jobs = np.argsort(-(table.steps * width), kind="stable")[: len(table) - len(idle)]
        if len(jobs):
            first = 8 * table.first[jobs]
            plans = [table.plan(job, local) for job in jobs.tolist()]
            rates = [table.rates(job, local) for job in jobs.tolist()]
            units = np.zeros((len(jobs), 12), dtype=np.int64)
            units[:, 0], units[:, 1] = address(store.sample) + first, address(store.label) + first
            pseudo = self._pseudo_labels(table, jobs, models) if local.loss == "robust" else None
            if pseudo is not None:
                units[:, 2] = address(pseudo) + 8 * (np.cumsum(table.n[jobs]) - table.n[jobs])
            units[:, 3] = [address(plan.indices) for plan in plans]
            units[:, 4] = [address(plan.counts) for plan in plans]
            units[:, 5] = [address(rate) for rate in rates]
            units[:, 6], units[:, 7] = table.steps[jobs], width[jobs]
            vector = 4 * models.shape[1]
            units[:, 8] = address(models) + vector * table.run[jobs]
            units[:, 9] = address(out) + vector * jobs
            correction = None if correction is None else correction.contiguous()
            if correction is not None:
                units[:, 10] = address(correction) + vector * jobs
            self._settings[0] = prox
            self._run(_TRAIN, units, int(width.max()))
            first_loss[jobs] = units[:, 11].view(np.float64)
        return out, torch.from_numpy(first_loss)

    def losses(
        self, models: torch.Tensor, queries: IntArray, wanted: dict[str, bool], pseudo_models: torch.Tensor | None
    ) -> FloatArray:
        """Return (Q, 4): loss, validation loss, robust loss, pseudo-label loss; NaN where there is none."""
        found = np.full((len(queries), 4), np.nan)
        training = wanted["train"] or wanted["robust"] or wanted["pseudo"]
        run, first, n, size = queries.T
        begin = first if training else first + n
        count = (size if wanted["validation"] else n) - (begin - first)
        ends = np.cumsum(count)
        for part in np.split(np.arange(len(queries)), np.flatnonzero(np.diff(ends // _SCORED_AT_ONCE)) + 1):
            starts = np.cumsum(count[part]) - count[part]
            slots = np.repeat(begin[part] - starts, count[part]) + np.arange(int(count[part].sum()))
            if not len(slots):
                continue
            labels = self._store.label[torch.from_numpy(slots)]
            logits = self._scores(models, run[part], begin[part], count[part])
            normaliser = logits.logsumexp(0)
            by_label = (normaliser - logits.gather(0, labels[None])[0]).double()
            inside = n[part] if training else 0 * n[part]
            held = count[part] - inside
            found[part, 1] = _means(by_label, starts + inside, held)
            if training:
                found[part, 0] = _means(by_label, starts, inside)
            if wanted["robust"] or wanted["pseudo"]:
                teacher = logits
                if pseudo_models is not None:
                    teacher = self._scores(pseudo_models, run[part], begin[part], count[part])
                by_pseudo = (normaliser - logits.gather(0, teacher.argmax(0)[None])[0]).double()
                found[part, 2] = _means(robust_of(by_label, by_pseudo, self.local), starts, inside)
                found[part, 3] = _means(by_pseudo, starts, inside)
        return found

    def gradients(self, models: torch.Tensor, queries: IntArray) -> torch.Tensor:
        """Return full-batch gradients (Q, P)."""
        run, first, n, _ = queries.T
        models = models.contiguous()
        out = torch.zeros(len(queries), models.shape[1])
        vector = 4 * models.shape[1]
        units = np.empty((len(queries), 5), dtype=np.int64)
        units[:, 0] = address(models) + vector * run
        units[:, 1], units[:, 2] = address(self._store.sample) + 8 * first, address(self._store.label) + 8 * first
        units[:, 3], units[:, 4] = n, address(out) + vector * np.arange(len(queries))
        self._run(_DIFFERENTIATE, units[n > 0], _WIDTH)
        return out

    def evaluate(self, models: torch.Tensor) -> tuple[FloatArray, FloatArray]:
        """Return test loss (M,) and accuracy (M,)."""
        y = self._store.y_test
        loss, right = np.empty(len(models)), np.empty(len(models))
        at_once = max(1, _SCORED_AT_ONCE // max(len(y), 1))
        for start in range(0, len(models), at_once):
            rows = slice(start, start + at_once)
            logits = self._on_rows(models[rows], self._test)
            target = y.expand(len(logits), 1, -1)
            by_label = logits.logsumexp(1) - logits.gather(1, target)[:, 0]
            loss[rows] = by_label.mean(1, dtype=torch.float64).numpy()
            right[rows] = (logits.argmax(1) == y).double().mean(1).numpy()
        return loss, right

    def logits(self, models: torch.Tensor, positions: IntArray) -> torch.Tensor:
        """Return logits (M, V, C) on training samples."""
        rows = torch.from_numpy(np.ascontiguousarray(positions, dtype=np.int64))
        return self._on_rows(models, rows).transpose(1, 2).contiguous()

    # -- calls ---------------------------------------------------------------------------------------------------

    def _pseudo_labels(self, table: JobTable, jobs: IntArray, models: torch.Tensor) -> torch.Tensor:
        """Return what each job's own global model says about its samples, job after job."""
        return self._scores(models, table.run[jobs], table.first[jobs], table.n[jobs]).argmax(0)

    def _scores(self, models: torch.Tensor, run: IntArray, first: IntArray, count: IntArray) -> torch.Tensor:
        """Return the transposed logits (C, total) of models[run] on ``count`` slots from ``first``, side by side."""
        models = models.contiguous()
        total = int(count.sum())
        out = torch.empty(self._classes, total)
        units = np.empty((len(run), 5), dtype=np.int64)
        units[:, 0] = address(models) + 4 * models.shape[1] * run
        units[:, 1], units[:, 2] = address(self._store.sample) + 8 * first, count
        units[:, 3], units[:, 4] = address(out) + 4 * (np.cumsum(count) - count), total
        self._run(_SCORE, units[count > 0], _WIDTH)
        return out

    def _on_rows(self, models: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the transposed logits (M, C, V) of models on rows of the data."""
        models = models.contiguous()
        count = len(rows)
        out = torch.empty(len(models), self._classes, count)
        start = np.arange(0, count, _CHUNK)
        units = np.empty((len(models), len(start), 5), dtype=np.int64)
        number = np.arange(len(models))[:, None]
        units[:, :, 0] = address(models) + 4 * models.shape[1] * number
        units[:, :, 1], units[:, :, 2] = address(rows) + 8 * start, np.minimum(_CHUNK, count - start)
        units[:, :, 3], units[:, :, 4] = address(out) + 4 * (number * self._classes * count + start), count
        self._run(_SCORE, units.reshape(-1, 5), _WIDTH)
        return out

    def _run(self, kind: int, units: IntArray, width: int) -> None:
        """Do the units, addresses and numbers as ``csrc/train.c`` declares them."""
        description = address(self._description)
        if width > self._width:
            self._room = -(-self._library.fedcohort_scratch(description, width) // _ALIGNMENT) * _ALIGNMENT
            self._scratch = torch.empty(self.threads * self._room + _ALIGNMENT, dtype=torch.uint8)
            self._width = width
        scratch = -(-self._scratch.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        self._library.fedcohort_run(
            description,
            address(self._store.x),
            address(self._settings),
            _WIDTH,
            kind,
            address(units),
            len(units),
            scratch,
            self._room,
            self.threads,
        )


def _means(values: torch.Tensor, starts: IntArray, lengths: IntArray) -> FloatArray:
    """Return the mean of each segment of ``values``; NaN for an empty one."""
    means = np.full(len(starts), np.nan)
    full = lengths > 0
    if full.any():
        # Sums from each start to its end, and from there to the next start, which nobody asked for.
        bounds = np.column_stack([starts[full], (starts + lengths)[full]]).reshape(-1)
        means[full] = np.add.reduceat(np.append(values.numpy(), 0.0), bounds)[::2] / lengths[full]
    return means


def try_out(path: str) -> None:
    """Raise unless the library at ``path`` computes the gradient of a small network as torch does."""
    torch.manual_seed(0)
    sample = (3, 13, 11)
    module = nn.Sequential(
        nn.Conv2d(3, 7, (3, 5), padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(7, 5, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(40, 37), nn.ReLU(), nn.Linear(37, 10),
    )  # fmt: skip
    flat = FlatModel(module)
    description = describe(read_layers(flat, sample) or [])
    if description is None:
        raise RuntimeError("the network of the trial is not understood")
    x, y = torch.randn(70, *sample), torch.randint(10, (70,))
    clients = ClientData(np.arange(70), np.array([0, 70]), y.numpy(), np.zeros(1, np.int64))
    store = Store.build(x.flatten(1).numpy(), x[:0].flatten(1).numpy(), y[:0].numpy(), [clients])
    backend = NativeBackend(store, LocalTraining(steps=1), description, load("train", Path(path)), 2)
    logits = module(x)
    wanted = torch.autograd.grad(nn.functional.cross_entropy(logits, y), list(module.parameters()))
    vector = flat.vector()[None]
    if not torch.allclose(backend.logits(vector, np.arange(70))[0], logits, rtol=1e-4, atol=1e-5):
        raise RuntimeError("its logits differ from torch's")
    got = backend.gradients(vector, np.array([[0, 0, 70, 70]]))[0]
    if not torch.allclose(got, torch.cat([part.reshape(-1) for part in wanted]), rtol=1e-3, atol=1e-6):
        raise RuntimeError("its gradient differs from torch's")
