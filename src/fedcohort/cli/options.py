"""Arguments and options that several commands share, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcohort.cli.output import Format

BaseArgument = Annotated[
    str | None, typer.Argument(help="A TOML file or the name of a built-in configuration; default 'demo'.")
]
DataOption = Annotated[str | None, typer.Option("--data", help="Dataset, e.g. digits, synthetic, fashion-mnist.")]
FolderOption = Annotated[str | None, typer.Option("--folder", help="Where the dataset's files are.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a key of the configuration, e.g. run.rounds=50."),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", "-o", help="Where to write; default runs/NAME-TIME.", file_okay=False)
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
EngineOption = Annotated[str | None, typer.Option("--engine", help="Where to run: local or ray.")]
AddressOption = Annotated[
    str | None, typer.Option("--address", help="Address of a Ray cluster; without one a local Ray is started.")
]
TrackOption = Annotated[
    list[str] | None, typer.Option("--track", help="Also write to tensorboard, mlflow or wandb; may be repeated.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only, no progress.")]
FormatOption = Annotated[Format, typer.Option("--format", help="Print a table for people or JSON for machines.")]
