"""Start the dashboard; without a token, only this machine can reach it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from fedcohort.core.errors import InputError, needs_extra


def check(root: str | Path, host: str, token: str | None) -> None:
    """Raise an error if this must not be served."""
    with needs_extra("The dashboard needs fastapi and uvicorn.", "report"):
        from fedcohort.report.dashboard.app import is_loopback
    if not Path(root).exists():
        raise InputError(f"There is no folder or journal at {root}.", hint="fedcohort dashboard runs")
    if Path(root).resolve() == Path(Path(root).resolve().anchor):
        raise InputError(
            f"{root} leads to the root of the disk, which is not a folder of experiments.",
            hint="fedcohort dashboard runs",
        )
    if token is not None and len(token) < 8:
        raise InputError(f"A token must have at least 8 characters. Got {len(token)}.")
    if token is None and not is_loopback(host):
        raise InputError(
            f"The dashboard does not listen on {host} without a token, because anyone who can reach this machine could "
            "read the results and the clients' names.",
            hint="add --token SECRET (or set FEDCOHORT_TOKEN), or use --host 127.0.0.1 and a tunnel",
        )


def _listening(host: str, port: int) -> socket.socket:
    """Return a bound socket; an error for a port in use comes before the address is announced."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, proto)
        # So that a dashboard can be started again at once, without waiting for the system to free the port.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(128)  # visitors of the announced address wait until the server is up
    except OSError as error:
        raise InputError(
            f"The dashboard cannot listen on {host} port {port}: {error.strerror or error}.",
            hint="choose another with --port, or --host",
        ) from error
    return bound


def serve(
    root: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    token: str | None = None,
    announce: Callable[[str], None] | None = None,
) -> None:
    """Serve the dashboard until it is interrupted.

    Parameters
    ----------
    root : a folder of experiments and journals, or one of them
    host, port : where to listen; port 0 picks a free one
    token : what a visitor must know; required unless ``host`` is a loopback address
    announce : called with the address as soon as it is reserved
    """
    check(root, host, token)
    import uvicorn

    from fedcohort.report.dashboard.app import create_app

    bound = _listening(host, port)
    if announce is not None:
        name = f"[{host}]" if ":" in host else host
        announce(f"http://{name}:{bound.getsockname()[1]}" + (f"/?token={token}" if token else ""))
    # The application must know when the server stops, and the server needs the application first.
    servers: list[uvicorn.Server] = []
    app = create_app(root, token=token, stopping=lambda: bool(servers) and servers[0].should_exit)
    # Its own logging configuration would close the handlers of the program around it, and their streams.
    config = uvicorn.Config(app, log_config=None, log_level="warning", timeout_graceful_shutdown=2, server_header=False)
    servers.append(uvicorn.Server(config))
    with bound:
        servers[0].run(sockets=[bound])
