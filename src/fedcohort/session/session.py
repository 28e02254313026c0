"""A session owns everything that changes: members, rules, selectors with their states, pending cohorts, the journal.

Hosts talk to a session, and the session talks to its selector. It handles the special cases once, for all selectors:
fewer candidates than asked for, nobody available, clients that join, leave and return, reports that are late, partial,
duplicate or unknown, failures, NaN.

A call first works out all changes, then records them in one transaction, and only then changes the session. An error
therefore leaves the session as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcohort.core import rng as streams
from fedcohort.core.arrays import BoolArray, IntArray, freeze
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError, JournalError, SelectorError, TicketError
from fedcohort.core.protocol import Answer, Cohort, Losses, Query, RoundReport, RoundRequest, Selector, Slate, Status
from fedcohort.core.selector_spec import (
    describe,
    described_name,
    rebuild_selector,
    selector_name,
    untrusted_reference,
)
from fedcohort.core.signals import Signal
from fedcohort.core.validate import boolean, instance, integer, mapping, one_of, text
from fedcohort.core.validate import path as check_path
from fedcohort.journal import Journal, ReplyBlock, events, is_blank
from fedcohort.journal.codec import state_fields
from fedcohort.journal.database import Commit
from fedcohort.journal.forgetting import Eraser, blocked_names, erase
from fedcohort.journal.lock import check_journal_path
from fedcohort.journal.presence import Presence
from fedcohort.journal.savepoint import Savepoint, rewind
from fedcohort.journal.scores import pack_scores
from fedcohort.journal.signing import Signer
from fedcohort.session import validation
from fedcohort.session.coverage import Coverage, CoverageMonitor
from fedcohort.session.explain import Explanation, explain_round, recorded_scores
from fedcohort.session.expressions import Attributes, plain_attributes
from fedcohort.session.members import Membership
from fedcohort.session.pending import PendingCohort, in_cohort_order, pending_cohorts
from fedcohort.session.referee import Eligibility, Referee
from fedcohort.session.resume import CLIENT_DIGESTS, NextCohort, check_same, client_digests, next_round, referee_from
from fedcohort.session.rules import Rules, difference
from fedcohort.session.shadows import ShadowPick, Shadows, adapt_all, failure_note
from fedcohort.session.stateful import StatefulSelector
from fedcohort.session.trial import ShadowTrial, trial_of

log = logging.getLogger(__name__)
_NOBODY = np.empty(0, np.int64)
_SESSION_EVENTS = frozenset({
    events.ABANDONED, events.ATTRIBUTES, events.CHANGED, events.EXCLUDED, events.FACTS, events.FORGOTTEN, events.JOINED,
    events.LEFT, events.NEW_MODEL, events.PRUNED, events.RECOVERED, events.REJOINED, events.SELECTOR, events.SHADOW,
})  # fmt: skip
"""Kinds of events that a continued session reads; a host's notes must have other kinds."""


class _PreparedRequest(NamedTuple):
    """A request with its slate and query, kept between ``query`` and ``ask``."""

    request: RoundRequest
    slate: Slate | None
    query: Query | None
    eligibility: Eligibility | None


