"""``fedcohort compare``: several selectors, several seeds, one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcohort.api import simulator
from fedcohort.cli.experiment import command_line, execute, new
from fedcohort.cli.options import (
    AddressOption,
    BaseArgument,
    BaselineOption,
    ClientOption,
    ColumnsOption,
    DataOption,
    DeviceOption,
    EngineOption,
    FolderOption,
    FormatOption,
    LabelOption,
    ModelOption,
    OutOption,
    ProcessesOption,
    QuietOption,
    ScenarioOption,
    SetOption,
    SweepOption,
    TrackOption,
    WideOption,
    complete_selectors,
    parse_seeds,
    split_names,
    table_columns,
)
from fedcohort.cli.output import Format
from fedcohort.core.terminal import err, say

if TYPE_CHECKING:
    from fedcohort.simulate.runner import Machine


def compare(
    config: BaseArgument = None,
    selectors: Annotated[
        str | None,
        typer.Option(
            "--selectors",
            metavar="NAMES",
            help="e.g. uniform,fedcor,mine.py:MySelector.",
            autocompletion=complete_selectors,
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="N", help="How many seeds, or a list such as 1,5,7.")
    ] = None,
    data: DataOption = None,
    label: LabelOption = None,
    client: ClientOption = None,
    folder: FolderOption = None,
    scenario: ScenarioOption = None,
    partition: Annotated[
        str | None, typer.Option("--partition", metavar="NAME", help="How samples are divided, e.g. iid, shards.")
    ] = None,
    clients: Annotated[
        int | None, typer.Option("--clients", min=1, metavar="N", help="Clients of the federation.")
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", metavar="NAME", help="classification, regression or next-token.")
    ] = None,
    model: ModelOption = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, metavar="N", help="Rounds of training.")] = None,
    cohort: Annotated[int | None, typer.Option("--cohort", min=1, metavar="N", help="Clients per round.")] = None,
    targets: Annotated[
        str | None, typer.Option("--targets", metavar="LIST", help="Accuracies to reach, e.g. 0.6,0.7.")
    ] = None,
    baseline: BaselineOption = None,
    sweep: SweepOption = None,
    set_: SetOption = None,
    out: OutOption = None,
    device: DeviceOption = None,
    processes: ProcessesOption = None,
    engine: EngineOption = None,
    address: AddressOption = None,
    track: TrackOption = None,
    columns: ColumnsOption = None,
    wide: WideOption = False,
    quiet: QuietOption = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Compare selectors on the same federation with the same seeds.

    What you leave out comes from the scenario's paper, or else from the demo. Runs that a folder in runs/ has already
    are not repeated; --out starts a new one.

    Example: fedcohort compare --data digits --selectors uniform,fedcor --seeds 5
    """
    from fedcohort.simulate.comparison import compared
    from fedcohort.simulate.config.sweep import parse_sweeps
    from fedcohort.simulate.config.toml import parse_override
    from fedcohort.simulate.extend import smaller_experiment
    from fedcohort.simulate.store.results import load

    # Options without an argument of the Python function are keys of the configuration, like those of --set.
    options = {"data.folder": folder, "run.engine": engine}
    given = {key: value for key, value in options.items() if value is not None}
    experiment = compared(
        selectors=None if selectors is None else split_names(selectors, "--selectors"),
        data=data,
        label=label,
        client=client,
        task=task,
        scenario=scenario,
        partition=partition,
        clients=clients,
        model=model,
        rounds=rounds,
        cohort=cohort,
        targets=None if targets is None else _targets(targets),
        baseline=baseline,
        seeds=None if seeds is None else parse_seeds(seeds),
        sweep=parse_sweeps(sweep or []),
        overrides={**given, **dict(parse_override(item) for item in set_ or [])},
        config=config,
    )
    machine: Machine = {"device": device, "processes": processes, "address": address}
    if out is None and (stored := smaller_experiment(experiment, Path("runs"))):
        done = load(stored)
        added = {k: v for k, v in experiment.table["selectors"].items() if k not in done.config["selectors"]}
        machine["command"] = command_line()
        simulation = simulator().Simulation.extend(stored, seeds=experiment.table["seeds"], selectors=added, **machine)
        say(err(quiet), f"note: {len(done.runs)} of {len(experiment.plans)} runs are in {stored} and are not repeated")
    else:
        simulation = new(experiment, out, **machine)
    execute(simulation, quiet=quiet, format=format, track=track, columns=table_columns(columns, wide))


def _targets(text: str) -> list[float]:
    try:
        return [float(item) for item in split_names(text, "--targets")]
    except ValueError:
        raise typer.BadParameter(f"--targets must be numbers separated by commas. Got {text!r}.") from None
