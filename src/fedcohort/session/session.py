"""A session owns everything that changes: selector state, round counter, tickets, membership, journal.

Hosts talk to a session; a session talks to its selector. It deals with the edges once, for all selectors: fewer
candidates than asked for, nobody available, clients that join, leave and return, failed, late, partial, duplicate
and unknown reports, NaN. An error changes nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.core import rng as streams
from fedcohort.core.arrays import IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError, TicketError
from fedcohort.core.guard import guarded
from fedcohort.core.protocol import Answer, Cohort, Query, RoundReport, RoundRequest, Selector, Slate, Status
from fedcohort.core.selector_spec import describe, rebuild_selector, selector_name
from fedcohort.core.signals import Signal
from fedcohort.journal import CohortRow, Journal, ReplyBlock, is_blank
from fedcohort.journal.chain import new_nonce
from fedcohort.journal.codec import pack_many, sealed_state
from fedcohort.journal.database import Commit
from fedcohort.journal.events import ABANDONED, CHANGED, SELECTOR
from fedcohort.journal.place import place
from fedcohort.journal.savepoint import Position, rewind
from fedcohort.journal.signing import Signer
from fedcohort.session import participation, resume_check
from fedcohort.session import shadows as watchers
from fedcohort.session.coverage import Guard
from fedcohort.session.explain import Explanation, explain_round, recorded_scores
from fedcohort.session.members import Membership
from fedcohort.session.outcomes import in_cohort_order
from fedcohort.session.rules import Referee, Rules, Verdict
from fedcohort.session.standing import OWN_EVENTS, Standing
from fedcohort.session.validation import (
    check_answer,
    check_cohort,
    check_late,
    check_numbers,
    check_query,
    check_report,
    check_signals,
)

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
    verdict: Verdict | None


@guarded(methods=True, plugins=("__init__", "open", "open_or_create", "verdict", "query", "ask", "tell", "abandon"))
class Session(Standing):
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
    rules : Rules, optional
        What every cohort must meet, whatever the selector.
    commit : "always" or "manual"
        Whether each event is durable when its call returns, or only after :meth:`commit`.
    audit : bool
        Whether to chain the record by digests and to keep answers, for ``fedcohort audit``.
    sign : path, optional
        A private key of the operator's (``fedcohort journal keygen``) that signs the newest digest with every event.

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
        rules: Rules | None = None,
        commit: Commit = "always",
        audit: bool = False,
        sign: str | Path | None = None,
    ) -> None:
        if sign is not None and not audit:
            raise InputError("Only a session with audit=True is signed.", hint="Session(..., audit=True, sign=...)")
        if not isinstance(seed, (int, np.integer)) or seed < 0:
            raise InputError(f"The seed must be a whole number, not negative. Got {seed!r}.")
        watchers.check_names(shadows or {})
        self._blind = {}
        self._seed = int(seed)
        self._signals = None if signals is None else frozenset(signals)
        selector, self._shadows = watchers.adapted(selector, shadows or {}, clients, self._signals)
        self._selector = selector
        check_signals(selector, clients, self._signals)
        for name, shadow in self._shadows.items():
            check_signals(shadow, clients, None, who=f"shadow {name!r}")
        self._set_membership_to(Membership(clients, np.ones(clients.n, np.bool_)))
        start = streams.stream(self._seed, streams.INITIALISATION, 0)
        self._states = {"": sealed_state(selector.init(self._granted[""], start), clients.n)}
        for name, shadow in self._shadows.items():
            start = streams.stream(self._seed, f"{streams.INITIALISATION}:{name}", 0)
            self._states[name] = sealed_state(shadow.init(self._granted[name], start), clients.n)
        self._referee = None if rules is None else Referee(rules, clients)
        self._round = 0
        self._attempt = 0  # how often the next round was abandoned
        self._ticket = 0
        self._open: dict[int, _Open] = {}
        self._prepared: _Prepared | None = None
        self._host_state: Any = None
        meta = {
            "seed": self._seed,
            "selector": describe(selector),
            "shadows": self._shadow_specs(),
            "signals": None if self._signals is None else sorted(self._signals),
            "rules": None if rules is None else rules.to_dict(),
            "host": None,
            "audit": new_nonce() if audit else None,
            resume_check.CLIENTS: None if journal is None else resume_check.digests(clients),
        }
        self._guard = Guard(selector_name(selector), clients.n, quiet=commit == "manual")
        signer = None if sign is None else Signer(sign)
        self._journal = Journal.create(None if journal is None else place(journal), meta, commit, sign=signer)
        try:
            self._journal.set_table(clients, self.active)
            self._record_states(self._states)
            if rules is not None:
                self._journal.add_event(CHANGED, {"round": 0, "ticket": 0, "rules": rules.to_dict()})
            self._journal.created()
        except BaseException:
            self._journal.close()
            raise

    # -- opening again ----------------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        path: str | Path,
        selector: Selector[Any] | None = None,
        *,
        shadows: Mapping[str, Selector[Any]] | None = None,
        rules: Rules | None = None,
        commit: Commit = "always",
        at: Position | None = None,
        sign: str | Path | None = None,
    ) -> Session:
        """Continue a session from its journal, exactly where it stopped.

        Parameters
        ----------
        path : path
            The journal.
        selector : Selector, optional
            Only needed for a selector that is not registered; it must be the one the journal was written with.
        shadows : mapping, optional
            The shadow selectors from now on: those the journal does not have are added and learn from its rounds, those
            not named here are removed. Default: those of the journal.
        rules : Rules, optional
            The rules from now on; a change is recorded. Default: those of the journal.
        commit : "always" or "manual"
        at : Position, optional
            Where the session stood when the host last wrote its own files; what the journal holds beyond is dropped.
        sign : path, optional
            The private key of a journal that is signed.
        """
        check = None if at is None else partial(rewind, position=at)
        signer = None if sign is None else Signer(sign)
        journal = Journal.open(place(path), commit, sign=signer, fits=partial(cls._check, selector=selector))
        self = cls._continued(journal, selector, shadows, rules, quiet=commit == "manual", check=check)
        if at is not None:
            self._blind = {name: why for name, why in at.blind.items() if name in self._shadows}
        return self

    @classmethod
    def _continued(
        cls,
        journal: Journal,
        selector: Selector[Any] | None,
        shadows: Mapping[str, Selector[Any]] | None,
        rules: Rules | None,
        *,
        quiet: bool,
        check: Callable[[Journal], None] | None = None,
    ) -> Session:
        try:
            if check is not None:
                check(journal)
            self = cls._opened(journal, selector, shadows)
            self._resume_rules(rules)
            self._guard = Guard(selector_name(self._selector), self.table.n, journal.picks(), quiet=quiet)
            return self
        except BaseException:
            journal.close()
            raise

    @classmethod
    def _check(cls, journal: Journal, selector: Selector[Any] | None) -> None:
        """Refuse a journal from which no session could go on; nothing is written."""
        cls._loaded(journal, selector, {})

    @classmethod
    def _opened(
        cls, journal: Journal, selector: Selector[Any] | None, shadows: Mapping[str, Selector[Any]] | None
    ) -> Session:
        self, shadows = cls._loaded(journal, selector, shadows)
        meta = journal.meta()
        self._resume_shadows(meta["shadows"], shadows)
        self._blind = {name: why for name, why in meta.get("blind", {}).items() if name in self._shadows}
        return self

    @classmethod
    def _loaded(
        cls, journal: Journal, selector: Selector[Any] | None, shadows: Mapping[str, Selector[Any]] | None
    ) -> tuple[Session, Mapping[str, Selector[Any]] | None]:
        """Return a session as a journal has it, without its shadows, and the shadows adapted to it."""
        meta = journal.meta()
        self = object.__new__(cls)
        self._journal = journal
        self._seed = int(meta["seed"])
        self._signals = None if meta["signals"] is None else frozenset(Signal(s) for s in meta["signals"])
        table, active = journal.table()
        if selector is not None:
            selector, adapted = watchers.adapted(selector, shadows or {}, table, self._signals)
            shadows = None if shadows is None else adapted
        changes = journal.events(SELECTOR)
        self._selector = rebuild_selector(changes[-1]["to"] if changes else meta["selector"], selector, journal.path)
        self._shadows = {}
        self._blind = {}
        self._set_membership_to(Membership(table, active))
        self._states = {"": self._resumed("", self._selector)}
        self._round, self._attempt = participation.next_round(journal)
        self._ticket = journal.last()[1] + 1
        self._reopen()
        self._prepared = None
        self._host_state = meta["host"]
        return self, shadows

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
        rules: Rules | None = None,
        commit: Commit = "always",
        audit: bool = False,
        sign: str | Path | None = None,
    ) -> Session:
        """Continue the session at ``path`` or, when there is none, start it.

        A journal that was started with another seed, other clients or other signals is refused, with what differs.
        """
        if not is_blank(place(path)):
            same = partial(resume_check.check_same, seed=seed, clients=clients, signals=signals, audit=audit)
            signer = None if sign is None else Signer(sign)
            journal = Journal.open(place(path), commit, sign=signer, fits=partial(cls._check, selector=selector))
            return cls._continued(journal, selector, shadows, rules, quiet=commit == "manual", check=same)
        return cls(
            selector,
            clients,
            seed=seed,
            signals=signals,
            journal=path,
            shadows=shadows,
            rules=rules,
            commit=commit,
            audit=audit,
            sign=sign,
        )

    def _reopen(self) -> None:
        self._open = {}
        for row in self._journal.cohorts(pending=True):
            self._open[row.ticket] = _Open(self._cohort_from(row), self._journal.reply_blocks(row.ticket))

    def _cohort_from(self, row: CohortRow) -> Cohort:
        return Cohort(
            clients=row.clients,
            weights=row.weights,
            work=row.work,
            notes=row.notes,
            stop=row.stop,
            round=row.round,
            ticket=row.ticket,
            names=self.table.names_of(row.clients),
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
    def pending(self) -> tuple[Cohort, ...]:
        """Cohorts asked for but not yet told, oldest first; after a crash the host trains or closes them."""
        return tuple(item.cohort for item in self._open.values())

    @property
    def host_state(self) -> Any:
        """What the host stored with its last ``tell``."""
        return self._host_state

    # -- asking -------------------------------------------------------------------------------------------------------

    def _prepare(self, request: RoundRequest) -> _Prepared:
        if self._prepared is not None and self._prepared.request is request:
            return self._prepared
        size = request.size
        if size is not None:
            if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
                raise InputError(f"The cohort size must be a whole number of at least 1, or None. Got {size!r}.")
            if size > self.table.n:
                raise InputError(
                    f"The cohort size must not exceed the federation's {self.table.n} clients. Got {size}.",
                    hint="size=None asks for everybody available",
                )
        candidates = self._membership.candidates(request, [item.cohort.clients for item in self._open.values()])
        verdict = None if self._referee is None else self._referee.judge(self._round, self._ticket, candidates)
        if verdict is not None:
            candidates, size = verdict.free(size)
        slate = None
        query = None
        if len(candidates) and size != 0:
            slate = self._slate("", size, candidates)
            if type(self._selector).query is not Selector.query:  # most ask nothing, and a stream has its price
                query = self._selector.query(self._states[""], slate, self._stream(streams.QUERY, ""))
                check_query(self._selector, query, self.table.n)
        self._prepared = _Prepared(request, slate, query, verdict)
        return self._prepared

    def _stream(self, kind: str, name: str) -> np.random.Generator:
        again = (self._attempt,) if self._attempt else ()  # a round that was abandoned is not drawn alike again
        return streams.stream(self._seed, f"{kind}:{name}" if name else kind, self._round, *again)

    def _slate(self, name: str, size: int | None, candidates: IntArray) -> Slate:
        selector = self._selector if name == "" else self._shadows[name]
        asked = len(candidates) if size is None else min(int(size), len(candidates))
        wanted = selector.size(self._states[name], asked, len(candidates))
        return Slate(self._round, max(1, min(int(wanted), len(candidates))), candidates, self._granted[name])

    def verdict(self, request: RoundRequest) -> Verdict | None:
        """Return whom the rules exclude and demand for a request, or None without rules. Changes nothing."""
        return self._prepare(request).verdict

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
        check_answer(self._selector, self.table.n, prepared.query, answer)
        slate = prepared.slate
        states = dict(self._states)
        picks: dict[str, watchers.Pick] = {}
        verdict = prepared.verdict
        candidates = _NOBODY if verdict is None else verdict.allowed
        if slate is None:
            nobody = "the rules admit nobody" if verdict is not None and verdict.reasons else "nobody is available"
            cohort = Cohort(_NOBODY, notes={} if len(candidates) else {"reason": nobody})
        else:
            candidates = slate.candidates if verdict is None else verdict.allowed
            cohort, states[""] = self._selector.select(
                self._states[""], slate, answer, self._stream(streams.SELECTION, "")
            )
            check_cohort(self._selector, cohort, slate)
            sealed_state(states[""], self.table.n)
            if request.size is not None and len(candidates) < request.size:
                short = {"reason": f"{request.size} asked for, {len(candidates)} available"}
                cohort = dataclasses.replace(cohort, notes={**cohort.notes, **short})
            for name, shadow in self._shadows.items():
                pick = picks[name] = watchers.choose(
                    shadow,
                    self._states[name],
                    lambda name=name: self._slate(name, slate.size, slate.candidates),  # type: ignore[misc]
                    answer,
                    (self._stream(streams.QUERY, name), self._stream(streams.SELECTION, name)),
                    self._blind.get(name),
                )
                states[name] = pick.state
        failed = {name: str(pick.note) for name, pick in picks.items() if pick.failed}
        scores = recorded_scores(cohort)
        if self._referee is not None and verdict is not None and len(verdict.allowed) and cohort.stop is None:
            size = len(verdict.allowed) if request.size is None else int(request.size)
            demanded = verdict.demanded[:size]
            cohort = self._referee.mended(cohort, demanded, verdict.allowed, size, self._stream(streams.RULES, ""))
        cohort = dataclasses.replace(
            cohort,
            round=self._round,
            ticket=self._ticket,
            names=self.table.names_of(cohort.clients),
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
            if answer is not None:
                self._journal.add_answer(cohort.ticket, answer.values)
            everyone = len(candidates) == self.table.n
            self._journal.add_cohort(row, None if everyone else candidates, self.table.n)
            if scores is not None:  # whom it picked is in the cohort's own row
                self._journal.add_scores(cohort.ticket, "", cohort.clients, pack_many(scores), None)
            for name, pick in picks.items():
                self._journal.add_scores(cohort.ticket, name, pick.picked, pick.scores, pick.note)
            self._record_states(states)
            self._record_failed(failed)
            if verdict is not None and verdict.reasons:
                self._journal.add_exclusions(cohort.ticket, verdict.codes, verdict.reasons)
        if self._referee is not None and cohort.size:
            self._referee.ledger.picked(cohort.ticket, cohort.round, cohort.clients)
        self._states = states
        self._forget_shadows(failed)
        self._guard.add(cohort.round, cohort.clients, self.active)
        if cohort.size:
            self._open[cohort.ticket] = _Open(cohort, [])
        self._round += 1
        self._attempt = 0
        self._ticket += 1
        self._prepared = None
        return cohort

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
        news = check_report(self._selector, self.table, item.cohort, item.told, report)
        if report.complete:
            self._close(item, [news], host)
            return
        with self._journal.event():
            if len(news.clients):
                self._journal.add_replies(news)
            if host is not None:
                self._journal.set_meta("host", host)
        if host is not None:
            self._host_state = host
        if len(news.clients):
            item.told.append(news)

    def abandon(self, ticket: int, reason: str) -> None:
        """Close a cohort without counting its round: its clients are free, and the next request chooses anew.

        Clients that were reported keep what was reported, the others are missing; the selector learns from that. The
        round's number is given to the next cohort, unless another round was asked for since.
        """
        item = self._open.get(ticket)
        if item is None:
            known = ", ".join(map(str, self._open)) or "none"
            raise TicketError(f"Ticket {ticket} is not pending. Pending: {known}.")
        self._close(item, [], None, abandoned=reason)
        self._round, self._attempt = participation.next_round(self._journal)

    def _close(self, item: _Open, news: list[ReplyBlock], host: Any, abandoned: str | None = None) -> None:
        """Let everybody learn from a complete round, in one transaction."""
        cohort = item.cohort
        if sum(len(block.clients) for block in (*item.told, *news)) < cohort.size:
            named = np.concatenate([_NOBODY, *(block.clients for block in (*item.told, *news))])
            missing = cohort.clients[~np.isin(cohort.clients, named)]
            news = [*news, ReplyBlock.alike(cohort.ticket, time.time(), missing, Status.MISSING)]
        whole = in_cohort_order(cohort, [*item.told, *news])
        states, blind, failed = self._learnt(cohort, whole)
        with self._journal.event():
            for block in news:
                if len(block.clients):
                    self._journal.add_replies(block)
            self._journal.close_cohort(cohort.ticket)
            self._record_states(states)
            self._record_failed(failed)
            if abandoned is not None:
                again = cohort.round == self._round - 1  # else another round was asked for since
                upto = {"asked": self._ticket, "next": self._round - again}
                body = {"ticket": cohort.ticket, "round": cohort.round, "reason": abandoned, **upto}
                self._journal.add_event(ABANDONED, body)
            if self._shadows:
                self._journal.set_meta("blind", blind)
            if host is not None:
                self._journal.set_meta("host", host)
        if host is not None:
            self._host_state = host
        self._states, self._blind = states, blind
        self._forget_shadows(failed)
        del self._open[cohort.ticket]
        if self._referee is not None:
            if abandoned is None:
                self._referee.ledger.told(cohort.ticket, cohort.clients, whole.status)
            else:
                self._referee = participation.resumed(self._referee.rules, self._journal)
        self._prepared = None

    def _tell_late(self, report: RoundReport) -> None:
        """Record replies that come after their round was closed; they change no state."""
        if not 0 <= report.ticket < self._ticket:
            raise TicketError(
                f"There is no ticket {report.ticket}; this session has given out 0 to {self._ticket - 1}."
            )
        clients = check_late(self.table, self._journal.replies(report.ticket), report)
        with self._journal.event():
            self._journal.add_replies(ReplyBlock.alike(report.ticket, time.time(), clients, Status.LATE, late=True))

    def record(self, round_: int, metrics: Mapping[str, float | None]) -> None:
        """Record numbers about the global model after ``round_``, for reports and the dashboard; NaN is no number."""
        if isinstance(round_, bool) or not isinstance(round_, (int, np.integer)) or not 0 <= round_ < self._round:
            raise InputError(f"There is no round {round_!r} to record numbers for; rounds so far: {self._round}.")
        numbers = check_numbers(metrics)
        with self._journal.event():
            self._journal.add_metrics(int(round_), numbers)

    def note(self, kind: str, body: Mapping[str, Any]) -> None:
        """Put something of the host's own on record, for example why clients failed; changes no state.

        The session goes by events of its own, so their kinds are not for others.
        """
        if kind in OWN_EVENTS:
            raise InputError(
                f"Notes of the kind {kind!r} are the session's own.", hint="give the note a kind that says whose it is"
            )
        with self._journal.event():
            self._journal.add_event(kind, body)

    def explain(self, round_: int, client: int | str | None = None) -> Explanation:
        """Return why ``client`` was picked in ``round_`` or not; without a client, the whole round."""
        return explain_round(self._journal, round_, client)
