"""Arguments and options that several commands share, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcohort.cli.output import Format


def split_names(text: str, what: str) -> list[str]:
    """Split names that are separated by commas."""
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise typer.BadParameter(f"{what} must be names separated by commas. Got {text!r}.")
    return items


def parse_seeds(text: str) -> list[int] | int:
    """Return the number of seeds, or the list of them."""
    try:
        return [int(item) for item in text.split(",")] if "," in text else int(text)
    except ValueError:
        raise typer.BadParameter(f"--seeds must be a number of seeds, or a list such as 1,5,7. Got {text!r}.") from None


def complete_selector(incomplete: str) -> list[str]:
    """Complete the name of a selector."""
    from fedcohort.core.protocol import SELECTORS

    return [name for name in SELECTORS.names() if name.startswith(incomplete)]


def complete_selectors(incomplete: str) -> list[str]:
    """Complete the last of several selectors, separated by commas, with one not named before."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in complete_selector(last) if name not in before.split(",")]


def complete_preset(incomplete: str) -> list[str]:
    """Complete the name of a preset."""
    from fedcohort.scenario import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


def complete_dataset(incomplete: str) -> list[str]:
    """Complete the name of a dataset."""
    from fedcohort.simulate.data import DATASETS

    return [name for name in DATASETS.names() if name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[str]:
    """Complete the name of a model."""
    from fedcohort.simulate.models import MODELS

    return [name for name in MODELS.names() if name.startswith(incomplete)]


MAX_ROUND = 2**63 - 1  # what a journal can count
BaseArgument = Annotated[
    str | None, typer.Argument(help="A TOML file, or the name of a built-in configuration; default 'demo'.")
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="A dataset (digits, fashion-mnist, flwr:ylecun/mnist, ...), or your own data: a .csv, .parquet or .npz "
        "file, or a folder with x_train.npy and y_train.npy.",
        autocompletion=complete_dataset,
    ),
]
LabelOption = Annotated[str | None, typer.Option("--label", help="Column of your table to predict; default 'label'.")]
ClientOption = Annotated[
    str | None,
    typer.Option("--client", help="Column of your table that names the client each row belongs to."),
]
ScenarioOption = Annotated[
    str | None, typer.Option("--scenario", help="A preset, e.g. fedcor-1spc.", autocompletion=complete_preset)
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Model, e.g. mlp, lenet, net.py:MyNet.", autocompletion=complete_model)
]
FolderOption = Annotated[str | None, typer.Option("--folder", help="Where the dataset's files are.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a key of the configuration, e.g. run.rounds=50."),
]
SweepOption = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="SELECTOR.PARAMETER=VALUES",
        help="Run a selector once for each value, e.g. fedcor.warmup=5,15,30; may be repeated.",
    ),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", "-o", help="Where to write; default runs/NAME-TIME.", file_okay=False)
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
ProcessesOption = Annotated[
    int | None,
    typer.Option(
        "--processes", min=1, max=1024, help="Number of processes to run in parallel; default: as many as help."
    ),
]
OtherEngineOption = Annotated[
    bool,
    typer.Option(
        "--allow-other-engine",
        help="Continue even if earlier rounds ran on another kind of engine (another device, no compiled code); "
        "the results record which rounds each engine ran.",
    ),
]
EngineOption = Annotated[str | None, typer.Option("--engine", help="Where to run: local or ray.")]
AddressOption = Annotated[
    str | None, typer.Option("--address", help="Address of a Ray cluster; by default a local one is started.")
]
TrackOption = Annotated[
    list[str] | None, typer.Option("--track", help="Also write to tensorboard, mlflow or wandb; may be repeated.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only, no progress.")]


def import_selectors(references: list[str] | None) -> None:
    """Import the selectors that the user trusts, so that a journal may name them."""
    from fedcohort.core.protocol import SELECTORS

    for reference in references or ():
        SELECTORS.get(reference)


TrustOption = Annotated[
    list[str] | None,
    typer.Option(
        "--selector",
        metavar="FILE:CLASS",
        help="Your own selector that the journal uses; only code named here is imported. May be repeated.",
    ),
]
SignOption = Annotated[
    Path | None,
    typer.Option("--sign", metavar="KEY", help="The private key of a signed journal.", dir_okay=False),
]
FormatOption = Annotated[Format, typer.Option("--format", help="Print a table for people or JSON for machines.")]
