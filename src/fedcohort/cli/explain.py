"""``fedcohort explain``: why these clients, why not that one."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedcohort.cli import options
from fedcohort.cli.output import Format, out, print_json
from fedcohort.core.terminal import say
from fedcohort.core.text import printable
from fedcohort.report.account import read_account
from fedcohort.report.why import NEARLY, Why, as_json, find_journal
from fedcohort.report.why import explain as explain_journal
from fedcohort.session.explain import history
from fedcohort.simulate.leaderboard.words import quantity
from fedcohort.simulate.store.results import open_journal

_MAX_FAILED = 30  # clients that failed, shown at most


def explain(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="An experiment's directory, or a session's .sqlite journal.")
    ],
    round_: Annotated[
        int | None,
        typer.Option("--round", "-r", min=0, max=options.MAX_ROUND, help="The round to explain, counted from 0."),
    ] = None,
    client: Annotated[
        str | None, typer.Option("--client", "-c", help="The client to explain, by number or name.")
    ] = None,
    name: options.RunOption = None,
    nearly: Annotated[int, typer.Option(min=0, help="How many nearly picked clients to show.")] = NEARLY,
    format: options.FormatOption = Format.TABLE,
) -> None:
    """Explain why clients were picked, or were not.

    With --round, it shows the scores of the clients that were picked or nearly picked, and what shadow selectors would
    have picked. With only --client, it shows that client's history. With neither, it summarises the run: how it ended,
    which clients failed and why, and which were never picked.

    For example:

    - fedcohort explain server.sqlite
    - fedcohort explain runs/digits --run fedcor-s0 --round 37
    - fedcohort explain runs/digits --run fedcor-s0 --round 37 --client 12
    - fedcohort explain server.sqlite --round 5
    - fedcohort explain server.sqlite --client clinic-north
    """
    journal = find_journal(run, name)
    if round_ is not None:
        why = explain_journal(journal, round_, client, nearly=nearly)
        if format is Format.JSON:
            print_json(as_json(why))
            return
        _print_reasons(why)
        for shadow in as_json(why)["shadows"]:
            same = f"{shadow['same']} of {len(shadow['picked'])} the same"
            line = f" would have picked {', '.join(shadow['picked'])} ({same})"
            say(out(), f"shadow {shadow['name']}{': ' + shadow['note'] if shadow['note'] else line}")
        if why.explanation.shadows:
            say(out(), "Over all rounds:")
            for summary in read_account(journal).shadows:
                say(out(), summary.sentence())
    elif client is not None:
        _explain_client(journal, client, format)
    else:
        _explain_run(journal, format)


def _print_reasons(why: Why) -> None:
    """Print why the cohort, or the client, was chosen, and the scores behind it."""
    console, explanation = out(), why.explanation
    say(console, explanation.reason, style="bold")
    if explanation.rule:
        say(console, explanation.rule)
    if explanation.client is None:
        for name, failure in explanation.failures.items():
            say(console, f"{name}: {failure}")
        if explanation.threshold is not None:
            say(console, f"The lowest score picked was {explanation.threshold:.5g}.")
    elif explanation.status is not None:
        say(console, f"Its reply: {explanation.failures.get(explanation.name or '', explanation.status)}.")
    for key, value in explanation.notes.items():
        say(console, f"{key}: {value:.6g}" if isinstance(value, float) else f"{key}: {value}")
    if explanation.coverage is not None:
        say(console, f"Warning: {explanation.coverage}.", style="yellow")
    console.print(score_table(why))
    for part in why.parts:
        if part in explanation.meanings:
            say(console, f"{part}: {explanation.meanings[part]}", style="dim")


def _table(*columns: str) -> Table:
    return Table(*columns, header_style="bold", box=SIMPLE_HEAD, pad_edge=False)


def _explain_run(journal: Path, format: Format) -> None:
    """Show how a run went."""
    account = read_account(journal)
    if format is Format.JSON:
        print_json(account.to_dict())
        return
    console = out()
    for line in (*account.sentences(), *(shadow.sentence() for shadow in account.shadows)):
        say(console, line)
    failed = [client for client in account.clients if client.reason]  # whoever always answered needs no row
    if not failed:
        return
    result = _table("client", "picked", "valid models", "the last time it returned no model")
    for client in sorted(failed, key=lambda c: c.statuses.get("OK", 0) - c.picked)[:_MAX_FAILED]:
        valid = str(client.statuses.get("OK", 0))
        result.add_row(printable(client.name), str(client.picked), valid, printable(client.reason))
    console.print(result)


def _explain_client(journal: Path, client: str, format: Format) -> None:
    """Show one client's part in every round."""
    with closing(open_journal(journal)) as record:
        parts = history(record, client)
    if format is Format.JSON:
        print_json([{"round": p.round, "was_picked": p.picked, "what": p.outcome} for p in parts])
        return
    console = out()
    say(console, f"Client {client} was picked in {sum(p.picked for p in parts)} of {quantity(len(parts), 'round')}.")
    result = _table("round", "picked", "what happened, or why it was not picked")
    for part in parts:
        # The client is named above the table, and the round in its row.
        outcome = part.outcome.removeprefix(f"Client {part.name} was ").replace(f" in round {part.round}", "", 1)
        style = "" if part.picked else "dim"
        result.add_row(str(part.round), "yes" if part.picked else "no", printable(outcome), style=style)
    console.print(result)


def score_table(why: Why) -> Table:
    """Return the picked clients and the next best, with their scores, for a terminal."""
    rows = [*why.picked, *why.nearly]
    scored = any(row.score is not None for row in rows)
    result = _table("client", "picked")
    if scored:
        for column in ("rank", "score", *why.parts):
            result.add_column(printable(column), justify="right")
    if why.explanation.client is not None:
        rows += [row for row in why.explanation.rows if row not in rows]
    for row in rows:
        cells = [row.name, "yes" if row.picked else "no"]
        if scored:
            cells += [row.place(), "" if row.score is None else f"{row.score:.4g}"]
            cells += [f"{row.parts[part]:.3g}" if part in row.parts else "" for part in why.parts]
        explained = why.explanation.client is not None and row.client == why.explanation.client
        result.add_row(*map(printable, cells), style="reverse" if explained else "" if row.picked else "dim")
    return result
