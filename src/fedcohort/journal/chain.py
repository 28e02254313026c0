"""A chain of digests over a journal: with any one of them you can later check that nothing before it was changed.

Everything that an audit goes by or a reader is shown has its link: rounds, candidates, answers, reports, scores, notes,
numbers, events, all with their times. The first link commits to the seed (behind a random nonce), the selector and who
signs; what a round was chosen from comes before the round.

A link is SHA-256 of the link before, the kind of what was recorded, and a salted digest of it. The salts lie in the
journal, beside the digests. What is pruned or forgotten loses its salt, and with that its digest says nothing about it
any more; but the digest stays, and so does every later link, and what others have kept of the chain still fits.
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

VERSION = 2  # 1 left out scores, notes, numbers and times
START = b"fedcohort chain 2"  # what the first link follows: a chain of another version never fits
# Keys of meta: the first two are in the first link, behind a nonce, and the third is over the newest link.
UNCHAINED = frozenset({"seed", "audit", "signature"})
_CLOSED = "close"


@dataclass(frozen=True)
class Part:
    """What a kind of link is over: some columns of a table's row.

    Attributes
    ----------
    again : bool
        Whether it may be recorded again; then the newest link counts.
    """

    table: str
    columns: tuple[str, ...]
    again: bool = False


def _all_but(table: str, *less: str) -> tuple[str, ...]:
    return tuple(column for column in TABLES[table].columns if column not in less)


PARTS = {
    "candidates": Part("cohorts", ("ticket", "candidates")),
    "cohort": Part("cohorts", _all_but("cohorts", "candidates", "told_at")),
    _CLOSED: Part("cohorts", ("ticket", "told_at")),
    "scores": Part("scores", _all_but("scores")),
    "replies": Part("replies", _all_but("replies")),
    "metrics": Part("metrics", _all_but("metrics"), again=True),
    "event": Part("events", _all_but("events")),
    "meta": Part("meta", _all_but("meta"), again=True),
    "attributes": Part("facts", _all_but("facts"), again=True),
}
# The other kinds, "start", "table" and "answer", are over bytes that the chain itself keeps.


@dataclass(frozen=True)
class Link:
    """One link.

    Attributes
    ----------
    kind : str
        One of :data:`PARTS`, or "start", "table" or "answer".
    key : tuple
        Of the row it is over; of an answer the ticket.
    digest : bytes
        Of what was recorded, behind the salt.
    salt : bytes or None
        None for what was pruned or forgotten.
    kept : bytes
        What no other table keeps.
    link : bytes
        The digest of this link and all before it.
    number : int
        Its place in the table.
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
        """Whether what it is over was pruned or forgotten."""
        return self.salt is None

    def fits(self, payload: bytes | None) -> bool:
        """Whether this is what was recorded."""
        return self.salt is not None and payload is not None and _digest(self.salt, self.key, payload) == self.digest


def _digest(salt: bytes, key: Iterable[Any], payload: bytes) -> bytes:
    return hashlib.sha256(salt + json.dumps(list(key)).encode() + b"\n" + payload).digest()


def next_link(before: bytes, kind: str, digest: bytes) -> bytes:
    """Return the next link."""
    return hashlib.sha256(before + kind.encode() + b"\0" + digest).digest()


def start_payload(meta: Mapping[str, Any]) -> bytes:
    """Return what the first link is over: the hidden seed, the selector, the signals, who signs."""
    known = {key: meta.get(key) for key in ("selector", "signals", "signer")}
    return json.dumps([seed_commitment(meta["audit"], int(meta["seed"])), known], sort_keys=True).encode()


def seed_commitment(nonce: str, seed: int) -> str:
    """Return what a seed is committed to by; without the nonce it tells nothing about the seed."""
    return hashlib.sha256(f"{nonce}:{seed}".encode()).hexdigest()


def new_nonce() -> str:
    """Return a nonce for :func:`seed_commitment`."""
    return secrets.token_hex(32)


def payload_of(database: Database, link: Link) -> bytes | None:
    """Return the bytes on record that a link should be over; None where there are none."""
    if link.kind not in PARTS:
        return link.kept
    return _row(database, link.kind, link.key)


def _row(database: Database, kind: str, key: Iterable[Any]) -> bytes | None:
    part = PARTS[kind]
    where = TABLES[part.table].where_key
    rows = database.fetch(f"SELECT {', '.join(part.columns)} FROM {part.table} WHERE {where}", tuple(key))
    return repr(rows[0]).encode() if rows else None  # types and every bit of a float are part of it


