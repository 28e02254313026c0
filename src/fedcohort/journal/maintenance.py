"""What an operator does to a journal as a whole: export it, prune old details, forget a client."""

from __future__ import annotations

import hmac
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import FedcohortError, InputError, needs_extra
from fedcohort.core.files import open_file, write_file
from fedcohort.core.protocol import Status
from fedcohort.core.signals import SIGNALS
from fedcohort.journal.codec import compress, pack, unpack
from fedcohort.journal.database import Database
from fedcohort.journal.events import EXCLUDED, FORGOTTEN, PRUNED
from fedcohort.journal.fields import (
    ATTRIBUTES,
    COLUMNS,
    EVENTS,
    FREE,
    META,
    ByClient,
    ByLabel,
    ByWord,
    Field,
    Notes,
    TextKind,
)  # fmt: skip
from fedcohort.journal.lock import COMPANIONS
from fedcohort.journal.replies import ReplyBlock
from fedcohort.journal.schema import ERRORS, TABLES
from fedcohort.journal.scores import pack_scores, unpack_scores
from fedcohort.journal.store import Journal, read_journal

BLOCKED = "blocked"  # under which the journal knows forgotten clients that must not return, by keyed digests
_MOST_FILES = 10_000  # that are searched for copies of a name
_METRICS = frozenset((*SIGNALS, "accuracy"))  # parts of a metric's name that are no client's
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_OVERLAP = 4096  # bytes of one block that are searched again with the next; a name is shorter
_FACTS = ("sizes", "label_counts", "label_factor", "label_gram")


def tables(journal: Journal) -> dict[str, dict[str, list[Any]]]:
    """Return a journal as tables of columns: picks, replies, metrics and events."""
    numbers = [(round_, key, value) for round_, row in journal.metrics().items() for key, value in row.items()]
    metrics = {key: [line[i] for line in numbers] for i, key in enumerate(("round", "metric", "value"))}
    lines = journal.database.fetch("SELECT at, kind, body FROM events ORDER BY id")
    events = {key: [line[i] for line in lines] for i, key in enumerate(("at", "kind", "body"))}
    return {"picks": _picks(journal), "replies": _replies(journal), "metrics": metrics, "events": events}


def _picks(journal: Journal) -> dict[str, list[Any]]:
    """Return a row for each place of each cohort."""
    table, _ = journal.table()
    picks: dict[str, list[Any]] = {key: [] for key in ("round", "ticket", "place", "client", "weight", "work")}
    for row in journal.cohorts():
        for place, client in enumerate(row.clients.tolist()):
            values = (
                row.round, row.ticket, place, table.name(client),
                1.0 if row.weights is None else float(row.weights[place]),
                1.0 if row.work is None else float(row.work[place]),
            )  # fmt: skip
            for key, value in zip(picks, values, strict=True):
                picks[key].append(value)
    return picks


def _replies(journal: Journal) -> dict[str, list[Any]]:
    """Return a row for each reply, with a column for each metric that is one number."""
    table, _ = journal.table()
    rounds = {row.ticket: row.round for row in journal.cohorts()}
    found = journal.replies()
    names = sorted({name for reply in found for name in reply.metrics if np.ndim(reply.metrics[name]) == 0})
    return {
        "round": [rounds[r.ticket] for r in found],
        "ticket": [r.ticket for r in found],
        "client": [table.name(r.client) for r in found],
        "status": [Status(r.status).name for r in found],
        "kept": [r.kept for r in found],
        "late": [r.late for r in found],
        "at": [r.at for r in found],
        **{name: [r.metrics.get(name) for r in found] for name in names},
    }


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
    """Let scores, exclusions and candidates of all but the newest ``keep`` rounds go; return of how many cohorts.

    Who was picked and what came of it stays, so resuming and the proof of participation rules do not change. Rounds
    whose candidates are not known cannot be played again to verify them; of a chained journal the chain still holds.
    """
    last, _ = journal.last()
    old = [row.ticket for row in journal.cohorts() if row.round <= last - keep]
    with journal.event():
        for ticket in old:
            journal.database.delete("scores", "ticket = ?", (ticket,))
            journal.database.delete("events", "kind = ? AND json_extract(body, '$.ticket') = ?", (EXCLUDED, ticket))
        if old:
            journal.drop_candidates(old)
            journal.rebase(clients=False)
            journal.add_event(PRUNED, {"upto": last - keep})
    journal.compact()
    return len(old)


