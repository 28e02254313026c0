"""Makes the metrics of several replies fit to be averaged, so that no client can spoil the others' metrics.

Flower's strategies abort if replies have metrics with different names, and one NaN makes the average NaN. Here, a value
that is missing or cannot be used is replaced by the weighted mean of the others. The average of all clients is then the
average of those that have a value, however the strategy computes it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TypeGuard

from flwr.app import MetricRecord

from fedcohort.core.text import short_repr

_MAX_VALUE = 1e30  # sums of larger numbers may overflow
_NAMED = 3  # how many metrics of one client to name
_Number = int | float
_Value = _Number | list[int] | list[float]


def scalars(metrics: MetricRecord | None) -> dict[str, float]:
    """Return the finite single numbers of a record."""
    return {k: float(v) for k, v in (metrics or {}).items() if isinstance(v, (int, float)) and math.isfinite(v)}


def common_metrics(
    records: Mapping[str, MetricRecord], key: str
) -> tuple[dict[str, MetricRecord], dict[str, list[str]]]:
    """Return metrics with the same names and forms in every reply, and by client what had to be changed.

    Parameters
    ----------
    records : mapping of str to MetricRecord
        By client. They are not changed.
    key : str
        The metric used as weight; a number of at least 0 in every record.

    >>> replies = {"anna": MetricRecord({"n": 1, "loss": 2.0}), "ben": MetricRecord({"n": 1, "loss": math.nan})}
    >>> common_metrics(replies, "n")[1]
    {'ben': ["its metric 'loss' is nan and is left out"]}
    """
    by_name: dict[str, dict[str, _Value]] = {}
    for client, record in records.items():
        for name, value in record.items():
            by_name.setdefault(name, {})[client] = value
    by_name.pop(key, None)
    common = {client: {key: record[key]} for client, record in records.items()}
    remarks: dict[str, list[str]] = {}
    for name, sent in by_name.items():
        values, texts = _one_metric(short_repr(name, 80), sent, records, key)
        for client, value in values.items():
            common[client][name] = value
        for client, text in texts.items():
            remarks.setdefault(client, []).append(text)
    if not remarks:
        return dict(records), {}
    for lines in remarks.values():
        if len(lines) > _NAMED:
            lines[_NAMED:] = [f"and {len(lines) - _NAMED} more of this kind"]
    return {client: MetricRecord(values) for client, values in common.items()}, remarks


def _one_metric(
    name: str, sent: Mapping[str, _Value], records: Mapping[str, MetricRecord], key: str
) -> tuple[dict[str, _Value], dict[str, str]]:
    """Return one metric's value for every client (for none if it is left out), and by client what was changed."""
    usable = {client: value for client, value in sent.items() if _form(value) is not None}
    unusable = {client: value for client, value in sent.items() if client not in usable}
    texts = {c: f"its metric {name} is {short_repr(value, 40)} and is left out" for c, value in unusable.items()}
    # Otherwise a minority that sends this metric would decide its average.
    if 2 * len(sent) < len(records):
        rare = f"its metric {name} is left out: most replies have none"
        return {}, texts | dict.fromkeys(usable, rare)
    if not usable:
        return {}, texts
    forms = Counter(map(_form, usable.values()))
    # If two are equally common, the shorter list: a client must not make the others' numbers look like the odd ones.
    usual = max(forms, key=lambda form: (forms[form], -(form or 0)))
    values = {client: value for client, value in usable.items() if _form(value) == usual}
    without = [client for client in records if client not in values]
    if without:
        # The mean of the others does not change their average.
        values |= dict.fromkeys(without, _mean(values, records, key))
    for client in without:
        if client in usable:
            form = _form_name(_form(usable[client]))
            texts[client] = f"its metric {name} is left out: it is {form}, those of others are {_form_name(usual)}"
        elif client not in sent:
            texts[client] = f"it sent no metric {name}; the average is that of the others"
    return values, texts


def _form(value: object) -> int | None:
    """Return 0 for a number, 1 + n for a list of n numbers, None for anything else."""
    if isinstance(value, list):
        return 1 + len(value) if all(map(_is_usable, value)) else None
    return 0 if _is_usable(value) else None


def _is_usable(value: object) -> TypeGuard[_Number]:
    return isinstance(value, (int, float)) and -_MAX_VALUE <= value <= _MAX_VALUE


def _form_name(form: int | None) -> str:
    return "a number" if not form else f"a list of {form - 1}"


def _mean(values: Mapping[str, _Value], records: Mapping[str, MetricRecord], key: str) -> _Value:
    weights = {client: float(records[client][key]) for client in values}  # type: ignore[arg-type]
    total = math.fsum(weights.values())
    shares = {c: weight / total if total > 0 else 1 / len(weights) for c, weight in weights.items()}
    rows = {c: value if isinstance(value, list) else [value] for c, value in values.items()}
    mean = [math.fsum(shares[c] * row[i] for c, row in rows.items()) for i in range(min(map(len, rows.values())))]
    return mean if any(isinstance(value, list) for value in values.values()) else mean[0]
