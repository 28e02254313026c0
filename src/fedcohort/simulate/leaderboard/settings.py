"""The leaderboards of all settings of an experiment, and a ranking of its selectors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedcohort.simulate.leaderboard.numbers import (
    Options,
    RunNumbers,
    find_baseline,
    leaderboard,
    terminal_accuracy,
)
from fedcohort.simulate.leaderboard.rows import LOST
from fedcohort.simulate.leaderboard.significance import SelectorRanking, rank_selectors
from fedcohort.simulate.leaderboard.table import Leaderboard
from fedcohort.simulate.metrics import Spread


def setting_name(setting: Mapping[str, Any]) -> str:
    """Return a short readable name for a setting, which is given by the keys it changes.

    >>> setting_name({"partition": "2spc", "size": 10})
    'partition=2spc, size=10'
    >>> setting_name({"name": "1SPC", "size": 10})
    '1SPC'
    """
    if "name" in setting:
        return str(setting["name"])
    return ", ".join(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in setting.items()) or "all runs"


def leaderboards_of(
    settings: Mapping[str, Sequence[RunNumbers]], options: Mapping[str, Options]
) -> tuple[Leaderboard, ...]:
    """Compute the leaderboard of every setting, each with its options, against the reference if there is one."""

    def ideal(reference: str | None) -> float | None:
        """Return where the baseline ends in the reference setting."""
        if reference is None or not settings.get(reference):
            return None
        runs, own = settings[reference], options[reference]
        base = find_baseline({run.label: run.selector for run in runs}, own, reference)
        level = Spread.of([terminal_accuracy(run, own) for run in runs if run.label == base]).mean
        return None if math.isnan(level) else level

    return tuple(
        leaderboard(name, runs, own, ideal=None if name == own.reference else ideal(own.reference))
        for name, runs in settings.items()
        if runs and (own := options[name])
    )


def ranking(boards: Sequence[Leaderboard]) -> SelectorRanking | None:
    """Rank all selectors against each other by terminal accuracy.

    Blocks are the settings, each with the means over the seeds that all selectors ran there. If there is only one
    setting, its seeds are the blocks.
    """
    if not boards:
        return None
    everywhere = set.intersection(*({row.label for row in board.rows} for board in boards))
    labels = [row.label for row in boards[0].rows if row.label in everywhere]
    by_setting = [_ends(board, labels) for board in boards]
    if len(boards) == 1:
        blocks, over = by_setting[0], "seed"
    else:
        blocks, over = [np.mean(ends, axis=0).tolist() for ends in by_setting if ends], "setting"
    return rank_selectors(labels, np.array(blocks, np.float64).reshape(len(blocks), len(labels)), over)


def _ends(board: Leaderboard, labels: Sequence[str]) -> list[list[float]]:
    """Return terminal accuracies, with a row for each seed in which all selectors ran and were evaluated."""
    # A lost run counts as worse than all others. A run that was never evaluated says nothing.
    ends = {
        row.label: {seed.seed: -math.inf if seed.state in LOST else seed.terminal for seed in row.seeds}
        for row in board.rows
    }
    common = set.intersection(*(set(ends[label]) for label in labels)) if labels else set()
    rows = [[ends[label][seed] for label in labels] for seed in sorted(common)]
    return [row for row in rows if not np.isnan(row).any()]
