"""What stands while rounds pass, and how it changes: members and facts, rules, the selector itself and its shadows."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedcohort.core import rng as streams
from fedcohort.core.arrays import BoolArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError, JournalError
from fedcohort.core.guard import guarded
from fedcohort.core.protocol import Cohort, Selector, is_per_client
from fedcohort.core.selector_spec import describe, rebuild_selector, untrusted_reference
from fedcohort.core.signals import REPORT_SIGNALS, Signal
from fedcohort.core.text import short_repr
from fedcohort.journal import Journal, ReplyBlock
from fedcohort.journal.codec import sealed_state, state_fields
from fedcohort.journal.events import ABANDONED, CHANGED, EXCLUDED, FORGOTTEN, PRUNED, RECOVERED, SELECTOR
from fedcohort.journal.maintenance import BLOCKED, Eraser, erase, keyed
from fedcohort.journal.presence import Presence
from fedcohort.journal.savepoint import Position
from fedcohort.session import participation
from fedcohort.session import shadows as watchers
from fedcohort.session.coverage import Coverage, Guard
from fedcohort.session.expressions import Attributes
from fedcohort.session.members import Membership
from fedcohort.session.outcomes import outcome_for
from fedcohort.session.rules import Referee, Rules
from fedcohort.session.validation import check_signals

log = logging.getLogger(__name__)
OWN_EVENTS = frozenset({
    ABANDONED, CHANGED, SELECTOR, EXCLUDED, FORGOTTEN, RECOVERED, watchers.EVENT,
    PRUNED, "join", "leave", "rejoin", "facts", "attributes",
})  # fmt: skip


@guarded(methods=True, plugins=("join", "forget", "change_selector", "add_shadow"))
class Standing:
    """The part of a session that is not about single rounds. Every change is recorded; an error changes nothing."""

    _selector: Selector[Any]
    _shadows: dict[str, Selector[Any]]
    _blind: dict[str, str]  # shadow -> what it could not learn from the last round
    _states: dict[str, Any]
    _seed: int
    _signals: frozenset[Signal] | None
    _round: int
    _ticket: int
    _journal: Journal
    _guard: Guard
    _membership: Membership
    _changes: int = 0
    _granted: dict[str, ClientTable]
    _referee: Referee | None = None  # without rules there is none
    _prepared: Any
    _open: Mapping[int, Any]  # by ticket, what was asked for and not told
    _host_state: Any

    # -- opening again ----------------------------------------------------------------------------------------------

    def _resume_rules(self, rules: Rules | None) -> None:
        """Go on with the journal's rules or with new ones, which is recorded, and with what was counted so far."""
        recorded = self._journal.meta().get("rules")
        before = None if recorded is None else Rules.recorded(recorded)
        if rules is None and before is not None and before.trusts_clients:
            raise InputError(
                f"The journal {self._journal.path} has quotas that name no values ({before.quotas}); such quotas let a "
                "client into every cohort that invents a value of its own.",
                hint="open it with rules=Rules(..., quotas={'region': {'north': 2, 'south': 2}})",
            )
        if before is not None:
            self._referee = participation.resumed(before, self._journal)
        if rules is not None:
            self.set_rules(rules)
        elif before is not None and before != Rules():
            log.info("the rules of the journal stay in force: %r; rules=Rules() drops them", before)

    def _resumed(self, name: str, selector: Selector[Any]) -> Any:
        fresh = selector.init(self._granted[name], streams.stream(self._seed, streams.INITIALISATION, 0))
        return self._journal.resume_state(name, type(fresh))

    def _resume_shadows(self, specs: Mapping[str, Any], given: Mapping[str, Selector[Any]] | None) -> None:
        """Go on with the journal's shadows, less those no longer wanted, and add new ones."""
        wanted = None if given is None else watchers.check_names(given)
        for name, spec in specs.items():
            if wanted is not None and (name not in wanted or describe(wanted[name])["params"] != spec["params"]):
                self._drop_shadow(name, "removed", "the session was opened without it")
                continue
            if wanted is None and untrusted_reference(spec) is not None:
                raise JournalError(
                    f"The journal {self._journal.path} has the shadow {name!r}, which is {untrusted_reference(spec)}; "
                    "code is not imported because a journal names it.",
                    hint=f"if you trust it, name it yourself: --selector {untrusted_reference(spec)} on the command "
                    "line, Session.open(path, shadows={...}) in Python; shadows={} goes on without",
                )
            try:
                self._shadows[name] = rebuild_selector(
                    spec, None if wanted is None else wanted[name], self._journal.path
                )
                self._set_membership_to(self._membership)
                self._states[name] = self._resumed(name, self._shadows[name])
            except Exception as error:
                self._drop_shadow(name, "failed", f"failed: {error}")
        for name, shadow in (wanted or {}).items():
            if name in self._shadows:
                continue
            check_signals(shadow, self.table, None, who=f"shadow {name!r}")
            try:
                self.add_shadow(name, shadow)
            except Exception as error:  # one that failed before fails again while it learns from the journal
                self._drop_shadow(name, "failed", f"failed: {error}")

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
        return self._membership.table

    @property
    def changes(self) -> int:
        """How often the federation has changed since the session was opened: who is in it, or what is known of them."""
        return self._changes

    @property
    def active(self) -> BoolArray:
        """(N,) who is a member now."""
        return self._membership.active

    @property
    def round(self) -> int:
        """The number of the next round, counted from 0."""
        return self._round

    @property
    def seed(self) -> int:
        """The seed all random streams derive from."""
        return self._seed

    @property
    def journal(self) -> Journal:
        """The journal, for reading."""
        return self._journal

    def position(self) -> Position:
        """Return where the session stands, for the host's own checkpoint; see :class:`fedcohort.journal.Position`."""
        return Position(
            *self._journal.newest(),
            pending=tuple(self._open),
            host=self._host_state,
            attributes=self._journal.attributes(),
            shadows=self._shadow_specs(),
            blind=dict(self._blind),
            states={name: dict(state_fields(state)) for name, state in self._states.items()},
        )

    def coverage(self) -> Coverage:
        """Return how many clients carry the training; its ``warning`` says when it is too few. Changes nothing."""
        return self._guard.coverage(self.active)

    # -- membership ---------------------------------------------------------------------------------------------

    def _set_membership_to(self, members: Membership) -> None:
        if self._referee is not None and members.table is not self._membership.table:
            self._referee.set_table(members.table, self._round)
        self._membership = members
        self._changes += 1
        self._granted = {name: members.table.granting(who.requires) for name, who in self._everybody.items()}

    @property
    def _everybody(self) -> dict[str, Selector[Any]]:
        return {"": self._selector, **self._shadows}

    def join(self, clients: ClientTable) -> None:
        """Add clients to the federation; they are candidates from the next request on."""
        if clients.has_names:
            unwanted = self._forgotten(clients.names)
            if unwanted:
                raise InputError(
                    f"The client {next(iter(unwanted))!r} was forgotten, and is blocked from joining again.",
                    hint="if it is to take part again, let it come under another name",
                )
            known = [name for name in clients.names if self._membership.knows(name)]
            if known:
                raise InputError(
                    f"The client {known[0]!r} is in the federation already.",
                    hint="a client that left comes back with session.rejoin(names)",
                )
        before = self.table.n
        active = np.concatenate([self.active, np.ones(clients.n, np.bool_)])
        members = Membership(self.table.extended(clients), active)
        states = {}
        failed: dict[str, str] = {}
        for name, selector in self._everybody.items():
            generator = streams.stream(self._seed, f"{streams.INITIALISATION}:{name}", before)
            granted = members.table.granting(selector.requires)
            try:
                states[name] = sealed_state(selector.grow(self._states[name], granted, generator), granted.n)
            except Exception as error:
                if name == "":
                    raise
                failed[name] = f"failed: {error}"
        with self._journal.event():
            self._journal.set_table(members.table, members.active)
            self._record_states(states)
            self._record_failed(failed)
            self._journal.add_event("join", {"first": before, "count": clients.n, "round": self._round})
        self._set_membership_to(members)
        self._states = states
        self._forget_shadows(failed)
        self._guard.grow(self.table.n)
        self._prepared = None

    def _forgotten(self, names: Iterable[str]) -> dict[str, str]:
        """Return which of these names were forgotten for good, each with the one that stands for it."""
        blocked = self._journal.meta().get(BLOCKED)
        if blocked is None:
            return {}
        found = ((name, blocked["digests"].get(keyed(name, blocked["key"]))) for name in names)
        return {name: stand_in for name, stand_in in found if stand_in is not None}

    def leave(self, clients: Sequence[str] | Sequence[int] | IntArray) -> None:
        """Take clients out of the federation; what is known about them is kept in case they return."""
        self._set_membership(clients, False, "leave")

    def rejoin(self, clients: Sequence[str] | Sequence[int] | IntArray) -> None:
        """Bring back clients that left, with all that was learnt about them."""
        self._set_membership(clients, True, "rejoin")

    def _set_membership(self, clients: Sequence[str] | Sequence[int] | IntArray, member: bool, kind: str) -> None:
        members, who = self._membership.changed(clients, member)
        with self._journal.event():
            self._journal.set_table(members.table, members.active)
            self._journal.add_event(kind, {"clients": who.tolist()})
        self._set_membership_to(members)
        self._prepared = None

    @property
    def rules(self) -> Rules | None:
        """The rules every cohort meets."""
        return None if self._referee is None else self._referee.rules

    def set_rules(self, rules: Rules, order: str | None = None) -> None:
        """Let other rules hold from the next round on; what was counted so far counts for them too.

        Parameters
        ----------
        rules : Rules
            ``Rules()`` drops the rules there are.
        order : str, optional
            Which order of an operator this carries out; see :mod:`fedcohort.hosts.orders`.
        """
        before = self.rules
        named = (*rules.blocked, *rules.pinned, *(rules.budgets or ()), *(rules.paused or ()))
        forgotten = self._forgotten(named)  # an operator's file may still name them
        rules = rules.renamed(lambda name: forgotten.get(name, name))
        if rules.to_dict() == (before or Rules()).to_dict():
            return
        referee = participation.resumed(rules, self._journal)
        with self._journal.event():
            self._journal.set_meta("rules", rules.to_dict())
            since = {"round": self._round, "ticket": self._ticket, **({} if order is None else {"order": order})}
            self._journal.add_event(CHANGED, {**since, "rules": rules.to_dict()})
        self._referee, self._prepared = referee, None
        log.info("the rules change from round %d on: %s", self._round, participation.difference(before, rules))

    def set_attributes(self, attributes: Mapping[str, Attributes]) -> None:
        """Take over what clients, by name, say about themselves: battery, network, region, for rules to go by."""
        unwanted = self._forgotten(attributes)
        attributes = {name: _said(name, facts) for name, facts in attributes.items() if name not in unwanted}
        if self._referee is None or all(self._referee.attributes.get(n) == v for n, v in attributes.items()):
            return
        with self._journal.event():
            self._journal.set_attributes({**self._referee.attributes, **attributes}, attributes)
        self._referee.set_attributes(attributes)
        self._prepared = None

    def update_facts(self, table: ClientTable) -> None:
        """Replace what is known about the clients (sizes, labels); names and number stay, no kind of facts goes."""
        if table.names != self.table.names or not table.signals >= self.table.signals:
            raise InputError("New facts must be about the same clients and of all the kinds the old ones are of.")
        with self._journal.event():
            self._journal.set_table(table, self.active)
            self._journal.add_event("facts", {"clients": self.table.differing(table).tolist()})
        self._set_membership_to(Membership(table, self.active))
        self._prepared = None

    def forget(self, client: str, *, block: bool = False) -> str:
        """Remove what is known about a client, for good, and return the name that stands for it from now on.

        It leaves the federation. Its name in any text, facts, attributes, reported numbers, scores, reasons and its row
        in every selector's state go; that somebody took part in these rounds stays, so that it can be proved.

        Parameters
        ----------
        client : str
        block : bool
            Whether a client of that name is kept from joining again. The journal then holds a keyed digest of the name.
        """
        index = self.table.index(client)
        before = self._shadows, self._states, self._blind
        try:
            with self._journal.event():
                eraser = Eraser(client, self.table, self._journal)
                erase(self._journal, eraser, block=block)
                self._shadows = {eraser.text(name): shadow for name, shadow in self._shadows.items()}
                self._states = {eraser.text(name): state for name, state in self._states.items()}
                self._blind = {eraser.text(name): why for name, why in self._blind.items()}
                members = Membership(*self._journal.table())
                states, failed = self._states_without(index, members.table)
                self._record_states(states)
                self._record_failed(failed)
                meta = self._journal.meta()
        except BaseException:
            self._shadows, self._states, self._blind = before
            raise
        self._set_membership_to(members)
        self._states = states
        self._forget_shadows(failed)
        self._rename(meta)
        self._journal.compact()
        if self._journal.path is not None:
            Presence.remove(self._journal.path)  # of a server that was killed: it names who was offline
        return eraser.stand_in

    def _states_without(self, index: int, table: ClientTable) -> tuple[dict[str, Any], dict[str, str]]:
        """Return every selector's state in which a client is as new, and which shadows cannot tell it."""
        states: dict[str, Any] = {}
        failed: dict[str, str] = {}
        for name, selector in self._everybody.items():
            start = streams.stream(self._seed, f"{streams.INITIALISATION}:{name}", 0)
            before = self._states[name]
            own = [f.name for f in dataclasses.fields(before) if is_per_client(f)]
            try:
                # As if everybody had just joined: how wide a row is may have turned out only while rounds passed.
                nobody = dataclasses.replace(before, **{field: getattr(before, field)[:0] for field in own})
                fresh = selector.grow(nobody, table.granting(selector.requires), start)
                changes = {field: getattr(before, field).copy() for field in own}
                for field, rows in changes.items():
                    rows[index] = getattr(fresh, field)[index]
                states[name] = sealed_state(dataclasses.replace(before, **changes), table.n)
            except Exception as error:
                if name == "":
                    raise
                failed[name] = f"failed: {error}"
        return states, failed

    def _rename(self, meta: Mapping[str, Any]) -> None:
        """Take over names as the journal has them now, in rules, pending cohorts and what the host stored."""
        self._host_state = meta["host"]
        if self._referee is not None:
            self._referee = participation.resumed(Rules.recorded(meta["rules"]), self._journal)
        self._reopen()
        self._prepared = None

    # -- the selector -------------------------------------------------------------------------------------------------

    def change_selector(self, selector: Selector[Any]) -> None:
        """Let another selector choose from the next round on; it starts from the outcomes the journal holds.

        Rounds whose reports lack a signal it needs are passed over. What the one before has learnt is given up.
        """
        selector = selector.adapted(self.table.signals | (self._signals or frozenset()))
        check_signals(selector, self.table, self._signals)
        start = streams.stream(self._seed, streams.INITIALISATION, self._round)
        state = watchers.replayed(selector, self.table.granting(selector.requires), self._journal, start)
        before = describe(self._selector)
        with self._journal.event():
            self._journal.drop_state("")
            self._journal.save_state("", state)
            body = {"round": self._round, "from": before, "to": describe(selector)}
            self._journal.add_event(SELECTOR, body)
        self._selector = selector
        self._states = {**self._states, "": state}
        self._set_membership_to(self._membership)
        self._prepared = None

    # -- shadows ------------------------------------------------------------------------------------------------------

    @property
    def shadows(self) -> Mapping[str, Selector[Any]]:
        """The shadow selectors by name; one that failed is no longer among them."""
        return dict(self._shadows)

    def add_shadow(self, name: str, shadow: Selector[Any]) -> None:
        """Let a selector watch from now on; it starts from the outcomes the journal holds."""
        watchers.check_names({name: shadow})
        if name in self._shadows:
            raise InputError(f"There is a shadow {name!r} already.", hint="remove it first, or choose another name")
        check_signals(shadow, self.table, None, who=f"shadow {name!r}")
        start = streams.stream(self._seed, f"{streams.INITIALISATION}:{name}", 0)
        state = watchers.replayed(shadow, self.table.granting(shadow.requires), self._journal, start)
        with self._journal.event():
            self._journal.set_meta("shadows", {**self._shadow_specs(), name: describe(shadow)})
            self._journal.save_state(name, state)
            self._journal.add_event(watchers.EVENT, {"name": name, "what": "added", "round": self._round})
        self._shadows[name] = shadow
        self._set_membership_to(self._membership)
        self._states = {**self._states, name: state}

    def remove_shadow(self, name: str) -> None:
        """Let a shadow watch no longer; what it would have picked so far stays on record."""
        if name not in self._shadows:
            raise InputError(f"There is no shadow {name!r}. Known: {', '.join(self._shadows) or 'none'}.")
        self._drop_shadow(name, "removed", "removed by the operator")

    def _shadow_specs(self) -> dict[str, Any]:
        return {name: describe(shadow) for name, shadow in self._shadows.items()}

    def _drop_shadow(self, name: str, what: str, reason: str) -> None:
        with self._journal.event():
            self._record_dropped(name, what, reason)
        self._forget_shadows([name])

    def _record_dropped(self, name: str, what: str, reason: str) -> None:
        log.warning("the shadow selector %r was dropped in round %d: %s", name, self._round, reason)
        self._journal.set_meta("shadows", {n: spec for n, spec in self._shadow_specs().items() if n != name})
        self._journal.drop_state(name)
        body = {"name": name, "what": what, "round": self._round, "reason": reason}
        self._journal.add_event(watchers.EVENT, body)

    def _record_failed(self, failed: Mapping[str, str]) -> None:
        for name, reason in failed.items():
            self._record_dropped(name, "failed", reason)

    def _reopen(self) -> None:
        """Read the pending cohorts from the journal."""
        raise NotImplementedError(type(self).__name__)

    def _learnt(self, cohort: Cohort, whole: ReplyBlock) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
        """Return every selector's state after a round, which shadows learnt nothing from it, and which failed."""
        states, blind, failed = {}, {}, {}
        for name, selector in self._everybody.items():
            lacking = watchers.unreported(selector, whole) if name else None
            if lacking is not None:
                blind[name], states[name] = lacking, self._states[name]
                continue
            try:
                outcome = outcome_for(selector, self._granted[name], cohort, whole)
                states[name] = sealed_state(selector.update(self._states[name], outcome), self.table.n)
            except Exception as error:
                if name == "":
                    raise
                failed[name] = f"failed: {error}"
        return states, blind, failed

    def _record_states(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            self._journal.save_state(name, state)

    def _forget_shadows(self, names: Iterable[str]) -> None:
        for name in names:
            self._shadows.pop(name, None)
            self._states.pop(name, None)
            self._granted.pop(name, None)
            self._blind.pop(name, None)


def _said(client: str, facts: Attributes) -> dict[str, str | float | int | bool]:
    """Return what a client says about itself in the form in which a journal gives it back."""
    if not isinstance(client, str):
        raise InputError(f"Attributes are those of a client by its name, a text. Got {short_repr(client)}.")
    found = {}
    for key, value in facts.items():
        if not isinstance(key, str):
            raise InputError(f"The name of an attribute must be a text. Got {short_repr(key)} of client {client!r}.")
        plain = value.item() if isinstance(value, np.generic) else value
        if not isinstance(plain, str | float | int):  # a bool is an int
            raise InputError(
                f"The attribute {short_repr(key)} of client {client!r} must be a text, a number, true or false. "
                f"Got {short_repr(value)}.",
                hint="give several facts names of their own, or leave out what is not known",
            )
        found[key] = plain
    return found
