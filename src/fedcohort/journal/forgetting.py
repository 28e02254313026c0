"""Forgetting a client: where a journal may name it, and how its name and its numbers are erased.

A client chooses its own name, which may be a word that the journal uses: "ticket", "loss", the name of a selector.
Since each field declares what it holds, such a word is removed only where it names the client.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import closing
from enum import Enum, auto
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import FedcohortError, InputError
from fedcohort.core.files import open_file
from fedcohort.core.signals import SIGNALS
from fedcohort.journal import events
from fedcohort.journal.codec import compress, pack, unpack
from fedcohort.journal.database import Database
from fedcohort.journal.lock import COMPANIONS
from fedcohort.journal.replies import ReplyBlock
from fedcohort.journal.schema import ERRORS, TABLES
from fedcohort.journal.scores import pack_scores, unpack_scores
from fedcohort.journal.store import Journal, read_journal
from fedcohort.journal.tables import table_facts

_BLOCKED = "blocked"  # the key in meta for keyed digests of forgotten clients that must not return
_MAX_FILES = 10_000  # to search for copies of a name
_METRICS = frozenset({*map(str, SIGNALS), "accuracy"})  # parts of a metric's name that never name a client
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")  # in a condition, only quoted constants can name a client
_OVERLAP = 4096  # bytes of a block that are searched again with the next block; names are shorter


class TextKind(Enum):
    """What a text, or each text of a list, holds."""

    OWN = auto()  # a word or number of the journal, which never names a client
    NAME = auto()  # the name of a client
    SENTENCE = auto()  # any text, which may name a client
    CONDITION = auto()  # an expression of rules; a text in quotation marks may name a client
    METRIC = auto()  # the name of a metric, perhaps with a client's name after a slash
    NOTES = auto()  # nested values of a program: keys are words of the program, and any text may name a client
    FREE = auto()  # nested values of other programs: any key and any text may name a client


class _Keyed(NamedTuple):
    """A mapping with any keys of one kind: names of clients, an operator's labels, or words of a program."""

    keys: TextKind
    values: _Field


_Field = TextKind | _Keyed | Mapping[str, "_Field"]
"""A mapping says what its values hold, by key. A key that it does not list is free."""

_OWN, _NAME, _SENTENCE = TextKind.OWN, TextKind.NAME, TextKind.SENTENCE


def _own(*keys: str) -> dict[str, _Field]:
    return dict.fromkeys(keys, _OWN)


_RULES: dict[str, _Field] = {
    **_own("failures", "cool_off", "min_separation", "max_participations", "window", "max_in_window", "min_in_window"),
    **_own("budget", "cost"),
    "quotas": _Keyed(_OWN, _Keyed(_SENTENCE, _OWN)),
    "at_most": _Keyed(_OWN, _OWN),
    "eligible": TextKind.CONDITION,
    "blocked": _NAME,
    "pinned": _NAME,
    "paused": _Keyed(_NAME, _OWN),
    "budgets": _Keyed(_NAME, _OWN),
}

_ATTRIBUTES: _Field = _Keyed(_NAME, TextKind.NOTES)
"""What clients report about themselves."""

META: dict[str, _Field] = {
    **_own("seed", "selector", "signals", "audit", "signer", "signature", "fedcohort", "created"),
    **_own("asynchronous"),
    **_own("clients", "blocked"),  # digests
    "rules": _RULES,
    "shadows": _Keyed(_SENTENCE, _OWN),
    "blind": _Keyed(_SENTENCE, _SENTENCE),
    "host": _own("checkpoint", "buffer", "since"),
}
"""By the key in ``meta``."""

