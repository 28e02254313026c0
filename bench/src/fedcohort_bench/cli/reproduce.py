"""``fedcohort reproduce``: run a paper's tables and figures, and show them next to the published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcohort.cli import options
from fedcohort.cli.experiment import command_line
from fedcohort.cli.output import Format, out, print_json, print_tables, table
from fedcohort.core.terminal import err, say

_STOPPED = 75  # exit status: not everything was done, and the same command continues


def _complete(incomplete: str) -> list[str]:
    from fedcohort_bench.papers import EXHIBITS

    return [name for name in EXHIBITS if name.startswith(incomplete)]


def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(help="A table, a figure, or a paper (all its tables and figures).", autocompletion=_complete),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Show all names.")] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Check that everything runs: digits, one seed, few rounds, no usable result."),
    ] = False,
    out_dir: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for records, pages and runs; runs found there are continued.")
    ] = Path("runs/reproduce"),
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds; default: the paper's.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of rounds; default: the paper's.")] = None,
    parts: Annotated[str | None, typer.Option(help="Only these parts, separated by commas.")] = None,
    labels: Annotated[
        str | None,
        typer.Option(help="Only these methods, separated by commas, and the baseline."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop cleanly after this many minutes; the same command continues.")
    ] = None,
    folder: Annotated[str | None, typer.Option("--folder", help="Where the datasets are.")] = None,
    device: options.DeviceOption = None,
    processes: options.ProcessesOption = None,
    quiet: options.QuietOption = False,
    format: options.FormatOption = Format.TABLE,
) -> None:
    """Reproduce a paper's table or figure next to the published one.

    Compares the published numbers with ours, ratio by ratio, and says which of the paper's claims hold. Writes NAME.md,
    NAME.html and NAME.json, and a record of the runs that several tables share. Exits with status 75 if it stopped
    before everything was done; the same command continues.

    For example:

    - fedcohort reproduce --list
    - fedcohort reproduce fedcor-table-1-fmnist --seeds 2 --minutes 10
    """
    from fedcohort_bench import papers
    from fedcohort_bench.papers.page import tables_of
    from fedcohort_bench.papers.verdicts import to_dict

    if show or name is None:
        found = papers.EXHIBITS.values()
        if format is Format.JSON:
            print_json([{"name": e.name, "paper": e.paper, "place": e.place, "title": e.title} for e in found])
        else:
            rows = [(e.name, e.heading, ", ".join(e.study.parts)) for e in found]
            out().print(table(["name", "table or figure", "parts"], rows))
        return
    console = err(quiet)
    exhibits = papers.find(name)
    outcome = papers.reproduce(
        exhibits,
        out_dir,
        seeds=seeds,
        rounds=rounds,
        parts=options.split_names(parts, "--parts") if parts else (),
        labels=options.split_names(labels, "--labels") if labels else (),
        quick=quick,
        device=device,
        processes=processes,
        minutes=minutes,
        folder=folder,
        console=console,
        command=command_line(),
    )
    if format is Format.JSON:
        print_json([to_dict(exhibit, outcome.records[exhibit.study.name]) for exhibit in exhibits])
    else:
        if quick:
            say(
                out(),
                "A trial with --quick: digits, one seed, few rounds. It shows that everything runs; no number here is "
                "a result.",
            )
        for exhibit in exhibits:
            record = outcome.records[exhibit.study.name]
            print_tables(tables_of(exhibit, record), out())
            holding = sum(verdict.state == "holds" for verdict in papers.judge(exhibit, record))
            verdict = "no claims are judged" if quick else f"{holding} claims hold"
            say(console, f"{exhibit.name}: {verdict}; see {out_dir / exhibit.name}.md or .html")
    if not outcome.finished:
        say(console, "stopped; run the same command to continue")
        raise typer.Exit(_STOPPED)