def erase(journal: Journal, eraser: Eraser, *, block: bool = False) -> None:
    """Remove what is known about a client; within an event.

    Its name goes from every text, and its facts, attributes, reported numbers, scores and reasons of failure go. That
    some client took part in these rounds stays, under another name, so that participation rules can still be proved.
    The selector's state is not touched here, nor is the file written anew: see
    :meth:`fedcohort.session.Session.forget`.
    """
    table, active = journal.table()
    client, index = eraser.client, eraser.index
    database = journal.database
    facts = journal.facts()
    names = [eraser.stand_in if name == client else name for name in table.names]
    changed = {"names": compress(json.dumps(names).encode())}
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
    if "attributes" in facts:
        changed["attributes"] = compress(json.dumps(eraser.value(journal.attributes(), ATTRIBUTES)).encode())
    for name, data in changed.items():
        database.put("facts", name, data)
    _blank_replies(database, index)
    _blank_scores(database, index, journal.client_count())
    for name in eraser.tables:
        eraser.table(database, name)
    journal.set_meta("clients", None)  # digests of facts as they were, from which a name could be guessed
    if block:
        known = journal.meta().get(BLOCKED) or {"key": secrets.token_hex(32), "digests": {}}
        digests = {**known["digests"], name_digest(client, known["key"]): eraser.stand_in}
        journal.set_meta(BLOCKED, {**known, "digests": digests})
    journal.rebase(clients=True)
    journal.add_event(FORGOTTEN, {"client": index})


def name_digest(name: str, key: str) -> str:
    """Return by what a forgotten name is recognised; without the journal's key it says nothing about the name."""
    return hmac.new(bytes.fromhex(key), name.encode("utf-8", "surrogatepass"), "sha256").hexdigest()


class Eraser:
    """Puts another name in the place of a client's in every text of a journal, by what each field holds.

    Parameters
    ----------
    table : ClientTable
        Everybody; a name that contains the client's stays what it is.

    Attributes
    ----------
    index : int
    stand_in : str
        The name that stands for the client from now on.
    """

    tables = ("meta", "cohorts", "scores", "states", "deltas", "metrics", "events")

    def __init__(self, client: str, table: ClientTable) -> None:
        if not table.has_names:
            raise InputError("The clients of this journal have no names to forget.")
        self.client, self.index = client, table.index(client)
        self.stand_in = f"{FORGOTTEN}-{self.index}"
        longer = sorted((n for n in table.names if client.lower() in n.lower() and n != client), key=len, reverse=True)
        self._others = set(longer)
        # A longer word that happens to contain the name stays whole.
        found = "|".join(map(re.escape, [*longer, client]))
        self._pattern = re.compile(rf"(?<!\w)(?:{found})(?!\w)", re.IGNORECASE)

    def text(self, text: str) -> str:
        """Return a sentence without the name, however it is written there."""
        return self._pattern.sub(lambda m: m[0] if m[0] in self._others else self.stand_in, text)

    def value(self, value: Any, holds: Field) -> Any:
        """Return JSON-like data without the name; what was kept under it as a key is gone."""
        if isinstance(value, str):
            return self._string(value, holds)
        if isinstance(value, list):
            return [self.value(item, holds) for item in value]
        if not isinstance(value, Mapping) or holds is TextKind.OWN:
            return value
        kept = {}
        for key, item in value.items():
            if isinstance(holds, Mapping) and key in holds:
                kept[key] = self.value(item, holds[key])
            elif isinstance(holds, ByWord | Notes):
                kept[key] = self.value(item, holds.values if isinstance(holds, ByWord) else holds)
            elif isinstance(holds, ByLabel):
                kept[self.text(key)] = self.value(item, holds.values)
            elif key != self.client:
                inner = holds.values if isinstance(holds, ByClient) else FREE
                kept[key if isinstance(holds, ByClient) else self.text(key)] = self.value(item, inner)
        return kept

    def _string(self, text: str, holds: Field) -> str:
        match holds:
            case TextKind.OWN:
                return text
            case TextKind.NAME:
                return self.stand_in if text == self.client else text
            case TextKind.CONDITION:
                return _QUOTED.sub(lambda m: self.text(m[0]), text)
            case TextKind.METRIC:
                parts = text.split("/")
                if len(parts) == 1 and text == self.client:
                    return text  # the host's own metric: those of a client have its name before or after a slash
                return "/".join(part if part in _METRICS else self.text(part) for part in parts)
            case _:
                return self.text(text)

    def table(self, database: Database, name: str) -> None:
        """Go through all texts of a table; numbers that are kept under the client's name go."""
        table = TABLES[name]
        for row in database.fetch(f"SELECT {table.names} FROM {name}"):
            before = dict(zip(table.columns, row, strict=True))
            changes = {}
            for column, old in before.items():
                if not isinstance(old, str):
                    continue
                holds, is_json = _holds(name, column, before)
                value = json.loads(old) if is_json else old
                clean = self.value(value, holds)
                if clean != value:
                    changes[column] = json.dumps(clean) if is_json else clean
            if not changes:
                continue
            key = [before[column] for column in table.key]
            if not changes.keys() & set(table.key):
                database.change(name, key, **changes)
                continue
            database.delete(name, table.where_key, key)
            if name != "metrics":
                database.put(name, *{**before, **changes}.values())


