"""What a live run puts on record about itself, and reads when it continues; the same on every host."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from fedcohort.core.errors import FedcohortError, InputError
from fedcohort.hosts.checkpoint import CheckpointFiles
from fedcohort.journal import read_journal
from fedcohort.journal.events import ENDED, SETTINGS
from fedcohort.session.rules import Rules
from fedcohort.session.session import Session

CHECKPOINT = "checkpoint"  # the key of the newest model in what is stored with the session
RULES = "rules"  # the key of the rules a run was started with, among its settings


def note_once(session: Session, kind: str, body: Mapping[str, Any]) -> None:
    """Record something unless it is what was recorded last."""
    # A run that is restarted every night would add the same settings every night.
    if session.journal.events(kind)[-1:] != [body]:
        session.note(kind, body)


def started_with(journal: Path, rules: Rules | None) -> bool:
    """Whether the last start of a run was given these rules too; those in force since may be an operator's."""
    with closing(read_journal(journal)) as record:
        before = record.events(SETTINGS)[-1:]
    return bool(before) and rules is not None and before[0].get(RULES) == rules.to_dict()


def check_seed(session: Session, seed: int) -> None:
    """Refuse to continue a journal with another seed; the session is closed then."""
    if session.seed != seed:
        session.close()
        raise InputError(
            f"The journal {session.journal.path} was written with seed {session.seed}; it cannot be continued with "
            f"seed {seed}.",
            hint="pass the old seed, or start a new journal",
        )


def is_finished(session: Session, rounds: int) -> bool:
    """Whether nothing is left to do: enough rounds, or the selector declared the run finished."""
    last = session.journal.cohorts()[-1:]
    stopped = bool(last) and last[0].stop is not None
    # Without rounds, clients are at work to the end; what they bring belongs to models that nobody wants.
    unfinished = bool(session.pending) and not session.asynchronous
    return not unfinished and (session.round >= rounds or stopped)


def checkpoint_to_load(session: Session, store: CheckpointFiles) -> str | None:
    """Return the name of the checkpoint a session continues with; None before its first round."""
    if session.host_state is not None:
        return str(session.host_state[CHECKPOINT])
    if session.journal.last()[1] < 0:
        return None
    # The first cohort was chosen and not finished: the model it began with is the one from before the first round.
    first = store.name(0)
    if not store.exists(first):
        raise InputError(
            f"The journal {session.journal.path} has rounds, but {store.folder} has no checkpoint to continue from.",
            hint="was 'checkpoints' another folder before?",
        )
    return first


def record_end(session: Session, state: str, reason: str = "") -> None:
    """Put the end of a run on record; a later ticket than the one named here means that it was started again."""
    body = {"state": state, "rounds": session.round, "ticket": session.journal.last()[1], "reason": reason}
    note_once(session, ENDED, body)
    session.commit()


def record_failure(session: Session | None, reason: str) -> None:
    """Put on record that a run ended with an error, as far as the journal lets it."""
    if session is not None:
        with contextlib.suppress(FedcohortError):
            record_end(session, "failed", reason)
