"""Keep the results of a study's runs as JSON, merged from several experiments."""

from __future__ import annotations

import functools
import json
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.core.errors import FedcohortError, InputError
from fedcohort.core.files import read_file
from fedcohort.core.version import __version__
from fedcohort.simulate.leaderboard import LeaderRow
from fedcohort.simulate.store.results import Results, RunInfo
from fedcohort.simulate.store.writer import write_atomically
from fedcohort_bench.papers.declare import Labels, Study

FORMAT = 1
_POINTS = 40  # of a curve, at most
NOT_RUN: Mapping[str, Any] = {"seeds": (), "rounds": 0, "finished": False, "target": None, "labels": {}}
"""A setting that a record does not have."""


class RecordError(FedcohortError, ValueError):
    """A record cannot be read, or belongs to another study."""


class StudyRecord:
    """Our figures of one study, by setting and label.

    Attributes
    ----------
    settings : dict
        By setting: ``seeds``, ``rounds`` run and ``planned``, whether it is ``finished``, ``target``, ``made`` (the
        command, the date and the device), and ``labels``. A label has its measures, each with a value per seed (None if
        a target was never reached), and ``curve``, the mean accuracy at some rounds. ``later`` lists labels that were
        added afterwards: ``labels``, ``made``, and ``again``, the best accuracies of recorded labels that were run
        again with them.
    """

    def __init__(self, study: str, settings: Mapping[str, Any] | None = None) -> None:
        self.study = study
        self.settings: dict[str, Any] = dict(settings or {})

    @property
    def trial(self) -> bool:
        """Whether it was made to see that everything runs, so that nothing may be concluded from it."""
        return any(entry["made"].get("trial") for entry in self.settings.values())

    @classmethod
    def read(cls, path: Path, study: Study) -> StudyRecord:
        """Read a record; an empty one if there is no file."""
        try:
            stored = json.loads(read_file(path))
        except FileNotFoundError:
            return cls(study.name)
        except (OSError, ValueError, RecursionError) as error:
            raise RecordError(f"{path} cannot be read: {error}.") from error
        # Figures of another study under this name would be compared with the wrong paper.
        if not isinstance(stored, dict) or stored.get("study") != study.name or stored.get("format") != FORMAT:
            raise RecordError(
                f"{path} is not a record of the study {study.name!r} in format {FORMAT}.",
                hint="name another folder with --out",
            )
        return cls(study.name, stored["settings"])

    def write(self, path: Path) -> None:
        """Write the record atomically."""
        text = json.dumps({"format": FORMAT, "study": self.study, "settings": self.settings}, indent=1)
        # Each list of plain values on one line, so that people can read and compare records.
        short = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: "[" + re.sub(r"\s*\n\s*", " ", m[1]) + "]", text)
        write_atomically(path, (short + "\n").encode())

    def add(self, other: StudyRecord) -> None:
        """Replace settings that have fewer seeds or rounds than another record's settings of the same name.

        If both have equally many, only add the labels that are missing here, and note how they were produced.
        """
        for name, theirs in other.settings.items():
            ours = self.settings.get(name, theirs)
            have, new = ours["labels"], {k: v for k, v in theirs["labels"].items() if k not in ours["labels"]}
            # Tuples compare from the left, so seeds count before rounds.
            my_size, their_size = ((len(one["seeds"]), one["rounds"]) for one in (ours, theirs))
            if their_size > my_size or (their_size == my_size and theirs["labels"].keys() >= have.keys()):
                self.settings[name] = theirs
            elif their_size == my_size and new:
                again = {label: values["best"] for label, values in theirs["labels"].items() if label in have}
                later = {"labels": list(new), "made": theirs["made"], "again": again}
                self.settings[name] = {**ours, "labels": have | new, "later": [*ours.get("later", []), later]}

    def values(self, setting: str, label: Labels, measure: str) -> list[float | None] | None:
        """Return a value per seed, or None if a label was not run."""
        labels = (label,) if isinstance(label, str) else label
        known = self.settings.get(setting, {}).get("labels", {})
        columns = [known.get(one, {}).get(measure) for one in labels]
        if any(values is None for values in columns):
            return None
        return [None if None in seed else sum(seed) / len(seed) for seed in zip(*columns, strict=True)]

    def mean(self, setting: str, label: Labels, measure: str) -> tuple[float | None, float, int] | None:
        """Return mean, standard deviation and number of seeds; the mean is None if a seed missed the target."""
        values = self.values(setting, label, measure)
        if not values:
            return None
        reached = np.array([value for value in values if value is not None], np.float64)
        if len(reached) < len(values):
            return None, math.nan, len(values)
        return float(reached.mean()), float(reached.std(ddof=1)) if len(reached) > 1 else math.nan, len(values)


