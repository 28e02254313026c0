"""Shadow selectors see the same requests and outcomes as a session's own selector, and never disturb it.

A shadow sees only the answers that clients gave to the session's own selector. If it needs more, a note says so and it
picks nobody. A shadow that raises an error is recorded as failed and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedcohort.core import rng as streams
from fedcohort.core.arrays import IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import SelectorError
from fedcohort.core.protocol import Answer, Losses, Query, Selector, Slate
from fedcohort.core.selector_spec import describe
from fedcohort.core.signals import Signal
from fedcohort.journal import ReplyBlock
from fedcohort.journal.scores import pack_scores
from fedcohort.session.explain import recorded_scores
from fedcohort.session.resume import NextCohort
from fedcohort.session.stateful import StatefulSelector

_NOBODY = np.empty(0, np.int64)


class ShadowPick(NamedTuple):
    """What a shadow would have picked.

    Attributes
    ----------
    after : StatefulSelector
        The shadow after its choice.
    picked : (k,) int array
    scores : its scores as the journal stores them, or None
    note : why it picked nobody, or None
    failed : whether it raised an error, so that it is dropped
    """

    after: StatefulSelector
    picked: IntArray
    scores: bytes | None
    note: str | None
    failed: bool = False


class Shadows:
    """The shadows of a session by name, each with its state. Immutable.

    Parameters
    ----------
    running : mapping of name to StatefulSelector
    blind : mapping of name to str
        Why a shadow could not learn from the last round, in words; until it learns again, it picks nobody.
    """

    __slots__ = ("blind", "running")

    def __init__(
        self, running: Mapping[str, StatefulSelector] | None = None, blind: Mapping[str, str] | None = None
    ) -> None:
        self.running = dict(running or {})
        self.blind = {name: why for name, why in (blind or {}).items() if name in self.running}

    @property
    def selectors(self) -> dict[str, Selector[Any]]:
        """The selectors by name."""
        return {name: shadow.selector for name, shadow in self.running.items()}

    @property
    def specs(self) -> dict[str, Any]:
        """The journal's description of each shadow, from which it can be rebuilt."""
        return {name: describe(shadow.selector) for name, shadow in self.running.items()}

    def with_one(self, shadow: StatefulSelector) -> Shadows:
        """Return the shadows and one more."""
        return Shadows({**self.running, shadow.name: shadow}, self.blind)

    def without(self, names: Collection[str]) -> Shadows:
        """Return the shadows without some of them."""
        return Shadows({name: s for name, s in self.running.items() if name not in names}, self.blind)

    def with_table(self, table: ClientTable) -> Shadows:
        """Return the shadows with new facts about the same clients."""
        return Shadows({name: shadow.with_table(table) for name, shadow in self.running.items()}, self.blind)

    def with_names(self, text: Callable[[str], str]) -> Shadows:
        """Return the shadows renamed by a function."""
        running = {text(name): shadow.with_name(text(name)) for name, shadow in self.running.items()}
        return Shadows(running, {text(name): why for name, why in self.blind.items()})

    def try_each(self, step: Callable[[StatefulSelector], StatefulSelector]) -> tuple[Shadows, dict[str, str]]:
        """Return the shadows after ``step``, and by name why others failed in it."""
        running: dict[str, StatefulSelector] = {}
        failed: dict[str, str] = {}
        for name, shadow in self.running.items():
            try:
                running[name] = step(shadow)
            except SelectorError as error:  # an error in a shadow must not stop the session
                failed[name] = failure_note(error)
        return Shadows(running, self.blind), failed

    def learn(self, round_: int, replies: ReplyBlock) -> tuple[Shadows, dict[str, str]]:
        """Return the shadows after a complete round, and by name why others failed."""
        unreported = {name: shadow.missing_signals(replies) for name, shadow in self.running.items()}
        # A shadow that lacks a signal is not dropped, because the next round may have it.
        blind = {name: why for name, why in unreported.items() if why is not None}
        after, failed = self.try_each(lambda shadow: shadow if shadow.name in blind else shadow.learn(round_, replies))
        return Shadows(after.running, blind), failed

    def choose(self, turn: NextCohort, slate: Slate, answer: Answer | None) -> dict[str, ShadowPick]:
        """Return by name what each shadow would pick.

        Parameters
        ----------
        slate : Slate
            The slate of the session's own selector.
        answer : Answer or None
            The answer to its query.
        """
        return {name: self._choose(shadow, turn, slate, answer) for name, shadow in self.running.items()}

    def after(self, picks: Mapping[str, ShadowPick]) -> Shadows:
        """Return the shadows after their choices, without those that failed."""
        return Shadows({name: pick.after for name, pick in picks.items() if not pick.failed}, self.blind)

    def _choose(
        self, shadow: StatefulSelector, turn: NextCohort, session_slate: Slate, answer: Answer | None
    ) -> ShadowPick:
        if shadow.name in self.blind:
            return ShadowPick(shadow, _NOBODY, None, self.blind[shadow.name])
        try:
            slate = shadow.slate(turn.round, session_slate.size, session_slate.candidates, session_slate.busy)
            question = shadow.query(slate, turn.stream(streams.QUERY, shadow.name))
            its_answer = None
            if question is not None:
                # A shadow must cost nothing, so it never asks clients itself.
                lacking = _unpaid(question, answer)
                if lacking is not None:
                    return ShadowPick(shadow, _NOBODY, None, lacking)
                assert isinstance(question, Losses) and answer is not None and isinstance(answer.query, Losses)
                values = {}
                for signal in question.signals:
                    losses = np.full(slate.n, np.nan)
                    losses[answer.query.clients] = answer[signal]
                    values[signal] = losses[question.clients]
                its_answer = Answer(question, values)
            rng = turn.stream(streams.SELECTION, shadow.name)
            cohort, after = shadow.select(slate, its_answer, rng)
        except SelectorError as error:  # an error in a shadow must not stop the session
            return ShadowPick(shadow, _NOBODY, None, failure_note(error), failed=True)
        scores = recorded_scores(cohort)
        return ShadowPick(after, cohort.clients, None if scores is None else pack_scores(scores), None)


