"""What is going on in a folder: experiments by their live feed, sessions by their journals.

A running simulation appends one JSON line per run and round to ``live.jsonl``; reading on from where one stopped costs
nothing, so a new round is seen at the next poll. An experiment without that file is read from its Parquet parts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.core.errors import FedcohortError, InputError
from fedcohort.core.protocol import Status
from fedcohort.report import palette
from fedcohort.report.data import RunCurve, SelectorRuns, Setting, abandoned, boards
from fedcohort.report.figures import Figure, accuracy, balance, participation, picks
from fedcohort.report.why import as_json, explain
from fedcohort.simulate.leaderboard import Options, SettingOptions, leaderboard_table, setting_name
from fedcohort.simulate.leaderboard.formats import to_html
from fedcohort.simulate.metrics import Metric
from fedcohort.simulate.store.results import Results, RunInfo, load

log = logging.getLogger(__name__)
_AT_ONCE = 1 << 25  # bytes of a live feed read in one go
_COLUMNS = ("accuracy", "metric", "loss", "qcid", "clock", "seconds", "bytes_down", "bytes_up", "query_bytes_down",
            "query_bytes_up")  # fmt: skip
_OTHERS = ("query_seconds", "client_seconds", "query_client_seconds", "available")


@dataclass
class LiveRun:
    """The rounds of one run seen so far; a round seen twice counts as last seen."""

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    trouble: dict[int, int] = field(default_factory=dict)  # client -> rounds in which it did not deliver
    asked: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)  # client -> summed duration, where known

    def add(self, row: dict[str, Any]) -> None:
        """Take one line of the feed."""
        round_ = int(row["round"])
        if round_ not in self.rows:
            cohort, statuses = row.get("cohort") or [], row.get("statuses") or []
            durations = row.get("durations") or []
            for i, client in enumerate(cohort):
                self.asked[client] = self.asked.get(client, 0) + 1
                if i < len(statuses) and statuses[i] != Status.OK:
                    self.trouble[client] = self.trouble.get(client, 0) + 1
                if i < len(durations) and durations[i] is not None:
                    self.seconds[client] = self.seconds.get(client, 0.0) + durations[i]
        self.rows[round_] = row

    def column(self, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """(T,) one number per round seen, NaN where there is none."""
        values = [self.rows[r].get(name) for r in sorted(self.rows)]
        return np.array([np.nan if v is None else float(v) for v in values], np.float64)

    def curve(self, info: RunInfo, metric: Metric) -> RunCurve:
        """Return the run as arrays, as the report's figures want it."""
        rounds = np.array(sorted(self.rows), np.int64)
        cohorts = [self.rows[int(r)].get("cohort") or [] for r in rounds]
        values = {name: self.column(name) for name in _COLUMNS}
        values |= {name: np.full(len(rounds), np.nan) for name in _OTHERS}
        if not metric.is_accuracy:
            values["accuracy"] = metric.score(values["metric"])
        return RunCurve(
            id=info.id,
            label=info.label or info.selector,
            selector=info.selector,
            seed=info.seed,
            state=info.state,
            reason=info.reason,
            federation=info.federation,
            params=info.params,
            round=rounds,
            values=values,
            pick_round=np.repeat(rounds, [len(c) for c in cohorts]),
            pick_client=np.array([c for cohort in cohorts for c in cohort], np.int64),
            journal=None,
        )


