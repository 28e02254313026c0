"""The state of a session between two events, and how a journal returns to it.

A host's own files, such as models, cannot be part of the journal's transaction. The host commits the journal first, and
then writes its files together with the session's :class:`Savepoint` in one atomic step. If it dies in between, the
journal is ahead of the files, and ``Session.open(path, at=savepoint)`` rewinds it to where they agree.
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

_LASTING = (JOINED, LEFT, REJOINED, FACTS, CHANGED, SELECTOR, FORGOTTEN)  # events that cannot be undone


@dataclass(frozen=True, eq=False)
class Savepoint:
    """A position in a journal, and what later rows overwrite.

    Attributes
    ----------
    ticket, reply, event : int
        The highest ticket, id of a report and id of an event, each -1 if there is none.
    pending : tuple of int
        Tickets of open cohorts.
    host : JSON-like
        What the host stored with its last ``tell``.
    attributes : dict
        The attributes of clients, by name.
    shadows : dict
        Specifications of the shadow selectors.
    blind : dict
        By shadow, a sentence on what it could not learn from the last round.
    states : dict of selector to dict of field to array or scalar
        The session's own selector is called ''.
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
        """Return everything as bytes, without pickle."""
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
        # The head is packed as an array, so that everything has one format.
        return pack_many({"head": np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays})

    @classmethod
    def from_bytes(cls, data: bytes) -> Savepoint:
        """Return the savepoint that :meth:`to_bytes` packed.

        >>> Savepoint.from_bytes(Savepoint(3, 4, -1, states={"": {"pulls": np.arange(2), "t": 0.5}}).to_bytes()).states
        {'': {'pulls': array([0, 1]), 't': 0.5}}
        """
        arrays = unpack_many(data)
        head = json.loads(arrays["head"].tobytes())
        states: dict[str, dict[str, AnyArray | Scalar]] = {}
        for place, (selector, name, scalar) in enumerate(head["fields"]):
            states.setdefault(selector, {})[name] = arrays[str(place)] if scalar is None else decode_scalar(scalar)
        rest = {key: head[key] for key in ("host", "attributes", "shadows", "blind")}
        ticket, reply, event = head["rows"]
        return cls(ticket, reply, event, tuple(head["pending"]), states=states, **rest)


def rewind(journal: Journal, savepoint: Savepoint) -> None:
    """Return a journal, open for writing, to an earlier savepoint; do nothing if it is already there."""
    here, there = journal.newest(), (savepoint.ticket, savepoint.reply, savepoint.event)
    if here == there:
        return
    # Rewinding can only drop rows. What the savepoint has and the journal lacks is gone.
    if any(ours < theirs for ours, theirs in zip(here, there, strict=True)):
        raise JournalError(
            f"The journal {journal.path} ends with ticket {here[0]}, before ticket {savepoint.ticket} where the "
            "session should continue: it is an older copy, or belongs to another run.",
            hint="restore the journal that was written last",
        )
    meta, database = journal.meta(), journal.database
    # Some events change clients, rules or the selector in place; deleting rows would not undo them. And an audit would
    # take deleted rows for draws that the server did not like.
    lasting = database.fetch(
        f"SELECT kind FROM events WHERE id > ? AND kind IN ({', '.join('?' * len(_LASTING))})",
        (savepoint.event, *_LASTING),
    )
    if lasting or journal.audited:
        why = f"the event {lasting[0][0]!r} came after it" if lasting else "it can be audited"
        raise JournalError(
            f"The journal {journal.path} cannot return to ticket {savepoint.ticket}: {why}.",
            hint="open it without at= and close what is pending",
        )
    with journal.event():
        ticket = (savepoint.ticket,)
        last = "SELECT COALESCE(MAX(round), -1) FROM cohorts WHERE ticket <= ?"
        database.delete("metrics", f"round > ({last})", ticket)
        for table in ("cohorts", "candidates", "closed", "scores"):
            database.delete(table, "ticket > ?", ticket)
        database.delete("replies", "id > ?", (savepoint.reply,))
        database.delete("events", "id > ?", (savepoint.event,))
        # Their replies were dropped above, so the host trains these cohorts again.
        for pending in savepoint.pending:  # they may have been closed since then
            database.delete("closed", "ticket = ?", (pending,))
        for selector in ("", *meta["shadows"]):
            journal.drop_state(selector)
        for selector, state in savepoint.states.items():
            journal.save_fields(selector, state.items())
        journal.set_meta("shadows", dict(savepoint.shadows))
        journal.set_meta("host", savepoint.host)
        if journal.attributes() != savepoint.attributes:
            journal.set_attributes(savepoint.attributes, {})
