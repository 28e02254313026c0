"""The suite "time": what it runs, and its scores compared with a plain loop over the rows."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedcohort.cli.app import app
from fedcohort.core.errors import UnknownNameError
from fedcohort.core.protocol import SELECTORS
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.leaderboard import terminal_window
from fedcohort.simulate.store.results import load
from fedcohort_bench.benchmark.frozen import Frozen
from fedcohort_bench.benchmark.run import every_selector, plan_time, read_time_scores
from fedcohort_bench.benchmark.suite import VERSION
from fedcohort_bench.benchmark.timed import DATASETS, DAY, PIECES, REGIMES, WAYS
from fedcohort_bench.benchmark.timed_page import draw
from fedcohort_bench.benchmark.timed_scores import TimeCell, TimeScores

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def small(command, tmp_path_factory):
    """One kind of availability, three selectors, one seed, few rounds; stopped once."""
    out = tmp_path_factory.mktemp("time") / "small"
    words = ["bench", "--suite", "time", "--settings", "short-sessions", "--selectors", "balanced,oort", "--quick"]
    words += ["--device", "cpu", "--out", str(out)]
    assert command(*words, "--minutes", "0").returncode == 130
    assert command(*words).returncode == 0
    return out


@pytest.mark.parametrize("data", DATASETS)
def test_it_can_be_built_for_every_selector(data):
    pieces = plan_time(data, {name: {} for name in every_selector()}, [300, 301])
    assert list(pieces) == list(PIECES)
    plans = {name: Experiment.from_dict(table).plans for name, table in pieces.items()}
    able = {name for name in every_selector() if SELECTORS.get(name)().one_at_a_time}
    assert {plan.label for plan in plans["rounds"]} == set(every_selector())
    assert {plan.label for plan in plans["flow"]} == able
    for name, ways in PIECES.items():
        assert {plan.setting_name for plan in plans[name]} == {f"{r}/{w}" for r in REGIMES for w in ways}
        assert all(plan.options.seconds == DAY for plan in plans[name])
    assert {plan.aggregator.name for plan in plans["flow"]} == {"fedbuff"}
    over = {plan.options.size + plan.options.spares for plan in plans["rounds"] if "over" in plan.setting_name}
    assert over == {plan.options.size for plan in plans["flow"]}  # as many at work


def test_scores_are_what_the_rows_say(small):
    scores = read_time_scores(small / "bench.json")
    runs = {}
    for piece in PIECES:
        results = load(small / piece)
        for info in results.runs:
            columns = {name: np.array(results.column(info, name), float) for name in ("accuracy", "clock", "jain")}
            runs[info.setting["name"].split("/")[1], info.label] = columns
    base = runs["rounds", "uniform"]["accuracy"]
    target = math.floor(100 * np.nanmean(base[-terminal_window(len(base)) :])) / 100
    assert scores.targets == {"short-sessions": target}
    assert len(scores.cells) == len(runs) == 2 * 3 + 2 * 2
    for (way, label), columns in runs.items():
        cell = scores.find("short-sessions", way, label)
        hits = np.flatnonzero(columns["accuracy"] >= target)
        hours = columns["clock"][hits[0]] / 3600 if len(hits) else 24.0
        assert cell.hours == pytest.approx([hours], abs=1e-4) and cell.reached.tolist() == [float(len(hits) > 0)]
        assert cell.jain == pytest.approx(columns["jain"][np.isfinite(columns["jain"])][-1:], abs=1e-5)
    assert scores.purpose == "trial" and scores.complete
    assert TimeScores.from_dict(scores.to_dict()).to_dict() == json.loads((small / "bench.json").read_text())
    page = (small / "bench.html").read_text()
    assert "short-sessions: simulated hours to" in page and page.count("</svg>") == 1


def cell(way, label, hours):
    ones = np.ones(len(hours))
    return TimeCell("always-on", way, label, np.array(hours, float), ones, ones, ones, ones)


def test_speeds_are_paired_by_seed():
    cells = (cell("rounds", "uniform", [8.0, 2.0]), cell("fedbuff", "uniform", [4.0, 0.25]))
    scores = TimeScores("digits", (300, 301), {"always-on": 0.8}, cells, True, Frozen(VERSION, {}))
    ratio = scores.faster("fedbuff", "uniform", than=("rounds", "uniform"))
    assert ratio.least == ratio.greatest == pytest.approx(4.0)  # of 2 and 8
    assert ratio.low < 1 < ratio.high  # two seeds say little
    assert scores.faster("fedbuff", "oort", than=("fedbuff", "uniform")) is None
    assert scores.purpose == "trial"


def test_a_run_that_never_arrives_bounds_the_ratio_instead_of_counting_as_the_whole_day():
    """With a true ratio of 0.2, most runs do not arrive in the day."""
    rng = np.random.default_rng(4)
    for _ in range(50):
        theirs = rng.lognormal(math.log(8), 0.2, 5)
        ours = theirs / 0.2 * rng.lognormal(0, 0.2, 5)
        arrived = (ours <= 24).astype(float)
        late = replace(cell("fedbuff", "uniform", np.minimum(ours, 24)), reached=arrived)
        scores = TimeScores(
            "digits", (1,), {"always-on": 0.8}, (cell("rounds", "uniform", theirs), late), True, Frozen(VERSION, {})
        )
        ratio = scores.faster("fedbuff", "uniform", than=("rounds", "uniform"))
        assert ratio.least <= 0.2 <= ratio.greatest and str(ratio).startswith("≤")
        assert late.median.text in ("–", "never")


def test_mistakes_are_named():
    with pytest.raises(UnknownNameError, match="did you mean 'day-night'"):
        plan_time("digits", {}, [1], regimes=["day-nigt"])
    with pytest.raises(UnknownNameError, match="fashion-mnist"):
        plan_time("cifar10", {}, [1])


def test_the_command_shows_both_tables(tmp_path):
    words = ["bench", "--suite", "time", "--quick", "--settings", "always-on", "--selectors", "balanced", "--quiet"]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "t"), "--format", "json", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {(c["way"], c["selector"]) for c in found["cells"]} == {
        (w, s) for w in WAYS for s in ("uniform", "balanced")
    }


def test_the_picture_is_of_the_stored_scores(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    from _site.time_picture import PICTURE, SCORES

    assert PICTURE.read_text() == draw(read_time_scores(SCORES)), "run PYTHONPATH=docs python -m _site.time_picture"
    scores = read_time_scores(SCORES)
    assert TimeScores.from_dict(scores.to_dict()).to_dict() == scores.to_dict()
    assert scores.purpose == "report" and scores.complete
