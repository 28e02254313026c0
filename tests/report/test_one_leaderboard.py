"""Four places show the leaderboard of a results folder: the numbers are the same, cell by cell."""

from __future__ import annotations

import html
import importlib.util
import io
import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from fedcohort.cli.app import main
from fedcohort.report.dashboard.feed import ExperimentItem
from fedcohort.report.page import assemble, build_report
from fedcohort.simulate.leaderboard import leaderboard_table
from fedcohort.simulate.store.results import load

# A baseline that is not uniform, a selector that diverges, no target, no window, a run shorter than the usual window.
CONFIG = """
seeds = 3
[data]
name = "synthetic"
samples = 300
test_samples = 80
classes = 4
shape = [6]
[scenario]
partition = {name = "shards", clients = 10, per_client = 2}
latency = {name = "shifted-exponential"}
[model]
name = "logistic"
[local]
steps = 3
batch_size = 8
lr = 0.1
[run]
rounds = 40
cohort = 3
workers = 1
device = "cpu"
baseline = "fedcbs"
[selectors.uniform]
[selectors.fedcbs]
[selectors.power-of-choice]
[selectors.wild]
name = "uniform"
local = {lr = 3e38}
"""


def command(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["fedcohort", *map(str, arguments)])
        patch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code in (0, None, 3), err.getvalue()
    return out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    (folder / "small.toml").write_text(CONFIG)
    printed, _ = command("compare", folder / "small.toml", "--out", folder / "runs", "--format", "json")
    return folder / "runs", json.loads(printed)["leaderboards"]


def cells_of_html(text):
    rows = re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
    return [
        [" ".join(html.unescape(re.sub("<[^>]+>", "", c)).replace("\u2011", "-").split()) for c in r] for r in cells
    ]


def cells_of_markdown(text):
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.replace("**", "").strip() for cell in row] for row in rows]


def reproduced(path):
    file = Path(__file__).parents[2] / "bench" / "scripts" / "summary.py"
    spec = importlib.util.spec_from_file_location("reproduce_summary", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out = io.StringIO()
    with redirect_stdout(out):
        module.main([str(path)])
    return out.getvalue()


def test_compare_report_dashboard_and_reproduction_agree(compared, tmp_path):
    path, from_compare = compared
    (board,) = load(path).leaderboards()
    table = leaderboard_table(board)
    expected = [list(table.columns)] + [[f"{c.text} {c.note}".strip() for c in row] for row in table.rows]
    labelled = [[row[0].text, *line[1:]] for row, line in zip(table.rows, expected[1:], strict=True)]

    printed, _ = command("report", path, "-o", tmp_path / "r.html", "--format", "json")
    assert json.loads(printed)["leaderboards"] == from_compare == [board.to_dict()]

    page = build_report(assemble([path]))
    assert cells_of_html(page[page.index("<table>") : page.index("</table>")]) == expected

    item = ExperimentItem(path, "one")
    item.poll()
    assert cells_of_html(item.detail()["sections"][0]["board"]) == expected

    shown = cells_of_markdown(reproduced(path))
    assert [row[: len(table.columns)] for row in shown] == [expected[0], *labelled]
    by_seed = {row.label: " ".join(str(s.rounds_to[0] or "-") for s in row.seeds) for row in board.rows}
    assert {row[0]: row[-1] for row in shown[1:]} == by_seed


def test_former_disagreements_are_gone(compared):
    _, (board,) = compared
    rows = {row["label"]: row for row in board["rows"]}
    assert board["baseline"] == "fedcbs" and rows["fedcbs"]["paired"] is None  # as configured
    assert board["terminal_rounds"] == 8 and board["terminal_source"] == "a fifth of 40"
    assert board["targets"] == [pytest.approx(int(100 * rows["fedcbs"]["terminal"]["mean"]) / 100)]  # a whole percent
    assert rows["wild"]["diverged"] == 3 and rows["wild"]["terminal"]["seeds"] == 0
    assert board["rows"][-1]["label"] == "wild"


def test_in_the_terminal_it_fits_and_says_gain_in_points(compared, tmp_path):
    path, _ = compared
    _, told = command("report", path, "-o", tmp_path / "r.html")
    lines = [line for line in told.splitlines() if not line.startswith("note:")]
    assert max(map(len, lines)) <= 80
    assert "points" in told and "the last 8 rounds" in " ".join(told.split())
    assert not re.search(r"\de[+-]?\d", told)
