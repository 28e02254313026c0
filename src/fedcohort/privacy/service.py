"""The key holder as a separate process: HTTPS with a token, four kinds of requests, and a limit on their size.

======  ================  ===============================================================================
method  path              meaning
======  ================  ===============================================================================
GET     /v1/key           the public key
POST    /v1/admit         accept clients' statements; return those that are refused
POST    /v1/products      inner products of the counts that clients have stated
POST    /v1/confirm       what each client stated, signed, for the client to check
======  ================  ===============================================================================

Requests are not rate-limited, because all answers together reveal only S of the enrolled clients.
"""

from __future__ import annotations

import base64
import hmac
import http.client
import ipaddress
import json
import logging
import os
import secrets
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from fedcohort.core.arrays import IntArray
from fedcohort.core.errors import FedcohortError, InputError, KeyHolderError, UnknownNameError, needs_extra
from fedcohort.core.files import read_file
from fedcohort.core.validate import input_error, instance, integer, number, text
from fedcohort.core.validate import path as check_path
from fedcohort.privacy.keyholder import KeyHolder
from fedcohort.privacy.scheme import STATEMENT_LIMIT, ClientKey, PublicKey, SecretKey, make_keys, parse_clients

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger(__name__)
_ERRORS: dict[str, type[FedcohortError]] = {"InputError": InputError, "UnknownNameError": UnknownNameError}


# -- files ----------------------------------------------------------------------------------------------------------


def make_folder(folder: Path, classes: int, clients: Sequence[str], max_samples: int) -> PublicKey:
    """Write the folder of a new key holder: keys, token, enrolled clients.

    ``public.key`` is for clients and server, ``token`` for the server. ``secret.key`` must never leave the folder.
    """
    names = parse_clients(clients)
    if len(names) < 2:
        raise InputError(f"There must be at least two clients. Got {len(names)}.")
    if (folder / "secret.key").exists():
        raise KeyHolderError(f"{folder} already holds a key; a new one would make all statements useless.")
    secret = make_keys(classes, max_samples)
    folder.mkdir(parents=True, exist_ok=True)
    _private(folder / "secret.key", secret.to_bytes())
    _private(folder / "token", secrets.token_urlsafe(32).encode())
    (folder / "public.key").write_bytes(secret.public.to_bytes())
    lines = "".join(f"{line.strip()}\n" for line in clients if line.strip())
    (folder / "clients.txt").write_text(lines, encoding="utf-8")
    return secret.public


