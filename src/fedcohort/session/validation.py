"""All checks of what comes in: signals at the start, answers, cohorts, reports. Each refuses or returns."""

from __future__ import annotations

import numbers
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from itertools import chain
from typing import Any

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray, FloatArray, IntArray, freeze
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
from fedcohort.core.validate import array, boolean, instance, listing, refuse
from fedcohort.core.validate import numbers as numbers_of
from fedcohort.journal import ReplyBlock, ReplyRow

_STATUSES = frozenset(int(status) for status in Status)
_FEW = 1024  # below so many picks a Python set finds a repeated one faster than sorting does
MOST_WORK = 1000  # times the usual local steps


def as_selector(value: object, what: str = "'selector'") -> Selector[Any]:
    """Return a selector, given itself or by its name."""
    if isinstance(value, str):
        return SELECTORS.create(value)
    return instance(value, Selector, what, "a Selector or the name of one")  # type: ignore[type-abstract]


def as_shadows(value: object) -> dict[str, Selector[Any]]:
    """Return shadow selectors by name."""
    if not isinstance(value, Mapping):
        raise refuse("'shadows'", "a mapping from names to selectors", value)
    for name in value:
        if not isinstance(name, str) or not name or not name.isprintable():
            raise refuse("The name of a shadow selector", "a printable, non-empty string", name)
    return {name: as_selector(shadow, f"The shadow {name!r}") for name, shadow in value.items()}


def as_table(value: object) -> ClientTable:
    """Return a client table, given itself, the clients' names, or their number; then all have the same size."""
    if isinstance(value, ClientTable):
        return value
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        n = ClientTable(n=int(value)).n
        # Equal sizes, so that selectors that weigh by size work without any facts.
        return ClientTable(n=n, sizes=np.ones(n))
    try:
        named = ClientTable(names=value)  # type: ignore[arg-type]
        return ClientTable(names=named.names, sizes=np.ones(named.n))
    except InputError as error:
        if isinstance(value, (list, tuple)):
            raise
        raise refuse("'clients'", "a number of clients, a list of their names, or a ClientTable", value) from error


def as_signals(value: object) -> frozenset[Signal]:
    """Return signals, given themselves or by their names."""
    return frozenset(Signal.by_name(item) for item in listing(value, "'signals'", "signals"))


def as_request(value: object) -> RoundRequest:
    """Return a request, given itself or as a cohort size; None asks for everybody."""
    if isinstance(value, RoundRequest):
        return value
    if value is None or isinstance(value, (int, np.integer)):
        return RoundRequest(value)  # type: ignore[arg-type]
    raise refuse("A request", "a number of clients, None or a RoundRequest", value)


def answer_of(query: Query | None, table: ClientTable, given: Mapping[str, Any]) -> Answer | None:
    """Return the answer to a question from losses by name of the signal; None where nothing is asked.

    Parameters
    ----------
    query : Losses, Trial or None
    given : mapping of str to function, mapping or array
        A function from client names to numbers, numbers by client name, or the numbers of all clients.
    """
    known = {_signal_of(name): values for name, values in given.items()}
    if query is None:
        return None
    if isinstance(query, Trial):
        raise InputError(
            "The selector asks for a trial of cohorts, which has no short form.",
            hint="call session.query(request), answer it, and pass the Answer to session.ask(request, answer)",
        )
    names = table.names_of(query.clients)
    values: dict[Signal, Any] = {}
    for signal in sorted(query.signals & known.keys()):
        source = known[signal]
        if callable(source):
            values[signal] = source(names)
        elif isinstance(source, Mapping):
            values[signal] = [source.get(name, np.nan) for name in names]
        else:
            allowed = f"one number for each of the {table.n} clients, numbers by client name, or a function"
            everybody = numbers_of(source, f"'{signal}'", allowed)
            if everybody.shape != (table.n,):
                raise refuse(f"'{signal}'", allowed, source)
            values[signal] = everybody[query.clients]
    return Answer(query, values)


