"""Label counts in a sealed, signed statement: keys, how a client makes one, how the key holder opens it.

A statement says in the clear who states it, how many samples there are and for which key; the counts are in a box that
only the key holder opens (HPKE, RFC 9180, with X25519 and ML-KEM-768 together). What is said in the clear is bound to
the box, and the client signs both (Ed25519). So a messenger can withhold a statement, but neither change it,
nor make one, nor put somebody else's box into it; a box that was tampered with opens to nothing at all.

The box also holds a random-looking salt, derived from the client's own key. Salt and counts have a digest, the
client's commitment: the same for the same counts, and telling nobody else anything. The key holder confirms it with a
signature of its own, so that a client sees what was opened in its name and with how many others.
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
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.errors import CiphertextError, InputError, needs_extra
from fedcohort.core.validate import instance, text, texts, whole_number
from fedcohort.core.validate import path as check_path

MOST_CLASSES = 1024  # so many counts still fit a statement
LARGEST_SIZE = 1 << 26
"""Up to here every inner product is an exact float64."""
STATEMENT_LIMIT = 1 << 14
"""Bytes of the largest statement anybody has a reason to send."""
_HEADER_LIMIT = 4096  # bytes in which the line that says what follows must end
_VERSION = 1
_SALT = 32  # bytes; without them a digest of a few small numbers could be found by trying all of them
_STATEMENT, _CONFIRMATION = "label statement", "label confirmation"


@functools.cache
def _crypto() -> Any:
    """Return what is used of the cryptography package, which clients without encryption do not need."""
    with needs_extra("Sealed label counts need the package cryptography, from version 47 on.", "keyholder"):
        from fedcohort.privacy import primitives
    return primitives


# -- bytes --------------------------------------------------------------------------------------------------------


def wrap(kind: str, fields: Mapping[str, Any], body: bytes) -> bytes:
    """Return ``body`` behind one line that says what it is."""
    header = {"fedcohort": kind, "version": _VERSION, **fields, "bytes": len(body)}
    return json.dumps({**header, "sha256": hashlib.sha256(body).hexdigest()}).encode() + b"\n" + body


def unwrap(kind: str, data: bytes, what: str) -> tuple[dict[str, Any], bytes]:
    """Return the header and body :func:`wrap` joined; anything else is refused."""
    if not isinstance(data, bytes):
        raise CiphertextError(f"{what} is not a {kind}: it must be bytes. Got a {type(data).__name__}.")
    # Only the first bytes are searched for the end of the line: a client may send anything.
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
    """Return (B,) numbers of a client as they travel without a key holder."""
    row = np.ascontiguousarray(values, "<f8")
    return wrap(kind, {"classes": len(row), "client": client}, row.tobytes())


def unwrap_row(kind: str, client: str, data: bytes, classes: int, what: str) -> FloatArray:
    """Return the (B,) numbers :func:`wrap_row` wrapped for this client; anything else is refused."""
    header, body = unwrap(kind, data, what)
    if header.get("classes") != classes or len(body) != 8 * classes:
        raise CiphertextError(f"{what} have {header.get('classes')} classes; the federation has {classes}.")
    if header.get("client") != client:
        raise CiphertextError(f"{what} were made for client {header.get('client')!r}.")
    return np.frombuffer(body, "<f8").astype(np.float64)


def _encode(kind: str, *fields: Any) -> bytes:
    """Return what is signed: always the same bytes for the same fields, and never those of another kind."""
    return json.dumps([f"fedcohort {kind}", _VERSION, *fields]).encode()


# -- keys ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PublicKey:
    """The key holder's public key: what a client needs to seal its counts, and a server to recognise them.

    Parameters
    ----------
    classes : int
        B.
    most_samples : int
        How many samples a client may state.
    body : bytes
        The keys for boxes and for the key holder's signatures.
    """

    classes: int
    most_samples: int
    body: bytes

    def __post_init__(self) -> None:
        whole_number(self.classes, "The number of classes of a label key", 2, MOST_CLASSES)
        whole_number(self.most_samples, "The most samples a client may state", 1, LARGEST_SIZE)
        instance(self.body, bytes, "The body of a label key")

    @functools.cached_property
    def name(self) -> str:
        """The fingerprint; every statement carries it."""
        return hashlib.sha256(_encode("label key", self.classes, self.most_samples) + self.body).hexdigest()[:32]

    def to_bytes(self) -> bytes:
        """Return the key as a file's content."""
        return wrap("label key", {"classes": self.classes, "most_samples": self.most_samples}, self.body)

    @classmethod
    def read(cls, key: PublicKey | str | Path) -> PublicKey:
        """Return a key, given itself or the path of its file."""
        return key if isinstance(key, PublicKey) else cls.from_bytes(check_path(key, "'public'").read_bytes())

    @classmethod
    def from_bytes(cls, data: bytes) -> PublicKey:
        """Read what :meth:`to_bytes` wrote."""
        header, body = unwrap("label key", data, "The public key")
        return cls(int(header["classes"]), int(header["most_samples"]), body)


