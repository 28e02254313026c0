"""Plants mistakes in the product, one at a time, and counts how many of them the tests notice.

    python -m tests.mutants map OUT               which test files run which lines; goes on where it stopped
    python -m tests.mutants run OUT               200 mutants, always the same ones for the same code
    python -m tests.mutants run OUT --first 100   goes on from the hundredth

A mutant changes one expression or statement: a comparison, an operator, a number, a condition, a result, a statement
that is left out. It is killed if a test file that runs its line fails. Files close to the mutated module come first,
up to ``--budget`` seconds of them, so a survivor is one that these files miss. A line that no test runs is a survivor.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[1]
PACKAGES = [path for path in (ROOT / "src", ROOT / "bench/src") if path.is_dir()]
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
}  # fmt: skip
LONGEST_FILE_SECONDS = 240.0
LINES = "lines.jsonl"
SKIPPED = {".git", ".venv", ".carry", "__pycache__", "results", ".pytest_cache", ".mypy_cache", ".ruff_cache"}


def environment(root: Path) -> dict[str, str]:
    """Return the environment in which tests see the product in ``root``."""
    path = os.pathsep.join(str(root / package.relative_to(ROOT)) for package in PACKAGES)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def test_files() -> list[str]:
    """Return the files of tests, and the modules with doctests."""
    tests = [path for path in sorted(ROOT.rglob("test_*.py")) if not SKIPPED & set(path.relative_to(ROOT).parts)]
    modules = [path for package in PACKAGES for path in sorted(package.rglob("*.py")) if ">>> " in path.read_text()]
    return [str(path.relative_to(ROOT)) for path in tests + modules]


def map_lines(out: Path, workers: int) -> None:
    """Run every test file under coverage; write how long each takes and which lines it runs."""
    from coverage import CoverageData
    from coverage.exceptions import CoverageException

    def trace(name: str) -> tuple[str, float, dict[str, list[int]]]:
        data, began = out / (name.replace("/", "+") + ".coverage"), time.monotonic()
        source = ",".join(str(package) for package in PACKAGES)
        command = ["coverage", "run", f"--data-file={data}", f"--source={source}", "-m", "pytest", "-q", "-x", name]
        code, said = run_quietly(command, ROOT, LONGEST_FILE_SECONDS)
        seconds = time.monotonic() - began
        print(f"{seconds:6.1f} s  {name}" + ("" if code == 0 else f"  FAILS: {said}"), flush=True)
        if code != 0:
            return name, seconds, {}
        measured = CoverageData(str(data))
        try:
            measured.read()
        except CoverageException as error:
            print(f"{name}: {error}", flush=True)
            return name, seconds, {}
        files = measured.measured_files()
        return name, seconds, {str(Path(f).relative_to(ROOT)): sorted(measured.lines(f) or ()) for f in files}

    out.mkdir(parents=True, exist_ok=True)
    known = read_lines(out)
    with ThreadPoolExecutor(workers) as pool, open(out / LINES, "a") as record:
        for row in pool.map(trace, [name for name in test_files() if name not in known]):
            record.write(json.dumps(row) + "\n")
            record.flush()


def read_lines(out: Path) -> dict[str, tuple[float, dict[str, list[int]]]]:
    """Return for each test file how long it takes and which lines it runs."""
    rows = (out / LINES).read_text().splitlines() if (out / LINES).exists() else []
    return {name: (seconds, files) for name, seconds, files in map(json.loads, rows)}


def run_quietly(command: list[str], tree: Path, seconds: float) -> tuple[int, str]:
    """Run a module of Python's in a tree; return its exit status and the line that says what failed."""
    child = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=tree,
        env=environment(tree),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # and whatever the tests have started
        child.communicate()
        return -1, "it took too long"
    lines = printed.strip().splitlines() or [""]
    return child.returncode, next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])


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


def distance(test: str, module: str) -> int:
    """Return how far a test file is from a module; tests mirror the packages."""
    ours = [part for part in Path(module).with_suffix("").parts if part not in ("src", "fedcohort")]
    theirs = [part.removeprefix("test_") for part in Path(test).with_suffix("").parts if part != "tests"]
    return -sum(part in ours for part in theirs) - 5 * (test == module)


def run(out: Path, count: int, seed: int, first: int, budget: float, workers: int) -> None:
    """Try mutants; append a line for each to mutants.jsonl."""
    lines = read_lines(out)
    trees: Queue[Path] = Queue()
    for worker in range(workers):
        tree = out / f"tree-{worker}"
        shutil.rmtree(tree, ignore_errors=True)
        shutil.copytree(ROOT, tree, ignore=lambda _, names: SKIPPED & set(names))
        trees.put(tree)

    def attempt(number: int, module: str, line: int, source: str) -> dict[str, object]:
        reached = [name for name, (_, files) in lines.items() if line in files.get(module, ())]
        reached.sort(key=lambda name: (distance(name, module), lines[name][0]))
        chosen, total = [], 0.0
        for name in reached:
            if not chosen or total + lines[name][0] <= budget:
                chosen.append(name)
                total += lines[name][0]
        tree = trees.get()
        original = (ROOT / module).read_text()
        before, after = original.splitlines(), source.splitlines()
        change = next((new.strip() for old, new in zip(before, after, strict=False) if old != new), "")
        killed = ""
        if chosen:
            (tree / module).write_text(source)
            command = ["pytest", "-q", "-x", "-p", "no:cacheprovider", *chosen]
            code, said = run_quietly(command, tree, 60 + 4 * total)
            killed = said or "?" if code else ""
            (tree / module).write_text(original)
        trees.put(tree)
        return {
            "number": number, "module": module, "line": line, "now": change, "files": len(chosen),
            "reached": len(reached), "killed": killed,
        }  # fmt: skip

    drawn = [(number, *mutant) for number, mutant in enumerate(mutants(count, seed)) if number >= first]
    killed = 0
    with ThreadPoolExecutor(workers) as pool, open(out / "mutants.jsonl", "a") as record:
        for done, row in enumerate(pool.map(lambda mutant: attempt(*mutant), drawn), 1):
            killed += bool(row["killed"])
            record.write(json.dumps(row) + "\n")
            record.flush()
            print(
                f"{killed}/{done} killed  {row['module']}:{row['line']}  {row['now']}  {row['killed']}"[:200],
                flush=True,
            )


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("map", "run"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="leave out the mutants before this one")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests for one mutant")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    given.out = given.out.resolve()
    if given.what == "map":
        map_lines(given.out, given.workers)
    else:
        run(given.out, given.count, given.seed, given.first, given.budget, given.workers)


if __name__ == "__main__":
    main()