def report_of(cohort: Cohort, outcome: Mapping[str, Any]) -> RoundReport:
    """Return the report on a whole cohort, from what became of it by name.

    Values are arrays in the order of the cohort, or mappings from client names. A client that is in no mapping
    is missing.
    """
    status = outcome.get("status")
    kept = outcome.get("kept")
    given = {_signal_of(name): values for name, values in outcome.items() if name not in ("status", "kept")}
    by_client = [values for values in (status, kept, *given.values()) if isinstance(values, Mapping)]
    if not by_client:
        return RoundReport(cohort.ticket, cohort.clients, status=status, metrics=given, kept=kept)
    for client in chain.from_iterable(by_client):
        if client not in cohort.names:
            raise InputError(
                f"The client {short_repr(client)} is not in the cohort {', '.join(map(repr, cohort.names[:20]))}."
            )
    # A status may be given for some only: those that failed. So it does not say who reported.
    reporting = set().union(*(values for values in by_client if values is not status)) or set(cohort.names)
    metrics = {signal: _in_order(cohort, values, np.nan) for signal, values in given.items()}
    return RoundReport(
        cohort.ticket,
        cohort.clients,
        status=_status_of_each(cohort, status, reporting),
        metrics=metrics,
        kept=_in_order(cohort, kept, True),
    )


def _status_of_each(cohort: Cohort, status: Any, reporting: Set[str]) -> list[int]:
    """Return one status per client of the cohort: as given, else OK for those who report, MISSING for the others."""
    if status is not None and not isinstance(status, Mapping):
        given = dict(zip(cohort.names, listing(status, "'status'", "statuses"), strict=True))
        return [given[name] for name in cohort.names]
    usual = {name: int(Status.OK if name in reporting else Status.MISSING) for name in cohort.names}
    return [{**usual, **(status or {})}[name] for name in cohort.names]


def _in_order(cohort: Cohort, values: Any, default: Any) -> Any:
    """Return one value, or row, per client of the cohort; ``default`` for a client that a mapping leaves out."""
    return [values.get(name, default) for name in cohort.names] if isinstance(values, Mapping) else values


def _signal_of(keyword: str) -> Signal:
    """Return the signal that a keyword names, which has underscores where the signal has hyphens."""
    signal = Signal.by_name(keyword.replace("_", "-"))
    if not signal.is_metric:
        raise InputError(f"The signal '{signal}' is not a number to report after a round.", hint=signal.supplied_by)
    return signal


def check_size(size: int | None, n: int) -> int | None:
    """Refuse a cohort size that no cohort of ``n`` clients can have."""
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
        raise InputError(f"The cohort size must be a whole number of at least 1, or None. Got {short_repr(size)}.")
    if size > n:
        raise InputError(
            f"The cohort size must not exceed the federation's {n} clients. Got {size}.",
            hint="size=None asks for everybody available",
        )
    return int(size)


def check_signals(
    selector: Selector[Any], clients: ClientTable, signals: frozenset[Signal] | None, label: str = "selector"
) -> None:
    """Refuse a selector whose required signals the table or the host cannot supply.

    Parameters
    ----------
    signals : frozenset of Signal or None
        What the host supplies in reports and answers; None trusts it to supply what is required.
    label : str
        What to call the selector in the error.
    """
    for signal in sorted(selector.requires):
        supplied = signal in clients.signals if signal.known is Known.TABLE else signals is None or signal in signals
        if not supplied and signal is not Signal.STALENESS:  # which the session knows
            kind = "client table" if signal.known is Known.TABLE else "host"
            raise SignalError(
                f"The {label} {selector_name(selector)} requires the signal '{signal}' ({signal.meaning}), "
                f"which the {kind} does not supply.",
                hint=signal.supplied_by,
            )


def check_one_at_a_time(asynchronous: bool, selector: Selector[Any]) -> None:
    """Refuse a selector for an asynchronous session that cannot choose one client while others are at work."""
    if asynchronous and not selector.one_at_a_time:
        able = ", ".join(name for name in SELECTORS.names() if getattr(SELECTORS.get(name), "one_at_a_time", False))
        raise InputError(
            f"The selector {selector_name(selector)} cannot choose one client at a time, which an asynchronous session "
            "needs.",
            hint=f"selectors that can: {able}",
        )


