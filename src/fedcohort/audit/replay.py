"""Replay a session from its journal: the same seed, clients, candidates, answers and reports give the same cohorts.

An audited journal (``audit=True``) records everything that this needs; see :mod:`fedcohort.audit.choices`. Any
other journal has cohorts, reports and events with their times. That is enough if the selector asks no questions and the
clients' facts did not change; otherwise :func:`replay_journal` says why a replay is not possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fedcohort.core.arrays import AnyArray
from fedcohort.core.clients import ClientTable, LabelGram, LabelGramRows
from fedcohort.core.errors import FedcohortError, JournalError
from fedcohort.core.protocol import Answer, RoundReport, RoundRequest, Selector
from fedcohort.core.selector_spec import rebuild_selector
from fedcohort.core.signals import Signal
from fedcohort.journal import Journal, ReplyBlock
from fedcohort.journal.codec import state_fields
from fedcohort.journal.events import ABANDONED, CHANGED, FACTS, FORGOTTEN, JOINED, NEW_MODEL, SELECTOR
from fedcohort.session.rules import Rules
from fedcohort.session.session import Session


class DoesNotFollow(Exception):
    """Something on record does not follow from what was recorded before."""


class Replay:
    """A session that is replayed step by step.

    Parameters
    ----------
    selector : the one it began with, if it is not a registered one
    """

    def __init__(self, journal: Journal, selector: Selector[Any] | None = None) -> None:
        self.journal, self.meta = journal, journal.meta()
        self.selector = rebuild_selector(self.meta["selector"], selector, journal.path)
        self.final, _ = journal.table()
        self.cohorts = {row.ticket: row for row in journal.cohorts()}
        self.session: Session | None = None
        self.rounds = 0

    @property
    def playing(self) -> Session:
        """The session, after it has started with its first clients."""
        if self.session is None:
            raise DoesNotFollow("A round is on record before any client.")
        return self.session

    def start(self, table: ClientTable) -> None:
        """Start the session with its first clients."""
        signals = self.meta["signals"]
        # No journal and no shadows: a replay changes nothing, and shadows never change a cohort.
        # Without rules, because they are recorded as events.
        self.session = Session(
            self.selector,
            table,
            seed=int(self.meta["seed"]),
            signals=None if signals is None else [Signal.by_name(s) for s in signals],
            asynchronous=bool(self.meta.get("asynchronous")),
        )

    def grow(self, table: ClientTable) -> None:
        """Let the clients join that are new in ``table``."""
        self.playing.join(_part(table, slice(self.playing.table.n, None), joining=True))

    def choose(self, ticket: int, values: Mapping[str, AnyArray] | None) -> None:
        """Ask for a recorded cohort again and compare.

        Parameters
        ----------
        values : the recorded answer to the selector's question, if there is one
        """
        row, session = self.cohorts[ticket], self.playing
        candidates = self.journal.candidates(ticket, session.table.n)
        if candidates is None:
            raise DoesNotFollow(f"Round {row.round}: its candidates were pruned and are no longer on record.")
        request = RoundRequest(size=row.wanted, available=candidates)
        try:
            query = session.query(request)
            answer = None
            if query is not None:
                if values is None:
                    raise DoesNotFollow(f"Round {row.round}: the selector asks a question, but no answer is recorded.")
                answer = Answer(query, {Signal.by_name(name): array for name, array in values.items()})
            cohort = session.ask(request, answer)
        except FedcohortError as error:
            raise DoesNotFollow(f"Round {row.round}: the recorded inputs allow no choice: {error.message}") from error
        if not (
            np.array_equal(cohort.clients, row.clients)
            and _is_same(cohort.weights, row.weights)
            and _is_same(cohort.work, row.work)
        ):
            chosen, recorded = (", ".join(self.final.names_of(c)[:12]) for c in (cohort.clients, row.clients))
            raise DoesNotFollow(
                f"Round {row.round} does not follow from its seed and inputs: recorded: {recorded or 'nobody'}; the "
                f"selector chooses {chosen or 'nobody'}."
            )
        self.rounds += 1

    def tell(self, ticket: int, blocks: list[ReplyBlock], abandoned: str | None) -> None:
        """Report the recorded replies of a cohort; ``abandoned`` is the reason if it was abandoned."""
        whole = ReplyBlock.join(ticket, blocks)
        metrics = {Signal.by_name(name): column for name, column in whole.metrics.items()}
        # Late replies are not told: they changed no state when they came, either.
        # A complete report would close the cohort, which could then not be abandoned.
        report = RoundReport(
            ticket, whole.clients, whole.status, metrics=metrics, kept=whole.kept, complete=abandoned is None
        )
        try:
            self.playing.tell(report)
            if abandoned is not None:
                self.playing.abandon(ticket, abandoned)
        except FedcohortError as error:
            round_ = self.cohorts[ticket].round
            raise DoesNotFollow(f"Round {round_}: the recorded reports are refused: {error.message}") from error

    def advance(self, body: Mapping[str, Any]) -> None:
        """Report the new model of an event."""
        try:
            self.playing.advance(body["tickets"])
        except FedcohortError as error:
            raise DoesNotFollow(f"Model {body['round'] + 1}: {error.message}") from error

    def change_rules(self, body: Mapping[str, Any]) -> None:
        """Set the rules of an event."""
        self.playing.set_rules(Rules(**body["rules"]))

    def change_selector(self, body: Mapping[str, Any]) -> None:
        """Change to the selector of an event."""
        self.playing.change_selector(rebuild_selector(body["to"], None, self.journal.path))


def _is_same(ours: AnyArray | None, theirs: AnyArray | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return np.array_equal(ours, theirs)


def _part(table: ClientTable, rows: slice, *, joining: bool = False) -> ClientTable:
    """Return some clients as a table of their own, or as one that can join the others."""
    labels: Any = None
    if Signal.LABEL_PRODUCTS in table.signals:
        labels = table.labels
        if isinstance(labels, LabelGram):  # the products of those that join are with everybody
            gram, classes = labels.gram, labels.classes
            labels = LabelGramRows(gram[rows], classes) if joining else LabelGram(gram[rows, rows], classes)
        else:
            first, *more = [getattr(labels, f) for f in labels.__dataclass_fields__]
            labels = type(labels)(first[rows], *more)
    return ClientTable(
        names=table.names[rows] if table.has_names else None,
        sizes=table.sizes[rows] if Signal.SIZES in table.signals else None,
        labels=labels,
        n=len(range(table.n)[rows]),
    )


class Verdict(NamedTuple):
    """What a replay showed.

    Attributes
    ----------
    possible : bool
        Whether the journal records enough for a replay.
    rounds : int
        How many cohorts came out as recorded.
    problem : str or None
        Why a replay is not possible, or what does not follow, in words.
    """

    possible: bool
    rounds: int
    problem: str | None


def replay_journal(journal: Journal) -> Verdict:
    """Replay a journal without ``audit=True``, and compare every cohort and the selector's final state."""
    obstacle = _obstacle(journal)
    if obstacle is not None:
        return Verdict(False, 0, obstacle)
    try:
        replay = Replay(journal)
        steps = list(_steps(journal, replay))
    except JournalError as error:
        return Verdict(False, 0, error.message)
    try:
        # The sort is stable, so simultaneous steps keep their order.
        for _, step in sorted(steps, key=lambda pair: pair[0]):
            step()
        compare_states(journal, replay.playing)
    except DoesNotFollow as broken:
        return Verdict(True, replay.rounds, str(broken))
    return Verdict(True, replay.rounds, None)


