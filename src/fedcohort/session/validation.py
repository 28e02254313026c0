"""Check everything a session receives: selectors, clients, signals, requests, answers, cohorts and reports."""

from __future__ import annotations

import numbers
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray, freeze
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import DuplicateReportError, InputError, SelectorError, SignalError
from fedcohort.core.protocol import (
    SELECTORS,
    Answer,
    Cohort,
    Losses,
    Query,
    RoundReport,
    RoundRequest,
    Selector,
    Slate,
    Status,
    Trial,
)
from fedcohort.core.selector_spec import selector_name
from fedcohort.core.signals import Known, Signal
from fedcohort.core.text import short_repr
from fedcohort.core.validate import array, boolean, input_error, instance, integer, listing
from fedcohort.core.validate import numbers as numbers_of
from fedcohort.journal import ReplyBlock, ReplyRow
from fedcohort.journal.codec import as_json

_STATUSES = frozenset(int(status) for status in Status)
_FEW_NAMES = 5  # to show in a message
_FEW = 1024  # for fewer picks than this, a Python set finds a repeated one faster than sorting
_PLAIN = frozenset({str, int, float, bool})  # what notes consist of
MAX_WORK = 1000  # as a multiple of the usual local steps


def as_selector(value: object, what: str = "'selector'") -> Selector[Any]:
    """Return a selector from a selector or the name of one."""
    if isinstance(value, str):
        return SELECTORS.create(value)
    return instance(value, Selector, what, "a Selector or the name of one")  # type: ignore[type-abstract]


