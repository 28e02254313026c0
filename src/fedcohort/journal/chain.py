"""A chain of digests over a journal: whoever keeps one of them can tell later whether anything before it was changed.

Each link is SHA-256 of the link before, what kind of thing was recorded, and its bytes as they are stored. The first
one commits to the seed (behind a random nonce), the selector and the clients, before anything is chosen; the link of a
round's inputs comes before the link of its cohort.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedcohort.arrays import AnyArray
from fedcohort.journal.codec import pack_many
from fedcohort.journal.database import Database

_START = b"fedcohort chain 1"


@dataclass(frozen=True)
class Link:
    """One link.

    Parameters
    ----------
    kind : str
        "start", "table", "answer", "cohort", "replies", "close", or the kind of an event.
    ref : int
        The ticket, or the row of the journal's replies.
    data : bytes or None
        What no other table keeps.
    link : bytes
        The digest.
    """

    kind: str
    ref: int
    data: bytes | None
    link: bytes


def joined(before: bytes, kind: str, payload: bytes) -> bytes:
    """Return the next link."""
    return hashlib.sha256(before + kind.encode() + b"\0" + payload).digest()


def start_payload(meta: Mapping[str, Any]) -> bytes:
    """Return what the first link is over: the hidden seed, the selector, the signals."""
    known = {key: meta[key] for key in ("selector", "signals")}
    return json.dumps([seed_commitment(meta["audit"], int(meta["seed"])), known], sort_keys=True).encode()


def seed_commitment(nonce: str, seed: int) -> str:
    """Return what a seed is committed to by; without the nonce it tells nothing about the seed."""
    return hashlib.sha256(f"{nonce}:{seed}".encode()).hexdigest()


def new_nonce() -> str:
    """Return a nonce for :func:`seed_commitment`."""
    return secrets.token_hex(32)


def cohort_payload(row: tuple[Any, ...]) -> bytes:
    """Return the bytes of a recorded cohort: ticket, round, size asked for, candidates, clients, weights, work."""
    return repr([bytes(x) if isinstance(x, (bytes, memoryview)) else x for x in row]).encode()


def replies_payload(ticket: int, late: bool, data: bytes) -> bytes:
    """Return the bytes of one report's replies."""
    return f"{ticket} {int(late)} ".encode() + data


class Chain:
    """Adds links to a journal's database, in the transaction of what they are about."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._tip: bytes | None = None
        self._facts: dict[str, bytes] = {}  # digests of the table's facts as last chained

    @classmethod
    def started(cls, database: Database, meta: Mapping[str, Any]) -> Chain:
        """Start a chain in a new journal."""
        chain = cls(database)
        chain._tip = _START
        chain.add("start", 0, start_payload(meta))
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

    def add(self, kind: str, ref: int, payload: bytes, data: bytes | None = None) -> None:
        """Add a link over ``payload``."""
        link = joined(self.tip, kind, payload)
        self._database.append("chain", kind, ref, data, link)
        self._tip = link

    def add_answer(self, ticket: int, values: Mapping[str, AnyArray]) -> None:
        """Add what a selector was told before it chose; the chain itself keeps it."""
        data = pack_many(values)
        self.add("answer", ticket, data, data)

    def add_table(self, facts: Mapping[str, bytes]) -> None:
        """Add the client table; the chain keeps what is new in it, because the journal only keeps the last one."""
        digests = {name: hashlib.sha256(data).digest() for name, data in facts.items()}
        news = {name: data for name, data in facts.items() if self._facts.get(name) != digests[name]}
        data = packed_facts(news)
        self.add("table", 0, data, data)
        self._facts = digests


def packed_facts(facts: Mapping[str, bytes]) -> bytes:
    """Return facts as one block of bytes."""
    return json.dumps([[name, len(data)] for name, data in facts.items()]).encode() + b"\n" + b"".join(facts.values())


def unpacked_facts(data: bytes) -> dict[str, bytes]:
    """Return what :func:`packed_facts` joined."""
    header, _, rest = data.partition(b"\n")
    found, at = {}, 0
    for name, length in json.loads(header):
        found[name] = rest[at : at + length]
        at += length
    return found


def links(database: Database) -> Iterator[Link]:
    """Yield the links of a journal in order; none when it has no chain."""
    if database.fetch("SELECT 1 FROM sqlite_master WHERE name = 'chain'"):  # one of version 2 may have no such table
        for kind, ref, data, link in database.fetch("SELECT kind, ref, data, link FROM chain ORDER BY id"):
            yield Link(kind, ref, data, link)