def _obstacle(journal: Journal) -> str | None:
    """Return in words why a journal cannot be replayed, or None."""
    if journal.events(FORGOTTEN):
        return "a client was forgotten"
    if journal.events(FACTS):
        return "facts about clients were replaced, and the earlier ones are not on record (audit=True keeps them)"
    if journal.attributes():
        return "rules use attributes that clients report, and the times are not recorded (audit=True records them)"
    rows = journal.cohorts()
    if any(journal.candidates(row.ticket, 0) is None for row in rows):
        return "the candidates of old rounds were pruned"
    # Steps are ordered by their times, which are wrong if the clock was set back, for example by NTP.
    times = [row.asked_at for row in rows]
    if times != sorted(times) or any(row.told_at is not None and row.told_at < row.asked_at for row in rows):
        return "the machine's clock was set back, so the order of events is not known"
    return None


def _steps(journal: Journal, replay: Replay) -> Iterator[tuple[tuple[float, int], Callable[[], None]]]:
    """Yield the recorded steps with a sort key: the time, then 0 for events and reports, 1 for cohorts."""
    table = replay.final
    joins = journal.timed_events(JOINED)
    sizes = [int(body["first"]) for _, body in joins] + [table.n]
    replay.start(_part(table, slice(0, sizes[0])))
    later = [rebuild_selector(body["to"], None, journal.path) for body in journal.events(SELECTOR)]
    for selector in (replay.selector, *later):
        if type(selector).query is not Selector.query:
            raise JournalError(
                f"{type(selector).__name__} asks clients before it chooses, and answers are on record only with "
                "audit=True"
            )
    for (at, _), upto in zip(joins, sizes[1:], strict=True):
        yield (at, 0), partial(replay.grow, _part(table, slice(0, upto)))
    for kind, step in (
        (CHANGED, replay.change_rules),
        (SELECTOR, replay.change_selector),
        (NEW_MODEL, replay.advance),
    ):
        for at, body in journal.timed_events(kind):
            yield (at, 0), partial(step, body)
    abandoned = {int(body["ticket"]): str(body["reason"]) for body in journal.events(ABANDONED)}
    for row in replay.cohorts.values():
        yield (row.asked_at, 1), partial(replay.choose, row.ticket, None)
        if row.told_at is not None and len(row.clients):
            blocks = [block for block in journal.reply_blocks(row.ticket) if not block.late]
            yield (row.told_at, 0), partial(replay.tell, row.ticket, blocks, abandoned.get(row.ticket))


def compare_states(journal: Journal, session: Session) -> None:
    """Raise an error if the recorded state is not, bit for bit, the state of the replayed session."""
    recorded = journal.state("")
    for name, value in state_fields(session.state):
        ours, theirs = np.asarray(value), np.asarray(recorded.get(name))
        # Bit by bit, so that NaN equals NaN.
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape or ours.tobytes() != theirs.tobytes():
            raise DoesNotFollow(f"The cohorts follow, but the selector's recorded state does not: {name!r} differs.")