def check_cohort(selector: Selector[Any], cohort: Cohort, slate: Slate) -> None:
    """Refuse a cohort that breaks the protocol."""
    name = selector_name(selector)
    _check_picks(name, cohort, slate)
    _check_amounts(name, cohort)
    if cohort.stop is not None and not isinstance(cohort.stop, str):
        raise SelectorError(f"The selector {name} must say in words why it stops. Got {short_repr(cohort.stop)}.")
    for part, values in {"score": cohort.score, **cohort.parts}.items():
        if values is not None and (cohort.candidates is None or len(values) != len(cohort.candidates)):
            raise SelectorError(
                f"The selector {name} must give '{part}' for each of the cohort's candidates.",
                hint="name the candidates: Cohort(..., candidates=slate.candidates, score=...)",
            )


def _check_picks(name: str, cohort: Cohort, slate: Slate) -> None:
    """Each pick is a candidate, none is there twice, and there are no more than were asked for."""
    picked = cohort.clients
    if picked.ndim != 1:
        raise SelectorError(f"The selector {name} must return a list of clients. Got shape {picked.shape}.")
    if len(picked) > slate.size:
        raise SelectorError(f"The selector {name} picked {len(picked)} clients where {slate.size} were asked for.")
    if len(set(picked.tolist()) if len(picked) < _FEW else np.unique(picked)) != len(picked):
        raise SelectorError(f"The selector {name} picked a client more than once: {picked.tolist()}.")
    # Candidates ascend; a lookup in a set of a million would take longer than most selectors.
    at = np.searchsorted(slate.candidates, picked)
    inside = at < len(slate.candidates)
    if not inside.all() or not np.array_equal(slate.candidates[at], picked):
        raise SelectorError(f"The selector {name} picked clients that are not candidates: {picked.tolist()}.")
    if not len(picked) and cohort.stop is None:
        raise SelectorError(
            f"The selector {name} picked nobody out of {len(slate.candidates)} and gave no stop reason."
        )


def _check_amounts(name: str, cohort: Cohort) -> None:
    """Weights and work are finite numbers of at least 0, one for each pick."""
    picked = cohort.clients
    for field in ("weights", "work"):
        values = getattr(cohort, field)
        if values is not None and (values.shape != picked.shape or not np.isfinite(values).all() or (values < 0).any()):
            raise SelectorError(
                f"The selector {name} must give one finite '{field}' of at least 0 per picked client. Got {values!r}."
            )
    if cohort.work is not None and (cohort.work > MOST_WORK).any():
        raise SelectorError(
            f"The selector {name} must ask for at most {MOST_WORK:,} times the usual work. Got {cohort.work.max():g}."
        )


def check_query(selector: Selector[Any], query: object, n: int) -> None:
    """Refuse a question that no host could answer, or that asks about clients there are not."""
    name = selector_name(selector)
    asked: tuple[IntArray, ...]
    match query:
        case None:
            return
        case Losses():
            asked = (query.clients,)
        case Trial():
            asked = query.cohorts
        case _:
            raise SelectorError(
                f"The selector {name} must ask with Losses or Trial, or nothing. Got {short_repr(query)}."
            )
    if not asked:
        raise SelectorError(f"The selector {name} asks to try no cohort at all.")
    for clients in asked:
        if len(clients) and not 0 <= clients.min() <= clients.max() < n:
            raise SelectorError(
                f"The selector {name} asks about clients that are not in [0, {n}): {short_repr(clients.tolist())}."
            )
        if len(np.unique(clients)) != len(clients):
            raise SelectorError(
                f"The selector {name} asks about a client more than once: {short_repr(clients.tolist())}."
            )


def check_answer(selector: Selector[Any], n: int, query: Query | None, answer: Answer | None) -> None:
    """Refuse an answer that does not belong to the question the selector asked."""
    if query is None:
        if answer is not None:
            raise InputError("The selector asked nothing in this round, but an answer was given.")
        return
    if answer is None:
        raise InputError(
            f"The selector {selector_name(selector)} asks a question before it chooses; the answer is missing.",
            hint="session.ask(size, loss=...) takes losses by client or a function that measures them; or call "
            "session.query(request) and pass the Answer to session.ask(request, answer)",
        )
    if not _is_same_question(query, answer.query):
        raise InputError("The answer belongs to a different question than this request's.")
    if isinstance(query, Trial) and answer[Trial.answered_with].shape != (len(query.cohorts), n):
        raise InputError(
            f"The answer to a Trial must give a loss change for every client, shape {(len(query.cohorts), n)}. "
            f"Got {answer[Trial.answered_with].shape}."
        )


