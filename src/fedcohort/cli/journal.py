"""``fedcohort journal``: check, copy and change the journal of a run."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from fedcohort.audit.verification import examine
from fedcohort.cli import options
from fedcohort.cli.output import Format, out, print_json
from fedcohort.cli.rules import when_taken
from fedcohort.core.errors import InputError, SignalError
from fedcohort.core.protocol import SELECTORS
from fedcohort.core.selector_spec import described_name
from fedcohort.core.signals import Signal
from fedcohort.core.terminal import say
from fedcohort.hosts.orders import Order, carry_out, give, waiting
from fedcohort.journal import SCHEMA_VERSION, Journal, read_journal
from fedcohort.journal.events import RECOVERED, SELECTOR
from fedcohort.journal.forgetting import copies
from fedcohort.journal.maintenance import export, prune
from fedcohort.journal.opening import copy
from fedcohort.journal.presence import run_state
from fedcohort.journal.signing import Signer, generate
from fedcohort.session.resume import is_asynchronous, next_round
from fedcohort.session.session import Session
from fedcohort.session.validation import fitting
from fedcohort.simulate.leaderboard.words import quantity

_LOOK_EVERY = 5.0  # seconds between two looks at a journal that is followed

journal_app = typer.Typer(
    help="Check, audit, copy or change the journal of a run, and its rules.", no_args_is_help=True
)


@journal_app.command("verify")
def _verify(
    journal: options.OpenJournalArgument,
    replay: Annotated[
        bool, typer.Option("--replay/--no-replay", help="Replay the session and compare every cohort.")
    ] = True,
    selector: options.TrustOption = None,
    format: options.FormatOption = Format.TABLE,
) -> None:
    """Check a journal for damage and inconsistencies.

    The checks cover the file, the chain of digests, order and rules, and whether the cohorts follow from the seed.
    Checks that are not possible with this journal are listed. Nothing is changed, so the folder may be read-only. Exits
    with 1 if something is wrong.

    Example: fedcohort journal verify run.sqlite
    """
    options.import_selectors(selector)
    result = examine(journal, replay=replay)
    if format is Format.JSON:
        print_json(
            {
                "valid": result.valid,
                "version": SCHEMA_VERSION,
                "events": None if result.head is None else result.head.number,
                "generation": None if result.head is None else result.head.generation,
                "in_use": None if result.head is None else result.head.in_use,
                "checks": [{"check": f.check, "valid": f.valid, "text": f.text} for f in result.findings],
            }
        )
    else:
        words = {True: "ok", False: "WRONG", None: "-"}
        for finding in result.findings:
            say(out(), f"{finding.check:8} {words[finding.valid]:6} {finding.text}")
        verdict = "nothing is wrong" if result.valid else "something is WRONG"
        say(out(), f"{journal}: {verdict}.")
    if not result.valid:
        raise typer.Exit(1)


@journal_app.command("copy")
def _copy(
    journal: options.OpenJournalArgument,
    to: Annotated[Path, typer.Argument(metavar="FILE", help="The copy to write; it must not exist yet.")],
) -> None:
    """Copy a journal, even while the run is writing to it.

    Copying the file by hand would lose the newest rounds, which SQLite keeps in a second file.

    Example: fedcohort journal copy run.sqlite backup.sqlite
    """
    copy(journal, to)
    with closing(read_journal(to)) as record:
        say(out(), f"{to} has {quantity(next_round(record)[0], 'round')}.")


@journal_app.command("track")
def _track(
    journal: options.OpenJournalArgument,
    to: Annotated[list[str], typer.Option("--to", help="tensorboard, mlflow or wandb; may be repeated.")],
    follow: Annotated[bool, typer.Option("--follow", help="Wait for new rounds until the run ends.")] = False,
    out_: Annotated[
        Path | None, typer.Option("--out", help="Where trackers write; default: the journal's folder.")
    ] = None,
) -> None:
    """Send the rounds of a live run to a tracker.

    Example: fedcohort journal track run.sqlite --to mlflow --follow
    """
    from fedcohort.report.trackers import track_journal, tracker

    def pause() -> bool:
        if follow:
            time.sleep(_LOOK_EVERY)
        return follow

    track_journal(journal, [tracker(name, out_ or journal.parent) for name in to], pause)


@journal_app.command("recover")
def _recover(
    journal: options.JournalArgument,
    sign: options.SignOption = None,
) -> None:
    """Accept that a journal's newest events are lost, so that the run can continue.

    The loss is recorded in the journal.

    Example: fedcohort journal recover run.sqlite
    """
    result = examine(journal, replay=False)
    events = next((f for f in result.findings if f.check == "events"), None)
    if events is not None and events.valid:
        say(out(), f"{journal} is complete; nothing was changed.")
        return
    key = None if sign is None else Signer(sign)
    with closing(Journal.open(journal, accept_loss=True, sign=key)) as record:
        following, _ = next_round(record)
        with record.event():
            record.add_event(RECOVERED, {"round": following})
        say(out(), f"{journal} continues from round {following}.")


@journal_app.command("selector")
def _selector(
    journal: options.OpenJournalArgument,
    name: Annotated[str, typer.Argument(metavar="SELECTOR", help="The new selector, with its defaults.")],
    shadow: Annotated[
        int,
        typer.Option("--shadow", min=0, max=options.MAX_ROUND, help="Let it be a shadow for this many rounds first."),
    ] = 0,
    watch: Annotated[bool, typer.Option("--watch", help="Remove the shadow then; it never chooses.")] = False,
    selector: options.TrustOption = None,
    sign: options.SignOption = None,
) -> None:
    """Continue a run with another selector, at once or after a trial as a shadow.

    The new selector first learns from the outcomes in the journal. A running server applies the change before its next
    cohort; without rounds, a trial counts models. The journal records the change, and a restart keeps it. If the
    shadow fails, the old selector stays. The newest order counts.

    For example:

    - fedcohort journal selector run.sqlite fedcor
    - fedcohort journal selector run.sqlite balanced --shadow 10
    - fedcohort journal selector run.sqlite balanced --shadow 10 --watch
    """
    if watch and not shadow:
        raise typer.BadParameter("--watch needs --shadow: for how many rounds?")
    options.import_selectors(selector)
    new, order = SELECTORS.create(name), Order(selector=name, trial=shadow, watch=watch)
    with closing(read_journal(journal)) as record:
        meta, (table, _), following = record.meta(), record.table(), next_round(record)[0]
        before = described_name((record.events(SELECTOR)[-1:] or [{"to": meta["selector"]}])[0]["to"])
        signals = None if meta["signals"] is None else frozenset(map(Signal.by_name, meta["signals"]))
        try:
            fitting(new, table, signals, is_asynchronous(record))
        except SignalError as error:
            hint = f"run for a while with {name!r} as a shadow selector, so that clients report what it needs"
            raise SignalError(error.message, hint=hint) from error
        run = run_state(record)
    what = f"{name!r} chooses instead of {before!r}"
    if shadow:
        units = quantity(shadow, "model" if meta.get("asynchronous") else "round")
        what = f"{name!r} is a shadow for {units}" + (" and is removed then" if watch else f", and then {what}")
    if run.state in ("running", "waiting") or waiting(journal):  # orders are taken as they were given, one by one
        give(journal, order)
        say(out(), f"{what}. {when_taken(run)}")
        return
    with Session.open(journal, sign=sign) as session:
        carry_out(session, order)
    say(out(), f"From round {following} on, {what}.")


@journal_app.command("export")
def _export(
    journal: options.OpenJournalArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the Parquet files go.")],
) -> None:
    """Write picks, replies, metrics and events as Parquet files.

    Example: fedcohort journal export run.sqlite tables
    """
    with closing(read_journal(journal)) as record:
        for file in export(record, folder):
            say(out(), str(file))


@journal_app.command("prune")
def _prune(
    journal: options.JournalArgument,
    keep: Annotated[
        int, typer.Option(min=0, max=options.MAX_ROUND, help="Keep the details of this many newest rounds.")
    ],
    selector: options.TrustOption = None,
    sign: options.SignOption = None,
) -> None:
    """Delete the scores, exclusions and candidates of old rounds.

    Cohorts and replies are kept.

    Example: fedcohort journal prune run.sqlite --keep 100
    """
    options.import_selectors(selector)
    with Session.open(journal, sign=sign) as session:
        count = prune(session.journal, keep)
    say(out(), f"Deleted the details of {count} cohorts.")


@journal_app.command("forget")
def _forget(
    journal: options.JournalArgument,
    client: Annotated[str, typer.Argument(metavar="CLIENT", help="The client's name.")],
    block: Annotated[
        bool,
        typer.Option("--block", help="Also keep the client from joining again; a keyed digest of its name is kept."),
    ] = False,
    selector: options.TrustOption = None,
    sign: options.SignOption = None,
) -> None:
    """Erase a client's name and data from a journal.

    The client's facts, numbers, scores and state are removed for good. The journal still proves that some client took
    part. The command lists nearby files that still contain the name. Without --block, the client may join again as a
    new one.

    Example: fedcohort journal forget run.sqlite clinic-b --block
    """
    options.import_selectors(selector)
    with Session.open(journal, sign=sign) as session:
        stand_in = session.forget(client, block=block)
    say(out(), f"{client} is forgotten; its rounds are now recorded under {stand_in}.")
    if not block:
        say(out(), "If it comes back, it joins as a new client; --block prevents that.")
    for file in copies(journal, client):
        say(out(), f"The name is still in {file}.")
    say(
        out(),
        "Not searched: copies elsewhere, compressed files, the clients' logs, models trained with its data.",
    )


@journal_app.command("abandon")
def _abandon(
    journal: options.JournalArgument,
    ticket: Annotated[
        int | None, typer.Option(max=options.MAX_ROUND, help="The pending cohort's ticket; default: the oldest.")
    ] = None,
    reason: Annotated[str, typer.Option(help="The reason, for the journal.")] = "abandoned by the operator",
    selector: options.TrustOption = None,
    sign: options.SignOption = None,
) -> None:
    """Give up a pending cohort that cannot be finished.

    Its clients are free again, and the run chooses a new cohort the next time it is started.

    Example: fedcohort journal abandon run.sqlite --reason "clinic-b is gone"
    """
    options.import_selectors(selector)
    with Session.open(journal, sign=sign) as session:
        if not session.pending:
            raise InputError(f"The journal {journal} has no pending cohort.")
        chosen = session.pending[0].ticket if ticket is None else ticket
        names = next((cohort.names for cohort in session.pending if cohort.ticket == chosen), ())
        session.abandon(chosen, reason)
        say(
            out(),
            f"Ticket {chosen} is abandoned; free again: {', '.join(names[:20])}. A new cohort will be chosen for round "
            f"{session.round}.",
        )


@journal_app.command("keygen")
def _keygen(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The private key's file; the public key goes to FILE.pub.")
    ],
) -> None:
    """Create a key pair for signing journals.

    Sign with Session(..., sign=FILE), and give the public key to the auditors.

    Example: fedcohort journal keygen operator.key
    """
    public = generate(file)
    say(out(), f"{file} is the private key: keep it where nobody else can read it. Give {public} to the auditors.")
