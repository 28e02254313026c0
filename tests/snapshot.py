"""A whole session as plain values, to tell whether something has changed it and whether two sessions are equal."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from fedcohort.core.arrays import AnyArray
from fedcohort.core.clients import ClientTable, label_rows
from fedcohort.core.protocol import Cohort
from fedcohort.core.selector_spec import describe
from fedcohort.journal import ReplyBlock
from fedcohort.journal.codec import state_fields
from fedcohort.journal.schema import TABLES
from fedcohort.session.session import Session

Plain = dict[str, Any]


def session_state(session: Session) -> Plain:
    """Return everything that decides what a session does next; a reopened session has the same."""
    running = (session._primary, *session._shadows.running.values())
    return {
        "round": (session.round, session._next.attempt, session._next.ticket),
        "pending": [
            (*_cohort(item.cohort), [_replies(block) for block in item.replies]) for item in session._pending.values()
        ],
        "states": {one.name: _state(one.state) for one in running},
        "members": session.active.tolist(),
        "table": _table(session.table),
        "selector": _json(describe(session.selector)),
        "shadows": {name: _json(describe(shadow)) for name, shadow in session.shadows.items()},
        "blind": dict(session._shadows.blind),
        "host": _json(session.host_state),
        "coverage": session.coverage(),
        "rules": _rules(session),
    }


def journal_content(session: Session) -> Plain:
    """Return the whole content of a session's journal, by table."""
    fetch = session.journal.database.fetch
    return {name: fetch(f"SELECT {table.names} FROM {name}") for name, table in TABLES.items()}


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Describe where two snapshots differ.

    >>> differences({"round": 3, "members": [True, True]}, {"round": 4, "members": [True, False]})
    ['round: 3 / 4', 'members[1]: True / False']
    """
    if isinstance(a, dict) and isinstance(b, dict):
        keys = dict.fromkeys([*a, *b])
        return [s for k in keys for s in differences(a.get(k), b.get(k), f"{where}.{k}" if where else str(k))]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [s for i, (x, y) in enumerate(zip(a, b, strict=True)) for s in differences(x, y, f"{where}[{i}]")]
    return [] if a == b or repr(a) == repr(b) else [f"{where}: {a!r:.80} / {b!r:.80}"]


@contextlib.contextmanager
def full_disk(session: Session) -> Iterator[None]:
    """Let nothing more fit into a session's journal, as on a full disk."""
    db = session.journal.database.connection
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count = {pages}")
    try:
        yield
    finally:
        db.execute("PRAGMA max_page_count = 1073741823")


def _bytes(array: AnyArray | None) -> bytes | None:
    return None if array is None else np.ascontiguousarray(array).tobytes()


def _json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=lambda thing: thing.item() if hasattr(thing, "item") else repr(thing)))


def _cohort(cohort: Cohort) -> tuple[Any, ...]:
    arrays = (cohort.clients.tolist(), _bytes(cohort.weights), _bytes(cohort.work))
    return cohort.ticket, cohort.round, *arrays, cohort.names, dict(cohort.notes), cohort.stop


def _replies(block: ReplyBlock) -> tuple[Any, ...]:
    metrics = {name: _bytes(column) for name, column in sorted(block.metrics.items())}
    return block.clients.tolist(), block.status.tolist(), block.kept.tolist(), metrics


def _state(state: Any) -> Plain:
    fields = state_fields(state)
    return {k: (v.dtype.str, v.shape, v.tobytes()) if isinstance(v, np.ndarray) else repr(v) for k, v in fields}


def _table(table: ClientTable) -> Plain:
    sizes = table.sizes.tobytes() if "sizes" in table.signals else None
    labels = table.labels if "label-products" in table.signals else None
    rows = None if labels is None else (type(labels).__name__, label_rows(labels).tobytes())
    return {"names": table.names if table.has_names else table.n, "sizes": sizes, "labels": rows}


def _rules(session: Session) -> Plain | None:
    referee = session._referee
    if referee is None:
        return None
    ledger = referee.ledger
    since = session.round - ledger.window
    counts = (ledger.last, ledger.count, ledger.streak, ledger.failed, ledger.joined)
    return {
        "rules": _json(referee.rules.to_dict()),
        "ledger": [array.tolist() for array in counts],
        "recent": [(at, clients.tolist()) for at, clients in ledger.recent if at > since],
        "attributes": {name: dict(values) for name, values in referee.attributes.items()},
        "unmet": list(referee._unmet),
        "values": {name: list(values) for name, values in referee._values.items()},
    }