EVENTS: dict[str, _Field] = {
    events.ABANDONED: {**_own("ticket", "round", "asked", "next"), "reason": _SENTENCE},
    events.ATTRIBUTES: {"clients": _ATTRIBUTES},
    events.CHANGED: {**_own("ticket", "round", "order"), "rules": _RULES},
    events.CORRECTED: {**_own("round"), "corrections": _Keyed(_NAME, _SENTENCE)},
    events.ENDED: {**_own("state", "rounds", "ticket"), "reason": _SENTENCE},
    events.EXCLUDED: {**_own("ticket", "codes"), "reasons": _SENTENCE},
    events.FACTS: _OWN,
    events.FAILURES: {**_own("ticket", "round"), "failures": _Keyed(_NAME, _SENTENCE)},
    events.FILTER: TextKind.NOTES,
    events.FORGOTTEN: _OWN,
    events.JOINED: _OWN,
    events.LATE_COUNTED: {**_own("round", "ticket"), "clients": _Keyed(_NAME, _OWN)},
    events.LEFT: _OWN,
    events.PLANNED: _OWN,
    events.PROPOSED: _OWN,
    events.PRUNED: _OWN,
    events.RECOVERED: _OWN,
    events.REFUSED: {**_own("order", "round"), "reason": _SENTENCE},
    events.REGISTERED: {**_own("ticket"), "names": _NAME},
    events.REJOINED: _OWN,
    events.SELECTOR: _OWN,
    events.SETTINGS: {
        **_own("cohort-size", "spares", "min-replies", "max-share", "max-update-norm", "strategy", "filter", "signals"),
        "rules": _RULES,
    },
    events.SHADOW: {
        **_own("what", "round", "until", "watch", "selector", "order"),
        **dict.fromkeys(("name", "reason"), _SENTENCE),
    },
    events.TIMES: _OWN,
    events.TRIED: _OWN,
    events.NEW_MODEL: _OWN,
    events.WAITED: {**_own("ticket", "round", "count", "online", "at_work"), "clients": _NAME},
}
"""By kind of event. Events of hosts outside this package are free."""

_COLUMNS: dict[tuple[str, str], _Field] = {
    ("cohorts", "notes"): TextKind.NOTES,
    ("cohorts", "stop"): _SENTENCE,
    ("scores", "selector"): _SENTENCE,  # the label of a shadow
    ("scores", "note"): _SENTENCE,
    ("states", "selector"): _SENTENCE,
    ("states", "field"): _OWN,
    ("states", "scalar"): _SENTENCE,
    ("deltas", "selector"): _SENTENCE,
    ("deltas", "field"): _OWN,
    ("metrics", "key"): TextKind.METRIC,
    ("meta", "key"): _OWN,
}
"""By table and column, for all other texts."""


def erase(journal: Journal, eraser: Eraser, *, block_name: bool) -> None:
    """Remove what is known about a client, within an event.

    This removes its name from every text, and its facts, attributes, reported numbers, scores and reasons of failure.
    The rounds it took part in stay, under another name, so that participation rules can still be proved. The caller
    changes the selector's state and rewrites the file; see :meth:`fedcohort.session.Session.forget`.
    """
    client, index, database = eraser.client, eraser.index, journal.database
    _blank_facts(journal, eraser)
    # Numbers could identify a client as well as its name. What remains is that somebody took part, and the status.
    for number, ticket, at, late, data in database.fetch("SELECT id, ticket, at, late, data FROM replies"):
        block = ReplyBlock.decode(ticket, at, bool(late), data)
        where = block.clients == index
        if where.any() and block.metrics:
            metrics = {
                name: np.where(where if column.ndim == 1 else where[:, None], np.nan, column)
                for name, column in block.metrics.items()
            }
            database.change("replies", (number,), data=dataclasses.replace(block, metrics=metrics).encode())
    clients = journal.client_count()
    for ticket, selector, data in database.fetch(
        "SELECT ticket, selector, arrays FROM scores WHERE arrays IS NOT NULL"
    ):
        arrays = unpack_scores(data, clients)
        keep = arrays["client"] != index
        if not keep.all():
            others = pack_scores({name: values[keep] for name, values in arrays.items()})
            database.change("scores", (ticket, selector), arrays=others)
    for name in ("meta", "cohorts", "scores", "states", "deltas", "metrics", "events"):
        eraser.table(database, name)
    journal.set_meta("clients", None)  # digests of the original facts, from which a name could be guessed
    if block_name:
        known = journal.meta().get(_BLOCKED) or {"key": secrets.token_hex(32), "digests": {}}
        digests = {**known["digests"], _name_digest(client, known["key"]): eraser.stand_in}
        journal.set_meta(_BLOCKED, {**known, "digests": digests})
    # Earlier versions and answers hold the client's facts and losses.
    database.delete("versions", "1", ())
    database.delete("answers", "1", ())
    # An audit starts from the table as it is now; it says that no round before can be recomputed.
    facts = table_facts(*journal.table())
    journal.add_version(facts, facts)
    journal.add_event(events.FORGOTTEN, {"client": index})


