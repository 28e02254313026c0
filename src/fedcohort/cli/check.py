"""``fedcohort check``: run the conformance suite on somebody's selector."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcohort.cli.options import FormatOption
from fedcohort.cli.output import Format, err, out, print_json, table
from fedcohort.errors import InputError, UnknownNameError


def load_selector(target: str) -> Any:
    """Return a selector with default parameters from a registered name, ``module:Class`` or ``file.py:Class``."""
    from fedcohort import create
    from fedcohort.protocol import Selector

    if ":" not in target:
        return create(target)
    module_name, _, class_name = target.rpartition(":")
    if module_name.endswith(".py"):
        path = Path(module_name)
        if not path.is_file():
            raise InputError(f"There is no file {module_name!r} to check.")
        sys.path.insert(0, str(path.parent.absolute()))
        module_name = path.stem
    else:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UnknownNameError(
            f"The module {module_name!r} cannot be imported: {error}.", hint="name it as module:Class or file.py:Class"
        ) from error
    cls = getattr(module, class_name, None)
    if cls is None:
        raise UnknownNameError(f"The module {module_name!r} has no class {class_name!r}.")
    selector = cls() if isinstance(cls, type) else cls
    if not isinstance(selector, Selector):
        raise InputError(f"{target} is a {type(selector).__name__}, not a Selector.")
    return selector


def check(
    target: Annotated[str, typer.Argument(help="A registered name, module:Class or file.py:Class.")],
    format: FormatOption = Format.TABLE,
) -> None:
    """Check that a selector does what every selector must do.

    Examples: fedcohort check uniform; fedcohort check mypackage.mine:MySelector; fedcohort check mine.py:MySelector
    """
    from fedcohort.testing import CHECKS, ConformanceError
    from fedcohort.testing.conformance import run_check

    selector = load_selector(target)
    results = []
    console = err(quiet=format is Format.JSON)
    with console.status(f"checking {target}"):
        for name in CHECKS:
            started = time.perf_counter()
            problem = None
            try:
                run_check(name, selector)
            except ConformanceError as error:
                problem = error.message
            seconds = time.perf_counter() - started
            results.append({"check": name, "passed": problem is None, "seconds": round(seconds, 3), "problem": problem})
    failed = [r for r in results if not r["passed"]]
    if format is Format.JSON:
        print_json({"selector": target, "passed": not failed, "checks": results})
    else:
        rows = [(r["check"], "ok" if r["passed"] else "FAILED", f"{r['seconds']:.2f}", r["problem"]) for r in results]
        out().print(table(["check", "result", "#seconds", "problem"], rows))
    if failed:
        console.print(f"{target} fails {len(failed)} of {len(results)} checks.", style="bold red")
        raise typer.Exit(1)
    console.print(f"{target} passes all {len(results)} checks.")
