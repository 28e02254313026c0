"""``fedcohort explain``: why these clients, why not that one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedcohort.cli.options import FormatOption
from fedcohort.cli.output import Format, out, print_json
from fedcohort.journal import ScoreRow
from fedcohort.report.why import NEARLY, Why, as_json, find_journal
from fedcohort.report.why import explain as explain_journal


def explain(  # the command line's options are this signature
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="An experiment's directory, or a session's .sqlite journal.")
    ],
    round_: Annotated[int, typer.Option("--round", "-r", min=0, help="Which round, counted from 0.")],
    client: Annotated[str | None, typer.Option("--client", "-c", help="One client: its number or its name.")] = None,
    name: Annotated[str | None, typer.Option("--run", help="Which run, when the experiment has several.")] = None,
    nearly: Annotated[int, typer.Option(min=0, help="How many of those not picked to show.")] = NEARLY,
    format: FormatOption = Format.TABLE,
) -> None:
    """Explain a round: the scores of picked and nearly picked clients, their parts, and what shadows would have done.

    Examples: fedcohort explain runs/digits --run fedcor-s0 --round 37;
    fedcohort explain runs/digits --run fedcor-s0 --round 37 --client 12; fedcohort explain server.sqlite --round 5
    """
    why = explain_journal(find_journal(run, name), round_, client, nearly=nearly)
    if format is Format.JSON:
        print_json(as_json(why))
        return
    console = out()
    console.print(Text(why.explanation.reason, style="bold"))
    found = why.explanation
    if found.client is not None and found.status is not None:
        console.print(f"Its reply: {found.status}.", highlight=False)
    if found.threshold is not None:
        console.print(f"The lowest picked score was {found.threshold:.6g}.", highlight=False)
    for key, value in found.notes.items():
        console.print(
            f"{key}: {value:.6g}" if isinstance(value, float) else f"{key}: {value}", highlight=False, markup=False
        )
    if found.coverage is not None:
        console.print(f"Warning: {found.coverage}.", style="yellow", highlight=False, markup=False)
    console.print(_table(why))
    for shadow in as_json(why)["shadows"]:
        if shadow["note"]:
            line = f"shadow {shadow['name']}: {shadow['note']}"
        else:
            same = f"{shadow['same']} of {len(shadow['picked'])} the same"
            line = f"shadow {shadow['name']} would have picked {', '.join(shadow['picked'])} ({same})"
        console.print(line, highlight=False, markup=False)


def _table(why: Why) -> Table:
    scored = any(row.score is not None for row in (*why.picked, *why.nearly))
    result = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    result.add_column("client")
    result.add_column("picked")
    if scored:
        for column in ("rank", "score", *why.parts):
            result.add_column(column, justify="right")
    rows = [*why.picked, *why.nearly]
    asked = [row for row in why.explanation.rows if why.explanation.client is not None and row not in rows]
    for row in (*rows, *asked):
        result.add_row(*_cells(row, why, scored), style=_style(row, why))
    return result


def _style(row: ScoreRow, why: Why) -> str:
    if row.client == why.explanation.client:
        return "reverse"
    return "" if row.picked else "dim"


def _cells(row: ScoreRow, why: Why, scored: bool) -> list[str]:
    cells = [row.name, "yes" if row.picked else "no"]
    if scored:
        cells += [row.place(), "" if row.score is None else f"{row.score:.4g}"]
        cells += [f"{row.parts[part]:.3g}" if part in row.parts else "" for part in why.parts]
    return cells