class Chain:
    """Adds links to a journal's database, in the transaction of what they are about."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._tip: bytes | None = None
        self._facts: dict[str, bytes] = {}  # digests of the table's facts as last chained

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
        """Read the newest link again: the transaction was rolled back."""
        self._tip = None
        self._facts = {}

    def add(self, kind: str, *key: Any) -> None:
        """Add a link over a part of a row that has just been written."""
        payload = _row(self._database, kind, key)
        assert payload is not None, "a row is chained after it was written"
        self._add(kind, key, payload)

    def _add(self, kind: str, key: tuple[Any, ...], payload: bytes, *, keep: bool = False) -> None:
        # Without a salt, a digest of few possible values (who was picked) could be found by trying all of them.
        salt = secrets.token_bytes(16)
        digest = _digest(salt, key, payload)
        self._tip = next_link(self.tip, kind, digest)
        header = {"digest": digest.hex(), "salt": salt.hex(), "key": list(key)}
        number = key[0] if key and isinstance(key[0], int) else 0
        data = json.dumps(header).encode() + b"\n" + (payload if keep else b"")
        self._database.append("chain", kind, number, data, self._tip)

    def add_answer(self, ticket: int, values: Mapping[str, AnyArray]) -> None:
        """Add what a selector saw before it chose; the chain itself keeps it."""
        self._add("answer", (ticket,), pack_many(values), keep=True)

    def add_table(self, facts: Mapping[str, bytes]) -> None:
        """Add the client table; the chain keeps what is new in it, because the journal only keeps the last one."""
        digests = {name: hashlib.sha256(data).digest() for name, data in facts.items()}
        news = {name: data for name, data in facts.items() if self._facts.get(name) != digests[name]}
        self._add("table", (), _packed_facts(list(facts), news), keep=True)
        self._facts = digests

    def rebase(self, facts: Mapping[str, bytes] | None = None) -> None:
        """Let go of what is no longer on record as it was, and add links over what took its place.

        Parameters
        ----------
        facts : mapping, optional
            The client table, where what the chain itself keeps of clients is to go as well.
        """
        held = [link for link in links(self._database) if not link.removed and link.kind != "start"]
        if facts is not None:
            for link in held:
                if link.kind not in PARTS:
                    self._strip(link)
        for link in self._without_repeated([link for link in held if link.kind in PARTS]):
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

    def _without_repeated(self, held: Iterable[Link]) -> list[Link]:
        """Return the newest link over each part of a row; those over what was recorded again later are stripped."""
        newest: dict[tuple[str, tuple[Any, ...]], Link] = {}
        for link in held:
            place = (link.kind, link.key)
            if place in newest:
                self._strip(newest[place])
            newest[place] = link
        return list(newest.values())

    def _strip(self, link: Link) -> None:
        """Let what a link is over be forgotten: without its salt the digest says nothing about it."""
        data = json.dumps({"digest": link.digest.hex()}).encode() + b"\n"
        self._database.change("chain", (link.number,), data=data)


def _packed_facts(names: list[str], news: Mapping[str, bytes]) -> bytes:
    """Return which facts there are, and those that are new, as one block of bytes."""
    header = json.dumps([names, [[name, len(data)] for name, data in news.items()]]).encode()
    return header + b"\n" + b"".join(news.values())


def with_news(facts: Mapping[str, bytes], data: bytes) -> dict[str, bytes]:
    """Return the facts of a client table after a link of the kind "table"."""
    header, _, rest = data.partition(b"\n")
    names, lengths = json.loads(header)
    found, at = dict(facts), 0
    for name, length in lengths:
        found[name] = rest[at : at + length]
        at += length
    return {name: found[name] for name in names}


def links(database: Database) -> Iterator[Link]:
    """Yield the links of a journal in order; none when it has no chain.

    ValueError, KeyError or TypeError for one that is not what :class:`Chain` writes.
    """
    # A journal of version 2 may have no such table.
    if not database.fetch("SELECT 1 FROM sqlite_master WHERE name = 'chain'"):
        return
    for number, kind, data, link in database.fetch("SELECT id, kind, data, link FROM chain ORDER BY id"):
        header, _, kept = data.partition(b"\n")
        body = json.loads(header)
        salt = bytes.fromhex(body["salt"]) if "salt" in body else None
        yield Link(kind, tuple(body.get("key", ())), bytes.fromhex(body["digest"]), salt, kept, link, number)


def strays(database: Database, chained: Iterable[Link]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the kind and key of what is on record and has no link."""
    known = {(link.kind, link.key) for link in chained if not link.removed}
    for kind, part in PARTS.items():
        table = TABLES[part.table]
        where = {_CLOSED: "WHERE told_at IS NOT NULL", "attributes": "WHERE name = 'attributes'"}.get(kind, "")
        for key in database.fetch(f"SELECT {', '.join(table.key)} FROM {part.table} {where}"):
            if (kind, tuple(key)) not in known and not (kind == "meta" and key[0] in UNCHAINED):
                yield kind, tuple(key)
