"""The engine: trains and evaluates many models at once over one shared set of samples."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from types import TracebackType

import numpy as np
import torch

from fedcohort import rng
from fedcohort.arrays import AnyArray, FloatArray, IntArray
from fedcohort.errors import DeviceError, InputError, ParameterError
from fedcohort.simulate.engine.groups import JobTable
from fedcohort.simulate.engine.pool import Arena, Pool
from fedcohort.simulate.engine.program import ModuleProgram
from fedcohort.simulate.engine.store import Store, sample_shape
from fedcohort.simulate.engine.tasks import EVALUATION_CHUNK, Executor, Work, choose_program, train_work
from fedcohort.simulate.engine.types import ClientData, Jobs, Trained
from fedcohort.simulate.local import LocalTraining
from fedcohort.simulate.models import build_model

log = logging.getLogger(__name__)

_POOL_AFTER = 1.0  # seconds of work after which starting workers is worth its second or two
_POOL_FROM = 1.5e-3  # seconds a call must be expected to last for waking the workers to pay


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
        Processes that compute, on the CPU. By default as many as there are cores, started when the work turns out
        to be worth it; 1 keeps everything in this process.
    server_validation : array of int, optional
        Positions in the training set of the server's validation set, the default of :meth:`logits`.

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
        program = choose_program(module, self.sample, local)
        if isinstance(program, ModuleProgram) and program.flat.stateful:
            log.warning(
                "the model %r keeps state of its own (BatchNorm?) and cannot be batched: its clients are trained one "
                "after the other; its running statistics are averaged like parameters",
                model,
            )
        self.n_params = program.flat.n_params
        self.store = Store.build(x_train, x_test, y_test, federations, program.order)
        self._executor = Executor(self.store, program)
        self._arena = Arena()
        self._pool: Pool | None = None
        self._processes = workers or os.cpu_count() or 1
        if model.startswith("__main__:") or not hasattr(os, "register_at_fork"):
            self._processes = 1  # a worker could not import the model, or could not be given files
        self._spent = 0.0
        self._cost: dict[str, float] = {}  # seconds of one call by kind, as last seen
        self._closed = False
        if workers is not None and workers > 1 and self._processes > 1:
            self._start_pool()
            self._explicit = True
        else:
            self._explicit = False

    # -- models --------------------------------------------------------------------------------------------------

    def init(self, seed: int) -> torch.Tensor:
        """Return the flat parameters (P,) of a freshly initialised model."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.stream(seed, rng.MODEL).integers(2**63)))
            module = build_model(self.model, self.sample, self.classes)
        flat = type(self._executor.program.flat)(module)
        return flat.vector().to(self.device)

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
                f"The correction must be ({len(jobs)}, {self.n_params}), one vector per job. Got {tuple(correction.shape)}."
            )
        table = JobTable.of(jobs, self.store, self.local)
        work = train_work(table, self._executor.program, prox, self._tensor, correction is not None, len(models))
        work.tensors["models"].copy_(models)
        if correction is not None:
            work.tensors["correction"].copy_(correction)
        self._run(work)
        return Trained(
            params=work.tensors["out"].clone(),
            steps=table.steps,
            samples=table.n,
            first_loss=work.tensors["first_loss"].numpy().copy(),
        )

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
        tensors = {"queries": self._filled("queries", queries), "models": self._filled("models", models)}
        if pseudo_models is not None:
            self._check_models(pseudo_models)
            tensors["pseudo_models"] = self._filled("pseudo_models", pseudo_models)
        tensors["out"] = self._tensor("out", torch.float64, (len(queries), 4))
        tensors["out"].fill_(float("nan"))
        self._run(Work("losses", len(queries), tensors, {name: float(flag) for name, flag in wanted.items()}))
        columns = tensors["out"].numpy().T.copy()
        names = {"train": "loss", "validation": "validation_loss", "robust": "robust_loss", "pseudo": "pseudo_loss"}
        return {names[key]: columns[row] for row, key in enumerate(names) if wanted[key]}

    def client_gradients(
        self, models: torch.Tensor, run: IntArray, federation: IntArray, client: IntArray
    ) -> torch.Tensor:
        """Return the full-batch gradient (Q, P) of each client's mean cross-entropy at the given models (R, P)."""
        self._check_models(models)
        queries = self._queries(run, federation, client, len(models))
        tensors = {
            "queries": self._filled("queries", queries),
            "models": self._filled("models", models),
            "out": self._tensor("out", torch.float32, (len(queries), self.n_params)),
        }
        self._run(Work("gradients", len(queries), tensors))
        return tensors["out"].clone()

    def evaluate(self, models: torch.Tensor) -> tuple[FloatArray, FloatArray]:
        """Return the test loss (M,) and accuracy (M,) of models (M, P)."""
        self._check_models(models)
        count = self.store.shape.n_test
        chunks = -(-count // EVALUATION_CHUNK)
        tensors = {
            "models": self._filled("models", models),
            "out": self._tensor("out", torch.float64, (len(models) * chunks, 2)),
        }
        self._run(Work("evaluate", len(models) * chunks, tensors, {"chunks": chunks}))
        sums = tensors["out"].numpy().reshape(len(models), chunks, 2).sum(1)
        return sums[:, 0] / count, sums[:, 1] / count

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
        chunks = -(-len(positions) // EVALUATION_CHUNK)
        tensors = {
            "models": self._filled("models", models),
            "positions": self._filled("positions", positions),
            "out": self._tensor("out", torch.float32, (len(models), len(positions), self.classes)),
        }
        self._run(Work("logits", len(models) * chunks, tensors, {"chunks": chunks}))
        return tensors["out"].clone()

    def inputs(self, positions: IntArray) -> torch.Tensor:
        """Return training samples as a model sees them, (V, *sample): standardised, channels first."""
        rows = self.store.x[torch.as_tensor(positions, dtype=torch.int64)]
        order = self._executor.program.order
        if order is not None:
            rows = rows[:, torch.from_numpy(np.argsort(order))]
        return rows.view(len(rows), *self.sample)

    # -- running -------------------------------------------------------------------------------------------------

    def _run(self, work: Work) -> None:
        """Do the work here, or here and in the workers, whichever is expected to be sooner."""
        if self._closed:
            raise InputError("This engine is closed.")
        claims = self._tensor("claims", torch.uint8, (max(work.units, 1),))
        claims.zero_()
        began = time.perf_counter()
        expected = self._cost.get(work.kind, 0.0) * work.units
        pool = self._pool
        pooled = (
            pool is not None
            and work.units > 1
            and (self._explicit or expected > _POOL_FROM)
            and pool.ready(wait=self._explicit)
        )
        with _one_thread():
            if pooled and pool is not None:
                try:
                    pool.start(work, claims)
                    self._executor.run(work, claims, 0)
                    pool.finish()
                except BaseException:
                    # Workers may still be writing; a pool whose answers are out of step is of no use to anybody.
                    pool.close()
                    self._pool = None
                    raise
            else:
                self._executor.run(work, claims, 0)
        elapsed = time.perf_counter() - began
        if not pooled and work.units:
            self._cost[work.kind] = elapsed / work.units
        self._spent += elapsed
        if self._pool is None and self._processes > 1 and self._spent > _POOL_AFTER and not self._explicit:
            self._start_pool()

    def _start_pool(self) -> None:
        self._pool = Pool(
            self._processes - 1,
            self.store,
            model=self.model,
            sample=self.sample,
            classes=self.classes,
            local=self.local,
            arena=self._arena,
        )

    def _tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        return self._arena.tensor(name, dtype, shape)

    def _filled(self, name: str, values: torch.Tensor | IntArray) -> torch.Tensor:
        source = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(values))
        return self._tensor(name, source.dtype, tuple(source.shape)).copy_(source)

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_models(self, models: torch.Tensor) -> None:
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
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self._closed = True

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_pool", None) is not None:
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


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread: the workers are the parallelism, and results do not depend on who does a unit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
