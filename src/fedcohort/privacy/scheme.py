"""Sealed, signed statements of label counts: the keys, how a client makes one, how the key holder opens it.

A statement's header names the client, its number of samples and the key. The counts are in a box that only the key
holder can open (HPKE, RFC 9180, with both X25519 and ML-KEM-768). The box is bound to the header, and the client signs
both (Ed25519). So a messenger can withhold a statement, but cannot change it, forge one, or put another client's box
into it. A box that was tampered with does not open.

The box also holds a salt derived from the client's own key, which looks random. The digest of salt and counts is the
client's commitment. It is the same for the same counts, and reveals nothing to others. The key holder confirms it with
its own signature, so that a client can see what was opened in its name, and together with how many other clients.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import json
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.errors import CiphertextError, InputError, needs_extra
from fedcohort.core.validate import instance, integer, text, texts
from fedcohort.core.validate import path as check_path

_MAX_CLASSES = 1024  # this many counts still fit into a statement
MAX_SIZE = 1 << 26
"""The most samples of a client for which every inner product is an exact float64."""
STATEMENT_LIMIT = 1 << 14
"""The most bytes of a statement; an honest client never needs more."""
_HEADER_LIMIT = 4096  # bytes
_VERSION = 1
_SALT = 32  # bytes; without a salt, the counts could be found from their digest by trying all possible counts
_STATEMENT, _CONFIRMATION = "label statement", "label confirmation"


@functools.cache
def _crypto() -> Any:
    """Return our module of cryptography, which clients without encryption do not need."""
    with needs_extra("Sealed label counts need the package cryptography, from version 47 on.", "keyholder"):
        from fedcohort.privacy import primitives
    return primitives


# -- bytes --------------------------------------------------------------------------------------------------------


def _wrap(kind: str, fields: Mapping[str, Any], body: bytes) -> bytes:
    """Return one line of JSON that describes ``body``, followed by it."""
    header = {"fedcohort": kind, "version": _VERSION, **fields, "bytes": len(body)}
    return json.dumps({**header, "sha256": hashlib.sha256(body).hexdigest()}).encode() + b"\n" + body


def _unwrap(kind: str, data: bytes, what: str) -> tuple[dict[str, Any], bytes]:
    """Return the header and body that :func:`_wrap` joined; CiphertextError for anything else."""
    if not isinstance(data, bytes):
        raise CiphertextError(f"{what} is not a {kind}: it must be bytes. Got a {type(data).__name__}.")
    # Search only the first bytes for the end of the line, because a client may send anything.
    line, newline, body = data[: _HEADER_LIMIT + 1].partition(b"\n")
    try:
        header = json.loads(line) if newline else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("fedcohort") != kind or header.get("version") != _VERSION:
        raise CiphertextError(f"{what} is not a {kind} of this version.")
    body = data[len(line) + 1 :]
    if header.get("bytes") != len(body):
        raise CiphertextError(f"{what} is truncated: {len(body)} of {header.get('bytes')} bytes.")
    if header.get("sha256") != hashlib.sha256(body).hexdigest():
        raise CiphertextError(f"{what} is damaged: its checksum does not match.")
    return header, body


def wrap_row(kind: str, client: str, values: ArrayLike) -> bytes:
    """Return a client's (B,) numbers as bytes for the server, without a key holder."""
    row = np.ascontiguousarray(values, "<f8")
    return _wrap(kind, {"classes": len(row), "client": client}, row.tobytes())


def unwrap_row(kind: str, client: str, data: bytes, classes: int, what: str) -> FloatArray:
    """Return the (B,) numbers that :func:`wrap_row` wrapped for this client; CiphertextError for anything else."""
    header, body = _unwrap(kind, data, what)
    if header.get("classes") != classes or len(body) != 8 * classes:
        raise CiphertextError(f"{what} have {header.get('classes')} classes; the federation has {classes}.")
    if header.get("client") != client:
        raise CiphertextError(f"{what} were made for client {header.get('client')!r}.")
    return np.frombuffer(body, "<f8").astype(np.float64)


def _encode(kind: str, *fields: Any) -> bytes:
    """Return the bytes to sign: the same for the same fields, and different for each kind."""
    return json.dumps([f"fedcohort {kind}", _VERSION, *fields]).encode()


