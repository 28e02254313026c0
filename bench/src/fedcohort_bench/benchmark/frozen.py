"""Freeze what a benchmark runs before it runs, so that results of different code are never mixed.

A tag is a hash of the suite's version and of each selector's code and parameters, without comments and docstrings. It
is written before the first round. A changed selector has a different tag. A folder can only be continued under its own
tag, and pieces can only be merged if they share one.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import inspect
import io
import json
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fedcohort
from fedcohort.core.errors import InputError
from fedcohort.core.files import read_file
from fedcohort.simulate.config.experiment import Experiment, values_of
from fedcohort.simulate.store.writer import write_json
from fedcohort_bench.benchmark.suite import VERSION

FILE = "frozen.json"


@dataclass(frozen=True)
class Frozen:
    """What a benchmark ran.

    Attributes
    ----------
    suite : int
        Version of the suite.
    selectors : mapping of str to str
        Hash of code and parameters, by label.
    """

    suite: int
    selectors: Mapping[str, str]

    @classmethod
    def of(cls, experiment: Experiment) -> Frozen:
        """Hash what an experiment is going to run."""
        hashes = {}
        for plan in experiment.plans:
            if plan.label not in hashes:
                # Other parameters are another selector, even with the same code.
                parameters = json.dumps(values_of(plan.selector), sort_keys=True, default=str)
                hashes[plan.label] = code_hash(type(plan.selector), plan.selector.name, parameters)
        return cls(VERSION, hashes)

    @classmethod
    def read(cls, folder: Path) -> Frozen:
        """Read what a folder ran."""
        try:
            return cls.from_dict(json.loads(read_file(folder / FILE)))
        except FileNotFoundError:
            raise InputError(
                f"{folder} has no {FILE}, so nobody knows whether its selectors have changed since it was run.",
                hint="run it with 'fedcohort bench', which writes that file before the first round",
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{folder / FILE} is damaged ({type(error).__name__}: {error}).") from error

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Frozen:
        """Read the output of :meth:`to_dict`; the tag is computed again, not read."""
        return cls(int(table["suite"]), {str(k): str(v) for k, v in table["selectors"].items()})

    def write(self, folder: Path) -> None:
        """Write it to a folder; called before the first round."""
        write_json(folder / FILE, self.to_dict())

    @property
    def tag(self) -> str:
        """A short name for the suite and all selectors."""
        text = json.dumps([self.suite, sorted(self.selectors.items())])
        return f"v{self.suite}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"tag": self.tag, "suite": self.suite, "selectors": dict(self.selectors)}


def check_same(before: Frozen, now: Frozen, where: Path) -> None:
    """Check that results may join those in ``where``: the same suite, and the same code of each selector."""
    if before.suite != now.suite:
        raise InputError(
            f"{where} is of version {before.suite} of the benchmark, not {now.suite}. Results of different versions "
            "cannot be compared.",
            hint="run it again in another folder",
        )
    changed = sorted(label for label, digest in now.selectors.items() if before.selectors.get(label, digest) != digest)
    if changed:
        raise InputError(
            f"{where} (tag {before.tag}) was run with different code or parameters of {', '.join(changed)} (tag now "
            f"{now.tag}): a selector was changed after its report seeds were run.",
            hint="run everything again in a new folder; if the default selector was changed, raise the suite's version "
            "and use new seeds",
        )


def merge_frozen(folders: Sequence[Path]) -> Frozen:
    """Return what several folders ran; they must agree on the suite and on the selectors they share."""
    first, *others = [Frozen.read(folder) for folder in folders]
    labels = dict(first.selectors)
    for folder, other in zip(folders[1:], others, strict=True):
        check_same(first, other, folder)
        labels |= other.selectors
    return Frozen(first.suite, labels)


def code_hash(cls: type, *more: str) -> str:
    """Return the SHA-256 of a class's code, without comments and docstrings: its files, and ours that they import."""
    digest = hashlib.sha256("\0".join(more).encode())
    # Sorted by content, not by path: where the package is installed must not change the hash.
    for code in sorted(_code(content) for content in sources(cls)):
        digest.update(hashlib.sha256(code.encode()).digest())
    return digest.hexdigest()


def _code(content: bytes) -> str:
    r"""Return the lines of a source without comments, docstrings and blank lines.

    >>> print(_code(b'def f():  # why\n    "What."\n\n    return "# 1"\n'))
    def f():
        return "# 1"
    """
    # Blank lines are dropped last, so that positions in the source stay valid until then.
    lines = content.decode().splitlines()
    for token in tokenize.tokenize(io.BytesIO(content).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines[text.lineno - 1 : text.end_lineno] = [""] * ((text.end_lineno or text.lineno) - text.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def sources(cls: type) -> list[bytes]:
    """Return the contents of a class's files, and of those of our selectors that they import."""
    root, standard = Path(fedcohort.__file__).parent, Path(ast.__file__).parent
    modules = [base for base in cls.__mro__ if not base.__module__.startswith(("builtins", "typing"))]
    todo = [
        path
        for path in {Path(inspect.getfile(base)) for base in modules}
        # Not what the standard library has, or fedcohort outside the selectors.
        if path.is_file() and path.parent != standard
        if root not in path.parents or root / "selectors" in path.parents
    ]
    seen: dict[Path, bytes] = {}
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen[path] = read_file(path)
        names = set()  # ``from a import b`` may mean the module a.b
        for node in ast.walk(ast.parse(seen[path])):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        for name in names:
            with contextlib.suppress(ModuleNotFoundError):  # a function or class, not a module
                spec = importlib.util.find_spec(name) if name.startswith("fedcohort.selectors.") else None
                if spec is not None and spec.origin is not None:
                    todo.append(Path(spec.origin))
    return list(seen.values())
