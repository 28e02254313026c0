"""The engine: trains and evaluates many models at once over one shared set of samples."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import nn

from fedcohort.core import rng
from fedcohort.core.arrays import AnyArray, FloatArray, IntArray
from fedcohort.core.errors import DeviceError
from fedcohort.core.registry import is_reference
from fedcohort.core.signals import LossMeasure
from fedcohort.simulate.cores import free_cores
from fedcohort.simulate.engine.device import DeviceProgram, StackedTraining
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.jobs import JobTable
from fedcohort.simulate.engine.library import load_compiled
from fedcohort.simulate.engine.modules import ModuleBackend
from fedcohort.simulate.engine.native import NativeBackend, describe
from fedcohort.simulate.engine.stacked import stack, stacking_obstacle
from fedcohort.simulate.engine.store import Store, sample_shape
from fedcohort.simulate.engine.types import ClientData, HeldOut, Jobs, Spans, TrainingResult
from fedcohort.simulate.models import build_model
from fedcohort.simulate.own_code import own_code
from fedcohort.simulate.tasks import Classification, Task
from fedcohort.training.local import LocalTraining
from fedcohort.training.losses import reduce_losses

log = logging.getLogger(__name__)
_OUTPUTS = 2**26  # numbers that models give at once, for a metric that needs them all
_COMPILED, _STACKED, _PLAIN = "compiled code", "stacked models", "plain loop"


class Backend(Protocol):
    """Does the computing: compiled code, a stack of models on a device, or the plain loop."""

    def train(
        self, table: JobTable, models: torch.Tensor, prox: float, correction: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the jobs' vectors (J, P)."""

    def cross_entropies(
        self, models: torch.Tensor, spans: Spans, pseudo: bool, teachers: torch.Tensor | None
    ) -> Iterator[tuple[IntArray, torch.Tensor, torch.Tensor | None]]:
        """Yield the losses of the samples of a few spans at a time, span after span; empty spans are skipped.

        Each item has the indices of these spans (q,), the cross-entropies (n,) with the labels, and, if ``pseudo``, the
        cross-entropies with the classes that the teachers (R, P) predict. Without teachers, the models' own predictions
        are used.
        """

    def gradients(self, models: torch.Tensor, spans: Spans) -> torch.Tensor:
        """Return full-batch gradients (Q, P)."""

    def answers(self, models: torch.Tensor, first: int, y: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, for a few models at a time, their loss (m,) and the classes that they predict (m, n).

        The samples are those from row ``first`` on, with labels ``y`` (n,).
        """

    def outputs(self, models: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
        """Return the outputs (M, V, ...) on rows of the data."""

    def close(self) -> None:
        """Release all resources."""


class Engine:
    """Trains the clients of one or more federations, and evaluates models, all over the same data.

    Parameters
    ----------
    x_train, y_train, x_test, y_test : array
        Samples (n, F), (n, H, W) or (n, H, W, C) and labels (n,). Bytes are standardised per channel with the training
        set's mean and standard deviation; floating-point samples are used unchanged.
    classes : int
        Number of classes, or of the numbers or tokens that the task predicts.
    federations : sequence of ClientData
        The clients; a job refers to its federation by its position here.
    model : str
        A name of :data:`fedcohort.simulate.models.MODELS` or ``module:Class``.
    local : LocalTraining
        What a client does in a round.
    device : str
        "auto" (CUDA if available), "cpu", "cuda" or "cuda:1".
    workers : int, optional
        Number of threads on the CPU; default: one per core that this process may use.
    task : Task, optional
        What is learned; default: classification.
    precision : str
        "tf32": on CUDA, matrix products round their factors to TF32, which makes convolutional networks much faster;
        "single": full single precision, as the CPU computes in both; "bf16": forward and backward passes in bfloat16.
    copies : sequence of array
        More samples of the same kind, such as training samples as some clients see them. Clients may own them, and
        models may be tested on them. The first is at position ``len(x_train) + len(x_test)``.

    Attributes
    ----------
    backend : Backend
        What trains this model: compiled code, a stack of models on a device, or the plain loop.
    kind : str
        The same in words; see :func:`choose_engine`. Engines of different kinds round differently.

    Examples
    --------
    >>> x = np.linspace(0, 1, 80, dtype=np.float32).reshape(20, 4)
    >>> y = np.arange(20) % 2
    >>> two = ClientData(np.arange(20), np.array([0, 12, 20]), y, np.array([0, 0]))
    >>> local = LocalTraining(steps=3, batch_size=5, lr=0.1)
    >>> with Engine(x, y, x, y, classes=2, federations=[two], model="logistic", local=local, device="cpu") as engine:
    ...     model = engine.init(seed=1)
    ...     zeros = np.zeros(2, dtype=np.int64)
    ...     trained = engine.train(model[None], Jobs(zeros, zeros, np.arange(2), zeros, zeros))
    ...     loss, accuracy = engine.evaluate(trained.params)
    >>> trained.params.shape, trained.steps, loss.shape
    (torch.Size([2, 10]), array([3, 3]), (2,))
    """

    def __init__(
        self,
        x_train: AnyArray,
        y_train: AnyArray,
        x_test: AnyArray,
        y_test: AnyArray,
        *,
        classes: int,
        federations: Sequence[ClientData],
        model: str,
        local: LocalTraining,
        device: str = "auto",
        workers: int | None = None,
        precision: str = "tf32",
        task: Task | None = None,
        copies: Sequence[AnyArray] = (),
    ) -> None:
        self.task = task or Classification()
        self.sample = sample_shape(x_train)
        self.integers = np.asarray(x_train).dtype.kind == "i"
        # A model of tokens scores every token at every position.
        self.output = (*self.sample, classes) if self.task.target == "token" else (classes,)
        self.classes = classes
        self.local = local
        self.model = model
        self.device = choose_device(device)
        self.y_train = np.asarray(y_train, np.float32 if self.task.target == "number" else np.int64)
        with torch.random.fork_rng(devices=[]):
            # What is frozen stays in this module, the same for all runs, processes and attempts.
            torch.manual_seed(0)
            self.flat = FlatModel(self._module())
        self.n_params, self.n_trainable = self.flat.n_params, self.flat.n_trainable
        self.shapes = {slot.name: slot.shape for slot in self.flat.slots}  # in the order of a flat vector
        self._on_device: dict[HeldOut, tuple[torch.Tensor, torch.Tensor]] = {}  # labels and cells
        self._test = HeldOut(len(x_train), np.asarray(y_test, np.int64), np.zeros(len(y_test), np.int64), 1)
        # Clients own their labels, which may be wrong; numbers and tokens are the dataset's.
        targets = None if self.task.has_classes else self.y_train
        self.store = Store(x_train, x_test, y_test, federations, targets, self.task.standardises, copies)
        self.kind, why = choose_engine(
            self.flat, self.sample, local, self.device, self.task, self.store.x.dtype, precision
        )
        if why is not None and self.device.type == "cuda":  # this works but is slow, so the user should know why
            log.warning(
                "the model %r cannot be batched, so its clients are trained one by one; a round takes up to as many "
                "times longer as it has clients: %s",
                model,
                why,
            )
        self.backend = self._backend(workers, precision)

    def _backend(self, workers: int | None, precision: str) -> Backend:
        flat, store, local, device = self.flat, self.store, self.local, self.device
        if self.kind.startswith(_COMPILED):
            description = describe(flat, self.sample, local)
            assert description is not None
            return NativeBackend(store, local, description, workers or free_cores())
        losses = None if self.task.fast else self._losses
        if self.kind.startswith(_STACKED):
            net = stack(flat, self.sample, store.x.dtype, precision)
            classes = self.classes if self.task.has_classes else 1
            program = DeviceProgram(
                net, store, local, classes=classes, device=device, precision=precision, losses=losses
            )
            # Tables of padded or combined samples would change what such a module computes.
            if not net.couples:
                return program
            return StackedTraining(program, flat, store, local, losses, device=device, precision=precision)
        return ModuleBackend(flat, store, local, losses, device=device, workers=workers, precision=precision)

    def _losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss (n,) of each sample."""
        with self._task_code():
            return self.task.losses(outputs, targets)

    def _task_code(self) -> contextlib.AbstractContextManager[None]:
        # Our own tasks tell the user's functions from their own code. A user's own task is the user's code as a whole.
        return own_code() if is_reference(self.task.name) else contextlib.nullcontext()

    def _module(self) -> nn.Module:
        return build_model(self.model, self.sample, self.classes, integers=self.integers, output=self.output)

    # -- models --------------------------------------------------------------------------------------------------

    def init(self, seed: int) -> torch.Tensor:
        """Return the flat parameters (P,) of a freshly initialised model."""
        # Always on the CPU, so that a seed gives the same model on every device.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.stream(seed, rng.MODEL).integers(2**63)))
            module = self._module()
        return FlatModel(module).vector().to(self.device)

    # -- training ------------------------------------------------------------------------------------------------

    def train(
        self, models: torch.Tensor, jobs: Jobs, *, prox: float = 0.0, correction: torch.Tensor | None = None
    ) -> TrainingResult:
        """Do the local training of all jobs.

        The gradient of a step is ``grad + prox * (w - w_global) + correction[j] + weight_decay * w``.

        Parameters
        ----------
        models : torch.Tensor
            Global models (R, P).
        jobs : Jobs
            Which client to train, and from which model.
        prox : float
            Strength of the proximal term (FedProx).
        correction : torch.Tensor, optional
            (J, P), added to the gradient of each job (SCAFFOLD, FedDyn).
        """
        table = JobTable.of(jobs, self._spans(models, jobs.run, jobs.federation, jobs.client), self.store, self.local)
        return TrainingResult(self.backend.train(table, models, prox, correction), table.steps)

    # -- evaluation ----------------------------------------------------------------------------------------------

    def measure(
        self,
        models: torch.Tensor,
        run: IntArray,
        federation: IntArray,
        client: IntArray,
        measures: Collection[LossMeasure],
        *,
        pseudo_models: torch.Tensor | None = None,
    ) -> dict[LossMeasure, FloatArray]:
        """Measure models on clients; each result is (Q,), with NaN for a client that has no samples of that part.

        Parameters
        ----------
        models : torch.Tensor
            (R, P).
        run, federation, client : array of int
            (Q,) which model is measured on which client.
        measures : collection of LossMeasure
            What to measure.
        pseudo_models : torch.Tensor, optional
            (R, P) models that give the pseudo-labels; default ``models``.
        """
        # Measures on the same samples share one forward pass.
        found: dict[LossMeasure, FloatArray] = {}
        for part in ("train", "validation"):
            wanted = [measure for measure in dict.fromkeys(measures) if measure.part == part]
            if not wanted:
                continue
            spans = self._spans(models, run, federation, client, part)
            pseudo = any(measure.loss != "label" for measure in wanted)
            columns = torch.full((len(wanted), len(spans)), torch.nan, dtype=torch.float64, device=self.device)
            scored = self.backend.cross_entropies(models, spans, pseudo, pseudo_models)
            for chosen, by_label, by_pseudo in scored:
                lengths = torch.from_numpy(spans.count[chosen]).to(self.device)
                columns[:, torch.from_numpy(chosen)] = reduce_losses(by_label, by_pseudo, lengths, wanted, self.local)
            found |= zip(wanted, columns.cpu().numpy(), strict=True)
        return found

    def client_gradients(
        self, models: torch.Tensor, run: IntArray, federation: IntArray, client: IntArray
    ) -> torch.Tensor:
        """Return the full-batch gradient (Q, P) of each client's mean cross-entropy at the given models (R, P)."""
        return self.backend.gradients(models, self._spans(models, run, federation, client))

    def evaluate(self, models: torch.Tensor) -> tuple[FloatArray, FloatArray]:
        """Return the test loss (M,) and the task's metric (M,) of models (M, P); for a classifier, this is accuracy."""
        y = self.store.y_test
        if self.task.fast and self.task.metric == "accuracy":
            loss, right, _ = self.evaluate_cells(models, self._test)
            return loss, right[:, 0] / len(y)
        loss, metric = np.empty(len(models)), np.empty(len(models))
        rows = slice(self.store.n_train, self.store.n_train + len(y))
        at_once = max(1, _OUTPUTS // (len(y) * math.prod(self.output)))
        for start in range(0, len(models), at_once):
            for unit, outputs in enumerate(self.backend.outputs(models[start : start + at_once], rows), start):
                predicted = self.store.to_target_units(outputs.cpu())
                losses = self._losses(predicted, y)
                loss[unit] = float(losses.double().mean())
                with self._task_code():
                    metric[unit] = self.task.measure(predicted, y, losses)
        return loss, metric

    def evaluate_cells(self, models: torch.Tensor, test: HeldOut) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Test a classifier: loss (M,), right answers by cell (M, cells), right and all answers by class (M, 2, C)."""
        if test not in self._on_device:
            self._on_device[test] = torch.as_tensor(test.y).to(self.device), torch.as_tensor(test.cell).to(self.device)
        y, cell = self._on_device[test]
        found = []
        for loss, predicted in self.backend.answers(models, test.first, y):
            right = predicted == y
            by_cell = torch.zeros(len(loss), test.cells, dtype=torch.float64, device=self.device)
            by_cell.index_add_(1, cell, right.double())
            by_class = torch.zeros(len(loss), 2, self.classes, dtype=torch.float64, device=self.device)
            by_class[:, 0].index_add_(1, y, right.double())
            by_class[:, 1].scatter_add_(1, predicted, torch.ones_like(predicted, dtype=torch.float64))
            # A single copy, because each one waits until the device is done.
            found.append(torch.cat([loss[:, None], by_cell, by_class.flatten(1)], 1).cpu().numpy())
        whole = np.concatenate(found)
        right_by_cell, answers = np.split(whole[:, 1:], [test.cells], axis=1)
        return whole[:, 0], right_by_cell, answers.reshape(len(models), 2, -1)

    def logits(self, models: torch.Tensor, positions: IntArray) -> torch.Tensor:
        """Return the logits (M, V, C) of models (M, P) on training samples."""
        return self.backend.outputs(models, torch.from_numpy(np.asarray(positions, dtype=np.int64)))

    def inputs(self, positions: IntArray) -> torch.Tensor:
        """Return training samples as a model sees them, ``(V, *sample)``: standardised, channels first."""
        rows = self.store.x[torch.as_tensor(positions, dtype=torch.int64)]
        return rows.view(len(rows), *self.sample)

    def _spans(
        self, models: torch.Tensor, run: IntArray, federation: IntArray, client: IntArray, part: str = "train"
    ) -> Spans:
        """Return where these clients' samples of a part are stored."""
        run, federation, client = (np.asarray(values, dtype=np.int64) for values in (run, federation, client))
        # Compiled code would read beyond the arrays.
        assert models.dtype == torch.float32 and models.shape[1] == self.n_params
        assert ((run >= 0) & (run < len(models)) & (client >= 0) & (client < self.store.clients[federation])).all()
        return self.store.spans(run, federation, client, part)

    # -- closing -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the threads and release the data."""
        self.backend.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def choose_engine(
    flat: FlatModel,
    sample: tuple[int, ...],
    local: LocalTraining,
    device: torch.device,
    task: Task,
    dtype: torch.dtype = torch.float32,
    precision: str = "tf32",
) -> tuple[str, str | None]:
    """Return the fastest way to train a model on a device, such as "compiled code on cpu", and why none is faster.

    Parameters
    ----------
    sample : tuple of int
        Shape of a sample.
    dtype : torch.dtype
        Of the samples.
    """
    if device.type == "cuda":
        why = stacking_obstacle(flat, sample, dtype, precision)
        return f"{_PLAIN if why else _STACKED} on cuda", why
    why = None
    if not task.fast or dtype != torch.float32 or precision == "bf16":
        why = "compiled code is for cross-entropy over classes, and samples that are numbers, in single precision"
    elif describe(flat, sample, local) is None or load_compiled("train") is None:
        why = "it is no nn.Sequential of convolutions of stride 1, max-pooling, ReLU and dense layers with biases"
        if load_compiled("train") is None:
            why = "there is no compiled code here"
    return f"{_PLAIN if why else _COMPILED} on cpu", why


def choose_device(device: str) -> torch.device:
    """Return the device of that name; "auto" is CUDA if available, otherwise the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        result = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"There is no device {device!r}: use 'auto', 'cpu', 'cuda' or 'cuda:<number>'.") from error
    if result.type not in ("cpu", "cuda"):
        raise DeviceError(f"The engine computes on 'cpu' or 'cuda'. Got {device!r}.")
    if result.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            f"The device {device!r} was asked for, but torch sees no CUDA device.",
            hint="use device='cpu', or 'auto' to take what is there",
        )
    if result.type == "cuda" and result.index is not None and result.index >= torch.cuda.device_count():
        raise DeviceError(f"There is no device {device!r}: torch sees {torch.cuda.device_count()} CUDA device(s).")
    return result
