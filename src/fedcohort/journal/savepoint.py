"""The state of a session between two events, and how a journal that went on returns to it.

A host that keeps files of its own (models, say) cannot have them in the journal's transaction. It commits the journal
first and then writes its files together with the session's :class:`Savepoint`, in one atomic step. Should it die in
between, the journal is ahead, and ``Session.open(path, at=savepoint)`` takes it back to what the files belong to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedcohort.core.arrays import AnyArray
from fedcohort.core.errors import JournalError
from fedcohort.journal.codec import Scalar, decode_scalar, encode_scalar, pack_many, unpack_many
from fedcohort.journal.events import CHANGED, FACTS, FORGOTTEN, JOINED, LEFT, REJOINED, SELECTOR
from fedcohort.journal.store import Journal

_LASTING = (JOINED, LEFT, REJOINED, FACTS, CHANGED, SELECTOR, FORGOTTEN)  # events that cannot be taken back


@dataclass(frozen=True, eq=False)
class Savepoint:
    """What a journal holds at a moment, as far as later rows do not tell.

    Attributes
    ----------
    ticket, reply, event : int
        The highest numbers given out, -1 for none.
    pending : tuple of int
        Tickets of open cohorts.
    host : JSON-like
        What the host stored with its last ``tell``.
    attributes : dict
        The attributes of clients, by name.
    shadows : dict
        Specifications of the shadow selectors.
    blind : dict
        What shadows could not learn from the last round, in words.
    states : dict of selector to dict of field to array or scalar
        '' is the session's own.
    """

    ticket: int
    reply: int
    event: int
    pending: tuple[int, ...] = ()
    host: Any = None
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    shadows: Mapping[str, Any] = field(default_factory=dict)
    blind: Mapping[str, str] = field(default_factory=dict)
    states: Mapping[str, Mapping[str, AnyArray | Scalar]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Pack everything, without pickle."""
        arrays: dict[str, AnyArray] = {}
        fields = []
        for selector, state in self.states.items():
            for name, value in state.items():
                if isinstance(value, np.ndarray):
                    fields.append([selector, name, None])
                    arrays[str(len(fields) - 1)] = value
                else:
                    fields.append([selector, name, encode_scalar(value)])
        head = {
            "rows": [self.ticket, self.reply, self.event],
            "pending": self.pending,
            "host": self.host,
            "attributes": dict(self.attributes),
            "shadows": dict(self.shadows),
            "blind": dict(self.blind),
            "fields": fields,
        }
        # The head as an array among the others: one format for all of it.
        return pack_many({"head": np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays})

    @classmethod
    def from_bytes(cls, data: bytes) -> Savepoint:
        """Unpack :meth:`to_bytes`.

        >>> Savepoint.from_bytes(Savepoint(3, 4, -1, states={"": {"pulls": np.arange(2), "t": 0.5}}).to_bytes()).states
        {'': {'pulls': array([0, 1]), 't': 0.5}}
        """
        arrays = unpack_many(data)
        head = json.loads(arrays["head"].tobytes())
        states: dict[str, dict[str, AnyArray | Scalar]] = {}
        for place, (selector, name, scalar) in enumerate(head["fields"]):
            states.setdefault(selector, {})[name] = arrays[str(place)] if scalar is None else decode_scalar(scalar)
        ticket, reply, event = head["rows"]
        rest = {key: head[key] for key in ("host", "attributes", "shadows", "blind")}
        return cls(ticket, reply, event, tuple(head["pending"]), states=states, **rest)

    @property
    def _rows(self) -> tuple[int, int, int]:
        return self.ticket, self.reply, self.event


def rewind(journal: Journal, savepoint: Savepoint) -> None:
    """Take a journal that is open for writing back to a savepoint it has passed; nothing changes if it stands there."""
    stands = journal.newest()
    if stands == savepoint._rows:
        return
    if any(here < there for here, there in zip(stands, savepoint._rows, strict=True)):
        raise JournalError(
            f"The journal {journal.path} ends with ticket {stands[0]}, before ticket {savepoint.ticket} where the "
            "session should continue: it is an older copy, or belongs to another run.",
            hint="restore the journal that was written last",
        )
    meta, database = journal.meta(), journal.database
    # Some events change clients, rules or the selector in place, and deleting rows does not bring those back. A chain
    # is there to show deletions.
    lasting = database.fetch(
        f"SELECT kind FROM events WHERE id > ? AND kind IN ({', '.join('?' * len(_LASTING))})",
        (savepoint.event, *_LASTING),
    )
    if lasting or meta.get("audit") is not None:
        why = f"the event {lasting[0][0]!r} came after it" if lasting else "it is chained by digests"
        raise JournalError(
            f"The journal {journal.path} cannot return to ticket {savepoint.ticket}: {why}.",
            hint="open it without at= and close what is pending",
        )
    with journal.event():
        ticket = (savepoint.ticket,)
        last = "SELECT COALESCE(MAX(round), -1) FROM cohorts WHERE ticket <= ?"
        database.delete("metrics", f"round > ({last})", ticket)
        database.delete("cohorts", "ticket > ?", ticket)
        database.delete("scores", "ticket > ?", ticket)
        database.delete("replies", "id > ?", (savepoint.reply,))
        database.delete("events", "id > ?", (savepoint.event,))
        for pending in savepoint.pending:  # they may have been closed since
            database.change("cohorts", (pending,), told_at=None)
        for selector in ("", *meta["shadows"]):
            journal.drop_state(selector)
        for selector, state in savepoint.states.items():
            journal.save_fields(selector, state.items())
        journal.set_meta("shadows", dict(savepoint.shadows))
        journal.set_meta("host", savepoint.host)
        if journal.attributes() != savepoint.attributes:
            journal.set_attributes(savepoint.attributes, {})
