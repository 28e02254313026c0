"""Write a session's events to its journal, each in one transaction."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from fedcohort.core.arrays import AnyArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import Answer, Cohort, Selector, Status
from fedcohort.core.selector_spec import describe
from fedcohort.journal import CohortRow, Journal, ReplyBlock
from fedcohort.journal.events import (
    ABANDONED,
    ATTRIBUTES,
    CHANGED,
    EXCLUDED,
    FACTS,
    FORGOTTEN,
    JOINED,
    LEFT,
    NEW_MODEL,
    PRUNED,
    RECOVERED,
    REJOINED,
    SELECTOR,
    SHADOW,
)  # fmt: skip
from fedcohort.journal.maintenance import BLOCKED, Eraser, erase, name_digest
from fedcohort.journal.scores import pack_scores
from fedcohort.session.expressions import Attributes
from fedcohort.session.members import Membership
from fedcohort.session.referee import Eligibility
from fedcohort.session.rules import Rules
from fedcohort.session.shadows import ShadowPick, Shadows
from fedcohort.session.stateful import StatefulSelector
from fedcohort.session.turn import Turn

log = logging.getLogger(__name__)
SESSION_EVENTS = frozenset({
    ABANDONED, CHANGED, SELECTOR, EXCLUDED, FORGOTTEN, RECOVERED, SHADOW,
    PRUNED, JOINED, LEFT, REJOINED, FACTS, ATTRIBUTES, NEW_MODEL,
})  # fmt: skip
"""Kinds of events that a continued session reads; a host's notes must have other kinds."""