@dataclass(frozen=True)
class SecretKey:
    """What opens boxes and signs confirmations. It stays with the key holder."""

    public: PublicKey
    body: bytes

    def __repr__(self) -> str:
        return f"SecretKey({self.public.name})"

    def to_bytes(self) -> bytes:
        """Return the key as a file's content."""
        fields = {"classes": self.public.classes, "most_samples": self.public.most_samples}
        return wrap("label secret", fields, self.body)

    @classmethod
    def from_bytes(cls, data: bytes) -> SecretKey:
        """Read what :meth:`to_bytes` wrote."""
        header, body = unwrap("label secret", data, "The secret key")
        public = _crypto().public_of(body)
        return cls(PublicKey(int(header["classes"]), int(header["most_samples"]), public), body)


def make_keys(classes: int, most_samples: int = 100_000) -> SecretKey:
    """Return a key holder's fresh keys for a federation; ``.public`` is for clients and server.

    Parameters
    ----------
    most_samples : int
        How many samples a client may state: as few as honest clients have. A client that lies sees the more of the
        others' counts in its products the larger its own may be.
    """
    body = _crypto().fresh_secret()
    return SecretKey(PublicKey(classes, most_samples, _crypto().public_of(body)), body)


@dataclass(frozen=True)
class ClientKey:
    """A client's own key, with which it signs what it states.

    Parameters
    ----------
    body : bytes
        32 secret bytes; :meth:`fresh` draws them.
    """

    body: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.body, bytes) or len(self.body) != 32:  # secret, so it is not shown
            found = f"{len(self.body)}" if isinstance(self.body, bytes) else f"a {type(self.body).__name__}"
            raise InputError(f"A client's key has 32 bytes. Got {found}.")

    def __repr__(self) -> str:
        return f"ClientKey({self.public})"

    @classmethod
    def fresh(cls) -> ClientKey:
        """Return a new key."""
        return cls(_crypto().fresh_signer())

    @functools.cached_property
    def public(self) -> str:
        """The public half, as it stands behind the client's name in ``clients.txt``."""
        return base64.b64encode(_crypto().verifier_of(self.body)).decode()

    def to_bytes(self) -> bytes:
        """Return the key as a file's content."""
        return wrap("client key", {}, self.body)

    @classmethod
    def from_bytes(cls, data: bytes) -> ClientKey:
        """Read what :meth:`to_bytes` wrote."""
        return cls(unwrap("client key", data, "The client's key")[1])


def parse_clients(lines: Iterable[str]) -> dict[str, bytes]:
    """Return the clients of ``clients.txt``: a name and the public half of the client's key on each line."""
    found: dict[str, bytes] = {}
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
        if name in found or key in keys:
            raise InputError(f"The clients' file lists client {name!r}, or its key, twice.")
        found[name] = key
        keys.add(key)
    return found


# -- statements ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Statement:
    """What a client stated, opened.

    Parameters
    ----------
    counts : (B,) int array
    """

    client: str
    size: int
    counts: IntArray
    commitment: str


