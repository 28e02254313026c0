"""``fedcohort vectors``: write the test vectors and check them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcohort.core.errors import UnknownNameError
from fedcohort.core.registry import suggest
from fedcohort.core.terminal import err, say

vectors = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
_Names = Annotated[list[str] | None, typer.Argument(metavar="[SELECTOR]...", help="Default: all that have vectors.")]


def _chosen(names: list[str] | None) -> list[str]:
    from fedcohort_bench.vectors.files import names as known

    for name in names or []:
        if name not in known():
            raise UnknownNameError(f"There is no vector for {name!r}.", hint=suggest(name, known()))
    return names or known()


@vectors.callback()
def _about() -> None:
    """Test vectors: what each selector may choose, as JSON files that need no code of ours to read."""


@vectors.command("write")
def _write(
    selectors: _Names = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write to.")] = Path("vectors"),
) -> None:
    """Write test vectors.

    Example: fedcohort vectors write oort fedcm-ucb --out vectors
    """
    from fedcohort_bench.vectors import write

    for path in write(out, _chosen(selectors)):
        print(path)


@vectors.command("check")
def _check(
    selectors: _Names = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Default: those in the package.", exists=True, file_okay=False)
    ] = None,
) -> None:
    """Check that the selectors of this installation do what the vectors say.

    Example: fedcohort vectors check oort
    """
    from fedcohort_bench.vectors import DATA, verify

    console, failed = err(), 0
    for name, problem in verify(folder or DATA, _chosen(selectors)):
        failed += bool(problem)
        print(f"{name}: {problem or 'ok'}")
    say(console, f"{failed} vectors differ." if failed else "All vectors agree.")
    if failed:
        raise typer.Exit(1)
