"""``fedcohort scenario``: draw a federation in time, read traces, fit a generator to one."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcohort.cli import options
from fedcohort.cli.output import Format, out, print_json
from fedcohort.core.errors import InputError
from fedcohort.core.files import write_file
from fedcohort.core.terminal import err, say

if TYPE_CHECKING:
    from fedcohort.scenario.devices import Devices

scenario_app = typer.Typer(
    help="Draw when clients are on, convert traces, fit a generator to a trace.", no_args_is_help=True
)


class _TraceFormat(StrEnum):
    """Formats of traces."""

    PLAIN = "plain"
    FEDSCALE = "fedscale"
    FLASH = "flash"


TraceArgument = Annotated[Path, typer.Argument(help="A file of intervals, or a trace in the format given by --from.")]
SpeedsOption = Annotated[
    Path | None, typer.Option("--speeds", help="File of speeds; FedScale: client_device_capacity.", dir_okay=False)
]
FromOption = Annotated[_TraceFormat, typer.Option("--from", help="Format of the trace.")]
NeedsOption = Annotated[
    list[str] | None, typer.Option("--needs", help="A state a client must be in; may be repeated. Default: all states.")
]


@scenario_app.command("show")
def _show(
    config: Annotated[
        Path, typer.Argument(help="A TOML file with [scenario.devices], or a trace (.csv or .parquet).", dir_okay=False)
    ],
    clients: Annotated[
        int | None, typer.Option("--clients", min=1, help="Number of clients; default: the partition's, or 100.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the federation.")] = 0,
    limit: Annotated[int, typer.Option("--limit", min=1, max=400, help="How many clients to draw.")] = 40,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", help="Also draw it to this .svg file.", dir_okay=False),
    ] = None,
    quiet: options.QuietOption = False,
    format: options.FormatOption = Format.TABLE,
) -> None:
    """Draw which clients are on during a week, how many are available at each time, and how fast they are.

    Example: fedcohort scenario show phones.toml --picture phones.svg
    """
    from fedcohort.scenario.week import FederationWeek

    if picture is not None and picture.suffix != ".svg":
        raise InputError(f"A picture must be an .svg file. Got {picture}.")
    devices, count = _devices(config)
    week = FederationWeek.of(devices, clients or count, seed=seed, limit=limit)
    if picture is not None:
        from fedcohort.report.federation_week import week_svg

        write_file(picture.resolve(), week_svg(week).encode())
        say(err(quiet or format is Format.JSON), f"wrote {picture}")
    if format is Format.JSON:
        quantiles = {name: values.tolist() for name, values in week.quantiles().items()}
        print_json({"clients": week.clients, "times": week.times, "available": week.available, **quantiles})
        return
    out().print(week.text(), markup=False, highlight=False)


def _devices(config: Path) -> tuple[Devices, int]:
    """Return the devices that a file describes, and how many clients they are for."""
    from fedcohort.scenario import Scenario
    from fedcohort.scenario.traces import TraceDevices, read_trace

    if config.suffix in (".csv", ".parquet"):
        return TraceDevices(path=str(config), shuffle=False), len(read_trace(config).names)
    from fedcohort.simulate.config.toml import read_table

    table = read_table(config).get("scenario", {})
    scenario = Scenario.from_dict({"preset": table} if isinstance(table, str) else table)
    if scenario.devices is None:
        raise InputError(
            f"The scenario of {config} is counted in rounds and has no devices, so there is no week to draw.",
            hint="add a section [scenario.devices]",
        )
    return scenario.devices, int(getattr(scenario.partition, "clients", 100))


@scenario_app.command("fit")
def _fit(
    trace: TraceArgument,
    speeds: SpeedsOption = None,
    from_: FromOption = _TraceFormat.PLAIN,
    needs: NeedsOption = None,
    format: options.FormatOption = Format.TABLE,
) -> None:
    """Fit a small generator to a trace and print it as a section of a configuration.

    Example: fedcohort scenario fit client_behave_trace --from fedscale --speeds client_device_capacity
    """
    from fedcohort.scenario import traces
    from fedcohort.simulate.config.toml import to_toml

    # No state named means that a client must be in all of them.
    devices = traces.fit(traces.FORMATS[from_.value](trace, speeds), needs or None)
    table: dict[str, Any] = {"name": devices.name, "speed": devices.speed, "speed_spread": devices.speed_spread}
    table |= {"bandwidth": devices.bandwidth, "bandwidth_spread": devices.bandwidth_spread}
    table["states"] = {name: dict(state) for name, state in (devices.states or {}).items()}
    if format is Format.JSON:
        print_json(table)
        return
    out().print(to_toml({"scenario": {"devices": table}}), markup=False, highlight=False)


@scenario_app.command("convert")
def _convert(
    trace: TraceArgument,
    out_: Annotated[Path, typer.Option("--out", "-o", help="File of intervals, .csv or .parquet.", dir_okay=False)],
    from_: FromOption,
    speeds: SpeedsOption = None,
    out_speeds: Annotated[
        Path | None, typer.Option("--out-speeds", help="File of speeds, .csv or .parquet.", dir_okay=False)
    ] = None,
    quiet: options.QuietOption = False,
) -> None:
    """Write a published trace in the plain format, which `devices = {name = "trace"}` reads.

    Nothing in a pickle is executed: only dictionaries, lists, text and numbers are read.

    Example: fedcohort scenario convert state_traces.json --from flash --out phones.parquet
    """
    from fedcohort.scenario import traces

    devices = traces.FORMATS[from_.value](trace, speeds)
    # Checked before the first file is written, or the second would be missing without a word.
    if out_speeds is not None and not devices.measured:
        raise InputError("The trace has no speeds.", hint="leave out --out-speeds, or name the file with --speeds")
    traces.write_trace(devices, out_.resolve(), None if out_speeds is None else out_speeds.resolve())
    size = f"{len(devices.names):,} devices, {len(devices.begin):,} intervals over {devices.span / 86400:.1f} days"
    say(err(quiet), f"wrote {out_}: {size}")