class EventRecorder:
    """Write a session's events to a journal."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def record_creation(self, members: Membership, running: Iterable[StatefulSelector], rules: Rules | None) -> None:
        """Finish the first transaction of a new journal, which creates the file."""
        self.journal.set_table(members.table, members.active)
        self._save_states(running)
        if rules is not None:
            self.journal.add_event(CHANGED, {"round": 0, "ticket": 0, "rules": rules.to_dict()})
        self.journal.finish_creation()

    # -- rounds -----------------------------------------------------------------------------------------------------

    def record_cohort(
        self,
        cohort: Cohort,
        size: int | None,
        candidates: IntArray,
        n: int,
        *,
        answer: Answer | None,
        scores: Mapping[str, AnyArray] | None,
        picks: Mapping[str, ShadowPick],
        primary: StatefulSelector,
        shadows: Shadows,
        eligibility: Eligibility | None,
    ) -> None:
        """Record a cohort, why it was chosen, and what the shadows would have picked."""
        now = time.time()
        row = CohortRow(
            ticket=cohort.ticket,
            round=cohort.round,
            asked_at=now,
            told_at=now if cohort.size == 0 else None,  # without clients there is no report to wait for
            wanted=None if size is None else int(size),
            n_candidates=len(candidates),
            clients=cohort.clients,
            weights=cohort.weights,
            work=cohort.work,
            notes=cohort.notes,
            stop=cohort.stop,
        )
        journal = self.journal
        with journal.event():
            # The audit needs this order: the answer is linked before the cohort that was chosen with it.
            if answer is not None:
                journal.add_answer(cohort.ticket, answer.values)
            journal.add_cohort(row, None if len(candidates) == n else candidates, n)  # None: all clients
            if scores is not None:
                journal.add_scores(cohort.ticket, "", cohort.clients, pack_scores(scores), None)
            for name, pick in picks.items():
                journal.add_scores(cohort.ticket, name, pick.picked, pick.scores, pick.note)
            self._save_states((primary, *shadows.running.values()))
            failed = {name: str(pick.note) for name, pick in picks.items() if pick.failed}
            self._drop(failed, shadows, cohort.round)
            if eligibility is not None and eligibility.reasons:
                journal.add_exclusions(cohort.ticket, eligibility.codes, eligibility.reasons)

    def record_report(self, block: ReplyBlock, host: Any) -> None:
        """Record a partial report and the host's state."""
        with self.journal.event():
            self._add_replies([block])
            self._set_host(host)

    def record_late(self, ticket: int, clients: IntArray) -> None:
        """Record clients that replied after their round was closed."""
        with self.journal.event():
            self.journal.add_replies(ReplyBlock.with_status(ticket, time.time(), clients, Status.LATE, late=True))

    def record_close(
        self,
        cohort: Cohort,
        news: Iterable[ReplyBlock],
        host: Any,
        *,
        primary: StatefulSelector,
        shadows: Shadows,
        failed: Mapping[str, str],
        turn: Turn,
        abandoned: str | None = None,
    ) -> None:
        """Record the end of a cohort and what the selectors learned from it."""
        with self.journal.event():
            self._add_replies(news)
            self.journal.close_cohort(cohort.ticket)
            self._save_states((primary, *shadows.running.values()))
            self._drop(failed, shadows, turn.round)
            if abandoned is not None:
                # A round is repeated unless another was asked for since. In an asynchronous session it never is.
                repeats = cohort.round == turn.round - 1 and not turn.asynchronous
                body = {"ticket": cohort.ticket, "round": cohort.round, "reason": abandoned}
                self.journal.add_event(ABANDONED, {**body, "asked": turn.ticket, "next": turn.round - repeats})
            if shadows.running or failed:
                self.journal.set_meta("blind", shadows.blind)
            self._set_host(host)

    def record_model(self, turn: Turn, tickets: Iterable[int], host: Any) -> None:
        """Record a new global model and the tickets of the replies in it."""
        with self.journal.event():
            self.journal.add_event(NEW_MODEL, {"round": turn.round, "tickets": list(tickets)})
            self._set_host(host)

    def record_numbers(self, round_: int, values: Mapping[str, float | None]) -> None:
        """Record numbers about the global model after a round."""
        with self.journal.event():
            self.journal.add_metrics(round_, values)

    def note(self, kind: str, body: Mapping[str, Any]) -> None:
        """Record a note of the host."""
        with self.journal.event():
            self.journal.add_event(kind, body)

    # -- the federation ---------------------------------------------------------------------------------------------

    def record_join(
        self,
        members: Membership,
        first: int,
        turn: Turn,
        primary: StatefulSelector,
        shadows: Shadows,
        failed: Mapping[str, str],
    ) -> None:
        """Record that clients joined, whose indices begin at ``first``."""
        with self.journal.event():
            self.journal.set_table(members.table, members.active)
            self._save_states((primary, *shadows.running.values()))
            self._drop(failed, shadows, turn.round)
            body = {"first": first, "count": members.table.n - first, "round": turn.round}
            self.journal.add_event(JOINED, body)

    def record_members(self, members: Membership, kind: str, clients: IntArray) -> None:
        """Record that clients left or came back, or that facts about them changed."""
        with self.journal.event():
            self.journal.set_table(members.table, members.active)
            self.journal.add_event(kind, {"clients": clients.tolist()})

    def forget_client(
        self, client: str, table: ClientTable, primary: StatefulSelector, shadows: Shadows, turn: Turn, *, block: bool
    ) -> tuple[str, Membership, StatefulSelector, Shadows]:
        """Erase a client; return the name that replaces it, and the members, selector and shadows without it."""
        index = table.index(client)
        # Rows and states change in one transaction, so that no crash leaves a state that still knows the client.
        with self.journal.event():
            eraser = Eraser(client, table)
            erase(self.journal, eraser, block=block)
            members = Membership(*self.journal.table())
            primary = primary.without(index, members.table, turn.seed)
            shadows = shadows.with_names(eraser.text)
            shadows, failed = shadows.try_each(lambda shadow: shadow.without(index, members.table, turn.seed))
            self._save_states((primary, *shadows.running.values()))
            self._drop(failed, shadows, turn.round)
        return eraser.stand_in, members, primary, shadows

    def blocked_names(self, names: Iterable[str]) -> dict[str, str]:
        """Return the ``names`` of forgotten clients that are blocked, each with the name that replaces it."""
        blocked = self.journal.meta().get(BLOCKED)
        if blocked is None:
            return {}
        stand_ins = {name: blocked["digests"].get(name_digest(name, blocked["key"])) for name in names}
        return {name: stand_in for name, stand_in in stand_ins.items() if stand_in is not None}

    # -- rules, attributes, selectors -------------------------------------------------------------------------------

    def record_rules(self, rules: Rules, turn: Turn, order: str | None) -> None:
        """Record rules that hold from the next round on."""
        with self.journal.event():
            self.journal.set_meta("rules", rules.to_dict())
            since = {"round": turn.round, "ticket": turn.ticket, **({} if order is None else {"order": order})}
            self.journal.add_event(CHANGED, {**since, "rules": rules.to_dict()})

    def record_attributes(self, attributes: Mapping[str, Attributes], news: Mapping[str, Attributes]) -> None:
        """Record the clients' attributes, of which ``news`` are new."""
        with self.journal.event():
            self.journal.set_attributes(attributes, news)

    def record_selector(self, before: Selector[Any], primary: StatefulSelector, turn: Turn) -> None:
        """Record that another selector chooses from the next round on."""
        with self.journal.event():
            self.journal.drop_state(primary.name)
            self._save_states([primary])
            body = {"round": turn.round, "from": describe(before), "to": describe(primary.selector)}
            self.journal.add_event(SELECTOR, body)

    def record_shadow(self, shadow: StatefulSelector, shadows: Shadows, turn: Turn) -> None:
        """Record a new shadow, which is one of ``shadows``."""
        with self.journal.event():
            self.journal.set_meta("shadows", shadows.specs)
            self._save_states([shadow])
            self.journal.add_event(SHADOW, {"name": shadow.name, "what": "added", "round": turn.round})

    def record_dropped_shadow(self, name: str, what: str, reason: str, others: Shadows, turn: Turn) -> None:
        """Record that a shadow was dropped; ``others`` remain."""
        with self.journal.event():
            self._drop({name: reason}, others, turn.round, what)

    # -- parts of events --------------------------------------------------------------------------------------------

    def _save_states(self, running: Iterable[StatefulSelector]) -> None:
        for one in running:
            self.journal.save_state(one.name, one.state)

    def _drop(self, reasons: Mapping[str, str], others: Shadows, round_: int, what: str = "failed") -> None:
        """Record shadows that are dropped, each with the reason; ``others`` remain."""
        for name, reason in reasons.items():
            log.warning("the shadow selector %r was dropped in round %d: %s", name, round_, reason)
            self.journal.set_meta("shadows", others.specs)
            self.journal.drop_state(name)
            self.journal.add_event(SHADOW, {"name": name, "what": what, "round": round_, "reason": reason})

    def _add_replies(self, blocks: Iterable[ReplyBlock]) -> None:
        for block in blocks:
            if len(block.clients):
                self.journal.add_replies(block)

    def _set_host(self, host: Any) -> None:
        if host is not None:
            self.journal.set_meta("host", host)
