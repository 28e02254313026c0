"""The engine: trains and evaluates many models at once over one shared set of samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

import numpy as np
import torch
from torch import nn

from fedcohort import rng
from fedcohort.arrays import AnyArray, FloatArray, IntArray
from fedcohort.errors import DeviceError, InputError, ParameterError
from fedcohort.simulate.engine.device import DeviceProgram
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.groups import JobTable
from fedcohort.simulate.engine.layers import read_layers
from fedcohort.simulate.engine.native import NativeBackend
from fedcohort.simulate.engine.pool import Recipe
from fedcohort.simulate.engine.processes import ProcessBackend, usable_cores
from fedcohort.simulate.engine.program import ModuleProgram, Program
from fedcohort.simulate.engine.stacked import stack, why_not_stacked
from fedcohort.simulate.engine.store import Store, sample_shape
from fedcohort.simulate.engine.tasks import choose_program
from fedcohort.simulate.engine.types import ClientData, Jobs, Trained
from fedcohort.simulate.local import LocalTraining
from fedcohort.simulate.models import build_model

log = logging.getLogger(__name__)


class Backend(Protocol):
    """What computes: processes on the CPU, or a device. Models are flat vectors, checked by the engine."""

    def train(
        self, table: JobTable, models: torch.Tensor, prox: float, correction: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return vectors (J, P) and first losses (J,)."""

    def losses(
        self, models: torch.Tensor, queries: IntArray, wanted: dict[str, bool], pseudo_models: torch.Tensor | None
    ) -> FloatArray:
        """Return (Q, 4): loss, validation loss, robust loss, pseudo-label loss."""

    def gradients(self, models: torch.Tensor, queries: IntArray) -> torch.Tensor:
        """Return full-batch gradients (Q, P)."""

    def evaluate(self, models: torch.Tensor) -> tuple[FloatArray, FloatArray]:
        """Return test loss (M,) and accuracy (M,)."""

    def logits(self, models: torch.Tensor, positions: IntArray) -> torch.Tensor:
        """Return logits (M, V, C) on training samples."""

    def close(self) -> None:
        """Let go of everything."""


