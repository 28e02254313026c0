"""Tables in every format."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from fedcohort.errors import ParameterError
from fedcohort.report.data import load_bundle
from fedcohort.report.stats import leaderboard
from fedcohort.report.tables import (
    Cell,
    Table,
    board_json,
    leaderboard_table,
    participation_table,
    render,
    to_csv,
    to_html,
    to_latex,
    to_markdown,
)

NASTY = Table("t", "Title", ("a_b", "100%"), ((Cell("x & <y>|", "±1"), Cell("1×", best=True)),), "note #1")


def test_nothing_dangerous_survives():
    assert r"a\_b & 100\%" in to_latex(NASTY)
    assert r"x \& $<$y$>$| & \textbf{1$\times$}" in to_latex(NASTY)
    assert "x &amp; &lt;y&gt;|" in to_html(NASTY) and "<y>" not in to_html(NASTY)
    assert r"x & <y>\|" in to_markdown(NASTY)
    assert to_csv(NASTY) == "a_b,100%\nx & <y>|,1×\n"


def test_latex_braces_balance(experiment):
    board = leaderboard(load_bundle([experiment]).settings[0])
    text = to_latex(leaderboard_table(board))
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")
    assert text.count(r"\\") == len(board.rows) + 1


def test_every_row_has_every_column(experiment):
    setting = load_bundle([experiment]).settings[0]
    for table in (leaderboard_table(leaderboard(setting, targets=(0.2, 0.3))), participation_table(setting)):
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert len(to_markdown(table).split("\n\n")[0].splitlines()) == 2 + len(table.rows)


def test_who_was_never_picked(small):
    setting = load_bundle([small]).settings[0]
    table = participation_table(setting)
    for row, group in zip(table.rows, setting.groups, strict=True):
        picked = set(group.runs[0].pick_client.tolist())
        left_out = [str(c) for c in range(setting.n_clients) if c not in picked]
        assert re.findall(r"\d+", row[4].text) == left_out
        counts = [np.bincount(run.pick_client, minlength=setting.n_clients) for run in group.runs]
        assert float(row[2].text) == pytest.approx(np.mean([(c == 0).sum() for c in counts]), rel=1e-2)


def test_json_has_no_nan(experiment):
    board = leaderboard(load_bundle([experiment]).settings[0])
    found = json.loads(json.dumps(board_json(board), allow_nan=False))
    assert {row["label"] for row in found["rows"]} == {row.label for row in board.rows}


def test_an_unknown_format_is_refused():
    with pytest.raises(ParameterError, match="latex, markdown, csv"):
        render(NASTY, "word")
