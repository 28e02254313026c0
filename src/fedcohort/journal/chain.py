"""A chain of digests over a journal. It shows whether anything in the journal is not as it was written.

Each event adds a link: the SHA-256 of the previous link, of the digests of all rows that the event wrote, and of the
digests of those that it replaced or deleted. So at any time the chain says which rows there must be. A row that was
changed, lost or put back has another digest than those; commits that were lost leave fewer links than the lock file
counts (:mod:`fedcohort.journal.lock`).

Nothing in it is secret, so whoever can write the file can also compute a new chain. But it would lack the links that
clients have kept, and without the operator's key it would not be signed.
"""

from __future__ import annotations

import hashlib
import sqlite3
import struct
from collections.abc import Iterator
from typing import NamedTuple

from fedcohort.core.errors import JournalError
from fedcohort.journal.schema import TABLES

TAGS = {name: bytes([number]) for number, name in enumerate(TABLES)}
"""By table, the byte before a digest. It says what was written, also when the row is gone."""
_NAMES = {tag[0]: name for name, tag in TAGS.items()}
# A digest is not shortened: whoever writes a journal could look for two rows with the same short one.
_ENTRY = 33  # bytes of a tag and a digest
_COUNTS = struct.Struct(">qq?q")


class Head(NamedTuple):
    """The newest link of a chain.

    Attributes
    ----------
    first : str
        The first link, in hexadecimal. It identifies the journal, because no two salts are equal.
    number : int
        How many links there are.
    generation : int
        How often the journal was opened for writing.
    in_use : bool
        Whether a session has it open, or was killed.
    link : bytes
    """

    first: str
    number: int
    generation: int
    in_use: bool
    link: bytes

    @property
    def id(self) -> str:
        """The beginning of the first link, which the lock file has room for."""
        return self.first[:32]

    def following(self, added: bytes, removed: bytes, *, in_use: bool, generation: int) -> Head:
        """Return the head after one more link."""
        number = self.number + 1
        # The length of the first list, so that no digest can be moved from one list to the other.
        counts = _COUNTS.pack(number, generation, in_use, len(added))
        link = hashlib.sha256(b"".join([self.link, counts, added, removed])).digest()
        return Head(self.first or link.hex(), number, generation, in_use, link)


START = Head("", 0, 1, True, b"fedcohort chain 3")


class Link(NamedTuple):
    """One link.

    Attributes
    ----------
    head : Head
        The newest link when it was added.
    added, removed : list of bytes
        Digests of rows, each after the tag of its table.
    signature : bytes or None
        The operator's signature of the link.
    """

    head: Head
    added: list[bytes]
    removed: list[bytes]
    signature: bytes | None

    @property
    def empty(self) -> bool:
        """Whether it only says that the journal was opened, closed or copied."""
        return not self.added and not self.removed


def read_head(connection: sqlite3.Connection) -> Head:
    """Return the newest link; :class:`JournalError` if there is none."""
    # Two lookups by key, because a journal may have a million links.
    ends = [
        connection.execute(f"SELECT id, generation, in_use, link FROM chain ORDER BY id {order} LIMIT 1").fetchone()
        for order in ("ASC", "DESC")
    ]
    if ends[0] is None or not all(type(end[3]) is bytes for end in ends):
        raise JournalError("The chain of digests has no beginning.")
    number, generation, in_use, link = ends[1]
    return Head(ends[0][3].hex(), number, generation, bool(in_use), link)


def links(connection: sqlite3.Connection, after: Head = START) -> Iterator[Link]:
    """Yield the links of a journal in order, after a known one; :class:`JournalError` if one does not follow."""
    head = after
    columns = "id, generation, in_use, added, removed, link, signature"
    for number, generation, in_use, added, removed, link, signature in connection.execute(
        f"SELECT {columns} FROM chain WHERE id > ? ORDER BY id", (after.number,)
    ):
        try:
            head = head.following(added, removed, in_use=bool(in_use), generation=generation)
            follows = (number, link) == (head.number, head.link)
        except (struct.error, TypeError):  # SQLite stores values of any type in any column
            follows = False
        if not follows:
            raise JournalError(f"Link {number} of the chain of digests is not as it was written.")
        yield Link(head, _split(added), _split(removed), signature)


def _split(digests: bytes) -> list[bytes]:
    return [digests[i : i + _ENTRY] for i in range(0, len(digests), _ENTRY)]


def table_of(digest: bytes) -> str:
    """Return the table of a row, given its tagged digest."""
    return _NAMES[digest[0]]
