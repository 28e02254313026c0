"""Journals as numbers for Prometheus, which the dashboard returns at ``/metrics``."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np

from fedcohort.core.protocol import Status
from fedcohort.core.text import escape_label
from fedcohort.journal.events import ABANDONED, SHADOW
from fedcohort.journal.presence import STATES, RunState, planned_rounds, run_state, run_state_before
from fedcohort.journal.store import Journal, read_journal

log = logging.getLogger(__name__)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MAX_CLIENTS = 100  # that get their own series; Prometheus keeps every series that it has seen
_Sample = tuple[dict[str, str], str]
_Number = tuple[str, dict[str, str], float]  # metric, labels, value
METRICS: Mapping[str, tuple[str, str]] = {
    "fedcohort_journal_readable": ("gauge", "1 for a journal that can be read now, 0 for one that cannot."),
    "fedcohort_run_state": ("gauge", "1 for the state a run is in, 0 for the others."),
    "fedcohort_waiting_since_timestamp_seconds": ("gauge", "When the run began to wait, in seconds since 1970."),
    "fedcohort_heartbeat_timestamp_seconds": (
        "gauge",
        "Last heartbeat of a live run's server, in seconds since 1970; also of one that was killed.",
    ),
    "fedcohort_clients_online": ("gauge", "Clients that can take part now."),
    "fedcohort_clients_offline": ("gauge", "Members that are not online now."),
    "fedcohort_client_offline_since_timestamp_seconds": (
        "gauge",
        f"Since when a member is offline, in seconds since 1970; of the {_MAX_CLIENTS} that went last.",
    ),
    "fedcohort_rounds_planned": ("gauge", "Rounds the run will have."),
    "fedcohort_rounds_total": ("counter", "Rounds that were closed and counted."),
    "fedcohort_rounds_abandoned_total": ("counter", "Cohorts that were abandoned."),
    "fedcohort_cohorts_pending": ("gauge", "Cohorts that are training now."),
    "fedcohort_clients": ("gauge", "Members of the federation."),
    "fedcohort_clients_never_picked": ("gauge", "Members that never took part."),
    "fedcohort_cohort_size": ("gauge", "Clients of the newest cohort."),
    "fedcohort_candidates": ("gauge", "Clients that could have been picked for the newest cohort."),
    "fedcohort_excluded": ("gauge", "Clients that rules kept from the newest cohort, by reason."),
    "fedcohort_replies_total": (
        "counter",
        "Clients that were asked to train, by status; late ones were missing before.",
    ),
    "fedcohort_round_duration_seconds": ("gauge", "Seconds from choosing the newest closed cohort to closing it."),
    "fedcohort_last_round_timestamp_seconds": ("gauge", "When a cohort was last closed, in seconds since 1970."),
    "fedcohort_shadows_failed_total": ("counter", "Shadow selectors that failed and were dropped."),
    "fedcohort_model": ("gauge", "Numbers about the global model after the newest round that has them, by metric."),
}


def exposition(journals: Mapping[str, Path]) -> str:
    """Return the numbers of several journals, each with its name as a label, in Prometheus's text format.

    A journal that cannot be read now, because it is being created or is damaged, has no other numbers.
    """

    def found(path: Path) -> Iterator[_Number]:
        if not path.exists():
            state = run_state_before(path)
            yield from () if state is None else _run_numbers(state)
            return
        with closing(read_journal(path)) as journal:
            yield from _run_numbers(run_state(journal))
            yield from _journal_numbers(journal)

    samples: dict[str, list[_Sample]] = {name: [] for name in METRICS}
    for name, path in journals.items():
        try:
            numbers = [(metric, labels, _format(value)) for metric, labels, value in found(path)]
        except Exception as error:  # damage may raise anything, and must not hide the other journals
            log.debug("the journal %s cannot be read: %s", name, error)
            numbers = []
        if path.exists() or not numbers:  # a run that waits for its first clients has no journal yet
            numbers.append(("fedcohort_journal_readable", {}, str(int(bool(numbers)))))
        for metric, labels, number in numbers:
            samples[metric].append(({"journal": name, **labels}, number))
    lines = []
    for metric, (kind, meaning) in METRICS.items():
        lines += [f"# HELP {metric} {meaning}", f"# TYPE {metric} {kind}"]
        for labels, number in samples[metric]:
            named = ",".join(f'{key}="{escape_label(value)}"' for key, value in labels.items())
            lines.append(f"{metric}{{{named}}} {number}")
    return "\n".join(lines) + "\n"


def _run_numbers(run: RunState) -> Iterator[_Number]:
    """Yield whether a run is alive, and the last heartbeat of its server."""
    for state in STATES:
        yield "fedcohort_run_state", {"state": state}, float(state == run.state)
    if run.state == "waiting" and run.since is not None:
        yield "fedcohort_waiting_since_timestamp_seconds", {}, run.since
    heartbeat = run.presence
    if heartbeat is None:
        return
    yield "fedcohort_heartbeat_timestamp_seconds", {}, heartbeat.at
    if run.state in ("running", "waiting") and heartbeat.online is not None:
        yield "fedcohort_clients_online", {}, heartbeat.online
        yield "fedcohort_clients_offline", {}, heartbeat.offline_count
        for name, since in list(heartbeat.offline.items())[:_MAX_CLIENTS]:
            yield "fedcohort_client_offline_since_timestamp_seconds", {"client": name}, since


def _journal_numbers(journal: Journal) -> Iterator[_Number]:
    table, active = journal.table()
    abandoned = {body["ticket"] for body in journal.events(ABANDONED)}
    cohorts = [row for row in journal.cohorts() if len(row.clients)]
    closed = [row for row in cohorts if row.ticket not in abandoned and row.told_at is not None]
    picked = np.zeros(table.n, np.bool_)
    for row in cohorts:
        picked[row.clients] = True
    yield "fedcohort_rounds_total", {}, len(closed)
    rounds = planned_rounds(journal)
    if rounds is not None:
        yield "fedcohort_rounds_planned", {}, rounds
    yield "fedcohort_rounds_abandoned_total", {}, len(abandoned)
    yield "fedcohort_cohorts_pending", {}, sum(row.told_at is None for row in cohorts)
    yield "fedcohort_clients", {}, int(active.sum())
    yield "fedcohort_clients_never_picked", {}, int((active & ~picked).sum())
    if cohorts:
        yield "fedcohort_cohort_size", {}, len(cohorts[-1].clients)
        yield "fedcohort_candidates", {}, cohorts[-1].n_candidates
        for reason, count in Counter(journal.exclusions(cohorts[-1].ticket).values()).items():
            yield "fedcohort_excluded", {"reason": reason}, count
    if closed:
        began, ended = closed[-1].asked_at, closed[-1].told_at
        assert ended is not None
        yield "fedcohort_round_duration_seconds", {}, ended - began
        yield "fedcohort_last_round_timestamp_seconds", {}, ended
    # All reports, although a late client was counted as missing before: a counter must not decrease.
    statuses = Counter(status for block in journal.reply_blocks() for status in block.status.tolist())
    for status in Status:
        yield "fedcohort_replies_total", {"status": status.name.lower()}, statuses[int(status)]
    failed = sum(body["what"] == "failed" for body in journal.events(SHADOW))
    yield "fedcohort_shadows_failed_total", {}, failed
    newest: dict[str, float] = {}
    for numbers in journal.metrics().values():  # rounds ascend, so later numbers replace earlier ones
        newest.update({key: value for key, value in numbers.items() if value is not None})
    for key, value in newest.items():
        yield "fedcohort_model", {"metric": key}, value


def _format(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if float(value).is_integer() else repr(float(value))
