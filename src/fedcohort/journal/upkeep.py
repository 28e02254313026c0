"""What an operator does to a journal as a whole: take it out as tables, let old details go, forget a client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.errors import InputError, JournalError, MissingExtraError
from fedcohort.journal.codec import deflated, pack, pack_many, unpack, unpack_many
from fedcohort.journal.database import Database
from fedcohort.journal.reading import EXCLUDED
from fedcohort.journal.replies import ReplyBlock
from fedcohort.journal.store import Journal
from fedcohort.protocol import Status

FORGOTTEN = "forgotten"
RECOVERED = "recovered"  # the event of a journal that goes on without its newest commits
_FACTS = ("sizes", "label_counts", "label_factor", "label_gram")


def tables(journal: Journal) -> dict[str, dict[str, list[Any]]]:
    """Return a journal as tables of columns: picks, replies, metrics and events."""
    table, _ = journal.table()
    picks: dict[str, list[Any]] = {key: [] for key in ("round", "ticket", "place", "client", "weight", "work")}
    rounds = {}
    for row in journal.cohorts():
        rounds[row.ticket] = row.round
        for place, client in enumerate(row.clients.tolist()):
            values = (
                row.round, row.ticket, place, table.name(client),
                1.0 if row.weights is None else float(row.weights[place]),
                1.0 if row.work is None else float(row.work[place]),
            )  # fmt: skip
            for key, value in zip(picks, values, strict=True):
                picks[key].append(value)
    found = journal.replies()
    names = sorted({name for reply in found for name in reply.metrics if np.ndim(reply.metrics[name]) == 0})
    replies: dict[str, list[Any]] = {
        "round": [rounds[r.ticket] for r in found],
        "ticket": [r.ticket for r in found],
        "client": [table.name(r.client) for r in found],
        "status": [Status(r.status).name for r in found],
        "kept": [r.kept for r in found],
        "late": [r.late for r in found],
        "at": [r.at for r in found],
        **{name: [r.metrics.get(name) for r in found] for name in names},
    }
    numbers = [(round_, key, value) for round_, row in journal.metrics().items() for key, value in row.items()]
    metrics = {key: [line[i] for line in numbers] for i, key in enumerate(("round", "metric", "value"))}
    happened = journal.database.fetch("SELECT at, kind, body FROM events ORDER BY id")
    events = {key: [line[i] for line in happened] for i, key in enumerate(("at", "kind", "body"))}
    return {"picks": picks, "replies": replies, "metrics": metrics, "events": events}


def export(journal: Journal, folder: str | Path) -> list[Path]:
    """Write a journal's tables as Parquet files into ``folder`` and return them."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("Parquet needs pyarrow.", hint="pip install 'fedcohort[sim]'") from error
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, columns in tables(journal).items():
        file = folder / f"{name}.parquet"
        pq.write_table(pa.table(columns), file)
        written.append(file)
    return written


def _refuse_audited(journal: Journal, what: str) -> None:
    if journal.meta().get("audit") is not None:
        raise JournalError(
            f"The journal {journal.path} is chained by digests; {what} would break the chain, and nothing in it could "
            "be confirmed any more.",
            hint="export what you need and start a new journal",
        )


def prune(journal: Journal, keep: int) -> int:
    """Let scores, exclusions and candidates of all but the newest ``keep`` rounds go; return of how many cohorts.

    Who was picked and what came of it stays, so resuming and the proof of participation rules do not change. Rounds
    whose candidates are not known cannot be played again to verify them.
    """
    _refuse_audited(journal, "pruning")
    last, _ = journal.last()
    old = [row.ticket for row in journal.cohorts() if row.round <= last - keep]
    with journal.event():
        for ticket in old:
            journal.database.delete("scores", "ticket = ?", (ticket,))
            journal.database.delete("events", "kind = ? AND json_extract(body, '$.ticket') = ?", (EXCLUDED, ticket))
            if journal.database.fetch("SELECT 1 FROM cohorts WHERE ticket = ? AND length(candidates) > 0", (ticket,)):
                journal.database.change("cohorts", (ticket,), candidates=b"")
        if old:
            journal.add_event("pruned", {"upto": last - keep})
    journal.compact()
    return len(old)


