"""Check a journal in every way: whether it is intact, and whether it follows from its seed.

This is ``fedcohort journal verify``. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fedcohort.audit import participation
from fedcohort.audit.choices import audit_journal
from fedcohort.audit.replay import replay_journal
from fedcohort.core.errors import FedcohortError, JournalError
from fedcohort.core.version import __version__
from fedcohort.journal import Journal, read_journal
from fedcohort.journal.chain import Head, read_head
from fedcohort.journal.codec import unpack_many
from fedcohort.journal.events import EXCLUDED
from fedcohort.journal.format4 import is_format_4
from fedcohort.journal.lock import Mark
from fedcohort.journal.opening import check_version, file_problems, missing, open_unchecked, row_problems
from fedcohort.journal.schema import TABLES
from fedcohort.journal.store import excluded_clients
from fedcohort.journal.tables import client_table
from fedcohort.session.resume import next_round

_SHOWN = 5  # at most this many problems of one kind are named


class _Finding(NamedTuple):
    """The result of one check; ``valid`` is None if the check was not possible."""

    check: str
    valid: bool | None
    text: str


@dataclass(frozen=True)
class _Examination:
    """The results of all checks of a journal.

    Attributes
    ----------
    head : Head or None
        The newest link of the chain; None if rows are damaged.
    """

    head: Head | None
    findings: tuple[_Finding, ...]

    @property
    def valid(self) -> bool:
        """Whether no check failed."""
        return all(finding.valid is not False for finding in self.findings)


def examine(path: str | Path, *, replay: bool = True) -> _Examination:
    """Check a journal in every possible way.

    Parameters
    ----------
    replay : bool
        Whether to replay the session as well, which takes as long as its selector did.
    """
    path = Path(path)
    database, mark, companion = open_unchecked(path)
    if is_format_4(database.connection):
        database.close()
        with closing(read_journal(path)) as journal:
            rows = _Finding("rows", True, "all are as they were written, in format 4")
            return _Examination(None, (rows, *_meaning(journal, replay)))
    with closing(Journal(database, path)) as journal, database.errors():
        database.connection.execute("BEGIN")  # the journal may be in use; a transaction reads one state of it
        check_version(database.connection, path)
        ((pages,),), ((size,),) = database.fetch("PRAGMA page_count"), database.fetch("PRAGMA page_size")
        findings = [
            _finding(
                "file",
                file_problems(database.connection),
                f"SQLite finds nothing wrong with its {pages * size / 1e6:,.1f} MB",
            ),
            _finding("rows", row_problems(database.connection), "all are as they were written"),
        ]
        head = None
        if findings[1].valid:
            rows = sum(database.fetch(f"SELECT COUNT(*) FROM {name}")[0][0] for name in TABLES)
            findings[1] = findings[1]._replace(text=f"all {rows:,} are as they were written")
            head = read_head(database.connection)
            findings.append(_events(path, head, mark, companion))
        # A replay of damaged rows would blame the selector.
        if all(finding.valid for finding in findings[:2]):
            findings += _meaning(journal, replay)
        return _Examination(head, tuple(findings))


def _finding(check: str, problems: Iterable[str], otherwise: str) -> _Finding:
    """Return what is wrong, or, if nothing is, what that means."""
    texts = list(problems)
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return _Finding(check, not texts, "; ".join(texts[:_SHOWN]) + more or otherwise)


def _meaning(journal: Journal, replay: bool) -> Iterator[_Finding]:
    """Check the contents of rows that are as they were written."""
    try:
        _read_everything(journal)
        yield _order(journal)
        proof = participation.prove_participation(journal)
        if proof.rules is not None:
            broken = [f"{b.client} in round {b.round}: {b.what}" for b in proof.breaches]
            broken += [f"{e.client}: {e.what}" for e in proof.exceeded]
            finding = _finding("rules", broken, proof.verdict.removeprefix("The rules ").rstrip("."))
            # A journal whose rules were tightened later is still valid; the finding says what it proves.
            yield finding._replace(valid=proof.kept)
        if replay:
            yield _again(journal)
    except JournalError as error:
        yield _Finding("contents", False, error.message)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        yield _Finding("contents", False, f"cannot be read: {type(error).__name__}: {error}")


def _read_everything(journal: Journal) -> None:
    """Unpack all that is stored; what cannot be unpacked raises an error, whether or not another check needs it."""
    fetch = journal.database.fetch
    clients = journal.client_count()
    journal.table()
    journal.attributes()
    for row in journal.cohorts():
        journal.candidates(row.ticket, clients)
        journal.scores(row.ticket)
    journal.reply_blocks()
    for (selector,) in fetch("SELECT DISTINCT selector FROM states UNION SELECT DISTINCT selector FROM deltas"):
        journal.state(selector)
    for kind in [kind for (kind,) in fetch("SELECT DISTINCT kind FROM events")]:
        for body in journal.events(kind):
            if kind == EXCLUDED:
                excluded_clients(body, clients)
    for (data,) in fetch("SELECT data FROM answers"):
        unpack_many(data)
    for facts in journal.versions():
        client_table(facts)


def _events(path: Path, head: Head, mark: Mark | None, companion: bool) -> _Finding:
    lost = missing(path, head, mark, companion)
    if lost is not None:
        return _Finding("events", False, lost)
    state = "in use, or left without being closed" if head.in_use else "closed"
    known = "" if mark is not None and mark.id == head.id else "; no .lock file next to it says how many there were"
    times = "once" if head.generation == 1 else f"{head.generation:,} times"
    return _Finding("events", True, f"all {head.number:,} are present; opened {times}; {state}{known}")


def _order(journal: Journal) -> _Finding:
    """Check that tickets, reports and clients refer to each other correctly."""
    rows, n = journal.cohorts(), journal.client_count()
    tickets = [row.ticket for row in rows]
    wrong = []
    if tickets != list(range(len(tickets))):
        wrong.append("tickets are missing")
    strays = sorted({block.ticket for block in journal.reply_blocks()} - set(tickets))
    if strays:
        wrong.append(f"there are reports for ticket {strays[0]}, which was never issued")
    highest = max((int(row.clients.max(initial=-1)) for row in rows), default=-1)
    if highest >= n:
        wrong.append(f"client {highest} was picked, but there are only {n} clients")
    return _finding("order", wrong, f"{len(rows):,} cohorts of {next_round(journal)[0]:,} rounds, {n:,} clients")


def _again(journal: Journal) -> _Finding:
    """Replay the session and compare every cohort."""
    audited = journal.meta()["audit"]
    try:
        if audited:
            verdict = audit_journal(journal)
            if not verdict.confirmed:
                return _Finding("replay", False if verdict.wrong else None, str(verdict.problem))
            more = "".join(f"; {remark}" for remark in verdict.remarks)
            return _Finding("replay", True, f"all {verdict.rounds:,} cohorts follow from the seed{more}")
        possible, rounds, problem = replay_journal(journal)
    except FedcohortError as error:
        if audited and not isinstance(error, JournalError):  # what an audited journal holds must be usable
            raise
        return _Finding("replay", None, f"not possible: {error.message}")
    if not possible:
        return _Finding("replay", None, f"not possible: {problem}")
    if problem is None:
        return _Finding("replay", True, f"all {rounds:,} cohorts and the selector's state follow from seed and reports")
    writer = journal.meta().get("fedcohort")
    # A selector of another release may choose differently, so a difference says nothing about the journal.
    if _release(writer) != _release(__version__):
        reason = f"cannot be checked: written by version {writer}, whose selectors had other rules"
        return _Finding("replay", None, reason)
    return _Finding("replay", False, f"{problem} (written by fedcohort {writer})")


def _release(version: object) -> tuple[str, ...]:
    """Return the release of a version; selectors of one release choose alike."""
    return tuple(str(version).split(".")[:2])
