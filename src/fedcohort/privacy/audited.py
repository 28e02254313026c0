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
from fedcohort.clients import ClientTable, LabelGram, LabelGramRows
from fedcohort.errors import FedcohortError, InputError, JournalError
from fedcohort.journal import CohortRow, Journal, ReplyBlock, read_journal
from fedcohort.journal.chain import Link, joined, unpacked_facts
from fedcohort.journal.codec import unpack_many
from fedcohort.journal.explain import ABANDONED
from fedcohort.journal.tables import table_of
from fedcohort.protocol import Answer, RoundReport, RoundRequest, Selector
from fedcohort.rules import Rules
from fedcohort.session import Session
from fedcohort.signals import Signal
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
    with contextlib.closing(read_journal(path)) as journal:
        meta = journal.meta()
        if meta.get("audit") is None:
            raise JournalError(
                f"The journal {path} was written without a chain, so nothing can be confirmed.",
                hint="start sessions with audit=True",
            )
        return _Replay(journal, meta, rebuilt(meta["selector"], selector, Path(path))).run(seed, receipts or {})


class _Broken(Exception):
    """Something does not follow."""


class _Replay:
    def __init__(self, journal: Journal, meta: Mapping[str, Any], selector: Selector[Any]) -> None:
        self.journal, self.meta, self.selector = journal, meta, selector
        self.final, _ = journal.table()
        self.facts: dict[str, bytes] = {}
        self.abandoned: dict[int, str] = {}
        self.cohorts = {row.ticket: row for row in journal.cohorts()}
        self.session: Session | None = None
        self.answers: dict[int, Mapping[str, AnyArray]] = {}
        self.replies: dict[int, list[ReplyBlock]] = {}
        self.rounds = 0
        self.candidate = np.zeros(self.final.n, np.int64)
        self.picked = np.zeros(self.final.n, np.int64)

    def run(self, seed: int | None, receipts: Mapping[str, str]) -> Verdict:
        tip = _START
        seen: set[str] = set()
        problem = None
        try:
            if seed is not None and seed != self.meta["seed"]:
                raise _Broken(f"The seed on record is {self.meta['seed']}, not {seed}, which was agreed on.")
            chain = self.journal.links()
            for link, _ in chain:
                if link.kind == ABANDONED:
                    self.abandoned[link.ref] = str(json.loads(link.data or b"{}").get("reason", ""))
            for link, payload in chain:
                tip = joined(tip, link.kind, payload)
                if tip != link.link:
                    raise _Broken(f"{self._where(link)} was changed after it was recorded: the chain breaks there.")
                seen.add(tip.hex())
                self._step(link, payload)
            lost = next((c for c in receipts if c.lower() not in seen), None)
            if lost is not None:
                raise _Broken(
                    f"The commitment {lost} ({receipts[lost]}) is not in this journal: it is not the one shown then."
                )
            chained = sum(1 for row in self.cohorts.values() if row.ticket < self.rounds)
            if chained != len(self.cohorts):
                raise _Broken(f"Round {self.cohorts[self.rounds].round} is on record but not in the chain.")
        except _Broken as broken:
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
                self._choose(self.cohorts[link.ref])
            case "replies":
                ticket, late, data = payload.split(b" ", 2)
                block = ReplyBlock.decoded(int(ticket), 0.0, late == b"1", data)
                if not block.late:
                    self.replies.setdefault(block.ticket, []).append(block)
            case "close":
                self._tell(link.ref)
            case "rules" if self.session is not None:
                self.session.set_rules(Rules(**json.loads(payload)["rules"]))
            case "selector" if self.session is not None:
                self.session.change_selector(rebuilt(json.loads(payload)["to"], None, self.journal.path))
            case "attributes" if self.session is not None:
                self.session.set_attributes(json.loads(payload)["clients"])

    def _table(self, link: Link) -> None:
        self.facts |= unpacked_facts(link.data or b"[]")
        table, active = table_of(self.facts)
        if self.session is None:
            signals = self.meta["signals"]
            self.session = Session(
                self.selector,
                table,
                seed=int(self.meta["seed"]),
                signals=None if signals is None else [Signal(s) for s in signals],
            )
        session = self.session
        before = session.table.n
        if table.n > before:
            session.join(_newcomers(table, before))
        if len(session.table.differing(table)):
            session.update_facts(table)
        gone, back = session.active & ~active, active & ~session.active
        if gone.any():
            session.leave(np.flatnonzero(gone))
        if back.any():
            session.rejoin(np.flatnonzero(back))

    def _choose(self, row: CohortRow) -> None:
        session = self.session
        assert session is not None
        candidates = self.journal.candidates(row.ticket, session.table.n)
        request = RoundRequest(size=row.wanted, available=candidates)
        self.candidate[candidates] += 1
        self.picked[row.clients] += 1
        try:
            query = session.query(request)
            values = self.answers.pop(row.ticket, None)
            answer = None
            if query is not None:
                if values is None:
                    raise _Broken(f"Round {row.round}: the selector asks a question, and no answer is on record.")
                answer = Answer(query, {Signal(name): array for name, array in values.items()})
            cohort = session.ask(request, answer)
        except FedcohortError as error:
            raise _Broken(f"Round {row.round}: the inputs on record cannot be chosen from: {error.message}") from error
        same = np.array_equal(cohort.clients, row.clients) and all(
            (a is None and b is None) or (a is not None and b is not None and np.array_equal(a, b))
            for a, b in ((cohort.weights, row.weights), (cohort.work, row.work))
        )
        if not same:
            ours, theirs = (", ".join(self.final.names_of(c)[:12]) for c in (cohort.clients, row.clients))
            raise _Broken(
                f"Round {row.round} does not follow from its seed and inputs: on record is {theirs or 'nobody'}; the "
                f"selector chooses {ours or 'nobody'}."
            )
        self.rounds += 1

    def _tell(self, ticket: int) -> None:
        assert self.session is not None
        blocks = self.replies.pop(ticket, [])
        names = list(dict.fromkeys(name for block in blocks for name in block.metrics))
        metrics = {}
        for name in names:
            width = next(b.metrics[name].shape[1:] for b in blocks if name in b.metrics)
            parts = [b.metrics.get(name, np.full((len(b.clients), *width), np.nan)) for b in blocks]
            metrics[Signal(name)] = np.concatenate(parts)
        clients, status, kept = (
            np.concatenate([np.asarray(getattr(b, part)) for b in blocks]) if blocks else np.empty(0, np.int64)
            for part in ("clients", "status", "kept")
        )
        given_up = ticket in self.abandoned
        report = RoundReport(
            ticket, clients, status=status, metrics=metrics, kept=kept.astype(np.bool_), complete=not given_up
        )
        try:
            self.session.tell(report)
            if given_up:
                self.session.abandon(ticket, self.abandoned[ticket])
        except FedcohortError as error:
            round_ = self.cohorts[ticket].round
            raise _Broken(f"Round {round_}: the reports on record cannot be told: {error.message}") from error


def _newcomers(table: ClientTable, before: int) -> ClientTable:
    """Return the clients after the first ``before`` as a table that can join."""
    whole = table
    names = whole.names[before:] if whole.has_names else None
    sizes = whole.sizes[before:] if Signal.SIZES in whole.signals else None
    labels: Any = None
    if Signal.LABEL_PRODUCTS in whole.signals:
        labels = whole.labels
        match labels:
            case LabelGram():
                labels = LabelGramRows(labels.gram[before:], labels.classes)
            case _:
                first, *more = [getattr(labels, f) for f in labels.__dataclass_fields__]
                labels = type(labels)(first[before:], *more)
    return ClientTable(names=names, sizes=sizes, labels=labels, n=table.n - before)


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
