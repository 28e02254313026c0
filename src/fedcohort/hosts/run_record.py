"""What a live run records about itself and reads when it continues; the same on every host."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcohort.core.errors import FedcohortError, InputError
from fedcohort.core.protocol import Selector
from fedcohort.core.selector_spec import describe, described_name, rebuild_selector
from fedcohort.hosts.checkpoint import CheckpointFiles
from fedcohort.hosts.early_stop import EarlyStop, Watch
from fedcohort.journal import read_journal
from fedcohort.journal.events import ENDED, SELECTOR, SETTINGS
from fedcohort.session.rules import Rules
from fedcohort.session.session import Session
from fedcohort.session.trial import trial_of

log = logging.getLogger(__name__)
CHECKPOINT = "checkpoint"  # the key of the newest checkpoint in the host's state
RULES = "rules"  # the key, in the settings, of the rules that a run was started with


def note_once(session: Session, kind: str, body: Mapping[str, Any]) -> None:
    """Record an event unless the last one of its kind is the same."""
    if session.journal.events(kind)[-1:] != [body]:
        session.note(kind, body)


def reopen(
    journal: Path,
    selector: Selector[Any],
    seed: int,
    rules: Rules | None,
    *,
    asynchronous: bool = False,
    shadows: Mapping[str, Selector[Any]] | None = None,
    **options: Any,
) -> Session:
    """Return the session of a journal, to be continued; ``options`` are those of ``Session.open``."""
    # If the run is started as before, an operator's later orders stay.
    with contextlib.closing(read_journal(journal)) as record:
        before = record.events(SETTINGS)[-1:]
        same = bool(before) and rules is not None and before[0].get(RULES) == rules.to_dict()
        changes, trial, running = record.events(SELECTOR), trial_of(record), record.meta()["shadows"]
    given = described_name(describe(selector))
    if changes and "order" in changes[-1] and given in [described_name(body["from"]) for body in changes]:
        ordered = changes[-1]["to"]
        log.info("an operator's order stays in force: %s chooses, not %s", described_name(ordered), given)
        selector = rebuild_selector(ordered, None, journal)
    if shadows is not None and trial is not None and trial.name in running:
        shadows = {**shadows, trial.name: rebuild_selector(running[trial.name], None, journal)}
    session = Session.open(
        journal, selector, rules=None if same else rules, shadows=shadows, commit="manual", **options
    )
    wrong = ""
    if session.seed != seed:
        wrong = f"with seed {session.seed}; it cannot be continued with seed {seed}"
    elif session.asynchronous != asynchronous:
        ways = ("in rounds", "asynchronously")
        wrong = f"{ways[session.asynchronous]}; it cannot be continued {ways[asynchronous]}"
    if wrong:
        session.close()
        raise InputError(
            f"The journal {journal} was written {wrong}.", hint="start the run as before, or start a new journal"
        )
    return session


def why_ended(session: Session, early_stop: EarlyStop | None) -> str:
    """Return why a run ended before its last round, or an empty string if it did not."""
    last = session.journal.cohorts()[-1:]
    return (last[0].stop if last else None) or Watch(session, early_stop).reason() or ""


def is_finished(session: Session, rounds: int, early_stop: EarlyStop | None) -> bool:
    """Whether the run is complete: it has enough rounds, or the selector or an early stop has ended it."""
    # Without rounds, clients are at work until the end, and their last answers are not needed.
    unfinished = bool(session.pending) and not session.asynchronous
    return not unfinished and (session.round >= rounds or bool(why_ended(session, early_stop)))


def checkpoint_to_load(session: Session, store: CheckpointFiles) -> str | None:
    """Return the name of the checkpoint that a session continues from, or None before its first round."""
    if session.host_state is not None:
        return str(session.host_state[CHECKPOINT])
    if session.journal.last()[1] < 0:
        return None
    first = store.name(0)  # the first cohort was chosen but not finished
    if not store.exists(first):
        raise InputError(
            f"The journal {session.journal.path} has rounds, but {store.folder} has no checkpoint to continue from.",
            hint="was 'checkpoints' another folder before?",
        )
    return first


def record_end(session: Session, state: str, reason: str = "") -> None:
    """Record the end of a run; if the journal has a later ticket, the run was started again."""
    body = {"state": state, "rounds": session.round, "ticket": session.journal.last()[1], "reason": reason}
    note_once(session, ENDED, body)
    session.commit()


def record_failure(session: Session | None, reason: str) -> None:
    """Record that a run ended with an error, if the journal can still be written."""
    if session is not None:
        with contextlib.suppress(FedcohortError):
            record_end(session, "failed", reason)