def _holds(table: str, column: str, row: Mapping[str, Any]) -> tuple[Field, bool]:
    """Return what a text of a row holds, and whether it is JSON."""
    if (table, column) == ("meta", "value"):
        return META.get(row["key"], FREE), True
    if (table, column) == ("events", "body"):
        return EVENTS.get(row["kind"], FREE), True
    if (table, column) == ("events", "kind"):
        return TextKind.OWN if row["kind"] in EVENTS else TextKind.SENTENCE, False
    return COLUMNS[table, column], (table, column) == ("cohorts", "notes")


def copies(path: Path, client: str) -> list[Path]:
    """Return files around a journal that still hold a client's name, as far as it stands in them uncompressed.

    Looked at is the journal's folder, and all of an experiment's where the journal belongs to one: other journals,
    checkpoints, logs, reports, exports.
    """
    journal = path.resolve()
    folder = journal.parent.parent if journal.parent.name == "journal" else journal.parent
    with closing(read_journal(journal)) as record:
        names = record.table()[0].names
    others = [name for name in names if client.lower() in name.lower() and name != client]
    pattern = _names_pattern([*sorted(others, key=len, reverse=True), client])
    kept = {form for name in others for form in _spellings(name)}
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and not file.is_symlink())
    found = []
    for file in islice(files, _MOST_FILES):
        if file.parent == journal.parent and file.name in (journal.name, *(journal.name + end for end in COMPANIONS)):
            continue
        try:
            if _names_it(file, client) or _mentions(file, pattern, kept):
                found.append(file)
        except OSError:  # one that may not be read is not ours
            continue
    return found


def _spellings(name: str) -> list[bytes]:
    """Return how a name may stand in a file: as text, and as JSON writes it."""
    return [name.encode("utf-8", "surrogatepass"), json.dumps(name)[1:-1].encode()]


def _names_it(file: Path, client: str) -> bool:
    """Whether a file is a journal that knows the client; there names are compressed."""
    with open_file(file) as stream:
        if stream.read(16) != b"SQLite format 3\0":
            return False
    try:
        with closing(read_journal(file)) as journal:
            table, _ = journal.table()
            return table.has_names and client in table.names
    except (FedcohortError, *ERRORS, ValueError, LookupError, TypeError):
        return False


def _names_pattern(names: Sequence[str]) -> re.Pattern[bytes]:
    """Return what finds names in a file, in capitals or not."""
    forms = [form for name in names for written in (name, name.lower(), name.upper()) for form in _spellings(written)]
    return re.compile(rb"(?<!\w)(?:" + b"|".join(map(re.escape, dict.fromkeys(forms))) + rb")(?!\w)", re.IGNORECASE)


def _mentions(file: Path, pattern: re.Pattern[bytes], others: set[bytes]) -> bool:
    """Whether a file holds what the pattern finds, and not only where it is one of the others."""
    rest = b""
    with open_file(file) as stream:
        while block := stream.read(1 << 20):
            rest = rest[-_OVERLAP:] + block
            if any(match[0] not in others for match in pattern.finditer(rest)):
                return True
    return False


def _blank_replies(database: Database, index: int) -> None:
    for number, ticket, at, late, data in database.fetch("SELECT id, ticket, at, late, data FROM replies"):
        block = ReplyBlock.decode(ticket, at, bool(late), data)
        where = np.flatnonzero(block.clients == index)
        if len(where) and block.metrics:
            metrics = {name: column.copy() for name, column in block.metrics.items()}
            for column in metrics.values():
                column[where] = np.nan
            blank = ReplyBlock(ticket, at, bool(late), block.clients, block.status, block.kept, metrics)
            database.change("replies", (number,), data=blank.encode())


def _blank_scores(database: Database, index: int, clients: int) -> None:
    rows = database.fetch("SELECT ticket, selector, arrays FROM scores WHERE arrays IS NOT NULL")
    for ticket, selector, data in rows:
        arrays = unpack_scores(data, clients)
        keep = arrays["client"] != index
        if not keep.all():
            less = pack_scores({name: values[keep] for name, values in arrays.items()})
            database.change("scores", (ticket, selector), arrays=less)
