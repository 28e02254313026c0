"""``fedcohort journal``: what an operator does to the record of a run that is not running."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcohort.cli.output import out
from fedcohort.errors import InputError
from fedcohort.protocol import SELECTORS
from fedcohort.session import Session
from fedcohort.specs import selector_name

journal_app = typer.Typer(help="The record of a run, while the run is stopped.", no_args_is_help=True)


@journal_app.callback()
def _root() -> None:
    """The record of a run, while the run is stopped."""


@journal_app.command("selector")
def change_selector(
    journal: Annotated[Path, typer.Argument(metavar="JOURNAL", help="A session's .sqlite journal.")],
    name: Annotated[str, typer.Argument(metavar="SELECTOR", help="The selector that goes on, with its defaults.")],
) -> None:
    """Let another selector go on with a run: it starts from the outcomes the journal holds. The change is recorded.

    Example: fedcohort journal selector run.sqlite fedcor
    """
    with Session.open(journal) as session:
        before = selector_name(session.selector)
        session.change_selector(SELECTORS.create(name))
        out().print(
            f"From round {session.round} on {name!r} chooses, in the place of {before}.", highlight=False, markup=False
        )


@journal_app.command()
def abandon(
    journal: Annotated[Path, typer.Argument(metavar="JOURNAL", help="A session's .sqlite journal.")],
    ticket: Annotated[int | None, typer.Option(help="Which pending cohort; default: the oldest.")] = None,
    reason: Annotated[str, typer.Option(help="Why, for the record.")] = "abandoned by the operator",
) -> None:
    """Give up a cohort that cannot be finished: its clients are free, and the run chooses anew when it is started.

    Example: fedcohort journal abandon run.sqlite --reason "clinic-b is gone"
    """
    with Session.open(journal) as session:
        if not session.pending:
            raise InputError(f"The journal {journal} has no pending cohort.")
        chosen = session.pending[0].ticket if ticket is None else ticket
        names = next((cohort.names for cohort in session.pending if cohort.ticket == chosen), ())
        session.abandon(chosen, reason)
        out().print(
            f"Ticket {chosen} is abandoned; free again: {', '.join(names[:20])}. Round {session.round} is chosen anew.",
            highlight=False,
            markup=False,
        )
