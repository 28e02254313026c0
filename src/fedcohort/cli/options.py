"""Arguments and options that several commands share, each written once."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedcohort.cli.output import Format


def split_names(text: str, option: str) -> list[str]:
    """Split the names, separated by commas, of an option."""
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise typer.BadParameter(f"{option} must be names separated by commas. Got {text!r}.")
    return items


def parse_seeds(text: str) -> list[int] | int:
    """Return the number of seeds, or the list of them."""
    try:
        return [int(item) for item in text.split(",")] if "," in text else int(text)
    except ValueError:
        raise typer.BadParameter(f"--seeds must be a number of seeds, or a list such as 1,5,7. Got {text!r}.") from None


def _completion(reference: str) -> Callable[[str], list[str]]:
    """Return what completes the names of a registry, which is imported only when a shell asks."""
    module, _, attribute = reference.partition(":")

    def complete(incomplete: str) -> list[str]:
        return [name for name in getattr(importlib.import_module(module), attribute) if name.startswith(incomplete)]

    return complete


complete_selector = _completion("fedcohort.core.protocol:SELECTORS")
complete_preset = _completion("fedcohort.scenario:PRESETS")
complete_dataset = _completion("fedcohort.simulate.data:DATASETS")
complete_model = _completion("fedcohort.simulate.models:MODELS")


def complete_selectors(incomplete: str) -> list[str]:
    """Complete the last of several selectors, separated by commas, with one that is not in the list yet."""
    before, comma, last = incomplete.rpartition(",")  # shells complete one word, and this is a list in it
    return [f"{before}{comma}{name}" for name in complete_selector(last) if name not in before.split(",")]


MAX_ROUND = 2**63 - 1  # the largest number in a journal
JournalArgument = Annotated[Path, typer.Argument(metavar="JOURNAL", help="A session's .sqlite journal.")]
OpenJournalArgument = Annotated[
    Path, typer.Argument(metavar="JOURNAL", help="A session's .sqlite journal; it may be in use.")
]
BaseArgument = Annotated[str | None, typer.Argument(help="A TOML file; default: the built-in 'demo'.")]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data", metavar="DATA", help="A dataset, or your .csv, .parquet or .npz.", autocompletion=complete_dataset
    ),
]
LabelOption = Annotated[
    str | None, typer.Option("--label", metavar="COLUMN", help="The column to predict; default 'label'.")
]
ClientOption = Annotated[
    str | None, typer.Option("--client", metavar="COLUMN", help="The column that names each row's client.")
]
ScenarioOption = Annotated[
    str | None,
    typer.Option("--scenario", metavar="NAME", help="A preset, e.g. fedcor-1spc.", autocompletion=complete_preset),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="NAME", help="Model, e.g. mlp, lenet, net.py:MyNet.", autocompletion=complete_model
    ),
]
FolderOption = Annotated[str | None, typer.Option("--folder", metavar="PATH", help="Where the dataset's files are.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change any setting, e.g. run.eval_every=5."),
]
SweepOption = Annotated[
    list[str] | None, typer.Option("--sweep", metavar="PARAM=...", help="Values to try, e.g. fedcor.warmup=5,15,30.")
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="PATH", help="Where to write; default runs/NAME-TIME.", file_okay=False),
]
DeviceOption = Annotated[str | None, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda or cuda:N.")]
ProcessesOption = Annotated[
    int | None, typer.Option("--processes", min=1, metavar="N", help="Number of processes; default: the fastest.")
]
OtherEngineOption = Annotated[
    bool,
    typer.Option(
        "--allow-other-engine",
        help="Continue even if earlier rounds ran on another kind of engine (another device, no compiled code); "
        "the results record which rounds each engine ran.",
    ),
]
EngineOption = Annotated[str | None, typer.Option("--engine", metavar="NAME", help="Where to run: local or ray.")]
AddressOption = Annotated[
    str | None, typer.Option("--address", metavar="HOST", help="A Ray cluster; default: start one here.")
]
TrackOption = Annotated[
    list[str] | None, typer.Option("--track", metavar="TOOL", help="Also write to tensorboard, mlflow or wandb.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only.")]


def import_selectors(references: list[str] | None) -> None:
    """Import the selectors that the user trusts, so that journals can use them."""
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
    Path | None, typer.Option("--sign", metavar="KEY", help="The private key of a signed journal.", dir_okay=False)
]
RunArgument = Annotated[
    Path, typer.Argument(metavar="JOURNAL", help="A session's .sqlite journal, or an experiment's directory.")
]
RunOption = Annotated[str | None, typer.Option("--run", help="The run's name, if the experiment has several.")]
BaselineOption = Annotated[
    str | None,
    typer.Option("--baseline", metavar="NAME", help="Compare with this selector.", autocompletion=complete_selector),
]
ColumnsOption = Annotated[
    str | None, typer.Option("--columns", metavar="NAMES", help="Columns of the table, e.g. gain,p,mb.")
]
WideOption = Annotated[bool, typer.Option("--wide", help="All columns of the table.")]


def table_columns(columns: str | None, wide: bool) -> Sequence[str]:
    """Return the names of the leaderboard's columns that were asked for."""
    from fedcohort.simulate.leaderboard.table import COLUMNS, FEW, check_columns

    return COLUMNS if wide else FEW if columns is None else check_columns(split_names(columns, "--columns"))


FormatOption = Annotated[
    Format, typer.Option("--format", metavar="NAME", show_default=False, help="table (default) or json.")
]