def failure_note(error: SelectorError) -> str:
    """Return why a shadow failed, in the words of its own error if it raised one."""
    cause = error.__cause__ or error
    try:
        return f"failed: {cause}"
    except Exception:  # the shadow's own error may have no words
        return f"failed: {type(cause).__name__}"


def adapt_all(
    selector: Selector[Any],
    shadows: Mapping[str, Selector[Any]],
    clients: ClientTable,
    signals: frozenset[Signal] | None,
) -> tuple[Selector[Any], dict[str, Selector[Any]]]:
    """Return selectors adapted to the signals supplied; shadows see only what the session's own selector reads."""
    selector = selector.adapt(clients.signals | (signals or frozenset()))
    # Clients send what the session's own selector reads, and nothing more for a shadow.
    seen = clients.signals | selector.requires
    return selector, {name: shadow.adapt(seen) for name, shadow in shadows.items()}


def _unpaid(question: Query, answer: Answer | None) -> str | None:
    """Return in words which part of a shadow's question the session's answer does not cover; None if it covers all."""
    if not isinstance(question, Losses):
        return "lacked its signals: it asks for a trial of cohorts, which only the session's own selector can"
    signals = ", ".join(map(str, sorted(question.signals)))
    if answer is None or not isinstance(answer.query, Losses) or not question.signals <= answer.query.signals:
        return f"lacked its signals: it asks {len(question.clients)} clients for {signals}, and nobody was asked"
    missing = int((~np.isin(question.clients, answer.query.clients)).sum())
    if missing:
        return (
            f"lacked its signals: {missing} of the {len(question.clients)} clients it asks for {signals} were not asked"
        )
    return None
