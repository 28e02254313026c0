"""The benchmark: what it runs, what it makes of it, and that everything registered gets through it."""

import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from fedcohort.benchmark import REPORT_SEEDS, TUNING_SEEDS, score, suite, table
from fedcohort.benchmark.page import markdown, page
from fedcohort.benchmark.scores import Line, Scores
from fedcohort.benchmark.suite import DATASETS
from fedcohort.cli.app import app
from fedcohort.cli.bench import every_selector
from fedcohort.errors import InputError, UnknownNameError
from fedcohort.simulate.config import Experiment
from fedcohort.simulate.leaderboard import terminal_window
from fedcohort.simulate.results import load
from fedcohort.simulate.runner import run_experiment


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two settings, two selectors, two seeds."""
    out = tmp_path_factory.mktemp("bench") / "small"
    wanted = table("digits", {"balanced": {}}, TUNING_SEEDS[:2], settings=["1-class", "skew-slow"], rounds=15)
    run_experiment(wanted, out, device="cpu")
    return load(out)


def test_a_result_says_what_it_may_be_used_for():
    every = tuple(setting.name for setting in suite("digits"))

    def purpose(seeds, rounds=60, settings=every):
        return Scores("digits", seeds, rounds, settings, (), None, True).purpose

    assert purpose(REPORT_SEEDS) == purpose(REPORT_SEEDS[:2]) == "report"
    assert purpose(TUNING_SEEDS[:3]) == "tuning"
    assert purpose((0, 100)) == purpose((7,)) == "own"
    assert purpose(REPORT_SEEDS, rounds=20) == purpose(REPORT_SEEDS, settings=every[:3]) == "trial"


def test_seeds_for_choosing_and_for_showing_are_apart():
    assert not set(TUNING_SEEDS) & set(REPORT_SEEDS)


@pytest.mark.parametrize("data", DATASETS)
def test_every_setting_can_be_built_for_every_selector(data):
    names = {name: {} for name in every_selector()}
    experiment = Experiment.from_dict(table(data, names, [100]))
    assert len(experiment.plans) == len(suite(data)) * len(names | {"uniform": {}})


def test_gains_are_differences_of_terminal_accuracy_with_the_same_seed(small):
    scores = score(small)
    (line,) = scores.lines
    window = terminal_window(15)
    for setting in scores.settings:
        for i, seed in enumerate(scores.seeds):
            ends = {}
            for run in small.runs:
                if run.setting["name"] == setting and run.seed == seed:
                    rounds = np.array(small.column(run, "round"))
                    accuracy = np.array(small.column(run, "accuracy"), float)
                    last = accuracy[rounds > rounds.max() - window]
                    ends[run.label] = np.nanmean(last)
            assert line.gain[setting][i] == pytest.approx(100 * (ends["balanced"] - ends["uniform"]), abs=1e-4)
    assert line.mean == pytest.approx(np.mean([line.gain[s].mean() for s in scores.settings]))
    assert line.worst[1] == min(line.gain[s].mean() for s in scores.settings)
    assert scores.purpose == "trial"  # two settings and few rounds
    assert scores.complete


def test_pieces_are_scored_together_if_they_fit(small, tmp_path):
    run_experiment(table("digits", {"balanced": {}}, TUNING_SEEDS[:2], settings=["iid"], rounds=15), tmp_path / "more")
    both = score(small, load(tmp_path / "more"))
    assert both.settings == ("1-class", "skew-slow", "iid")
    np.testing.assert_array_equal(both.lines[0].gain["1-class"], score(small).lines[0].gain["1-class"])
    with pytest.raises(InputError, match="different settings"):
        score(small, small)


def line(label, **gains):
    arrays = {name: np.array(values, float) for name, values in gains.items()}
    ones = {name: np.ones(len(values)) for name, values in gains.items()}
    return Line(label, arrays, {"rounds": ones, "seconds": {name: np.full(2, math.nan) for name in gains}})


def test_the_sentence_says_where_it_helps_and_where_it_hurts():
    mixed = line("a", one=[4.0, 6.0], two=[-2.0, -4.0], three=[0.1, 0.1])
    assert mixed.sentence == (
        "+0.7 points on average; gains 0.5 points or more in one, but loses in two (worst -3.0 in two)."
    )
    safe = line("b", one=[1.0, 1.0], two=[-0.2, 0.0])
    assert "loses as much nowhere (worst -0.1 in two)" in safe.sentence
    useless = line("c", one=[0.0, 0.2], two=[-1.0, -1.0])
    assert "gains half a point nowhere, but loses in two" in useless.sentence


def test_the_interval_is_over_seeds():
    # Means over the settings are 1 and 3 for the two seeds: 2 +- 12.706 * sqrt(2) / sqrt(2).
    assert line("a", one=[0.0, 2.0], two=[2.0, 4.0]).interval == pytest.approx(12.706, abs=1e-3)
    assert math.isnan(line("a", one=[1.0]).interval)


def test_nothing_that_takes_no_time_is_faster():
    one = line("a", one=[0.0, 2.0])
    assert one.speed("rounds") == 1.0
    assert math.isnan(one.speed("seconds"))


def test_names_are_not_markup_on_the_page():
    every = tuple(setting.name for setting in suite("digits"))
    scores = Scores("digits", (7,), 60, every, (line("<b>&", **{name: [1.0] for name in every}),), None, False)
    text = page(scores)
    assert "<b>&" not in text
    assert "&lt;b&gt;&amp;" in text
    assert "Not all runs have ended" in text
    assert "own seeds" in text
    assert "| `<b>&`" not in markdown(scores)


def test_the_command_writes_page_and_submission(tmp_path):
    arguments = [
        "bench",
        "--quick",
        "--settings",
        "iid,noise",
        "--selectors",
        "balanced",
        "-q",
        "-o",
        str(tmp_path / "b"),
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    submission = json.loads((tmp_path / "b" / "bench.json").read_text())
    assert submission["purpose"] == "trial"
    assert submission["seeds"] == [100]
    assert [entry["label"] for entry in submission["selectors"]] == ["balanced"]
    assert set(submission["selectors"][0]["gains"]) == {"iid", "noise"}
    assert "balanced" in (tmp_path / "b" / "bench.html").read_text()
    again = CliRunner().invoke(app, ["bench", "--resume", str(tmp_path / "b"), "-q"])  # nothing left to do
    assert again.exit_code == 0
    assert json.loads((tmp_path / "b" / "bench.json").read_text()) == submission


def test_unknown_names_are_named(tmp_path):
    with pytest.raises(UnknownNameError, match="no setting 'nois'"):
        table("digits", {}, [0], settings=["nois"])
    with pytest.raises(UnknownNameError, match="no benchmark of 'digit'"):
        table("digit", {}, [0])
    done = CliRunner().invoke(app, ["bench", "--seeds", "some"])
    assert done.exit_code != 0