class Session:
    """Run one selector over one federation.

    Parameters
    ----------
    selector : Selector or str
        The selector, or the name of a registered one.
    clients : ClientTable, int or list of str
        The federation. With a number or names, nothing is known about the clients, and all have the same size.
    seed : int
        All random numbers of the session are derived from it.
    signals : list of Signal or str, optional
        What the host can supply in reports and answers. Default: whatever the selector requires; a report that lacks
        it is refused.
    journal : path, optional
        The journal's file. Default: a journal in memory, which cannot be resumed.
    shadows : mapping of name to Selector, optional
        Selectors that see the same requests and reports; what they would have picked is recorded.
    rules : Rules, optional
        Rules for every cohort, whatever the selector.
    commit : "always" or "manual"
        Whether each event is on disk when its call returns, or only after :meth:`commit`.
    audit : bool
        Whether the journal also keeps answers and earlier facts about clients, for ``fedcohort journal audit``.
    sign : path, optional
        The operator's private key (``fedcohort journal keygen``), which signs the chain of digests with every event.
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
        # Everything is checked before the journal's file is created, so a mistake leaves nothing behind.
        path = None if journal is None else check_journal_path(journal)
        clients = validation.as_table(clients)
        first = NextCohort(integer(seed, "'seed'", least=0), asynchronous=boolean(asynchronous, "'asynchronous'"))
        supplied = validation.as_signals(signals)
        _check_options(rules, commit, sign)
        boolean(audit, "'audit'")
        wanted = validation.as_shadows(shadows) or {}
        selector, watching = adapt_all(validation.as_selector(selector), wanted, clients, supplied)
        validation.check_usable(selector, clients, supplied, first.asynchronous)
        for name, shadow in watching.items():
            validation.check_usable(shadow, clients, None, first.asynchronous, f"shadow {name!r}")
        primary = StatefulSelector.initial(selector, clients, first.seed)
        running: dict[str, StatefulSelector] = {}
        failed: dict[str, str] = {}
        for name, shadow in watching.items():
            try:
                running[name] = StatefulSelector.initial(shadow, clients, first.seed, name)
            except SelectorError as error:  # an error in a shadow must not stop the session
                failed[name] = failure_note(error)
        self._referee = None if rules is None else Referee(rules, clients)
        self._monitor = CoverageMonitor(selector_name(selector), clients.n, quiet=commit == "manual")
        meta = {
            "seed": first.seed,
            "selector": describe(primary.selector),
            "shadows": Shadows(running).specs,
            "signals": None if supplied is None else sorted(s.name for s in supplied),
            "rules": None if rules is None else rules.to_dict(),
            "host": None,
            "audit": bool(audit),
            "asynchronous": first.asynchronous,
            CLIENT_DIGESTS: None if path is None else client_digests(clients),
        }
        record = Journal.create(path, meta, commit, sign=_signer(sign))
        with _closed_on_error(record):
            self._assemble(record, first, supplied, Membership.of(clients), primary, Shadows(running), {})
            record.set_table(self.table, self.active)
            self._save_states(primary, self._shadows)
            if rules is not None:
                record.add_event(events.CHANGED, {"round": 0, "ticket": 0, "rules": rules.to_dict()})
            record.finish_creation()  # ends the first transaction; the file appears
            for name, reason in failed.items():
                self._drop_shadow(name, "failed", reason)

    def _assemble(
        self,
        journal: Journal,
        following: NextCohort,
        signals: frozenset[Signal] | None,
        members: Membership,
        primary: StatefulSelector,
        shadows: Shadows,
        pending: dict[int, PendingCohort],
        host_state: Any = None,
    ) -> None:
        self._journal = journal
        self._next = following
        self._signals = signals
        self._members = members
        self._changes = 0
        self._primary = primary
        self._shadows = shadows
        self._pending = pending
        self._host_state = host_state
        self._prepared: _PreparedRequest | None = None
        self._trial = trial_of(journal)
        self._changed_at = max((int(body.get("ticket", 0)) for body in journal.events(events.SELECTOR)), default=0)

    # -- continuing -------------------------------------------------------------------------------------------------

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
            Only needed for a selector that is not registered. It must be the one that wrote the journal.
        shadows : mapping, optional
            The shadow selectors from now on. New ones learn from the journal's rounds; shadows that are not named here
            are removed. Default: the journal's shadows.
        rules : Rules, optional
            The rules from now on; a change is recorded. Default: the journal's rules.
        commit : "always" or "manual"
        at : Savepoint, optional
            The session's position when the host last wrote its own files. Everything after it is dropped.
        sign : path, optional
            The private key of a signed journal.
        """
        path = check_journal_path(path)
        _check_options(rules, commit, sign)
        selector = None if selector is None else validation.as_selector(selector)
        wanted = validation.as_shadows(shadows)
        if at is not None:
            instance(at, Savepoint, "'at'")
        journal = Journal.open(path, commit, sign=_signer(sign))
        with _closed_on_error(journal):
            if at is not None:
                rewind(journal, at)
            self = cls._continue_from(journal, selector, wanted, rules, quiet=commit == "manual")
        # The journal knows why a shadow is blind now; at the savepoint it may have been for another reason.
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
    ) -> Session:
        """Return the session of a journal, with the shadows and rules that its caller wants from now on."""
        meta = journal.meta()
        seed = int(meta["seed"])
        signals = None if meta["signals"] is None else frozenset(map(Signal.by_name, meta["signals"]))
        members = Membership(*journal.table())
        adapted = None if selector is None else adapt_all(selector, {}, members.table, signals)[0]
        changes = journal.events(events.SELECTOR)
        chooses = changes[-1]["to"] if changes else meta["selector"]
        if adapted is not None and changes and "order" in changes[-1]:
            # A run is started again as it was begun; an operator's later order stays.
            given, now = described_name(describe(adapted)), described_name(chooses)
            if given in [described_name(body["from"]) for body in changes]:
                log.info("an operator's order stays in force: %s chooses, and not %s of the start", now, given)
                adapted = None
        rebuilt = rebuild_selector(chooses, adapted, journal.path)
        primary = StatefulSelector.from_state(rebuilt, members.table, seed, journal)
        following, pending = NextCohort.from_journal(journal, seed), pending_cohorts(journal, members.table)
        # Everything comes from the journal, except selectors' code: from the caller or the registry.
        self = object.__new__(cls)  # the constructor would start a new journal
        self._referee = None
        self._assemble(journal, following, signals, members, primary, Shadows(), pending, meta["host"])
        self._resume_shadows(selector, shadows)
        before = None if meta.get("rules") is None else Rules(**meta["rules"])
        if before is not None:
            self._referee = referee_from(before, journal)
        if rules is not None:
            self.set_rules(rules)
        elif before is not None and before != Rules():
            log.info("the rules of the journal stay in force: %r; rules=Rules() drops them", before)
        self._monitor = CoverageMonitor(selector_name(rebuilt), self.table.n, journal.picks(), quiet=quiet)
        self._end_trial()
        return self

    def _resume_shadows(self, selector: Selector[Any] | None, shadows: Mapping[str, Selector[Any]] | None) -> None:
        """Continue the journal's shadows; if ``shadows`` is given, drop those it lacks and add the new ones.

        ``selector`` is the caller's argument; shadows are adapted to what it reads.
        """
        meta = self.journal.meta()
        if shadows is not None and selector is not None:
            _, shadows = adapt_all(selector, shadows, self.table, self._signals)
        # Whoever starts the run again need not know of a trial that an operator has ordered.
        ordered = self._trial.name if self._trial is not None and self._trial.order is not None else None
        # Shadows are dropped before new ones are added, so that a new one may take the name of an old one.
        dropped: dict[str, tuple[str, str]] = {}  # by name, the event and the reason
        for name, spec in meta["shadows"].items():
            shadow = None if shadows is None else shadows.get(name)
            if shadows is None:
                code = untrusted_reference(spec)
                if code is not None:
                    raise JournalError(
                        f"The journal {self.journal.path} has the shadow {name!r}, which is {code}; code is not "
                        "imported just because a journal names it.",
                        hint=f"if you trust it, name it yourself: --selector {code} on the command line, "
                        "Session.open(path, shadows={...}) in Python; shadows={} continues without it",
                    )
            elif name != ordered and (shadow is None or describe(shadow)["params"] != spec["params"]):
                dropped[name] = "removed", "the session was opened without it"
                continue
            try:
                rebuilt = rebuild_selector(spec, shadow, self.journal.path)
                running = StatefulSelector.from_state(rebuilt, self.table, self.seed, self.journal, name)
                self._shadows = self._shadows.with_one(running)
            except Exception as error:  # an error in a shadow must not stop the session
                dropped[name] = "failed", f"failed: {error}"
        for name, (event, reason) in dropped.items():
            self._drop_shadow(name, event, reason)
        for name, shadow in (shadows or {}).items():
            if name not in self._shadows.running:
                try:
                    self.add_shadow(name, shadow)
                except SelectorError as error:  # it may have failed before, and learns from the same rounds now
                    self._drop_shadow(name, "failed", failure_note(error))
        self._shadows = Shadows(self._shadows.running, meta.get("blind", {}))

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
        """Continue the session at ``path``, or start it if there is none.

        It is an error if the journal was started with another seed, other clients or other signals.
        """
        path = check_journal_path(path)
        _check_options(rules, commit, sign)
        if is_blank(path):
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
                asynchronous=asynchronous,
            )
        selector, clients = validation.as_selector(selector), validation.as_table(clients)
        supplied = validation.as_signals(signals)
        wanted = validation.as_shadows(shadows)
        journal = Journal.open(path, commit, sign=_signer(sign))
        with _closed_on_error(journal):
            check_same(journal, seed=seed, clients=clients, signals=supplied, audit=audit, asynchronous=asynchronous)
            return cls._continue_from(journal, selector, wanted, rules, quiet=commit == "manual")

    def __repr__(self) -> str:
        path = self.journal.path
        journal = "in memory" if path is None else repr(str(path))
        clients = f"{self.table.n} client{'' if self.table.n == 1 else 's'}"
        return f"<Session {selector_name(self.selector)}: {clients}, round {self.round}, journal {journal}>"

    def close(self) -> None:
        """Close the journal. With ``commit="manual"``, uncommitted events are lost."""
        self.journal.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def commit(self) -> None:
        """With ``commit="manual"``, make everything so far durable."""
        self.journal.commit()

    # -- what a host may read ------------------------------------------------------------------------------------------

    @property
    def selector(self) -> Selector[Any]:
        """The selector of this session."""
        return self._primary.selector

    @property
    def requires(self) -> frozenset[Signal]:
        """The signals that the host must report: those the selector reads, except what the session itself knows."""
        return frozenset(s for s in self.selector.requires if s.reported and s != Signal.STALENESS)

    @property
    def trial_signals(self) -> frozenset[Signal]:
        """The signals that a selector on trial reads; a host should ask for those that all clients can report."""
        if self._trial is None or self._trial.name not in self.shadows:
            return frozenset()
        return frozenset(s for s in self.shadows[self._trial.name].requires if s.reported and s != Signal.STALENESS)

    @property
    def state(self) -> Any:
        """The selector's current state, read-only."""
        return self._primary.state

    @property
    def shadows(self) -> Mapping[str, Selector[Any]]:
        """The shadow selectors by name, without those that failed."""
        return self._shadows.selectors

    @property
    def rules(self) -> Rules | None:
        """The rules for every cohort."""
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
        """The number of the next round, from 0; in an asynchronous session, the number of the newest model."""
        return self._next.round

    @property
    def asynchronous(self) -> bool:
        """Whether clients are asked for one by one, and rounds are global models."""
        return self._next.asynchronous

    @property
    def seed(self) -> int:
        """The seed of all random streams."""
        return self._next.seed

    @property
    def pending(self) -> tuple[Cohort, ...]:
        """Cohorts without a complete report, oldest first; after a crash the host trains or abandons them."""
        return tuple(item.cohort for item in self._pending.values())

    @property
    def host_state(self) -> Any:
        """What the host stored with its last ``tell``."""
        return self._host_state

    @property
    def journal(self) -> Journal:
        """The journal, for reading."""
        return self._journal

    def savepoint(self) -> Savepoint:
        """Return the session's position, for the host's checkpoint; see :class:`fedcohort.journal.Savepoint`."""
        running = (self._primary, *self._shadows.running.values())
        return Savepoint(
            *self.journal.newest(),
            pending=tuple(self._pending),
            host=self._host_state,
            attributes=self.journal.attributes(),
            shadows=self._shadows.specs,
            blind=self._shadows.blind,
            states={one.name: dict(state_fields(one.state)) for one in running},
        )

    def coverage(self) -> Coverage:
        """Return how many clients carry the training, with a ``warning`` if it is too few. Changes nothing."""
        return self._monitor.tally.coverage(self.active)

    def explain(self, round_: int, client: int | str | None = None) -> Explanation:
        """Explain why ``client`` was or was not picked in ``round_``; without a client, explain the whole round."""
        return explain_round(self.journal, round_, client)

    # -- asking -------------------------------------------------------------------------------------------------------

    def eligibility(self, request: RoundRequest | int | None) -> Eligibility | None:
        """Return which clients the rules exclude and demand for a request; None without rules. Changes nothing."""
        return self._prepare(validation.as_request(request)).eligibility

    def query(self, request: RoundRequest | int | None) -> Query | None:
        """Return the selector's question before it chooses, or None. Changes nothing.

        A question for losses has the clients to ask as indices (``query.clients``) and as ``query.names``.
        """
        self._prepared = None
        return self._prepare(validation.as_request(request)).query

    def ask(self, request: RoundRequest | int | None, answer: Answer | None = None, **answers: Any) -> Cohort:
        """Choose and record the cohort of the next round, and return it.

        Parameters
        ----------
        request : int, None or RoundRequest
            How many clients; None asks for all that are available. A RoundRequest also names the available clients.
        answer : Answer, optional
            The answer to what :meth:`query` returned for the same request.
        **answers
            A short form of the answer, for a selector that asks for losses: ``loss=measure``, a function from client
            names to their losses, or the losses of all clients as an array or by name. Selectors that ask nothing
            ignore it.
        """
        asked = "request" if isinstance(request, RoundRequest) else str(request)
        request = validation.as_request(request)
        if answer is not None:
            instance(answer, Answer, "'answer'", "an Answer")
        prepared = self._prepare(request)
        if answers and answer is None:
            answer = validation.answer_of(prepared.query, self.table, answers)
        validation.check_answer(self.selector, asked, self.table.n, prepared.query, answer)
        # The session changes only after the cohort is recorded, so an error before that leaves it as it was.
        here, slate, eligibility = self._next, prepared.slate, prepared.eligibility
        primary, shadows, picks = self._primary, self._shadows, dict[str, ShadowPick]()
        allowed = None if eligibility is None else eligibility.allowed
        if slate is None:
            candidates, cohort = (_NOBODY if allowed is None else allowed), Cohort(_NOBODY)
            if not len(candidates):  # otherwise the clients that the rules demand fill the whole cohort
                kept_out = eligibility is not None and bool(eligibility.reasons)
                reason = "the rules admit nobody" if kept_out else "nobody is available"
                cohort = Cohort(_NOBODY, notes={"reason": reason})
        else:
            candidates = slate.candidates if allowed is None else allowed
            cohort, primary = primary.select(slate, answer, here.stream(streams.SELECTION))
            if request.size is not None and len(candidates) < request.size:
                short = {"reason": f"{request.size} asked for, {len(candidates)} available"}
                cohort = dataclasses.replace(cohort, notes={**cohort.notes, **short})
            if shadows.running:
                picks = shadows.choose(here, slate, answer)
                shadows = shadows.after(picks)
        # The scores explain the selector's choice, so they are taken before the rules add clients.
        scores = recorded_scores(cohort)
        if self._referee is not None and eligibility is not None:
            cohort = self._referee.apply(cohort, eligibility, request.size, here.stream(streams.RULES))
        names = self.table.names_of(cohort.clients)
        cohort = dataclasses.replace(cohort, round=here.round, ticket=here.ticket, names=names)
        journal = self._journal
        with journal.event():
            # A replay needs this order: the answer is linked before the cohort that was chosen with it.
            if answer is not None:
                journal.add_answer(cohort.ticket, answer.values)
            journal.add_cohort(cohort, request.size, candidates, self.table.n)
            if scores is not None:
                journal.add_scores(cohort.ticket, "", cohort.clients, pack_scores(scores), None)
            for name, pick in picks.items():
                journal.add_scores(cohort.ticket, name, pick.picked, pick.scores, pick.note)
            self._save_states(primary, shadows)
            self._record_dropped({name: str(pick.note) for name, pick in picks.items() if pick.failed}, shadows)
            if eligibility is not None and eligibility.reasons:
                journal.add_exclusions(cohort.ticket, eligibility.codes, eligibility.reasons)
        # The cohort is durable now; the rest brings memory in line with the journal.
        self._primary, self._shadows = primary, shadows
        self._next = here.following()
        self._prepared = None
        # Not recorded: the monitor counts again when the session is opened.
        self._monitor.add(cohort.round, cohort.clients, self.active, len(candidates))
        # An empty cohort is closed already: nobody will report.
        if cohort.size:
            self._pending[cohort.ticket] = PendingCohort(cohort, cohort.clients.tolist())
            # Counted when it is asked, because its update may be in a model whatever becomes of the report.
            if self._referee is not None:
                self._referee.ledger.count_cohort(cohort.round, cohort.clients)
        self._end_trial()
        return cohort

    def _prepare(self, request: RoundRequest) -> _PreparedRequest:
        # query() and ask() get the same request object. The question must not be drawn again, because the answer
        # belongs to the one that was asked.
        if self._prepared is not None and self._prepared.request is request:
            return self._prepared
        size = validation.check_size(request.size, self.table.n)
        busy = np.fromiter(chain.from_iterable(item.clients for item in self._pending.values()), np.int64)
        if self._next.asynchronous and size != 1:
            raise InputError(f"An asynchronous session asks for one client at a time. Got {size}.")
        candidates = self._members.candidates(request, busy)
        eligibility = None
        if self._referee is not None:
            eligibility = self._referee.eligibility(self._next.round, self._next.ticket, candidates)
            # The rules already picked the clients they demand; the selector fills the other places.
            candidates, size = eligibility.remaining(size)
        slate = None
        query = None
        if len(candidates) and size != 0:
            primary = self._primary
            at_work = freeze(busy) if self._next.asynchronous else None
            slate = primary.slate(self._next.round, size, candidates, at_work)
            # Selectors that ask nothing need no random stream.
            if type(primary.selector).query is not Selector.query:
                query = primary.query(slate, self._next.stream(streams.QUERY))
                if isinstance(query, Losses):
                    query = query.with_names(self.table.names_of)
        self._prepared = _PreparedRequest(request, slate, query, eligibility)
        return self._prepared

    # -- telling ------------------------------------------------------------------------------------------------------

    def tell(self, report: RoundReport | Cohort, *, host: Any = None, **outcome: Any) -> None:
        """Report what happened to a cohort. The selector learns from it once the round is complete.

        Parameters
        ----------
        report : Cohort or RoundReport
            The cohort that trained, with its outcome as keywords; or a RoundReport, which can also report a round in
            parts.
        host : JSON-like, optional
            Anything the host wants to store in the same transaction, for example the name of a model checkpoint.
        **outcome
            With a cohort, signals by name: ``loss=[0.7, 0.9]`` in the order of the cohort, or ``loss={"anna": 0.7}`` by
            client. Hyphens in a name become underscores. Also ``status`` and ``kept``, as in :class:`RoundReport`. A
            client that a mapping does not name is missing.
        """
        by_keyword = isinstance(report, Cohort)
        if isinstance(report, Cohort):
            report = validation.report_of(report, outcome)
        elif outcome:
            raise InputError(
                f"A RoundReport already contains everything; '{next(iter(outcome))}' cannot be passed with it.",
                hint="session.tell(cohort, loss=...) takes signals as keywords",
            )
        instance(report, RoundReport, "'report'", "a Cohort or a RoundReport")
        # A closed ticket is not an error: a slow client answers after its round, and that is worth recording.
        item = self._pending.get(integer(report.ticket, "A report's ticket"))
        if item is None:
            if not 0 <= report.ticket < self._next.ticket:
                issued = f"this session has issued 0 to {self._next.ticket - 1}"
                raise TicketError(f"There is no ticket {report.ticket}; {issued}.")
            clients = validation.check_late(self.table, self._journal.replies(report.ticket), report)
            late = ReplyBlock.with_status(report.ticket, time.time(), clients, Status.LATE, late=True)
            with self._journal.event():
                self._journal.add_replies(late)
            return
        # The session itself knows the staleness, so no host has to report it.
        staleness = None
        if self.asynchronous:
            staleness = float(self.round - item.cohort.round)
        elif Signal.STALENESS in self.selector.requires:
            staleness = 0.0
        news = validation.check_report(
            self.selector,
            self.table,
            item.cohort,
            item.replies,
            report,
            staleness=staleness,
            by_keyword=by_keyword,
            chosen_by_it=item.cohort.ticket >= self._changed_at,
        )
        if report.complete:
            self._close(item, [news], host)
            self._end_trial()
            return
        with self._event(host):
            self._add_replies([news])
        if len(news.clients):
            item.replies.append(news)

    def advance(self, tickets: Iterable[int] = (), *, host: Any = None) -> None:
        """Report a new global model of an asynchronous session.

        Parameters
        ----------
        tickets : iterable of int
            The tickets of the replies in the new model, for the record.
        host : JSON-like, optional
            Anything the host wants to store in the same transaction.
        """
        if not self._next.asynchronous:
            raise InputError(
                "Only asynchronous sessions count new models; in other sessions, every cohort is a round.",
                hint="Session(..., asynchronous=True)",
            )
        used = [integer(ticket, "A ticket", least=0) for ticket in tickets]
        for ticket in used:
            # Never issued, or still at work.
            if ticket >= self._next.ticket or ticket in self._pending:
                raise TicketError(f"Ticket {ticket} has no reply to build a model from.")
        with self._event(host):
            self._journal.add_event(events.NEW_MODEL, {"round": self._next.round, "tickets": used})
        self._next = dataclasses.replace(self._next, round=self.round + 1, attempt=0)
        self._end_trial()

    def abandon(self, ticket: int, reason: str) -> None:
        """Close a cohort without counting its round: its clients are free, and the next request chooses again.

        What was reported so far stays; the other clients are recorded as missing, and the selector learns from that.
        The next cohort gets the round's number, unless another round has been asked for since.
        """
        text(reason, "'reason'")
        if integer(ticket, "'ticket'") not in self._pending:
            pending = ", ".join(map(str, self._pending)) or "none"
            raise TicketError(f"Ticket {ticket} is not pending. Pending: {pending}.")
        self._close(self._pending[ticket], [], None, abandoned=reason)
        # In an asynchronous session a round is a model, and abandoning a client makes none.
        if not self._next.asynchronous:
            round_, attempt = next_round(self.journal)
            self._next = dataclasses.replace(self._next, round=round_, attempt=attempt)
        self._end_trial()

    def _close(self, item: PendingCohort, news: list[ReplyBlock], host: Any, abandoned: str | None = None) -> None:
        """Let every selector learn from a complete round."""
        cohort = item.cohort
        # Selectors learn from each client of a cohort exactly once, so silent ones count as missing.
        news = item.closing_replies(news)
        replies = in_cohort_order(cohort.ticket, cohort.clients, [*item.replies, *news])
        primary = self._primary
        # Clients that an earlier selector chose were not asked for what this one reads.
        if cohort.ticket >= self._changed_at or primary.missing_signals(replies) is None:
            primary = primary.learn(cohort.round, replies)
        shadows, failed = self._shadows.learn(cohort.round, replies) if self._shadows.running else (self._shadows, {})
        journal, following = self._journal, self._next
        with self._event(host):
            self._add_replies(news)
            journal.close_cohort(cohort.ticket)
            self._save_states(primary, shadows)
            self._record_dropped(failed, shadows)
            if abandoned is not None:
                # A round is repeated unless another was asked for since. In an asynchronous session it never is.
                repeats = cohort.round == following.round - 1 and not following.asynchronous
                body = {"ticket": cohort.ticket, "round": cohort.round, "reason": abandoned}
                journal.add_event(
                    events.ABANDONED, {**body, "asked": following.ticket, "next": following.round - repeats}
                )
            if shadows.running or failed:
                journal.set_meta("blind", shadows.blind)
        self._primary, self._shadows = primary, shadows
        del self._pending[cohort.ticket]
        if self._referee is not None:
            if abandoned is None:
                self._referee.ledger.count_replies(cohort.ticket, cohort.clients, replies.status)
            else:  # its participations no longer count, so all are counted again from the journal
                self._referee = referee_from(self._referee.rules, self.journal)

    def record(self, round_: int, metrics: Mapping[str, float | None]) -> None:
        """Record numbers about the global model after ``round_``, for reports and the dashboard (NaN: unknown)."""
        round_ = integer(round_, "'round_'")
        if not 0 <= round_ < self.round:
            raise InputError(f"There is no round {round_} to record numbers for; rounds so far: {self.round}.")
        values = validation.check_numbers(metrics)
        with self._journal.event():
            self._journal.add_metrics(round_, values)

    def note(self, kind: str, body: Mapping[str, Any]) -> None:
        """Record a note of the host, for example why clients failed; changes no state.

        The kinds of events that the session itself reads are not allowed.
        """
        if text(kind, "'kind'") in _SESSION_EVENTS:
            raise InputError(
                f"The kind {kind!r} is reserved for the session's own events.",
                hint="choose another kind for a host's note",
            )
        mapping(body, "'body'")
        with self._journal.event():
            self._journal.add_event(kind, body)

    # -- members --------------------------------------------------------------------------------------------------

    def join(self, clients: ClientTable) -> None:
        """Add clients to the federation; they are candidates from the next request on."""
        instance(clients, ClientTable, "'clients'")
        if clients.has_names:
            blocked = blocked_names(self._journal, clients.names)
            if blocked:
                raise InputError(
                    f"The client {next(iter(blocked))!r} was forgotten and is blocked from joining again.",
                    hint="to take part again, it must join under another name",
                )
        members = self._members.join(clients)
        # An error of the session's selector reaches the caller. A shadow must not keep clients out, so it is dropped.
        primary = self._primary.grow(members.table, self.seed)
        shadows, failed = self._shadows.try_each(lambda shadow: shadow.grow(members.table, self.seed))
        first = self.table.n
        with self._journal.event():
            self._journal.set_table(members.table, members.active)
            self._save_states(primary, shadows)
            self._record_dropped(failed, shadows)
            body = {"first": first, "count": members.table.n - first, "round": self.round}
            self._journal.add_event(events.JOINED, body)
        self._primary, self._shadows = primary, shadows
        self._monitor.tally.grow(members.table.n)
        self._set_members(members)

    def leave(self, clients: Sequence[str] | Sequence[int] | IntArray) -> None:
        """Remove clients from the federation; what is known about them is kept in case they return."""
        members, indices = self._members.change(clients, False)
        self._record_members(members, events.LEFT, indices)

    def rejoin(self, clients: Sequence[str] | Sequence[int] | IntArray) -> None:
        """Bring back clients that left, with everything learned about them."""
        members, indices = self._members.change(clients, True)
        self._record_members(members, events.REJOINED, indices)

    def update_facts(self, table: ClientTable) -> None:
        """Replace facts about the clients (sizes, labels); the clients and the kinds of facts must stay."""
        instance(table, ClientTable, "'table'")
        members = self._members.with_facts(table)
        self._record_members(members, events.FACTS, self.table.differing(table))
        self._primary, self._shadows = self._primary.with_table(table), self._shadows.with_table(table)

    def forget(self, client: str, *, block: bool = False) -> str:
        """Remove everything known about a client for good, and return the name that replaces its own.

        The client leaves the federation. Its name in any text, its facts, attributes, reported numbers, scores and
        reasons, and its row in every selector's state are erased. That some client took part in these rounds stays on
        record, as evidence.

        Parameters
        ----------
        block : bool
            Whether to keep a client of that name from joining again. The journal then holds a keyed digest of the name.
        """
        text(client, "'client'")
        boolean(block, "'block'")
        index = self.table.index(client)
        # Rows and states change in one transaction, so that no crash leaves a state that still knows the client.
        with self._journal.event():
            eraser = Eraser(client, self.table)
            erase(self._journal, eraser, block_name=block)
            members = Membership(*self._journal.table())
            primary = self._primary.without(index, members.table, self.seed)
            shadows, failed = self._shadows.with_names(eraser.text).try_each(
                lambda shadow: shadow.without(index, members.table, self.seed)
            )
            self._save_states(primary, shadows)
            self._record_dropped(failed, shadows)
        self._primary, self._shadows = primary, shadows
        # Rules, pending cohorts and the host's state may contain the old name, so all are read again from the journal.
        meta = self.journal.meta()
        self._host_state = meta["host"]
        if self._referee is not None:
            self._referee = referee_from(Rules(**meta["rules"]), self.journal)
        self._pending = pending_cohorts(self.journal, members.table)
        self._trial = trial_of(self.journal)
        self._set_members(members)
        self.journal.compact()  # deleted rows stay readable in the file until it is rewritten
        if self.journal.path is not None:
            Presence.remove(self.journal.path)  # a server that was killed may have left it, with names of clients
        return eraser.stand_in

    def _record_members(self, members: Membership, kind: str, clients: IntArray) -> None:
        """Record that clients left or came back, or that facts about them changed."""
        with self._journal.event():
            self._journal.set_table(members.table, members.active)
            self._journal.add_event(kind, {"clients": clients.tolist()})
        self._set_members(members)

    def _set_members(self, members: Membership) -> None:
        if self._referee is not None and members.table is not self._members.table:
            self._referee.set_table(members.table, self.round)
        self._members = members
        self._changes += 1
        self._prepared = None

    # -- rules ----------------------------------------------------------------------------------------------------

    def set_rules(self, rules: Rules, order: str | None = None) -> None:
        """Replace the rules from the next round on; earlier participations count.

        Parameters
        ----------
        rules : Rules
            The new rules; ``Rules()`` removes all rules.
        order : str, optional
            The operator's order that this carries out; see :mod:`fedcohort.hosts.orders`.
        """
        instance(rules, Rules, "'rules'")
        before = self.rules
        forgotten = blocked_names(self._journal, rules.named)  # an operator's file may still name them
        rules = rules.with_names(lambda name: forgotten.get(name, name))
        if rules.to_dict() == (before or Rules()).to_dict():
            return  # a restart with the same rules must not be recorded as a change
        referee = referee_from(rules, self.journal)
        with self._event():
            self._journal.set_meta("rules", rules.to_dict())
            since = {"round": self.round, "ticket": self._next.ticket, **({} if order is None else {"order": order})}
            self._journal.add_event(events.CHANGED, {**since, "rules": rules.to_dict()})
        self._referee = referee
        log.info("the rules change from round %d on: %s", self.round, difference(before, rules))

    def set_attributes(self, attributes: Mapping[str, Attributes]) -> None:
        """Store attributes that clients report about themselves (battery, network, region), for use in rules."""
        instance(attributes, Mapping, "'attributes'", "a mapping from client names to attributes")  # type: ignore[type-abstract]
        plain = {name: plain_attributes(name, facts) for name, facts in attributes.items()}
        blocked = blocked_names(self._journal, plain)
        news = {name: values for name, values in plain.items() if name not in blocked}
        # A host sends attributes with every heartbeat; only a change is an event.
        if self._referee is None or all(self._referee.attributes.get(name) == values for name, values in news.items()):
            return
        with self._event():
            self._journal.set_attributes({**self._referee.attributes, **news}, news)
        self._referee.set_attributes(news)

    # -- selectors ------------------------------------------------------------------------------------------------

    def change_selector(self, selector: Selector[Any] | str, *, order: str | None = None) -> None:
        """Let another selector choose from the next cohort on; it first learns from the recorded rounds.

        It skips rounds whose reports lack a signal it needs. The state of the previous selector is dropped. A trial
        of a shadow ends.

        Parameters
        ----------
        order : str, optional
            The operator's order that this carries out; see :mod:`fedcohort.hosts.orders`.
        """
        selector = validation.fitting(validation.as_selector(selector), self.table, self._signals, self.asynchronous)
        # The stream of the round: going back to a selector must not repeat its first random choices.
        rng = streams.stream(self.seed, streams.INITIALISATION, self.round)
        primary = StatefulSelector.from_outcomes(selector, self.table, self.journal, rng)
        on_trial = [name for name in self.shadows if self._trial is not None and name == self._trial.name]
        shadows = self._shadows.without(on_trial)
        since = {"round": self.round, "ticket": self._next.ticket, **({} if order is None else {"order": order})}
        with self._event():
            self._journal.drop_state(primary.name)
            self._journal.save_state(primary.name, primary.state)
            self._journal.add_event(
                events.SELECTOR, {**since, "from": describe(self.selector), "to": describe(primary.selector)}
            )
            reason = f"{selector_name(selector)} chooses from round {self.round} on"
            self._record_dropped(dict.fromkeys(on_trial, reason), shadows, "removed")
        self._primary, self._shadows = primary, shadows
        self._changed_at = self._next.ticket
        log.info("from round %d on, %s chooses", self.round, selector_name(selector))

    def try_selector(
        self, selector: Selector[Any] | str, rounds: int, *, watch: bool = False, order: str | None = None
    ) -> None:
        """Let a selector be a shadow for some rounds, and choose from then on; it replaces any earlier trial.

        Without rounds, models are counted. If the shadow fails, the session's selector stays.

        Parameters
        ----------
        watch : bool
            Whether the shadow is only removed at the end.
        order : str, optional
            The operator's order that this carries out; see :mod:`fedcohort.hosts.orders`.
        """
        integer(rounds, "'rounds'", least=1)
        boolean(watch, "'watch'")
        shadow = validation.fitting(validation.as_selector(selector), self.table, self._signals, self.asynchronous)
        trial = ShadowTrial(f"{shadow.name} on trial", self.round + rounds, watch, describe(shadow), order)
        if self._trial is not None and self._trial.name in self.shadows:
            self.remove_shadow(self._trial.name)
        self._add_shadow(trial.name, shadow, trial)

    def add_shadow(self, name: str, shadow: Selector[Any] | str) -> None:
        """Add a shadow selector; it first learns from the recorded rounds."""
        (shadow,) = (validation.as_shadows({text(name, "'name'"): shadow}) or {}).values()
        validation.check_usable(shadow, self.table, None, self.asynchronous, f"shadow {name!r}")
        self._add_shadow(name, shadow, None)

    def _add_shadow(self, name: str, shadow: Selector[Any], trial: ShadowTrial | None) -> None:
        if name in self._shadows.running:
            raise InputError(f"There is already a shadow {name!r}.", hint="remove it first, or choose another name")
        rng = streams.stream(self.seed, f"{streams.INITIALISATION}:{name}", 0)
        running = StatefulSelector.from_outcomes(shadow, self.table, self.journal, rng, name)
        shadows = self._shadows.with_one(running)
        body = {"name": name, "what": "added", "round": self.round}
        with self._journal.event():
            self._journal.set_meta("shadows", shadows.specs)
            self._journal.save_state(name, running.state)
            self._journal.add_event(events.SHADOW, body if trial is None else {**body, **trial.body()})
        self._shadows, self._trial = shadows, trial or self._trial

    def _end_trial(self) -> None:
        """If a trial is over, let its shadow choose from now on; a shadow that cannot is dropped."""
        trial = self._trial
        if trial is None or trial.name not in self.shadows or self.round < trial.until:
            return
        if self.round == trial.until and self._pending and not self.asynchronous:
            return  # the last round of the trial is not over yet
        try:
            if trial.watch:
                self._drop_shadow(trial.name, "removed", "its trial is over")
                return
            try:
                self.change_selector(self.shadows[trial.name], order=trial.order)
            except SelectorError as error:
                self._drop_shadow(trial.name, "failed", failure_note(error))
        except JournalError as error:  # what happened before is recorded; the next event tries again
            log.warning("the trial of %r cannot end yet: %s", trial.name, error)

    def remove_shadow(self, name: str) -> None:
        """Remove a shadow; what it would have picked stays on record."""
        if text(name, "'name'") not in self._shadows.running:
            raise InputError(f"There is no shadow {name!r}. Known: {', '.join(self._shadows.running) or 'none'}.")
        others = self._shadows.without([name])
        with self._journal.event():
            self._record_dropped({name: "removed by the operator"}, others, "removed")
        self._shadows = others

    def _drop_shadow(self, name: str, what: str, reason: str) -> None:
        """Record in an event of its own that a shadow is gone; the session has the others."""
        others = self._shadows.without([name])
        with self._journal.event():
            self._record_dropped({name: reason}, others, what)
        self._shadows = others

    # -- parts of an event --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _event(self, host: Any = None) -> Iterator[None]:
        """Record all writes inside, and what the host stores, or nothing; the next request is prepared anew."""
        with self._journal.event():
            yield
            if host is not None:
                self._journal.set_meta("host", host)
        if host is not None:
            self._host_state = host
        self._prepared = None

    def _save_states(self, primary: StatefulSelector, shadows: Shadows) -> None:
        for one in (primary, *shadows.running.values()):
            self._journal.save_state(one.name, one.state)

    def _record_dropped(self, reasons: Mapping[str, str], others: Shadows, what: str = "failed") -> None:
        """Record shadows that are dropped, each with the reason; ``others`` remain."""
        for name, reason in reasons.items():
            level = logging.WARNING if what == "failed" else logging.INFO
            log.log(level, "the shadow selector %r was dropped in round %d: %s", name, self.round, reason)
            self._journal.set_meta("shadows", others.specs)
            self._journal.drop_state(name)
            self._journal.add_event(events.SHADOW, {"name": name, "what": what, "round": self.round, "reason": reason})

    def _add_replies(self, blocks: Iterable[ReplyBlock]) -> None:
        for block in blocks:
            if len(block.clients):
                self._journal.add_replies(block)


def _check_options(rules: object, commit: object, sign: object) -> None:
    """Check the arguments that starting and opening a session share."""
    if rules is not None:
        instance(rules, Rules, "'rules'")
    one_of(commit, ("always", "manual"), "'commit'")
    if sign is not None:
        check_path(sign, "'sign'")


@contextlib.contextmanager
def _closed_on_error(journal: Journal) -> Iterator[None]:
    """Close a journal if the session that it belongs to cannot be started or continued."""
    try:
        yield
    except BaseException:
        journal.close()
        raise


def _signer(sign: str | Path | None) -> Signer | None:
    return None if sign is None else Signer(sign)
