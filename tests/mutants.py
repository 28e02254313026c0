"""Plants mistakes in the product, one at a time, and counts how many of them the tests notice.

    python -m tests.mutants OUT               200 mutants, always the same ones for the same code
    python -m tests.mutants OUT --count 60    the first sixty of them

What OUT already has is not done again, so the same command goes on where it stopped. One process at a time, at the
lowest priority.

A mutant changes one expression or statement: a comparison, an operator, a number, a condition, a result, a statement
that is left out. It is killed if a test fails. All tests for each mutant would take days, so only the ``--files``
nearest to the mutated module are run: its doctests, those with its name, those that import it, then others of the same
folder. The first failure ends it, if that file passes on the unchanged code. So the count is a lower bound: a survivor
is one that these files miss.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = [path for path in (ROOT / "src", ROOT / "bench/src") if path.is_dir()]
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
}  # fmt: skip
TOO_LONG = "they took too long"
SKIPPED = {".git", ".venv", ".carry", "__pycache__", "results", ".pytest_cache", ".mypy_cache", ".ruff_cache"}


def environment(root: Path) -> dict[str, str]:
    """Return the environment in which tests see the product in ``root``."""
    path = os.pathsep.join(str(root / package.relative_to(ROOT)) for package in PACKAGES)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def test_files() -> dict[str, set[str]]:
    """Return the files of tests and the modules with doctests, each with the names of what it imports."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if SKIPPED & set(Path(name).parts):
            continue
        text = path.read_text()
        if path.name.startswith("test_") or (name.startswith(("src/", "bench/src/")) and ">>> " in text):
            found[name] = set(imports(ast.parse(text)))
    return found


def imports(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names of the modules that a file imports, and of what it imports from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def shared(one: str, other: str) -> int:
    """Return how many parts two dotted names have in common from the start."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def nearest(module: str, files: dict[str, set[str]]) -> list[str]:
    """Return the files that may test a module, the nearest first."""
    dotted = ".".join(Path(module).with_suffix("").parts).removeprefix("bench.").removeprefix("src.")
    defined = {getattr(node, "name", "") for node in ast.parse((ROOT / module).read_text()).body}
    parents = [dotted.rsplit(".", up)[0] for up in range(1, dotted.count(".") + 1)]
    # A package gives on the names of its modules: `from fedcohort.selectors import Uniform`.
    given = {dotted} | {f"{parent}.{name}" for parent in parents for name in defined if name}
    folder = f"tests/{dotted.split('.')[1]}" if module.startswith("src/") else "bench/tests"

    def rank(name: str) -> tuple[int, int, int, str] | None:
        beside = name.startswith(folder)
        if name == module:
            return 0, 0, 0, name
        if not name.startswith(("tests/", "bench/tests/")) or not (beside or files[name] & given):
            return None
        mirrors = any(Path(module).stem in part for part in Path(name).parts)
        # Of the others, those that import the module's neighbours come first.
        common = max((shared(dotted, other) for other in files[name]), default=0)
        return 1 if mirrors else 2 if files[name] & given else 3, not beside, -common, name

    return [name for *_, name in sorted(found for found in map(rank, files) if found is not None)]


def first_failure(files: list[str], tree: Path, seconds: float) -> str:
    """Run files of tests in a tree; return the line that says what failed, or nothing.

    ``seconds`` are of processor time, because on a busy machine the clock says nothing.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files],
        cwd=tree,
        env=environment(tree),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    resource.prlimit(child.pid, resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 5))
    try:
        printed, _ = child.communicate(timeout=600 + 20 * seconds)  # one that waits for ever uses no processor time
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # and whatever the tests have started
        child.communicate()
    if child.returncode < 0:
        return TOO_LONG
    if child.returncode in (0, 5):  # 5: all tests of these files are slow ones, which are not run
        return ""
    lines = printed.strip().splitlines() or ["?"]
    return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])