def _is_same_question(asked: Query, answered: Query) -> bool:
    match asked, answered:
        case Losses(), Losses():
            return np.array_equal(asked.clients, answered.clients) and asked.signals == answered.signals
        case Trial(), Trial():
            same_number = len(asked.cohorts) == len(answered.cohorts)
            return same_number and all(map(np.array_equal, asked.cohorts, answered.cohorts))
    return False


def check_report(
    selector: Selector[Any], table: ClientTable, cohort: Cohort, earlier: Sequence[ReplyBlock], report: RoundReport
) -> ReplyBlock:
    """Check a report and return it by columns.

    ``earlier`` are the partial reports about the same cohort.
    """
    boolean(report.complete, "A report's 'complete'")
    whole = report.clients is cohort.clients  # as most hosts report: nothing can be named twice or wrongly
    clients = cohort.clients if whole else table.indices(report.clients)
    if earlier or not whole:
        _check_reported(table, cohort, earlier, report.ticket, clients)
    count = len(clients)
    status = _statuses(report, count)
    kept = _kept_mask(report, count)
    if not isinstance(report.metrics, Mapping):
        raise refuse("A report's metrics", "a mapping from signals to numbers", report.metrics)
    columns: dict[str, FloatArray] = {}
    for name, values in report.metrics.items():
        signal = Signal.by_name(name)
        if not signal.reported:
            raise InputError(f"The signal '{signal}' is not reported after a round; it is known {signal.known.value}.")
        column = _column(signal, values, count, earlier)
        if not np.isfinite(column).all():
            # A client with NaN or infinity is INVALID, and no number of it, not even a finite one, reaches a selector.
            wrong = ~np.isfinite(column).reshape(count, -1).all(axis=1)
            column[wrong] = np.nan
            status[(status == Status.OK) & wrong] = Status.INVALID
        columns[signal.value] = freeze(column)
    ok = status == Status.OK
    if ok.any():  # of a round in which everybody failed there is nothing to measure
        _check_required(selector, report.ticket, columns)
    kept &= ok
    return ReplyBlock(report.ticket, time.time(), False, clients, freeze(status), freeze(kept), columns)


def _check_required(selector: Selector[Any], ticket: int, columns: Mapping[str, FloatArray]) -> None:
    """Refuse a report that lacks a signal the selector requires."""
    for signal in sorted(s for s in selector.requires if s.is_metric):
        if signal.value not in columns:
            raise SignalError(
                f"The report for ticket {ticket} lacks the signal '{signal}' ({signal.meaning}), which the selector "
                f"{selector_name(selector)} requires.",
                hint=signal.supplied_by,
            )


def check_late(table: ClientTable, known: Sequence[ReplyRow], report: RoundReport) -> IntArray:
    """Check a report that comes after its round was closed and return the clients it names."""
    replies = {reply.client: reply for reply in known}
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
    """Return numbers about the global model as the journal keeps them; None stands for one that is not known."""
    if not isinstance(metrics, Mapping):
        raise refuse("Numbers about the model", "a mapping from names to numbers", metrics)
    found: dict[str, float | None] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name.isprintable():
            raise InputError(f"What is recorded about the model must have a printable name. Got {short_repr(name)}.")
        found[name] = None if value is None else _one_number(name, value)
    return found


def _one_number(name: str, value: Any) -> float:
    number = value.item() if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0 else value
    if not isinstance(number, numbers.Real):
        raise InputError(
            f"The metric {name!r} of the model must be one number or None. Got {short_repr(value)} "
            f"({type(value).__name__}).",
            hint="record several numbers under several names; a tensor's number is tensor.item()",
        )
    try:
        return float(number)
    except OverflowError as error:
        raise InputError(f"The metric {name!r} of the model is too large a number: {str(value)[:40]}...") from error


def _check_reported(
    table: ClientTable, cohort: Cohort, earlier: Sequence[ReplyBlock], ticket: int, clients: IntArray
) -> None:
    """Refuse clients that were not asked or that are reported twice."""
    asked = set(cohort.clients.tolist())
    seen = {client for block in earlier for client in block.clients.tolist()}
    for c in clients.tolist():
        if c not in asked:
            raise InputError(
                f"The report for ticket {ticket} names client {table.name(c)!r}, which was not asked "
                f"to train. The cohort is {', '.join(cohort.names[:20])}{', ...' if cohort.size > 20 else ''}."
            )
        if c in seen:
            raise DuplicateReportError(f"Client {table.name(c)!r} was already reported for ticket {ticket}.")
        seen.add(c)


