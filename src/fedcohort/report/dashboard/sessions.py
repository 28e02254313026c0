"""A session's journal, followed while a host (a Flower server, somebody's own loop) writes it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.arrays import BoolArray
from fedcohort.clients import ClientTable
from fedcohort.coverage import Tally, sentences
from fedcohort.errors import FedcohortError, InputError, JournalError
from fedcohort.journal import CohortRow, Journal, ReplyRow, read_journal
from fedcohort.report import palette
from fedcohort.report.dashboard.feed import drawn, status_name
from fedcohort.report.data import RunCurve, SelectorRuns, Setting
from fedcohort.report.figures import Figure, participation, picks, rounded
from fedcohort.report.why import as_json, explain

_IDLE = 600.0  # seconds without an event after which a session no longer counts as running
_SLOW = 2.0  # times the usual duration that make a straggler


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
        self._active: BoolArray | None = None
        self._cohorts: dict[int, CohortRow] = {}
        self._replies: dict[int, list[ReplyRow]] = {}
        self._metrics: dict[int, dict[str, float]] = {}
        self._durations: list[float] = []
        self._told_upto = -1  # every cohort up to this ticket is told and read completely
        self._stamp: tuple[object, ...] = ()

    def poll(self) -> None:
        """Read the cohorts, replies and numbers that are new."""
        try:
            if self._journal is None:
                self._journal = read_journal(self.path)
                meta = self._journal.meta()
                selector = meta.get("selector") or {}
                self._seed = int(meta.get("seed", 0))
                self._selector = str(selector.get("name") or selector.get("class") or "unknown")
            self._read(self._journal)
        except (FedcohortError, OSError) as error:
            message = error.message if isinstance(error, FedcohortError) else str(error)
            self.version += message != self._problem
            self._problem = message
            self._journal = None

    def _read(self, journal: Journal) -> None:
        fresh = journal.cohorts(after=self._told_upto)
        metrics = journal.metrics()
        replies = {row.ticket: journal.replies(row.ticket) for row in fresh}
        stamp = (
            tuple((row.ticket, row.told_at, len(replies[row.ticket])) for row in fresh),
            sum(map(len, metrics.values())),
        )
        for row in fresh:
            self._cohorts[row.ticket] = row
            self._replies[row.ticket] = replies[row.ticket]
        self._metrics = metrics
        for ticket in sorted(self._cohorts):
            if ticket > self._told_upto and self._cohorts[ticket].told_at is not None and ticket == self._told_upto + 1:
                self._told_upto = ticket
                self._durations += [d for d in map(self._duration, self._replies[ticket]) if not math.isnan(d)]
        if stamp != self._stamp or self._problem:
            self._table, self._active = journal.table()
            self._stamp, self._problem = stamp, ""
            self.version += 1

    def _duration(self, reply: ReplyRow) -> float:
        """Return a client's seconds: what the host reported, else from asking to the reply's arrival."""
        reported = reply.metrics.get("duration")
        return reported if isinstance(reported, float) else reply.at - self._cohorts[reply.ticket].asked_at

    @property
    def _last(self) -> CohortRow | None:
        return self._cohorts[max(self._cohorts)] if self._cohorts else None

    @property
    def _state(self) -> str:
        if self._problem:
            return "unreadable"
        if self._last is None:
            return "waiting"
        if self._last.stop:
            return "finished"
        seen = max(
            self._last.asked_at, self._last.told_at or 0.0, *(r.at for r in self._replies[self._last.ticket] or ()), 0.0
        )
        return "running" if time.time() - seen < _IDLE else "idle"

    def overview(self) -> dict[str, Any]:
        """Return a line for the list."""
        told = [row for row in self._cohorts.values() if row.told_at is not None]
        rate = None
        if len(told) > 1:
            recent = sorted(told, key=lambda row: row.ticket)[-20:]
            span = (recent[-1].told_at or 0.0) - (recent[0].told_at or 0.0)
            rate = (len(recent) - 1) / span if span > 0 else None
        return {
            "id": self.id,
            "kind": "journal",
            "state": self._state,
            "message": self._problem or (self._last.stop or "" if self._last else ""),
            "done": len(told),
            "total": None,
            "rate": rate,
            "left": None,
            "runs": 1,
        }

    def detail(self) -> dict[str, Any]:
        """Return figures, the current cohort with statuses, stragglers."""
        figures = [figure for figure in (self._curves(), *self._pick_figures()) if figure is not None]
        return {
            **self.overview(),
            "warnings": self._warnings(),
            "sections": [{"name": "session", "figures": [drawn(figure) for figure in figures]}],
            "table": [self._line()],
        }

    def _warnings(self) -> list[str]:
        """Return a sentence when too few clients carry the training."""
        if self._table is None:
            return []
        rows = [self._cohorts[ticket] for ticket in sorted(self._cohorts)]
        tally = Tally.of(self._table.n, ((row.round, row.clients) for row in rows))
        return sentences([(self._selector, tally.coverage(self._active))])

    def _curves(self) -> Figure | None:
        keys = sorted({key for values in self._metrics.values() for key in values}, key=lambda k: (k != "accuracy", k))
        views, told = [], []
        color = palette.assign([self._selector])[self._selector][0]
        for key in keys:
            rounds = [r for r, values in sorted(self._metrics.items()) if values.get(key) is not None]
            numbers = [self._metrics[r][key] for r in rounds]
            if not numbers:
                continue
            series = {"label": self._selector, "color": color, "x": rounds, "y": rounded(np.array(numbers))}
            views.append({"name": key, "x": {"label": "round", "format": "integer"}, "series": [series]})
            told.append(f"{key} is {numbers[-1]:.4g} after round {rounds[-1]}")
        if not views:
            return None
        spec = {"kind": "lines", "views": views, "y": {"label": "value"}}
        return Figure("metrics", "The global model", f"{'; '.join(told[:3])}.", spec)

    def _pick_figures(self) -> Sequence[Figure | None]:
        rows = [self._cohorts[ticket] for ticket in sorted(self._cohorts)]
        if not rows:
            return ()
        rounds = np.array([row.round for row in rows], np.int64)
        curve = RunCurve(
            id=self.id,
            label=self._selector,
            selector=self._selector,
            seed=self._seed,
            state="running",
            reason="",
            federation="",
            params={},
            round=rounds,
            values={},
            pick_round=np.repeat(rounds, [len(row.clients) for row in rows]),
            pick_client=np.concatenate([row.clients for row in rows]).astype(np.int64),
            journal=self.path,
        )
        color, dash = palette.assign([self._selector])[self._selector]
        clients = self._table.n if self._table is not None else int(curve.pick_client.max(initial=0)) + 1
        group = SelectorRuns(self._selector, self._selector, (curve,), color, dash)
        setting = Setting(self.id, (group,), clients, {}, int(rounds.max()) + 1)
        return picks(setting), participation(setting)

    def _line(self) -> dict[str, Any]:
        last = self._last
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
            "stragglers": self._stragglers(),
        }

    def _name(self, client: int) -> str:
        return str(client) if self._table is None else self._table.name(client)

    def _members(self, row: CohortRow) -> list[dict[str, Any]]:
        replied = {reply.client: reply for reply in self._replies.get(row.ticket, ())}
        usual = statistics.median(self._durations) if self._durations else math.nan
        waited = time.time() - row.asked_at
        found = []
        for client in row.clients.tolist():
            reply = replied.get(client)
            if reply is not None:
                status, seconds = status_name(reply.status), self._duration(reply)
            else:
                over = row.told_at is not None
                status, seconds = ("missing", math.nan) if over else ("training", waited)
                if not over and waited > _SLOW * usual:
                    status = "straggling"
            known = None if math.isnan(seconds) else round(seconds, 3)
            found.append({"client": self._name(client), "status": status, "seconds": known})
        return found

    def _stragglers(self) -> list[dict[str, Any]]:
        usual = statistics.median(self._durations) if self._durations else math.nan
        asked: dict[int, int] = {}
        trouble: dict[int, int] = {}
        seconds: dict[int, list[float]] = {}
        for ticket, row in self._cohorts.items():
            if row.told_at is None:
                continue
            replied = {reply.client: reply for reply in self._replies[ticket]}
            for client in row.clients.tolist():
                asked[client] = asked.get(client, 0) + 1
                reply = replied.get(client)
                if reply is None or reply.status != 0 or reply.late:
                    trouble[client] = trouble.get(client, 0) + 1
                if reply is not None and not math.isnan(self._duration(reply)):
                    seconds.setdefault(client, []).append(self._duration(reply))
        rows: list[dict[str, Any]] = []
        for client, times in asked.items():
            mean = statistics.fmean(seconds[client]) if client in seconds else None
            slow = mean / usual if mean is not None and usual > 0 else None
            if trouble.get(client) or (slow or 0) > _SLOW:
                rows.append(
                    {
                        "client": self._name(client),
                        "asked": times,
                        "trouble": trouble.get(client, 0),
                        "seconds": mean,
                        "slow": slow,
                    }
                )
        rows.sort(key=lambda r: (-(r["trouble"] or 0) / (r["asked"] or 1), -(r["slow"] or 0)))
        return rows[:8]

    def cohort(self, run: str, round_: int) -> list[dict[str, Any]]:
        """Return the cohort of any round so far."""
        rows = [row for row in self._cohorts.values() if row.round == round_]
        if not rows:
            raise InputError(f"There is no round {round_}; so far there are {len(self._cohorts)}.")
        return self._members(max(rows, key=lambda row: row.ticket))

    def why(self, run: str, round_: int, client: str | None) -> dict[str, Any]:
        """Explain a choice."""
        if self._problem:
            raise JournalError(self._problem)
        return as_json(explain(self.path, round_, client))