class ExperimentItem:
    """An experiment's directory."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.id = path, name
        self.version = 0
        self._problem = ""
        self._status: dict[str, Any] = {}
        self._runs: list[RunInfo] = []
        self._live: dict[str, LiveRun] = {}
        self._offset = 0
        self._stamps: dict[str, tuple[int, int]] = {}
        self._config: dict[str, Any] = {}
        self._clients = 0
        self._shown = ""

    def poll(self) -> None:
        """Read what changed since the last time."""
        changed = self._changed("status.json") | self._changed("runs.json") | self._changed("meta.json")
        if changed:
            try:
                results = load(self.path)
                self._status, self._runs, self._problem = results.status, results.runs, ""
                self._config = results.config
                if not self._clients and self._runs:
                    self._clients = self._count_clients(results)
                self.version += 1
            except FedcohortError as error:
                self._problem = error.message
                self.version += 1
                return
        self.version += self._state != self._shown
        self._shown = self._state
        if (self.path / "live.jsonl").exists():
            self._tail()
        elif changed or self._changed("rounds"):
            self._read_parts()

    def _changed(self, name: str) -> bool:
        try:
            found = (self.path / name).stat()
        except OSError:
            return False
        stamp = (found.st_mtime_ns, found.st_size)
        before, self._stamps[name] = self._stamps.get(name), stamp
        return before != stamp

    def _count_clients(self, results: Results) -> int:
        try:
            return results.client_count(self._runs[0])
        except FedcohortError:
            return 0  # the picture of the picks then shows the clients seen so far

    def _tail(self) -> None:
        """Read complete new lines of the live feed; one that shrank was started anew."""
        path = self.path / "live.jsonl"
        try:
            size = path.stat().st_size
            if size < self._offset:
                self._offset, self._live = 0, {}
            if size == self._offset:
                return
            with path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_AT_ONCE)
        except OSError as error:
            self._problem = f"The live feed cannot be read: {error}."
            return
        end = data.rfind(b"\n") + 1
        if not end and len(data) == _AT_ONCE:
            self._problem = f"The live feed has a line of more than {_AT_ONCE >> 20} MiB."
            return
        self._offset += end
        for line in data[:end].splitlines():
            self._line(line)
        self.version += bool(end)

    def _line(self, line: bytes) -> None:
        try:
            row = json.loads(line)
            self._live.setdefault(str(row["run"]), LiveRun()).add(row)
        except (ValueError, KeyError, TypeError) as error:
            log.warning("%s/live.jsonl has a line that is not one: %s", self.path, error)

    def _read_parts(self) -> None:
        try:
            table = load(self.path).rounds
        except FedcohortError as error:
            self._problem = error.message
            return
        columns = [name for name in ("run", "round", "cohort", *_COLUMNS) if name in table.column_names]
        self._live = {}
        for row in table.select(columns).to_pylist():
            self._live.setdefault(row["run"], LiveRun()).add(row)
        self.version += 1

    @property
    def _state(self) -> str:
        if self._problem:
            return "unreadable"
        state = str(self._status.get("state", "running"))
        return "killed" if state == "running" and abandoned(self.path, self._status) else state

    @property
    def _message(self) -> str:
        if self._state == "killed":
            return "the process that wrote it is gone; it can be continued with --resume"
        return str(self._status.get("message") or "")

    def overview(self) -> dict[str, Any]:
        """Return a line for the list."""
        total = self._status.get("rounds_total")
        seen = sum(len(run.rows) for run in self._live.values())
        done = max(seen, int(self._status.get("rounds_done") or 0))
        rate = self._status.get("rounds_per_second")
        left = (total - done) / rate if total and rate else self._status.get("seconds_left")
        return {
            "id": self.id,
            "kind": "experiment",
            "state": self._state,
            "message": self._problem or self._message,
            "done": done,
            "total": total,
            "rate": rate,
            "left": left if self._state == "running" else None,
            "runs": len(self._runs),
        }

    def _settings(self) -> Iterator[Setting]:
        infos = [info for info in self._runs if info.id in self._live]
        colors = palette.assign(info.label or info.selector for info in self._runs)
        metric = Metric.of(self._config.get("task"))
        for name in dict.fromkeys(setting_name(info.setting) for info in infos):
            curves = [self._live[info.id].curve(info, metric) for info in infos if setting_name(info.setting) == name]
            groups = []
            for label in dict.fromkeys(curve.label for curve in curves):
                runs = tuple(curve for curve in curves if curve.label == label)
                groups.append(SelectorRuns(label, runs[0].selector, runs, *colors[label]))
            clients = max(self._clients, *(int(c.pick_client.max(initial=-1)) + 1 for c in curves))
            rounds = max(int(c.round.max(initial=0)) + 1 for c in curves)
            first = next(info for info in infos if setting_name(info.setting) == name)
            yield Setting(name, tuple(groups), clients, {}, rounds, SettingOptions.of(self._config, first.setting))

    def detail(self) -> dict[str, Any]:
        """Return figures, runs and current cohorts."""
        sections, warnings = [], []
        settings = list(self._settings())
        for setting, board in zip(settings, boards(settings, Options.of(self._config)), strict=True):
            warnings += [f"{setting.name}, {text}" for text in setting.warnings()]
            figures = [accuracy(setting, board), balance(setting), picks(setting), participation(setting)]
            sections.append(
                {
                    "name": setting.name,
                    "board": to_html(leaderboard_table(board, setting.drawn)),
                    "figures": [drawn(f) for f in figures if f is not None],
                }
            )
        return {
            **self.overview(),
            "warnings": warnings,
            "sections": sections,
            "table": [self._run_line(info) for info in self._runs],
        }

    def _run_line(self, info: RunInfo) -> dict[str, Any]:
        live = self._live.get(info.id, LiveRun())
        last = live.rows[max(live.rows)] if live.rows else {}
        known = [row["accuracy"] for _, row in sorted(live.rows.items()) if row.get("accuracy") is not None]
        return {
            "id": info.id,
            "label": info.label or info.selector,
            "seed": info.seed,
            "setting": setting_name(info.setting),
            "state": info.state,
            "reason": info.reason,
            "round": last.get("round"),
            "accuracy": known[-1] if known else None,
            "best": max(known, default=None),
            "clock": last.get("clock"),
            "cohort": _members(last),
            "stragglers": self._stragglers(live),
        }

    def _stragglers(self, live: LiveRun) -> list[dict[str, Any]]:
        mean = {c: total / live.asked[c] for c, total in live.seconds.items()}
        usual = float(np.median(list(mean.values()))) if mean else 0.0
        rows: list[dict[str, Any]] = [
            {
                "client": str(c),
                "asked": asked,
                "trouble": live.trouble.get(c, 0),
                "seconds": mean.get(c),
                "slow": mean[c] / usual if usual > 0 and c in mean else None,
            }
            for c, asked in live.asked.items()
        ]
        rows = [row for row in rows if row["trouble"] or (row["slow"] or 0) > 2]
        rows.sort(key=lambda row: (-row["trouble"] / row["asked"], -(row["slow"] or 0)))
        return rows[:8]

    def cohort(self, run: str, round_: int) -> list[dict[str, Any]]:
        """Return the cohort of any round seen so far."""
        rows = self._live[run].rows if run in self._live else {}
        if round_ not in rows:
            raise InputError(f"Round {round_} of {run!r} has not been seen; so far there are {len(rows)}.")
        return _members(rows[round_])

    def why(self, run: str, round_: int, client: str | None) -> dict[str, Any]:
        """Explain a choice from the run's journal, and for the newest rounds from the simulation's live copies."""
        known = {info.id for info in self._runs}
        if run not in known:
            raise FedcohortError(f"There is no run {run!r} in {self.id}.")
        journal = self.path / "journal" / f"{run}.sqlite"
        try:
            return as_json(explain(journal, round_, client, live=self.path / "live.sqlite"))
        except InputError:
            # Between reading the journal and the copies a checkpoint may have moved the round from these to that.
            return as_json(explain(journal, round_, client, live=self.path / "live.sqlite"))


def _members(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    statuses = row.get("statuses") or []
    return [
        {"client": str(c), "status": status_name(statuses[i]) if i < len(statuses) else ""}
        for i, c in enumerate(row.get("cohort") or [])
    ]


def drawn(figure: Figure) -> dict[str, Any]:
    """Return a figure as the page's chart code wants it."""
    return {"name": figure.name, "title": figure.title, "sentence": figure.sentence, "file": figure.name, **figure.spec}


def status_name(value: int) -> str:
    """Return what became of a client, in lower case."""
    try:
        return Status(int(value)).name.lower()
    except ValueError:
        return f"status {value}"
