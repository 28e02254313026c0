"""``fedcohort journal audit``: check that a journal's cohorts follow from its seed and inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcohort.cli import options
from fedcohort.cli.output import Format, out, print_json
from fedcohort.core.terminal import say
from fedcohort.report.render import sentences


def audit(
    journal: Annotated[Path, typer.Argument(help="A journal written with audit=True.", dir_okay=False)],
    seed: Annotated[int | None, typer.Option("--seed", help="The seed agreed on beforehand.")] = None,
    receipts: Annotated[
        Path | None,
        typer.Option(
            "--receipts", help="A file of commitments saved while the session ran, one per line.", dir_okay=False
        ),
    ] = None,
    client: Annotated[
        str | None, typer.Option("--client", help="Also count how often this client was a candidate and was picked.")
    ] = None,
    public: Annotated[
        Path | None,
        typer.Option("--public", metavar="KEY", help="The public key the journal must be signed with.", dir_okay=False),
    ] = None,
    selector: options.TrustOption = None,
    format: options.FormatOption = Format.TABLE,
) -> None:
    """Verify that a journal's cohorts follow from its seed and inputs.

    The audit trusts neither the server nor the selector. It checks the chain of digests, then replays the session from
    its seed, candidates, answers and reports, and names the first round that differs. It also lists abandoned draws,
    changes of selector or rules, and clients that rules excluded. With too many of these, the journal is not confirmed.
    Exits with 0 if the journal is confirmed, 3 if it is confirmed with remarks, 1 if it is not confirmed.

    Example: fedcohort journal audit server.sqlite --receipts kept.txt --public operator.key.pub --client hospital-north
    """
    from fedcohort.audit.choices import audit_journal, read_receipts
    from fedcohort.core.errors import UnknownNameError
    from fedcohort.journal.signing import read_public

    options.import_selectors(selector)
    result = audit_journal(
        journal,
        seed=seed,
        receipts=None if receipts is None else read_receipts(receipts),
        public=None if public is None else read_public(public),
    )
    if client is not None and client not in result.candidate:
        raise UnknownNameError(f"There is no client {client!r} in {journal}.")
    if format is Format.JSON:
        names = ("confirmed", "problem", "remarks", "rounds", "draws", "kept", "abandoned", "unexplained", "excluded")
        body = {name: getattr(result, name) for name in (*names, "commitment", "signer")}
        if client is not None:
            body["client"] = {"candidate": result.candidate[client], "picked": result.picked[client]}
        print_json({"verdict": result.word, **body})
    else:
        for line in sentences("audit.txt", result=result, client=client, key_given=public is not None):
            say(out(), line)
    if not result.confirmed:
        raise typer.Exit(1)
    if result.remarks:  # a script can tell "confirmed, but look at it" from both others
        raise typer.Exit(3)