class Engine:
    """Trains the clients of one or more federations, and evaluates models, all over the same data.

    Parameters
    ----------
    x_train, y_train, x_test, y_test : array
        Samples (n, F), (n, H, W) or (n, H, W, C) and labels (n,). Bytes are standardised per channel with the training
        set's mean and deviation; floating-point samples are taken as they are.
    classes : int
        Number of classes.
    federations : sequence of ClientData
        The clients; a job names its federation by position here.
    model : str
        A name of :data:`fedcohort.simulate.models.MODELS` or ``module:Class``.
    local : LocalTraining
        What a client does in a round.
    device : str
        "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:1".
    workers : int, optional
        Threads that compute, on the CPU; without a compiler, processes, started when the work turns out to be worth
        it. By default as many as there are cores.
    server_validation : array of int, optional
        Positions in the training set of the server's validation set, the default of :meth:`logits`.
    tf32 : bool
        On CUDA, let matrix products round their inputs to TF32, which convolutional networks gain much from; False
        computes in full single precision, as the CPU does.

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
    >>> trained.params.shape, trained.samples, loss.shape
    (torch.Size([2, 10]), array([12,  8]), (2,))
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
        server_validation: IntArray | None = None,
        tf32: bool = True,
    ) -> None:
        self.sample = sample_shape(x_train)
        _check_data(x_train, y_train, x_test, y_test, classes)
        for federation in federations:
            federation.check(len(x_train), classes)
        if workers is not None and workers < 1:
            raise ParameterError(f"The 'workers' parameter of Engine must be None or at least 1. Got {workers!r}.")
        self.classes = classes
        self.local = local
        self.model = model
        self.device = choose_device(device)
        self.y_train = np.asarray(y_train, dtype=np.int64)
        self.server_validation = None if server_validation is None else np.asarray(server_validation, dtype=np.int64)
        with torch.random.fork_rng(devices=[]):
            module = build_model(model, self.sample, classes)
        flat = FlatModel(module)
        self.n_params = flat.n_params
        reason = why_not_stacked(flat, self.sample)
        if reason is not None:
            log.warning(
                "the model %r cannot be batched, its clients are trained one after the other: %s", model, reason
            )
        self._closed = False
        self.store = Store.build(x_train, x_test, y_test, federations)
        self._backend: Backend
        if self.device.type == "cuda" and reason is None:
            net = stack(flat, self.sample)
            self._backend = DeviceProgram(net, self.store, local, classes=classes, device=self.device, tf32=tf32)
        else:
            self._backend = self._native(flat, workers) or self._processes(module, workers)

    def _native(self, flat: FlatModel, workers: int | None) -> NativeBackend | None:
        layers = None if flat.stateful or self.device.type != "cpu" else read_layers(flat, self.sample)
        if layers is None:
            return None
        return NativeBackend.of(self.store, self.local, layers, workers or usable_cores())

    def _processes(self, module: nn.Module, workers: int | None) -> ProcessBackend:
        program: Program
        if self.device.type == "cuda":
            program = ModuleProgram(FlatModel(module.to(self.device)), self.sample, self.local)
        else:
            program = choose_program(module, self.sample, self.local)
        recipe = Recipe(self.model, self.sample, self.classes, self.local)
        return ProcessBackend(self.store, program, recipe, device=self.device, workers=workers)

    # -- models --------------------------------------------------------------------------------------------------

    def init(self, seed: int) -> torch.Tensor:
        """Return the flat parameters (P,) of a freshly initialised model."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.stream(seed, rng.MODEL).integers(2**63)))
            module = build_model(self.model, self.sample, self.classes)
        return FlatModel(module).vector().to(self.device)

    # -- training ------------------------------------------------------------------------------------------------

    def train(
        self, models: torch.Tensor, jobs: Jobs, *, prox: float = 0.0, correction: torch.Tensor | None = None
    ) -> Trained:
        """Do the local training of every job.

        The gradient of a step is ``grad + prox * (w - w_global) + correction[j] + weight_decay * w``.

        Parameters
        ----------
        models : torch.Tensor
            Global models (R, P).
        jobs : Jobs
            What to train from which of them.
        prox : float
            Strength of the proximal term (FedProx).
        correction : torch.Tensor, optional
            (J, P), added to the gradient of each job (SCAFFOLD, FedDyn).
        """
        self._check_models(models)
        self._check_jobs(jobs, len(models))
        if correction is not None and tuple(correction.shape) != (len(jobs), self.n_params):
            raise InputError(
                f"The correction must be ({len(jobs)}, {self.n_params}), one vector per job. "
                f"Got {tuple(correction.shape)}."
            )
        table = JobTable.of(jobs, self.store, self.local)
        params, first_loss = self._backend.train(table, models, prox, correction)
        return Trained(params=params, steps=table.steps, samples=table.n, first_loss=first_loss)

    # -- evaluation ----------------------------------------------------------------------------------------------

    def client_losses(
        self,
        models: torch.Tensor,
        run: IntArray,
        federation: IntArray,
        client: IntArray,
        *,
        train: bool = True,
        validation: bool = False,
        robust: bool = False,
        pseudo: bool = False,
        pseudo_models: torch.Tensor | None = None,
    ) -> dict[str, FloatArray]:
        """Return mean losses of models on clients, each of shape (Q,).

        Parameters
        ----------
        models : torch.Tensor
            (R, P).
        run, federation, client : array of int
            (Q,) which model on which client.
        train, validation, robust, pseudo : bool
            Which of "loss" (cross-entropy on the training samples with the client's labels), "validation_loss",
            "robust_loss" (FLASH) and "pseudo_loss" (cross-entropy against pseudo-labels) to return.
        pseudo_models : torch.Tensor, optional
            (R, P) models that give the pseudo-labels; default ``models``.

        Returns
        -------
        dict
            NaN for a client without samples of that kind.
        """
        self._check_models(models)
        queries = self._queries(run, federation, client, len(models))
        wanted = {"train": train, "validation": validation, "robust": robust, "pseudo": pseudo}
        if pseudo_models is not None:
            self._check_models(pseudo_models)
        columns = self._backend.losses(models, queries, wanted, pseudo_models).T.copy()
        names = {"train": "loss", "validation": "validation_loss", "robust": "robust_loss", "pseudo": "pseudo_loss"}
        return {names[key]: columns[row] for row, key in enumerate(names) if wanted[key]}

    def client_gradients(
        self, models: torch.Tensor, run: IntArray, federation: IntArray, client: IntArray
    ) -> torch.Tensor:
        """Return the full-batch gradient (Q, P) of each client's mean cross-entropy at the given models (R, P)."""
        self._check_models(models)
        queries = self._queries(run, federation, client, len(models))
        return self._backend.gradients(models, queries)

    def evaluate(self, models: torch.Tensor) -> tuple[FloatArray, FloatArray]:
        """Return the test loss (M,) and accuracy (M,) of models (M, P)."""
        self._check_models(models)
        return self._backend.evaluate(models)

    def logits(self, models: torch.Tensor, positions: IntArray | None = None) -> torch.Tensor:
        """Return the logits (M, V, C) of models (M, P) on training samples, by default the server's validation set."""
        self._check_models(models)
        if positions is None:
            if self.server_validation is None:
                raise InputError("This engine has no server validation set; give the positions of the samples.")
            positions = self.server_validation
        positions = np.asarray(positions, dtype=np.int64)
        if len(positions) and not 0 <= positions.min() <= positions.max() < self.store.shape.n_train:
            raise InputError(f"Positions must be in [0, {self.store.shape.n_train}), the training set.")
        return self._backend.logits(models, positions)

    def inputs(self, positions: IntArray) -> torch.Tensor:
        """Return training samples as a model sees them, (V, *sample): standardised, channels first."""
        rows = self.store.x[torch.as_tensor(positions, dtype=torch.int64)]
        return rows.view(len(rows), *self.sample)

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_models(self, models: torch.Tensor) -> None:
        if self._closed:
            raise InputError("This engine is closed.")
        if models.ndim != 2 or models.shape[1] != self.n_params:
            raise InputError(
                f"Models must be (number, {self.n_params}), one flat vector each. Got {tuple(models.shape)}."
            )
        if models.dtype != torch.float32:
            raise InputError(f"Models must be float32. Got {models.dtype}.")

    def _check_jobs(self, jobs: Jobs, rows: int) -> None:
        for name in ("run", "federation", "round", "seed", "steps"):
            values = getattr(jobs, name)
            if values is not None and len(values) != len(jobs):
                raise InputError(f"Jobs has {len(jobs)} clients but {len(values)} values of {name!r}.")
        self._queries(jobs.run, jobs.federation, jobs.client, rows)
        for name in ("round", "seed", "steps"):
            values = getattr(jobs, name)
            if values is not None and len(values) and np.min(values) < 0:
                raise InputError(f"The {name!r} of a job must not be negative. Got {int(np.min(values))}.")

    def _queries(self, run: IntArray, federation: IntArray, client: IntArray, rows: int) -> IntArray:
        """Check (run, federation, client) and return (Q, 4): run, first slot, training samples, all samples."""
        run, federation, client = (np.asarray(values, dtype=np.int64) for values in (run, federation, client))
        if not len(run) == len(federation) == len(client):
            raise InputError(
                f"run, federation and client must be of one length. Got {len(run)}, {len(federation)}, {len(client)}."
            )
        result = np.zeros((len(run), 4), dtype=np.int64)
        if not len(run):
            return result
        _check_range("run", run, rows)
        _check_range("federation", federation, len(self.store.first))
        result[:, 0] = run
        for number in np.unique(federation):
            mine = federation == number
            _check_range("client", client[mine], len(self.store.first[number]))
            result[mine, 1] = self.store.first[number][client[mine]]
            result[mine, 2] = self.store.train[number][client[mine]]
            result[mine, 3] = self.store.size[number][client[mine]]
        return result

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers and let go of the data."""
        if not self._closed:
            self._closed = True
            self._backend.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def choose_device(device: str) -> torch.device:
    """Return the device of that name; "auto" is CUDA where there is one, else the CPU."""
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


def _check_data(x_train: AnyArray, y_train: AnyArray, x_test: AnyArray, y_test: AnyArray, classes: int) -> None:
    for which, x, y in (("training", x_train, y_train), ("test", x_test, y_test)):
        if len(x) != len(y):
            raise InputError(f"The {which} set has {len(x)} samples but {len(y)} labels.")
        if not len(x):
            raise InputError(f"The {which} set is empty.")
        if np.min(y) < 0 or np.max(y) >= classes:
            raise InputError(f"The labels of the {which} set must be in [0, {classes}).")
    if x_train.shape[1:] != x_test.shape[1:]:
        raise InputError(f"Training samples are {x_train.shape[1:]}, test samples {x_test.shape[1:]}.")
    if x_train.dtype != x_test.dtype:
        raise InputError(f"Training samples are {x_train.dtype}, test samples {x_test.dtype}; give both as one.")


def _check_range(name: str, values: IntArray, limit: int) -> None:
    if values.min() < 0 or values.max() >= limit:
        wrong = int(values[(values < 0) | (values >= limit)][0])
        raise InputError(f"A {name} must be in [0, {limit}). Got {wrong}.")
