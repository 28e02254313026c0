"""Prove from a journal that the participation rules held: how often each client took part, and how far apart."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path

from fedcohort.core.clients import ClientTable
from fedcohort.journal import Journal, read_journal
from fedcohort.journal.events import ABANDONED, CHANGED, REGISTERED
from fedcohort.journal.reading import CohortRow
from fedcohort.session.rules import Rules, difference


@dataclass(frozen=True)
class _Breach:
    """A participation that the rules of its round did not allow."""

    client: str
    round: int
    what: str


@dataclass(frozen=True)
class _Change:
    """Rules that an operator set.

    Attributes
    ----------
    round, ticket : int
        The first round and cohort they apply to.
    what : str
        How they differ from the previous rules, in words.
    """

    round: int
    ticket: int
    rules: Rules
    what: str


@dataclass(frozen=True)
class _ExceededLimit:
    """A final limit that a client had already exceeded when the limit took effect.

    Attributes
    ----------
    since : int
        The round in which the limit took effect.
    """

    client: str
    since: int
    what: str


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
    exceeded : tuple of _ExceededLimit
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
    exceeded: tuple[_ExceededLimit, ...] = ()
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


@dataclass
class _Past:
    """The participations of one client, oldest first."""

    rounds: list[int] = field(default_factory=list)
    tickets: list[int] = field(default_factory=list)

    def before(self, change: _Change) -> list[int]:
        """Return the rounds before a change of rules."""
        return self.rounds[: bisect_left(self.tickets, change.ticket)]


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
    rows = journal.cohorts()
    changes: list[_Change] = []
    # Tickets say when rules took effect, since an abandoned round may be repeated.
    for body in journal.events(CHANGED):
        rules = Rules(**body["rules"])
        what = difference(changes[-1].rules if changes else None, rules)
        changes.append(_Change(int(body["round"]), int(body["ticket"]), rules, what))
    abandoned = {body["ticket"] for body in journal.events(ABANDONED)}
    # DP-FTRL counts releases, and an abandoned round has released nothing.
    counted = [row for row in rows if row.ticket not in abandoned and len(row.clients)]
    past, breaches = _participations(counted, changes, table)
    distances = [later - sooner for history in past.values() for sooner, later in pairwise(history.rounds)]
    registered = _registered(journal, table, past)
    counts = [len(history.rounds) for history in past.values()]
    return Proof(
        rounds=len(counted),
        clients=table.n,
        rules=changes[-1].rules if changes else None,
        most=max(counts, default=0),
        least_separation=min(distances, default=None),
        breaches=tuple(breaches),
        changes=tuple(changes),
        exceeded=tuple(e for c, history in past.items() for e in _limits_exceeded(changes, table.name(c), history)),
        registered=registered,
        unregistered=None if registered is None else sum(counts) - registered,
    )


def _participations(
    rows: Sequence[CohortRow], changes: Sequence[_Change], table: ClientTable
) -> tuple[dict[int, _Past], list[_Breach]]:
    """Return the participations of every client, and those that broke the rules of their round."""
    past: dict[int, _Past] = {}
    breaches: list[_Breach] = []
    for row in rows:
        rules = next((change.rules for change in reversed(changes) if change.ticket <= row.ticket), None)
        for client in row.clients.tolist():
            history, name = past.setdefault(client, _Past()), table.name(client)
            if rules is not None:
                breaches += [
                    _Breach(name, row.round, what) for what in _violations(rules, name, row.round, history.rounds)
                ]
            history.rounds.append(row.round)
            history.tickets.append(row.ticket)
    return past, breaches


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


def _limits_exceeded(changes: Sequence[_Change], name: str, past: _Past) -> Iterator[_ExceededLimit]:
    """Yield the final limits that a client had exceeded before they took effect."""
    if not changes:
        return
    rules = changes[-1].rules
    most = rules.most_of(name)
    if most is not None:
        since = _since(changes, lambda rules: rules.most_of(name))
        count, before = len(past.rounds), len(past.before(since))
        if before > most:
            early = "all" if before == count else str(before)
            yield _exceeded(name, since, f"{count} participations, {early} before the limit of {most}")
    since = _since(changes, lambda rules: rules.min_separation)
    gap = min((b - a for a, b in pairwise(past.before(since))), default=rules.min_separation)
    if gap < rules.min_separation:
        text = f"{gap} rounds from one participation to the next, before the separation of {rules.min_separation}"
        yield _exceeded(name, since, text)
    if rules.window is not None and rules.max_in_window is not None:
        since = _since(changes, lambda rules: (rules.window, rules.max_in_window))
        rounds = past.before(since)
        inside = max((i + 1 - bisect_right(rounds, at - rules.window) for i, at in enumerate(rounds)), default=0)
        if inside > rules.max_in_window:
            text = f"{inside} times in {rules.window} rounds, before the limit of {rules.max_in_window}"
            yield _exceeded(name, since, text)


def _exceeded(name: str, since: _Change, text: str) -> _ExceededLimit:
    return _ExceededLimit(name, since.round, f"{text} took effect in round {since.round}")


def _since(changes: Sequence[_Change], limit: Callable[[Rules], object]) -> _Change:
    """Return the change that set a limit to its final value."""
    last = limit(changes[-1].rules)
    return list(takewhile(lambda change: limit(change.rules) == last, reversed(changes)))[-1]


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
