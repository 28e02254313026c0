"""``fedcohort check``: run the conformance suite on a selector."""

from __future__ import annotations

import dataclasses
import importlib
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from fedcohort.cli import options
from fedcohort.cli.output import Format, out, print_json, table
from fedcohort.core.errors import MissingExtraError, UnknownNameError
from fedcohort.core.terminal import err, say

if TYPE_CHECKING:
    pass


def _check_as(target: str, method: str, format: Format) -> None:
    """Compare a stranger's class with a method, which the package fedcohort-bench does."""
    from fedcohort.core.protocol import SELECTORS

    SELECTORS.get(method)  # an unknown name is an error before anything is played
    try:
        # By name, because what people install never imports the benchmark.
        vectors = importlib.import_module("fedcohort_bench.vectors")
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "`fedcohort check --as` is in the package fedcohort-bench, which is not installed.",
            hint="pip install fedcohort-bench",
        ) from error
    console = err(quiet=format is Format.JSON)
    with console.status(Text(f"playing {target} as {method}")):
        report = vectors.check_as(vectors.load_stranger(target), method)
    if format is Format.JSON:
        print_json({**dataclasses.asdict(report), "agrees": report.agrees, "sentences": report.sentences()})
    else:
        out().print("\n".join(report.sentences()), markup=False)
    if not report.agrees:
        raise typer.Exit(1)


def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="SELECTOR",
            help="A registered name, module:Class or file.py:Class.",
            autocompletion=options.complete_selector,
        ),
    ],
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", metavar="CHECK[=REASON]", help="Skip a check that does not apply; may be repeated."),
    ] = None,
    as_: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="NAME",
            help="Instead, play a class from elsewhere, in file.py:Class, against this selector of ours.",
            autocompletion=options.complete_selector,
        ),
    ] = None,
    format: options.FormatOption = Format.TABLE,
) -> None:
    """Check that a selector follows the protocol, or that code from elsewhere is the method it is named after.

    For example:

    - fedcohort check uniform
    - fedcohort check mypackage.mine:MySelector
    - fedcohort check mine.py:MySelector --skip "documentation=cites no paper"
    - fedcohort check theirs.py --as oort
    """
    from fedcohort.core.protocol import SELECTORS
    from fedcohort.core.registry import suggest
    from fedcohort.testing import CHECKS, ConformanceError
    from fedcohort.testing.conformance import ABOUT_THE_CLASS, checked_forms, run_check

    if as_ is not None:
        return _check_as(target, as_, format)
    if target.endswith(".toml"):
        raise UnknownNameError(
            f"{target!r} is a configuration, and this command checks selectors.",
            hint=f"'fedcohort run {target}' checks a configuration before it runs it",
        )
    skipped = {}  # reason by check
    for item in skip or ():
        name, _, reason = item.partition("=")
        if name not in CHECKS:
            known = ", ".join(CHECKS)
            raise UnknownNameError(f"There is no check {name!r}. Known: {known}.", hint=suggest(name, CHECKS))
        skipped[name] = reason or "skipped with --skip"
    selector = SELECTORS.create(target)  # with its defaults, which anybody who names it gets
    console = err(quiet=format is Format.JSON)
    forms = checked_forms(selector)
    results: list[dict[str, Any]] = []
    with console.status(Text(f"checking {target}")):
        for name in CHECKS:
            started, problem = time.perf_counter(), skipped.get(name)
            try:
                for form, variant in forms.items() if name not in skipped else ():
                    # What is about the class, such as its documentation, is checked once.
                    if form == "as given" or name not in ABOUT_THE_CLASS:
                        run_check(name, variant)
            except ConformanceError as error:
                problem = error.message
            passed = None if name in skipped else problem is None
            seconds = 0.0 if name in skipped else round(time.perf_counter() - started, 3)
            results.append({"check": name, "passed": passed, "seconds": seconds, "problem": problem})
    failed = [r for r in results if r["passed"] is False]
    run = len(results) - len(skipped)
    if format is Format.JSON:
        print_json({"selector": target, "passed": not failed, "checks": results})
    else:
        words = {True: "ok", False: "FAILED", None: "skipped"}
        rows = [(r["check"], words[r["passed"]], f"{r['seconds']:.2f}", r["problem"]) for r in results]
        out().print(table(["check", "result", "#seconds", "problem"], rows))
    if failed:
        say(console, f"{target} fails {len(failed)} of {run} checks.", style="bold red")
        raise typer.Exit(1)
    say(console, f"{target} passes all {run} checks" + (f"; {len(skipped)} skipped." if skipped else "."))
