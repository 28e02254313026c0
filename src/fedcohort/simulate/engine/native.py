"""Train chains of convolutions and dense layers in compiled code, one client per thread (``csrc/train.c``)."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedcohort.core.arrays import AnyArray, IntArray
from fedcohort.simulate.engine.crops import crop_table
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.jobs import JobTable
from fedcohort.simulate.engine.layers import Convolution, Dense, Flatten, Relu, read_layers
from fedcohort.simulate.engine.library import address, load, load_compiled
from fedcohort.simulate.engine.modules import torch_threads
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.engine.types import ClientData, Spans
from fedcohort.training.local import LocalTraining

_WIDTH = 64  # samples in one forward pass outside training
_CHUNK = 1000  # most samples in one unit of scoring
_SCORED_AT_ONCE = 2**20  # samples whose losses are in memory at once
_MAX_LAYERS = 32  # as in csrc/network.h
_MAX_ROWS = 4096
_MAX_FEATURES = 2**16  # between convolutions and dense layers
_ALIGNMENT = 64  # bytes


def _record(*names: str, kind: str = "i8") -> np.dtype[np.void]:
    return np.dtype([(name, kind) for name in names])


# The structs of csrc/network.h and csrc/train.c, field by field, and one kind of unit of work each; addresses are
# numbers.
_KERNEL = _record(
    "channels", "height", "width", "outputs", "rows", "columns", "pad_y", "pad_x", "pool_y", "pool_x", "relu"
)
DESCRIPTION = np.dtype(
    [
        ("crops", "i8"),
        ("convolutions", "i8"),
        ("layers", "i8"),
        ("kernel", _KERNEL, (_MAX_LAYERS,)),
        ("width", "i8", (_MAX_LAYERS + 1,)),
    ]
)
_SETTINGS = _record("prox", "weight_decay", "momentum", "alpha", "beta", "log_zero", "reverse_pseudo", kind="f8")
_TRAINING = _record(
    *("sample", "label", "pseudo", "indices", "counts", "crops", "rates"),
    *("steps", "width", "start", "out", "correction"),
)
_SCORING = _record(*("vector", "positions", "count", "label", "pseudo", "logits", "by_label", "by_pseudo", "predicted"))
_GRADIENT = _record("vector", "positions", "label", "count", "out")
_KINDS = (_TRAINING, _SCORING, _GRADIENT)


def describe(flat: FlatModel, sample: tuple[int, ...], local: LocalTraining) -> AnyArray | None:
    """Return the record from which ``csrc/train.c`` builds the network, or None if it cannot."""
    layers = read_layers(flat, sample)
    if layers is None or local.batch_size > _MAX_ROWS:
        return None
    convolutions = list(itertools.takewhile(lambda layer: isinstance(layer, Convolution), layers))
    kernels = [
        (*layer.image, layer.outputs, *layer.kernel, *layer.padding, *layer.pool, int(layer.relu))
        for layer in convolutions
        if isinstance(layer, Convolution)
    ]
    rest = layers[len(convolutions) :]
    if kernels and not isinstance(rest.pop(0), Flatten):
        return None
    # Then dense layers and ReLUs alternate, a dense layer first.
    if any(not isinstance(layer, Relu if i % 2 else Dense) for i, layer in enumerate(rest)):
        return None
    dense = [layer.weight.shape for layer in rest if isinstance(layer, Dense)]
    widths = [dense[0][1], *(outputs for outputs, _ in dense)]
    if max(len(kernels), len(widths)) > _MAX_LAYERS or (kernels and widths[0] > _MAX_FEATURES):
        return None
    record = np.zeros((), DESCRIPTION)
    record["convolutions"], record["layers"] = len(kernels), len(widths) - 1
    record["kernel"][: len(kernels)] = kernels
    record["width"][: len(widths)] = widths
    return record


class NativeBackend:
    """Trains and evaluates in compiled code, with one thread per core.

    Units of work are independent, so a result has the same bits whatever the number of threads and whatever else is
    computed at the same time.

    Parameters
    ----------
    store : Store
        The data.
    local : LocalTraining
        How clients train.
    description : array
        The network; see :func:`describe`.
    threads : int
        Number of threads.
    library : CDLL, optional
        Another build of ``csrc/train.c``.
    """

    def __init__(
        self,
        store: Store,
        local: LocalTraining,
        description: AnyArray,
        threads: int,
        library: ctypes.CDLL | None = None,
    ) -> None:
        self.local = local
        self.threads = threads
        self._store = store
        library = library or load_compiled("train")
        assert library is not None
        self._library = library
        self._description = description
        self._crops = crop_table(store.shape).int() if local.augment else None
        if self._crops is not None:
            description["crops"] = address(self._crops)
        self._classes = int(description["width"][description["layers"]])
        # One record for all units; only "prox" changes between calls.
        self._settings = np.zeros((), _SETTINGS)
        for name in ("weight_decay", "momentum"):
            self._settings[name] = getattr(local, name)
        for name in ("alpha", "beta", "log_zero"):
            self._settings[name] = getattr(local, f"robust_{name}")
        self._settings["reverse_pseudo"] = local.robust_reverse == "pseudo-labels"
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._room = self._width = 0  # bytes for each thread, and the batch size for which they suffice
        # Little is left for torch to do between calls, so a second thread would gain little. It would keep spinning for
        # milliseconds on a core that is needed here.
        self._give_back = torch_threads(self, 1 if threads > 1 else None)

    def close(self) -> None:
        """Give torch its threads back."""
        self._give_back()

    # -- the backend's methods -----------------------------------------------------------------------------------

    def train(
        self, table: JobTable, models: torch.Tensor, prox: float, correction: torch.Tensor | None
    ) -> torch.Tensor:
        """Train all jobs; return vectors (J, P)."""
        store, local = self._store, self.local
        models = models.contiguous()
        out = torch.empty(len(table), models.shape[1])
        idle = np.flatnonzero(table.steps == 0)  # clients without samples keep the model they received
        out[idle] = models[table.run[idle]]
        # The longest jobs first, so that the last ones to finish are short.
        width = np.minimum(table.n, local.batch_size)
        jobs = np.argsort(-(table.steps * width), kind="stable")[: len(table) - len(idle)]
        if not len(jobs):
            return out
        table, width = table[jobs], width[jobs]
        units = np.zeros(len(jobs), _TRAINING)
        units["sample"] = address(store.sample) + 8 * table.first
        units["label"] = address(store.label) + 8 * table.first
        if local.loss == "robust":
            spans = Spans(table.run, table.first, table.n)
            pseudo = self._predictions(models, spans)
            units["pseudo"] = address(pseudo) + 8 * _starts(spans.count)
        cells = table.steps * width
        first_cell, first_step = _starts(cells), _starts(table.steps)
        indices = np.empty(int(cells.sum()), np.int64)
        table.draw(local, indices, base=0, start=first_cell, stride=width, row=width)
        counts, rates = table.batch_sizes(local), table.rates(local)
        units["indices"] = address(indices) + 8 * first_cell
        units["counts"] = address(counts) + 8 * first_step
        units["rates"] = address(rates) + 8 * first_step
        if local.augment:
            crops = np.concatenate([table.crops(job, local).ravel() for job in range(len(table))])
            units["crops"] = address(crops) + 8 * first_cell
        units["steps"], units["width"] = table.steps, width
        vector = 4 * models.shape[1]
        units["start"] = address(models) + vector * table.run
        units["out"] = address(out) + vector * jobs
        if correction is not None:
            correction = correction.contiguous()
            units["correction"] = address(correction) + vector * jobs
        self._settings["prox"] = prox
        self._run(units, int(width.max()))
        return out

    def cross_entropies(
        self, models: torch.Tensor, spans: Spans, pseudo: bool, teachers: torch.Tensor | None
    ) -> Iterator[tuple[IntArray, torch.Tensor, torch.Tensor | None]]:
        """Yield the indices of spans (q,), and their samples' cross-entropies with labels and pseudo-labels."""
        filled = np.flatnonzero(spans.count)
        bounds = np.flatnonzero(np.diff(np.cumsum(spans.count[filled]) // _SCORED_AT_ONCE)) + 1
        for chosen in np.split(filled, bounds) if len(filled) else ():
            part = spans[chosen]
            wanted = {"by_label": torch.empty(int(part.count.sum()), dtype=torch.float64)}
            given = {"label": address(self._store.label) + 8 * part.first}
            if pseudo:
                wanted["by_pseudo"] = torch.empty_like(wanted["by_label"])
                if teachers is not None:
                    guide = self._predictions(teachers, part)
                    given["pseudo"] = address(guide) + 8 * _starts(part.count)
            self._score(models, part, address(self._store.sample) + 8 * part.first, wanted, given)
            yield chosen, wanted["by_label"], wanted.get("by_pseudo")

    def gradients(self, models: torch.Tensor, spans: Spans) -> torch.Tensor:
        """Return full-batch gradients (Q, P)."""
        models = models.contiguous()
        out = torch.zeros(len(spans), models.shape[1])
        vector = 4 * models.shape[1]
        units = np.zeros(len(spans), _GRADIENT)
        units["vector"] = address(models) + vector * spans.run
        units["positions"] = address(self._store.sample) + 8 * spans.first
        units["label"] = address(self._store.label) + 8 * spans.first
        units["count"], units["out"] = spans.count, address(out) + vector * np.arange(len(spans))
        self._run(units[spans.count > 0], _WIDTH)
        return out

    def answers(self, models: torch.Tensor, first: int, y: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, for a few models at a time, their loss (m,) on samples from row ``first`` on, and predictions."""
        positions = first + torch.arange(len(y))
        index = np.arange(len(models))
        for rows in np.split(index, np.flatnonzero(np.diff(index * len(y) // _SCORED_AT_ONCE)) + 1):
            by_label = torch.empty(len(rows), len(y), dtype=torch.float64)
            predicted = torch.empty(len(rows), len(y), dtype=torch.int64)
            wanted = {"by_label": by_label.view(-1), "predicted": predicted.view(-1)}
            label = {"label": 0 * rows + address(y)}
            self._score(models, Spans(rows, 0 * rows, 0 * rows + len(y)), 0 * rows + address(positions), wanted, label)
            yield torch.from_numpy(by_label.numpy().mean(1)), predicted

    def outputs(self, models: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
        """Return logits (M, V, C) on rows of the data."""
        rows = torch.arange(len(self._store.x))[rows]
        out = torch.empty(len(models), len(rows), self._classes)
        index = np.arange(len(models))
        spans = Spans(index, 0 * index, 0 * index + len(rows))
        self._score(models, spans, 0 * index + address(rows), {"logits": out.view(-1, self._classes)}, {})
        return out

    # -- calls ---------------------------------------------------------------------------------------------------

    def _predictions(self, models: torch.Tensor, spans: Spans) -> torch.Tensor:
        """Return the classes that the models predict for the samples, span after span."""
        found = torch.empty(int(spans.count.sum()), dtype=torch.int64)
        self._score(models, spans, address(self._store.sample) + 8 * spans.first, {"predicted": found}, {})
        return found

    def _score(
        self,
        models: torch.Tensor,
        spans: Spans,
        positions: IntArray,
        wanted: dict[str, torch.Tensor],
        given: dict[str, IntArray],
    ) -> None:
        """Fill ``wanted`` for the samples of all spans, one after another, cut into units for the threads.

        ``positions`` and the values of ``given`` are one address per span, each of an array of one integer per sample.
        """
        models = models.contiguous()
        pieces = -(-spans.count // _CHUNK)
        owner = np.repeat(np.arange(len(spans)), pieces)
        at = _CHUNK * (np.arange(len(owner)) - _starts(pieces)[owner])  # first sample of the piece within its span
        units = np.zeros(len(owner), _SCORING)
        units["vector"] = address(models) + 4 * models.shape[1] * spans.run[owner]
        units["positions"] = positions[owner] + 8 * at
        units["count"] = np.minimum(_CHUNK, spans.count[owner] - at)
        for name, addresses in given.items():
            units[name] = addresses[owner] + 8 * at
        for name, result in wanted.items():
            row = result.element_size() * (result.shape[1] if result.ndim == 2 else 1)
            units[name] = address(result) + row * (_starts(spans.count)[owner] + at)
        self._run(units, _WIDTH)

    def _run(self, units: AnyArray, width: int) -> None:
        """Do the units of work, which are records as ``csrc/train.c`` declares them."""
        description = address(self._description)
        # Scratch memory grows with the largest batch so far. It is kept, because allocating it takes longer than small
        # jobs do.
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
            _KINDS.index(units.dtype),
            address(units),
            len(units),
            scratch,
            self._room,
            self.threads,
        )


def _starts(lengths: IntArray) -> IntArray:
    """Return where each segment begins, given the lengths of the segments."""
    return np.cumsum(lengths) - lengths


def try_out(path: str) -> None:
    """Raise unless the library at ``path`` computes the gradient of a small network as torch does."""
    torch.manual_seed(0)
    sample = (3, 13, 11)
    module = nn.Sequential(
        nn.Conv2d(3, 7, (3, 5), padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(7, 5, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(40, 37), nn.ReLU(), nn.Linear(37, 10),
    )  # fmt: skip
    flat = FlatModel(module)
    local = LocalTraining(steps=1)
    description = describe(flat, sample, local)
    assert description is not None
    x, y = torch.randn(70, *sample), torch.randint(10, (70,))
    clients = ClientData(np.arange(70), np.array([0, 70]), y.numpy(), np.zeros(1, np.int64))
    store = Store(x.flatten(1).numpy(), x[:0].flatten(1).numpy(), y[:0].numpy(), [clients])
    backend = NativeBackend(store, local, description, 2, load("train", Path(path)))
    logits = module(x)
    wanted = torch.autograd.grad(nn.functional.cross_entropy(logits, y), list(module.parameters()))
    vector = flat.vector()[None]
    if not torch.allclose(backend.outputs(vector, slice(0, 70))[0], logits, rtol=1e-4, atol=1e-5):
        raise RuntimeError("its logits differ from torch's")
    zero = np.zeros(1, np.int64)
    got = backend.gradients(vector, Spans(zero, zero, zero + 70))[0]
    if not torch.allclose(got, torch.cat([part.reshape(-1) for part in wanted]), rtol=1e-3, atol=1e-6):
        raise RuntimeError("its gradient differs from torch's")
