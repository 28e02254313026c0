"""``fedcohort journal``: what an operator does to the record of a run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from fedcohort.audit.verification import examine
from fedcohort.cli.options import MAX_ROUND, FormatOption, SignOption, TrustOption, import_selectors
from fedcohort.cli.output import Format, out, print_json
from fedcohort.core.errors import InputError, SignalError
from fedcohort.core.protocol import SELECTORS
from fedcohort.core.selector_spec import selector_name
from fedcohort.core.terminal import say
from fedcohort.journal import SCHEMA_VERSION, Journal, read_journal
from fedcohort.journal.events import RECOVERED
from fedcohort.journal.maintenance import copies, export, prune
from fedcohort.journal.opening import copy
from fedcohort.journal.signing import Signer, generate
from fedcohort.session.resume import next_round
from fedcohort.session.session import Session
from fedcohort.simulate.leaderboard.words import quantity

journal_app = typer.Typer(
    help="The record of a run: check it, copy it, change it while the run is stopped.", no_args_is_help=True
)


@journal_app.callback()
def _root() -> None:
    """The record of a run: check it, copy it, change it while the run is stopped."""


@journal_app.command("verify")
def verify(
    journal: Annotated[Path, typer.Argument(metavar="JOURNAL", help="A session's .sqlite journal; it may be in use.")],
    replay: Annotated[
        bool, typer.Option("--replay/--no-replay", help="Play the session again and compare every cohort.")
    ] = True,
    selector: TrustOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Check all there is to check: file, checksums, commits, order, rules, and that the cohorts follow from the seed.

    Nothing is changed, and a read-only folder will do. What the record does not allow to be checked is said. Exits
    with 1 when something is wrong.

    Example: fedcohort journal verify run.sqlite
    """
    import_selectors(selector)
    found = examine(journal, again=replay)
    if format is Format.JSON:
        print_json(
            {
                "sound": found.sound,
                "version": found.version,
                "commits": None if found.seal is None else found.seal.commits,
                "generation": None if found.seal is None else found.seal.generation,
                "in_use": None if found.seal is None else found.seal.in_use,
                "checks": [{"check": f.check, "sound": f.sound, "text": f.text} for f in found.findings],
            }
        )
    else:
        words = {True: "ok", False: "WRONG", None: "-"}
        for finding in found.findings:
            line = f"{finding.check:8} {words[finding.sound]:6} {finding.text}"
            say(out(), line)
        verdict = "nothing is wrong" if found.sound else "something is WRONG"
        say(out(), f"{journal}: {verdict}.")
    if not found.sound:
        raise typer.Exit(1)


@journal_app.command("copy")
def copy_journal(
    journal: Annotated[Path, typer.Argument(metavar="JOURNAL", help="A session's .sqlite journal; it may be in use.")],
    to: Annotated[Path, typer.Argument(metavar="FILE", help="The copy; it must not exist yet.")],
) -> None:
    """Make a copy that is whole by itself, while the run goes on; copying the file alone would lose its newest rounds.

    Example: fedcohort journal copy run.sqlite backup.sqlite
    """
    copy(journal, to)
    with closing(read_journal(to)) as record:
        say(out(), f"{to} has {quantity(next_round(record)[0], 'round')}.")


@journal_app.command("recover")
def recover(
    journal: Annotated[Path, typer.Argument(metavar="JOURNAL", help="A session's .sqlite journal.")],
    sign: SignOption = None,
) -> None:
    """Go on from what is there, when a journal's newest commits are lost for good; the loss is put on record.

    Example: fedcohort journal recover run.sqlite
    """
    found = examine(journal, again=False)
    commits = next((f for f in found.findings if f.check == "commits"), None)
    if (commits is not None and commits.sound) or found.version < SCHEMA_VERSION:  # an older one cannot tell
        say(out(), f"{journal} lacks nothing; nothing was changed.")
        return
    key = None if sign is None else Signer(sign)
    with closing(Journal.open(journal, accept_loss=True, sign=key)) as record:
        following, _ = next_round(record)
        with record.event():
            record.add_event(RECOVERED, {"round": following})
        say(out(), f"{journal} goes on from round {following}.")


