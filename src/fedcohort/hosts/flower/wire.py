"""How Flower carries what travels beside the model: message types, and everything of ours in one ConfigRecord.

Flower's strategies demand exactly one ArrayRecord and one MetricRecord in a reply and average every metric they find; a
ConfigRecord they leave alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedcohort.core.arrays import FloatArray
from fedcohort.core.signals import Signal
from fedcohort.hosts.wire import Value, question, report

DESCRIBE = "query.fedcohort_describe"  # who are you, what do you hold, what can you report?
LOSSES = "query.fedcohort_losses"  # losses of this model on your data


def only_arrays(content: RecordDict) -> ArrayRecord | None:
    """Return the one ArrayRecord of a message, or None when there is none or more than one."""
    records = list(content.array_records.values())
    return records[0] if len(records) == 1 else None


def ask_record(signals: Iterable[Signal], commitment: str | None = None) -> ConfigRecord:
    """Return the record that asks a client for ``signals`` and tells it what the server is committed to."""
    return ConfigRecord(question(signals, commitment))


def report_record(
    name: str,
    values: Mapping[Signal, Value],
    seconds: float | None = None,
    gradient: FloatArray | None = None,
) -> ConfigRecord:
    """Return a client's numbers as the record that travels."""
    return ConfigRecord(report(name, values, seconds, gradient))
