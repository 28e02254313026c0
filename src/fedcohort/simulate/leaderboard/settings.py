"""The leaderboards of all settings of an experiment, and a ranking of its selectors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class SettingOptions:
    """The options that a setting has of its own.

    Attributes
    ----------
    planned : int, optional
        Rounds planned for each run, by the setting or the experiment.
    targets : tuple of float
        Values of the metric to reach. Empty: the experiment's.
    terminal : int, optional
        Number of last rounds that terminal accuracy averages. None: the experiment's.
    """

    planned: int | None = None
    targets: tuple[float, ...] = ()
    terminal: int | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], setting: Mapping[str, Any]) -> SettingOptions:
        """Read a configuration and the keys that a setting changes.

        >>> SettingOptions.of({"run": {"rounds": 9, "targets": [0.5]}}, {"name": "1spc", "run.targets": [0.6]})
        SettingOptions(planned=9, targets=(0.6,), terminal=None)
        """
        run = config.get("run")
        planned = setting.get("run.rounds", run.get("rounds") if isinstance(run, Mapping) else None)
        targets, terminal = setting.get("run.targets"), setting.get("run.terminal")
        return cls(
            planned if isinstance(planned, int) else None,
            tuple(float(target) for target in targets) if isinstance(targets, (list, tuple)) else (),
            terminal if isinstance(terminal, int) and terminal > 0 else None,
        )

    def apply_to(self, options: Options) -> Options:
        """Return the experiment's options, with this setting's own values."""
        if self.targets and not options.keep_targets:
            options = replace(options, targets=tuple(options.metric.score(target) for target in self.targets))
        return replace(options, terminal=self.terminal or options.terminal)


def leaderboards_of(
    settings: Mapping[str, Sequence[RunNumbers]], options: Options, own: Mapping[str, SettingOptions]
) -> tuple[Leaderboard, ...]:
    """Compute the leaderboard of every setting, measured against the reference if there is one.

    Parameters
    ----------
    settings : mapping of setting name to runs
    own : mapping of setting name to its own options
    """
    ideal = None
    if options.reference is not None and options.reference in settings:
        runs = settings[options.reference]
        base = find_baseline({run.label: run.selector for run in runs}, options, options.reference)
        reference_options = own.get(options.reference, SettingOptions()).apply_to(options)
        level = Spread.of([terminal_accuracy(run, reference_options) for run in runs if run.label == base]).mean
        ideal = None if math.isnan(level) else level
    return tuple(
        leaderboard(
            name,
            runs,
            setting.apply_to(options),
            planned=setting.planned,
            ideal=None if name == options.reference else ideal,
        )
        for name, runs in settings.items()
        if runs and (setting := own.get(name, SettingOptions()))
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
