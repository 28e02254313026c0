"""``fedcohort extend``: more seeds, rounds or selectors for an experiment that exists."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcohort.api import simulator
from fedcohort.cli import options
from fedcohort.cli.experiment import command_line, execute
from fedcohort.cli.output import Format


def extend(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of an experiment.", show_default=False, file_okay=False)
    ],
    seeds: Annotated[
        str | None, typer.Option("--seeds", help="Total number of seeds, or a list of seeds to add, such as 7,8.")
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Total rounds of each run.")] = None,
    selectors: Annotated[
        str | None,
        typer.Option(
            "--selectors",
            help="Selectors to add, separated by commas, with their documented defaults.",
            autocompletion=options.complete_selectors,
        ),
    ] = None,
    sweep: options.SweepOption = None,
    device: options.DeviceOption = None,
    processes: options.ProcessesOption = None,
    allow_other_engine: options.OtherEngineOption = False,
    track: options.TrackOption = None,
    columns: options.ColumnsOption = None,
    wide: options.WideOption = False,
    quiet: options.QuietOption = False,
    format: options.FormatOption = Format.TABLE,
) -> None:
    """Add seeds, rounds or selectors to an existing experiment.

    Only the missing runs and rounds are computed; the results are the same as if the larger experiment had been started
    from scratch. --sweep adds a selector once for each value. To continue after an interruption, use
    'fedcohort run --resume RUN'.

    Exit codes: 0 done, 1 error, 2 wrong usage, 3 some run diverged or failed, 130 interrupted (can be continued).

    For example:

    - fedcohort extend runs/demo-1 --seeds 10
    - fedcohort extend runs/demo-1 --rounds 300 --selectors active-fl
    - fedcohort extend runs/demo-1 --sweep fedcor.warmup=5,15,30
    """
    if seeds is None and rounds is None and selectors is None and not sweep:
        raise typer.BadParameter("nothing to add: use --seeds, --rounds, --selectors or --sweep")
    from fedcohort.simulate.config.selectors import selector_entries
    from fedcohort.simulate.config.sweep import expand_sweep, parse_sweeps

    grid = parse_sweeps(sweep or [])
    names = options.split_names(selectors, "--selectors") if selectors is not None else []
    names += [label for label in grid if label not in names]  # a swept selector need not be named twice
    added = selector_entries(names) if names else {}
    simulation = simulator().Simulation.extend(
        directory,
        seeds=None if seeds is None else options.parse_seeds(seeds),
        rounds=rounds,
        selectors=expand_sweep(added, grid),
        device=device,
        processes=processes,
        command=command_line(),
        allow_other_engine=allow_other_engine,
    )
    execute(simulation, quiet=quiet, format=format, track=track, columns=options.table_columns(columns, wide))
