"""The web application: one page, a stream of events, explanations. Needs the ``report`` extra."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse

from fedcohort.core.errors import FedcohortError
from fedcohort.report.dashboard.watcher import WatchedItem, Watcher, plain_json
from fedcohort.report.exposition import CONTENT_TYPE, exposition
from fedcohort.report.render import render

log = logging.getLogger(__name__)
POLL_SECONDS = 0.4  # a new round must be on the page within two seconds
_COOKIE = "fedcohort_token"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class _Hub:
    """Polls the folder once for all readers."""

    def __init__(self, root: Path) -> None:
        self.watcher = Watcher(root)
        self._lock = asyncio.Lock()
        self._details: dict[str, tuple[int, str]] = {}

    async def poll(self) -> None:
        """Read what is new, without blocking the server."""
        # A poll changes the items that a reader's question looks at.
        async with self._lock:
            await asyncio.to_thread(self.watcher.poll)

    async def run(self) -> None:
        """Poll for as long as the server lives."""
        while True:
            try:
                await self.poll()
            except Exception:  # the folder cannot be read; the next poll tries again
                log.warning("the watched folder could not be read", exc_info=True)
            await asyncio.sleep(POLL_SECONDS)

    async def detail(self, name: str) -> str | None:
        """Return what the page shows about an item as JSON, computed once per change."""
        item = self.watcher.items.get(name)
        if item is None:
            return None
        async with self._lock:
            cached = self._details.get(name)
            if cached is None or cached[0] != item.version:
                version = item.version
                cached = (version, await asyncio.to_thread(lambda: plain_json(item.detail())))
                self._details[name] = cached
        return cached[1]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host name or address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def create_app(root: str | Path, *, token: str | None = None, stopping: Callable[[], bool] = lambda: False) -> FastAPI:
    """Return the application that follows ``root``.

    Event streams end once ``stopping`` returns True; otherwise they would keep the server from stopping.

    Without a token, only requests to a loopback name are answered, so that another site's page cannot reach the
    dashboard through a domain that resolves to this machine.
    """
    hub = _Hub(Path(root))

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await hub.poll()
        task = asyncio.create_task(hub.run())
        yield
        # The server would otherwise wait for the next poll before it stops.
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    app = FastAPI(title="fedcohort dashboard", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def guard(request: Request, proceed: Any) -> Response:
        if token is None:
            host = request.headers.get("host", "")
            # Without its port; an IPv6 address has colons of its own.
            if not is_loopback(host.rsplit(":", 1)[0] if host.count(":") == 1 or "]:" in host else host):
                text = "This dashboard answers only at the address localhost."
                return Response(text, status_code=403, headers=_HEADERS)
        elif not _authorised(request, token):
            text = "This dashboard needs a token. Open the address with ?token=... that it printed when it started."
            return Response(text, status_code=401, headers=_HEADERS)
        response: Response = await proceed(request)
        # Error pages of the framework need them as well.
        response.headers.update(_HEADERS)
        return response

    @app.get("/")
    async def page(request: Request) -> Response:
        if token is not None and "token" in request.query_params:
            redirect = RedirectResponse("/", status_code=303)  # keeps the token out of the history and of links
            redirect.set_cookie(_COOKIE, token, httponly=True, samesite="strict")
            return redirect
        return HTMLResponse(render("dashboard.html"))

    @app.get("/events")
    async def events(item: str = "") -> StreamingResponse:
        return StreamingResponse(_stream(hub, item, stopping), media_type="text/event-stream")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(exposition, hub.watcher.journals()), media_type=CONTENT_TYPE)

    @app.get("/api/overview")
    async def overview() -> JSONResponse:
        return JSONResponse(hub.watcher.overview())

    @app.get("/api/detail")
    async def detail(item: str) -> Response:
        body = await hub.detail(item)
        if body is None:
            return JSONResponse({"error": f"There is nothing called {item!r} here."}, status_code=404)
        return Response(body, media_type="application/json")

    @app.get("/api/cohort")
    async def cohort(item: str, run: str, round_: Annotated[int, Query(alias="round", ge=0)]) -> JSONResponse:
        return await _ask(hub, item, lambda watched: {"round": round_, "cohort": watched.cohort(run, round_)})

    @app.get("/api/history")
    async def history(item: str, client: str) -> JSONResponse:
        return await _ask(hub, item, lambda watched: {"client": client, "rounds": watched.history_of(client)})

    @app.get("/api/explain")
    async def explain(
        item: str,
        run: str,
        round_: Annotated[int, Query(alias="round", ge=0)],
        client: str | None = None,
    ) -> JSONResponse:
        return await _ask(hub, item, lambda watched: watched.why(run, round_, client))

    return app


async def _ask(hub: _Hub, item: str, question: Callable[[WatchedItem], dict[str, Any]]) -> JSONResponse:
    """Answer a question about an item, in a thread because journals are read from disk."""
    watched = hub.watcher.items.get(item)
    if watched is None:
        return JSONResponse({"error": f"There is nothing called {item!r} here."}, status_code=404)
    try:
        return JSONResponse(await asyncio.to_thread(question, watched))
    except FedcohortError as error:
        return JSONResponse({"error": error.message, "hint": error.hint}, status_code=404)


def _authorised(request: Request, token: str) -> bool:
    tokens = [
        request.cookies.get(_COOKIE, ""),
        request.query_params.get("token", ""),
        request.headers.get("authorization", "").removeprefix("Bearer "),
    ]
    # In constant time, so that the duration does not reveal how much of a guess is right.
    return any(hmac.compare_digest(value.encode(), token.encode()) for value in tokens)


async def _stream(hub: _Hub, item: str, stopping: Callable[[], bool]) -> AsyncIterator[str]:
    """Yield server-sent events: the list and the chosen item, whenever they change."""
    # A reader who just came gets both at once.
    sent_overview: object = None
    sent_detail = -1
    quiet = 0.0
    while not stopping():  # the server cancels this when the reader leaves
        quiet += POLL_SECONDS / 2
        version = hub.watcher.version
        if version != sent_overview:
            sent_overview, quiet = version, 0.0
            yield f"event: overview\ndata: {plain_json(hub.watcher.overview())}\n\n"
        watched = hub.watcher.items.get(item)
        if watched is not None and watched.version != sent_detail:
            sent_detail, quiet = watched.version, 0.0
            yield f"event: detail\ndata: {await hub.detail(item)}\n\n"
        if quiet > 15:  # a comment keeps proxies from closing an idle connection
            quiet = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(POLL_SECONDS / 2)