# -- keys ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PublicKey:
    """The key holder's public key, with which a client seals its counts and a server checks statements.

    Parameters
    ----------
    classes : int
        B.
    max_samples : int
        The most samples that a client may state.
    body : bytes
        The public keys for boxes and for the key holder's signatures.
    """

    classes: int
    max_samples: int
    body: bytes

    def __post_init__(self) -> None:
        integer(self.classes, "The number of classes of a label key", 2, _MAX_CLASSES)
        integer(self.max_samples, "The most samples a client may state", 1, MAX_SIZE)
        instance(self.body, bytes, "The body of a label key")

    @functools.cached_property
    def name(self) -> str:
        """The fingerprint, which every statement contains."""
        return hashlib.sha256(_encode("label key", self.classes, self.max_samples) + self.body).hexdigest()[:32]

    def to_bytes(self) -> bytes:
        """Return the key as a file's content."""
        return _wrap("label key", {"classes": self.classes, "most_samples": self.max_samples}, self.body)

    @classmethod
    def read(cls, key: PublicKey | str | Path) -> PublicKey:
        """Return ``key`` itself, or the key in the file at this path."""
        return key if isinstance(key, PublicKey) else cls.from_bytes(check_path(key, "'public'").read_bytes())

    @classmethod
    def from_bytes(cls, data: bytes) -> PublicKey:
        """Read what :meth:`to_bytes` wrote."""
        header, body = _unwrap("label key", data, "The public key")
        return cls(int(header["classes"]), int(header["most_samples"]), body)


@dataclass(frozen=True)
class SecretKey:
    """The key that opens boxes and signs confirmations. It never leaves the key holder."""

    public: PublicKey
    body: bytes

    def __repr__(self) -> str:
        return f"SecretKey({self.public.name})"

    def to_bytes(self) -> bytes:
        """Return the key as a file's content."""
        fields = {"classes": self.public.classes, "most_samples": self.public.max_samples}
        return _wrap("label secret", fields, self.body)

    @classmethod
    def from_bytes(cls, data: bytes) -> SecretKey:
        """Read what :meth:`to_bytes` wrote."""
        header, body = _unwrap("label secret", data, "The secret key")
        public = _crypto().public_of(body)
        return cls(PublicKey(int(header["classes"]), int(header["most_samples"]), public), body)


def make_keys(classes: int, max_samples: int = 100_000) -> SecretKey:
    """Return new keys for the key holder of a federation; ``.public`` is for clients and server.

    Parameters
    ----------
    max_samples : int
        The most samples that a client may state: no more than honest clients have. The larger the counts that a lying
        client can state, the more its products reveal about the counts of the others.
    """
    body = _crypto().fresh_secret()
    return SecretKey(PublicKey(classes, max_samples, _crypto().public_of(body)), body)


@dataclass(frozen=True)
class ClientKey:
    """A client's own key, with which it signs its statements.

    Parameters
    ----------
    body : bytes
        32 secret bytes; :meth:`fresh` draws them.
    """

    body: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.body, bytes) or len(self.body) != 32:  # a message must not show the secret
            got = f"{len(self.body)}" if isinstance(self.body, bytes) else f"a {type(self.body).__name__}"
            raise InputError(f"A client's key has 32 bytes. Got {got}.")

    def __repr__(self) -> str:
        return f"ClientKey({self.public})"

    @classmethod
    def fresh(cls) -> ClientKey:
        """Return a new key."""
        return cls(_crypto().fresh_signer())

    @functools.cached_property
    def public(self) -> str:
        """The public key, as it follows the client's name in ``clients.txt``."""
        return base64.b64encode(_crypto().verifier_of(self.body)).decode()

    def to_bytes(self) -> bytes:
        """Return the key as a file's content."""
        return _wrap("client key", {}, self.body)

    @classmethod
    def from_bytes(cls, data: bytes) -> ClientKey:
        """Read what :meth:`to_bytes` wrote."""
        return cls(_unwrap("client key", data, "The client's key")[1])


def parse_clients(lines: Iterable[str]) -> dict[str, bytes]:
    """Return the public keys of clients by name, from the lines of ``clients.txt``: a name and a key on each."""
    clients: dict[str, bytes] = {}
    keys: set[bytes] = set()
    for line in texts(lines if isinstance(lines, (list, tuple)) else list(lines), "The clients' file", "lines"):
        if not line.strip():
            continue
        name, _, text = line.strip().rpartition(" ")
        name = _normalise(name.strip())
        try:
            key = base64.b64decode(text, validate=True)
        except ValueError:
            key = b""
        if not name or len(key) != 32:
            raise InputError(
                f"A line of the clients' file must be a name and the client's public key. Got {line.strip()[:200]!r}.",
                hint="each client makes its own: fedcohort privacy keyholder client-key client.key --name NAME",
            )
        # One key under two names would let a client state its counts twice.
        if name in clients or key in keys:
            raise InputError(f"The clients' file lists client {name!r}, or its key, twice.")
        clients[name] = key
        keys.add(key)
    return clients


