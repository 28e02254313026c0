"""C sources of this package, compiled for this machine when they are first needed.

A C compiler is all it wants; a library is kept in the user's cache folder under a name that changes with its sources,
the compiler and the processor. A fresh one is kept only if it passes its trial, which compares it with numpy or torch.
Where there is no compiler, or anything of that fails, the same work is done without it.

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
from typing import Any

import numpy as np
import torch

from fedcohort.arrays import AnyArray

log = logging.getLogger(__name__)

_FLAGS = ("-O2", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-pthread")
_pointer, _number = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES: dict[str, dict[str, tuple[Any, list[Any]]]] = {
    "train": {
        "fedcohort_scratch": (_number, [_pointer, _number]),
        "fedcohort_run": (
            None,
            [*[_pointer] * 3, _number, _number, _pointer, _number, _pointer, _number, _number],
        ),
    },
    "plans": {
        "fedcohort_plan": (
            None,
            [ctypes.c_uint64, _pointer, *[_number] * 4, _pointer, _pointer],
        ),
    },
}
_TRIALS = {
    "train": "from fedcohort.simulate.engine.native import try_out",
    "plans": "from fedcohort.simulate.engine.plans import try_out",
}


@functools.cache
def compiled(name: str) -> ctypes.CDLL | None:
    """Return the library made of ``csrc/NAME.c``, compiling it if need be; None where it can't be had."""
    named = os.environ.get("FEDCOHORT_CC")
    compiler = shutil.which("cc" if named is None else named)
    if compiler is None and named:
        log.warning("FEDCOHORT_CC names %r, which is no program here: the engine does without machine code", named)
        return None
    if compiler is None:
        log.info("no C compiler: the engine does without machine code (FEDCOHORT_CC names a compiler)")
        return None
    try:
        sources = read_sources()
        kept = _cache_folder() / f"{name}-{_fingerprint(sources, compiler)}.so"
        if not kept.exists():
            build(name, sources, compiler, kept)
        return load(name, kept)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        log.warning("the engine does without machine code, since it could not be made: %s", error)
        return None


def read_sources() -> dict[str, bytes]:
    """Return the C sources by name."""
    folder = importlib.resources.files(__package__) / "csrc"
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir(), key=lambda file: file.name)}


def _fingerprint(sources: dict[str, bytes], compiler: str) -> str:
    """Name what a library depends on: sources, flags, compiler and processor."""
    digest = hashlib.sha256()
    for name, text in sources.items():
        digest.update(name.encode() + text)
    digest.update(" ".join((compiler, *_FLAGS, platform.machine(), np.__version__)).encode())
    digest.update(subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=30).stdout)
    try:
        cpu = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
        digest.update("\n".join(line for line in cpu if line.startswith(("model", "flags", "Features"))).encode())
    except OSError:
        digest.update(platform.processor().encode())
    return digest.hexdigest()[:24]


def _cache_folder() -> Path:
    """Return a folder that belongs to this user; one that is forgotten with the process where there is none."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedcohort"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="fedcohort-"))
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="fedcohort-"))


def build(name: str, sources: dict[str, bytes], compiler: str, kept: Path) -> None:
    """Compile, try out, and only then put the library where it is looked for; several processes may do so at once."""
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        for file, text in sources.items():
            (Path(folder) / file).write_bytes(text)
        built = Path(folder) / f"{name}.so"
        command = [compiler, *_FLAGS, str(Path(folder) / f"{name}.c"), "-o", str(built), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
        # In a process of its own, should it crash.
        code = f"{_TRIALS[name]}; try_out({str(built)!r})"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the library did not pass its trial: {done.stderr.strip()[-500:] or done.returncode}")
        os.replace(built, kept)


def load(name: str, path: Path) -> ctypes.CDLL:
    """Load a library and declare its functions."""
    library = ctypes.CDLL(str(path))
    for function, (result, arguments) in _SIGNATURES[name].items():
        getattr(library, function).restype = result
        getattr(library, function).argtypes = arguments
    return library


def address(array: torch.Tensor | AnyArray) -> int:
    """Return where the numbers of a contiguous array lie."""
    contiguous = array.is_contiguous() if isinstance(array, torch.Tensor) else array.flags.c_contiguous
    if not contiguous:
        raise ValueError("machine code wants contiguous arrays")
    return array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data
