"""Start the dashboard, on this machine alone unless a token guards it."""

from __future__ import annotations

from pathlib import Path

from fedcohort.errors import InputError, MissingExtraError


def check(root: str | Path, host: str, token: str | None) -> None:
    """Refuse what must not be served, before anything is started."""
    try:
        from fedcohort.report.dashboard.app import is_loopback
    except ImportError as error:
        raise MissingExtraError(
            "The dashboard needs fastapi and uvicorn.", hint="pip install 'fedcohort[report]'"
        ) from error
    if not Path(root).exists():
        raise InputError(f"There is no folder or journal at {root}.", hint="fedcohort dashboard runs")
    if token is not None and len(token) < 8:
        raise InputError(f"A token must have at least 8 characters. Got {len(token)}.")
    if token is None and not is_loopback(host):
        raise InputError(
            f"The dashboard will not listen on {host} without a token: anybody who can reach this machine could read "
            "the results and the clients' names.",
            hint="add --token SECRET (or set FEDCOHORT_TOKEN), or use --host 127.0.0.1 and a tunnel",
        )


def serve(root: str | Path, *, host: str = "127.0.0.1", port: int = 8765, token: str | None = None) -> None:
    """Serve the dashboard until it is interrupted."""
    check(root, host, token)
    import uvicorn

    from fedcohort.report.dashboard.app import create_app

    config = uvicorn.Config(
        create_app(root, token=token),
        host=host,
        port=port,
        log_level="warning",
        timeout_graceful_shutdown=1,  # open event streams would hold up the end for ever
        server_header=False,
    )
    uvicorn.Server(config).run()
