"""``fedcohort journal rules``: what a journal proves about the rules its cohorts were chosen under."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from fedcohort.audit.participation import Proof
from fedcohort.audit.participation import verify as verify_journal
from fedcohort.cli.options import FormatOption
from fedcohort.cli.output import Format, out, print_json
from fedcohort.core.terminal import say
from fedcohort.report.why import find_journal
from fedcohort.session.rules import Rules
from fedcohort.simulate.leaderboard.words import quantity

rules_app = typer.Typer(help="Set, show and verify an operator's rules for cohorts.", no_args_is_help=True)


@rules_app.callback()
def _root() -> None:
    """Set, show and verify an operator's rules for cohorts."""


@rules_app.command()
def verify(
    journal: Annotated[
        Path, typer.Argument(metavar="JOURNAL", help="A session's .sqlite journal, or an experiment's directory.")
    ],
    run: Annotated[str | None, typer.Option("--run", help="The run's name, if the experiment has several.")] = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Prove from the journal alone that the participation rules held.

    These rules limit how often a client takes part, in total and within a window, and how soon again. Each round is
    judged by the rules in force at the time. Exits with 0 if every round kept them and the whole run meets the final
    rules, and with 1 otherwise or if there were no rules.

    Example: fedcohort journal rules verify run.sqlite
    """
    proof = verify_journal(find_journal(journal, run))
    if format is Format.JSON:
        print_json(
            {
                "holds": proof.holds,
                "kept": proof.kept,
                "rounds": proof.rounds,
                "clients": proof.clients,
                "rules": None if proof.rules is None else proof.rules.to_dict(),
                "most": proof.most,
                "least_separation": proof.least_separation,
                "breaches": [dataclasses.asdict(breach) for breach in proof.breaches],
                "changes": [
                    {"round": change.round, "rules": change.rules.to_dict(), "what": change.what}
                    for change in proof.changes
                ],
                "exceeded": [dataclasses.asdict(exceeded) for exceeded in proof.exceeded],
                "registered": proof.registered,
                "unregistered": proof.unregistered,
            }
        )
    else:
        _print(proof)
    if not proof.holds:
        raise typer.Exit(1)


_SHOWN = 20  # lines of one kind
# Of these a cohort alone says nothing.
_UNPROVED = ("eligible", "pinned", "cool_off", "min_in_window", "quotas", "at_most")


def _print(proof: Proof) -> None:
    console = out()
    rules = Rules() if proof.rules is None else proof.rules
    lines = [f"{quantity(proof.rounds, 'round')}, {quantity(proof.clients, 'client')}."]
    bound = "" if rules.most is None else f", at most {rules.most} allowed"
    if rules.budgets:
        bound += f"; own bounds: {quantity(len(rules.budgets), 'client')}"
    lines.append(f"Most participations of one client: {proof.most}{bound}.")
    if proof.least_separation is None:
        lines.append("Nobody took part twice.")
    else:
        lines.append(
            f"Fewest rounds between two participations: {proof.least_separation}, "
            f"at least {rules.min_separation} required."
        )
    if proof.registered is None:
        lines.append("The journal does not record which names were registered, and so bound to a key.")
    else:
        lines.append(
            f"{quantity(proof.registered, 'participation')} under registered names, {proof.unregistered} under others, "
            "which prove nothing about who took part."
        )
    lines += _shorten([f"Rules set in round {change.round}: {change.what}." for change in proof.changes[1:]])
    lines += _shorten([f"Round {breach.round}, client {breach.client}: {breach.what}." for breach in proof.breaches])
    lines += _shorten([f"Client {exceeded.client}: {exceeded.what}." for exceeded in proof.exceeded])
    if left_out := [key for key in rules.to_dict() if key in _UNPROVED]:
        lines.append(f"Not part of this proof: {', '.join(left_out)}.")
    for line in [*lines, proof.verdict]:
        say(console, line)


def _shorten(lines: list[str]) -> list[str]:
    return [*lines[:_SHOWN], f"... and {len(lines) - _SHOWN} more."] if len(lines) > _SHOWN else lines