def _blank_facts(journal: Journal, eraser: Eraser) -> None:
    """Give the client another name, zeros in every table of facts, and no membership."""
    table, active = journal.table()
    facts, index, put = journal.facts(), eraser.index, journal.database.put
    names = [eraser.stand_in if name == eraser.client else name for name in table.names]
    put("facts", "names", compress(json.dumps(names).encode()))
    for key in ("sizes", "label_counts", "label_factor", "label_gram"):
        if key not in facts:
            continue
        rows = unpack(facts[key]).copy()
        rows[index] = 0
        if key == "label_gram":
            rows[:, index] = 0
        put("facts", key, pack(rows))
    members = active.copy()
    members[index] = False
    put("facts", "active", pack(np.packbits(members)))
    if "attributes" in facts:
        put("facts", "attributes", compress(json.dumps(eraser.value(journal.attributes(), _ATTRIBUTES)).encode()))


def _name_digest(name: str, key: str) -> str:
    """Return a digest that recognises a forgotten name; without the journal's key it reveals nothing."""
    return hmac.new(bytes.fromhex(key), name.encode("utf-8", "surrogatepass"), "sha256").hexdigest()


def blocked_names(journal: Journal, names: Iterable[str]) -> dict[str, str]:
    """Return those of the ``names`` that were forgotten and are blocked, each with the name that replaces it."""
    blocked = journal.meta().get(_BLOCKED)
    if blocked is None:
        return {}
    stand_ins = {name: blocked["digests"].get(_name_digest(name, blocked["key"])) for name in names}
    return {name: stand_in for name, stand_in in stand_ins.items() if stand_in is not None}


class Eraser:
    """Replaces a client's name in every text of a journal, depending on what each field holds.

    Parameters
    ----------
    table : ClientTable
        All clients; a longer name that contains the client's name is not changed.

    Attributes
    ----------
    index : int
    stand_in : str
        The name that replaces the client's.
    """

    def __init__(self, client: str, table: ClientTable) -> None:
        if not table.has_names:
            raise InputError("The clients of this journal have no names to forget.")
        self.client, self.index = client, table.index(client)
        self.stand_in = f"{events.FORGOTTEN}-{self.index}"
        # Forgetting "anna" must leave "anna maria" as she is.
        longer = sorted((n for n in table.names if client.lower() in n.lower() and n != client), key=len, reverse=True)
        self._others = set(longer)
        # Whole words only: a longer word that happens to contain the name stays.
        names = "|".join(map(re.escape, [*longer, client]))
        self._pattern = re.compile(rf"(?<!\w)(?:{names})(?!\w)", re.IGNORECASE)

    def text(self, text: str) -> str:
        """Return a text without the name, in capitals or not."""
        return self._pattern.sub(lambda m: m[0] if m[0] in self._others else self.stand_in, text)

    def value(self, value: Any, holds: _Field) -> Any:
        """Return JSON-like data without the name; entries whose key is the name are removed."""
        if isinstance(value, str):
            match holds:
                case TextKind.OWN:
                    return value
                case TextKind.NAME:
                    return self.stand_in if value == self.client else value
                case TextKind.CONDITION:
                    return _QUOTED.sub(lambda m: self.text(m[0]), value)
                case TextKind.METRIC if value == self.client and "/" not in value:
                    return value  # a metric of the host: a client's name comes before or after a slash
                case TextKind.METRIC:
                    return "/".join(part if part in _METRICS else self.text(part) for part in value.split("/"))
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item, holds) for item in value]
        if not isinstance(value, Mapping) or holds is TextKind.OWN:
            return value
        clean = {}
        for key, item in value.items():
            kind: TextKind = TextKind.FREE
            inner: _Field = TextKind.FREE
            if isinstance(holds, Mapping) and key in holds:
                kind, inner = TextKind.OWN, holds[key]
            elif isinstance(holds, _Keyed):
                kind, inner = holds
            elif holds is TextKind.NOTES:
                kind, inner = TextKind.OWN, holds
            if kind in (TextKind.OWN, TextKind.SENTENCE) or key != self.client:
                clean[self.text(key) if kind in (TextKind.SENTENCE, TextKind.FREE) else key] = self.value(item, inner)
        return clean

    def table(self, database: Database, name: str) -> None:
        """Replace the name in all texts of a table; metrics under the client's name are deleted."""
        table = TABLES[name]
        for row in database.fetch(f"SELECT {table.names} FROM {name}"):
            before = dict(zip(table.columns, row, strict=True))
            changes = self._changes(name, before)
            key = [before[column] for column in table.key]
            if changes.keys() & set(table.key):
                database.delete(name, table.where_key, key)
                if name != "metrics":
                    database.put(name, *{**before, **changes}.values())
            elif changes:
                database.change(name, key, **changes)

    def _changes(self, table: str, row: Mapping[str, Any]) -> dict[str, str]:
        """Return the new texts of a row, by column."""
        changes = {}
        for column, old in row.items():
            if not isinstance(old, str):
                continue
            is_json = column in ("value", "body", "notes")
            match table, column:
                case "meta", "value":
                    holds = META.get(row["key"], TextKind.FREE)
                case "events", "body":
                    holds = EVENTS.get(row["kind"], TextKind.FREE)
                case "events", "kind":
                    holds = TextKind.OWN if old in EVENTS else TextKind.SENTENCE
                case _:
                    holds = _COLUMNS[table, column]
            value = json.loads(old) if is_json else old
            clean = self.value(value, holds)
            if clean != value:
                changes[column] = json.dumps(clean) if is_json else clean
        return changes


