"""Client tables as a journal stores them: the bytes of each fact, by name."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray
from fedcohort.core.clients import ClientTable, LabelCounts, LabelFactor, LabelGram
from fedcohort.core.errors import FedcohortError, JournalError
from fedcohort.core.signals import Signal
from fedcohort.journal.codec import compress, decompress_json, pack, unpack

LABELS = {"label_counts", "label_factor", "label_gram", "classes"}  # facts that depend on the form of the labels


def table_facts(table: ClientTable, active: AnyArray) -> dict[str, bytes]:
    """Return a client table and the mask of members as facts."""
    facts: dict[str, bytes] = {"active": pack(np.packbits(active)), "n": json.dumps(table.n).encode()}
    if table.has_names:
        facts["names"] = compress(json.dumps(table.names).encode())
    # Also if they follow from label counts, so that readers need not know which of the two the host supplied.
    if Signal.SIZES in table.signals:
        facts["sizes"] = pack(table.sizes)
    if Signal.LABEL_PRODUCTS in table.signals:
        match table.labels:
            case LabelCounts(counts=counts):
                facts["label_counts"] = pack(counts)
            case LabelFactor(factor=factor, classes=classes):
                facts["label_factor"] = pack(factor)
                facts["classes"] = json.dumps(classes).encode()
            case LabelGram(gram=gram, classes=classes):
                facts["label_gram"] = pack(gram)
                facts["classes"] = json.dumps(classes).encode()
    return facts


def version_facts(before: Mapping[str, bytes], data: bytes) -> dict[str, bytes]:
    """Return the facts of a version of the client table, given those of the version before."""
    header, _, rest = data.partition(b"\n")
    names, lengths = json.loads(header)
    updated, start = dict(before), 0
    for name, length in lengths:
        updated[name] = rest[start : start + length]
        start += length
    return {name: updated[name] for name in names}


def client_table(facts: Mapping[str, bytes]) -> tuple[ClientTable, BoolArray]:
    """Return the client table and the (N,) mask of members, given what :func:`table_facts` returned."""
    try:
        n, active = client_count(facts), unpack(facts["active"])
        labels: LabelCounts | LabelFactor | LabelGram | None = None
        if "label_counts" in facts:
            labels = LabelCounts(unpack(facts["label_counts"]))
        elif "label_factor" in facts:
            labels = LabelFactor(unpack(facts["label_factor"]), int(json.loads(facts["classes"])))
        elif "label_gram" in facts:
            labels = LabelGram(unpack(facts["label_gram"]), int(json.loads(facts["classes"])))
        names = None
        if "names" in facts:
            names = decompress_json(facts["names"], "The list of clients' names")
            if not isinstance(names, list) or len(names) != n or not all(isinstance(name, str) for name in names):
                raise JournalError(f"The list of clients' names is not a list of {n} strings.")
        sizes = unpack(facts["sizes"]) if "sizes" in facts else None
        table = ClientTable(names=names, sizes=sizes, labels=labels, n=n)
        return table, np.unpackbits(active, count=n).astype(np.bool_)
    except (ValueError, TypeError, LookupError) as error:
        if isinstance(error, FedcohortError):
            raise
        raise JournalError(f"The table of clients cannot be read: {type(error).__name__}: {error}.") from error


def client_count(facts: Mapping[str, bytes]) -> int:
    """Return the number of clients, after comparing it with the size of the mask of members.

    Otherwise a small file could claim a huge number and make us allocate arrays of that size.
    """
    n, room = int(json.loads(facts["n"])), 8 * len(facts["active"])
    if not 0 <= n <= room:
        raise JournalError(f"The number of clients on record is {n}, but the mask of members has room for {room}.")
    return n