def as_shadows(value: object) -> dict[str, Selector[Any]] | None:
    """Return shadow selectors by name; None for None."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise input_error("'shadows'", "a mapping from names to selectors", value)
    for name in value:
        if not isinstance(name, str) or not name or not name.isprintable():
            raise input_error("The name of a shadow selector", "a printable, non-empty string", name)
    return {name: as_selector(shadow, f"The shadow {name!r}") for name, shadow in value.items()}


def as_table(value: object) -> ClientTable:
    """Return a client table from a table, or from names or a number; clients then have equal sizes."""
    if isinstance(value, ClientTable):
        return value
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        n = ClientTable(n=int(value)).n
        # Selectors that weight clients by their size need sizes.
        return ClientTable(n=n, sizes=np.ones(n))
    try:
        named = ClientTable(names=value)  # type: ignore[arg-type]
        return ClientTable(names=named.names, sizes=np.ones(named.n))
    except InputError as error:
        if isinstance(value, (list, tuple)):
            raise
        raise input_error("'clients'", "a number of clients, a list of their names, or a ClientTable", value) from error


def as_signals(value: object) -> frozenset[Signal] | None:
    """Return signals from signals or their names; None for None."""
    return None if value is None else frozenset(map(Signal.by_name, listing(value, "'signals'", "signals")))


def as_request(value: object) -> RoundRequest:
    """Return a request from a request or a cohort size; None asks for all available clients."""
    if isinstance(value, RoundRequest):
        return value
    if value is None or isinstance(value, (int, np.integer)):
        return RoundRequest(value)  # type: ignore[arg-type]
    raise input_error("A request", "a number of clients, None or a RoundRequest", value)


def answer_of(query: Query | None, table: ClientTable, answers: Mapping[str, Any]) -> Answer | None:
    """Return the answer to a query from the keywords of ``session.ask``; None if there is no query.

    Parameters
    ----------
    query : Losses, Trial or None
    answers : mapping of str to function, mapping or array
        By signal, a function from client names to numbers, numbers by client name, or the numbers of all clients.
    """
    sources = {_signal_of(name): source for name, source in answers.items()}
    if query is None:
        return None
    if isinstance(query, Trial):
        raise InputError(
            "The selector asks for a trial of cohorts, which cannot be answered with keywords.",
            hint="call session.query(request), answer it, and pass the Answer to session.ask(request, answer)",
        )
    names = table.names_of(query.clients)
    allowed = f"one number for each of the {table.n} clients, numbers by client name, or a function"
    values: dict[Signal, Any] = {}
    for signal in query.signals & sources.keys():
        source = sources[signal]
        if callable(source):
            values[signal] = source(names)
        elif isinstance(source, Mapping):
            strangers = [client for client in source if client not in table]
            if strangers:
                shown = ", ".join(map(repr, table.names_of(np.arange(min(table.n, 8)))))
                raise InputError(
                    f"'{signal}' names the client {short_repr(strangers[0])}, which does not exist. The clients are "
                    f"{shown}{', ...' if table.n > 8 else ''}.",
                    hint="give numbers by client name, or an array with one number for each client",
                )
            values[signal] = [source.get(name, np.nan) for name in names]
        else:
            column = numbers_of(source, f"'{signal}'", allowed)
            if column.shape != (table.n,):
                raise input_error(f"'{signal}'", allowed, source)
            values[signal] = column[query.clients]
    lacking = sorted(query.signals - values.keys())
    if lacking:
        raise InputError(
            f"The selector asks for '{lacking[0]}' ({lacking[0].meaning}) before it chooses. Got {', '.join(answers)}.",
            hint=f"session.ask(..., {', '.join(f'{_keyword_of(signal)}=...' for signal in sorted(query.signals))})",
        )
    return Answer(query, values)


def report_of(cohort: Cohort, outcome: Mapping[str, Any]) -> RoundReport:
    """Return the report on a whole cohort from the keywords of ``session.tell``.

    Values are arrays in the order of the cohort, or mappings from client names. A client that is in no mapping
    is missing.
    """
    by_client = {key: values for key, values in outcome.items() if isinstance(values, Mapping)}
    for client in chain.from_iterable(by_client.values()):
        if client not in cohort.names:
            raise InputError(
                f"The client {short_repr(client)} is not in the cohort {', '.join(map(repr, cohort.names[:20]))}."
            )
    columns = dict(outcome)
    for key, values in by_client.items():
        default = True if key == "kept" else np.nan
        columns[key] = [values.get(name, default) for name in cohort.names]
    status = outcome.get("status")
    if by_client and (status is None or "status" in by_client):
        # A status may name only the clients that failed, so it does not say who reported.
        reporting = set().union(*(values for key, values in by_client.items() if key != "status")) or set(cohort.names)
        usual = {name: int(Status.OK if name in reporting else Status.MISSING) for name in cohort.names}
        columns["status"] = [{**usual, **(status or {})}[name] for name in cohort.names]
    status, kept = columns.pop("status", None), columns.pop("kept", None)
    metrics = {_signal_of(name): values for name, values in columns.items()}
    return RoundReport(cohort.ticket, cohort.clients, status=status, metrics=metrics, kept=kept)


def _signal_of(keyword: str) -> Signal:
    """Return the signal of a keyword, which has underscores instead of hyphens."""
    signal = Signal.by_name(keyword.replace("_", "-"))
    if not signal.is_metric:
        raise InputError(f"The signal '{signal}' is not a metric of a round's report.", hint=signal.supplied_by)
    return signal


def _keyword_of(signal: Signal) -> str:
    """Return the keyword of a signal in ``session.ask`` and ``session.tell``."""
    return signal.name.replace("-", "_")


def check_size(size: int | None, n: int) -> int | None:
    """Return a cohort size between 1 and ``n``, or None."""
    if size is not None and integer(size, "The cohort size", least=1) > n:
        raise InputError(
            f"The cohort size must not exceed the federation's {n} clients. Got {size}.",
            hint="size=None asks for all available clients",
        )
    return None if size is None else int(size)


def check_signals(
    selector: Selector[Any], clients: ClientTable, signals: frozenset[Signal] | None, label: str = "selector"
) -> None:
    """Raise a SignalError if the table or the host cannot supply a signal that a selector requires.

    Parameters
    ----------
    signals : frozenset of Signal or None
        What the host supplies in reports and answers; None if it will supply whatever is required.
    label : str
        What to call the selector in the error.
    """
    # Sorted, so that the same signal is named each time.
    for signal in sorted(selector.requires):
        supplied = signal in clients.signals if signal.known is Known.TABLE else signals is None or signal in signals
        if not supplied and signal != Signal.STALENESS:  # the session itself supplies the staleness
            kind = "client table" if signal.known is Known.TABLE else "host"
            raise SignalError(
                f"The {label} {selector_name(selector)} requires the signal '{signal}' ({signal.meaning}), "
                f"which the {kind} does not supply.",
                hint=signal.supplied_by,
            )


def check_one_at_a_time(asynchronous: bool, selector: Selector[Any]) -> None:
    """Raise an InputError for a selector that cannot choose one client at a time, in an asynchronous session."""
    if asynchronous and not selector.one_at_a_time:
        able = ", ".join(name for name in SELECTORS.names() if getattr(SELECTORS.get(name), "one_at_a_time", False))
        raise InputError(
            f"The selector {selector_name(selector)} cannot choose one client at a time, which an asynchronous session "
            "needs.",
            hint=f"selectors that can: {able}",
        )


def fitting(
    selector: Selector[Any], clients: ClientTable, signals: frozenset[Signal] | None, asynchronous: bool
) -> Selector[Any]:
    """Return a selector adapted to a session that has begun; raise an error if the session cannot have it."""
    selector = selector.adapt(clients.signals | (signals or frozenset()))
    check_usable(selector, clients, signals, asynchronous)
    return selector


def check_usable(
    selector: Selector[Any],
    clients: ClientTable,
    signals: frozenset[Signal] | None,
    asynchronous: bool,
    label: str = "selector",
) -> None:
    """Raise an error for a selector that lacks a signal, or cannot choose one client at a time if it must."""
    check_signals(selector, clients, signals, label)
    check_one_at_a_time(asynchronous, selector)


def check_cohort(selector: Selector[Any], cohort: Cohort, slate: Slate) -> None:
    """Raise a SelectorError if a cohort breaks the protocol."""

    def wrong(text: str, hint: str | None = None) -> SelectorError:
        return SelectorError(f"The selector {selector_name(selector)} {text}.", hint=hint)

    if not isinstance(cohort, Cohort):
        raise wrong(f"must return a Cohort and its state. Got {short_repr(cohort)}")
    picked = cohort.clients
    if len(picked) > slate.size:
        raise wrong(f"picked {len(picked)} clients where {slate.size} were asked for")
    if len(set(picked.tolist()) if len(picked) < _FEW else np.unique(picked)) != len(picked):
        raise wrong(f"picked a client more than once: {picked.tolist()}")
    # Candidates are sorted; building a set of a million would take longer than most selectors.
    at = slate.candidates.searchsorted(picked)
    if (slate.candidates.take(at, mode="clip") != picked).any():
        raise wrong(f"picked clients that are not candidates: {picked.tolist()}")
    waits = slate.busy is not None and len(slate.busy) > 0  # one by one, a place may wait for a busy client
    if not len(picked) and cohort.stop is None and not waits:
        raise wrong(f"picked none of {len(slate.candidates)} candidates and gave no reason to stop")
    for name, values, most in (("weights", cohort.weights, np.inf), ("work", cohort.work, MAX_WORK)):
        if values is None:
            continue
        if values.shape != picked.shape or not (np.isfinite(values) & (values >= 0) & (values <= most)).all():
            raise wrong(f"must give one finite '{name}' from 0 to {most:,} per picked client. Got {values!r}")
    # A journal holds no lone surrogates.
    stop = cohort.stop
    if stop is not None and not (isinstance(stop, str) and stop == stop.encode(errors="replace").decode()):
        raise wrong(f"must say in words why it stops. Got {short_repr(stop)}")
    if cohort.score is not None or cohort.parts:
        candidates = cohort.candidates
        hint = "name the candidates: Cohort(..., candidates=slate.candidates, score=...)"
        if not isinstance(candidates, np.ndarray) or candidates.ndim != 1 or candidates.dtype.kind not in "iu":
            raise wrong(f"must name the candidates that its scores are about. Got {short_repr(candidates)}", hint)
        for part, values in {"score": cohort.score, **cohort.parts}.items():
            if values is None and part == "score":
                continue
            try:
                column = np.asarray(values)
                fits = column.shape == candidates.shape and column.dtype.kind in "biuf" and isinstance(part, str)
            except Exception:  # a foreign object may raise anything
                fits = False
            if not fits:
                text = (
                    f"must give {short_repr(part)} as one number for each of the cohort's {len(candidates)} candidates"
                )
                raise wrong(f"{text}. Got {short_repr(values)}", hint)
    if cohort.notes and not all(type(k) is str and type(v) in _PLAIN for k, v in cohort.notes.items()):
        try:
            as_json(dict(cohort.notes), "Its notes")
        except Exception as error:  # the repr of a foreign object may raise anything
            raise wrong(f"must note strings and numbers. Got {short_repr(dict(cohort.notes))}") from error


def check_query(selector: Selector[Any], query: object, n: int) -> None:
    """Raise a SelectorError for a query that no host could answer."""
    if query is None:
        return
    name = selector_name(selector)
    groups = query.cohorts if isinstance(query, Trial) else (query.clients,) if isinstance(query, Losses) else ()
    if not groups:
        raise SelectorError(
            f"The selector {name} must ask with Losses, or a Trial of at least one cohort. Got {short_repr(query)}."
        )
    for clients in groups:
        inside = not len(clients) or 0 <= clients.min() <= clients.max() < n
        if not inside or len(np.unique(clients)) != len(clients):
            raise SelectorError(
                f"The selector {name} must ask about each client once, and about those in [0, {n}). "
                f"Got {short_repr(clients.tolist())}."
            )


def check_answer(selector: Selector[Any], asked: str, n: int, query: Query | None, answer: Answer | None) -> None:
    """Raise an InputError for an answer that does not belong to the selector's query.

    ``asked`` is the request as the caller wrote it, for a hint, and ``n`` the number of clients.
    """
    if query is None:
        if answer is not None:
            raise InputError("The selector asked nothing in this round, but got an answer.")
        return
    if answer is None:
        name = selector_name(selector)
        if isinstance(query, Trial):
            raise InputError(
                f"The selector {name} asks for a trial of {len(query.cohorts)} cohorts before it chooses; the answer "
                "is missing.",
                hint="call session.query(request), answer it, and pass the Answer to session.ask(request, answer)",
            )
        wanted = sorted(query.signals)
        what = "losses" if wanted == [Signal.LOSS] else " and ".join(f"'{signal}'" for signal in wanted)
        shown, more = ", ".join(query.names[:_FEW_NAMES]), len(query.clients) - _FEW_NAMES
        answers = ", ".join(f"{_keyword_of(signal)}={{name: ... for name in query.names}}" for signal in wanted)
        raise InputError(
            f"The selector {name} asks for the {what} of some clients before it chooses, now of {len(query.clients)}: "
            f"{shown}{f' and {more} more' if more > 0 else ''}.",
            hint=f"query = session.query({asked}); session.ask({asked}, {answers}) with each client's loss of the "
            "global model",
        )
    match query, answer.query:
        case Losses(), Losses():
            same = np.array_equal(query.clients, answer.query.clients) and query.signals == answer.query.signals
        case Trial(), Trial():
            theirs = answer.query.cohorts
            same = len(query.cohorts) == len(theirs) and all(map(np.array_equal, query.cohorts, theirs))
        case _:
            same = False
    if not same:
        raise InputError("The answer belongs to a different question than this request's.")
    if isinstance(query, Trial) and answer[Trial.answered_with].shape != (len(query.cohorts), n):
        raise InputError(
            f"The answer to a Trial must give a loss change for every client, shape {(len(query.cohorts), n)}. "
            f"Got {answer[Trial.answered_with].shape}."
        )


def check_report(
    selector: Selector[Any],
    table: ClientTable,
    cohort: Cohort,
    earlier: Sequence[ReplyBlock],
    report: RoundReport,
    *,
    staleness: float | None = None,
    by_keyword: bool = False,
    chosen_by_it: bool = True,
) -> ReplyBlock:
    """Check a report and return it as columns.

    ``earlier`` are the partial reports on the same cohort. Hints speak of keywords if the caller used them. Clients
    that another selector chose may not have been asked for what this one requires. ``staleness`` is what the session
    knows itself, if anybody may read it.
    """
    boolean(report.complete, "A report's 'complete'")
    # Identity and not equality, because comparing a large cohort would be most of the work of a report.
    whole = report.clients is cohort.clients  # as most hosts report, and then all names are right
    clients = cohort.clients if whole else table.indices(report.clients)
    if earlier or not whole:
        members = set(cohort.clients.tolist())
        seen = {client for block in earlier for client in block.clients.tolist()}
        for c in clients.tolist():
            if c not in members:
                raise InputError(
                    f"The report for ticket {report.ticket} names client {table.name(c)!r}, which was not asked "
                    f"to train. The cohort is {', '.join(cohort.names[:20])}{', ...' if cohort.size > 20 else ''}."
                )
            if c in seen:
                raise DuplicateReportError(f"Client {table.name(c)!r} was already reported for ticket {report.ticket}.")
            seen.add(c)
    count = len(clients)
    status, kept = np.zeros(count, np.int8), np.ones(count, np.bool_)
    if report.status is not None:
        allowed = f"one of {', '.join(f'{int(s)} ({s.name})' for s in Status)} for each of the {count} reported clients"
        given = array(report.status, "'status'", allowed)
        known = not given.size or (given.dtype.kind in "iu" and _STATUSES.issuperset(given.ravel().tolist()))
        if given.shape != (count,) or not known:
            raise input_error("'status'", allowed, report.status)
        status = given.astype(np.int8)
    if report.kept is not None:
        allowed = f"one bool per reported client, {count}"
        kept = array(report.kept, "'kept'", allowed).copy()
        if kept.shape != (count,) or kept.dtype != np.bool_:
            raise input_error("'kept'", allowed, report.kept)
    if not isinstance(report.metrics, Mapping):
        raise input_error("A report's metrics", "a mapping from signals to numbers", report.metrics)
    columns: dict[str, FloatArray] = {}
    for name, values in report.metrics.items():
        signal = Signal.by_name(name)
        if signal == Signal.STALENESS and staleness is not None:
            continue  # a host need not know it
        if not signal.reported:
            raise InputError(f"The signal '{signal}' is not reported after a round; it is known {signal.known.value}.")
        column = _column(signal, values, count, earlier)
        if not chosen_by_it and not np.isfinite(column).any():
            continue  # nobody was asked for it
        if not np.isfinite(column).all():
            # A client with NaN or infinity is INVALID, and selectors see none of its numbers.
            invalid = ~np.isfinite(column).reshape(count, -1).all(axis=1)
            column[invalid] = np.nan
            status[(status == Status.OK) & invalid] = Status.INVALID
        columns[signal.name] = freeze(column)
    if staleness is not None:
        columns[Signal.STALENESS.name] = freeze(np.full(count, staleness))
    ok = status == Status.OK
    if ok.any() and chosen_by_it:  # if all clients failed, there is nothing to measure
        for signal in sorted(s for s in selector.requires if s.is_metric):
            if signal.name not in columns:
                raise SignalError(
                    f"The report for ticket {report.ticket} lacks the signal '{signal}' ({signal.meaning}), which the "
                    f"selector {selector_name(selector)} requires.",
                    hint=f"session.tell(cohort, {_keyword_of(signal)}=...)" if by_keyword else signal.supplied_by,
                )
    kept &= ok
    return ReplyBlock(report.ticket, time.time(), False, clients, freeze(status), freeze(kept), columns)


def check_late(table: ClientTable, recorded: Sequence[ReplyRow], report: RoundReport) -> IntArray:
    """Check a report that arrives after its round was closed and return the clients it names."""
    replies = {reply.client: reply for reply in recorded}
    clients = table.indices(report.clients)
    for c in clients.tolist():
        if c not in replies:
            raise InputError(
                f"The report for ticket {report.ticket} names client {table.name(c)!r}, which was not asked to train."
            )
        if replies[c].status != Status.MISSING or replies[c].late:
            raise DuplicateReportError(
                f"Ticket {report.ticket} is closed and client {table.name(c)!r} was already reported."
            )
    if not len(clients):
        raise DuplicateReportError(f"Ticket {report.ticket} is already closed.")
    return clients


def check_numbers(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Return metrics of the global model as plain floats; None stands for an unknown one."""
    if not isinstance(metrics, Mapping):
        raise input_error("Metrics of the model", "a mapping from names to numbers", metrics)
    clean: dict[str, float | None] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name.isprintable():
            raise InputError(f"A metric of the model must have a printable name. Got {short_repr(name)}.")
        number = value.item() if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0 else value
        try:
            if number is not None and not isinstance(number, numbers.Real):
                raise TypeError
            clean[name] = None if number is None else float(number)
        except (TypeError, OverflowError):
            raise InputError(
                f"The metric {name!r} of the model must be one number that a float can hold, or None. "
                f"Got {short_repr(value, 40)} ({type(value).__name__}).",
                hint="record several numbers under several names; a tensor's number is tensor.item()",
            ) from None
    return clean


