"""``fedcohort audit``: check that a journal's cohorts follow from its seed and inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcohort.cli.options import FormatOption, TrustOption, import_selectors
from fedcohort.cli.output import Format, out, print_json, say


def audit(
    journal: Annotated[Path, typer.Argument(help="A journal written with audit=True.", dir_okay=False)],
    seed: Annotated[int | None, typer.Option("--seed", help="The seed that was agreed on beforehand.")] = None,
    receipts: Annotated[
        Path | None,
        typer.Option(
            "--receipts", help="A file of commitments kept while the session ran, one per line.", dir_okay=False
        ),
    ] = None,
    client: Annotated[
        str | None, typer.Option("--client", help="Also say how often this client could be picked, and was.")
    ] = None,
    selector: TrustOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Recompute every cohort of a journal; confirm, or name the first round that does not follow.

    Trusts neither the server nor the selector's word: the chain of digests is checked, then the session is played again
    from its seed, candidates, answers and reports. Exits with 1 when something does not follow.

    Example: fedcohort audit server.sqlite --receipts kept.txt --client hospital-north
    """
    from fedcohort.errors import UnknownNameError
    from fedcohort.privacy.audited import read_receipts, verify

    import_selectors(selector)
    found = verify(journal, seed=seed, receipts=None if receipts is None else read_receipts(receipts))
    if client is not None and client not in found.candidate:
        raise UnknownNameError(f"There is no client {client!r} in {journal}.")
    if format is Format.JSON:
        body: dict[str, object] = {"confirmed": found.confirmed, "rounds": found.rounds, "problem": found.problem}
        body["commitment"] = found.commitment
        if client is not None:
            body["client"] = {"candidate": found.candidate[client], "picked": found.picked[client]}
        print_json(body)
    else:
        console = out()
        word = "confirmed" if found.confirmed else "NOT confirmed"
        say(console, f"{word}: {found.rounds} rounds follow from seed and inputs; commitment {found.commitment}")
        if found.problem is not None:
            say(console, found.problem)
        if client is not None:
            say(console, f"{client}: candidate in {found.candidate[client]} rounds, picked in {found.picked[client]}")
    if not found.confirmed:
        raise typer.Exit(1)
