"""``fedcohort rules``: what a journal proves about the rules its cohorts were chosen under."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from fedcohort.cli.options import FormatOption
from fedcohort.cli.output import Format, out, print_json, say
from fedcohort.participation import Proof
from fedcohort.participation import verify as verify_journal
from fedcohort.report.why import find_journal
from fedcohort.simulate.leaderboard.words import counted

rules_app = typer.Typer(help="Rules an operator sets for every cohort.", no_args_is_help=True)


@rules_app.callback()
def _root() -> None:
    """Rules an operator sets for every cohort."""


@rules_app.command()
def verify(
    journal: Annotated[
        Path, typer.Argument(metavar="JOURNAL", help="A session's .sqlite journal, or an experiment's directory.")
    ],
    run: Annotated[str | None, typer.Option("--run", help="Which run, when the experiment has several.")] = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Prove from the journal alone that the participation rules held: separation, number in all and in windows.

    Exit status 0 when they held, 1 when they did not or there were none. Example: fedcohort rules verify run.sqlite
    """
    proof = verify_journal(find_journal(journal, run))
    if format is Format.JSON:
        print_json(
            {
                "holds": proof.holds,
                "rounds": proof.rounds,
                "clients": proof.clients,
                "rules": None if proof.rules is None else proof.rules.to_dict(),
                "most": proof.most,
                "least_separation": proof.least_separation,
                "breaches": [dataclasses.asdict(breach) for breach in proof.breaches],
            }
        )
    else:
        _print(proof)
    if not proof.holds:
        raise typer.Exit(1)


def _print(proof: Proof) -> None:
    console = out()
    rules = proof.rules
    lines = [f"{counted(proof.rounds, 'round')}, {counted(proof.clients, 'client')}."]
    bound = "" if rules is None or rules.most is None else f", at most {rules.most} allowed"
    if rules is not None and rules.budgets:
        bound += f"; own bounds: {counted(len(rules.budgets), 'client')}"
    lines.append(f"Most participations of one client: {proof.most}{bound}.")
    if proof.least_separation is None:
        lines.append("Nobody took part twice.")
    else:
        asked = "" if rules is None else f", at least {rules.min_separation} asked for"
        lines.append(f"Fewest rounds between two participations: {proof.least_separation}{asked}.")
    for breach in proof.breaches[:20]:
        lines.append(f"Round {breach.round}, client {breach.client}: {breach.what}.")
    if len(proof.breaches) > 20:
        lines.append(f"... and {len(proof.breaches) - 20} more.")
    if rules is None:
        lines.append("The journal was written without rules: nothing is proved.")
    else:
        lines.append("The rules held in every round." if proof.holds else "The rules did not hold.")
    for line in lines:
        say(console, line)
