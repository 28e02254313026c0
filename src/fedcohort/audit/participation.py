"""Prove from a journal alone that the participation rules held: how often each client took part, how far apart."""

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
class Breach:
    """A participation that the rules of its round did not admit."""

    client: str
    round: int
    what: str


@dataclass(frozen=True)
class Change:
    """Rules that an operator set.

    Attributes
    ----------
    round, ticket : int
        The first round and cohort they hold for.
    what : str
        How they differ from those before, in words.
    """

    round: int
    ticket: int
    rules: Rules
    what: str


@dataclass(frozen=True)
class Exceeded:
    """A limit in force at the end that is exceeded by what a client did before the limit took effect.

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
        Those in force at the end.
    most : int
        Participations of the client with the most.
    least_separation : int or None
        The fewest rounds from one participation of a client to its next; None when nobody took part twice.
    breaches : tuple of Breach
        Participations that broke the rules in force in their round.
    changes : tuple of Change
        All rules there were, oldest first.
    exceeded : tuple of Exceeded
        Limits in force at the end that do not hold for the whole run, because they were set in its course.
    registered, unregistered : int or None
        Participations under names that the host knew to be bound to a key, and under others, which prove nothing about
        who took part. None where the journal does not say.
    """

    rounds: int
    clients: int
    rules: Rules | None
    most: int
    least_separation: int | None
    breaches: tuple[Breach, ...]
    changes: tuple[Change, ...] = ()
    exceeded: tuple[Exceeded, ...] = ()
    registered: int | None = None
    unregistered: int | None = None

    @property
    def kept(self) -> bool:
        """Whether every round kept the rules that were in force in it."""
        return not self.breaches

    @property
    def holds(self) -> bool:
        """Whether there are rules at the end, every round kept its own, and the whole run is within those of the end.

        Rules that say nothing are none.
        """
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
        text = f"Every round kept the rules in force in it; {_times(len(self.changes) - 1)}."
        if self.rules == Rules():
            return f"{text} None have been in force since round {self.changes[-1].round}."
        if self.exceeded:
            return f"{text} The run as a whole exceeds the limits in force now."
        return f"{text} The run as a whole is within those in force now."


def _times(changes: int) -> str:
    return f"they changed {changes} times" if changes != 1 else "they changed once"


@dataclass
class _Past:
    """The participations of one client, oldest first."""

    rounds: list[int] = field(default_factory=list)
    tickets: list[int] = field(default_factory=list)

    def before(self, change: Change) -> list[int]:
        """Return the rounds that came before a change of rules."""
        return self.rounds[: bisect_left(self.tickets, change.ticket)]


def verify(journal: str | Path | Journal) -> Proof:
    """Check every participation a journal holds against the rules that were in force in its round.

    Checked are the rules that follow from cohorts alone: separation, number in all, number in a window, blocked
    clients. A client takes part in a round when it is in the cohort, whatever came of it: this counts at least what
    entered a model. Rounds that were abandoned released nothing and do not count.
    """
    if not isinstance(journal, Journal):
        with closing(read_journal(journal)) as opened:
            return verify(opened)
    table, _ = journal.table()
    rows = journal.cohorts()
    changes = _changes(journal, rows)
    given_up = {body["ticket"] for body in journal.events(ABANDONED)}
    counted = [row for row in rows if row.ticket not in given_up and len(row.clients)]
    past, breaches = _participations(counted, changes, table)
    distances = [later - sooner for own in past.values() for sooner, later in pairwise(own.rounds)]
    bound = _bound_to_keys(journal, table, past)
    counts = [len(own.rounds) for own in past.values()]
    return Proof(
        rounds=len(counted),
        clients=table.n,
        rules=changes[-1].rules if changes else None,
        most=max(counts, default=0),
        least_separation=min(distances, default=None),
        breaches=tuple(breaches),
        changes=tuple(changes),
        exceeded=tuple(e for c, own in past.items() for e in _limits_exceeded(changes, table.name(c), own)),
        registered=bound,
        unregistered=None if bound is None else sum(counts) - bound,
    )


