"""One live run, the same on every host: it opens the session, plays its rounds and records how they ended."""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedcohort.core import rng as streams
from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import FedcohortError, InputError
from fedcohort.core.protocol import Answer, Cohort, Losses, Query, Selector
from fedcohort.core.signals import Signal
from fedcohort.core.text import shorten
from fedcohort.hosts.checkpoint import CheckpointFiles
from fedcohort.hosts.early_stop import Watch
from fedcohort.hosts.leases import Leases, leases_of
from fedcohort.hosts.live import Host, play
from fedcohort.hosts.round import Policy, Shortage
from fedcohort.hosts.wire import read_report
from fedcohort.journal import is_blank, read_journal
from fedcohort.journal.events import ENDED, PLANNED, SETTINGS
from fedcohort.session.rules import Rules
from fedcohort.session.session import Session

log = logging.getLogger(__name__)
CHECKPOINT = "checkpoint"  # the key of the newest checkpoint in the host's state
_RULES = "rules"  # the key, in the settings, of the rules that a run was started with
_TRIAL = "trial"  # the random stream for the seeds of trials
_LOG_EVERY = 10.0  # seconds between two log messages about what the run waits for


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What a live run is started with, on every host.

    Parameters
    ----------
    selector : Selector
    seed : int
    policy : Policy
    journal : Path or None
    shadows : mapping of str to Selector
    rules : Rules or None
        None keeps those of the journal.
    leases : Path or None
    audit : bool
    sign : path or None
    asynchronous : bool
        Whether clients answer one by one.
    """

    selector: Selector[Any]
    seed: int
    policy: Policy
    journal: Path | None = None
    shadows: Mapping[str, Selector[Any]] = field(default_factory=dict)
    rules: Rules | None = None
    leases: Path | None = None
    audit: bool = False
    sign: str | Path | None = None
    asynchronous: bool = False


class _Members(Protocol):
    """The clients of a federation, as far as the server knows them."""

    def require(self, signals: frozenset[Signal]) -> None:
        """From now on, admit only clients that also supply these signals."""

    def known_signals(self) -> frozenset[Signal]:
        """Return what is known about every client that can take part."""

    def supplied_signals(self) -> frozenset[Signal]:
        """Return what every client that can take part can report or answer."""

    def first_table(self, count: int) -> ClientTable:
        """Return the table of all clients that can take part, at least ``count``."""


class LiveRun(Host):
    """One run of a session over a live federation, from the first look at its clients to the last round.

    Parameters
    ----------
    rounds : int
        Number of rounds, including those of earlier runs with the same journal.

    Attributes
    ----------
    session : Session or None
        None until enough clients are online.
    model : object
        The global model.
    """

    model: Any

    def __init__(self, settings: RunSettings, rounds: int, members: _Members) -> None:
        self.settings = settings
        self.policy = settings.policy
        self.num_rounds = rounds
        self.session: Session | None = None
        self._members = members
        self._logged = 0.0  # how long the run had waited at the last log message about it

    @property
    def running(self) -> Session:
        """The session, once there is one."""
        assert self.session is not None
        return self.session

    # -- what a host does ---------------------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self) -> None:
        """Wait for enough clients, and refuse what cannot work before anything is recorded."""

    @abstractmethod
    def load(self, session: Session) -> None:
        """Load the model that the session's newest checkpoint holds, or the initial one."""

    @abstractmethod
    def ask_losses(
        self, model: Any, names: Sequence[str], signals: frozenset[Signal]
    ) -> Mapping[str, Mapping[str, object] | str | None]:
        """Ask clients for losses of a model; return by name what each reported, or why it reported nothing."""

    @abstractmethod
    def train_trial(self, cohort: Sequence[str], seed: int) -> Any:
        """Let a trial cohort train; return the average of its models, or None if it has none."""

    @abstractmethod
    def log(self, text: str, level: int = logging.INFO) -> None:
        """Write a line to the host's log."""

    def on_opened(self, session: Session) -> None:
        """Called when the session is opened, before anything is asked of clients."""

    def on_finished(self, stop: str | None) -> None:
        """Called when all rounds are played, or when the run ended earlier for the reason ``stop``."""

    def on_end(self, failed: str | None) -> None:
        """Called at the very end, before the journal is closed; ``failed`` is why the run could not go on."""

    def recorded_settings(self) -> dict[str, Any]:
        """Return the host's settings that are recorded at each start."""
        return {}

    # -- from the start to the end ------------------------------------------------------------------------------------

    def play(self) -> None:
        """Run until the journal has all rounds, record how the run ended, and close the journal."""
        failed: str | None = None
        try:
            self._play()
        except BaseException as error:
            failed = shorten(str(error) or type(error).__name__)
            if self.session is not None:
                with contextlib.suppress(FedcohortError):  # the journal may be what failed
                    record_end(self.session, "failed", failed)
            raise
        finally:
            self.on_end(failed)
            if self.session is not None:
                self.session.close()

    def _play(self) -> None:
        journal = self.settings.journal
        if journal is not None and not is_blank(journal):
            session = self.session = self.reopen(journal)
            # Without rounds, clients are at work until the end, and their last answers are not needed.
            unfinished = bool(session.pending) and not session.asynchronous
            last = session.journal.cohorts()[-1:]
            by_selector = last[0].stop if last else None
            stop = None if unfinished else by_selector or Watch(session, self.policy.early_stop).reason()
            if not unfinished and (session.round >= self.num_rounds or stop):
                self.load(session)
                ended = session.journal.events(ENDED)[-1:]
                if not ended or (ended[0]["state"], ended[0]["rounds"]) != ("finished", session.round):
                    record_end(session, "finished", stop or "")  # the earlier run was killed at its very end
                self.on_finished(stop)
                return
        # First the clients, then the record: a run that nobody joins leaves no journal behind.
        self.prepare()
        session = self.session = self.session or self._create_session()
        self.on_opened(session)
        # Before anything is asked of clients, so that a run that fails has recorded its settings.
        self._record_start(session)
        self.load(session)
        path, deadline = self.settings.leases, self.policy.fixed_deadline
        stop = self.play_rounds(session, None if path is None else leases_of(path, journal, deadline))
        record_end(session, "finished", stop or "")
        self.on_finished(stop)

    def play_rounds(self, session: Session, leases: Leases | None) -> str | None:
        """Play the rounds that are left; return why the run ended earlier, or None."""
        return play(self, session, self.policy, self.num_rounds, leases)

    def _create_session(self) -> Session:
        settings, members = self.settings, self._members
        if settings.journal is not None:
            settings.journal.parent.mkdir(parents=True, exist_ok=True)
        # From here on, a client must supply what the selector has decided to use.
        selector = settings.selector.adapt(members.known_signals())
        members.require(selector.requires)
        return Session(
            selector,
            members.first_table(self.policy.enough_online),
            seed=settings.seed,
            signals=members.supplied_signals(),
            journal=settings.journal,
            shadows=settings.shadows,
            rules=settings.rules,
            commit="manual",  # twice a round, when it is chosen and when it is closed
            audit=settings.audit,
            sign=settings.sign,
            asynchronous=settings.asynchronous,
        )

    def reopen(self, journal: Path, *, shadows: bool = True) -> Session:
        """Return the session of the journal, to be continued, with the settings' shadows or those that it has."""
        settings = self.settings
        selector, rules = settings.selector, settings.rules
        known = dict(settings.shadows) if shadows else None
        # If the run is started as before, an operator's later orders stay.
        with contextlib.closing(read_journal(journal)) as record:
            before = record.events(SETTINGS)[-1:]
            if rules is not None and before and before[0].get(_RULES) == rules.to_dict():
                rules = None
        session = Session.open(journal, selector, rules=rules, shadows=known, commit="manual", sign=settings.sign)
        ways = ("in rounds", "asynchronously")
        wrong = ""
        if session.seed != settings.seed:
            wrong = f"with seed {session.seed}; it cannot be continued with seed {settings.seed}"
        elif session.asynchronous != settings.asynchronous:
            wrong = f"{ways[session.asynchronous]}; it cannot be continued {ways[settings.asynchronous]}"
        if wrong:
            session.close()
            raise InputError(
                f"The journal {journal} was written {wrong}.", hint="start the run as before, or start a new journal"
            )
        self._members.require(session.selector.requires)
        return session

    def _record_start(self, session: Session) -> None:
        """Record the settings of the run; warn if they differ from those of the previous start."""
        rules = self.settings.rules
        now = {**self.recorded_settings(), _RULES: None if rules is None else rules.to_dict()}
        (before,) = session.journal.events(SETTINGS)[-1:] or [{}]
        changed = [f"{key} was {before[key]}, is {now[key]}" for key in now if before.get(key, now[key]) != now[key]]
        if changed:
            self.log(f"other settings than when the journal was last written: {'; '.join(changed)}", logging.WARNING)
        unknown = [] if session.rules is None else [n for n in session.rules.named if n not in session.table]
        if unknown:
            names = ", ".join(map(repr, unknown[:8]))
            self.log(f"no client is called {names} so far, which the rules name", logging.WARNING)
        _note_once(session, SETTINGS, now)
        _note_once(session, PLANNED, {"rounds": self.num_rounds})

    def checkpoint_to_load(self, store: CheckpointFiles) -> str | None:
        """Return the name of the checkpoint that the session continues from, or None before its first round."""
        session = self.running
        if session.host_state is not None:
            return str(session.host_state[CHECKPOINT])
        if session.journal.last()[1] < 0:
            return None
        first = store.name(0)  # the first cohort was chosen but not finished
        if not store.exists(first):
            raise InputError(
                f"The journal {session.journal.path} has rounds, but {store.folder} has no checkpoint to continue "
                "from.",
                hint="was 'checkpoints' another folder before?",
            )
        return first

    # -- in every round -----------------------------------------------------------------------------------------------

    def answer(self, query: Query, available: IntArray) -> Answer:
        """Ask clients for losses, or try cohorts out."""
        session = self.running
        if isinstance(query, Losses):
            return Answer(query, self._losses(self.model, session.table.names_of(query.clients), query.signals))
        # Each trial cohort trains, everybody's loss is measured again, and the model is discarded.
        everyone, measured = session.table.names_of(available), frozenset({query.measured})
        before = self._losses(self.model, everyone, measured)[query.measured]
        changes = np.full((len(query.cohorts), session.table.n), np.nan)
        for row, clients in enumerate(query.cohorts):
            # The round itself may train the same clients, and must use other batches.
            seed = int(streams.stream(session.seed, _TRIAL, session.round, row).integers(1 << 62))
            trained = self.train_trial(session.table.names_of(clients), seed)
            if trained is not None:
                changes[row, available] = self._losses(trained, everyone, measured)[query.measured] - before
        return Answer(query, {query.answered_with: changes})

    def _losses(self, model: Any, names: Sequence[str], signals: frozenset[Signal]) -> Mapping[Signal, FloatArray]:
        """Return losses of a model by signal, each (q,) in the order of ``names``; NaN for a client that gave none."""
        reports = self.ask_losses(model, names, signals)
        values = {signal: np.full(len(names), np.nan) for signal in signals}
        for i, name in enumerate(names):
            report = reports.get(name, "no answer")
            if isinstance(report, str):
                # A selector must do without a client that does not answer, and may not wait for it.
                self.log(f"client {name!r} gave no losses: {report}", logging.WARNING)
                continue
            numbers = read_report(report)
            for signal in signals:
                values[signal][i] = numbers.get(signal, np.nan)
        return values

    def on_waiting(self, shortage: Shortage, seconds: float) -> None:
        """Log every few seconds what the run waits for."""
        if seconds - self._logged >= _LOG_EVERY:
            self._logged = seconds
            self.log(f"waiting: {shortage.describe(seconds, self.absent())}")

    def on_ready(self) -> None:
        """Count the waiting from zero again."""
        self._logged = 0.0

    def on_selector(self) -> None:
        """Admit only clients that supply what the new selector reads."""
        self._members.require(self.running.selector.requires)

    def on_unfinished(self, cohort: Cohort, why: str) -> None:
        """Log that a cohort is abandoned."""
        self.log(f"a new cohort is chosen for round {cohort.round}: {why}", logging.WARNING)


def _note_once(session: Session, kind: str, body: Mapping[str, Any]) -> None:
    """Record an event unless the last one of its kind is the same."""
    if session.journal.events(kind)[-1:] != [body]:
        session.note(kind, body)


def record_end(session: Session, state: str, reason: str = "") -> None:
    """Record the end of a run; if the journal has a later ticket, the run was started again."""
    body = {"state": state, "rounds": session.round, "ticket": session.journal.last()[1], "reason": reason}
    _note_once(session, ENDED, body)
    session.commit()
