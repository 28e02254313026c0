"""A chain of digests over a journal. If you keep any link, you can check later that nothing before it was changed.

Everything that an audit uses or a reader sees has a link: rounds, candidates, answers, reports, scores, notes, numbers
and events, all with their times. The first link commits to the seed (with a random nonce), the selector and the signing
key. What a cohort was chosen from is linked before the cohort.

A link is the SHA-256 of the previous link, the kind of record, and a salted digest of the record. The journal stores
the salts next to the digests. When something is pruned or forgotten, its salt is deleted, so that the digest reveals
nothing about it. The digest itself stays, so all later links, and every copy of a link, remain valid.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedcohort.core.arrays import AnyArray
from fedcohort.journal.codec import pack_many
from fedcohort.journal.database import Database
from fedcohort.journal.schema import TABLES

START = b"fedcohort chain 2"  # takes the place of a link before the first
# Keys of meta without a link: the first link covers seed and nonce ("audit"), and the signature signs the newest link.
UNCHAINED = frozenset({"seed", "audit", "signature"})
_CLOSED = "close"


@dataclass(frozen=True)
class Part:
    """What a kind of link covers: some columns of a table's row.

    Attributes
    ----------
    repeatable : bool
        Whether it may be recorded more than once; then the newest link counts.
    """

    table: str
    columns: tuple[str, ...]
    repeatable: bool = False


def _all_but(table: str, *excluded: str) -> tuple[str, ...]:
    return tuple(column for column in TABLES[table].columns if column not in excluded)


PARTS = {
    "candidates": Part("cohorts", ("ticket", "candidates")),
    "cohort": Part("cohorts", _all_but("cohorts", "candidates", "told_at")),
    _CLOSED: Part("cohorts", ("ticket", "told_at")),
    "scores": Part("scores", _all_but("scores")),
    "replies": Part("replies", _all_but("replies")),
    "metrics": Part("metrics", _all_but("metrics"), repeatable=True),
    "event": Part("events", _all_but("events")),
    "meta": Part("meta", _all_but("meta"), repeatable=True),
    "attributes": Part("facts", _all_but("facts"), repeatable=True),
}
# The other kinds, "start", "table" and "answer", cover bytes that are stored in the chain itself.


@dataclass(frozen=True)
class Link:
    """One link.

    Attributes
    ----------
    kind : str
        One of :data:`PARTS`, or "start", "table" or "answer".
    key : tuple
        The key of the row it covers; for an answer, the ticket.
    digest : bytes
        The digest of the salt and the record.
    salt : bytes or None
        None if the record was pruned or forgotten.
    kept : bytes
        The record itself, if no other table stores it.
    link : bytes
        The digest of this link and all before it.
    number : int
        Its id in the table.
    """

    kind: str
    key: tuple[Any, ...]
    digest: bytes
    salt: bytes | None
    kept: bytes
    link: bytes
    number: int

    @property
    def removed(self) -> bool:
        """Whether its record was pruned or forgotten."""
        return self.salt is None

    def fits(self, payload: bytes | None) -> bool:
        """Whether the link covers this record."""
        return self.salt is not None and payload is not None and _digest(self.salt, self.key, payload) == self.digest


def _digest(salt: bytes, key: Iterable[Any], payload: bytes) -> bytes:
    return hashlib.sha256(salt + json.dumps(list(key)).encode() + b"\n" + payload).digest()


def next_link(before: bytes, kind: str, digest: bytes) -> bytes:
    """Return the link that follows ``before``."""
    return hashlib.sha256(before + kind.encode() + b"\0" + digest).digest()


def start_payload(meta: Mapping[str, Any]) -> bytes:
    """Return what the first link covers: the hidden seed, the selector, the signals, the signing key."""
    public = {key: meta.get(key) for key in ("selector", "signals", "signer")}
    return json.dumps([seed_commitment(meta["audit"], int(meta["seed"])), public], sort_keys=True).encode()


def seed_commitment(nonce: str, seed: int) -> str:
    """Return a digest that commits to a seed, and reveals nothing about it without the nonce."""
    return hashlib.sha256(f"{nonce}:{seed}".encode()).hexdigest()


def new_nonce() -> str:
    """Return a nonce for :func:`seed_commitment`."""
    return secrets.token_hex(32)


def payload_of(database: Database, link: Link) -> bytes | None:
    """Return the record that a link should cover; None if it does not exist."""
    if link.kind not in PARTS:
        return link.kept
    return _row(database, link.kind, link.key)


def _row(database: Database, kind: str, key: Iterable[Any]) -> bytes | None:
    part = PARTS[kind]
    where = TABLES[part.table].where_key
    rows = database.fetch(f"SELECT {', '.join(part.columns)} FROM {part.table} WHERE {where}", tuple(key))
    return repr(rows[0]).encode() if rows else None  # repr keeps types and every bit of a float


class Chain:
    """Adds links to a journal's database, in the same transaction as the records they cover."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._tip: bytes | None = None
        self._facts: dict[str, bytes] = {}  # digests of the client table's facts in the newest link

    @classmethod
    def start(cls, database: Database, meta: Mapping[str, Any]) -> Chain:
        """Start a chain in a new journal."""
        chain = cls(database)
        chain._tip = START
        chain._add("start", (), start_payload(meta), keep=True)
        for key in sorted(meta.keys() - UNCHAINED):
            chain.add("meta", key)
        return chain

    @property
    def tip(self) -> bytes:
        """The newest link."""
        if self._tip is None:
            ((tip,),) = self._database.fetch("SELECT link FROM chain ORDER BY id DESC LIMIT 1")
            self._tip = bytes(tip)
        return self._tip

    def forget(self) -> None:
        """Forget the newest link, because its transaction was rolled back."""
        self._tip = None
        self._facts = {}

    def add(self, kind: str, *key: Any) -> None:
        """Add a link for a row that has just been written."""
        payload = _row(self._database, kind, key)
        assert payload is not None, "a row is chained after it was written"
        self._add(kind, key, payload)

    def _add(self, kind: str, key: tuple[Any, ...], payload: bytes, *, keep: bool = False) -> None:
        # Without a salt, a record with few possible values could be found from its digest by trying all of them.
        salt = secrets.token_bytes(16)
        digest = _digest(salt, key, payload)
        self._tip = next_link(self.tip, kind, digest)
        header = {"digest": digest.hex(), "salt": salt.hex(), "key": list(key)}
        number = key[0] if key and isinstance(key[0], int) else 0
        data = json.dumps(header).encode() + b"\n" + (payload if keep else b"")
        self._database.append("chain", kind, number, data, self._tip)

    def add_answer(self, ticket: int, values: Mapping[str, AnyArray]) -> None:
        """Add what a selector was told before it chose; the chain itself stores it."""
        self._add("answer", (ticket,), pack_many(values), keep=True)

    def add_table(self, facts: Mapping[str, bytes]) -> None:
        """Add the client table. The chain stores what is new in it, because the journal has only the latest table."""
        digests = {name: hashlib.sha256(data).digest() for name, data in facts.items()}
        news = {name: data for name, data in facts.items() if self._facts.get(name) != digests[name]}
        header = json.dumps([list(facts), [[name, len(data)] for name, data in news.items()]]).encode()
        self._add("table", (), header + b"\n" + b"".join(news.values()), keep=True)
        self._facts = digests

    def rebase(self, facts: Mapping[str, bytes] | None = None) -> None:
        """Delete the salts of records that were removed or changed, and add links for what replaced them.

        Parameters
        ----------
        facts : mapping, optional
            The client table, if everything that the chain itself stores about clients must go too.
        """
        salted = [link for link in links(self._database) if not link.removed and link.kind != "start"]
        if facts is not None:
            for link in salted:
                if link.kind not in PARTS:
                    self._strip(link)
        for link in self._strip_repeated([link for link in salted if link.kind in PARTS]):
            payload = _row(self._database, link.kind, link.key)
            if not link.fits(payload):
                self._strip(link)
                if payload is not None:
                    self._add(link.kind, link.key, payload)
        for kind, key in list(strays(self._database, links(self._database))):  # rows that got another key
            self.add(kind, *key)
        if facts is not None:
            self._facts = {}
            self.add_table(facts)

    def _strip_repeated(self, salted: Iterable[Link]) -> list[Link]:
        """Return the newest link for each part of a row, and strip the older ones."""
        newest: dict[tuple[str, tuple[Any, ...]], Link] = {}
        for link in salted:
            part = (link.kind, link.key)
            if part in newest:
                self._strip(newest[part])
            newest[part] = link
        return list(newest.values())

    def _strip(self, link: Link) -> None:
        """Delete a link's salt and record; without the salt, the digest reveals nothing about the record."""
        data = json.dumps({"digest": link.digest.hex()}).encode() + b"\n"
        self._database.change("chain", (link.number,), data=data)