# -- statements ---------------------------------------------------------------------------------------------------


class Statement(NamedTuple):
    """A client's statement, opened.

    Parameters
    ----------
    counts : (B,) int array
    """

    client: str
    size: int
    counts: IntArray
    commitment: str


class LabelSeal:
    """Seals a client's label counts for the key holder, and checks the key holder's confirmations.

    Parameters
    ----------
    public : PublicKey or path
        The key holder's ``public.key``, received over a channel that the server does not control.
    key : ClientKey or path
        The client's own key; its public key is in the key holder's ``clients.txt``.
    """

    def __init__(self, public: PublicKey | str | Path, key: ClientKey | str | Path) -> None:
        self.public = PublicKey.read(public)
        self._key = key if isinstance(key, ClientKey) else ClientKey.from_bytes(check_path(key, "'key'").read_bytes())

    def seal(self, client: str, counts: ArrayLike) -> bytes:
        """Return a client's label counts, sealed and signed.

        Parameters
        ----------
        client : str
            Its name in the federation and in ``clients.txt``.
        counts : (B,) array of whole numbers
        """
        values, client = _check_counts(counts, self.public), _normalise(text(client, "'client'"))
        about = _about(self.public, client, sum(values))
        # The box is bound to the header: with another name or size it does not open.
        box = _crypto().seal(self.public.body, about, self._salt() + _pack(values))
        fields = {
            "key": self.public.name,
            "classes": self.public.classes,
            "client": client,
            "size": sum(values),
            "signature": _crypto().sign(self._key.body, about + hashlib.sha256(box).digest()).hex(),
        }
        return _wrap(_STATEMENT, fields, box)

    def confirm(self, client: str, counts: ArrayLike, confirmation: bytes) -> str:
        """Check a confirmation of :meth:`KeyHolder.confirm`; return the digest of the set of clients that it names.

        Raises
        ------
        CiphertextError
            If the confirmation is not from the key holder, or differs from what this client would state.
        """
        values, client = _check_counts(counts, self.public), _normalise(text(client, "'client'"))
        fields, signature = _unwrap(_CONFIRMATION, confirmation, "The key holder's confirmation")
        stated = [fields.get(name) for name in ("key", "client", "size", "commitment", "clients", "set")]
        if stated[0] != self.public.name:
            raise CiphertextError(
                f"The confirmation is by the key {stated[0]}; client {client!r} was given {self.public.name}."
            )
        if not _crypto().is_signed(_crypto().verifier_in(self.public.body), _encode(_CONFIRMATION, *stated), signature):
            raise CiphertextError("The confirmation is not signed by the key holder whose public key this client has.")
        about = _about(self.public, client, sum(values))
        if stated[1:4] != [client, sum(values), _commitment(about, self._salt(), _pack(values))]:
            raise CiphertextError(
                f"The key holder opens products of other counts than client {client!r} has: of {stated[2]} samples of "
                f"client {stated[1]!r}; here are {sum(values)}.",
                hint="if the data changed, the federation needs new keys; if not, somebody else has this client's key",
            )
        return str(stated[5])

    def _salt(self) -> bytes:
        return hmac.digest(self._key.body, _encode("salt", self.public.name), "sha256")


