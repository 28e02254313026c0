"""Who took part how often and at what distance, read from a journal alone: the proof that participation rules held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.journal import Journal, read_journal
from fedcohort.journal.explain import ABANDONED
from fedcohort.journal.reading import CohortRow
from fedcohort.protocol import Cohort, Status
from fedcohort.rules import Referee, Rules
from fedcohort.views import in_cohort_order

CHANGED = "rules"  # the event of rules that hold from a round on


@dataclass(frozen=True)
class Breach:
    """A participation that the rules of its round did not admit."""

    client: str
    round: int
    what: str


@dataclass(frozen=True)
class Proof:
    """What a journal says about participation.

    Attributes
    ----------
    rounds : int
        Rounds with a cohort that were not abandoned.
    clients : int
    rules : Rules or None
        Those in force at the end.
    most : int
        Participations of the client with the most.
    least_separation : int or None
        The fewest rounds from one participation of a client to its next; None when nobody took part twice.
    breaches : tuple of Breach
        Empty when the rules held in every round.
    """

    rounds: int
    clients: int
    rules: Rules | None
    most: int
    least_separation: int | None
    breaches: tuple[Breach, ...]

    @property
    def holds(self) -> bool:
        """Whether there are rules and every participation kept them."""
        return self.rules is not None and not self.breaches


def verify(journal: str | Path | Journal) -> Proof:
    """Check every participation a journal holds against the rules that were in force in its round.

    Checked are the rules that follow from cohorts alone: separation, number in all, number in a window, blocked
    clients. A client takes part in a round when it is in the cohort, whatever came of it: this counts at least what
    entered a model. Rounds that were abandoned released nothing and do not count.
    """
    if not isinstance(journal, Journal):
        opened = read_journal(journal)
        try:
            return verify(opened)
        finally:
            opened.close()
    table, _ = journal.table()
    changes = journal.events(CHANGED)
    rules: Rules | None = None
    given_up = {body["ticket"] for body in journal.events(ABANDONED)}
    past: dict[int, list[int]] = {}
    breaches: list[Breach] = []
    rounds = 0
    separation: int | None = None
    for row in journal.cohorts():
        while changes and _held(changes[0], row):
            rules = Rules(**changes.pop(0)["rules"])
        if row.ticket in given_up or not len(row.clients):
            continue
        rounds += 1
        for client in row.clients.tolist():
            earlier = past.setdefault(client, [])
            if earlier:
                distance = row.round - earlier[-1]
                separation = distance if separation is None else min(separation, distance)
            if rules is not None:
                name = table.name(client)
                breaches += [Breach(name, row.round, what) for what in _broken(rules, name, row.round, earlier)]
            earlier.append(row.round)
    most = max(map(len, past.values()), default=0)
    last = Rules(**changes[-1]["rules"]) if changes else rules
    return Proof(rounds, table.n, last, most, separation, tuple(breaches))


def _held(change: Mapping[str, Any], row: CohortRow) -> bool:
    """Whether rules were set before a cohort was asked for; a round that was abandoned may be made under others."""
    if "ticket" in change:
        return int(change["ticket"]) <= row.ticket
    return int(change["round"]) <= row.round  # of a journal of an earlier version


def _broken(rules: Rules, name: str, round_: int, earlier: list[int]) -> list[str]:
    """Return what a participation in ``round_`` breaks, after those of ``earlier`` rounds."""
    found = []
    if name in rules.blocked:
        found.append("it is blocked")
    if earlier and round_ - earlier[-1] < rules.min_separation:
        found.append(f"{round_ - earlier[-1]} rounds after the last, at least {rules.min_separation} are asked for")
    most = rules.most_of(name)
    if most is not None and len(earlier) >= most:
        found.append(f"participation {len(earlier) + 1} of at most {most}")
    if rules.max_in_window is not None and rules.window is not None:
        inside = sum(round_ - past < rules.window for past in earlier) + 1
        if inside > rules.max_in_window:
            found.append(f"{inside} times in {rules.window} rounds, at most {rules.max_in_window} are allowed")
    return found


def next_round(journal: Journal) -> tuple[int, int]:
    """Return the number of the next round, and how often cohorts of that number were abandoned before."""
    _, last = journal.last()
    rows = journal.cohorts(after=last - 1)
    upto = rows[-1].round + 1 if rows else 0
    given_up = journal.events(ABANDONED)
    # A round is free again when it was the newest; only what was given up since the last request counts.
    since = [body for body in given_up if body.get("asked", body["ticket"] + 1) == last + 1]
    round_ = int(since[-1].get("next", since[-1]["round"])) if since else upto
    return round_, sum(body["round"] == round_ for body in given_up) if round_ < upto else 0


def resumed(rules: Rules, journal: Journal) -> Referee:
    """Return a referee that has counted every cohort a journal holds."""
    table, _ = journal.table()
    referee = Referee(rules, table)
    referee.set_attributes(journal.attributes())
    for body in journal.events("join"):
        first = int(body["first"])
        referee.ledger.joined[first : first + int(body["count"])] = int(body.get("round", 0))
    given_up = {body["ticket"] for body in journal.events(ABANDONED)}
    for row in journal.cohorts():
        if not len(row.clients):
            continue
        abandoned = row.ticket in given_up
        if not abandoned:
            referee.ledger.picked(row.ticket, row.round, row.clients)
        blocks = [block for block in journal.reply_blocks(row.ticket) if not block.late]
        if row.told_at is not None and blocks:
            cohort = Cohort(row.clients, round=row.round, ticket=row.ticket)
            status = np.asarray(in_cohort_order(cohort, blocks).status)
            # Who had not answered when a cohort was given up has not failed.
            answered = status != Status.MISSING if abandoned else np.ones(len(status), np.bool_)
            referee.ledger.told(row.ticket, row.clients[answered], status[answered])
    return referee