def with_news(facts: Mapping[str, bytes], data: bytes) -> dict[str, bytes]:
    """Return the facts of a client table after what :meth:`Chain.add_table` stored."""
    header, _, rest = data.partition(b"\n")
    names, lengths = json.loads(header)
    updated, start = dict(facts), 0
    for name, length in lengths:
        updated[name] = rest[start : start + length]
        start += length
    return {name: updated[name] for name in names}


def links(database: Database) -> Iterator[Link]:
    """Yield the links of a journal in order; none if it has no chain.

    A link that :class:`Chain` cannot have written raises ValueError, KeyError or TypeError.
    """
    for number, kind, data, link in database.fetch("SELECT id, kind, data, link FROM chain ORDER BY id"):
        header, _, kept = data.partition(b"\n")
        body = json.loads(header)
        salt = bytes.fromhex(body["salt"]) if "salt" in body else None
        yield Link(kind, tuple(body.get("key", ())), bytes.fromhex(body["digest"]), salt, kept, link, number)


def strays(database: Database, chained: Iterable[Link]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the kind and key of each record without a link."""
    known = {(link.kind, link.key) for link in chained if not link.removed}
    for kind, part in PARTS.items():
        table = TABLES[part.table]
        where = {_CLOSED: "WHERE told_at IS NOT NULL", "attributes": "WHERE name = 'attributes'"}.get(kind, "")
        for key in database.fetch(f"SELECT {', '.join(table.key)} FROM {part.table} {where}"):
            if (kind, tuple(key)) not in known and not (kind == "meta" and key[0] in UNCHAINED):
                yield kind, tuple(key)
