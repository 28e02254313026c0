"""The one leaderboard: what ``compare``, the report, the dashboard and the reproductions show.

>>> from fedcohort.simulate.store.results import load
>>> from fedcohort.simulate.leaderboard import leaderboards
>>> for board in leaderboards(load("runs/digits")):  # doctest: +SKIP
...     print(board)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.simulate.leaderboard.formats import Table, to_text
from fedcohort.simulate.leaderboard.numbers import (
    FAIRNESS,
    Leaderboard,
    LeaderRow,
    Options,
    Paired,
    RunNumbers,
    RunProgress,
    SeedRow,
    ToTarget,
    leaderboard,
    terminal_window,
)
from fedcohort.simulate.leaderboard.settings import SettingOptions, leaderboards_of, ranking, setting_name
from fedcohort.simulate.leaderboard.significance import SelectorRanking, rank_selectors
from fedcohort.simulate.leaderboard.table import leaderboard_table
from fedcohort.simulate.store.results import Results

__all__ = [
    "LeaderRow",
    "Leaderboard",
    "Options",
    "Paired",
    "RunNumbers",
    "RunProgress",
    "SeedRow",
    "SelectorRanking",
    "SettingOptions",
    "Table",
    "ToTarget",
    "leaderboard",
    "leaderboard_table",
    "leaderboards",
    "leaderboards_of",
    "rank_selectors",
    "ranking",
    "setting_name",
    "terminal_window",
    "to_text",
]

_COLUMNS = ("qcid", "clock", "bytes_down", "bytes_up", "query_bytes_down", "query_bytes_up", *FAIRNESS)


@dataclass(frozen=True)
class _Recorded:
    """A run's numbers as a results folder has them."""

    label: str
    selector: str
    seed: int
    state: str
    round: IntArray
    values: Mapping[str, FloatArray]


def leaderboards(
    results: Results,
    *,
    targets: Sequence[float] | None = None,
    terminal: int | None = None,
    baseline: str | None = None,
    reference: str | None = None,
) -> tuple[Leaderboard, ...]:
    """Compute the leaderboard of each setting of an experiment, finished or still being written.

    Parameters
    ----------
    targets : sequence of float, optional
        Accuracies (or values of the task's metric) to reach. Default: the configuration's; without any, where the
        baseline ends, rounded down to a whole percent.
    terminal : int, optional
        Last rounds for terminal accuracy. Default: the configuration's; without it 50, or a fifth of a shorter run.
    baseline, reference : str, optional
        Label to compare with, and the setting that stands for IID data. Default: the configuration's.
    """
    options = Options.of(results.config).override(targets, terminal, baseline, reference)
    settings: dict[str, list[RunNumbers]] = {}
    own: dict[str, SettingOptions] = {}
    for info in results.runs:
        rounds = results.column(info, "round")
        if not len(rounds) and info.state != "failed":
            continue
        name = setting_name(info.setting)
        values = {column: results.column(info, column) for column in _COLUMNS} | {"accuracy": results.score(info)}
        settings.setdefault(name, []).append(
            _Recorded(info.label or info.selector, info.selector, info.seed, info.state, rounds, values)
        )
        own[name] = SettingOptions.of(results.config, info.setting)
    return leaderboards_of(settings, options, own)