def _participations(
    rows: Sequence[CohortRow], changes: Sequence[Change], table: ClientTable
) -> tuple[dict[int, _Past], list[Breach]]:
    """Return the participations of every client, and which of them broke the rules in force."""
    past: dict[int, _Past] = {}
    breaches: list[Breach] = []
    for row in rows:
        rules = next((change.rules for change in reversed(changes) if change.ticket <= row.ticket), None)
        for client in row.clients.tolist():
            own, name = past.setdefault(client, _Past()), table.name(client)
            if rules is not None:
                breaches += [Breach(name, row.round, what) for what in _violations(rules, name, row.round, own.rounds)]
            own.rounds.append(row.round)
            own.tickets.append(row.ticket)
    return past, breaches


def _changes(journal: Journal, rows: Sequence[CohortRow]) -> list[Change]:
    """Return the rules there were; a round that was abandoned may be made again under others, so tickets count."""
    found: list[Change] = []
    for body in journal.events(CHANGED):
        rules, round_ = Rules.from_journal(body["rules"]), int(body["round"])
        if "ticket" in body:
            ticket = int(body["ticket"])
        else:  # of a journal of an earlier version
            ticket = next((row.ticket for row in rows if row.round >= round_), len(rows))
        found.append(Change(round_, ticket, rules, difference(found[-1].rules if found else None, rules)))
    return found


def _violations(rules: Rules, name: str, round_: int, earlier: list[int]) -> list[str]:
    """Return what a participation in ``round_`` breaks, after those of ``earlier`` rounds."""
    found = []
    paused = (rules.paused or {}).get(name, 0)
    if name in rules.blocked:
        found.append("it is blocked")
    if round_ < paused:
        found.append(f"it is paused until round {paused}")
    if earlier and round_ - earlier[-1] < rules.min_separation:
        found.append(f"{round_ - earlier[-1]} rounds after the last, at least {rules.min_separation} are asked for")
    most = rules.most_of(name)
    if most is not None and len(earlier) >= most:
        found.append(f"participation {len(earlier) + 1} of at most {most}")
    if rules.max_in_window is not None and rules.window is not None:
        inside = len(earlier) + 1 - bisect_right(earlier, round_ - rules.window)
        if inside > rules.max_in_window:
            found.append(f"{inside} times in {rules.window} rounds, at most {rules.max_in_window} are allowed")
    return found


def _limits_exceeded(changes: Sequence[Change], name: str, past: _Past) -> Iterator[Exceeded]:
    """Yield the limits in force at the end that a client had exceeded before they took effect."""
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
        inside = _most_in_window(past.before(since), rules.window)
        if inside > rules.max_in_window:
            text = f"{inside} times in {rules.window} rounds, before the limit of {rules.max_in_window}"
            yield _exceeded(name, since, text)


def _exceeded(name: str, since: Change, text: str) -> Exceeded:
    return Exceeded(name, since.round, f"{text} took effect in round {since.round}")


def _most_in_window(rounds: Sequence[int], window: int) -> int:
    """Return the most of ascending rounds that lie in any window of so many rounds."""
    return max((i + 1 - bisect_right(rounds, last - window) for i, last in enumerate(rounds)), default=0)


def _since(changes: Sequence[Change], limit: Callable[[Rules], object]) -> Change:
    """Return the change from which on a limit has been what it is at the end."""
    last = limit(changes[-1].rules)
    return list(takewhile(lambda change: limit(change.rules) == last, reversed(changes)))[-1]


def _bound_to_keys(journal: Journal, table: ClientTable, past: Mapping[int, _Past]) -> int | None:
    """Return how many participations were under a name that was bound to a key by then; None: not on record."""
    events = journal.timed_events(REGISTERED)
    if not events:
        return None
    asked = {row.ticket: row.asked_at for row in journal.cohorts()}
    since: dict[str, int] = {}
    for at, body in events:
        # A name counts from the cohort after the key was seen; before, anybody could have used it.
        ticket = body.get("ticket")
        if ticket is None:  # of a journal of an earlier version
            ticket = next((t for t, when in asked.items() if when >= at), len(asked))
        since.update({name: int(ticket) for name in body["names"] if name not in since})
    found = 0
    for client, own in past.items():
        first = since.get(table.name(client))
        found += 0 if first is None else len(own.tickets) - bisect_left(own.tickets, first)
    return found
