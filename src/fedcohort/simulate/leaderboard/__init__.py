"""The leaderboard that ``compare``, the report, the dashboard and the reproductions show.

:meth:`fedcohort.simulate.store.results.Results.leaderboards` computes it for an experiment.

>>> from fedcohort.simulate.store.results import load
>>> for board in load("runs/digits").leaderboards():  # doctest: +SKIP
...     print(board)
"""

from __future__ import annotations

from fedcohort.simulate.leaderboard.formats import Table, to_text
from fedcohort.simulate.leaderboard.numbers import Options, RunNumbers, leaderboard, terminal_window
from fedcohort.simulate.leaderboard.rows import LeaderRow, PairedComparison, SeedRow, ToTarget
from fedcohort.simulate.leaderboard.settings import leaderboards_of, ranking, setting_name
from fedcohort.simulate.leaderboard.significance import SelectorRanking, rank_selectors
from fedcohort.simulate.leaderboard.table import Leaderboard, leaderboard_table

__all__ = [
    "LeaderRow",
    "Leaderboard",
    "Options",
    "PairedComparison",
    "RunNumbers",
    "SeedRow",
    "SelectorRanking",
    "Table",
    "ToTarget",
    "leaderboard",
    "leaderboard_table",
    "leaderboards_of",
    "rank_selectors",
    "ranking",
    "setting_name",
    "terminal_window",
    "to_text",
]
