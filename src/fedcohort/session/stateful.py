"""A selector together with its state and the facts it may read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from fedcohort.core import rng as streams
from fedcohort.core.arrays import FloatArray, IntArray, freeze
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import FedcohortError, SelectorError
from fedcohort.core.protocol import Answer, Cohort, Outcome, Query, Selector, Slate, Status, is_per_client
from fedcohort.core.selector_spec import selector_name
from fedcohort.core.signals import Signal
from fedcohort.core.text import error_place, error_text
from fedcohort.journal import Journal, ReplyBlock
from fedcohort.journal.codec import freeze_state
from fedcohort.session.pending import in_cohort_order
from fedcohort.session.validation import check_cohort, check_query

T = TypeVar("T")
OWN = ""  # the name of a session's own selector; names of shadows are not empty


class StatefulSelector:
    """A selector, its state, and the client table through which it reads only the signals it declares.

    It is immutable: methods return a changed copy, so nothing has to be undone after an error. Every call of the
    selector's own code is here, and whatever it raises becomes a :class:`SelectorError`.

    Parameters
    ----------
    table : ClientTable
        The federation.
    state : the selector's state
    name : str
        '' for a session's own selector, else the name of a shadow. Random streams and the journal use it.
    """

    __slots__ = ("granted", "name", "selector", "state")

    def __init__(self, selector: Selector[Any], table: ClientTable, state: Any, name: str = OWN) -> None:
        self.selector = selector
        self.granted = table.granting(selector.requires)
        self.state = state
        self.name = name

    @classmethod
    def initial(cls, selector: Selector[Any], table: ClientTable, seed: int, name: str = OWN) -> StatefulSelector:
        """Return a selector in its initial state."""
        kind = f"{streams.INITIALISATION}:{name}" if name else streams.INITIALISATION
        state = _first_state(selector, table, streams.stream(seed, kind, 0))
        # Frozen, so that a selector that changes its state in place fails at once and not when a session is resumed.
        return cls(selector, table, freeze_state(state, table.n), name)

    @classmethod
    def from_state(
        cls, selector: Selector[Any], table: ClientTable, seed: int, journal: Journal, name: str = OWN
    ) -> StatefulSelector:
        """Return a selector in the state that a journal holds for it."""
        # The fresh state is only needed for its type, which no selector declares.
        fresh = _first_state(selector, table, streams.stream(seed, streams.INITIALISATION, 0))
        return cls(selector, table, journal.resume_state(name, type(fresh)), name)

    @classmethod
    def from_outcomes(
        cls, selector: Selector[Any], table: ClientTable, journal: Journal, rng: np.random.Generator, name: str = OWN
    ) -> StatefulSelector:
        """Return a selector that has learned from every round in a journal.

        It skips rounds whose replies lack a signal that it needs.
        """
        self = cls(selector, table, freeze_state(_first_state(selector, table, rng), table.n), name)
        for row in journal.cohorts():
            blocks = [block for block in journal.reply_blocks(row.ticket) if not block.late]
            if row.told_at is None or not blocks:
                continue
            replies = in_cohort_order(row.ticket, row.clients, blocks)
            if self.missing_signals(replies) is None:
                self = self.learn(row.round, replies)
        return self

    def with_state(self, state: Any) -> StatefulSelector:
        """Return the selector in another state."""
        # The constructor would make a view of the table, which takes time: this runs several times in every round.
        other = object.__new__(StatefulSelector)
        other.selector, other.granted, other.name = self.selector, self.granted, self.name
        other.state = state
        return other

    def with_table(self, table: ClientTable) -> StatefulSelector:
        """Return the selector with new facts about the same clients."""
        return StatefulSelector(self.selector, table, self.state, self.name)

    def with_name(self, name: str) -> StatefulSelector:
        """Return the selector under another name."""
        other = self.with_state(self.state)
        other.name = name
        return other

    def slate(self, round_: int, size: int | None, candidates: IntArray, busy: IntArray | None = None) -> Slate:
        """Return the slate of a round; the selector may change the host's size.

        In an asynchronous session, ``busy`` are the clients at work, and the size is 1.
        """
        if busy is not None:
            return Slate(round_, 1, candidates, self.granted, busy)
        most = len(candidates)
        asked = most if size is None else min(int(size), most)
        # Only a selector with a budget of its own (FedACS, for example) differs from what the host asks for.
        chosen = _call(self.selector, round_, lambda: int(self.selector.size(self.state, asked, most)))
        return Slate(round_, max(1, min(chosen, most)), candidates, self.granted)

    def query(self, slate: Slate, rng: np.random.Generator) -> Query | None:
        """Return the selector's question before it chooses, or None."""
        query = _call(self.selector, slate.round, lambda: self.selector.query(self.state, slate, rng))
        check_query(self.selector, query, slate.n)
        return query

    def select(self, slate: Slate, answer: Answer | None, rng: np.random.Generator) -> tuple[Cohort, StatefulSelector]:
        """Return the selector's cohort, and the selector after its choice."""

        def choose() -> tuple[Cohort, Any]:
            cohort, state = self.selector.select(self.state, slate, answer, rng)  # it must return both
            return cohort, state

        cohort, state = _call(self.selector, slate.round, choose)
        check_cohort(self.selector, cohort, slate)
        return cohort, self.with_state(freeze_state(state, slate.n))

    def missing_signals(self, replies: ReplyBlock) -> str | None:
        """Return in words which signals that it needs are missing from the replies of a round; None if none are."""
        lacking = sorted(s.name for s in self.selector.requires if s.is_metric and s.name not in replies.metrics)
        if lacking and (replies.status == Status.OK).any():
            return f"lacked its signals: no client reported {', '.join(lacking)}"
        return None

    def learn(self, round_: int, replies: ReplyBlock) -> StatefulSelector:
        """Return the selector after a complete round; ``replies`` has each client of the cohort, in order."""
        requires, status = self.selector.requires, replies.status
        metrics: dict[Signal, FloatArray] = {}
        ok, size = status == Status.OK, len(replies.clients)
        for signal in [signal for signal in requires if signal.reported]:
            column = replies.metrics.get(signal.name)
            if column is None:  # the number of classes is not known here, but there is at least one
                column = np.full(size if signal.width is None else (size, signal.numbers(1)), np.nan)
            # A client whose reply lacks a number, for example because it was forgotten since, counts as invalid.
            elif (invalid := ok & ~np.isfinite(column.reshape(size, -1)).all(axis=1)).any():
                status = freeze(np.where(invalid, np.int8(Status.INVALID), status))
            metrics[signal] = freeze(np.where(ok if column.ndim == 1 else ok[:, None], column, np.nan))
        outcome = Outcome(round_, replies.clients, status, self.granted, replies.kept, metrics, requires)
        state = _call(self.selector, round_, lambda: self.selector.update(self.state, outcome))
        return self.with_state(freeze_state(state, self.granted.n))

    def grow(self, table: ClientTable, seed: int) -> StatefulSelector:
        """Return the selector after clients joined, which are the last in ``table``."""
        rng = streams.stream(seed, f"{streams.INITIALISATION}:{self.name}", self.granted.n)
        other = self.with_table(table)
        grown = _call(self.selector, None, lambda: self.selector.grow(self.state, other.granted, rng))
        other.state = freeze_state(grown, table.n)
        return other

    def without(self, client: int, table: ClientTable, seed: int) -> StatefulSelector:
        """Return the selector as if it had learned nothing about one client; ``table`` has that client's new facts."""
        rng = streams.stream(seed, f"{streams.INITIALISATION}:{self.name}", 0)
        other = self.with_table(table)
        # A sum over all clients keeps what this one added to it; only rows can be replaced.
        per_client = [f.name for f in dataclasses.fields(self.state) if is_per_client(f)]
        # Growing an empty state, instead of calling init, keeps row widths that were decided by earlier rounds.
        empty = dataclasses.replace(self.state, **{field: getattr(self.state, field)[:0] for field in per_client})
        fresh = _call(self.selector, None, lambda: self.selector.grow(empty, other.granted, rng))
        changes = {field: getattr(self.state, field).copy() for field in per_client}
        for field, rows in changes.items():
            rows[client] = getattr(fresh, field)[client]
        other.state = freeze_state(dataclasses.replace(self.state, **changes), table.n)
        return other


def _first_state(selector: Selector[Any], table: ClientTable, rng: np.random.Generator) -> Any:
    """Return the selector's state before the first round."""
    granted = table.granting(selector.requires)
    return _call(selector, None, lambda: selector.init(granted, rng))


def _call(selector: Selector[Any], round_: int | None, step: Callable[[], T]) -> T:
    """Call a selector's own code; whatever it raises becomes a :class:`SelectorError`, also an exit."""
    try:
        return step()
    except (Exception, SystemExit) as error:
        when = "" if round_ is None else f" in round {round_}"
        text, hint = error_text(error), None
        if isinstance(error, FedcohortError):
            text, hint = f"{type(error).__name__}: {error.message}", error.hint
        raise SelectorError(
            f"The selector {selector_name(selector)} raised an error{when}: {text.rstrip('.')}{error_place(error)}.",
            hint=hint,
        ) from error
