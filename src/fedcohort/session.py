"""A session owns everything that changes: selector state, round counter, tickets, membership, journal.

Hosts talk to a session; a session talks to its selector. It deals with the edges once, for all selectors: fewer
candidates than asked for, nobody available, clients that join, leave and return, failed, late, partial, duplicate
and unknown reports, NaN. An error changes nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort import rng as streams
from fedcohort.arrays import AnyArray, BoolArray, IntArray, sealed
from fedcohort.checks import check_answer, check_cohort, check_report, check_signals
from fedcohort.clients import ClientTable
from fedcohort.coverage import Coverage, Guard
from fedcohort.errors import DuplicateReportError, InputError, TicketError
from fedcohort.journal import CohortRow, Explanation, Journal, ReplyBlock, explain_round, is_blank
from fedcohort.journal.codec import sealed_state
from fedcohort.journal.explain import recorded_scores
from fedcohort.journal.store import Commit
from fedcohort.protocol import Answer, Cohort, Query, RoundReport, RoundRequest, Selector, Slate, Status
from fedcohort.signals import REPORT_SIGNALS, Signal
from fedcohort.specs import describe, rebuilt, selector_name
from fedcohort.views import in_cohort_order, outcome_for, what_was_paid_for

log = logging.getLogger(__name__)
_NOBODY = np.empty(0, np.int64)


@dataclass
class _Open:
    """A cohort that has not been told completely."""

    cohort: Cohort
    told: list[ReplyBlock]


@dataclass
class _Prepared:
    """A request worked out, kept between ``query`` and ``ask``."""

    request: RoundRequest
    slate: Slate | None
    query: Query | None


class Session:
    """Run one selector over one federation.

    Parameters
    ----------
    selector : Selector
    clients : ClientTable
    seed : int
        Every random number of the session follows from it.
    signals : iterable of Signal, optional
        What the host can supply in reports and answers. Default: whatever the selector requires; a report that lacks
        it is refused when it comes.
    journal : path, optional
        Where to keep the record. Default: in memory, so nothing can be resumed.
    shadows : mapping of name to Selector, optional
        Selectors that see the same requests and reports; what they would have picked is recorded.
    commit : "always" or "manual"
        Whether each event is durable when its call returns, or only after :meth:`commit`.

    Examples
    --------
    >>> from fedcohort.selectors import Uniform
    >>> session = Session(Uniform(), ClientTable(names=["anna", "ben", "cem", "dora"]), seed=1)
    >>> cohort = session.ask(RoundRequest(size=2))
    >>> len(cohort.names), cohort.round
    (2, 0)
    >>> session.tell(RoundReport(cohort.ticket, cohort.clients))
    >>> session.round
    1
    """

    def __init__(
        self,
        selector: Selector[Any],
        clients: ClientTable,
        *,
        seed: int = 0,
        signals: Iterable[Signal] | None = None,
        journal: str | Path | None = None,
        shadows: Mapping[str, Selector[Any]] | None = None,
        commit: Commit = "always",
    ) -> None:
        if not isinstance(seed, (int, np.integer)) or seed < 0:
            raise InputError(f"The seed must be a whole number, not negative. Got {seed!r}.")
        if "" in (shadows or {}):
            raise InputError("A shadow selector needs a name that is not empty.")
        self._seed = int(seed)
        self._signals = None if signals is None else frozenset(signals)
        selector, self._shadows = _adapted(selector, shadows or {}, clients, self._signals)
        self._selector = selector
        check_signals(selector, clients, self._signals)
        for name, shadow in self._shadows.items():
            check_signals(shadow, clients, None, who=f"shadow {name!r}")
        self._set_table(clients, np.ones(clients.n, np.bool_))
        start = streams.stream(self._seed, streams.INITIALISATION, 0)
        self._states: dict[str, Any] = {"": sealed_state(selector.init(self._granted[""], start))}
        for name, shadow in self._shadows.items():
            start = streams.stream(self._seed, f"{streams.INITIALISATION}:{name}", 0)
            self._states[name] = sealed_state(shadow.init(self._granted[name], start))
        self._round = 0
        self._ticket = 0
        self._open: dict[int, _Open] = {}
        self._prepared: _Prepared | None = None
        self._host_state: Any = None
        meta = {
            "seed": self._seed,
            "selector": describe(selector),
            "shadows": {name: describe(shadow) for name, shadow in self._shadows.items()},
            "signals": None if self._signals is None else sorted(self._signals),
            "host": None,
        }
        self._journal = Journal.create(journal, meta, commit)
        self._guard = Guard(selector_name(selector), clients.n, quiet=commit == "manual")
        self._journal.set_table(clients, self._active)
        for name, state in self._states.items():
            self._journal.save_state(name, state)
        self._journal.created()

    # -- opening again ----------------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        path: str | Path,
        selector: Selector[Any] | None = None,
        *,
        shadows: Mapping[str, Selector[Any]] | None = None,
        commit: Commit = "always",
    ) -> Session:
        """Continue a session from its journal, exactly where it stopped.

        Parameters
        ----------
        path : path
            The journal.
        selector : Selector, optional
            Only needed for a selector that is not registered; it must be the one the journal was written with.
        shadows : mapping, optional
            Likewise for shadow selectors.
        commit : "always" or "manual"
        """
        journal = Journal.open(path, commit)
        try:
            self = cls._opened(journal, selector, dict(shadows or {}))
            self._guard = Guard(selector_name(self._selector), self._table.n, journal.picks(), quiet=commit == "manual")
            return self
        except BaseException:
            journal.close()
            raise

    @classmethod
    def _opened(cls, journal: Journal, selector: Selector[Any] | None, shadows: dict[str, Selector[Any]]) -> Session:
        meta = journal.meta()
        self = object.__new__(cls)
        self._journal = journal
        self._seed = int(meta["seed"])
        self._signals = None if meta["signals"] is None else frozenset(Signal(s) for s in meta["signals"])
        table, active = journal.table()
        if selector is not None:
            selector, shadows = _adapted(selector, shadows, table, self._signals)
        self._selector = rebuilt(meta["selector"], selector, journal.path)
        self._shadows = {name: rebuilt(spec, shadows.get(name), journal.path) for name, spec in meta["shadows"].items()}
        self._set_table(table, active)
        self._states = {}
        for name, who in {"": self._selector, **self._shadows}.items():
            fresh = who.init(self._granted[name], streams.stream(self._seed, streams.INITIALISATION, 0))
            self._states[name] = journal.resume_state(name, type(fresh))
        last_round, last_ticket = journal.last()
        self._round = last_round + 1
        self._ticket = last_ticket + 1
        self._open = {}
        for row in journal.cohorts(pending=True):
            self._open[row.ticket] = _Open(self._cohort_from(row), journal.reply_blocks(row.ticket))
        self._prepared = None
        self._host_state = meta["host"]
        return self

    @classmethod
    def open_or_create(
        cls,
        path: str | Path,
        selector: Selector[Any],
        clients: ClientTable,
        *,
        seed: int = 0,
        signals: Iterable[Signal] | None = None,
        shadows: Mapping[str, Selector[Any]] | None = None,
        commit: Commit = "always",
    ) -> Session:
        """Continue the session at ``path`` or, when there is none, start it."""
        if is_blank(path):
            return cls(selector, clients, seed=seed, signals=signals, journal=path, shadows=shadows, commit=commit)
        return cls.open(path, selector, shadows=shadows, commit=commit)

    def _cohort_from(self, row: CohortRow) -> Cohort:
        return Cohort(
            clients=row.clients,
            weights=row.weights,
            work=row.work,
            notes=row.notes,
            stop=row.stop,
            round=row.round,
            ticket=row.ticket,
            names=self._table.names_of(row.clients),
        )

    def close(self) -> None:
        """Close the journal. In manual mode what was not committed is dropped."""
        self._journal.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def commit(self) -> None:
        """With ``commit="manual"``, make everything so far durable."""
        self._journal.commit()

    # -- what a host may look at ---------------------------------------------------------------------------------------

    @property
    def selector(self) -> Selector[Any]:
        """The selector of this session."""
        return self._selector

    @property
    def requires(self) -> frozenset[Signal]:
        """The signals the host must put into reports: the selector's own, not the shadows'."""
        return self._selector.requires & REPORT_SIGNALS

    @property
    def state(self) -> Any:
        """The selector's current state, read-only."""
        return self._states[""]

    @property
    def table(self) -> ClientTable:
        """The federation."""
        return self._table

    @property
    def active(self) -> BoolArray:
        """(N,) who is a member now."""
        return self._active

    @property
    def round(self) -> int:
        """The number of the next round, counted from 0."""
        return self._round

    @property
    def seed(self) -> int:
        """The seed all random streams derive from."""
        return self._seed

    @property
    def pending(self) -> tuple[Cohort, ...]:
        """Cohorts asked for but not yet told, oldest first; after a crash the host trains or closes them."""
        return tuple(item.cohort for item in self._open.values())

    @property
    def host_state(self) -> Any:
        """What the host stored with its last ``tell``."""
        return self._host_state

    @property
    def journal(self) -> Journal:
        """The journal, for reading."""
        return self._journal

    def coverage(self) -> Coverage:
        """Return how many clients carry the training; its ``warning`` says when it is too few. Changes nothing."""
        return self._guard.coverage(self._active)

    # -- membership ---------------------------------------------------------------------------------------------

    def _set_table(self, table: ClientTable, active: BoolArray) -> None:
        self._table = table
        self._active = sealed(np.array(active, np.bool_))
        self._all_active = bool(self._active.all())
        self._recent: tuple[Any, BoolArray, IntArray] = (None, self._active, _NOBODY)  # available, members, candidates
        self._granted = {
            name: table.granting(selector.requires) for name, selector in {"": self._selector, **self._shadows}.items()
        }

    def join(self, clients: ClientTable) -> None:
        """Add clients to the federation; they are candidates from the next request on."""
        if clients.has_names:
            known = [name for name in clients.names if self._is_known(name)]
            if known:
                raise InputError(
                    f"The client {known[0]!r} is in the federation already.",
                    hint="a client that left comes back with session.rejoin(names)",
                )
        table = self._table.extended(clients)
        before = self._table.n
        old_table, old_active = self._table, self._active
        active = np.concatenate([self._active, np.ones(clients.n, np.bool_)])
        self._set_table(table, active)
        states = {}
        try:
            for name, selector in {"": self._selector, **self._shadows}.items():
                generator = streams.stream(self._seed, f"{streams.INITIALISATION}:{name}", before)
                states[name] = sealed_state(selector.grow(self._states[name], self._granted[name], generator))
            with self._journal.event():
                self._journal.set_table(table, active)
                for name, state in states.items():
                    self._journal.save_state(name, state)
                self._journal.add_event("join", {"first": before, "count": clients.n})
        except BaseException:
            self._set_table(old_table, old_active)
            raise
        self._states = states
        self._guard.grow(table.n)
        self._prepared = None

    def _is_known(self, name: str) -> bool:
        try:
            self._table.index(name)
        except KeyError:
            return False
        return True

    def leave(self, clients: Sequence[str] | Sequence[int] | IntArray) -> None:
        """Take clients out of the federation; what is known about them is kept in case they return."""
        self._set_membership(clients, False, "leave")

    def rejoin(self, clients: Sequence[str] | Sequence[int] | IntArray) -> None:
        """Bring back clients that left, with all that was learnt about them."""
        self._set_membership(clients, True, "rejoin")

    def _set_membership(self, clients: Sequence[str] | Sequence[int] | IntArray, member: bool, kind: str) -> None:
        who = self._table.indices(clients)
        active = self._active.copy()
        active[who] = member
        with self._journal.event():
            self._journal.set_table(self._table, active)
            self._journal.add_event(kind, {"clients": who.tolist()})
        self._set_table(self._table, active)
        self._prepared = None

    # -- asking -------------------------------------------------------------------------------------------------------

    def _candidates(self, request: RoundRequest) -> IntArray:
        available = request.available
        n = self._table.n
        if available is None:
            if self._all_active and not self._open:
                return sealed(np.arange(n))
            mask = self._active.copy()
        elif self._recent[0] is available and self._recent[1] is self._active and not self._open:
            return self._recent[2]
        else:
            given = np.asarray(available)
            if given.dtype == np.bool_:
                if given.shape != (n,):
                    raise InputError(
                        f"'available' as a mask must have one entry per client, shape ({n},). Got {given.shape}."
                    )
                mask = given & self._active
            else:
                mask = np.zeros(n, np.bool_)
                mask[self._table.indices(available)] = True
                mask &= self._active
        for item in self._open.values():
            mask[item.cohort.clients] = False
        candidates = sealed(np.flatnonzero(mask))
        if (
            isinstance(available, np.ndarray)
            and not self._open
            and available.base is None
            and not available.flags.writeable
        ):
            self._recent = (available, self._active, candidates)  # a host may pass the same array round after round
        return candidates

    def _prepare(self, request: RoundRequest) -> _Prepared:
        if self._prepared is not None and self._prepared.request is request:
            return self._prepared
        size = request.size
        if size is not None:
            if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
                raise InputError(f"The cohort size must be a whole number of at least 1, or None. Got {size!r}.")
            if size > self._table.n:
                raise InputError(
                    f"The cohort size must not exceed the federation's {self._table.n} clients. Got {size}.",
                    hint="size=None asks for everybody available",
                )
        candidates = self._candidates(request)
        slate = None
        query = None
        if len(candidates):
            slate = self._slate("", size, candidates)
            if type(self._selector).query is not Selector.query:  # most ask nothing, and a stream has its price
                query = self._selector.query(self._states[""], slate, self._stream(streams.QUERY, ""))
        self._prepared = _Prepared(request, slate, query)
        return self._prepared

    def _stream(self, kind: str, name: str) -> np.random.Generator:
        return streams.stream(self._seed, f"{kind}:{name}" if name else kind, self._round)

    def _slate(self, name: str, size: int | None, candidates: IntArray) -> Slate:
        selector = self._selector if name == "" else self._shadows[name]
        asked = len(candidates) if size is None else min(int(size), len(candidates))
        wanted = selector.size(self._states[name], asked, len(candidates))
        return Slate(self._round, max(1, min(int(wanted), len(candidates))), candidates, self._granted[name])

    def query(self, request: RoundRequest) -> Query | None:
        """Return the question the selector wants answered before it chooses, or None. Changes nothing."""
        self._prepared = None
        return self._prepare(request).query

    def ask(self, request: RoundRequest, answer: Answer | None = None) -> Cohort:
        """Return the cohort of the next round; it is on record when this returns.

        Parameters
        ----------
        request : RoundRequest
        answer : Answer, optional
            The answer to what :meth:`query` returned for the same request.
        """
        prepared = self._prepare(request)
        check_answer(self._selector, self._table.n, prepared.query, answer)
        slate = prepared.slate
        states = dict(self._states)
        shadow_rows: list[tuple[str, IntArray, dict[str, AnyArray] | None, str | None]] = []
        if slate is None:
            cohort = Cohort(_NOBODY, notes={"reason": "nobody is available"})
            candidates = _NOBODY
        else:
            candidates = slate.candidates
            cohort, states[""] = self._selector.select(
                self._states[""], slate, answer, self._stream(streams.SELECTION, "")
            )
            check_cohort(self._selector, cohort, slate)
            sealed_state(states[""])
            if request.size is not None and len(candidates) < request.size:
                short = {"reason": f"{request.size} asked for, {len(candidates)} available"}
                cohort = dataclasses.replace(cohort, notes={**cohort.notes, **short})
            for name in self._shadows:
                states[name], shadow_row = self._shadow(name, request, candidates, answer)
                shadow_rows.append(shadow_row)
        cohort = dataclasses.replace(
            cohort,
            round=self._round,
            ticket=self._ticket,
            names=self._table.names_of(cohort.clients),
        )
        now = time.time()
        row = CohortRow(
            ticket=cohort.ticket,
            round=cohort.round,
            asked_at=now,
            told_at=now if cohort.size == 0 else None,
            wanted=None if request.size is None else int(request.size),
            n_candidates=len(candidates),
            clients=cohort.clients,
            weights=cohort.weights,
            work=cohort.work,
            notes=cohort.notes,
            stop=cohort.stop,
        )
        with self._journal.event():
            everyone = len(candidates) == self._table.n
            self._journal.add_cohort(row, None if everyone else candidates, self._table.n)
            scores = recorded_scores(cohort)
            if scores is not None:  # whom it picked is in the cohort's own row
                self._journal.add_scores(cohort.ticket, "", cohort.clients, scores, None)
            for name, picked, arrays, note in shadow_rows:
                self._journal.add_scores(cohort.ticket, name, picked, arrays, note)
            for name, state in states.items():
                self._journal.save_state(name, state)
        self._states = states
        self._guard.add(cohort.round, cohort.clients, self._active)
        if cohort.size:
            self._open[cohort.ticket] = _Open(cohort, [])
        self._round += 1
        self._ticket += 1
        self._prepared = None
        return cohort

    def _shadow(
        self, name: str, request: RoundRequest, candidates: IntArray, answer: Answer | None
    ) -> tuple[Any, tuple[str, IntArray, dict[str, AnyArray] | None, str | None]]:
        """Let a shadow choose. Whatever goes wrong there is noted and never disturbs the session."""
        shadow, state = self._shadows[name], self._states[name]
        try:
            slate = self._slate(name, request.size, candidates)
            question = shadow.query(state, slate, self._stream(streams.QUERY, name))
            known = None if question is None else what_was_paid_for(question, answer, self._table.n)
            cohort, state = shadow.select(state, slate, known, self._stream(streams.SELECTION, name))
            check_cohort(shadow, cohort, slate)
            sealed_state(state)
        except Exception as error:  # a shadow is somebody else's code on facts it did not choose
            log.warning("the shadow selector %r failed in round %d: %s", name, self._round, error)
            return self._states[name], (name, _NOBODY, None, f"failed: {error}")
        return state, (name, cohort.clients, recorded_scores(cohort), None)

    # -- telling ------------------------------------------------------------------------------------------------------

    def tell(self, report: RoundReport, *, host: Any = None) -> None:
        """Take a report. The selector learns from it once the round is complete.

        Parameters
        ----------
        report : RoundReport
        host : JSON-like, optional
            Anything the host wants stored in the same transaction, for example the name of a model checkpoint.
        """
        item = self._open.get(report.ticket)
        if item is None:
            self._tell_late(report)
            return
        cohort = item.cohort
        news = [check_report(self._selector, self._table, cohort, item.told, report)]
        states = self._states
        if report.complete:
            if sum(len(block.clients) for block in (*item.told, *news)) < cohort.size:
                named = np.concatenate([block.clients for block in (*item.told, *news)])
                missing = cohort.clients[~np.isin(cohort.clients, named)]
                news.append(ReplyBlock.alike(report.ticket, time.time(), missing, Status.MISSING))
            whole = in_cohort_order(cohort, [*item.told, *news])
            states = {
                name: sealed_state(
                    selector.update(self._states[name], outcome_for(selector, self._granted[name], cohort, whole))
                )
                for name, selector in {"": self._selector, **self._shadows}.items()
            }
        with self._journal.event():
            for block in news:
                if len(block.clients):
                    self._journal.add_replies(block)
            if report.complete:
                self._journal.close_cohort(report.ticket)
                for name, state in states.items():
                    self._journal.save_state(name, state)
            if host is not None:
                self._journal.set_meta("host", host)
        if host is not None:
            self._host_state = host
        self._states = states
        if report.complete:
            del self._open[report.ticket]
            self._prepared = None
        else:
            item.told += news

    def _tell_late(self, report: RoundReport) -> None:
        """Record replies that come after their round was closed; they change no state."""
        if not 0 <= report.ticket < self._ticket:
            raise TicketError(
                f"There is no ticket {report.ticket}; this session has given out 0 to {self._ticket - 1}."
            )
        known = {reply.client: reply for reply in self._journal.replies(report.ticket)}
        clients = self._table.indices(report.clients)
        for c in clients.tolist():
            if c not in known:
                raise InputError(
                    f"The report for ticket {report.ticket} names client {self._table.name(c)!r}, which was not asked "
                    "to train."
                )
            if known[c].status != Status.MISSING or known[c].late:
                raise DuplicateReportError(
                    f"Ticket {report.ticket} is closed and client {self._table.name(c)!r} was reported already."
                )
        if not len(clients):
            raise DuplicateReportError(f"Ticket {report.ticket} is closed already.")
        with self._journal.event():
            self._journal.add_replies(ReplyBlock.alike(report.ticket, time.time(), clients, Status.LATE, late=True))

    def record(self, round_: int, metrics: Mapping[str, float | None]) -> None:
        """Record numbers about the global model after ``round_``, for reports and the dashboard."""
        if not 0 <= round_ < self._round:
            raise InputError(f"There is no round {round_} to record numbers for; rounds so far: {self._round}.")
        with self._journal.event():
            self._journal.add_metrics(round_, metrics)

    def note(self, kind: str, body: Mapping[str, Any]) -> None:
        """Put something of the host's own on record, for example why clients failed; changes no state."""
        with self._journal.event():
            self._journal.add_event(kind, body)

    def explain(self, round_: int, client: int | str | None = None) -> Explanation:
        """Return why ``client`` was picked in ``round_`` or not; without a client, the whole round."""
        return explain_round(self._journal, round_, client)


def _adapted(
    selector: Selector[Any],
    shadows: Mapping[str, Selector[Any]],
    clients: ClientTable,
    signals: frozenset[Signal] | None,
) -> tuple[Selector[Any], dict[str, Selector[Any]]]:
    """Return selectors as they work with what is supplied; shadows are shown only what the selector itself reads."""
    selector = selector.adapted(clients.signals | (signals or frozenset()))
    seen = clients.signals | selector.requires
    return selector, {name: shadow.adapted(seen) for name, shadow in shadows.items()}
