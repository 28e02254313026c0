"""``fedcohort dashboard``: follow running simulations and live sessions in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcohort.cli import options
from fedcohort.cli.output import out
from fedcohort.core.terminal import say


def dashboard(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder of experiments and journals, or a single one.")
    ] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8765,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any address but localhost needs a token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(envvar="FEDCOHORT_TOKEN", help="Token visitors must enter; at least 8 characters.")
    ] = None,
    quiet: options.QuietOption = False,
) -> None:
    """Follow experiments and live runs in a browser.

    The page shows the progress, curves, cohorts and stragglers of every run in DIR. Click a client to see why it was
    picked.

    For example:

    - fedcohort dashboard runs
    - fedcohort dashboard server.sqlite --port 9000
    - FEDCOHORT_TOKEN=... fedcohort dashboard runs --host 0.0.0.0
    """
    from fedcohort.report.dashboard.server import serve

    def announce(address: str) -> None:
        if not quiet:
            say(out(), address)

    serve(folder, host=host, port=port, token=token, announce=announce)
