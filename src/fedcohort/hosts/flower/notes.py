"""What a live run records about itself: its settings, the number of planned rounds, how it ended."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flwr.serverapp.strategy import Strategy

from fedcohort.core.signals import Signal
from fedcohort.core.text import shorten
from fedcohort.hosts import run_record
from fedcohort.hosts.flower.logs import say
from fedcohort.hosts.run_record import RULES, note_once
from fedcohort.journal.events import PLANNED, SETTINGS
from fedcohort.session.rules import Rules, difference
from fedcohort.session.session import Session

if TYPE_CHECKING:
    from fedcohort.hosts.flower.strategy import CohortStrategy

log = logging.getLogger("flwr.fedcohort")


def record_start(
    session: Session, settings: CohortStrategy, levels: Sequence[Strategy], signals: frozenset[Signal], rounds: int
) -> None:
    """Record the settings of a run; warn if they differ from those of the previous start."""
    now = {
        "cohort-size": settings.cohort_size,
        "spares": settings.spares,
        "min-replies": settings.min_replies,
        "max-share": settings.max_share,
        "max-update-norm": settings.max_update_norm,
        "strategy": [type(level).__name__ for level in levels],
        "filter": repr(settings.filter),
        "signals": sorted(signals),
        RULES: None if settings.rules is None else settings.rules.to_dict(),
        **settings.more_settings(),
    }
    (before,) = session.journal.events(SETTINGS)[-1:] or [{}]
    changed = [f"{key} was {before[key]}, is {now[key]}" for key in now if key in before and before[key] != now[key]]
    if changed:
        log.warning("other settings than when the journal was last written: %s", "; ".join(changed))
    note_once(session, SETTINGS, now)
    unknown = [name for name in _named_by(session.rules) if name not in session.table]
    if unknown:
        log.warning("no client is called %s so far, which the rules name", ", ".join(map(repr, unknown[:8])))
    note_once(session, PLANNED, {"rounds": rounds})


def _named_by(rules: Rules | None) -> dict[str, None]:
    """Return the clients that rules name, each once, in their order."""
    if rules is None:
        return {}
    return dict.fromkeys((*rules.blocked, *rules.pinned, *(rules.paused or {}), *(rules.budgets or {})))


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


def record_end(session: Session, seconds: float) -> None:
    """Record the end of a run."""
    run_record.record_end(session, "finished")
    say("finished", "Strategy execution finished in %.2fs", seconds, rounds=session.round, seconds=seconds)


def record_failure(session: Session | None, error: BaseException) -> None:
    """Record that a run ended with an error."""
    reason = shorten(str(error) or type(error).__name__)
    say("failed", "the run ended: %s", reason, level=logging.ERROR, reason=reason)
    run_record.record_failure(session, reason)
