"""The leaderboards of all settings of an experiment, and all its selectors ranked against each other."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedcohort.simulate.leaderboard.numbers import (
    LOST,
    Leaderboard,
    Options,
    RunNumbers,
    find_baseline,
    leaderboard,
    terminal_accuracy,
)
from fedcohort.simulate.leaderboard.significance import Ranking, rank_selectors
from fedcohort.simulate.metrics import Spread


def setting_name(setting: Mapping[str, Any]) -> str:
    """Return a short readable name for what distinguishes a setting.

    >>> setting_name({"partition": "2spc", "size": 10})
    'partition=2spc, size=10'
    >>> setting_name({"name": "1SPC", "size": 10})
    '1SPC'
    """
    if "name" in setting:
        return str(setting["name"])
    return ", ".join(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in setting.items()) or "all runs"


def planned_rounds(config: Mapping[str, Any], setting: Mapping[str, Any]) -> int | None:
    """Return how many rounds a run of a setting is to make, by the configuration."""
    run = config.get("run")
    base = run.get("rounds") if isinstance(run, Mapping) else None
    found = setting.get("run.rounds", base)
    return found if isinstance(found, int) else None


def leaderboards_of(
    settings: Mapping[str, Sequence[RunNumbers]], options: Options, planned: Mapping[str, int | None]
) -> tuple[Leaderboard, ...]:
    """Compute the leaderboard of every setting; the reference, where there is one, serves all.

    Parameters
    ----------
    settings : mapping of a setting's name to its runs
    options : Options
    planned : mapping of a setting's name to the rounds its runs are to make
    """
    ideal = None
    if options.reference is not None and options.reference in settings:
        runs = settings[options.reference]
        base = find_baseline({run.label: run.selector for run in runs}, options, options.reference)
        level = Spread.of([terminal_accuracy(run, options) for run in runs if run.label == base]).mean
        ideal = None if math.isnan(level) else level
    return tuple(
        leaderboard(name, runs, options, planned=planned.get(name), ideal=None if name == options.reference else ideal)
        for name, runs in settings.items()
        if runs
    )


def ranking(boards: Sequence[Leaderboard]) -> Ranking | None:
    """Rank all selectors against each other by terminal accuracy, over every setting and seed that all of them ran."""
    labels = [row.label for row in boards[0].rows] if boards else []
    labels = [label for label in labels if all(any(row.label == label for row in b.rows) for b in boards)]
    blocks = []
    for board in boards:
        ends = {
            row.label: {s.seed: -math.inf if s.state in LOST else s.terminal for s in row.seeds} for row in board.rows
        }
        common = set.intersection(*(set(ends[label]) for label in labels)) if labels else set()
        rows = [[ends[label][seed] for label in labels] for seed in sorted(common)]
        blocks += [row for row in rows if not np.isnan(row).any()]
    return rank_selectors(labels, np.array(blocks, np.float64).reshape(len(blocks), len(labels)))
