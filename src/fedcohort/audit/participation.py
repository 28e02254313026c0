"""Prove from a journal that the participation rules held: how often each client took part, and how far apart."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import NamedTuple

from fedcohort.core.clients import ClientTable
from fedcohort.journal import Journal, read_journal
from fedcohort.journal.events import ABANDONED, CHANGED, REGISTERED
from fedcohort.session.rules import Rules, difference


class _Breach(NamedTuple):
    """A participation that the rules of its round did not allow."""

    client: str
    round: int
    what: str


class _Exceeded(NamedTuple):
    """A final limit that a client had already exceeded when the limit took effect, in round ``since``."""

    client: str
    since: int
    what: str


class _Change(NamedTuple):
    """Rules that an operator set, the first round and ticket they apply to, and how they differ from the previous."""

    round: int
    ticket: int
    rules: Rules
    what: str


class _Past(NamedTuple):
    """The participations of one client, oldest first."""

    rounds: list[int]
    tickets: list[int]

    def before(self, change: _Change) -> list[int]:
        """Return the rounds before a change of rules."""
        return self.rounds[: bisect_left(self.tickets, change.ticket)]


@dataclass(frozen=True)
class Proof:
    """What a journal says about participation.

    Attributes
    ----------
    rounds : int
        Rounds with a cohort that were not abandoned.
    rules : Rules or None
        The rules at the end.
    most : int
        The largest number of participations of a client.
    least_separation : int or None
        The fewest rounds from one participation of a client to its next; None if nobody took part twice.
    breaches : tuple of _Breach
        Participations that broke the rules of their round.
    changes : tuple of _Change
        All rules, oldest first.
    exceeded : tuple of _Exceeded
        Final limits that do not hold for the whole run, because they were set later.
    registered, unregistered : int or None
        Participations under names that were bound to a key, and under other names, which do not prove who took part.
        None if the journal does not say.
    """

    rounds: int
    clients: int
    rules: Rules | None
    most: int
    least_separation: int | None
    breaches: tuple[_Breach, ...]
    changes: tuple[_Change, ...] = ()
    exceeded: tuple[_Exceeded, ...] = ()
    registered: int | None = None
    unregistered: int | None = None

    @property
    def kept(self) -> bool:
        """Whether every round kept its rules."""
        return not self.breaches

    @property
    def holds(self) -> bool:
        """Whether every round kept its rules, and the whole run keeps the final ones, of which there are some."""
        return self.rules is not None and self.rules != Rules() and self.kept and not self.exceeded

    @property
    def verdict(self) -> str:
        """What is proved, in one sentence."""
        if all(change.rules == Rules() for change in self.changes):
            return "There were no rules: nothing is proved."
        if not self.kept:
            return "The rules did not hold."
        if self.holds and len(self.changes) == 1:
            return "The rules held in every round."
        changes = len(self.changes) - 1
        times = "once" if changes == 1 else f"{changes} times"
        text = f"Every round kept the rules in force in it; they changed {times}."
        if self.rules == Rules():
            return f"{text} None have been in force since round {self.changes[-1].round}."
        if self.exceeded:
            return f"{text} The run as a whole exceeds the limits in force now."
        return f"{text} The run as a whole is within those in force now."


def prove_participation(journal: str | Path | Journal) -> Proof:
    """Check every participation in a journal against the rules of its round.

    Only rules about cohorts are checked: separation, total number, number in a window, blocked and paused clients. A
    client takes part in a round if it is in the cohort, whatever becomes of it, so every update in a model is counted.
    Abandoned rounds released nothing and do not count.
    """
    if not isinstance(journal, Journal):
        with closing(read_journal(journal)) as opened:
            return prove_participation(opened)
    table, _ = journal.table()
    changes: list[_Change] = []
    # Tickets say when rules took effect, since an abandoned round may be repeated.
    for body in journal.events(CHANGED):
        rules = Rules(**body["rules"])
        what = difference(changes[-1].rules if changes else None, rules)
        changes.append(_Change(int(body["round"]), int(body["ticket"]), rules, what))
    abandoned = {body["ticket"] for body in journal.events(ABANDONED)}
    past: dict[int, _Past] = {}
    breaches: list[_Breach] = []
    rounds = 0
    for row in journal.cohorts():
        # DP-FTRL counts releases, and an abandoned round has released nothing.
        if row.ticket in abandoned or not len(row.clients):
            continue
        rounds += 1
        # By tickets and not by rounds: rules may change between two cohorts of a round.
        in_force = next((change.rules for change in reversed(changes) if change.ticket <= row.ticket), Rules())
        for client in row.clients.tolist():
            history, name = past.setdefault(client, _Past([], [])), table.name(client)
            broken = _violations(in_force, name, row.round, history.rounds)
            breaches += [_Breach(name, row.round, what) for what in broken]
            history.rounds.append(row.round)
            history.tickets.append(row.ticket)
    gaps = [later - sooner for history in past.values() for sooner, later in pairwise(history.rounds)]
    registered = _registered(journal, table, past)
    counts = [len(history.rounds) for history in past.values()]
    return Proof(
        rounds=rounds,
        clients=table.n,
        rules=changes[-1].rules if changes else None,
        most=max(counts, default=0),
        least_separation=min(gaps, default=None),
        breaches=tuple(breaches),
        changes=tuple(changes),
        exceeded=tuple(e for c, history in past.items() for e in _limits_exceeded(changes, table.name(c), history)),
        registered=registered,
        unregistered=None if registered is None else sum(counts) - registered,
    )


def _violations(rules: Rules, name: str, round_: int, earlier: list[int]) -> list[str]:
    """Return in words which rules a participation in ``round_`` breaks, after those in ``earlier`` rounds."""
    violations = []
    paused = (rules.paused or {}).get(name, 0)
    if name in rules.blocked:
        violations.append("it is blocked")
    if round_ < paused:
        violations.append(f"it is paused until round {paused}")
    if earlier and round_ - earlier[-1] < rules.min_separation:
        violations.append(f"{round_ - earlier[-1]} rounds after the last, at least {rules.min_separation} are required")
    most = rules.most_of(name)
    if most is not None and len(earlier) >= most:
        violations.append(f"participation {len(earlier) + 1} of at most {most}")
    if rules.max_in_window is not None and rules.window is not None:
        inside = len(earlier) + 1 - bisect_right(earlier, round_ - rules.window)
        if inside > rules.max_in_window:
            violations.append(f"{inside} times in {rules.window} rounds, at most {rules.max_in_window} are allowed")
    return violations


def _limits_exceeded(changes: Sequence[_Change], name: str, past: _Past) -> Iterator[_Exceeded]:
    """Yield the final limits that a client had exceeded before they took effect."""
    if not changes:
        return

    def since(limit: Callable[[Rules], object]) -> _Change:
        """Return the change that set a limit to its final value."""
        last = limit(changes[-1].rules)
        return list(takewhile(lambda change: limit(change.rules) == last, reversed(changes)))[-1]

    def exceeded(change: _Change, text: str) -> _Exceeded:
        return _Exceeded(name, change.round, f"{text} took effect in round {change.round}")

    rules = changes[-1].rules
    most = rules.most_of(name)
    if most is not None:
        change = since(lambda rules: rules.most_of(name))
        count, before = len(past.rounds), len(past.before(change))
        if before > most:
            early = "all" if before == count else str(before)
            yield exceeded(change, f"{count} participations, {early} before the limit of {most}")
    change = since(lambda rules: rules.min_separation)
    gap = min((b - a for a, b in pairwise(past.before(change))), default=rules.min_separation)
    if gap < rules.min_separation:
        yield exceeded(
            change, f"{gap} rounds from one participation to the next, before the separation of {rules.min_separation}"
        )
    if rules.window is not None and rules.max_in_window is not None:
        change = since(lambda rules: (rules.window, rules.max_in_window))
        rounds = past.before(change)
        inside = max((i + 1 - bisect_right(rounds, at - rules.window) for i, at in enumerate(rounds)), default=0)
        if inside > rules.max_in_window:
            yield exceeded(
                change, f"{inside} times in {rules.window} rounds, before the limit of {rules.max_in_window}"
            )


def _registered(journal: Journal, table: ClientTable, past: Mapping[int, _Past]) -> int | None:
    """Return how many participations were under a name that was bound to a key by then; None if not recorded."""
    events = journal.events(REGISTERED)
    if not events:
        return None
    since: dict[str, int] = {}
    for body in events:
        # A name counts from the first cohort after its key was seen. Before, anybody could have used it.
        since.update({name: int(body["ticket"]) for name in body["names"] if name not in since})
    count = 0
    for client, history in past.items():
        first = since.get(table.name(client))
        count += 0 if first is None else len(history.tickets) - bisect_left(history.tickets, first)
    return count
