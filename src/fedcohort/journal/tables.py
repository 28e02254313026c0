"""Client tables as a journal stores them: each fact under its name, as bytes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping

import numpy as np

from fedcohort.arrays import AnyArray, BoolArray
from fedcohort.clients import ClientTable, LabelCounts, LabelFactor, LabelGram
from fedcohort.journal.codec import pack, unpack

LABELS = {"label_counts", "label_factor", "label_gram"}  # a table has one of these facts at most


def table_facts(table: ClientTable, active: AnyArray) -> dict[str, bytes]:
    """Return a client table and its members as they are stored."""
    facts: dict[str, bytes] = {"active": pack(np.packbits(active)), "n": json.dumps(table.n).encode()}
    if table.has_names:
        facts["names"] = zlib.compress(json.dumps(table.names).encode(), 1)
    if "sizes" in table.signals:
        facts["sizes"] = pack(table.sizes)
    if "label-products" in table.signals:
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


def table_of(facts: Mapping[str, bytes]) -> tuple[ClientTable, BoolArray]:
    """Return the client table and the (N,) mask of members that :func:`table_facts` stored."""
    n = int(json.loads(facts["n"]))
    labels: LabelCounts | LabelFactor | LabelGram | None = None
    if "label_counts" in facts:
        labels = LabelCounts(unpack(facts["label_counts"]))
    elif "label_factor" in facts:
        labels = LabelFactor(unpack(facts["label_factor"]), int(json.loads(facts["classes"])))
    elif "label_gram" in facts:
        labels = LabelGram(unpack(facts["label_gram"]), int(json.loads(facts["classes"])))
    names = json.loads(zlib.decompress(facts["names"])) if "names" in facts else None
    sizes = unpack(facts["sizes"]) if "sizes" in facts else None
    table = ClientTable(names=names, sizes=sizes, labels=labels, n=n)
    return table, np.unpackbits(unpack(facts["active"]), count=n).astype(np.bool_)