def copies(path: Path, client: str) -> list[Path]:
    """Return files near a journal that still contain a client's name, unless it is compressed there.

    This searches the journal's folder, or the whole folder of the experiment it belongs to: other journals,
    checkpoints, logs, reports, exports.
    """
    journal = path.resolve()
    folder = journal.parent.parent if journal.parent.name == "journal" else journal.parent
    with closing(read_journal(journal)) as record:
        names = record.table()[0].names
    longer = [name for name in names if client.lower() in name.lower() and name != client]
    wanted = [*sorted(longer, key=len, reverse=True), client]
    forms = [form for name in wanted for written in (name, name.lower(), name.upper()) for form in _spellings(written)]
    alternatives = b"|".join(map(re.escape, dict.fromkeys(forms)))
    pattern = re.compile(rb"(?<!\w)(?:" + alternatives + rb")(?!\w)", re.IGNORECASE)
    others = {form for name in longer for form in _spellings(name)}
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and not file.is_symlink())
    journal_files = {journal, *(journal.with_name(journal.name + end) for end in COMPANIONS)}
    found = []
    for file in islice(files, _MAX_FILES):
        with contextlib.suppress(OSError):  # a file that we may not read is not ours
            if file in journal_files:
                continue
            names_it, window = _is_journal_with(file, client), b""
            with open_file(file) as stream:
                while not names_it and (block := stream.read(1 << 20)):
                    window = window[-_OVERLAP:] + block
                    names_it = any(match[0] not in others for match in pattern.finditer(window))
            if names_it:
                found.append(file)
    return found


def _spellings(name: str) -> list[bytes]:
    """Return how a file may spell a name: as plain text, and as in JSON."""
    return [name.encode("utf-8", "surrogatepass"), json.dumps(name)[1:-1].encode()]


def _is_journal_with(file: Path, client: str) -> bool:
    """Whether a file is a journal with this client; journals store names compressed."""
    with open_file(file) as stream:
        if stream.read(16) != b"SQLite format 3\0":
            return False
    try:
        with closing(read_journal(file)) as journal:
            table, _ = journal.table()
            return table.has_names and client in table.names
    except (FedcohortError, *ERRORS, ValueError, LookupError, TypeError):
        return False