def _column(signal: Signal, values: Any, count: int, earlier: Sequence[ReplyBlock]) -> FloatArray:
    """Return a metric as a new array, (count,), or (count, V) if the signal is a vector.

    For a vector, a single NaN stands for a whole row. A row of the wrong length becomes NaN, like any other wrong value
    of a client.
    """
    what = f"The metric '{signal}'"
    if signal.width is None:
        column = _numbers(what, values)
        if column.shape != (count,):
            raise InputError(f"{what} must have one number per reported client, {count}. Got {column.shape}.")
        return column
    listed = isinstance(values, (Sequence, np.ndarray)) and not isinstance(values, str)
    rows = [np.atleast_1d(_numbers(what, row)) for row in values] if listed and getattr(values, "ndim", 1) > 0 else None
    if rows is None or len(rows) != count or any(row.ndim != 1 for row in rows):
        got = short_repr(values) if rows is None else f"shapes {[row.shape for row in rows]}"
        raise InputError(f"{what} must have one row of numbers per reported client, {count}. Got {got}.")
    # One client that sends a row of another length must not invalidate those of all others: earlier reports of the
    # round decide, or the signal, or most rows.
    widths = Counter(len(row) for row in rows if np.isfinite(row).all())
    before = next((block.metrics[signal.name] for block in earlier if signal.name in block.metrics), None)
    width = signal.width if before is None else int(before.shape[1])
    if width == "classes":
        width = widths.most_common(1)[0][0] if widths else 1
    if widths and width not in widths:
        raise InputError(f"{what} must have rows of {width} numbers. Got rows of {', '.join(map(str, widths))}.")
    return np.array([row if len(row) == width else np.full(width, np.nan) for row in rows]).reshape(count, width)


def _numbers(what: str, values: Any) -> FloatArray:
    """Return reported values as a new array of floats."""
    allowed = "numbers, one per client"
    raw = array(values, what, allowed)
    if raw.dtype.kind in "cmM":
        raise input_error(what, allowed, values)
    try:
        return np.array(raw, np.float64)  # None becomes NaN
    except (TypeError, ValueError, OverflowError):
        raise input_error(what, allowed, values) from None