class LabelSeal:
    """How a client tells the key holder its label counts, and checks what the key holder makes of them.

    Parameters
    ----------
    public : PublicKey or path
        The key holder's ``public.key``, from a channel that the server does not control.
    key : ClientKey or path
        The client's own key; its public half is in the key holder's ``clients.txt``.
    """

    def __init__(self, public: PublicKey | str | Path, key: ClientKey | str | Path) -> None:
        self.public = PublicKey.read(public)
        self._key = key if isinstance(key, ClientKey) else ClientKey.from_bytes(check_path(key, "'key'").read_bytes())

    def seal(self, client: str, counts: ArrayLike) -> bytes:
        """Return a client's label counts sealed and signed, as they travel.

        Parameters
        ----------
        client : str
            Its name in the federation and in ``clients.txt``.
        counts : (B,) array of whole numbers
        """
        values, client = self._check_counts(counts), _normalise(text(client, "'client'"))
        about = _encode(_STATEMENT, self.public.name, self.public.classes, client, sum(values))
        # Bound to what is said in the clear: under another name or size the box does not open.
        box = _crypto().seal(self.public.body, about, self._salt() + _pack(values))
        fields = {
            "key": self.public.name,
            "classes": self.public.classes,
            "client": client,
            "size": sum(values),
            "signature": _crypto().sign(self._key.body, about + hashlib.sha256(box).digest()).hex(),
        }
        return wrap(_STATEMENT, fields, box)

    def confirm(self, client: str, counts: ArrayLike, confirmation: bytes) -> str:
        """Return the digest of the set of clients whose products the key holder opens; see :meth:`KeyHolder.confirm`.

        Raises
        ------
        CiphertextError
            When the confirmation is not the key holder's, or says something else than this client would state.
        """
        values, client = self._check_counts(counts), _normalise(text(client, "'client'"))
        fields, signature = unwrap(_CONFIRMATION, confirmation, "The key holder's confirmation")
        stated = [fields.get(name) for name in ("key", "client", "size", "commitment", "clients", "set")]
        if stated[0] != self.public.name:
            raise CiphertextError(
                f"The confirmation is by the key {stated[0]}; client {client!r} was given {self.public.name}."
            )
        if not _crypto().is_signed(_crypto().verifier_in(self.public.body), _encode(_CONFIRMATION, *stated), signature):
            raise CiphertextError("The confirmation is not signed by the key holder whose public key this client has.")
        about = _encode(_STATEMENT, self.public.name, self.public.classes, client, sum(values))
        if stated[1:4] != [client, sum(values), _commitment(about, self._salt(), _pack(values))]:
            raise CiphertextError(
                f"The key holder opens products of other counts than client {client!r} has: of {stated[2]} samples of "
                f"client {stated[1]!r}; here are {sum(values)}.",
                hint="if the data changed, the federation needs new keys; if not, somebody else has this client's key",
            )
        return str(stated[5])

    def _check_counts(self, counts: ArrayLike) -> list[int]:
        return check_counts(counts, self.public.classes, self.public.most_samples)

    def _salt(self) -> bytes:
        return hmac.digest(self._key.body, _encode("salt", self.public.name), "sha256")


def check_counts(counts: ArrayLike, classes: int, most_samples: int) -> list[int]:
    """Return label counts as whole numbers that can be sealed; anything else is refused."""
    try:
        values = np.asarray(counts, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"Label counts must be numbers. Got {error}.") from None
    if values.shape != (classes,):
        raise InputError(f"The key is for {classes} classes, so there must be {classes} counts. Got {values.shape}.")
    bad = ~np.isfinite(values) | (values < 0) | (values != np.floor(values))
    if bad.any():
        where = int(np.flatnonzero(bad)[0])
        raise InputError(f"Label counts must be whole numbers from 0. Got {values[where]:g} for class {where}.")
    # The larger a liar's counts, the more of the others' its products show.
    if values.sum() > most_samples:
        raise InputError(
            f"The key holder allows a client at most {most_samples} samples. The counts sum to {values.sum():.0f}.",
            hint="new keys can allow more: fedcohort privacy keyholder new --most-samples",
        )
    return [int(value) for value in values]


