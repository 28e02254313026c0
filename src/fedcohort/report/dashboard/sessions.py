"""The journal of a session on the dashboard, while a host writes it."""

from __future__ import annotations

import math
import statistics
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import FedcohortError, InputError, JournalError
from fedcohort.core.protocol import Status
from fedcohort.core.text import escape_html
from fedcohort.journal import CohortRow, Journal, read_journal
from fedcohort.journal.presence import RunState, planned_rounds, run_state, run_state_before
from fedcohort.report.account import JournalHistory, account
from fedcohort.report.dashboard.attendance import SLOW, status_name, stragglers
from fedcohort.report.dashboard.feed import chart_data
from fedcohort.report.live_page import run_view
from fedcohort.report.why import as_json, explain
from fedcohort.session.explain import history, reasons_of
from fedcohort.simulate.leaderboard.formats import to_html

_MAX_OFFLINE = 200  # clients listed on the page
_UPDATE_EVERY = 20.0  # seconds after which a page is updated even if nothing happened


class JournalItem:
    """One journal file."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.id = path, name
        self.version = 0
        self._journal: Journal | None = None
        self._problem = ""
        self._selector = ""
        self._seed = 0
        self._table: ClientTable | None = None
        self._past = JournalHistory()
        self._metrics: dict[int, dict[str, float]] = {}
        self._planned: int | None = None
        self._run = RunState("stopped")
        self._updated = time.monotonic()
        self._reasons: dict[int, dict[str, str]] = {}

    def poll(self) -> None:
        """Read the cohorts, replies and numbers that are new."""
        try:
            # A host waits for its first clients before it writes a journal.
            if self._journal is None and not self.path.exists() and (run := run_state_before(self.path)) is not None:
                self._set_state(run, None if run.presence is None else run.presence.planned)
                return
            if self._journal is None:
                self._journal = read_journal(self.path)
                meta = self._journal.meta()
                selector = meta.get("selector") or {}
                self._seed = int(meta.get("seed", 0))
                self._selector = str(selector.get("name") or selector.get("class") or "unknown")
            metrics = self._journal.metrics()
            fresh = self._past.read(self._journal)
            self._set_state(run_state(self._journal), planned_rounds(self._journal))
            if fresh or metrics != self._metrics or self._problem or self._table is None:
                self._metrics, self._problem = metrics, ""
                self._reasons = reasons_of(self._journal)
                self._table = self._journal.table()[0]
                self.version += 1
        except (FedcohortError, OSError) as error:
            message = error.message if isinstance(error, FedcohortError) else str(error)
            self.version += message != self._problem
            self._problem = message
            # Opened anew at the next poll: the file may have been replaced.
            self._journal = None

    def _set_state(self, run: RunState, rounds: int | None) -> None:
        """Set the state of the run; another heartbeat of its server is not a change."""
        self.version += (_without_heartbeat(run), rounds) != (_without_heartbeat(self._run), self._planned)
        self._run, self._planned = run, rounds
        if run.state == "running" and time.monotonic() - self._updated > _UPDATE_EVERY:
            self._updated = time.monotonic()
            self.version += 1  # elapsed time and the estimated end change with time

    @property
    def _cohorts(self) -> dict[int, CohortRow]:
        return self._past.cohorts

    @property
    def _state(self) -> str:
        return "unreadable" if self._problem else self._run.state

    def overview(self) -> dict[str, Any]:
        """Return a line for the list."""
        state, run, presence = self._state, self._run, self._run.presence
        closed = [row for row in self._cohorts.values() if row.told_at is not None and len(row.clients)]
        done = len({row.round for row in closed})
        rate = self._rate(closed)
        left = None
        if rate and self._planned and done < self._planned and state == "running":
            left = (self._planned - done) / rate
        # How many clients are online, and since when the others are offline, if the server is alive.
        online: dict[str, Any] = {"online": None, "offline": [], "offline_count": 0}
        if presence is not None and presence.online is not None and state in ("running", "waiting"):
            away = [{"client": name, "since": since} for name, since in presence.offline.items()]
            online = {"online": presence.online, "offline_count": presence.offline_count}
            online["offline"] = away[:_MAX_OFFLINE]
        return {
            "id": self.id,
            "kind": "journal",
            "state": state,
            "message": self._problem or run.why,
            "since": run.since if run.state == "waiting" else None,
            **online,
            "done": done,
            "total": self._planned,
            "rate": rate,
            "left": left,
            "runs": 1,
        }

    def _rate(self, closed: list[CohortRow]) -> float | None:
        """Return how many rounds close per second, by the last twenty, or None if that is unknown."""
        ends = [row.told_at for row in sorted(closed, key=lambda row: row.ticket)[-20:] if row.told_at is not None]
        if not ends or ends[-1] <= ends[0]:
            return None
        rate = (len(ends) - 1) / (ends[-1] - ends[0])
        if self._state != "running":
            return rate
        return min(rate, len(ends) / max(time.time() - ends[0], 1e-9))  # no faster than if the round ended now

    def detail(self) -> dict[str, Any]:
        """Return figures, rounds, clients, the current cohort with statuses and reasons, stragglers and shadows."""
        page: dict[str, Any] = {"warnings": [], "sections": [{"name": "session", "figures": []}], "blocks": []}
        if self._journal is not None and not self._problem:
            run = account(self._journal, self.id, self._past)
            tables, figures, page["warnings"] = run_view(run, self._past, len(run.clients))
            page["sections"] = [{"name": "session", "figures": [chart_data(figure) for figure in figures]}]
            text = "".join(f"<p>{escape_html(line)}</p>" for line in run.sentences())
            page["blocks"] = [{"name": "account", "title": "So far", "html": text}]
            page["blocks"] += [{"name": t.name, "title": t.title, "html": to_html(t)} for t in tables]
        return {**self.overview(), **page, "table": [self._line()]}

    def _line(self) -> dict[str, Any]:
        last = self._cohorts[max(self._cohorts)] if self._cohorts else None
        numbers = [v["accuracy"] for _, v in sorted(self._metrics.items()) if v.get("accuracy") is not None]
        return {
            "id": self.id,
            "label": self._selector,
            "seed": None,
            "setting": "session",
            "state": self._state,
            "reason": "",
            "round": None if last is None else last.round,
            "accuracy": numbers[-1] if numbers else None,
            "best": max(numbers, default=None),
            "clock": None,
            "cohort": [] if last is None else self._members(last),
            "stragglers": stragglers(*self._asked(), self._name),
        }

    def _name(self, client: int) -> str:
        return str(client) if self._table is None else self._table.name(client)

    def _members(self, row: CohortRow) -> list[dict[str, Any]]:
        replied = {reply.client: reply for reply in self._past.replies[row.ticket]}
        closed = (t for t, row in self._cohorts.items() if row.told_at is not None)
        times = [s for t in closed for s in map(self._past.duration, self._past.replies[t]) if not math.isnan(s)]
        usual = statistics.median(times) if times else math.nan  # duration in closed cohorts
        waited = time.time() - row.asked_at
        members = []
        for client in row.clients.tolist():
            reply = replied.get(client)
            if reply is not None:
                status, seconds = status_name(reply.status), self._past.duration(reply)
            elif row.told_at is not None:
                status, seconds = "missing", math.nan
            else:
                status, seconds = "straggling" if waited > SLOW * usual else "training", waited
            known = None if math.isnan(seconds) else round(seconds, 3)
            name = self._name(client)
            why = "" if status == "ok" else self._reasons.get(row.ticket, {}).get(name, "")
            members.append({"client": name, "status": status, "seconds": known, "reason": why})
        return members

    def _asked(self) -> tuple[IntArray, BoolArray, FloatArray]:
        """Return for every client of a closed cohort the client, whether its model counted, and its duration."""
        clients, delivered, seconds = [], [], []
        for ticket, row in self._cohorts.items():
            replied = {reply.client: reply for reply in self._past.replies[ticket]}
            for client in row.clients.tolist() if row.told_at is not None else ():
                reply = replied.get(client)
                clients.append(client)
                delivered.append(reply is not None and reply.status == Status.OK and not reply.late)
                seconds.append(math.nan if reply is None else self._past.duration(reply))
        return np.array(clients, np.int64), np.array(delivered, np.bool_), np.array(seconds)

    def cohort(self, run: str, round_: int) -> list[dict[str, Any]]:
        """Return the cohort of a round."""
        rows = [row for row in self._cohorts.values() if row.round == round_]
        if not rows:
            raise InputError(f"There is no round {round_}; {len(self._cohorts)} cohorts are recorded so far.")
        # An abandoned round has several cohorts; the last one counts.
        return self._members(max(rows, key=lambda row: row.ticket))

    def history_of(self, client: str) -> list[dict[str, Any]]:
        """Return one client's part in every round."""
        if self._problem:
            raise JournalError(self._problem)
        with closing(read_journal(self.path)) as journal:
            return [{"round": p.round, "picked": p.picked, "what": p.outcome} for p in history(journal, client)]

    def why(self, run: str, round_: int, client: str | None) -> dict[str, Any]:
        """Explain a choice."""
        if self._problem:
            raise JournalError(self._problem)
        return as_json(explain(self.path, round_, client))


def _without_heartbeat(run: RunState) -> RunState:
    """Return the state of a run without the time of its server's last heartbeat."""
    return run if run.presence is None else run._replace(presence=replace(run.presence, at=0.0))
