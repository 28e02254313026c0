"""``fedcohort compare``: several selectors, several seeds, one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcohort.api import simulator
from fedcohort.cli import options
from fedcohort.cli.experiment import command_line, execute, new
from fedcohort.cli.output import Format
from fedcohort.core.terminal import err, say

if TYPE_CHECKING:
    from fedcohort.simulate.runner import Machine


def compare(
    config: options.BaseArgument = None,
    selectors: Annotated[
        str | None,
        typer.Option(
            "--selectors",
            metavar="NAMES",
            help="e.g. uniform,fedcor,mine.py:MySelector.",
            autocompletion=options.complete_selectors,
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="N", help="How many seeds, or a list such as 1,5,7.")
    ] = None,
    data: options.DataOption = None,
    label: options.LabelOption = None,
    client: options.ClientOption = None,
    folder: options.FolderOption = None,
    scenario: options.ScenarioOption = None,
    partition: Annotated[
        str | None, typer.Option("--partition", metavar="NAME", help="How samples are divided, e.g. iid, shards.")
    ] = None,
    clients: Annotated[
        int | None, typer.Option("--clients", min=1, metavar="N", help="Clients of the federation.")
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", metavar="NAME", help="classification, regression or next-token.")
    ] = None,
    model: options.ModelOption = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, metavar="N", help="Rounds of training.")] = None,
    cohort: Annotated[int | None, typer.Option("--cohort", min=1, metavar="N", help="Clients per round.")] = None,
    targets: Annotated[
        str | None, typer.Option("--targets", metavar="LIST", help="Accuracies to reach, e.g. 0.6,0.7.")
    ] = None,
    baseline: options.BaselineOption = None,
    sweep: options.SweepOption = None,
    set_: options.SetOption = None,
    out: options.OutOption = None,
    device: options.DeviceOption = None,
    processes: options.ProcessesOption = None,
    engine: options.EngineOption = None,
    address: options.AddressOption = None,
    track: options.TrackOption = None,
    columns: options.ColumnsOption = None,
    wide: options.WideOption = False,
    quiet: options.QuietOption = False,
    format: options.FormatOption = Format.TABLE,
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
    keys = {"data.folder": folder, "run.engine": engine}
    given = {key: value for key, value in keys.items() if value is not None}
    experiment = compared(
        selectors=None if selectors is None else options.split_names(selectors, "--selectors"),
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
        seeds=None if seeds is None else options.parse_seeds(seeds),
        sweep=parse_sweeps(sweep or []),
        overrides={**given, **dict(parse_override(item) for item in set_ or [])},
        config=config,
    )
    machine: Machine = {"device": device, "processes": processes, "address": address}
    # More seeds or selectors of a comparison in runs/ add to it, so that nothing is computed twice.
    if out is None and (stored := smaller_experiment(experiment, Path("runs"))):
        done = load(stored)
        added = {k: v for k, v in experiment.table["selectors"].items() if k not in done.config["selectors"]}
        machine["command"] = command_line()
        simulation = simulator().Simulation.extend(stored, seeds=experiment.table["seeds"], selectors=added, **machine)
        say(err(quiet), f"note: {len(done.runs)} of {len(experiment.plans)} runs are in {stored} and are not repeated")
    else:
        simulation = new(experiment, out, **machine)
    execute(simulation, quiet=quiet, format=format, track=track, columns=options.table_columns(columns, wide))


def _targets(text: str) -> list[float]:
    try:
        return [float(item) for item in options.split_names(text, "--targets")]
    except ValueError:
        raise typer.BadParameter(f"--targets must be numbers separated by commas. Got {text!r}.") from None
