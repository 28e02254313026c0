"""``fedcohort keyholder``: make keys for encrypted class balance, and serve them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcohort.cli.output import err, say

keyholder_app = typer.Typer(
    help="Hold the key of encrypted class balance, in a process of its own.", no_args_is_help=True
)
FolderArgument = Annotated[Path, typer.Argument(help="The key holder's folder.", file_okay=False)]


@keyholder_app.command()
def new(
    folder: FolderArgument,
    classes: Annotated[int, typer.Option("--classes", min=2, help="Number of classes.")],
    clients: Annotated[
        Path, typer.Option("--clients", help="A file with the agreed clients' names, one per line.", dir_okay=False)
    ],
) -> None:
    """Make keys, a token and the list of agreed clients.

    Give public.key to the clients, evaluation.key and token to the server; secret.key stays.

    Example: fedcohort keyholder new holder --classes 10 --clients clients.txt
    """
    from fedcohort.errors import InputError
    from fedcohort.privacy.service import make_folder

    if not clients.exists():
        raise InputError(f"There is no file {clients} with the agreed clients' names.")
    make_folder(folder, classes, clients.read_text().splitlines())
    say(err(), f"made {folder}: secret.key stays here, public.key for clients, evaluation.key and token for the server")


@keyholder_app.command()
def serve(
    folder: FolderArgument,
    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 finds a free one.")] = 9443,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="PEM file; needed unless on 127.0.0.1.", dir_okay=False)
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", help="The certificate's private key.", dir_okay=False)] = None,
    per_minute: Annotated[int, typer.Option("--per-minute", min=1, help="Requests answered a minute.")] = 60,
) -> None:
    """Open inner products of the agreed clients' label counts, each once, and nothing else.

    Example: fedcohort keyholder serve holder --host 0.0.0.0 --certificate server.pem --key server.key
    """
    from fedcohort.privacy.service import KeyHolderServer, open_folder

    holder, token = open_folder(folder)
    server = KeyHolderServer(holder, token, (host, port), certificate=certificate, key=key, per_minute=per_minute)
    say(err(), f"key {holder.key_name} for {len(holder.agreed)} clients at {server.url}")
    try:
        server.serve_forever()
    finally:
        server.server_close()
        holder.close()