def erase(journal: Journal, client: str) -> str:
    """Remove what is known about a client and return the name that stands for it from now on; within an event.

    Its name, facts, attributes, reported numbers, scores and reasons of failure go. That some client took part in these
    rounds stays, under another name, so that participation rules can still be proved. The selector's state is not
    touched here, nor is the file written anew: see :meth:`fedcohort.session.Session.forget`.
    """
    _refuse_audited(journal, "forgetting a client")
    table, active = journal.table()
    if not table.has_names:
        raise InputError("The clients of this journal have no names to forget.")
    index = table.index(client)
    stand_in = f"{FORGOTTEN}-{index}"
    database = journal.database
    facts: dict[str, bytes] = dict(database.fetch("SELECT name, data FROM facts"))
    names = [stand_in if name == client else name for name in table.names]
    changed = {"names": deflated(json.dumps(names).encode())}
    for key in _FACTS:
        if key in facts:
            rows = unpack(facts[key]).copy()
            rows[index] = 0
            if key == "label_gram":
                rows[:, index] = 0
            changed[key] = pack(rows)
    gone = active.copy()
    gone[index] = False
    changed["active"] = pack(np.packbits(gone))
    said = journal.attributes()
    said.pop(client, None)
    if "attributes" in facts:
        changed["attributes"] = deflated(json.dumps(said).encode())
    for name, data in changed.items():
        database.put("facts", name, data)
    _blank_replies(database, index)
    _blank_scores(database, index)
    for number, body in database.fetch("SELECT id, body FROM events"):
        clean = _without(json.loads(body), client, stand_in)
        text = json.dumps(clean)
        if text != body:
            database.change("events", (number,), body=text)
    for ticket, text in database.fetch("SELECT ticket, notes FROM cohorts"):
        notes = {k: v for k, v in json.loads(text).items() if client not in str(v)}
        if len(notes) < len(json.loads(text)):
            database.change("cohorts", (ticket,), notes=json.dumps(notes))
    journal.set_meta("clients", None)  # digests of facts as they were, from which a name could be guessed
    for key, value in journal.meta().items():
        clean = _without(value, client, stand_in)
        if clean != value:
            journal.set_meta(key, clean)
    journal.add_event(FORGOTTEN, {"client": index})
    return stand_in


def _without(value: Any, client: str, stand_in: str) -> Any:
    """Return JSON-like data in which a client's name is another, and what was said under it as a key is gone."""
    if isinstance(value, Mapping):
        return {k: _without(v, client, stand_in) for k, v in value.items() if k != client}
    if isinstance(value, list):
        return [_without(item, client, stand_in) for item in value]
    return stand_in if value == client else value


def _blank_replies(database: Database, index: int) -> None:
    for number, ticket, at, late, data in database.fetch("SELECT id, ticket, at, late, data FROM replies"):
        block = ReplyBlock.decoded(ticket, at, bool(late), data)
        where = np.flatnonzero(block.clients == index)
        if len(where) and block.metrics:
            metrics = {name: column.copy() for name, column in block.metrics.items()}
            for column in metrics.values():
                column[where] = np.nan
            blank = ReplyBlock(ticket, at, bool(late), block.clients, block.status, block.kept, metrics)
            database.change("replies", (number,), data=blank.encoded())


def _blank_scores(database: Database, index: int) -> None:
    rows = database.fetch("SELECT ticket, selector, arrays FROM scores WHERE arrays IS NOT NULL")
    for ticket, selector, data in rows:
        arrays = unpack_many(data)
        keep = arrays["client"] != index
        if not keep.all():
            less = pack_many({name: values[keep] for name, values in arrays.items()})
            database.change("scores", (ticket, selector), arrays=less)
