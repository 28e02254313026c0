"""Was every cohort really the selector's choice? Recompute a journal's rounds from its seed and inputs.

A server that picks colluders on purpose breaks what secure aggregation and differential privacy promise (Lotto, USENIX
Security 2024). A journal written with ``audit=True`` is a chain of digests that begins with a commitment to the seed.
:func:`verify` checks the chain, then plays the session again: same seed, same clients, same candidates, same answers
and reports; every cohort must come out as it is on record.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.arrays import AnyArray
from fedcohort.errors import InputError, JournalError
from fedcohort.guard import guarded
from fedcohort.journal import Journal, ReplyBlock, read_journal
from fedcohort.journal.chain import Link, joined, unpacked_facts
from fedcohort.journal.codec import unpack_many
from fedcohort.journal.explain import ABANDONED
from fedcohort.journal.place import place
from fedcohort.journal.tables import table_of
from fedcohort.protocol import Selector
from fedcohort.replay import DoesNotFollow, Replay
from fedcohort.specs import rebuilt

_START = b"fedcohort chain 1"


@dataclass(frozen=True)
class Verdict:
    """What an audit found.

    Attributes
    ----------
    confirmed : bool
    rounds : int
        How many rounds follow from seed and inputs, up to the first that does not.
    problem : str or None
        What does not follow, in words.
    commitment : str
        The newest link of the chain, in hexadecimal.
    candidate, picked : mapping of str to int
        In how many rounds each client could have been picked, and was.
    """

    confirmed: bool
    rounds: int
    problem: str | None
    commitment: str
    candidate: Mapping[str, int] = field(default_factory=dict)
    picked: Mapping[str, int] = field(default_factory=dict)


@guarded(plugins=True)
def verify(
    path: str | Path,
    selector: Selector[Any] | None = None,
    *,
    seed: int | None = None,
    receipts: Mapping[str, str] | None = None,
) -> Verdict:
    """Check a journal's chain and recompute all its cohorts.

    Parameters
    ----------
    path : path
        The journal; it must have been written with ``audit=True``.
    selector : Selector, optional
        Only for one that is not registered.
    seed : int, optional
        The seed that was agreed on, if it was: for example from a public beacon.
    receipts : mapping of commitment to where it is from, optional
        Commitments that somebody kept while the session ran; each must be a link of the chain.
    """
    with contextlib.closing(read_journal(place(path))) as journal:
        return confirm(journal, selector, seed=seed, receipts=receipts)


def confirm(
    journal: Journal,
    selector: Selector[Any] | None = None,
    *,
    seed: int | None = None,
    receipts: Mapping[str, str] | None = None,
) -> Verdict:
    """Check a journal that is open; see :func:`verify`."""
    meta = journal.meta()
    if meta.get("audit") is None:
        raise JournalError(
            f"The journal {journal.path} was written without a chain, so nothing can be confirmed.",
            hint="start sessions with audit=True",
        )
    return _Replay(journal, meta, rebuilt(meta["selector"], selector, journal.path)).run(seed, receipts or {})


class _Replay(Replay):
    """The session of a chained journal, each step taken where the chain has its link."""

    def __init__(self, journal: Journal, meta: Mapping[str, Any], selector: Selector[Any]) -> None:
        super().__init__(journal, meta, selector)
        self.facts: dict[str, bytes] = {}
        self.abandoned: dict[int, str] = {}
        self.answers: dict[int, Mapping[str, AnyArray]] = {}
        self.replies: dict[int, list[ReplyBlock]] = {}
        self.candidate = np.zeros(self.final.n, np.int64)
        self.picked = np.zeros(self.final.n, np.int64)

    def run(self, seed: int | None, receipts: Mapping[str, str]) -> Verdict:
        tip = _START
        seen: set[str] = set()
        problem = None
        try:
            if seed is not None and seed != self.meta["seed"]:
                raise DoesNotFollow(f"The seed on record is {self.meta['seed']}, not {seed}, which was agreed on.")
            chain = self.journal.links()
            for link, _ in chain:
                if link.kind == ABANDONED:
                    self.abandoned[link.ref] = str(json.loads(link.data or b"{}").get("reason", ""))
            for link, payload in chain:
                tip = joined(tip, link.kind, payload)
                if tip != link.link:
                    raise DoesNotFollow(
                        f"{self._where(link)} was changed after it was recorded: the chain breaks there."
                    )
                seen.add(tip.hex())
                self._step(link, payload)
            lost = next((c for c in receipts if c.lower() not in seen), None)
            if lost is not None:
                raise DoesNotFollow(
                    f"The commitment {lost} ({receipts[lost]}) is not in this journal: it is not the one shown then."
                )
            chained = sum(1 for row in self.cohorts.values() if row.ticket < self.rounds)
            if chained != len(self.cohorts):
                raise DoesNotFollow(f"Round {self.cohorts[self.rounds].round} is on record but not in the chain.")
        except DoesNotFollow as broken:
            problem = str(broken)
        counts = [dict(zip(self.final.names, c.tolist(), strict=True)) for c in (self.candidate, self.picked)]
        return Verdict(problem is None, self.rounds, problem, tip.hex(), counts[0], counts[1])

    def _where(self, link: Link) -> str:
        match link.kind:
            case "start":
                return "The commitment to seed, selector and signals"
            case "table":
                return "The table of clients"
            case "cohort" | "answer" | "close":
                return f"Round {self.cohorts[link.ref].round}" if link.ref in self.cohorts else f"Ticket {link.ref}"
            case "replies":
                return f"A report (row {link.ref})"
            case _:
                return f"An event ({link.kind})"

    def _step(self, link: Link, payload: bytes) -> None:
        match link.kind:
            case "table":
                self._table(link)
            case "answer":
                self.answers[link.ref] = unpack_many(link.data or b"")
            case "cohort":
                row = self.cohorts[link.ref]
                candidates = self.journal.candidates(link.ref, self.playing.table.n)
                if candidates is not None:  # a chained journal is never pruned
                    self.candidate[candidates] += 1
                self.picked[row.clients] += 1
                self.choose(link.ref, self.answers.pop(link.ref, None))
            case "replies":
                ticket, late, data = payload.split(b" ", 2)
                block = ReplyBlock.decoded(int(ticket), 0.0, late == b"1", data)
                if not block.late:
                    self.replies.setdefault(block.ticket, []).append(block)
            case "close":
                self.tell(link.ref, self.replies.pop(link.ref, []), self.abandoned.get(link.ref))
            case "rules":
                self.change_rules(json.loads(payload))
            case "selector":
                self.change_selector(json.loads(payload))
            case "attributes":
                self.playing.set_attributes(json.loads(payload)["clients"])

    def _table(self, link: Link) -> None:
        self.facts |= unpacked_facts(link.data or b"[]")
        table, active = table_of(self.facts)
        if self.session is None:
            self.start(table)
        session = self.playing
        if table.n > session.table.n:
            self.grow(table)
        if len(session.table.differing(table)):
            session.update_facts(table)
        gone, back = session.active & ~active, active & ~session.active
        if gone.any():
            session.leave(np.flatnonzero(gone))
        if back.any():
            session.rejoin(np.flatnonzero(back))


def read_receipts(path: Path) -> dict[str, str]:
    """Return the commitments in a file: one per line, the first word; the rest of the line says where it is from."""
    if not path.exists():
        raise InputError(f"There is no file {path} with commitments.")
    found = {}
    for line in path.read_text().splitlines():
        if line.strip():
            commitment, _, rest = line.strip().partition(" ")
            found[commitment] = rest.strip() or path.name
    return found