def client_lines(path: Path) -> list[str]:
    """Return the lines of a file of clients."""
    try:
        return read_file(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not text: {error}"
        raise InputError(
            f"The clients' names and keys in {path} cannot be read: {why}.",
            hint="each client makes its own: fedcohort privacy keyholder client-key client.key --name NAME",
        ) from error


def make_client_key(path: Path, name: str) -> str:
    """Write a new key for a client; return the line that enrols the client with the key holder."""
    line = f"{name} {(key := ClientKey.fresh()).public}"
    if list(parse_clients([line])) != [name]:
        raise InputError(f"A client's name must not begin or end with a space. Got {name!r}.")
    if path.exists():
        raise KeyHolderError(f"{path} already exists; a client that lost its key must be enrolled again.")
    _private(path, key.to_bytes())
    return line


def _private(path: Path, data: bytes) -> None:
    # Private from the start. With chmod afterwards, others could open it for a moment.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)


def open_folder(folder: Path) -> tuple[KeyHolder, str]:
    """Return the key holder of a folder, and its token. Lines added to ``clients.txt`` enrol more clients."""
    for name in ("secret.key", "token", "clients.txt"):
        if not (folder / name).exists():
            raise KeyHolderError(f"{folder} has no {name}.", hint="make a folder with: fedcohort privacy keyholder new")
    if (folder / "secret.key").stat().st_mode & 0o077:
        raise KeyHolderError(
            f"Others can read {folder / 'secret.key'}.", hint=f"chmod 600 {folder / 'secret.key'}, or make new keys"
        )
    secret = SecretKey.from_bytes((folder / "secret.key").read_bytes())
    clients = parse_clients(client_lines(folder / "clients.txt"))
    if not (folder / "statements.sqlite").exists():
        _private(folder / "statements.sqlite", b"")
    return KeyHolder(secret, clients, folder / "statements.sqlite"), (folder / "token").read_text().strip()


# -- serving --------------------------------------------------------------------------------------------------------


class KeyHolderServer:
    """Serves one key holder, from :meth:`serve_forever` until :meth:`shutdown`.

    Parameters
    ----------
    token : str
        Every request must carry it.
    certificate, key : path, optional
        Files for TLS; without them, the address must be on this machine.
    """

    def __init__(
        self,
        holder: KeyHolder,
        token: str,
        address: tuple[str, int] = ("127.0.0.1", 0),
        *,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
    ) -> None:
        instance(holder, KeyHolder, "'holder'")
        text(token, "'token'")
        if not isinstance(address, tuple) or len(address) != 2:
            raise input_error("'address'", "a host and a port, for example ('127.0.0.1', 0)", address)
        text(address[0], "The host of 'address'")
        integer(address[1], "The port of 'address'", 0, 65535)
        if certificate is None and not _is_local(address[0]):
            raise KeyHolderError(
                f"A key holder at {address[0]} must use TLS: anybody on the network could read S and the token.",
                hint="give --certificate and --key, or serve on 127.0.0.1",
            )
        with needs_extra("A key holder's service needs starlette and uvicorn.", "keyholder"):
            import uvicorn

            app = _app(holder, token)
        config = uvicorn.Config(
            app,
            log_config=None,  # its own would close the handlers of the program around it, and their streams
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,  # seconds to finish requests
            ssl_certfile=None if certificate is None else str(certificate),
            ssl_keyfile=None if key is None else str(key),
        )
        self._server = uvicorn.Server(config)
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.create_server(address, family=family)
        host, port = self._socket.getsockname()[:2]
        self.address = (str(host), int(port))
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http{'s' if certificate else ''}://{shown}:{port}"

    def serve_forever(self) -> None:
        """Answer until :meth:`shutdown`, or until the process is interrupted."""
        with self._socket:
            self._server.run(sockets=[self._socket])

    def shutdown(self) -> None:
        """Stop answering."""
        self._server.should_exit = True


def _app(holder: KeyHolder, token: str) -> Any:
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    # Enough for a statement, in base64, and a name of each enrolled client.
    limit = 4096 + (2 * STATEMENT_LIMIT + 4096) * len(holder.enrolled)

    def reject(code: int, error: str, message: str, hint: str | None = None) -> Response:
        log.warning("refused: %s", message)
        return JSONResponse({"error": error, "message": message, "hint": hint}, code)

    async def answer(request: Request, question: Callable[[Any], Any]) -> Response:
        sent = request.headers.get("Authorization", "")
        # In constant time, so that the time does not reveal how much of the token is right.
        if not hmac.compare_digest(sent.encode(), f"Bearer {token}".encode()):
            return reject(401, "KeyHolderError", "The token is wrong or missing.")
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > limit:
                return reject(413, "InputError", f"The request is too large; at most {limit} bytes are allowed.")
        try:
            return JSONResponse(await run_in_threadpool(lambda: question(json.loads(data or b"{}"))))
        except FedcohortError as error:
            kind = next((name for name, cls in _ERRORS.items() if isinstance(error, cls)), "KeyHolderError")
            return reject(422, kind, error.message, error.hint)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            return reject(400, "InputError", f"The request cannot be read: {str(error)[:200]}.")

    def admit(body: Any) -> Any:
        statements = {name: base64.b64decode(data, validate=True) for name, data in body["statements"].items()}
        return {"refused": holder.admit(statements)}

    def products(body: Any) -> Any:
        return {"products": holder.products(_names(body["rows"]), _names(body["columns"])).tolist()}

    def confirm(body: Any) -> Any:
        confirmed = holder.confirm(_names(body["clients"]))
        return {"confirmed": {name: _text(data) for name, data in confirmed.items()}}

    questions: dict[tuple[str, str], Callable[[Any], Any]] = {
        ("GET", "/v1/key"): lambda _: {"public": _text(holder.public.to_bytes())},
        ("POST", "/v1/admit"): admit,
        ("POST", "/v1/products"): products,
        ("POST", "/v1/confirm"): confirm,
    }

    async def dispatch(request: Request) -> Response:
        question = questions.get((request.method, request.url.path))
        if question is None:
            return reject(404, "KeyHolderError", f"The key holder answers nothing at {request.url.path[:100]!r}.")
        return await answer(request, question)

    return Starlette(routes=[Route("/{path:path}", dispatch, methods=["GET", "POST"])])


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _names(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value) or len(set(value)) < len(value):
        raise ValueError("clients must be a list of different names")
    return value


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# -- asking ---------------------------------------------------------------------------------------------------------


class RemoteKeyHolder:
    """The key holder as the server sees it, over the network.

    Parameters
    ----------
    url : str
        ``https://host:port``; ``http`` only on this machine.
    token : str or path
        The token itself, or the path of a file that holds it.
    authority : path, optional
        Certificate authority to trust; default: the system's.
    patience : float
        The longest time to wait for an answer, in seconds.
    """

    def __init__(
        self, url: str, token: str | Path, *, authority: str | Path | None = None, patience: float = 60.0
    ) -> None:
        parts = urlsplit(text(url, "'url'"))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise KeyHolderError(f"A key holder's address must be https://host:port. Got {url!r}.")
        if parts.scheme == "http" and not _is_local(parts.hostname):
            raise KeyHolderError(f"Without TLS a key holder must be on this machine. Got {url!r}.")
        self._host, self._port, self._tls = parts.hostname, parts.port, parts.scheme == "https"
        self._token = token.read_text().strip() if isinstance(token, Path) else text(token, "'token'")
        self._authority = None if authority is None else check_path(authority, "'authority'")
        self._patience = number(patience, "'patience'", least=0)

    def __repr__(self) -> str:
        return f"RemoteKeyHolder({self._host}:{self._port})"

    def _ask(self, path: str, question: Mapping[str, Any] | None = None) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._patience)
        if self._tls:
            context = ssl.create_default_context(cafile=None if self._authority is None else str(self._authority))
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=self._patience, context=context)
        try:
            body = None if question is None else json.dumps(question).encode()
            connection.request(
                "GET" if body is None else "POST", path, body, {"Authorization": f"Bearer {self._token}"}
            )
            reply = connection.getresponse()
            answer = dict(json.loads(reply.read()))
        except (OSError, http.client.HTTPException, ValueError, TypeError) as error:
            raise KeyHolderError(
                f"The key holder at {self._host}:{self._port} cannot be reached: {error}.",
                hint="is it running (fedcohort privacy keyholder serve), and is its certificate trusted?",
            ) from error
        finally:
            connection.close()
        if reply.status == 200:
            return answer
        message = str(answer.get("message", f"The key holder answers {reply.status} at {path}."))
        raise _ERRORS.get(str(answer.get("error")), KeyHolderError)(message, hint=answer.get("hint"))

    @property
    def public(self) -> PublicKey:
        """The key holder's current public key."""
        return PublicKey.from_bytes(base64.b64decode(self._ask("/v1/key")["public"]))

    def admit(self, statements: Mapping[str, bytes]) -> dict[str, str]:
        """Send clients' statements; return the clients that were refused, each with the reason."""
        sent = {name: _text(data) for name, data in statements.items()}
        return {str(n): str(why) for n, why in self._ask("/v1/admit", {"statements": sent})["refused"].items()}

    def products(self, rows: Sequence[str], columns: Sequence[str]) -> IntArray:
        """Return inner products of clients' counts, (rows, columns)."""
        products = self._ask("/v1/products", {"rows": list(rows), "columns": list(columns)})["products"]
        return np.array(products, np.int64).reshape(len(rows), len(columns))

    def confirm(self, clients: Sequence[str]) -> dict[str, bytes]:
        """Return the key holder's signed confirmation for each client."""
        confirmed = self._ask("/v1/confirm", {"clients": list(clients)})["confirmed"]
        return {name: base64.b64decode(data) for name, data in confirmed.items()}
