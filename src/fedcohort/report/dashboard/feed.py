"""An experiment on the dashboard: its report, updated whenever one of its files changes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.core.errors import FedcohortError, InputError
from fedcohort.core.protocol import Status
from fedcohort.report import palette
from fedcohort.report.dashboard.attendance import status_name, stragglers
from fedcohort.report.data import RunCurve, boards, is_orphaned, runs_of, setting_of
from fedcohort.report.figure import Figure
from fedcohort.report.figures import accuracy, balance, participation, picks
from fedcohort.report.sweep import sweep
from fedcohort.report.why import as_json, explain
from fedcohort.simulate.leaderboard import leaderboard_table, setting_name
from fedcohort.simulate.leaderboard.formats import to_html
from fedcohort.simulate.store.results import Results, RunInfo, load

_FILES = ("status.json", "runs.json", "meta.json", "rounds")  # a change in these or in live files is news


class ExperimentItem:
    """An experiment's directory."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.id = path, name
        self.version = 0
        self._problem = ""
        self._results: Results | None = None
        self._stamps: list[tuple[int, int] | None] = []
        self._clients = 0
        self._shown = ""

    def poll(self) -> None:
        """Read what changed since the last time."""
        stamps: list[tuple[int, int] | None] = []
        for path in (*(self.path / name for name in _FILES), *sorted(self.path.glob("live*.sqlite*"))):
            try:
                status = path.stat()
                stamps.append((status.st_mtime_ns, status.st_size))
            except OSError:
                stamps.append(None)
        # Size as well as time: two checkpoints may fall into one tick of the file system's clock.
        if stamps != self._stamps:
            self._stamps = stamps
            self.version += 1
            try:
                results = load(self.path, self._results)
                _ = results.rounds  # read now, so that damage is noticed here
            except FedcohortError as error:
                self._problem = error.message
                return
            self._results, self._problem = results, ""
            if not self._clients and results.runs:
                with contextlib.suppress(FedcohortError):  # the picks then show the clients picked so far
                    self._clients = results.client_count(results.runs[0])
        self.version += self._state != self._shown
        self._shown = self._state

    @property
    def _status(self) -> dict[str, Any]:
        return {} if self._results is None else self._results.status

    @property
    def _state(self) -> str:
        if self._problem:
            return "unreadable"
        state = str(self._status.get("state", "running"))
        return "killed" if state == "running" and is_orphaned(self.path, self._status) else state

    def overview(self) -> dict[str, Any]:
        """Return a line for the list."""
        status, state = self._status, self._state
        total = status.get("rounds_total")
        recorded = 0 if self._results is None else sum(self._results.rounds_made().values())
        # Live files have rounds that status.json does not count yet.
        done = max(recorded, int(status.get("rounds_done") or 0))
        rate = status.get("rounds_per_second")
        # The estimate in status.json is as old as the last checkpoint.
        left = (total - done) / rate if total and rate else status.get("seconds_left")
        gone = "the process that wrote it is gone; it can be continued with --resume"
        return {
            "id": self.id,
            "kind": "experiment",
            "state": state,
            "message": self._problem or (gone if state == "killed" else str(status.get("message") or "")),
            "done": done,
            "total": total,
            "rate": rate,
            "left": left if state == "running" else None,
            "runs": 0 if self._results is None else len(self._results.runs),
        }

    def detail(self) -> dict[str, Any]:
        """Return figures, runs and current cohorts."""
        sections: list[dict[str, Any]] = []
        warnings: list[str] = []
        results = self._results
        if results is None:
            return {**self.overview(), "warnings": warnings, "sections": sections, "table": []}
        colors = palette.assign(info.label or info.selector for info in results.runs)
        members: dict[str, list[tuple[Results, RunCurve]]] = {}
        for name, run in runs_of(results, warnings):
            members.setdefault(name, []).append((results, run))
        settings = [setting_of(name, runs, colors, {}, self._clients) for name, runs in members.items()]
        for setting, board in zip(settings, boards(settings), strict=True):
            warnings += [f"{setting.name}, {text}" for text in setting.warnings()]
            curves = (accuracy(setting, board), sweep(setting, board))
            figures = (*curves, balance(setting), picks(setting), participation(setting))
            sections.append(
                {
                    "name": setting.name,
                    "board": to_html(leaderboard_table(board, setting.line_styles)),
                    "figures": [chart_data(f) for f in figures if f is not None],
                }
            )
        lines = [_run_line(results, info) for info in results.runs]
        return {**self.overview(), "warnings": warnings, "sections": sections, "table": lines}

    def cohort(self, run: str, round_: int) -> list[dict[str, Any]]:
        """Return the cohort of a recorded round."""
        rounds = [] if self._results is None else self._results.column(run, "round").tolist()
        if self._results is None or round_ not in rounds:
            raise InputError(f"Round {round_} of {run!r} is not recorded; {len(rounds)} rounds are.")
        return _members(self._results, run, round_)

    def why(self, run: str, round_: int, client: str | None) -> dict[str, Any]:
        """Explain a choice from the run's journal, or for the newest rounds from its live copies."""
        if self._results is None or run not in {info.id for info in self._results.runs}:
            raise FedcohortError(f"There is no run {run!r} in {self.id}.")
        journal = self._results.journal(run)
        try:
            return as_json(explain(journal, round_, client))
        except InputError:
            # A checkpoint may have moved the round from the copies to the journal between reading the two.
            return as_json(explain(journal, round_, client))


def _run_line(results: Results, info: RunInfo) -> dict[str, Any]:
    """Return one line of the table of runs."""
    rounds, clock = results.column(info, "round"), results.column(info, "clock")
    scores = results.score(info)
    known = scores[np.isfinite(scores)]
    last = int(rounds[-1]) if len(rounds) else None
    cohort: list[dict[str, Any]] = []
    slow: list[dict[str, Any]] = []
    with contextlib.suppress(FedcohortError):  # the journal cannot be read; the page's warnings say so
        asked = results.members(info)
        slow = stragglers(asked["client"], asked["status"] == Status.OK, asked["seconds"], str)
        cohort = [] if last is None else _members(results, info.id, last)
    return {
        "id": info.id,
        "label": info.label or info.selector,
        "seed": info.seed,
        "setting": setting_name(info.setting),
        "state": info.state,
        "reason": info.reason,
        "round": last,
        "accuracy": float(known[-1]) if len(known) else None,
        "best": float(known.max()) if len(known) else None,
        "clock": float(clock[-1]) if len(clock) and np.isfinite(clock[-1]) else None,
        "cohort": cohort,
        "stragglers": slow,
    }


def _members(results: Results, run: str, round_: int) -> list[dict[str, Any]]:
    """Return the cohort of a round with the outcome of each client."""
    decisions = results.decisions(run)
    block = decisions.replies.get(round_)
    statuses = {} if block is None else dict(zip(block.clients.tolist(), block.status.tolist(), strict=True))
    return [
        {"client": str(client), "status": status_name(statuses[client]) if client in statuses else ""}
        for client in decisions.cohorts.get(round_, np.zeros(0, np.int64)).tolist()
    ]


def chart_data(figure: Figure) -> dict[str, Any]:
    """Return a figure in the form that the page expects."""
    return {"name": figure.name, **figure.chart()}
