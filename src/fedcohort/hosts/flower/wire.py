"""How fedcohort's questions and answers travel in Flower's messages: their types, and one ConfigRecord.

Flower's strategies demand exactly one ArrayRecord and one MetricRecord in a reply and average every metric in it, but
they ignore ConfigRecords.
"""

from __future__ import annotations

from flwr.app import ArrayRecord, RecordDict

DESCRIBE = "query.fedcohort_describe"  # asks for name, facts about the data, and signals
LOSSES = "query.fedcohort_losses"  # asks for losses of a model on the client's data


def only_arrays(content: RecordDict) -> ArrayRecord | None:
    """Return the only ArrayRecord of a message, or None if there is not exactly one."""
    records = list(content.array_records.values())
    return records[0] if len(records) == 1 else None