def record_of(results: Results, study: Study, part: str, *, seconds: float, quick: bool = False) -> StudyRecord:
    """Return the record of one part's experiment so far; ``quick`` marks a trial."""
    made_with = {
        "fedcohort": __version__,
        "command": results.meta.get("command", ""),
        "device": results.meta.get("device", ""),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(seconds),
        "trial": quick,
    }
    record = StudyRecord(study.name)
    order = list(study.names)
    for board in results.leaderboards():
        if board.setting not in study.settings(part):
            raise InputError(f"The part {part!r} of {study.name} has no setting {board.setting!r}.")
        runs = [run for run in results.runs if str(run.setting.get("name", "")) == board.setting]
        if not all(run.id in results.curves and len(results.curves[run.id].rounds) for run in runs):
            continue  # a setting is recorded once all its runs have a result
        seeds = [seed for row in board.rows for seed in row.seeds]
        # Of interrupted runs, the rounds that all have. Of others not the least, because some stop early by design.
        still = [seed.rounds for seed in seeds if seed.state == "running"]
        ends = [seed.terminal for row in board.rows if row.label == study.baseline for seed in row.seeds]
        end = float(np.mean(ends)) if ends else math.nan
        rows = sorted(board.rows, key=lambda row: order.index(row.label) if row.label in order else len(order))
        record.settings[board.setting] = {
            "seeds": [seed.seed for seed in board.rows[0].seeds],
            "rounds": max(seed.rounds for seed in seeds) if board.finished else min(still),
            "planned": study.rounds[board.setting],
            "finished": board.finished,
            "target": _number(board.target),
            "made": made_with,
            "labels": {
                row.label: _numbers(results, study, row, [run for run in runs if run.label == row.label], end)
                for row in rows
            },
        }
    return record


def _numbers(results: Results, study: Study, row: LeaderRow, members: list[RunInfo], end: float) -> dict[str, Any]:
    """Return what a record keeps of one method; ``end`` is the baseline's final accuracy."""
    members = sorted(members, key=lambda run: run.seed)
    curves = [results.curves[run.id] for run in members]
    extras: dict[str, list[float | None]] = {}
    if study.extra is not None:
        for run in members:
            for name, value in study.extra(results, run).items():
                extras.setdefault(name, []).append(_number(value))
    # The mean over seeds at rounds that all seeds evaluated: where one stops earlier, the mean would jump.
    common = functools.reduce(np.intersect1d, [curve.rounds for curve in curves])
    at = common[np.unique(np.linspace(0, len(common) - 1, _POINTS if len(common) else 0).astype(int))]
    accuracy = np.mean([curve.accuracy[np.searchsorted(curve.rounds, at)] for curve in curves], axis=0)
    return {
        "rounds": [seed.rounds_to[-1] for seed in row.seeds],
        "seconds": [_number(seed.seconds_to[-1]) for seed in row.seeds],
        "best": [_number(seed.early_stop) for seed in row.seeds],
        "terminal": [_number(seed.terminal) for seed in row.seeds],
        "final": [_number(float(curve.accuracy[-1])) for curve in curves],
        "qcid": [_number(seed.qcid) for seed in row.seeds],
        "megabytes": [_number(seed.megabytes + seed.query_megabytes) for seed in row.seeds],
        "catch-up": [curve.rounds_to(end) if math.isfinite(end) else None for curve in curves],
        "unevenness": [_number(_unevenness(results, run)) for run in members],
        **extras,
        "curve": {"round": (at + 1).tolist(), "accuracy": [round(float(x), 4) for x in accuracy]},
    }


def _unevenness(results: Results, run: RunInfo) -> float:
    """Return the standard deviation of how often each client was picked, divided by the mean."""
    clients = len(results.federation(run).sizes)
    picks = np.bincount(np.concatenate(results.cohorts(run)), minlength=clients)
    return float(picks.std() / picks.mean()) if picks.sum() else math.nan


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(float(value), 6)
