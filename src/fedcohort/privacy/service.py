"""The key holder as a process of its own: HTTPS with a token, three questions, limits on all of them.

It is Python's own ``http.server`` behind ``ssl``: whoever must trust the key holder has SEAL and the standard library
to trust, no web framework. One request carries all rows of an opening, read and decrypted one after the other, so that
an opening happens as a whole or not at all.

======  ================  ===============================================================================
method  path              meaning
======  ================  ===============================================================================
GET     /v1/key           which key, how many classes
POST    /v1/known         products that were opened before
POST    /v1/open          open rows: a JSON line with clients, blocks, sizes and lengths, then the rows
POST    /v1/readable      of rows in the same form, which the key fits
======  ================  ===============================================================================
"""

from __future__ import annotations

import hmac
import http.client
import ipaddress
import json
import logging
import os
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from fedcohort.arrays import FloatArray
from fedcohort.errors import CiphertextError, FedcohortError, InputError, KeyHolderError, UnknownNameError
from fedcohort.guard import guarded
from fedcohort.privacy.keyholder import ROW_LIMIT, ClientRefusedError, KeyHolder
from fedcohort.privacy.products import Row
from fedcohort.privacy.scheme import SecretKey, capacity, make_keys

log = logging.getLogger(__name__)
_HEADER_LIMIT = 32 << 20
_REFUSAL = 5  # a refused request counts as so many more
_ERRORS: dict[str, type[FedcohortError]] = {
    "CiphertextError": CiphertextError,
    "UnknownNameError": UnknownNameError,
    "InputError": InputError,
}


# -- the key holder's folder ----------------------------------------------------------------------------------------


def make_folder(folder: Path, classes: int, clients: Sequence[str]) -> None:
    """Write a new key holder's folder: keys, token, agreed clients.

    ``public.key`` is for the clients, ``evaluation.key`` and ``token`` for the server; ``secret.key`` never leaves.
    """
    names = [name.strip() for name in clients if name.strip()]
    if len(names) < 2 or len(set(names)) < len(names):
        raise InputError(f"The agreed clients must be at least two, with different names. Got {len(names)}.")
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "secret.key").exists():
        raise KeyHolderError(f"{folder} holds a key already; a new one would make all ciphertexts useless.")
    secret, evaluation = make_keys(classes)
    _private(folder / "secret.key", secret.to_bytes())
    _private(folder / "token", secrets.token_urlsafe(32).encode())
    (folder / "public.key").write_bytes(secret.public.to_bytes())
    (folder / "evaluation.key").write_bytes(evaluation.to_bytes())
    (folder / "clients.txt").write_text("".join(f"{name}\n" for name in names))


def _private(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)


def open_folder(folder: Path) -> tuple[KeyHolder, str]:
    """Return the key holder of a folder and its token; clients added to the end of ``clients.txt`` are agreed to."""
    for name in ("secret.key", "token", "clients.txt"):
        if not (folder / name).exists():
            raise KeyHolderError(f"{folder} has no {name}.", hint="make a folder with: fedcohort keyholder new")
    if (folder / "secret.key").stat().st_mode & 0o077:
        raise KeyHolderError(
            f"Others can read {folder / 'secret.key'}.", hint=f"chmod 600 {folder / 'secret.key'}, or make new keys"
        )
    secret = SecretKey.from_bytes((folder / "secret.key").read_bytes())
    clients = [line.strip() for line in (folder / "clients.txt").read_text().splitlines() if line.strip()]
    if not (folder / "opened.sqlite").exists():
        _private(folder / "opened.sqlite", b"")  # it will hold S
    return KeyHolder(secret, clients, folder / "opened.sqlite"), (folder / "token").read_text().strip()


# -- serving --------------------------------------------------------------------------------------------------------


