"""Tables in every format."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from fedcohort.core.errors import ParameterError, UnknownNameError
from fedcohort.report.data import boards, load_bundle
from fedcohort.report.tables import participation_table
from fedcohort.simulate.leaderboard import leaderboard_table, to_text
from fedcohort.simulate.leaderboard.formats import Cell, Table, render, to_html, to_markdown
from fedcohort.simulate.leaderboard.table import COLUMNS, FEW, megabytes
from fedcohort.simulate.store.results import load

NASTY = Table("t", "Title", ("a_b", "100%"), ((Cell("x & <y>|", "±1"), Cell("1×", best=True)),), "note #1")


def test_markup_is_escaped_in_every_format():
    assert r"a\_b & 100\%" in render(NASTY, "latex")
    assert r"x \& $<$y$>$| & \textbf{1$\times$}" in render(NASTY, "latex")
    assert "x &amp; &lt;y&gt;|" in to_html(NASTY) and "<y>" not in to_html(NASTY)
    assert r"x & <y>\|" in to_markdown(NASTY)
    assert render(NASTY, "csv") == "a_b,100%\nx & <y>|,1×\n"


def test_latex_braces_balance(experiment):
    (board,) = load(experiment).leaderboards()
    text = render(leaderboard_table(board), "latex")
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")
    assert text.count(r"\\") == len(board.rows) + 1


def test_every_row_has_every_column(experiment):
    setting = load_bundle([experiment]).settings[0]
    (board,) = boards([setting], (0.2, 0.3))
    for table in (leaderboard_table(board), participation_table(setting)):
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert len([line for line in to_markdown(table).splitlines() if line.startswith("|")]) == 2 + len(table.rows)


def test_clients_that_were_never_picked(small):
    setting = load_bundle([small]).settings[0]
    table = participation_table(setting)
    for row, group in zip(table.rows, setting.groups, strict=True):
        picked = set(group.runs[0].pick_client.tolist())
        left_out = [str(c) for c in range(setting.n_clients) if c not in picked]
        assert re.findall(r"\d+", row[4].text) == left_out and row[4].note == f"seed {group.runs[0].seed}"
        counts = [np.bincount(run.pick_client, minlength=setting.n_clients) for run in group.runs]
        assert float(row[2].text) == pytest.approx(np.mean([(c == 0).sum() for c in counts]), rel=1e-2)


def test_json_has_no_nan(experiment):
    (board,) = load(experiment).leaderboards()
    found = json.loads(json.dumps(board.to_dict(), allow_nan=False))
    assert {row["label"] for row in found["rows"]} == {row.label for row in board.rows}


def test_an_unknown_format_is_refused():
    with pytest.raises(ParameterError, match="latex"):
        render(NASTY, "word")


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
@pytest.mark.parametrize("columns", [FEW, COLUMNS])
def test_text_fits_and_shows_every_column(experiment, width, columns):
    (board,) = load(experiment).leaderboards()
    table = leaderboard_table(board, columns=columns)
    text = to_text(table, width)
    assert max(map(len, text.splitlines())) <= width
    for row in board.rows:
        assert row.label in text and f"{100 * row.terminal.mean:.1f}%" in text
    for heading in table.columns:
        assert all(word in text for word in heading.split())


def test_few_columns_fit_a_terminal_and_others_are_shown_on_request(experiment):
    (board,) = load(experiment).leaderboards()
    few, named, every = (leaderboard_table(board, columns=names) for names in (FEW, ("mb", "p"), COLUMNS))
    assert len(few.columns) <= 6 < len(every.columns) and few.columns[1] == "Terminal"
    assert to_text(few).count("uniform baseline") == 1  # one block
    assert named.columns in (("Selector", "p", "MB"), ("Selector", "MB"))
    with pytest.raises(UnknownNameError, match="gian") as error:
        leaderboard_table(board, columns=("gian",))
    assert "gain" in error.value.hint
    assert "QCID" in every.note and "QCID" not in few.note


def test_columns_are_stacked_if_there_is_no_room_for_three():
    wide = Table("t", "Title", ("Selector", "Long heading", "Other"), ((Cell("name"), Cell("x" * 30), Cell("y" * 9)),))
    lines = to_text(wide, 30).splitlines()
    assert lines[:2] == ["Title", "name"] and "  Other: yyyyyyyyy" in lines and max(map(len, lines)) <= 30


@pytest.mark.parametrize("value", [0.00123, 0.5, 9.996, 99.97, 123456.7, 9.9e9])
def test_megabytes_are_never_in_exponent_form(value):
    assert "e" not in megabytes(value)
    assert float(megabytes(value).replace(",", "")) == pytest.approx(value, rel=0.05)
