"""``fedcohort run``: run an experiment from a configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcohort.api import simulator
from fedcohort.cli import options
from fedcohort.cli.experiment import execute, new
from fedcohort.cli.output import Format

if TYPE_CHECKING:
    from fedcohort.simulate.runner import Machine


def run(
    config: Annotated[str | None, typer.Argument(help="A TOML file, or 'demo' for the built-in one.")] = None,
    baseline: options.BaselineOption = None,
    sweep: options.SweepOption = None,
    set_: options.SetOption = None,
    out: options.OutOption = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Continue the experiment in this directory.", file_okay=False)
    ] = None,
    device: options.DeviceOption = None,
    processes: options.ProcessesOption = None,
    engine: options.EngineOption = None,
    address: options.AddressOption = None,
    allow_other_engine: options.OtherEngineOption = False,
    track: options.TrackOption = None,
    columns: options.ColumnsOption = None,
    wide: options.WideOption = False,
    quiet: options.QuietOption = False,
    format: options.FormatOption = Format.TABLE,
) -> None:
    """Run an experiment from a configuration file, or continue one.

    Exit codes: 0 done, 1 error, 2 wrong usage, 3 some run diverged or failed, 130 interrupted (can be continued).

    For example:

    - fedcohort run experiment.toml
    - fedcohort run demo -s run.rounds=20
    - fedcohort run --resume runs/demo-1
    """
    # Two ways to begin, and exactly one of them: typer cannot say that.
    if (config is None) == (resume is None):
        raise typer.BadParameter("give either a configuration or --resume with an experiment's directory")
    if resume is not None and (set_ or sweep or out or baseline):
        raise typer.BadParameter(
            "--resume continues an experiment as it was configured, without --set, --sweep, --baseline and --out; "
            "'fedcohort extend' adds seeds, rounds and selectors"
        )
    machine: Machine = {"device": device, "processes": processes, "address": address}
    if resume is not None:
        machine["allow_other_engine"] = allow_other_engine
        simulation = simulator().Simulation.open(resume, engine=engine, **machine)
    else:
        from fedcohort.simulate.config.experiment import Experiment
        from fedcohort.simulate.config.sweep import parse_sweeps
        from fedcohort.simulate.config.toml import find_table, override, with_keys

        given = {"run.engine": engine, "run.baseline": baseline}
        table = override(find_table(str(config)), set_ or [])
        table = with_keys(table, {key: value for key, value in given.items() if value is not None})
        if sweep:
            table["sweep"] = {**table.get("sweep", {}), **parse_sweeps(sweep)}
        simulation = new(Experiment.from_dict(table), out, **machine)
    execute(simulation, quiet=quiet, format=format, track=track, columns=options.table_columns(columns, wide))