class _Allowance:
    """So many requests a minute, saved up for at most a minute."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._rate, self._most, self._clock = per_minute / 60.0, float(per_minute), clock
        self._left, self._at = self._most, clock()
        self._lock = threading.Lock()

    def take(self, amount: float = 1.0, *, must: bool = False) -> float:
        """Take from the allowance; return 0, or the seconds until it is there. ``must`` takes it in any case."""
        with self._lock:
            now = self._clock()
            self._left = min(self._most, self._left + (now - self._at) * self._rate)
            self._at = now
            if must or self._left >= amount:
                self._left -= amount
                return 0.0
            return (amount - self._left) / self._rate


@guarded
class KeyHolderServer(ThreadingHTTPServer):
    """Serves one key holder.

    Parameters
    ----------
    holder : KeyHolder
    token : str
        What a request must bring.
    address : tuple of str and int
    certificate, key : path, optional
        For TLS; without them the address must be of this machine.
    per_minute : int
        Requests allowed a minute; a refused one counts six times.
    """

    daemon_threads = True

    def __init__(
        self,
        holder: KeyHolder,
        token: str,
        address: tuple[str, int] = ("127.0.0.1", 0),
        *,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        per_minute: int = 60,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if certificate is None and not _is_local(address[0]):
            raise KeyHolderError(
                f"A key holder at {address[0]} must use TLS: everybody on the way would read S and the token.",
                hint="give --certificate and --key, or serve on 127.0.0.1",
            )
        self.holder, self.token = holder, token
        self.allowance, self.strangers = _Allowance(per_minute, clock), _Allowance(per_minute, clock)
        n = len(holder.agreed)
        self.most_rows = n * (-(-n // capacity(holder.classes)) + 9)
        super().__init__(address, _Handler)
        self.tls = certificate is not None
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(str(certificate), None if key is None else str(key))
            # The handshake is made by the thread of the request, so that a silent peer keeps nobody else waiting.
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.server_address[:2]
        return f"{'https' if self.tls else 'http'}://{host!s}:{port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Note a connection that broke."""
        log.debug("connection from %s broke", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: KeyHolderServer
    protocol_version = "HTTP/1.1"
    timeout = 60.0

    def log_message(self, format: str, *args: Any) -> None:
        log.info("%s %s", self.address_string(), format % args)

    def do_GET(self) -> None:
        self._answer({"/v1/key": self._key})

    def do_POST(self) -> None:
        self._answer({"/v1/known": self._known, "/v1/open": self._open, "/v1/readable": self._readable})

    def _answer(self, questions: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
        self._left = int(self.headers.get("Content-Length") or 0)
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
            wait = self.server.strangers.take()
            self._refuse(429 if wait else 401, "KeyHolderError", "The token is wrong or missing.", wait=wait)
            return
        wait = self.server.allowance.take()
        if wait:
            self._refuse(
                429, "KeyHolderError", "Too many requests; the key holder answers so many a minute.", wait=wait
            )
            return
        question = questions.get(self.path)
        if question is None:
            self._refuse(404, "KeyHolderError", f"The key holder opens S and answers nothing at {self.path}.")
            return
        try:
            self._send(200, question())
        except FedcohortError as error:
            self.server.allowance.take(_REFUSAL, must=True)
            client = error.client if isinstance(error, ClientRefusedError) else None
            kind = next((name for name, cls in _ERRORS.items() if isinstance(error, cls)), "KeyHolderError")
            self._refuse(422, kind, error.message, hint=error.hint, client=client)
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            self.server.allowance.take(_REFUSAL, must=True)
            self._refuse(400, "KeyHolderError", f"The request cannot be read: {error!r}.")

    def _send(self, code: int, body: dict[str, Any], **headers: str) -> None:
        data = json.dumps(body).encode()
        self._skim()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if self._left:  # what was not read cannot be told from a next request
            self.close_connection = True
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def _skim(self) -> None:
        """Read on a little before a refusal: a peer that is still sending would lose the answer with the connection."""
        until = time.monotonic() + 5.0
        while self._left > 0 and time.monotonic() < until:
            data = self.rfile.read(min(self._left, 1 << 16))
            if not data:
                return
            self._left -= len(data)

    def _refuse(self, code: int, kind: str, message: str, wait: float = 0.0, **more: Any) -> None:
        log.warning("refused %s from %s: %s", self.path, self.address_string(), message)
        headers = {"Retry_After": str(int(wait) + 1)} if wait else {}
        self._send(code, {"error": kind, "message": message, **more}, **headers)

    # -- the questions --------------------------------------------------------------------------------------------

    def _key(self) -> dict[str, Any]:
        holder = self.server.holder
        return {"key": holder.key_name, "classes": holder.classes, "clients": len(holder.agreed)}

    def _read(self, length: int) -> bytes:
        data = self.rfile.read(length)
        self._left -= len(data)
        if len(data) < length:
            raise CiphertextError(f"The request is truncated: {len(data)} bytes came of {length}.")
        return data

    def _json_line(self) -> dict[str, Any]:
        line = self.rfile.readline(min(self._left, _HEADER_LIMIT) + 1)
        self._left -= len(line)
        value = json.loads(line)
        if not isinstance(value, dict):
            raise ValueError("not an object")
        return value

    def _known(self) -> dict[str, Any]:
        wanted = self._json_line()
        values = self.server.holder.known(_names(wanted["rows"]), _names(wanted["columns"]))
        return {"values": [[None if np.isnan(v) else int(v) for v in row] for row in values]}

    def _rows(self) -> tuple[Iterator[Row], dict[str, int], int]:
        most = _HEADER_LIMIT + self.server.most_rows * ROW_LIMIT
        if self._left > most:
            raise CiphertextError(f"The request is oversize: {self._left} bytes, at most {most} are possible.")
        head = self._json_line()
        blocks = [_names(block) for block in head["blocks"]]
        parts = [(str(r["client"]), blocks[int(r["block"])], int(r["bytes"])) for r in head["rows"]]
        if len(parts) > self.server.most_rows:
            raise CiphertextError(f"The request has {len(parts)} rows; at most {self.server.most_rows} are possible.")
        if any(not 0 <= length <= ROW_LIMIT for _, _, length in parts):
            raise CiphertextError(f"A row is oversize; at most {ROW_LIMIT} bytes are possible.")
        if sum(length for _, _, length in parts) != self._left:
            raise CiphertextError("The request is truncated: the lengths of its rows do not add up.")
        rows = (Row(client, tuple(block), self._read(length)) for client, block, length in parts)
        return rows, dict(head.get("sizes", {})), len(parts)

    def _open(self) -> dict[str, Any]:
        rows, sizes, _ = self._rows()
        return {"values": self.server.holder.open(rows, sizes)}

    def _readable(self) -> dict[str, Any]:
        return {"readable": self.server.holder.readable(self._rows()[0])}


def _names(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError("clients must be a list of names")
    return value


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# -- asking ---------------------------------------------------------------------------------------------------------


@guarded(methods=True)
class RemoteKeyHolder:
    """The key holder as the server sees it, behind a wire.

    Parameters
    ----------
    url : str
        ``https://host:port``; ``http`` only on this machine.
    token : str or path
        The token itself, or a file that holds it.
    authority : path, optional
        Certificate authority to trust; default: the system's.
    patience : float
        Longest time to wait for an answer or for the rate limit, in seconds.
    """

    def __init__(
        self,
        url: str,
        token: str | Path,
        *,
        authority: str | Path | None = None,
        patience: float = 600.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise KeyHolderError(f"A key holder is at https://host:port. Got {url!r}.")
        if parts.scheme == "http" and not _is_local(parts.hostname):
            raise KeyHolderError(f"Without TLS a key holder must be on this machine. Got {url!r}.")
        self._host, self._port, self._tls = parts.hostname, parts.port, parts.scheme == "https"
        self._token = token.read_text().strip() if isinstance(token, Path) else token
        self._authority = authority
        self._patience, self._sleep = patience, sleep

    def __repr__(self) -> str:
        return f"RemoteKeyHolder({self._host}:{self._port})"

    def _connection(self) -> http.client.HTTPConnection:
        if not self._tls:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._patience)
        context = ssl.create_default_context(cafile=None if self._authority is None else str(self._authority))
        return http.client.HTTPSConnection(self._host, self._port, timeout=self._patience, context=context)

    def _ask(self, method: str, path: str, parts: Sequence[bytes] = ()) -> dict[str, Any]:
        waited = 0.0
        while True:
            connection = self._connection()
            try:
                connection.request(
                    method,
                    path,
                    body=iter(parts) if parts else None,
                    headers={
                        "Authorization": f"Bearer {self._token}",
                        **({"Content-Length": str(sum(map(len, parts)))} if parts else {}),
                    },
                )
                reply = connection.getresponse()
                body = json.loads(reply.read() or b"{}")
            except (BrokenPipeError, ConnectionResetError) as error:
                raise KeyHolderError(f"The key holder at {self._host}:{self._port} hung up: {error}.") from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise KeyHolderError(
                    f"The key holder at {self._host}:{self._port} cannot be asked: {error}.",
                    hint="is it running (fedcohort keyholder serve), and is its certificate trusted?",
                ) from error
            finally:
                connection.close()
            if reply.status == 200:
                return dict(body)
            wait = float(reply.headers.get("Retry-After") or 0)
            if reply.status == 429 and wait and waited + wait <= self._patience:
                self._sleep(wait)
                waited += wait
                continue
            raise _error_of(body)

    def key(self) -> dict[str, Any]:
        """Return the name of the key, the number of classes and of agreed clients."""
        return self._ask("GET", "/v1/key")

    def known(self, rows: Sequence[str], columns: Sequence[str]) -> FloatArray:
        """Return the products on record, NaN where nothing was opened."""
        body = json.dumps({"rows": list(rows), "columns": list(columns)}).encode() + b"\n"
        values = self._ask("POST", "/v1/known", [body])["values"]
        return np.array([[np.nan if v is None else v for v in row] for row in values], np.float64)

    def open(self, rows: Sequence[Row], sizes: Mapping[str, int]) -> list[list[int]]:
        """Return the inner products in rows; see :meth:`KeyHolder.open`."""
        return [list(map(int, row)) for row in self._ask("POST", "/v1/open", _packed(rows, sizes))["values"]]

    def readable(self, rows: Sequence[Row]) -> list[bool]:
        """Return for each row whether the key fits."""
        return [bool(value) for value in self._ask("POST", "/v1/readable", _packed(rows, {}))["readable"]]


def _packed(rows: Sequence[Row], sizes: Mapping[str, int]) -> list[bytes]:
    blocks = list(dict.fromkeys(row.block for row in rows))
    place = {block: i for i, block in enumerate(blocks)}
    head = {
        "blocks": [list(block) for block in blocks],
        "rows": [{"client": r.client, "block": place[r.block], "bytes": len(r.body)} for r in rows],
        "sizes": dict(sizes),
    }
    return [json.dumps(head).encode() + b"\n", *(row.body for row in rows)]


def _error_of(body: Mapping[str, Any]) -> FedcohortError:
    message, hint = str(body.get("message", "The key holder refused.")), body.get("hint")
    if body.get("client"):
        return ClientRefusedError(str(body["client"]), message)
    return _ERRORS.get(str(body.get("error")), KeyHolderError)(message, hint=hint)
