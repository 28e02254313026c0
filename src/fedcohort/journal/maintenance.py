"""Export a journal as tables, and prune its old details."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.core.errors import needs_extra
from fedcohort.core.files import write_file
from fedcohort.core.protocol import Status
from fedcohort.journal.events import EXCLUDED, PRUNED
from fedcohort.journal.store import Journal


def tables(journal: Journal) -> dict[str, dict[str, list[Any]]]:
    """Return a journal as tables of columns: picks, replies, metrics and events."""
    table, _ = journal.table()
    cohorts = journal.cohorts()
    picks = []
    for row in cohorts:
        weights, work = (np.ones(len(row.clients)) if x is None else x for x in (row.weights, row.work))
        for place, client in enumerate(row.clients.tolist()):
            picks.append((row.round, row.ticket, place, table.name(client), float(weights[place]), float(work[place])))
    # A reply's numbers get a column each; vectors have none.
    rounds, replies = {row.ticket: row.round for row in cohorts}, journal.replies()
    names = sorted({name for reply in replies for name in reply.metrics if np.ndim(reply.metrics[name]) == 0})
    reply_rows = [
        (rounds[r.ticket], r.ticket, table.name(r.client), Status(r.status).name, r.kept, r.late, r.at,
         *map(r.metrics.get, names))
        for r in replies
    ]  # fmt: skip
    metrics = [(round_, key, value) for round_, row in journal.metrics().items() for key, value in row.items()]
    events = journal.database.fetch("SELECT at, kind, body FROM events ORDER BY id")
    return {
        "picks": _columns(("round", "ticket", "place", "client", "weight", "work"), picks),
        "replies": _columns(("round", "ticket", "client", "status", "kept", "late", "at", *names), reply_rows),
        "metrics": _columns(("round", "metric", "value"), metrics),
        "events": _columns(("at", "kind", "body"), events),
    }


def _columns(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def export(journal: Journal, folder: str | Path) -> list[Path]:
    """Write a journal's tables as Parquet files into ``folder`` and return them."""
    with needs_extra("Parquet needs pyarrow.", "sim"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, columns in tables(journal).items():
        file = folder / f"{name}.parquet"
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table(columns), sink)
        write_file(file.resolve(), sink.getvalue().to_pybytes())
        written.append(file)
    return written


def prune(journal: Journal, keep: int) -> int:
    """Delete scores, exclusions and candidates of all but the newest ``keep`` rounds; return the number of cohorts.

    Cohorts and replies stay, so resuming and proofs of participation rules still work. Without candidates, an audit
    cannot replay a round.
    """
    last, _ = journal.last()
    old = [row.ticket for row in journal.cohorts() if row.round <= last - keep]
    with journal.event():
        for ticket in old:
            journal.database.delete("scores", "ticket = ?", (ticket,))
            journal.database.delete("events", "kind = ? AND json_extract(body, '$.ticket') = ?", (EXCLUDED, ticket))
        if old:
            journal.drop_candidates(old)
            journal.add_event(PRUNED, {"upto": last - keep})
    journal.compact()
    return len(old)