@journal_app.command("selector")
def change_selector(
    journal: Annotated[Path, typer.Argument(metavar="JOURNAL", help="A session's .sqlite journal.")],
    name: Annotated[str, typer.Argument(metavar="SELECTOR", help="The selector that goes on, with its defaults.")],
    selector: TrustOption = None,
    sign: SignOption = None,
) -> None:
    """Let another selector go on with a run: it starts from the outcomes the journal holds. The change is recorded.

    Example: fedcohort journal selector run.sqlite fedcor
    """
    import_selectors(selector)
    with Session.open(journal, sign=sign) as session:
        before = selector_name(session.selector)
        try:
            session.change_selector(SELECTORS.create(name))
        except SignalError as error:
            hint = f"start the run once with {name!r} among its shadows: then the clients are asked for it"
            raise SignalError(error.message, hint=hint) from error
        say(out(), f"From round {session.round} on {name!r} chooses, in the place of {before}.")


@journal_app.command("export")
def export_tables(
    journal: Annotated[Path, typer.Argument(metavar="JOURNAL", help="A session's .sqlite journal; it may be in use.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the Parquet files go.")],
) -> None:
    """Write picks, replies, metrics and events as Parquet files.

    Example: fedcohort journal export run.sqlite tables
    """
    with closing(read_journal(journal)) as record:
        for file in export(record, folder):
            say(out(), str(file))


@journal_app.command("prune")
def prune_details(
    journal: Annotated[Path, typer.Argument(metavar="JOURNAL", help="A session's .sqlite journal.")],
    keep: Annotated[int, typer.Option(min=0, max=MAX_ROUND, help="Of how many of the newest rounds details stay.")],
    selector: TrustOption = None,
    sign: SignOption = None,
) -> None:
    """Let scores, exclusions and candidates of old rounds go; who was picked and what came of it stays.

    Example: fedcohort journal prune run.sqlite --keep 100
    """
    import_selectors(selector)
    with Session.open(journal, sign=sign) as session:
        count = prune(session.journal, keep)
    say(out(), f"The details of {count} cohorts are gone.")


@journal_app.command("forget")
def forget_client(
    journal: Annotated[Path, typer.Argument(metavar="JOURNAL", help="A session's .sqlite journal.")],
    client: Annotated[str, typer.Argument(metavar="CLIENT", help="Its name.")],
    block: Annotated[
        bool, typer.Option("--block", help="Also keep it from joining again; a keyed digest of the name stays.")
    ] = False,
    selector: TrustOption = None,
    sign: SignOption = None,
) -> None:
    """Remove a client's name, facts, numbers, scores and state for good; that somebody took part stays provable.

    Says which files around the journal still hold the name. Without --block the client is a new one if it comes back.

    Example: fedcohort journal forget run.sqlite clinic-b --block
    """
    import_selectors(selector)
    with Session.open(journal, sign=sign) as session:
        stand_in = session.forget(client, block=block)
    say(out(), f"{client} is forgotten; its rounds stand under {stand_in}.")
    if not block:
        say(out(), "Should it come again, it joins as a new client; --block keeps it away.")
    for file in copies(journal, client):
        say(out(), f"The name is still in {file}.")
    say(
        out(),
        "Not searched: copies elsewhere, compressed files, logs of the clients, models trained with it.",
    )


@journal_app.command()
def abandon(
    journal: Annotated[Path, typer.Argument(metavar="JOURNAL", help="A session's .sqlite journal.")],
    ticket: Annotated[
        int | None, typer.Option(max=MAX_ROUND, help="Which pending cohort; default: the oldest.")
    ] = None,
    reason: Annotated[str, typer.Option(help="Why, for the record.")] = "abandoned by the operator",
    selector: TrustOption = None,
    sign: SignOption = None,
) -> None:
    """Give up a cohort that cannot be finished: its clients are free, and the run chooses anew when it is started.

    Example: fedcohort journal abandon run.sqlite --reason "clinic-b is gone"
    """
    import_selectors(selector)
    with Session.open(journal, sign=sign) as session:
        if not session.pending:
            raise InputError(f"The journal {journal} has no pending cohort.")
        chosen = session.pending[0].ticket if ticket is None else ticket
        names = next((cohort.names for cohort in session.pending if cohort.ticket == chosen), ())
        session.abandon(chosen, reason)
        say(
            out(),
            f"Ticket {chosen} is abandoned; free again: {', '.join(names[:20])}. Round {session.round} is chosen anew.",
        )


@journal_app.command("keygen")
def keygen(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Where the private key goes; the public one is FILE.pub.")
    ],
) -> None:
    """Make a key to sign journals with: Session(..., audit=True, sign=FILE). Give the public part to whoever audits.

    Example: fedcohort journal keygen operator.key
    """
    public = generate(file)
    say(out(), f"{file} is the private key: keep it where nobody else can read it. {public} is for whoever audits.")
