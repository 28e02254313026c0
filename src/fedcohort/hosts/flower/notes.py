"""What a live run puts on record about itself: its settings, how long it should be, how it ended."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.serverapp.strategy import Strategy

from fedcohort.core.errors import FedcohortError
from fedcohort.core.signals import Signal
from fedcohort.core.text import shorten
from fedcohort.hosts.flower.logs import say
from fedcohort.journal import read_journal
from fedcohort.journal.events import ENDED, PLANNED
from fedcohort.session.rules import Rules, difference
from fedcohort.session.session import Session

if TYPE_CHECKING:
    from fedcohort.hosts.flower.strategy import CohortStrategy

log = logging.getLogger("flwr.fedcohort")
_SETTINGS = "settings"
_RULES = "rules"


def _note(session: Session, kind: str, body: dict[str, Any]) -> None:
    """Record something unless it is what was recorded last."""
    if session.journal.events(kind)[-1:] != [body]:
        session.note(kind, body)


def record_start(
    session: Session, settings: CohortStrategy, levels: Sequence[Strategy], signals: frozenset[Signal], rounds: int
) -> None:
    """Put what the run was started with on record; where it differs from the start before, a warning says so."""
    now = {
        "cohort-size": settings.cohort_size,
        "spares": settings.spares,
        "min-replies": settings.min_replies,
        "max-share": settings.max_share,
        "max-update-norm": settings.max_update_norm,
        "strategy": [type(level).__name__ for level in levels],
        "filter": repr(settings.filter),
        "signals": sorted(signals),
        _RULES: None if settings.rules is None else settings.rules.to_dict(),
        **settings.more_settings(),
    }
    before = session.journal.events(_SETTINGS)[-1:]
    changed = [f"{key} was {before[0][key]}, is {value}" for key, value in now.items()
               if before and key in before[0] and before[0][key] != value]  # fmt: skip
    if changed:
        log.warning("other settings than when the journal was last written: %s", "; ".join(changed))
    _note(session, _SETTINGS, now)
    held = session.rules
    named = () if held is None else (*held.blocked, *held.pinned, *(held.paused or {}), *(held.budgets or {}))
    strangers = [name for name in dict.fromkeys(named) if name not in session.table]
    if strangers:
        log.warning("no client is called %s so far, which the rules name", ", ".join(map(repr, strangers[:8])))
    _note(session, PLANNED, {"rounds": rounds})


def log_rules(session: Session, before: Rules | None, given: Rules | None) -> None:
    """Log which rules a continued run uses."""
    now = session.rules or Rules()
    if given is None and now != Rules():
        say(
            "rules", "the rules of the journal stay in force: %r; rules=Rules() drops them", now,
            round=session.round, rules=now.to_dict(),
        )  # fmt: skip
    elif given is not None and given.to_dict() != (before or Rules()).to_dict():
        say(
            "rules", "the rules change from round %d on: %s", session.round, difference(before, now),
            round=session.round, rules=now.to_dict(),
        )  # fmt: skip


def started_with(journal: Path, rules: Rules | None) -> bool:
    """Whether the last start of a run was given these rules too; those in force since may be an operator's."""
    with closing(read_journal(journal)) as record:
        before = record.events(_SETTINGS)[-1:]
    return bool(before) and rules is not None and before[0].get(_RULES) == rules.to_dict()


def _end(session: Session, state: str, reason: str) -> dict[str, Any]:
    """Return how a run ended and after which ticket; a later one means that it was started again."""
    return {"state": state, "rounds": session.round, "ticket": session.journal.last()[1], "reason": reason}


def record_end(session: Session, seconds: float) -> None:
    """Put the end of a run on record."""
    _note(session, ENDED, _end(session, "finished", ""))
    session.commit()
    say("finished", "Strategy execution finished in %.2fs", seconds, rounds=session.round, seconds=seconds)


def record_failure(session: Session | None, error: BaseException) -> None:
    """Put on record that a run ended with an error."""
    reason = shorten(str(error) or type(error).__name__)
    say("failed", "the run ended: %s", reason, level=logging.ERROR, reason=reason)
    if session is not None:
        with contextlib.suppress(FedcohortError):
            _note(session, ENDED, _end(session, "failed", reason))
            session.commit()