def _check_counts(counts: ArrayLike, public: PublicKey) -> list[int]:
    """Return label counts as whole numbers that can be sealed; InputError for anything else."""
    try:
        values = np.asarray(counts, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        # No message below contains a count: a client's errors are sent to the server.
        raise InputError(f"Label counts must be numbers. Got a {type(counts).__name__} of something else.") from None
    if values.shape != (public.classes,):
        raise InputError(
            f"The key is for {public.classes} classes, so there must be {public.classes} counts. Got {values.shape}."
        )
    bad = ~np.isfinite(values) | (values < 0) | (values != np.floor(values))
    if bad.any():
        where = int(np.flatnonzero(bad)[0])
        raise InputError(f"Label counts must be whole numbers from 0. Got something else for class {where}.")
    # The larger the counts of a lying client, the more its products reveal about the others.
    if values.sum() > public.max_samples:
        raise InputError(
            f"The key holder allows a client at most {public.max_samples} samples. "
            f"The counts sum to {values.sum():.0f}.",
            hint="new keys can allow more: fedcohort privacy keyholder new --max-samples",
        )
    return [int(value) for value in values]


def check_statement(public: PublicKey, client: str, data: bytes) -> int:
    """Return the size that a client states, after every check that needs no other key.

    Raises
    ------
    CiphertextError
        If the statement is too large, truncated, damaged, or for another key, client or number of classes.
    """
    what = f"The statement of client {client!r}"
    if len(data) > STATEMENT_LIMIT:
        raise CiphertextError(f"{what} is too large: {len(data)} bytes; at most {STATEMENT_LIMIT} are allowed.")
    header, _ = _unwrap(_STATEMENT, data, what)
    if header.get("key") != public.name:
        key = str(header.get("key"))[:40]
        raise CiphertextError(  # without the client's name, so that a host can print it once for all clients
            f"The label counts were sealed for the key {key}; the federation's is {public.name}.",
            hint="give clients and server the same public.key of the key holder",
        )
    if header.get("classes") != public.classes:
        raise CiphertextError(f"{what} has {header.get('classes')} classes; the federation has {public.classes}.")
    if header.get("client") != client:
        raise CiphertextError(f"{what} was made by client {str(header.get('client'))[:200]!r}.")
    size = header.get("size")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= public.max_samples:
        raise CiphertextError(f"{what} must be of 0 to {public.max_samples} samples. Got {str(size)[:40]}.")
    return size


def open_statement(secret: SecretKey, client: str, verifier: bytes | None, data: bytes) -> Statement:
    """Open a client's statement.

    Parameters
    ----------
    verifier : bytes or None
        The client's public key; None for a statement whose signature was already checked.

    Raises
    ------
    CiphertextError
        If the client did not sign it, or its counts do not have the stated size.
    """
    size = check_statement(secret.public, client, data)
    header, box = _unwrap(_STATEMENT, data, client)
    about = _about(secret.public, client, size)
    if verifier is not None:
        try:
            signature = bytes.fromhex(header.get("signature", ""))
        except (TypeError, ValueError):
            signature = b""
        if not _crypto().is_signed(verifier, about + hashlib.sha256(box).digest(), signature):
            raise CiphertextError(
                f"The statement of client {client!r} is not signed with the key it is enrolled with.",
                hint="clients.txt must hold the key that the client uses; if it does, somebody changed the statement",
            )
    plain = _crypto().unseal(secret.body, about, box)
    what = f"The sealed label counts of client {client!r}"
    if plain is None:
        raise CiphertextError(f"{what} cannot be opened.")
    if len(plain) != _SALT + 8 * secret.public.classes:
        raise CiphertextError(f"{what} are not {secret.public.classes} numbers.")
    counts = [int(value) for value in np.frombuffer(plain[_SALT:], "<u8")]
    # A client may lie about its size, but it must tell everybody the same size.
    if sum(counts) != size:
        raise CiphertextError(f"{what} do not sum to the {size} samples it states.")
    return Statement(client, size, np.array(counts, np.int64), _commitment(about, plain[:_SALT], plain[_SALT:]))


def sign_confirmation(secret: SecretKey, statement: Statement, clients: int, digest: str) -> bytes:
    """Return the key holder's confirmation of a statement: size, commitment, and the set of clients it belongs to."""
    stated = {
        "key": secret.public.name,
        "client": statement.client,
        "size": statement.size,
        "commitment": statement.commitment,
        "clients": clients,
        "set": digest,
    }
    return _wrap(_CONFIRMATION, stated, _crypto().sign_as_holder(secret.body, _encode(_CONFIRMATION, *stated.values())))


def set_digest(statements: Iterable[Statement]) -> str:
    """Return the digest of a set of clients: their names, sizes and commitments, in the order of the names."""
    members = sorted((s.client, s.size, s.commitment) for s in statements)
    return hashlib.sha256(_encode("set of clients", members)).hexdigest()


def _about(public: PublicKey, client: str, size: int) -> bytes:
    """Return what a statement says in the clear, to which its box is bound."""
    return _encode(_STATEMENT, public.name, public.classes, client, size)


def _normalise(name: str) -> str:
    """Return a name as hosts compare it: names that look the same become equal."""
    return unicodedata.normalize("NFC", name)


def _pack(values: Iterable[int]) -> bytes:
    return np.array(list(values), "<u8").tobytes()


def _commitment(about: bytes, salt: bytes, counts: bytes) -> str:
    return hashlib.sha256(about + salt + counts).hexdigest()
