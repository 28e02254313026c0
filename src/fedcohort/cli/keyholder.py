"""``fedcohort privacy keyholder``: create the keys to encrypted label counts, and run a key holder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcohort.core.terminal import err, say

keyholder_app = typer.Typer(help="Hold the key to encrypted label counts in a separate process.", no_args_is_help=True)
privacy_app = typer.Typer(help="Run a key holder.", no_args_is_help=True)
privacy_app.add_typer(keyholder_app, name="keyholder")
FolderArgument = Annotated[Path, typer.Argument(help="The key holder's folder.", file_okay=False)]


@keyholder_app.command("client-key")
def _client_key(
    path: Annotated[Path, typer.Argument(help="Where the client's key is written.", dir_okay=False)],
    name: Annotated[str, typer.Option("--name", help="The client's name in the federation.")],
) -> None:
    """Create a client's key and print the line that enrols the client.

    Run this on the client's machine; the key stays there. The key holder adds the line to its clients.txt.

    Example: fedcohort privacy keyholder client-key client.key --name hospital-north
    """
    from fedcohort.privacy.service import make_client_key

    typer.echo(make_client_key(path, name))  # stdout is the line itself, to be redirected
    say(err(), f"Wrote {path}, which stays with the client. The key holder adds the line above to its clients.txt.")


@keyholder_app.command("new")
def _new(
    folder: FolderArgument,
    classes: Annotated[int, typer.Option("--classes", min=2, help="Number of classes.")],
    clients: Annotated[
        Path,
        typer.Option(
            "--clients", help="A file with the lines that client-key printed, one per client.", dir_okay=False
        ),
    ],
    max_samples: Annotated[
        int, typer.Option("--max-samples", min=1, help="The largest number of samples a client may report.")
    ] = 100_000,
) -> None:
    """Create the keys, a token and the list of enrolled clients.

    Give public.key to the clients and the server, and the token to the server. Keep secret.key here.

    Example: fedcohort privacy keyholder new holder --classes 10 --clients clients.txt
    """
    from fedcohort.privacy.service import client_lines, make_folder

    public = make_folder(folder, classes, client_lines(clients), max_samples)
    say(err(), f"Created key {public.name} in {folder}. Keep secret.key here; give public.key to clients and server.")


@keyholder_app.command("serve")
def _serve(
    folder: FolderArgument,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 picks a free one.")] = 9443,
    certificate: Annotated[
        Path | None,
        typer.Option("--certificate", help="PEM file; required unless --host is 127.0.0.1.", dir_okay=False),
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", help="The certificate's private key.", dir_okay=False)] = None,
) -> None:
    """Run the key holder.

    It reveals inner products of the label counts that enrolled clients signed, and nothing else.

    Example: fedcohort privacy keyholder serve holder --host 0.0.0.0 --certificate server.pem --key server.key
    """
    from fedcohort.privacy.service import KeyHolderServer, open_folder

    holder, token = open_folder(folder)
    server = KeyHolderServer(holder, token, (host, port), certificate=certificate, key=key)
    say(err(), f"key {holder.public.name} for {len(holder.enrolled)} clients at {server.url}")
    # Ctrl-C ends it, and its database is closed.
    try:
        server.serve_forever()
    finally:
        holder.close()
