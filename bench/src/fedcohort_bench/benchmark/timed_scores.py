"""Score the suite ``time``: when runs reach the target, which clients take part, and how the worst group fares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import fedcohort
from fedcohort.core.arrays import FloatArray
from fedcohort.core.errors import InputError
from fedcohort.simulate.leaderboard.formats import Cell
from fedcohort.simulate.leaderboard.rows import Arrivals
from fedcohort.simulate.leaderboard.speed import Journey, Speed, log_ratio
from fedcohort.simulate.store.results import Results
from fedcohort_bench.benchmark.frozen import Frozen, merge_frozen
from fedcohort_bench.benchmark.scores import seeds_of, terminal_accuracy, worst_group_accuracy
from fedcohort_bench.benchmark.suite import VERSION as SUITE_VERSION
from fedcohort_bench.benchmark.suite import purpose_of
from fedcohort_bench.benchmark.timed import DAY, MOST, REGIMES, ROUNDS, VERSION, WAYS, setting_name

HOUR = 3600.0
UNIFORM = "uniform"


@dataclass(frozen=True)
class TimeCell:
    """One selector under one kind of availability and one way to make models.

    Attributes
    ----------
    hours : (seeds,) array
        Simulated hours to the target; the whole day for a run that does not reach it.
    reached : (seeds,) array
        1 for a run that reaches the target, 0 otherwise.
    accuracy, worst_group : (seeds,) array
        At the end of the day, in [0, 1]; 0 for a run that diverged.
    jain : (seeds,) array
        Jain's index of participation.
    """

    regime: str
    way: str
    label: str
    hours: FloatArray
    reached: FloatArray
    accuracy: FloatArray
    worst_group: FloatArray
    jain: FloatArray

    @property
    def journeys(self) -> list[Journey]:
        """When each run reached the target, if it did, and when it ended."""
        return [
            (hours if reached else None, DAY / HOUR) for hours, reached in zip(self.hours, self.reached, strict=True)
        ]

    @property
    def median(self) -> Cell:
        """Median hours to the target, if half of the runs or more reach it."""
        arrivals = Arrivals.of([arrival for arrival, _ in self.journeys])
        return Cell(f"{arrivals.median:.1f}" if math.isfinite(arrivals.median) else "–" if arrivals.count else "never")


_MEASURES = ("hours", "reached", "accuracy", "worst_group", "jain")


@dataclass(frozen=True)
class TimeScores:
    """The result of the suite.

    Attributes
    ----------
    targets : mapping of regime to float
        The accuracy at which uniform selection ends in plain rounds, rounded down to a whole percent.
    complete : bool
        Whether every run has ended.
    whole : bool
        Whether runs had the whole day.
    stated_purpose : str
        The purpose that scores of an earlier version state, which had other seeds.
    """

    data: str
    seeds: tuple[int, ...]
    targets: Mapping[str, float]
    cells: tuple[TimeCell, ...]
    complete: bool
    frozen: Frozen
    whole: bool = True
    stated_purpose: str = ""

    @property
    def purpose(self) -> str:
        """What the result may be used for: "report", "tuning", "own" seeds, or "trial" if it is not the whole suite."""
        if self.frozen.suite != SUITE_VERSION:
            return self.stated_purpose
        if not self.whole or set(self.targets) != set(REGIMES):
            return "trial"
        return purpose_of(self.seeds)

    @property
    def labels(self) -> list[str]:
        """The selectors, uniform first."""
        return list(dict.fromkeys([UNIFORM, *(cell.label for cell in self.cells)]))

    def find(self, regime: str, way: str, label: str) -> TimeCell | None:
        """Return a cell; None if the selector was not run in this way."""
        key = (regime, way, label)
        return next((cell for cell in self.cells if (cell.regime, cell.way, cell.label) == key), None)

    def faster(self, way: str, label: str, *, than: tuple[str, str], regimes: Sequence[str] = ()) -> Speed | None:
        """Return how many times faster a selector is in one way ``than`` another (way, selector) with the same seeds.

        This is the geometric mean over the regimes; a bound if some runs do not reach the target within the day.
        """
        logs: list[list[tuple[float, float]]] = []
        for regime in regimes or self.targets:
            entry, base = self.find(regime, way, label), self.find(regime, *than)
            if entry is None or base is None:
                return None
            logs.append([log_ratio(*pair) for pair in zip(entry.journeys, base.journeys, strict=True)])
        # Regimes are averaged before seeds, because the runs of one seed share a federation.
        return Speed.of(np.mean(logs, axis=0))

    def worst_group_gain(self, way: str, label: str) -> float | None:
        """Return what the worst group gains over uniform selection in the same way, the mean over regimes and seeds."""
        gains = []
        for regime in self.targets:
            entry, base = self.find(regime, way, label), self.find(regime, way, UNIFORM)
            if entry is None or base is None:
                return None
            gains.append(entry.worst_group - base.worst_group)
        return float(np.mean(gains, axis=0).mean())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "suite": "time",
            "version": VERSION,
            "fedcohort": fedcohort.__version__,
            "data": self.data,
            "seeds": list(self.seeds),
            "day": DAY,
            "purpose": self.purpose,
            "whole": self.whole,
            "complete": self.complete,
            "frozen": self.frozen.to_dict(),
            "regimes": {name: {"target": target, "online": REGIMES[name]} for name, target in self.targets.items()},
            "cells": [
                {
                    "regime": cell.regime,
                    "way": cell.way,
                    "selector": cell.label,
                    **{name: [round(float(x), 6) for x in getattr(cell, name)] for name in _MEASURES},
                }
                for cell in self.cells
            ],
        }

    @staticmethod
    def from_dict(stored: Mapping[str, Any]) -> TimeScores:
        """Read the scores of a bench.json of this suite."""
        return TimeScores(
            data=stored["data"],
            seeds=tuple(stored["seeds"]),
            targets={name: float(entry["target"]) for name, entry in stored["regimes"].items()},
            cells=tuple(
                TimeCell(
                    cell["regime"],
                    cell["way"],
                    cell["selector"],
                    *(np.array(cell[name], np.float64) for name in _MEASURES),
                )
                for cell in stored["cells"]
            ),
            complete=stored["complete"],
            whole=stored["whole"],
            frozen=Frozen.from_dict(stored["frozen"]),
            stated_purpose=stored["purpose"],
        )


def score_time(*results: Results) -> TimeScores:
    """Score the pieces of the suite together."""
    frozen = merge_frozen([part.path for part in results])
    targets = _targets(results)
    # Every way is timed to the targets that plain rounds set, so the tables are computed a second time.
    levels = sorted(set(targets.values()))
    boards = {board.setting: board for part in results for board in part.leaderboards(targets=levels)}
    seeds, _ = seeds_of(boards.values())
    cells = []
    for regime, target in targets.items():
        for way in WAYS:
            board = boards.get(setting_name(regime, way))
            if board is None:
                continue
            for row in board.rows:
                by_seed = {seed.seed: seed for seed in row.seeds}
                runs = [by_seed[seed] for seed in seeds]
                arrived = [run.seconds_to[board.targets.index(target)] for run in runs]
                # The restricted time of a censored run is the whole day.
                times = np.array([DAY if seconds is None else min(seconds, DAY) for seconds in arrived])
                cells.append(
                    TimeCell(
                        regime,
                        way,
                        row.label,
                        hours=times / HOUR,
                        reached=(times < DAY).astype(np.float64),
                        accuracy=np.array([terminal_accuracy(run) for run in runs]),
                        worst_group=np.array([worst_group_accuracy(run) for run in runs]),
                        jain=np.array([run.fair["jain"] for run in runs]),
                    )
                )
    return TimeScores(
        data=str(results[0].config["data"]["name"]),
        seeds=seeds,
        targets=targets,
        cells=tuple(cells),
        complete=all(board.finished for board in boards.values()),
        whole=all(int(part.config["run"]["rounds"]) in MOST.values() for part in results),
        frozen=frozen,
    )


def _targets(results: Sequence[Results]) -> dict[str, float]:
    """Return the accuracy at which uniform selection ends in plain rounds, by kind of availability."""
    boards = {board.setting: board for part in results for board in part.leaderboards()}
    names = {regime: setting_name(regime, ROUNDS) for regime in REGIMES}
    targets = {regime: boards[name].target for regime, name in names.items() if name in boards}
    if not targets:
        raise InputError("The suite 'time' compares with uniform selection in rounds, which these results lack.")
    if any(math.isnan(target) for target in targets.values()):
        raise InputError("Uniform selection in rounds was never evaluated, so there is no target.")
    return targets
