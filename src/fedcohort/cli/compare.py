"""``fedcohort compare``: several selectors, several seeds, one table."""

from __future__ import annotations

from typing import Annotated

import typer

from fedcohort.cli.experiment import launch
from fedcohort.cli.options import (
    AddressOption,
    BaseArgument,
    ClientOption,
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
    complete_selectors,
    parse_seeds,
    split_names,
)
from fedcohort.cli.output import Format


def compare(
    config: BaseArgument = None,
    selectors: Annotated[
        str | None,
        typer.Option(
            "--selectors",
            help="Names separated by commas, e.g. uniform,fedcor,mine.py:MySelector; each has its documented "
            "defaults, or what the configuration says.",
            autocompletion=complete_selectors,
        ),
    ] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="How many seeds, or a list such as 1,5,7.")] = None,
    data: DataOption = None,
    label: LabelOption = None,
    client: ClientOption = None,
    folder: FolderOption = None,
    scenario: ScenarioOption = None,
    partition: Annotated[
        str | None, typer.Option("--partition", help="How samples are divided among clients, e.g. iid, shards.")
    ] = None,
    clients: Annotated[int | None, typer.Option("--clients", min=1, help="Clients of the federation.")] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="What is learned: classification, regression or next-token.")
    ] = None,
    model: ModelOption = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds of training.")] = None,
    cohort: Annotated[int | None, typer.Option("--cohort", min=1, help="Clients per round.")] = None,
    targets: Annotated[str | None, typer.Option("--targets", help="Accuracies, e.g. 0.6,0.7.")] = None,
    sweep: SweepOption = None,
    set_: SetOption = None,
    out: OutOption = None,
    device: DeviceOption = None,
    processes: ProcessesOption = None,
    engine: EngineOption = None,
    address: AddressOption = None,
    track: TrackOption = None,
    quiet: QuietOption = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Compare selectors on the same federation with the same seeds.

    Without a configuration file, a paper's scenario sets the cohort, local training, rounds and targets of that paper;
    otherwise the built-in demo sets them. The command prints the settings it takes from there, and every option
    overrides them. Every question a selector asks a client is charged to its account.

    Exit codes: 0 done, 1 error, 2 wrong usage, 3 some run diverged or failed, 130 interrupted (can be continued).

    Examples: fedcohort compare; fedcohort compare --selectors uniform,fedcor --seeds 5 --scenario fedcor-1spc;
    fedcohort compare --selectors uniform,fedcor --sweep fedcor.warmup=5,15,30
    """
    from fedcohort.simulate.comparison import Comparison
    from fedcohort.simulate.config.sweep import parse_sweeps
    from fedcohort.simulate.config.toml import parse_override

    experiment, notes = Comparison(
        selectors=None if selectors is None else split_names(selectors, "--selectors"),
        data=data,
        label=label,
        client=client,
        folder=folder,
        task=task,
        scenario=scenario,
        partition=partition,
        clients=clients,
        model=model,
        rounds=rounds,
        cohort=cohort,
        targets=None if targets is None else _targets(targets),
        seeds=None if seeds is None else parse_seeds(seeds),
        sweep=parse_sweeps(sweep) if sweep else {},
        engine=engine,
        overrides=dict(parse_override(item) for item in set_ or []),
        config=config,
    ).experiment()
    launch(
        experiment,
        notes=notes,
        out_dir=out,
        device=device,
        processes=processes,
        engine=engine,
        address=address,
        track=track,
        quiet=quiet,
        format=format,
    )


def _targets(text: str) -> list[float]:
    try:
        return [float(item) for item in split_names(text, "--targets")]
    except ValueError:
        raise typer.BadParameter(f"--targets must be numbers separated by commas. Got {text!r}.") from None