def mutations(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield nodes and the text that takes their place."""
    ignored = {id(inner) for node in ast.walk(tree) for inner in _not_run(node)}
    for node in ast.walk(tree):
        if id(node) in ignored:
            continue
        match node:
            case ast.Compare(ops=[op, *_]) if type(op) in SWAPS:
                yield (
                    node,
                    f"({ast.unparse(ast.Compare(node.left, [SWAPS[type(op)](), *node.ops[1:]], node.comparators))})",
                )
            case ast.BoolOp():
                yield node, f"({ast.unparse(ast.BoolOp(SWAPS[type(node.op)](), node.values))})"
            case ast.BinOp(op=op) if type(op) in SWAPS:
                yield node, f"({ast.unparse(ast.BinOp(node.left, SWAPS[type(op)](), node.right))})"
            case ast.UnaryOp(op=ast.Not()):
                yield node, f"({ast.unparse(node.operand)})"
            case ast.Constant(value=bool()):
                yield node, str(not node.value)
            case ast.Constant(value=int() | float()):
                yield node, f"({node.value!r} + 1)"
            case ast.If() | ast.IfExp() | ast.While():
                yield node.test, f"(not ({ast.unparse(node.test)}))"
            case ast.Return(value=ast.expr()) if ast.unparse(node.value) != "None":
                yield node.value, "None"
            case ast.Expr(value=ast.Call()) | ast.Assign() | ast.AugAssign() | ast.Raise():
                yield node, "pass"


def _not_run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is inside annotations, formatted strings and slices of types, where a change means nothing."""
    for name in ("annotation", "returns"):
        inner = getattr(node, name, None)
        if isinstance(inner, ast.AST):
            yield from ast.walk(inner)
    if isinstance(node, ast.JoinedStr):
        yield from ast.walk(node)


def mutants(count: int, seed: int) -> list[tuple[str, int, str]]:
    """Return the module, the line and the whole text of ``count`` mutants, drawn over all places in the product."""
    places = []
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            tree = ast.parse(path.read_text())
            places += [(path, node, text) for node, text in mutations(tree)]
    drawn = []
    for path, node, text in random.Random(seed).sample(places, len(places)):
        lines = path.read_text().splitlines(keepends=True)
        first, last = lines[node.lineno - 1].encode(), lines[node.end_lineno - 1].encode()
        before, after = first[: node.col_offset].decode(), last[node.end_col_offset :].decode()
        source = "".join([*lines[: node.lineno - 1], before, text, after, *lines[node.end_lineno :]])
        try:
            compile(source, str(path), "exec")
        except SyntaxError:
            continue
        drawn.append((str(path.relative_to(ROOT)), node.lineno, source))
        if len(drawn) == count:
            break
    return drawn


def killer(module: str, source: str, tree: Path, files: list[str], seconds: float, usual: dict[str, str]) -> str:
    """Run ``files`` on a mutant; return what killed it, or nothing.

    ``usual`` collects what fails on the unchanged code, by the files that were run.
    """

    def fails_unchanged(names: list[str]) -> bool:
        key = " ".join(names)
        if key not in usual:
            usual[key] = first_failure(names, tree, seconds)
        return bool(usual[key])

    original = (ROOT / module).read_text()
    while files:
        (tree / module).write_text(source)
        said = first_failure(files, tree, seconds)
        (tree / module).write_text(original)
        if not said:
            return ""
        failed = [name for name in files if name in said]
        if not fails_unchanged(failed or files):
            return said
        files = [name for name in files if name not in failed] if failed else files[:-1]
    return ""


def main() -> None:
    """Try the mutants that OUT does not have yet; append a line for each to OUT/mutants.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", type=int, default=5, help="test files for one mutant")
    parser.add_argument("--seconds", type=float, default=120.0, help="of processor time that they may take together")
    given = parser.parse_args()
    os.nice(19)
    out = given.out.resolve()
    tree = out / "tree"
    shutil.rmtree(tree, ignore_errors=True)  # an interrupted run left its mutant there
    shutil.copytree(ROOT, tree, ignore=lambda _, names: SKIPPED & set(names))
    record, tests = out / "mutants.jsonl", test_files()
    done = [json.loads(row) for row in record.read_text().splitlines()] if record.exists() else []
    usual: dict[str, str] = {}
    for module, line, source in mutants(given.count, given.seed)[len(done) :]:
        files = nearest(module, tests)[: given.files]
        killed = killer(module, source, tree, files, given.seconds, usual)
        original = (ROOT / module).read_text()
        pairs = zip(original.splitlines(), source.splitlines(), strict=False)
        change = next((new.strip() for old, new in pairs if old != new), "")
        done.append({"module": module, "line": line, "now": change, "files": len(files), "killed": killed})
        with open(record, "a") as file:
            file.write(json.dumps(done[-1]) + "\n")
        count = sum(bool(each["killed"]) for each in done)
        print(f"{count}/{len(done)} killed  {module}:{line}  {change}  {killed}"[:200], flush=True)


if __name__ == "__main__":
    main()
