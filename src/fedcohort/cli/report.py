"""``fedcohort report``: one self-contained HTML file, figures for papers, tables."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedcohort.cli import options
from fedcohort.cli.output import Format, out, print_json, print_tables
from fedcohort.core.errors import InputError
from fedcohort.core.files import write_file
from fedcohort.core.terminal import err, say
from fedcohort.report.export import export_charts
from fedcohort.report.live_page import build_live_report
from fedcohort.report.page import assemble, build_report, figure_files
from fedcohort.report.setup import method, setup_table
from fedcohort.simulate.leaderboard.formats import paragraph, render


class _FigureFormat(StrEnum):
    """Formats of exported figures."""

    SVG = "svg"
    PNG = "png"
    PDF = "pdf"


class _TableFormat(StrEnum):
    """Formats of exported tables."""

    LATEX = "latex"
    MARKDOWN = "markdown"
    CSV = "csv"


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Directories of experiments, or live journals.", show_default=False),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Heading; default: the directories' names.")] = None,
    target: Annotated[list[float] | None, typer.Option(help="Accuracy to reach, in (0, 1]; may be repeated.")] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Selector to compare with; default: the configured one, else uniform.")
    ] = None,
    round_: Annotated[
        list[int] | None,
        typer.Option(
            "--round", min=0, max=options.MAX_ROUND, help="A round to explain in the report; may be repeated."
        ),
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Also write every figure and its numbers into this folder.")
    ] = None,
    picture: Annotated[
        _FigureFormat, typer.Option("--picture", help="Format of exported figures.")
    ] = _FigureFormat.SVG,
    tables: Annotated[
        _TableFormat | None, typer.Option(help="Print method, tables and setup in this format; no page.")
    ] = None,
    columns: options.ColumnsOption = None,
    wide: options.WideOption = False,
    selector: options.TrustOption = None,
    format: options.FormatOption = Format.TABLE,
    quiet: options.QuietOption = False,
) -> None:
    """Write an HTML report of experiments or of a live run.

    For experiments, it shows the leaderboard, learning curves, which clients were picked and why, and the cost. For the
    journal of a live run, it shows participation, failures and their reasons, durations, shadow selectors, rules and
    each client's history. The report is one file that opens offline; the numbers behind every figure can be saved as
    CSV.

    For example:

    - fedcohort report runs/digits
    - fedcohort report server.sqlite
    - fedcohort report runs/a runs/b -o both.html --target 0.62
    - fedcohort report runs/digits --export figures --picture pdf
    - fedcohort report runs/digits --tables latex
    """
    options.import_selectors(selector)
    messages = err(quiet)
    live = [path for path in runs if path.is_file()]  # a journal is a file, an experiment a folder
    if live:
        if len(live) < len(runs) or target or baseline or export or tables:
            raise InputError(
                f"{live[0]} is the journal of a live run, which has no selectors to compare. It cannot be combined "
                "with directories of experiments, --target, --baseline, --export or --tables.",
                hint=f"fedcohort report {live[0]}",
            )
        page, accounts = build_live_report(live, title=title, rounds=round_ or ())
        _write(output, page)
        if format is Format.JSON:
            print_json({"report": str(output), "runs": [account.to_dict() for account in accounts]})
            return
        for line in (line for account in accounts for line in account.sentences()):
            say(messages, line)
        say(out(), str(output))
        return
    with messages.status("reading the results"):
        content = assemble(
            runs,
            title=title,
            targets=target or (),
            baseline=baseline,
            rounds=round_ or (),
            pictures=tables is None,
            columns=options.table_columns(columns, wide),
        )
    for warning in content.warnings:
        say(messages, f" {warning}", lead="note:", lead_style="yellow")
    if tables is not None:
        shown = [table for section in content.sections for table in section.tables]
        shown += [setup_table(content.bundle)]
        if tables is not _TableFormat.CSV:  # a paragraph is no table
            out().print(paragraph(method(content.bundle, content.sections[0].board), tables.value))
        out().print("\n".join(render(table, tables.value) for table in shown))
        return
    _write(output, build_report(content))
    exported: list[Path] = []
    if export is not None:
        with messages.status("drawing the figures"):
            exported = export_charts(figure_files(content), export, picture.value)
    if format is Format.JSON:
        print_json(
            {
                "report": str(output),
                "exported": [str(path) for path in exported],
                "warnings": list(content.warnings),
                "leaderboards": [section.board.to_dict() for section in content.sections],
            }
        )
        return
    print_tables([section.tables[0] for section in content.sections], messages)
    say(out(), str(output))
    if exported:
        say(messages, f"{len(exported)} files in {export}")


def _write(output: Path, page: str) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_file(output.resolve(), page.encode())
    except OSError as error:
        raise InputError(
            f"The report {output} could not be written: {error.strerror}.", hint="name another file with --output"
        ) from error
