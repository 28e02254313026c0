"""Training in machine code: ``native.c``, compiled for this machine when it is first needed.

A C compiler is all it wants; the library is kept in the user's cache folder under a name that changes with the source,
the compiler and the processor. A fresh library is kept only if it trains a small network as torch does. Where there is
no compiler, or anything of that fails, the programs made of torch's operators do the work.

``FEDCOHORT_CC`` names the compiler (default ``cc``); set to nothing, no machine code is used.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.resources
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedcohort.arrays import AnyArray
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.groups import TrainTask
from fedcohort.simulate.engine.layers import Convolution, Dense, Flatten, Layer, Pool, Relu, read_layers
from fedcohort.simulate.engine.program import Program
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.local import LocalTraining

log = logging.getLogger(__name__)

_FLAGS = ("-O2", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared")
_WIDTH = 64  # samples of one forward pass outside training
_MOST_LAYERS = 32  # as in native.c
_MOST_ROWS = 4096
_MOST_FEATURES = 2**16  # between convolutions and dense layers
_ALIGNMENT = 64  # bytes


def describe(layers: list[Layer]) -> list[int] | None:
    """Return the numbers from which ``native.c`` builds the network, or None if it has something else in it.

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
        self._where = _address(self._settings)

    @staticmethod
    def of(flat: FlatModel, sample: tuple[int, ...], local: LocalTraining, layers: list[Layer]) -> NativeProgram | None:
        """Return the program if the network and the machine allow it."""
        description = describe(layers)
        if description is None or local.batch_size > _MOST_ROWS:
            return None
        library = native_library()
        return None if library is None else NativeProgram(flat, sample, local, description, library)

    def train(self, task: TrainTask, store: Store) -> None:
        """Train each job of the group."""
        table = task.table
        row = 4 * self.flat.n_params  # bytes of a flat vector
        data, models, out = _address(store.x), _address(task.models), _address(task.out)
        samples, labels = _address(store.sample), _address(store.label)
        corrections = None if task.correction is None else _address(task.correction)
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
                None if pseudo is None else _address(pseudo),
                _address(plan.indices),
                _address(plan.counts),
                _address(rates),
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
        self._library.fedcohort_scores(*opening, _address(vector), _address(x), len(x), _WIDTH, _address(out))
        return out

    def gradient(self, vector: torch.Tensor, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        """Write the full-batch gradient, summed over chunks."""
        x, y = x.contiguous(), y.contiguous()
        self._library.fedcohort_gradient(
            *self._opening(_WIDTH), _address(vector), _address(x), _address(y), len(x), _WIDTH, _address(out)
        )

    def _opening(self, width: int) -> tuple[int, int]:
        """Return the addresses of the description and of scratch enough for batches of ``width`` samples."""
        if width > self._room:
            size = self._library.fedcohort_scratch(_address(self._description), width)
            self._scratch = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
            self._room = width
            aligned = -(-self._scratch.data_ptr() // _ALIGNMENT) * _ALIGNMENT
            self._opened = _address(self._description), aligned
        return self._opened


def _address(array: torch.Tensor | AnyArray) -> int:
    contiguous = array.is_contiguous() if isinstance(array, torch.Tensor) else array.flags.c_contiguous
    if not contiguous:
        raise ValueError("machine code wants contiguous arrays")
    return array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data


# -- the library -----------------------------------------------------------------------------------------------------


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """Return the compiled library, compiling it if that has not been done yet; None where it cannot be had."""
    compiler = shutil.which(os.environ.get("FEDCOHORT_CC", "cc") or "no compiler is wanted")
    if compiler is None:
        log.info("no C compiler: the CPU engine uses torch's operators (FEDCOHORT_CC names a compiler)")
        return None
    try:
        source = importlib.resources.files(__package__).joinpath("native.c").read_bytes()
        kept = _cache_folder() / f"native-{_fingerprint(source, compiler)}.so"
        if not kept.exists():
            _compile(source, compiler, kept)
        return _load(kept)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        log.warning("the CPU engine uses torch's operators, since its machine code could not be made: %s", error)
        return None


def _fingerprint(source: bytes, compiler: str) -> str:
    """Name what the library depends on: source, flags, compiler and processor."""
    digest = hashlib.sha256(source)
    digest.update(" ".join((compiler, *_FLAGS, platform.machine())).encode())
    digest.update(subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=30).stdout)
    try:
        cpu = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
        digest.update("\n".join(line for line in cpu if line.startswith(("model", "flags", "Features"))).encode())
    except OSError:
        digest.update(platform.processor().encode())
    return digest.hexdigest()[:24]


def _cache_folder() -> Path:
    """Return a folder that belongs to this user alone."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedcohort"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="fedcohort-"))


def _compile(source: bytes, compiler: str, kept: Path) -> None:
    """Compile, try out, and only then put the library where it is looked for; two processes may do so at once."""
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        written, built = Path(folder) / "native.c", Path(folder) / "native.so"
        written.write_bytes(source)
        command = [compiler, *_FLAGS, str(written), "-o", str(built), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
        _try_out(built)
        os.replace(built, kept)


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.fedcohort_scratch.argtypes = [pointer, number]
    library.fedcohort_scratch.restype = number
    library.fedcohort_train.argtypes = [*[pointer] * 9, number, number, *[pointer] * 4]
    library.fedcohort_train.restype = ctypes.c_double
    library.fedcohort_scores.argtypes = [*[pointer] * 4, number, number, pointer]
    library.fedcohort_scores.restype = None
    library.fedcohort_gradient.argtypes = [*[pointer] * 5, number, number, pointer]
    library.fedcohort_gradient.restype = None
    return library


def _try_out(path: Path) -> None:
    """Raise unless the library agrees with torch on a small network; in a process of its own, should it crash."""
    code = f"from fedcohort.simulate.engine.native import check; check({str(path)!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the library did not pass its trial: {done.stderr.strip()[-500:] or done.returncode}")


def check(path: str) -> None:
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
    program = NativeProgram(flat, sample, LocalTraining(steps=1), description, _load(Path(path)))
    x, y = torch.randn(70, *sample), torch.randint(10, (70,))
    logits = module(x)
    wanted = torch.autograd.grad(nn.functional.cross_entropy(logits, y), list(module.parameters()))
    vector, got = flat.vector(), torch.empty(flat.n_params)
    program.gradient(vector, x.flatten(1), y, got)
    if not torch.allclose(program.scores(vector, x.flatten(1)).t(), logits, rtol=1e-4, atol=1e-5):
        raise RuntimeError("its logits differ from torch's")
    if not torch.allclose(got, torch.cat([part.reshape(-1) for part in wanted]), rtol=1e-3, atol=1e-6):
        raise RuntimeError("its gradient differs from torch's")
