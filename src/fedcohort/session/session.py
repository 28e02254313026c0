"""A session owns everything that changes: members, rules, selectors with their states, pending cohorts, the journal.

Hosts talk to a session; a session talks to its selector. It deals with the edges once, for all selectors: fewer
candidates than asked for, nobody available, clients that join, leave and return, failed, late, partial, duplicate
and unknown reports, NaN.

A call works out everything it changes, records it in one transaction, and only then takes it over. So an error, from
whatever cause, leaves the session as it was.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.core import rng as streams
from fedcohort.core.arrays import BoolArray, IntArray, freeze
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError, JournalError, TicketError
from fedcohort.core.protocol import Answer, Cohort, Query, RoundReport, RoundRequest, Selector, Slate
from fedcohort.core.selector_spec import describe, rebuild_selector, selector_name, untrusted_reference
from fedcohort.core.signals import Signal
from fedcohort.core.validate import boolean, instance, mapping, one_of, text, whole_number
from fedcohort.core.validate import path as check_path
from fedcohort.journal import Journal, ReplyBlock, is_blank
from fedcohort.journal.chain import new_nonce
from fedcohort.journal.codec import freeze_state, state_fields
from fedcohort.journal.database import Commit
from fedcohort.journal.events import FACTS, LEFT, REJOINED, SELECTOR
from fedcohort.journal.place import place
from fedcohort.journal.presence import Presence
from fedcohort.journal.savepoint import Savepoint, rewind
from fedcohort.journal.signing import Signer
from fedcohort.session import resume_check
from fedcohort.session.coverage import Coverage, CoverageMonitor
from fedcohort.session.explain import Explanation, explain_round, recorded_scores
from fedcohort.session.expressions import Attributes, plain_attributes
from fedcohort.session.members import Membership
from fedcohort.session.outcomes import in_cohort_order
from fedcohort.session.pending import PendingCohort, PendingCohorts
from fedcohort.session.recorder import SESSION_EVENTS, EventRecorder
from fedcohort.session.referee import Eligibility, Referee
from fedcohort.session.resume import is_asynchronous, next_round, referee_from
from fedcohort.session.rules import Rules, difference
from fedcohort.session.shadows import ShadowPick, Shadows, adapt_all
from fedcohort.session.stateful import StatefulSelector
from fedcohort.session.turn import Turn
from fedcohort.session.validation import (
    answer_of,
    as_request,
    as_selector,
    as_shadows,
    as_signals,
    as_table,
    check_answer,
    check_cohort,
    check_late,
    check_numbers,
    check_one_at_a_time,
    check_query,
    check_report,
    check_signals,
    check_size,
    report_of,
)

log = logging.getLogger(__name__)
_NOBODY = np.empty(0, np.int64)


@dataclass(slots=True)
class _Prepared:
    """A request worked out, kept between ``query`` and ``ask``."""

    request: RoundRequest
    slate: Slate | None
    query: Query | None
    eligibility: Eligibility | None


@dataclass(slots=True)
class _Choice:
    """What the selector chose and the shadows would have, before the rules add to it and before it is on record."""

    cohort: Cohort
    candidates: IntArray
    own: StatefulSelector
    shadows: Shadows
    picks: Mapping[str, ShadowPick] = field(default_factory=dict)


class Session:
    """Run one selector over one federation.

    Parameters
    ----------
    selector : Selector or str
        The selector, or the name of a registered one.
    clients : ClientTable, int or list of str
        The federation. With a number or names, nothing is known about the clients, and all have the same size.
    seed : int
        Every random number of the session follows from it.
    signals : list of Signal or str, optional
        What the host can supply in reports and answers. Default: whatever the selector requires; a report without
        it is refused.
    journal : path, optional
        The journal's file. Default: in memory, so nothing can be resumed.
    shadows : mapping of name to Selector, optional
        Selectors that see the same requests and reports; what they would have picked is recorded.
    rules : Rules, optional
        Rules for every cohort of any selector.
    commit : "always" or "manual"
        Whether each event is on disk when its call returns, or only after :meth:`commit`.
    audit : bool
        Whether to make the journal a chain of digests and keep answers, for ``fedcohort journal audit``.
    sign : path, optional
        The operator's private key (``fedcohort journal keygen``), which signs the newest digest with every event.
    asynchronous : bool
        Whether clients are chosen one by one while others work. A round then lasts until :meth:`advance` reports a new
        global model. The selector must support it.

    Examples
    --------
    >>> session = Session("oort", clients=["anna", "ben", "cem", "dora"], seed=1)
    >>> cohort = session.ask(2)
    >>> len(cohort.names), cohort.round
    (2, 0)
    >>> session.tell(cohort, loss_rms=[0.7, 0.9], duration=[12.0, 30.0])
    >>> session.round
    1
    """

    def __init__(
        self,
        selector: Selector[Any] | str,
        clients: ClientTable | int | Sequence[str],
        *,
        seed: int = 0,
        signals: Iterable[Signal | str] | None = None,
        journal: str | Path | None = None,
        shadows: Mapping[str, Selector[Any] | str] | None = None,
        rules: Rules | None = None,
        commit: Commit = "always",
        audit: bool = False,
        sign: str | Path | None = None,
        asynchronous: bool = False,
    ) -> None:
        if sign is not None and not audit:
            raise InputError("Only a session with audit=True is signed.", hint="Session(..., audit=True, sign=...)")
        clients = as_table(clients)
        turn = Turn(whole_number(seed, "'seed'", least=0), asynchronous=boolean(asynchronous, "'asynchronous'"))
        supplied = None if signals is None else as_signals(signals)
        _check_options(rules, commit, journal, sign)
        boolean(audit, "'audit'")
        selector, watching = adapt_all(
            as_selector(selector), {} if shadows is None else as_shadows(shadows), clients, supplied
        )
        check_signals(selector, clients, supplied)
        check_one_at_a_time(turn.asynchronous, selector)
        for name, shadow in watching.items():
            check_signals(shadow, clients, None, f"shadow {name!r}")
            check_one_at_a_time(turn.asynchronous, shadow)
        own = StatefulSelector.initial(selector, clients, turn.seed)
        running = {name: StatefulSelector.initial(s, clients, turn.seed, name) for name, s in watching.items()}
        meta = _first_meta(turn, own, Shadows(running), supplied, rules, audit=audit)
        meta[resume_check.CLIENTS] = None if journal is None else resume_check.digests(clients)
        self._referee = None if rules is None else Referee(rules, clients)
        self._monitor = CoverageMonitor(selector_name(selector), clients.n, quiet=commit == "manual")
        # Everything that may raise about the arguments has run by now: no half-made journal is left on disk.
        record = Journal.create(None if journal is None else place(journal), meta, commit, sign=_signer(sign))
        try:
            self._assemble(record, turn, supplied, Membership.of(clients), own, Shadows(running), PendingCohorts())
            self._recorder.record_creation(self._members, (own, *running.values()), rules)
        except BaseException:
            record.close()
            raise

    def _assemble(
        self,
        journal: Journal,
        turn: Turn,
        signals: frozenset[Signal] | None,
        members: Membership,
        own: StatefulSelector,
        shadows: Shadows,
        pending: PendingCohorts,
        host_state: Any = None,
    ) -> None:
        self._recorder = EventRecorder(journal)
        self._turn = turn
        self._signals = signals
        self._members = members
        self._changes = 0
        self._own = own
        self._shadows = shadows
        self._pending = pending
        self._host_state = host_state
        self._prepared: _Prepared | None = None

    # -- opening again ----------------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        path: str | Path,
        selector: Selector[Any] | str | None = None,
        *,
        shadows: Mapping[str, Selector[Any] | str] | None = None,
        rules: Rules | None = None,
        commit: Commit = "always",
        at: Savepoint | None = None,
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
            The shadow selectors from now on. New ones learn from the journal's rounds; shadows that are not named here
            are removed. Default: the journal's shadows.
        rules : Rules, optional
            The rules from now on; a change is recorded. Default: the journal's rules.
        commit : "always" or "manual"
        at : Savepoint, optional
            The session's position when the host last wrote its own files; everything after it is dropped.
        sign : path, optional
            The private key of a signed journal.
        """
        _check_options(rules, commit, path, sign)
        selector = None if selector is None else as_selector(selector)
        given = None if shadows is None else as_shadows(shadows)
        check = None if at is None else partial(rewind, savepoint=instance(at, Savepoint, "'at'"))
        journal = Journal.open(place(path), commit, sign=_signer(sign), fits=partial(cls._load, selector=selector))
        self = cls._continue_from(journal, selector, given, rules, quiet=commit == "manual", check=check)
        if at is not None:
            self._shadows = Shadows(self._shadows.running, at.blind)
        return self

    @classmethod
    def _continue_from(
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
            self = cls._load(journal, selector)
            self._resume_shadows(selector, shadows)
            self._resume_rules(rules)
            name = selector_name(self.selector)
            self._monitor = CoverageMonitor(name, self.table.n, journal.picks(), quiet=quiet)
            return self
        except BaseException:
            journal.close()
            raise

    @classmethod
    def _load(cls, journal: Journal, selector: Selector[Any] | None) -> Session:
        """Return a session as a journal has it, without rules and shadows; nothing is written."""
        meta = journal.meta()
        seed = int(meta["seed"])
        signals = None if meta["signals"] is None else frozenset(map(Signal.by_name, meta["signals"]))
        members = Membership(*journal.table())
        if selector is not None:
            selector, _ = adapt_all(selector, {}, members.table, signals)
        changes = journal.events(SELECTOR)
        selector = rebuild_selector(changes[-1]["to"] if changes else meta["selector"], selector, journal.path)
        own = StatefulSelector.from_state(selector, members.table, seed, journal)
        pending = PendingCohorts.from_journal(journal, members.table)
        self = object.__new__(cls)  # the constructor would start a new journal
        self._referee = None
        self._assemble(
            journal, Turn.from_journal(journal, seed), signals, members, own, Shadows(), pending, meta["host"]
        )
        return self

    def _resume_shadows(self, selector: Selector[Any] | None, given: Mapping[str, Selector[Any]] | None) -> None:
        """Go on with the journal's shadows, except those no longer wanted, and add new ones.

        ``selector`` is the one the caller gave; shadows are adapted to what it reads.
        """
        meta = self.journal.meta()
        wanted = given
        if wanted is not None and selector is not None:
            _, wanted = adapt_all(selector, wanted, self.table, self._signals)
        # First what goes, then what comes, so that a shadow with other parameters may take the name of an old one.
        dropped: dict[str, tuple[str, str]] = {}  # name -> what became of it, and why
        for name, spec in meta["shadows"].items():
            kept = None if wanted is None else wanted.get(name)
            if wanted is None:
                self._check_trusted(name, spec)
            elif kept is None or describe(kept)["params"] != spec["params"]:
                dropped[name] = "removed", "the session was opened without it"
                continue
            try:
                shadow = rebuild_selector(spec, kept, self.journal.path)
                running = StatefulSelector.from_state(shadow, self.table, self.seed, self.journal, name)
                self._shadows = self._shadows.with_one(running)
            except Exception as error:  # a shadow is somebody else's code; the session goes on without it
                dropped[name] = "failed", f"failed: {error}"
        for name, (what, why) in dropped.items():
            self._recorder.record_dropped_shadow(name, what, why, self._shadows, self._turn)
        for name, shadow in (wanted or {}).items():
            if name not in self._shadows.running:
                self._try_to_add(name, shadow)
        self._shadows = Shadows(self._shadows.running, meta.get("blind", {}))

    def _check_trusted(self, name: str, spec: Mapping[str, Any]) -> None:
        """Refuse to continue with a shadow whose code would be imported only because a journal names it."""
        code = untrusted_reference(spec)
        if code is not None:
            raise JournalError(
                f"The journal {self.journal.path} has the shadow {name!r}, which is {code}; code is not imported "
                "just because a journal names it.",
                hint=f"if you trust it, name it yourself: --selector {code} on the command line, "
                "Session.open(path, shadows={...}) in Python; shadows={} continues without it",
            )

    def _try_to_add(self, name: str, shadow: Selector[Any]) -> None:
        """Add a shadow; one that fails is recorded as dropped, and the session goes on."""
        check_signals(shadow, self.table, None, f"shadow {name!r}")
        try:
            self.add_shadow(name, shadow)
        except Exception as error:  # one that failed before fails again while it learns from the journal
            self._recorder.record_dropped_shadow(name, "failed", f"failed: {error}", self._shadows, self._turn)

    def _resume_rules(self, rules: Rules | None) -> None:
        """Go on with the journal's rules or with new ones, which is recorded, and with the participations so far."""
        recorded = self.journal.meta().get("rules")
        before = None if recorded is None else Rules.from_journal(recorded)
        if rules is None and before is not None and before.trusts_clients:
            raise InputError(
                f"The journal {self.journal.path} has quotas that name no values ({before.quotas}); such quotas let "
                "a client that invents a value into every cohort.",
                hint="open it with rules=Rules(..., quotas={'region': {'north': 2, 'south': 2}})",
            )
        if before is not None:
            self._referee = referee_from(before, self.journal)
        if rules is not None:
            self.set_rules(rules)
        elif before is not None and before != Rules():
            log.info("the rules of the journal stay in force: %r; rules=Rules() drops them", before)

    @classmethod
    def open_or_create(
        cls,
        path: str | Path,
        selector: Selector[Any] | str,
        clients: ClientTable | int | Sequence[str],
        *,
        seed: int = 0,
        signals: Iterable[Signal | str] | None = None,
        shadows: Mapping[str, Selector[Any] | str] | None = None,
        rules: Rules | None = None,
        commit: Commit = "always",
        audit: bool = False,
        sign: str | Path | None = None,
        asynchronous: bool = False,
    ) -> Session:
        """Continue the session at ``path`` or, when there is none, start it.

        A journal that was started with another seed, other clients or other signals is refused, with what differs.
        """
        _check_options(rules, commit, path, sign)
        selector, clients = as_selector(selector), as_table(clients)
        supplied = None if signals is None else as_signals(signals)
        given = None if shadows is None else as_shadows(shadows)
        if not is_blank(place(path)):
            same = partial(resume_check.check_same, seed=seed, clients=clients, signals=supplied, audit=audit)
            journal = Journal.open(place(path), commit, sign=_signer(sign), fits=partial(cls._load, selector=selector))
            if is_asynchronous(journal) != asynchronous:
                journal.close()
                raise InputError(
                    f"The journal {path} belongs to {'a' if asynchronous else 'an a'}synchronous session, but "
                    f"asynchronous={asynchronous} was given.",
                    hint="open it as it was begun, or start another journal",
                )
            return cls._continue_from(journal, selector, given, rules, quiet=commit == "manual", check=same)
        return cls(
            selector,
            clients,
            seed=seed,
            signals=supplied,
            journal=path,
            shadows=given,
            rules=rules,
            commit=commit,
            audit=audit,
            sign=sign,
            asynchronous=asynchronous,
        )

    def close(self) -> None:
        """Close the journal. In manual mode what was not committed is dropped."""
        self.journal.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def commit(self) -> None:
        """With ``commit="manual"``, make everything so far durable."""
        self.journal.commit()

    # -- what a host may look at ---------------------------------------------------------------------------------------

    @property
    def selector(self) -> Selector[Any]:
        """The selector of this session."""
        return self._own.selector

    @property
    def requires(self) -> frozenset[Signal]:
        """The signals the host must put into reports: the selector's own, not the shadows', nor what we know here."""
        return frozenset(s for s in self.selector.requires if s.reported and s is not Signal.STALENESS)

    @property
    def state(self) -> Any:
        """The selector's current state, read-only."""
        return self._own.state

    @property
    def shadows(self) -> Mapping[str, Selector[Any]]:
        """The shadow selectors by name; one that failed is no longer among them."""
        return self._shadows.selectors

    @property
    def rules(self) -> Rules | None:
        """The rules every cohort meets."""
        return None if self._referee is None else self._referee.rules

    @property
    def table(self) -> ClientTable:
        """The federation."""
        return self._members.table

    @property
    def active(self) -> BoolArray:
        """(N,) whether each client is a member now."""
        return self._members.active

    @property
    def changes(self) -> int:
        """How often members, or facts about them, have changed since the session was opened."""
        return self._changes

    @property
    def round(self) -> int:
        """The number of the next round, counted from 0; in an asynchronous session, that of the newest model."""
        return self._turn.round

    @property
    def asynchronous(self) -> bool:
        """Whether clients are asked for one by one, and rounds are global models."""
        return self._turn.asynchronous

    @property
    def seed(self) -> int:
        """The seed all random streams derive from."""
        return self._turn.seed

    @property
    def pending(self) -> tuple[Cohort, ...]:
        """Cohorts without a complete report, oldest first; after a crash the host trains or abandons them."""
        return tuple(item.cohort for item in self._pending.items)

    @property
    def host_state(self) -> Any:
        """What the host stored with its last ``tell``."""
        return self._host_state

    @property
    def journal(self) -> Journal:
        """The journal, for reading."""
        return self._recorder.journal

    def savepoint(self) -> Savepoint:
        """Return where the session stands, for the host's own checkpoint; see :class:`fedcohort.journal.Savepoint`."""
        running = (self._own, *self._shadows.running.values())
        return Savepoint(
            *self.journal.newest(),
            pending=self._pending.tickets,
            host=self._host_state,
            attributes=self.journal.attributes(),
            shadows=self._shadows.specs,
            blind=self._shadows.blind,
            states={one.name: dict(state_fields(one.state)) for one in running},
        )

    def coverage(self) -> Coverage:
        """Return how many clients carry the training; its ``warning`` says when it is too few. Changes nothing."""
        return self._monitor.coverage(self.active)

    def explain(self, round_: int, client: int | str | None = None) -> Explanation:
        """Return why ``client`` was picked in ``round_`` or not; without a client, the whole round."""
        return explain_round(self.journal, round_, client)

    # -- asking -------------------------------------------------------------------------------------------------------

    def eligibility(self, request: RoundRequest | int | None) -> Eligibility | None:
        """Return which clients the rules exclude and demand for a request; None without rules. Changes nothing."""
        return self._prepare(as_request(request)).eligibility

    def query(self, request: RoundRequest | int | None) -> Query | None:
        """Return the question the selector wants answered before it chooses, or None. Changes nothing."""
        self._prepared = None
        return self._prepare(as_request(request)).query

    def ask(self, request: RoundRequest | int | None, answer: Answer | None = None, **answers: Any) -> Cohort:
        """Return the cohort of the next round; it is on record when this returns.

        Parameters
        ----------
        request : int, None or RoundRequest
            How many clients; None asks for everybody available. A RoundRequest also names the available clients.
        answer : Answer, optional
            The answer to what :meth:`query` returned for the same request.
        **answers
            The same in short, for a selector that asks for losses: ``loss=measure``, a function from client names to
            their losses, or the losses of all clients as an array or by name. A selector that asks nothing ignores it.
        """
        request = as_request(request)
        if answer is not None:
            instance(answer, Answer, "'answer'", "an Answer")
        prepared = self._prepare(request)
        if answers and answer is None:
            answer = answer_of(prepared.query, self.table, answers)
        check_answer(self.selector, self.table.n, prepared.query, answer)
        # What is new stays in local names until it is on record: an error before that leaves the session as it was.
        turn, eligibility = self._turn, prepared.eligibility
        choice = self._choose(request.size, prepared, answer)
        cohort = choice.cohort
        # Before the rules add clients: the scores explain the selector's choice, not the operator's.
        scores = recorded_scores(cohort)
        if self._referee is not None and eligibility is not None:
            cohort = self._referee.apply(cohort, eligibility, request.size, turn.stream(streams.RULES))
        names = self.table.names_of(cohort.clients)
        cohort = dataclasses.replace(cohort, round=turn.round, ticket=turn.ticket, names=names)
        self._recorder.record_cohort(
            cohort,
            request.size,
            choice.candidates,
            self.table.n,
            answer=answer,
            scores=scores,
            picks=choice.picks,
            own=choice.own,
            shadows=choice.shadows,
            eligibility=eligibility,
        )
        # From here on nothing can fail that could be undone: the cohort is durable, and memory follows the journal.
        self._own, self._shadows = choice.own, choice.shadows
        self._turn = turn.following()
        self._prepared = None
        self._monitor.add(cohort.round, cohort.clients, self.active, len(choice.candidates))
        if cohort.size:
            self._pending.add(cohort)
            if self._referee is not None:
                self._referee.ledger.count_cohort(cohort.ticket, cohort.round, cohort.clients)
        return cohort

    def _choose(self, size: int | None, prepared: _Prepared, answer: Answer | None) -> _Choice:
        """Let the selector choose, and after it the shadows; the session does not change."""
        turn, own, shadows = self._turn, self._own, self._shadows
        slate, eligibility = prepared.slate, prepared.eligibility
        if slate is None:
            allowed = _NOBODY if eligibility is None else eligibility.allowed
            return _Choice(_nobody(eligibility), allowed, own, shadows)
        candidates = slate.candidates if eligibility is None else eligibility.allowed
        cohort, state = own.selector.select(own.state, slate, answer, turn.stream(streams.SELECTION))
        check_cohort(own.selector, cohort, slate)
        own = own.with_state(freeze_state(state, self.table.n))
        if size is not None and len(candidates) < size:
            short = {"reason": f"{size} asked for, {len(candidates)} available"}
            cohort = dataclasses.replace(cohort, notes={**cohort.notes, **short})
        if not shadows.running:
            return _Choice(cohort, candidates, own, shadows)
        picks = shadows.choose(turn, slate, answer)
        return _Choice(cohort, candidates, own, shadows.after(picks), picks)

    def _prepare(self, request: RoundRequest) -> _Prepared:
        # query() and ask() get the same request object. The selector's question must not be drawn twice, because the
        # answer belongs to the question that was asked.
        if self._prepared is not None and self._prepared.request is request:
            return self._prepared
        size = check_size(request.size, self.table.n)
        busy = self._pending.training
        if self._turn.asynchronous and size != 1:
            raise InputError(f"An asynchronous session asks for one client at a time. Got {size}.")
        candidates = self._members.candidates(request, busy)
        eligibility = None
        if self._referee is not None:
            eligibility = self._referee.eligibility(self._turn.round, self._turn.ticket, candidates)
            # The clients that the rules demand are picked already; the selector fills the other places.
            candidates, size = eligibility.remaining(size)
        slate = None
        query = None
        if len(candidates) and size != 0:
            own = self._own
            at_work = freeze(busy) if self._turn.asynchronous else None
            slate = own.slate(self._turn.round, size, candidates, at_work)
            if type(own.selector).query is not Selector.query:  # most ask nothing, and a stream takes time
                query = own.selector.query(own.state, slate, self._turn.stream(streams.QUERY))
                check_query(own.selector, query, self.table.n)
        self._prepared = _Prepared(request, slate, query, eligibility)
        return self._prepared

    # -- telling ------------------------------------------------------------------------------------------------------

    def tell(self, report: RoundReport | Cohort, *, host: Any = None, **outcome: Any) -> None:
        """Report what happened to a cohort. The selector learns from it once the round is complete.

        Parameters
        ----------
        report : Cohort or RoundReport
            The cohort that trained, with its outcome as keywords; or a RoundReport, with which a host can also
            report a round in parts.
        host : JSON-like, optional
            Anything the host wants stored in the same transaction, for example the name of a model checkpoint.
        **outcome
            With a cohort, signals by name: ``loss=[0.7, 0.9]`` in the order of the cohort, or ``loss={"anna": 0.7}`` by
            client; a hyphen in a name is written as an underscore. Besides ``status`` and ``kept`` as in
            :class:`RoundReport`. A client that a mapping does not name is missing.
        """
        if isinstance(report, Cohort):
            report = report_of(report, outcome)
        elif outcome:
            raise InputError(
                f"A RoundReport already contains everything; '{next(iter(outcome))}' cannot be passed with it.",
                hint="session.tell(cohort, loss=...) takes signals as keywords",
            )
        instance(report, RoundReport, "'report'", "a Cohort or a RoundReport")
        item = self._pending.find(whole_number(report.ticket, "A report's ticket"))
        if item is None:
            self._tell_late(report)
            return
        news = check_report(self.selector, self.table, item.cohort, item.replies, self._with_staleness(item, report))
        if report.complete:
            self._close(item, [news], host)
            return
        self._recorder.record_report(news, host)
        if host is not None:
            self._host_state = host
        if len(news.clients):
            item.replies.append(news)

    def _with_staleness(self, item: PendingCohort, report: RoundReport) -> RoundReport:
        """Return a report with what the session itself knows, where anybody reads it."""
        turn = self._turn
        if not (turn.asynchronous or Signal.STALENESS in self.selector.requires):
            return report
        if not isinstance(report.metrics, Mapping):
            return report  # refused with the other checks
        models = turn.round - item.cohort.round if turn.asynchronous else 0
        staleness = np.full(len(report.clients), float(models))
        return dataclasses.replace(report, metrics={**report.metrics, Signal.STALENESS: staleness})

    def advance(self, tickets: Iterable[int] = (), *, host: Any = None) -> None:
        """Say that there is a new global model; only for an asynchronous session.

        Parameters
        ----------
        tickets : iterable of int
            Whose answers it was made of, for the record.
        host : JSON-like, optional
            Anything the host wants stored in the same transaction.
        """
        if not self._turn.asynchronous:
            raise InputError(
                "Only asynchronous sessions count new models; elsewhere, every cohort is a round.",
                hint="Session(..., asynchronous=True)",
            )
        made_of = [whole_number(ticket, "A ticket", least=0) for ticket in tickets]
        for ticket in made_of:
            # Never given out, or still at work.
            if ticket >= self._turn.ticket or self._pending.find(ticket) is not None:
                raise TicketError(f"Ticket {ticket} has no answer to build a model from.")
        self._recorder.record_model(self._turn, made_of, host)
        if host is not None:
            self._host_state = host
        self._turn = self._turn.with_new_model()
        self._prepared = None

    def abandon(self, ticket: int, reason: str) -> None:
        """Close a cohort without counting its round: its clients are free, and the next request chooses again.

        Clients that were reported keep what was reported, the others are missing; the selector learns from that. The
        round's number is given to the next cohort, unless another round was asked for since.
        """
        whole_number(ticket, "'ticket'")
        text(reason, "'reason'")
        self._close(self._pending.get(ticket), [], None, abandoned=reason)
        # In an asynchronous session a round is a model, and abandoning a client makes none.
        if not self._turn.asynchronous:
            self._turn = self._turn.at_round(*next_round(self.journal))

    def _close(self, item: PendingCohort, news: list[ReplyBlock], host: Any, abandoned: str | None = None) -> None:
        """Let every selector learn from a complete round."""
        cohort = item.cohort
        news = item.closing_replies(news)
        replies = in_cohort_order(cohort, [*item.replies, *news])
        own = self._own.learn(cohort, replies)
        shadows, failed = self._shadows.learn(cohort, replies) if self._shadows.running else (self._shadows, {})
        self._recorder.record_close(
            cohort, news, host, own=own, shadows=shadows, failed=failed, turn=self._turn, abandoned=abandoned
        )
        if host is not None:
            self._host_state = host
        self._own, self._shadows = own, shadows
        self._pending.remove(cohort.ticket)
        self._prepared = None
        if self._referee is not None:
            if abandoned is None:
                self._referee.ledger.count_replies(cohort.ticket, cohort.clients, replies.status)
            else:  # its participations are taken back, which only the journal can say without them
                self._referee = referee_from(self._referee.rules, self.journal)

    def _tell_late(self, report: RoundReport) -> None:
        """Record replies that come after their round was closed; they change no state."""
        if not 0 <= report.ticket < self._turn.ticket:
            raise TicketError(
                f"There is no ticket {report.ticket}; this session has given out 0 to {self._turn.ticket - 1}."
            )
        self._recorder.record_late(report.ticket, check_late(self.table, self.journal.replies(report.ticket), report))

    def record(self, round_: int, metrics: Mapping[str, float | None]) -> None:
        """Record numbers about the global model after ``round_``, for reports and the dashboard (NaN: unknown)."""
        round_ = whole_number(round_, "'round_'")
        if not 0 <= round_ < self.round:
            raise InputError(f"There is no round {round_} to record numbers for; rounds so far: {self.round}.")
        self._recorder.record_numbers(round_, check_numbers(metrics))

    def note(self, kind: str, body: Mapping[str, Any]) -> None:
        """Record something of the host's own, for example why clients failed; changes no state.

        The session reads events of its own, so their kinds are not for others.
        """
        if text(kind, "'kind'") in SESSION_EVENTS:
            raise InputError(
                f"Notes of the kind {kind!r} are the session's own.",
                hint="choose another kind for a host's note",
            )
        self._recorder.note(kind, mapping(body, "'body'"))

    # -- members --------------------------------------------------------------------------------------------------

    def join(self, clients: ClientTable) -> None:
        """Add clients to the federation; they are candidates from the next request on."""
        instance(clients, ClientTable, "'clients'")
        if clients.has_names:
            blocked = self._recorder.blocked_names(clients.names)
            if blocked:
                raise InputError(
                    f"The client {next(iter(blocked))!r} was forgotten, and is blocked from joining again.",
                    hint="to take part again, it must join under another name",
                )
        members = self._members.join(clients)
        # The own selector's error is the caller's. A shadow must not keep clients out: one that fails is dropped.
        own = self._own.grow(members.table, self.seed)
        shadows, failed = self._shadows.try_each(lambda shadow: shadow.grow(members.table, self.seed))
        self._recorder.record_join(members, self.table.n, self._turn, own, shadows, failed)
        self._own, self._shadows = own, shadows
        self._monitor.grow(members.table.n)
        self._set_members(members)

    def leave(self, clients: Sequence[str] | Sequence[int] | IntArray) -> None:
        """Remove clients from the federation; what is known about them is kept in case they return."""
        members, indices = self._members.change(clients, False)
        self._recorder.record_members(members, LEFT, indices)
        self._set_members(members)

    def rejoin(self, clients: Sequence[str] | Sequence[int] | IntArray) -> None:
        """Bring back clients that left, with all that was learned about them."""
        members, indices = self._members.change(clients, True)
        self._recorder.record_members(members, REJOINED, indices)
        self._set_members(members)

    def update_facts(self, table: ClientTable) -> None:
        """Replace what is known about the clients (sizes, labels); names and number stay, no kind of facts goes."""
        instance(table, ClientTable, "'table'")
        members = self._members.with_facts(table)
        self._recorder.record_members(members, FACTS, self.table.differing(table))
        self._own, self._shadows = self._own.with_table(table), self._shadows.with_table(table)
        self._set_members(members)

    def forget(self, client: str, *, block: bool = False) -> str:
        """Remove what is known about a client, for good, and return the name that stands for it from now on.

        It leaves the federation. Its name in any text, facts, attributes, reported numbers, scores, reasons and its row
        in every selector's state go; that somebody took part in these rounds stays, so that it can be proved.

        Parameters
        ----------
        block : bool
            Whether a client of that name is kept from joining again. The journal then holds a keyed digest of the name.
        """
        text(client, "'client'")
        boolean(block, "'block'")
        stand_in, members, own, shadows = self._recorder.forget_client(
            client, self.table, self._own, self._shadows, self._turn, block=block
        )
        self._own, self._shadows = own, shadows
        # Rules, pending cohorts and what the host stored may name the client: the journal has the new name. Read from
        # there, memory cannot keep a copy of the old one.
        meta = self.journal.meta()
        self._host_state = meta["host"]
        if self._referee is not None:
            self._referee = referee_from(Rules.from_journal(meta["rules"]), self.journal)
        self._pending = PendingCohorts.from_journal(self.journal, members.table)
        self._set_members(members)
        self.journal.compact()  # deleted rows stay readable in the file until it is written anew
        if self.journal.path is not None:
            Presence.remove(self.journal.path)  # left by a server that was killed: it names clients that were offline
        return stand_in

    def _set_members(self, members: Membership) -> None:
        if self._referee is not None and members.table is not self._members.table:
            self._referee.set_table(members.table, self.round)
        self._members = members
        self._changes += 1
        self._prepared = None

    # -- rules ----------------------------------------------------------------------------------------------------

    def set_rules(self, rules: Rules, order: str | None = None) -> None:
        """Set other rules from the next round on; participations so far count for them too.

        Parameters
        ----------
        rules : Rules
            ``Rules()`` drops the rules there are.
        order : str, optional
            Which order of an operator this carries out; see :mod:`fedcohort.hosts.orders`.
        """
        instance(rules, Rules, "'rules'")
        before = self.rules
        named = (*rules.blocked, *rules.pinned, *(rules.budgets or ()), *(rules.paused or ()))
        forgotten = self._recorder.blocked_names(named)  # an operator's file may still name them
        rules = rules.with_names(lambda name: forgotten.get(name, name))
        if rules.to_dict() == (before or Rules()).to_dict():
            return  # a restart with the same rules is no change, and must not be on record as one
        referee = referee_from(rules, self.journal)
        self._recorder.record_rules(rules, self._turn, order)
        self._referee, self._prepared = referee, None
        log.info("the rules change from round %d on: %s", self.round, difference(before, rules))

    def set_attributes(self, attributes: Mapping[str, Attributes]) -> None:
        """Store what clients, by name, report about themselves: battery, network, region, for rules to use."""
        instance(attributes, Mapping, "'attributes'", "a mapping from client names to attributes")  # type: ignore[type-abstract]
        plain = {name: plain_attributes(name, facts) for name, facts in attributes.items()}
        blocked = self._recorder.blocked_names(plain)
        news = {name: own for name, own in plain.items() if name not in blocked}
        if self._referee is None or all(self._referee.attributes.get(name) == own for name, own in news.items()):
            return
        self._recorder.record_attributes({**self._referee.attributes, **news}, news)
        self._referee.set_attributes(news)
        self._prepared = None

    # -- selectors ------------------------------------------------------------------------------------------------

    def change_selector(self, selector: Selector[Any] | str) -> None:
        """Let another selector choose from the next round on; it starts from the outcomes the journal holds.

        Rounds whose reports lack a signal it needs are passed over. What the previous one learned is dropped.
        """
        selector = as_selector(selector).adapt(self.table.signals | (self._signals or frozenset()))
        check_signals(selector, self.table, self._signals)
        check_one_at_a_time(self._turn.asynchronous, selector)
        rng = streams.stream(self.seed, streams.INITIALISATION, self.round)
        own = StatefulSelector.from_outcomes(selector, self.table, self.journal, rng)
        self._recorder.record_selector(self.selector, own, self._turn)
        self._own, self._prepared = own, None

    def add_shadow(self, name: str, shadow: Selector[Any] | str) -> None:
        """Let a selector watch from now on; it starts from the outcomes the journal holds."""
        shadow = as_shadows({text(name, "'name'"): shadow})[name]
        if name in self._shadows.running:
            raise InputError(f"There is already a shadow {name!r}.", hint="remove it first, or choose another name")
        check_signals(shadow, self.table, None, f"shadow {name!r}")
        check_one_at_a_time(self._turn.asynchronous, shadow)
        rng = streams.stream(self.seed, f"{streams.INITIALISATION}:{name}", 0)
        running = StatefulSelector.from_outcomes(shadow, self.table, self.journal, rng, name)
        shadows = self._shadows.with_one(running)
        self._recorder.record_shadow(running, shadows, self._turn)
        self._shadows = shadows

    def remove_shadow(self, name: str) -> None:
        """Remove a shadow; what it would have picked so far stays on record."""
        if text(name, "'name'") not in self._shadows.running:
            raise InputError(f"There is no shadow {name!r}. Known: {', '.join(self._shadows.running) or 'none'}.")
        others = self._shadows.without([name])
        self._recorder.record_dropped_shadow(name, "removed", "removed by the operator", others, self._turn)
        self._shadows = others


def _check_options(rules: object, commit: object, journal: object, sign: object) -> None:
    """Check what starting and opening a session have in common."""
    if rules is not None:
        instance(rules, Rules, "'rules'")
    one_of(commit, ("always", "manual"), "'commit'")
    if journal is not None:
        check_path(journal, "'journal'")
    if sign is not None:
        check_path(sign, "'sign'")


def _signer(sign: str | Path | None) -> Signer | None:
    return None if sign is None else Signer(sign)


def _first_meta(
    turn: Turn,
    own: StatefulSelector,
    shadows: Shadows,
    signals: frozenset[Signal] | None,
    rules: Rules | None,
    *,
    audit: bool,
) -> dict[str, Any]:
    """Return what a new journal says about its session."""
    meta = {
        "seed": turn.seed,
        "selector": describe(own.selector),
        "shadows": shadows.specs,
        "signals": None if signals is None else sorted(signals),
        "rules": None if rules is None else rules.to_dict(),
        "host": None,
        "audit": new_nonce() if audit else None,
    }
    # Only where it is so: journals of sessions with rounds stay readable for versions that know no others.
    return {**meta, "asynchronous": True} if turn.asynchronous else meta


def _nobody(eligibility: Eligibility | None) -> Cohort:
    """Return the cohort of a request for which the selector has nobody, or no place, to choose."""
    if eligibility is not None and len(eligibility.allowed):
        return Cohort(_NOBODY)  # the rules demand the whole cohort
    excluded = eligibility is not None and bool(eligibility.reasons)
    return Cohort(_NOBODY, notes={"reason": "the rules admit nobody" if excluded else "nobody is available"})