def _column(signal: Signal, values: Any, count: int, earlier: Sequence[ReplyBlock]) -> FloatArray:
    """Return a metric as a new array, (count,) or (count, V) where the signal is a vector.

    A row of another length than the rest becomes NaN, like anything else a client gets wrong; NaN alone stands for a
    whole row.
    """
    if signal.width is None:
        column = _numbers(signal, values)
        if column.shape != (count,):
            raise InputError(
                f"The metric '{signal}' must have one number per reported client, {count}. Got {column.shape}."
            )
        return column
    return _row_column(signal, values, count, earlier)


def _row_column(signal: Signal, values: Any, count: int, earlier: Sequence[ReplyBlock]) -> FloatArray:
    """Return a metric of rows, (count, V)."""
    listed = isinstance(values, (Sequence, np.ndarray)) and not isinstance(values, str)
    if not listed or getattr(values, "ndim", 1) == 0:
        raise InputError(f"The metric '{signal}' must have one row of numbers per client. Got {short_repr(values)}.")
    rows = [np.atleast_1d(_numbers(signal, row)) for row in values]
    if len(rows) != count or any(row.ndim != 1 for row in rows):
        raise InputError(
            f"The metric '{signal}' must have one row of numbers per reported client, {count}. "
            f"Got shapes {[row.shape for row in rows]}."
        )
    width = _row_width(signal, rows, earlier)
    column = np.full((count, width), np.nan)
    for at, row in zip(column, rows, strict=True):
        if len(row) == width:
            at[:] = row
    return column


def _row_width(signal: Signal, rows: Sequence[FloatArray], earlier: Sequence[ReplyBlock]) -> int:
    """Return how long a vector is: as in ``earlier`` reports of the round, as the signal says, or as most are."""
    widths = Counter(len(row) for row in rows if np.isfinite(row).all())  # of those that could be sound
    known = next((block.metrics[signal.value] for block in earlier if signal.value in block.metrics), None)
    if known is not None:
        width = int(known.shape[1])
    elif isinstance(signal.width, int):
        width = signal.width
    else:
        width = widths.most_common(1)[0][0] if widths else 1
    if widths and width not in widths:
        raise InputError(
            f"The metric '{signal}' must have rows of {width} numbers. Got rows of {', '.join(map(str, widths))}."
        )
    return width


def _numbers(signal: Signal, values: Any) -> FloatArray:
    """Return a new array of what somebody reported, if it is numbers at all."""
    what, allowed = f"The metric '{signal}'", "numbers, one per client"
    found = array(values, what, allowed)
    if found.dtype.kind in "cmM":
        raise refuse(what, allowed, values)
    try:
        return np.array(found, np.float64)  # None becomes NaN
    except (TypeError, ValueError, OverflowError):
        raise refuse(what, allowed, values) from None


def _kept_mask(report: RoundReport, count: int) -> BoolArray:
    """Return a new (count,) array of whether each model was kept."""
    if report.kept is None:
        return np.ones(count, np.bool_)
    allowed = f"one bool per reported client, {count}"
    kept = array(report.kept, "'kept'", allowed).copy()
    if kept.shape != (count,) or kept.dtype != np.bool_:
        raise refuse("'kept'", allowed, report.kept)
    return kept


def _statuses(report: RoundReport, count: int) -> AnyArray:
    """Return a new (count,) array of statuses."""
    if report.status is None:
        return np.zeros(count, np.int8)
    given = array(report.status, "'status'", "one Status per reported client")
    status = given.astype(np.int64) if given.dtype.kind in "iu" else np.empty(0, np.int64)
    if status.shape != (count,) or not _STATUSES.issuperset(status.tolist()):
        raise InputError(
            f"'status' must be one of {', '.join(f'{int(s)} ({s.name})' for s in Status)} for each of the "
            f"{count} reported clients. Got {short_repr(report.status)}."
        )
    return status.astype(np.int8)
