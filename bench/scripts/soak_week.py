"""One week of a federation for ``bench/scripts/soak.py``: what happens in it, and the process that plays it.

All events are functions of (seed, round), so a host that was killed continues in the same world. The disturbed week
differs from the quiet one only by events that must leave no trace: garbage, a full disk, kills, pruning.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedcohort import ClientTable, LabelCounts, Losses, Session, Signal, Status, create
from fedcohort.core.errors import DuplicateReportError, FedcohortError, JournalError
from fedcohort.core.protocol import Answer, RoundReport, RoundRequest
from fedcohort.journal.codec import state_fields

CLASSES = 10
DAY = 2000 / 7  # rounds
MEMBERS_EVERY = 20  # rounds between joins, between leaves, between returns
AWAY = 200  # rounds until most clients that left are back
FAILURES = 0.2
GARBAGE = 0.01  # share of the clients' replies
GARBAGE_REPORTS = 0.05  # share of rounds in which a whole report is garbage
SAMPLE_EVERY = 10  # rounds between two measurements
FULL_AT = (0.35, 0.7)  # parts of the week
PATIENCE = 200  # rounds within which a full disk must be noticed
_PHASE, _TABLE, _AWAKE, _FAIL, _GARBAGE, _LEAVE, _JOIN, _LOSS = range(8)


@dataclass(frozen=True)
class Plan:
    """What to play: a selector, the number of clients and the number of rounds."""

    selector: str
    clients: int = 100_000
    rounds: int = 2000
    cohort: int = 100
    seed: int = 7

    @property
    def full_at(self) -> tuple[int, ...]:
        return tuple(int(share * self.rounds) for share in FULL_AT)


class World:
    """Clients, day and night, failures, joins and leaves."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        most = plan.clients + 20 * (plan.rounds // MEMBERS_EVERY + 1)
        self._hour = self._rng(_PHASE).random(most)
        self._base = self._rng(_LOSS).uniform(0.5, 2.0, most)

    def _rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.plan.seed, *key])

    def table(self) -> ClientTable:
        return self._clients(self.plan.clients, self._rng(_TABLE))

    def _clients(self, count: int, rng: np.random.Generator) -> ClientTable:
        counts = rng.poisson(rng.dirichlet(np.full(CLASSES, 0.3), count) * 60) + 1.0
        return ClientTable(sizes=counts.sum(axis=1), labels=LabelCounts(counts))

    def changes(self, session: Session) -> list[tuple[str, object]]:
        """Return the calls for who joins, leaves and returns before the next round, except those made before a kill."""
        round_, calls = session.round, []
        if round_ % MEMBERS_EVERY == 10:
            joined = 20 * ((round_ - 10) // MEMBERS_EVERY + 1)
            if session.table.n < self.plan.clients + joined:
                calls.append(("join", self._clients(20, self._rng(_JOIN, round_))))
        if round_ and round_ % MEMBERS_EVERY == 0:
            gone = self._leaving(round_)
            if session.active[gone].any():
                calls.append(("leave", gone))
        if round_ > AWAY and round_ % MEMBERS_EVERY == 5:
            back = self._leaving(round_ - AWAY - 5)[:30]
            if not session.active[back].all():
                calls.append(("rejoin", back))
        return calls

    def _leaving(self, round_: int) -> np.ndarray:
        return self._rng(_LEAVE, round_).choice(self.plan.clients, 40, replace=False)

    def awake(self, round_: int, n: int) -> np.ndarray:
        """Return who is available: a twentieth of the clients whose time is midnight, half of those at noon."""
        noon = (1 + np.cos(2 * np.pi * (round_ / DAY - self._hour[:n]))) / 2
        return self._rng(_AWAKE, round_).random(n) < 0.05 + 0.45 * noon

    def losses(self, round_: int, clients: np.ndarray) -> np.ndarray:
        return self._base[clients] * np.exp(-round_ / 700) + 0.05 * np.sin(round_ + clients) + 0.1

    def answer(self, query, round_: int, n: int) -> Answer | None:
        if query is None:
            return None
        if isinstance(query, Losses):
            return Answer(query, {signal: self.losses(round_, query.clients) for signal in query.signals})
        everybody = np.arange(n)
        change = self.losses(round_ + 1, everybody) - self.losses(round_, everybody)
        return Answer(
            query, {query.answered_with: np.stack([change - 0.01 * np.isin(everybody, c) for c in query.cohorts])}
        )

    def report(self, cohort, signals, disturbed: bool) -> tuple[RoundReport, int]:
        """Return what comes back from a round, and how many replies hold garbage.

        A client with garbage claims success in the disturbed week; in the quiet week, the host marks it as invalid.
        """
        rng = self._rng(_FAIL, cohort.round)
        luck = rng.random(cohort.size)
        status = np.zeros(cohort.size, np.int8)
        for kind, upto in ((Status.FAILED, 0.07), (Status.LATE, 0.14), (Status.MISSING, FAILURES)):
            status[(luck < upto) & (status == 0)] = kind
        spoilt = (luck >= FAILURES) & (luck < FAILURES + GARBAGE)
        loss = self.losses(cohort.round, cohort.clients)
        metrics = {}
        for signal in sorted({s for s in signals if s.is_metric} | {Signal.DURATION}):
            values = loss + 0.01 * len(signal.name)
            if signal.width is not None:
                values = np.cos(np.outer(values, np.arange(signal.numbers(CLASSES))))
            if disturbed and spoilt.any():
                values[spoilt] = rng.choice([np.nan, np.inf, -np.inf])
            metrics[signal] = values
        if not disturbed:
            status[spoilt] = Status.INVALID
        kept = (cohort.clients + cohort.round) % 3 != 0
        return RoundReport(cohort.ticket, cohort.clients, status=status, metrics=metrics, kept=kept), int(spoilt.sum())


# -- what must leave no trace ---------------------------------------------------------------------------------------


def marks(session: Session) -> tuple:
    """Return what a refused call must not change, as far as that can be read quickly at this size."""
    digest = hashlib.sha256()
    for name, value in state_fields(session.state):
        digest.update(name.encode() + (value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()))
    count = session.journal.database.fetch("SELECT COUNT(*), MAX(id) FROM replies")[0]
    pending = [(c.ticket, c.clients.tobytes()) for c in session.pending]
    return (
        session.round,
        session.table.n,
        session.active.tobytes(),
        pending,
        session.journal.last(),
        count,
        digest.digest(),
    )


def garbage_reports(report: RoundReport, n: int) -> list[RoundReport]:
    """Return reports that the session must refuse."""
    ticket, clients = report.ticket, np.asarray(report.clients)
    return [
        RoundReport(ticket + 1000, clients),
        RoundReport(ticket, [n + 5]),
        RoundReport(ticket, [*clients[:2], clients[0]], metrics={s: np.ones(3) for s in report.metrics}),
        RoundReport(ticket, ["nobody knows this name"]),
        RoundReport(ticket, clients, status=[9] * len(clients)),
        RoundReport(ticket, clients, metrics={Signal.DURATION: [1.0]}),
        RoundReport(ticket, clients, metrics={"unheard-of": np.ones(len(clients))}),
        RoundReport(ticket, clients, kept=[0.5] * len(clients)),
    ]


class Room:
    """The journal's disk, which can be full: a small tmpfs, or a folder with limited file sizes."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder, self.how = folder, how

    def _remount(self, size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.folder)], check=True)

    def shrink(self) -> None:
        if self.how == "tmpfs":
            disk = os.statvfs(self.folder)
            self._remount(str((disk.f_blocks - disk.f_bfree) * disk.f_frsize + 16384))
        else:
            largest = max(path.stat().st_size for path in self.folder.iterdir())
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest + 16384, resource.RLIM_INFINITY))

    def widen(self) -> None:
        if self.how == "tmpfs":
            self._remount("4g")
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


# -- memory ---------------------------------------------------------------------------------------------------------


class _MallInfo(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks")]
    _fields_ += [(name, ctypes.c_size_t) for name in ("fsmblks", "uordblks", "fordblks", "keepcost")]


_ASK = getattr(ctypes.CDLL(None), "mallinfo2", None)  # once, because each look-up allocates objects
if _ASK is not None:
    _ASK.restype = _MallInfo


def held() -> int | None:
    """Return the bytes allocated and not freed (arrays, SQLite's pages); None if the C library does not tell.

    Resident memory also includes freed memory that is kept for later, which here is ten times what a week adds. Small
    Python objects are not included; ``sys.getallocatedblocks`` counts those.
    """
    if _ASK is None:
        return None
    usage = _ASK()
    return int(usage.uordblks + usage.hblkhd)


# -- the process ----------------------------------------------------------------------------------------------------


class Host:
    """Plays a week from the position of its journal; it may be killed at any time."""

    def __init__(self, plan: Plan, folder: Path, room: Room | None) -> None:
        self.plan, self.folder, self.room = plan, folder, room
        self.world = World(plan)
        self.journal = (room.folder if room else folder) / "journal.sqlite"
        self.session = self._opened()
        self.full: int | None = None  # the number of the full disk that has not been noticed yet
        self.since = 0

    def _opened(self) -> Session:
        if self.journal.exists() and self.journal.stat().st_size:
            return Session.open(self.journal)
        plan, signals = self.plan, Signal.all()
        selector = create(plan.selector)
        return Session(selector, self.world.table(), seed=plan.seed, signals=signals, journal=self.journal)

    def note(self, kind: str, **what) -> None:
        with (self.folder / "notes.jsonl").open("a") as file:
            file.write(json.dumps({"kind": kind, "round": self.session.round, **what}) + "\n")

    def play(self) -> None:
        while self.session.round < self.plan.rounds or self.session.pending:
            self._begin_full_disk()
            try:
                self._round()
            except JournalError as error:
                self._noticed(error)
        self.session.close()
        self._sample()

    def _do(self, call: str, *arguments, **named):
        """Call the session; a call that fails on a full disk must have changed nothing."""
        before = None if self.full is None else marks(self.session)
        try:
            return getattr(self.session, call)(*arguments, **named)
        except JournalError:
            if before is not None and marks(self.session) != before:
                raise AssertionError(f"{call} failed on a full disk and changed the session") from None
            raise

    def _round(self) -> None:
        session = self.session
        if session.pending:
            cohort = session.pending[0]
        else:
            for call, argument in self.world.changes(session):
                self._do(call, argument)
            request = RoundRequest(self.plan.cohort, self.world.awake(session.round, session.table.n))
            answer = self.world.answer(session.query(request), session.round, session.table.n)
            cohort = self._do("ask", request, answer)
        if cohort.size:
            self._tell(cohort)
        if cohort.round % SAMPLE_EVERY == 0:
            self._sample()
        print(session.round, flush=True)

    def _tell(self, cohort) -> None:
        session, disturbed = self.session, self.room is not None
        report, spoilt = self.world.report(cohort, session.requires, disturbed)
        if disturbed:
            draw = np.random.default_rng([self.plan.seed, _GARBAGE, cohort.round])
            if draw.random() < GARBAGE_REPORTS and self.full is None:
                self._offer_garbage(report)
        self._do("tell", report, host={"round": cohort.round})
        if disturbed and spoilt:
            self.note("garbage replies", count=spoilt)
        if disturbed and cohort.round % 40 == 39:
            self._tell_late(cohort)

    def _offer_garbage(self, report: RoundReport) -> None:
        before, refused = marks(self.session), 0
        for bad in garbage_reports(report, self.session.table.n):
            try:
                self.session.tell(bad)
            except FedcohortError:
                refused += 1
            else:
                raise AssertionError(f"accepted: {bad}")
        assert marks(self.session) == before, "garbage that was refused changed the session"
        self.note("garbage reports", count=refused)

    def _tell_late(self, cohort) -> None:
        """Send replies to a closed round: accepted once, refused the second time, never shown to a selector."""
        state = marks(self.session)[-1]
        late = [r.client for r in self.session.journal.replies(cohort.ticket) if r.status == Status.MISSING][:3]
        if late:
            self._do("tell", RoundReport(cohort.ticket, late))
            try:
                self.session.tell(RoundReport(cohort.ticket, late))
            except DuplicateReportError:
                self.note("late replies", count=len(late))
            else:
                raise AssertionError("a late reply was accepted twice")
        assert marks(self.session)[-1] == state, "a late reply changed a state"

    # -- full disks ---------------------------------------------------------------------------------------------------

    def _begin_full_disk(self) -> None:
        if self.room is None or self.full is not None:
            if self.full is not None and self.session.round > self.since + PATIENCE:
                raise AssertionError(f"a full disk was not noticed for {PATIENCE} rounds")
            return
        for number, at in enumerate(self.plan.full_at):
            if self.session.round >= at and not (self.folder / f"full-{number}").exists():
                self.room.shrink()
                self.full, self.since = number, self.session.round
                return

    def _noticed(self, error: JournalError) -> None:
        if self.full is None or self.room is None:
            raise error
        self.room.widen()
        took = self.session.round - self.since
        self.note("full disk", number=self.full, rounds=took, error=error.message, how=self.room.how)
        (self.folder / f"full-{self.full}").touch()
        if self.full % 2:  # one continues in the same process, one in the next
            os._exit(75)
        self.full = None

    # -- measuring --------------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        files = {kind: self.journal.with_name(self.journal.name + kind) for kind in ("", "-wal")}
        sizes = {kind or "db": path.stat().st_size if path.exists() else 0 for kind, path in files.items()}
        line = {"round": self.session.round, "pid": os.getpid(), "rss": pages * resource.getpagesize(), **sizes}
        line |= {"held": held(), "blocks": sys.getallocatedblocks()}
        with (self.folder / "samples.jsonl").open("a") as file:
            file.write(json.dumps({**line, "clients": self.session.table.n, "at": time.time()}) + "\n")
