"""``fedcohort journal rules``: verify, show and change the rules of a run."""

from __future__ import annotations

import difflib
import unicodedata
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcohort.audit.participation import prove_participation
from fedcohort.cli import options
from fedcohort.cli.output import Format, out, print_json
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError
from fedcohort.core.params import parameters
from fedcohort.core.registry import suggest
from fedcohort.core.terminal import say
from fedcohort.core.text import short_repr
from fedcohort.hosts.orders import Order, give, waiting
from fedcohort.journal import read_journal
from fedcohort.journal.events import SETTINGS
from fedcohort.journal.presence import RunState, planned_rounds, run_state
from fedcohort.report.render import sentences
from fedcohort.report.why import find_journal
from fedcohort.session.resume import next_round, participations
from fedcohort.session.rules import Rules
from fedcohort.simulate.config.toml import read_table, to_toml

rules_app = typer.Typer(help="Set and show an operator's rules, and prove that they held.", no_args_is_help=True)


@rules_app.command("prove")
def _prove(
    journal: options.RunArgument,
    run: options.RunOption = None,
    format: options.FormatOption = Format.TABLE,
) -> None:
    """Prove from the journal alone that the participation rules held.

    These rules limit how often a client takes part, in total and within a window, and how soon it may take part again.
    Each round is judged by the rules in force at the time. Exits with 0 if every round kept them and the whole run
    meets the final rules, and with 1 otherwise or if there were no rules.

    Example: fedcohort journal rules prove run.sqlite
    """
    proof = prove_participation(find_journal(journal, run))
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
                "breaches": [breach._asdict() for breach in proof.breaches],
                "changes": [
                    {"round": change.round, "rules": change.rules.to_dict(), "what": change.what}
                    for change in proof.changes
                ],
                "exceeded": [exceeded._asdict() for exceeded in proof.exceeded],
                "registered": proof.registered,
                "unregistered": proof.unregistered,
            }
        )
    else:
        for line in sentences("proof.txt", proof=proof, rules=proof.rules or Rules()):
            say(out(), line)
    if not proof.holds:
        raise typer.Exit(1)


def _clients(help: str) -> Any:
    return typer.Option(metavar="CLIENT", help=f"{help} May be repeated.")


@rules_app.command("apply")
def _apply(
    journal: options.OpenJournalArgument,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="A TOML file of rules; it replaces all current rules."),
    ] = None,
    block: Annotated[list[str] | None, _clients("Never pick this client.")] = None,
    unblock: Annotated[list[str] | None, _clients("Allow this client again.")] = None,
    pin: Annotated[list[str] | None, _clients("Pick this client whenever it is eligible.")] = None,
    unpin: Annotated[list[str] | None, _clients("Leave this client to the selector again.")] = None,
    pause: Annotated[
        list[str] | None,
        typer.Option(metavar="CLIENT=ROUNDS", help="Do not pick this client for this many rounds. May be repeated."),
    ] = None,
    resume: Annotated[list[str] | None, _clients("End this client's pause.")] = None,
    allow_unknown: Annotated[
        bool, typer.Option("--allow-unknown", help="Accept names of clients that have not joined yet.")
    ] = False,
) -> None:
    """Change the rules from the next round on, without a restart.

    A running server applies the change before its next round, a stopped one when it is started again. The journal
    records the change with its round. A mistake is reported at once and changes nothing.

    For example:

    - fedcohort journal rules apply run.sqlite rules.toml
    - fedcohort journal rules apply run.sqlite --block kiosk-7
    - fedcohort journal rules apply run.sqlite --pause clinic-b=20 --unpin clinic-a
    """
    pauses = {}
    for text in pause or ():
        name, _, length = text.rpartition("=")
        if not name or not length.isdecimal() or not 0 < int(length[:10]) < 10**9:
            example = "a client and a number of rounds, e.g. clinic-b=20"
            raise typer.BadParameter(f"--pause must be {example}. Got {text!r}.")
        pauses[name] = int(length)
    order = Order(
        rules=None if file is None else _rules_in(file),
        block=block or [],
        unblock=unblock or [],
        pin=pin or [],
        unpin=unpin or [],
        pause=pauses,
        resume=resume or [],
    )
    if file is None and not order.names:
        raise typer.BadParameter("nothing to change: name a FILE, or use --block, --pin, --pause, ...")
    with closing(read_journal(journal)) as record:
        table, _ = record.table()
        # Another system may compose the letters of a name differently; the journal's spelling wins.
        order = order.with_names(lambda name: name if name in table else unicodedata.normalize("NFC", name))
        if not allow_unknown:
            _check_names(order, table)
        round_ = next_round(record)[0]
        # Checked against what earlier orders will have made of the rules, not against what the server has now.
        known = record.meta().get("rules")
        rules = None if known is None else Rules(**known)
        for earlier in [*waiting(journal), order]:
            rules = earlier.new_rules(rules, round_)  # raises when they cannot hold together
        assert rules is not None
        settings, rounds = record.events(SETTINGS)[-1:], planned_rounds(record)
        size = settings[0].get("cohort-size") if settings else None
        if isinstance(size, int) and rounds is not None and rounds > round_:  # a host may not record what this needs
            rules.check_feasible(participations(record), size, rounds - round_)
        run = run_state(record)
    give(journal, order)
    say(out(), when_taken(run))


def when_taken(run: RunState) -> str:
    """Return in words when an order for a journal will be carried out."""
    if run.presence is not None and run.state in ("running", "waiting"):
        return "The running server will apply this before it chooses its next cohort."
    if run.state == "running":
        return "The program that has the journal open will apply this when it next calls fedcohort.hosts.orders.take."
    return f"No program is using the journal ({run.state}): this takes effect when the run is started again."


@rules_app.command("show")
def _show(journal: options.OpenJournalArgument, format: options.FormatOption = Format.TABLE) -> None:
    """Print the current rules as TOML, in the form that 'apply' reads.

    The command also says how many changes the server has not applied yet.

    Example: fedcohort journal rules show run.sqlite > rules.toml
    """
    with closing(read_journal(journal)) as record:
        rules = record.meta().get("rules") or {}
    pending = waiting(journal)
    if format is Format.JSON:
        print_json({"rules": rules, "waiting": len(pending)})
        return
    typer.echo(to_toml({"rules": rules}), nl=False)  # stdout is TOML and nothing else
    if pending:
        typer.echo(f"# changes not yet applied: {len(pending)}", err=True)


def _rules_in(file: Path) -> dict[str, Any]:
    table = read_table(file)
    rules = table.get("rules", table)
    if not isinstance(rules, dict):
        raise InputError(f"The rules in {file} must be a table. Got {short_repr(rules)}.")
    known = [info.name for info in parameters(Rules)]
    for key in rules:
        if key not in known:
            raise InputError(
                f"There is no rule {key!r}, which {file} names. Known: {', '.join(known)}.",
                hint=suggest(key, known),
            )
    return Rules(**rules).to_dict()


def _check_names(order: Order, table: ClientTable) -> None:
    unknown = [name for name in order.names if name not in table]
    if not unknown:
        return
    described = []
    for name in unknown[:8]:
        similar = difflib.get_close_matches(name, table.names, n=3, cutoff=0.6)
        described.append(f"{name!r} (similar: {', '.join(map(repr, similar))})" if similar else repr(name))
    raise InputError(
        f"No client of this journal is called {', '.join(described)}.",
        hint="to name a client that has not joined yet, use --allow-unknown",
    )
