"""Compile this package's C sources when they are first needed.

This needs only a C compiler: the one that ``FEDCOHORT_CC`` names, or cc, gcc or clang, or the one in the package
``ziglang``, which pip installs anywhere (``pip install "fedcohort[compiler]"``). A library is kept in the user's cache
folder under a name that depends on its sources, the compiler and the processor, and includes a hash of the library. A
new library is kept only if it passes a trial that compares it with numpy or torch. If there is no compiler, or any of
this fails, one warning is logged and the same work is done without compiled code. Setting ``FEDCOHORT_CC`` to the empty
string has the same effect, without a warning.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.resources
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedcohort
from fedcohort.core.arrays import AnyArray

log = logging.getLogger(__name__)

# No -ffast-math, which lets a compiler reorder sums: results would depend on its version. Fused multiply-adds are
# allowed; they round once instead of twice.
FLAGS = ("-O2", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-pthread")
_ADVICE = 'install a C compiler, or one from PyPI with: pip install "fedcohort[compiler]"'
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
        "fedcohort_plans": (None, [_pointer, _number, _number, ctypes.c_uint64, _pointer, _pointer]),
    },
}
_TRIALS = {
    "train": "from fedcohort.simulate.engine.native import try_out",
    "plans": "from fedcohort.simulate.engine.plans import try_out",
}


@functools.cache
def load_compiled(name: str) -> ctypes.CDLL | None:
    """Return the library built from ``csrc/NAME.c``, compiling it if necessary; None if that is impossible."""
    if os.environ.get("FEDCOHORT_CC") == "":
        log.info("the engine uses no compiled code, because FEDCOHORT_CC is empty")
        return None
    try:
        compiler, sources, folder = find_compiler(), read_sources(), cache_folder()
        start = f"{name}-{_fingerprint(sources, compiler)}"
        # Only what belongs to this user, and has not changed since it passed its trial.
        found = (path for path in sorted(folder.glob(f"{start}-*.so")) if _is_ours(path))
        kept = next((path for path in found if path.stem.rpartition("-")[2] == _hash(path)), None)
        return load(name, kept or build(name, sources, compiler, folder, start))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        _warn_once(f"the engine does without machine code and is several times slower: {error}; {_ADVICE}")
        return None


@functools.cache
def _warn_once(message: str) -> None:
    """Log a warning once, however many libraries it concerns."""
    log.warning(message)


def find_compiler() -> list[str]:
    """Return the command that compiles C; raise :class:`RuntimeError` if there is none."""
    named = os.environ.get("FEDCOHORT_CC")
    if named:
        program, *arguments = shlex.split(named)
        if (path := shutil.which(program)) is None:
            raise RuntimeError(f"FEDCOHORT_CC names {named!r}, which is no program here")
        return [path, *arguments]
    for program in ("cc", "gcc", "clang"):
        if (path := shutil.which(program)) is not None:
            return [path]
    spec = importlib.util.find_spec("ziglang")
    for place in (spec.submodule_search_locations if spec else None) or ():
        if (path := shutil.which("zig", path=place)) is not None:
            return [path, "cc"]
    raise RuntimeError("there is no C compiler")


def flags(compiler: Sequence[str]) -> tuple[str, ...]:
    """Return the compiler's flags, including the one that optimises for this processor."""
    by_cpu = platform.machine() in ("aarch64", "arm64") or Path(compiler[0]).stem == "zig"
    return (*FLAGS, "-mcpu=native" if by_cpu else "-march=native")


def read_sources() -> dict[str, bytes]:
    """Return the C sources by name."""
    folder = importlib.resources.files(__package__) / "csrc"
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir(), key=lambda file: file.name)}


def _fingerprint(sources: dict[str, bytes], compiler: Sequence[str]) -> str:
    """Return a hash of everything that a library depends on: sources, flags, compiler and processor."""
    digest = hashlib.sha256()
    for name, text in sources.items():
        digest.update(name.encode() + text)
    digest.update(" ".join((*compiler, *flags(compiler), platform.machine(), np.__version__)).encode())
    digest.update(subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=60).stdout)
    try:
        # A home directory may be shared by machines whose processors have different instructions.
        cpu = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
        digest.update("\n".join(line for line in cpu if line.startswith(("model", "flags", "Features"))).encode())
    except OSError:
        digest.update(platform.processor().encode())
    return digest.hexdigest()[:24]


def cache_folder() -> Path:
    """Return a folder that only this user can write to; if there is none, one that lasts as long as the process."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedcohort"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(folder):
            _warn_once(f"the cache folder {folder} can be written by somebody else: compiled code is kept nowhere")
        elif os.access(folder, os.W_OK):
            return folder
    return Path(_temporary_folder().name)


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Return the folder that is removed at the end of the process."""
    return tempfile.TemporaryDirectory(prefix="fedcohort-")


def _is_ours(path: Path) -> bool:
    """Whether a file or folder belongs to this user and nobody else may write to it."""
    if os.name != "posix":
        return True
    found = path.lstat()  # not stat: somebody else's link could point to a file of ours
    return found.st_uid == os.getuid() and not stat.S_ISLNK(found.st_mode) and not found.st_mode & 0o022


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def compile_library(name: str, sources: dict[str, bytes], command: Sequence[str], folder: Path) -> Path:
    """Write the sources into ``folder`` and compile ``NAME.c`` there with ``command``; return the library."""
    for file, text in sources.items():
        (folder / file).write_bytes(text)
    built = folder / f"{name}.so"
    whole = [*command, str(folder / f"{name}.c"), "-o", str(built), "-lm"]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(whole)} failed: {done.stderr.strip()[-500:]}")
    return built


def build(name: str, sources: dict[str, bytes], compiler: Sequence[str], folder: Path, start: str) -> Path:
    """Compile a library, try it out, and only then move it into ``folder``; several processes may do so at once."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        built = compile_library(name, sources, [*compiler, *flags(compiler)], Path(place))
        # In a separate process, in case it crashes; isolated, so that nothing in the working folder is imported. This
        # package comes first, because another version of it may be installed.
        package, *others = (str(Path(module.__path__[0]).parent) for module in (fedcohort, np, torch))
        paths = f"sys.path.insert(0, {package!r}); sys.path += {others!r}"
        code = f"import sys; {paths}; {_TRIALS[name]}; try_out({str(built)!r})"
        done = subprocess.run(
            [sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the library did not pass its trial: {done.stderr.strip()[-500:] or done.returncode}")
        built.chmod(0o700)
        kept = folder / f"{start}-{_hash(built)}.so"
        os.replace(built, kept)  # in one step, so that no other process loads half a library
        return kept


def load(name: str, path: Path) -> ctypes.CDLL:
    """Load a library and declare its functions."""
    library = ctypes.CDLL(str(path))
    for function, (result, arguments) in _SIGNATURES[name].items():
        getattr(library, function).restype = result
        getattr(library, function).argtypes = arguments
    return library


def address(array: torch.Tensor | AnyArray) -> int:
    """Return the address of the numbers of a contiguous array."""
    contiguous = array.is_contiguous() if isinstance(array, torch.Tensor) else array.flags.c_contiguous
    if not contiguous:
        raise ValueError("machine code wants contiguous arrays")
    return array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data