def check_statement(public: PublicKey, client: str, data: bytes) -> int:
    """Return the size a client states, after every check that needs no other key.

    Raises
    ------
    CiphertextError
        When the statement is oversize, truncated, damaged, or of another key, client or number of classes.
    """
    what = f"The statement of client {client!r}"
    if len(data) > STATEMENT_LIMIT:
        raise CiphertextError(f"{what} is too large: {len(data)} bytes; at most {STATEMENT_LIMIT} are allowed.")
    header, _ = unwrap(_STATEMENT, data, what)
    if header.get("key") != public.name:
        theirs = str(header.get("key"))[:40]
        raise CiphertextError(  # the same words for everybody, so that a host says it once where it is all of them
            f"The label counts were sealed for the key {theirs}; the federation's is {public.name}.",
            hint="give clients and server the same public.key of the key holder",
        )
    if header.get("classes") != public.classes:
        raise CiphertextError(f"{what} has {header.get('classes')} classes; the federation has {public.classes}.")
    if header.get("client") != client:
        raise CiphertextError(f"{what} was made by client {str(header.get('client'))[:200]!r}.")
    size = header.get("size")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= public.most_samples:
        raise CiphertextError(f"{what} must be of 0 to {public.most_samples} samples. Got {str(size)[:40]}.")
    return size


def open_statement(secret: SecretKey, client: str, verifier: bytes | None, data: bytes) -> Statement:
    """Return a statement of a client, opened.

    Parameters
    ----------
    verifier : bytes or None
        The public half of the client's key; None for a statement whose signature was checked before.

    Raises
    ------
    CiphertextError
        When it is not the client's, or its counts are not what it states about them.
    """
    size = check_statement(secret.public, client, data)
    header, box = unwrap(_STATEMENT, data, client)
    about = _encode(_STATEMENT, secret.public.name, secret.public.classes, client, size)
    if verifier is not None:
        try:
            signature = bytes.fromhex(header.get("signature", ""))
        except (TypeError, ValueError):
            signature = b""
        if not _crypto().is_signed(verifier, about + hashlib.sha256(box).digest(), signature):
            raise CiphertextError(
                f"The statement of client {client!r} is not signed with the key it is enrolled with.",
                hint="the line of clients.txt must be of the key the client uses; else somebody changed the statement",
            )
    plain = _crypto().unseal(secret.body, about, box)
    what = f"The sealed label counts of client {client!r}"
    if plain is None:
        raise CiphertextError(f"{what} cannot be opened.")
    if len(plain) != _SALT + 8 * secret.public.classes:
        raise CiphertextError(f"{what} are not {secret.public.classes} numbers.")
    counts = [int(value) for value in np.frombuffer(plain[_SALT:], "<u8")]
    # A client may lie about its size, but only to everybody at once.
    if sum(counts) != size:
        raise CiphertextError(f"{what} do not sum to the {size} samples it states.")
    return Statement(client, size, np.array(counts, np.int64), _commitment(about, plain[:_SALT], plain[_SALT:]))


def sign_confirmation(secret: SecretKey, statement: Statement, clients: int, digest: str) -> bytes:
    """Return the key holder's word for what it opened: a client's size and commitment, and the set it is one of."""
    stated = {
        "key": secret.public.name,
        "client": statement.client,
        "size": statement.size,
        "commitment": statement.commitment,
        "clients": clients,
        "set": digest,
    }
    return wrap(_CONFIRMATION, stated, _crypto().sign_as_holder(secret.body, _encode(_CONFIRMATION, *stated.values())))


def set_digest(statements: Iterable[Statement]) -> str:
    """Return the digest of a set of clients: of names, sizes and commitments, in the order of the names."""
    members = sorted((s.client, s.size, s.commitment) for s in statements)
    return hashlib.sha256(_encode("set of clients", members)).hexdigest()


def _normalise(name: str) -> str:
    """Return a name as hosts compare it: what reads the same is the same."""
    return unicodedata.normalize("NFC", name)


def _pack(values: Iterable[int]) -> bytes:
    return np.array(list(values), "<u8").tobytes()


def _commitment(about: bytes, salt: bytes, counts: bytes) -> str:
    return hashlib.sha256(about + salt + counts).hexdigest()
