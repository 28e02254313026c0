"""Check that a host continues a journal with the seed, clients and signals that the journal began with.

A federation changes during a session. A host may pass the table it started with or the current one; both are right. So
the journal keeps digests of the facts it began with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import JournalError
from fedcohort.core.signals import Signal
from fedcohort.journal import Journal
from fedcohort.journal.codec import pack
from fedcohort.journal.events import FORGOTTEN, JOINED
from fedcohort.session.resume import is_asynchronous

CLIENTS = "clients"  # the journal's key for the digests


def digests(table: ClientTable) -> dict[str, str]:
    """Return a digest of each kind of fact about the clients."""
    facts = {"number": str(table.n).encode()}
    if table.has_names:
        facts["names"] = json.dumps(table.names).encode()
    if Signal.SIZES in table.signals:
        facts["sizes"] = pack(table.sizes)
    if Signal.LABEL_PRODUCTS in table.signals:
        labels = table.labels
        parts = [getattr(labels, name) for name in labels.__dataclass_fields__]
        facts["labels"] = b"".join([type(labels).__name__.encode(), *(pack(np.asarray(part)) for part in parts)])
    return {name: hashlib.sha256(data).hexdigest() for name, data in facts.items()}


def check_same(
    journal: Journal,
    *,
    seed: int,
    clients: ClientTable,
    signals: Iterable[Signal] | None,
    audit: bool,
    asynchronous: bool,
) -> None:
    """Raise an error that says what differs if a journal belongs to a session that was started otherwise."""
    meta = journal.meta()
    differences = []
    if int(meta["seed"]) != seed:
        differences.append(f"its seed is {meta['seed']}, but {seed} was given")
    recorded = meta["signals"]
    passed = None if signals is None else sorted(s.name for s in signals)
    if recorded != passed:
        differences.append(f"its host supplies {_signal_list(recorded)}, but signals are {_signal_list(passed)}")
    if audit and not meta["audit"]:
        differences.append("it cannot be audited, but audit=True was given")
    if is_asynchronous(journal) != asynchronous:
        kind = "has rounds" if asynchronous else "is asynchronous"
        differences.append(f"it {kind}, but asynchronous={asynchronous} was given")
    differences += _other_clients(journal, meta, clients)
    if differences:
        raise JournalError(
            f"The journal {journal.path} belongs to another session: {'; '.join(differences)}.",
            hint="pass what it was started with, or use Session.open(path), which takes everything from the journal; "
            "for a new session choose another file",
        )


def _signal_list(signals: Iterable[str] | None) -> str:
    return "whatever the selector requires (signals=None)" if signals is None else ", ".join(signals) or "no signals"


def _other_clients(journal: Journal, meta: Mapping[str, Any], clients: ClientTable) -> Iterator[str]:
    passed = digests(clients)
    now, _ = journal.table()
    if passed in (meta[CLIENTS], digests(now)):
        return
    if journal.events(FORGOTTEN):
        yield from _other_names(journal, now, clients)
    else:
        yield from _table_differences(now, clients)


def _table_differences(ours: ClientTable, theirs: ClientTable) -> Iterator[str]:
    """Yield how two tables differ; they are known to differ."""
    if ours.n != theirs.n:
        yield f"it has {ours.n} clients, but {theirs.n} were given"
        return
    for i, (one, other) in enumerate(zip(ours.names, theirs.names, strict=True)):
        if one != other:
            yield f"its client {i} is named {one!r}, but {other!r} was given"
            return
    if ours.signals != theirs.signals:
        recorded, given = (_signal_list(sorted(s.name for s in table.signals)) for table in (ours, theirs))
        yield f"its clients have {recorded}, but those given have {given}"
        return
    differing = ours.differing(theirs)
    if len(differing):
        more = f" and {len(differing) - 1} others" if len(differing) > 1 else ""
        yield f"sizes or labels of its client {ours.name(int(differing[0]))!r}{more} differ from those given"
    else:
        yield "its clients' labels have another form than those given"


def _other_names(journal: Journal, ours: ClientTable, theirs: ClientTable) -> Iterator[str]:
    """Yield clients that only one of two tables has; either may lack clients that were forgotten or joined later."""
    forgotten = {ours.name(int(body["client"])) for body in journal.events(FORGOTTEN)}
    first = min((int(body["first"]) for body in journal.events(JOINED)), default=ours.n)
    lacking = sorted(set(ours.names[:first]) - set(theirs.names) - forgotten)
    unknown = sorted(set(theirs.names) - set(ours.names))
    if lacking:
        yield f"it has the client {lacking[0]!r}, which was not given"
    if len(unknown) > len(forgotten):
        yield f"it lacks {len(unknown)} of the clients given, and only {len(forgotten)} were forgotten"
