"""The benchmark: what it runs, how it scores, and that every registered selector can be built."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedcohort.cli.app import app
from fedcohort.core.errors import InputError, UnknownNameError
from fedcohort.core.protocol import SELECTORS
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.leaderboard import terminal_window
from fedcohort.simulate.leaderboard.formats import to_markdown
from fedcohort.simulate.leaderboard.speed import Speed, log_ratio
from fedcohort.simulate.store.results import load
from fedcohort_bench.benchmark import (
    REPORT_SEEDS,
    TUNING_SEEDS,
    VERSION,
    SubmissionError,
    check_submission,
    score,
    suite,
    table,
)
from fedcohort_bench.benchmark.frozen import Frozen, check_same, code_hash
from fedcohort_bench.benchmark.page import claims, matrix, page, robustness
from fedcohort_bench.benchmark.run import begin, every_selector, plan, read_scores, write_scores
from fedcohort_bench.benchmark.scores import Scores, SelectorScore
from fedcohort_bench.benchmark.suite import DATASETS, kinds
from fedcohort_bench.launch import Launcher

CPU = Launcher(device="cpu")
FROZEN = Frozen(VERSION, {})
STORED = Path(__file__).parents[1] / "results"
SCORES = sorted(path for path in STORED.glob("benchmark_*.json") if path.name != "benchmark_time.json")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two settings, two selectors, two seeds."""
    out = tmp_path_factory.mktemp("bench") / "small"
    config = table("digits", {"balanced": {}}, TUNING_SEEDS[:2], settings=["1-class", "skew-slow"], rounds=15)
    begin(config, out, CPU).run()
    return load(out)


def test_a_result_says_what_it_may_be_used_for():
    every = tuple(setting.name for setting in suite("digits"))

    def purpose(seeds, rounds=60, settings=every):
        return Scores("digits", seeds, rounds, settings, (), True, FROZEN).purpose

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
    more = table("digits", {"balanced": {}}, TUNING_SEEDS[:2], settings=["iid"], rounds=15)
    begin(more, tmp_path / "more", CPU).run()
    both = score(small, load(tmp_path / "more"))
    assert both.settings == ("1-class", "skew-slow", "iid")
    np.testing.assert_array_equal(both.lines[0].gain["1-class"], score(small).lines[0].gain["1-class"])
    with pytest.raises(InputError, match="different settings"):
        score(small, small)


def line(label, **gains):
    arrays = {name: np.array(values, float) for name, values in gains.items()}
    known, unknown = Speed(1.0, 1.0), Speed(0.0, math.inf)
    return SelectorScore(
        label, arrays, {"rounds": dict.fromkeys(gains, known), "seconds": dict.fromkeys(gains, unknown)}
    )


def test_the_sentence_says_where_it_helps_and_where_it_hurts():
    mixed = line("a", one=[4.0, 4.1, 4.2], two=[-3.0, -3.1, -3.2], three=[0.5, -0.9, 0.1])
    assert mixed.sentence == (
        "+0.3 ± 0.6 points on average; gains in one; loses in two; cannot be told from uniform in 1 of 3 settings."
    )
    assert line("b", one=[4.0], two=[-3.0]).sentence == "+0.5 points on average; with one seed, everything is open."
    lucky = replace(mixed, reached={"one": 1 / 3})
    assert "; 33% of its runs reach uniform's accuracy;" in lucky.sentence


def test_the_interval_is_over_seeds():
    # Means over the settings are 1 and 3 for the two seeds: 2 +- 12.706 * sqrt(2) / sqrt(2).
    assert line("a", one=[0.0, 2.0], two=[2.0, 4.0]).interval == pytest.approx(12.706, abs=1e-3)
    assert math.isnan(line("a", one=[1.0]).interval)


def test_nothing_that_takes_no_time_is_faster():
    one = line("a", one=[0.0, 2.0])
    assert (str(one.speed("rounds")), str(one.speed("seconds"))) == ("1.00×", "–")


def test_names_are_not_markup_on_the_page():
    every = tuple(setting.name for setting in suite("digits"))
    scores = Scores("digits", (7,), 60, every, (line("<b>&", **{name: [1.0] for name in every}),), False, FROZEN)
    text = page(scores)
    assert "<b>&" not in text
    assert "&lt;b&gt;&amp;" in text
    assert "Not all runs have ended" in text
    assert "own seeds" in text
    assert "default-src 'none'" in text and "<script" not in text


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
    assert submission["seeds"] == [500]
    assert [entry["label"] for entry in submission["selectors"]] == ["balanced"]
    assert set(submission["selectors"][0]["gains"]) == {"iid", "noise"}
    assert "balanced" in (tmp_path / "b" / "bench.html").read_text()
    again = CliRunner().invoke(app, ["bench", "--resume", str(tmp_path / "b"), "-q"])  # nothing left to do
    assert again.exit_code == 0
    assert json.loads((tmp_path / "b" / "bench.json").read_text()) == submission
    other = CliRunner().invoke(app, [*arguments[:2], "--selectors", "fedcbs", "-q", "-o", str(tmp_path / "b")])
    assert other.exit_code == 1 and "other options" in str(other.exception)


def test_unknown_names_are_named(tmp_path):
    with pytest.raises(UnknownNameError, match="nois"):
        table("digits", {}, [0], settings=["nois"])
    with pytest.raises(UnknownNameError, match="digit"):
        table("digit", {}, [0])
    done = CliRunner().invoke(app, ["bench", "--seeds", "some"])
    assert done.exit_code != 0


def test_settings_that_differ_in_time_alone_count_once():
    gains = {"noise": [0.0, 0.0], "skew-noise": [3.0, 3.0], "skew-noise-slow": [3.0, 3.0]}
    grouped = kinds("digits", list(gains))
    assert grouped == (("noise",), ("skew-noise", "skew-noise-slow"))
    one = SelectorScore("a", {name: np.array(values) for name, values in gains.items()}, kinds=grouped)
    assert one.mean == 1.5
    assert kinds("digits", ["skew-slow", "skew-failures"]) == (("skew-slow",), ("skew-failures",))
    scores = Scores("digits", (1, 2), 60, tuple(gains), (one,), True, FROZEN)
    assert scores.ranking.blocks == 2 and scores.ranking.over == "setting"


def test_columns_of_speed_say_how_many_settings_they_cover():
    gains = {name: np.ones(2) for name in ("x", "y")}
    some = SelectorScore("a", gains, {"rounds": {"x": Speed(2, 2), "y": Speed(0, math.inf)}}, {"x": 1.0, "y": 0.0})
    assert (str(some.speed("rounds")), some.covers("rounds"), some.reach_share) == ("2.00×", 1, 0.5)
    text = to_markdown(robustness(Scores("digits", (1, 2), 60, ("x", "y"), (some,), True, FROZEN)))
    assert "2.00×" in text and "in 1" in text and "50%" in text


def test_bytes_count_questions_to_clients(small):
    scores = score(small)
    (line,) = scores.lines
    for board in small.leaderboards():
        logs = []
        for seed in scores.seeds:
            spent = {}
            for run in small.runs:
                if run.setting["name"] == board.setting and run.seed == seed:
                    names = ("bytes_down", "bytes_up", "query_bytes_down", "query_bytes_up")
                    total = np.cumsum(sum(np.array(small.column(run, name), float) for name in names))
                    accuracy = np.round(np.array(small.column(run, "accuracy"), float), 6)
                    reached = np.flatnonzero(accuracy >= board.target)
                    spent[run.label] = (total[reached[0]] if len(reached) else None, total[-1])
            logs.append(log_ratio(spent["balanced"], spent["uniform"]))
        found, expected = line.faster["bytes"][board.setting], Speed.of(logs)
        assert (found.least, found.greatest) == pytest.approx((expected.least, expected.greatest))


def test_ranks_are_means_over_settings_with_an_interval_over_seeds():
    one = line("a", x=[1.0, 1.0], y=[2.0, -1.0])
    two = line("b", x=[0.5, 2.0], y=[-1.0, -2.0])
    scores = Scores("digits", (1, 2), 60, ("x", "y"), (one, two), True, FROZEN)
    # x: a 1st, 2nd; b 2nd, 1st; uniform 3rd, 3rd. y: a 1st, 2nd; b 3rd, 3rd; uniform 2nd, 1st.
    assert {label: rank for label, (rank, _) in scores.ranks.items()} == {"a": 1.5, "b": 2.25, "uniform": 2.25}
    assert scores.ranks["a"][1] == pytest.approx(12.706 * np.std([1, 2], ddof=1) / np.sqrt(2), abs=1e-3)


@pytest.fixture
def submission(tmp_path):
    """The files of a whole benchmark with made-up gains."""
    from fedcohort.simulate.config.toml import to_toml

    config = Experiment.from_dict(table("digits", {"balanced": {}}, REPORT_SEEDS[:2])).table
    every = tuple(setting.name for setting in suite("digits"))
    gains = {name: [1.0 + i, 2.0 - i] for i, name in enumerate(every)}
    mine = replace(line("balanced", **gains), kinds=kinds("digits", every))
    scores = Scores("digits", REPORT_SEEDS[:2], 60, every, (mine,), True, FROZEN)
    (tmp_path / "config.toml").write_text(to_toml(config))
    (tmp_path / "bench.json").write_text(json.dumps(scores.to_dict()))
    return tmp_path


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_a_submission_is_checked_and_copied(submission, tmp_path):
    done = CliRunner().invoke(app, ["bench", "--submit", str(submission), "-o", str(tmp_path / "mine")])
    assert done.exit_code == 0, done.output
    assert sorted(path.suffix for path in (tmp_path / "mine").iterdir()) == [".json", ".toml"]


@pytest.mark.parametrize(
    ("file", "old", "new", "why"),
    [
        ("config.toml", "rounds = 60", "rounds = 61", "run.rounds is not the suite's 60"),
        ("config.toml", "lr = 0.1", "lr = 0.2", "[local] is not the suite's"),
        ("config.toml", "[500, 501]", "[0, 1]", "are not for reports"),
        ("bench.json", '"benchmark": 4', '"benchmark": 0', "version 0"),
        ("bench.json", '"complete": true', '"complete": false', "not all runs"),
        ("bench.json", '"mean_gain": 1.5', '"mean_gain": 9.5', "do not follow from its gains"),
        ("bench.json", '"label": "balanced"', '"label": "other"', "different selectors"),
        ("bench.json", '"gains"', '"gain"', "damaged"),
    ],
)
def test_what_is_no_submission_is_refused_with_the_reason(submission, file, old, new, why):
    change(submission / file, old, new)
    with pytest.raises(SubmissionError, match=re.escape(why)):
        check_submission(submission / "config.toml", submission / "bench.json")


@pytest.mark.parametrize("path", SCORES, ids=lambda path: path.stem)
def test_stored_scores_follow_from_their_gains(path):
    found = json.loads(path.read_text())
    assert found["benchmark"] <= VERSION
    assert found["purpose"] == "report"
    scores = Scores.from_dict(found)
    for entry, one in zip(found["selectors"], scores.lines, strict=True):
        assert entry["mean_gain"] == pytest.approx(one.mean)
        assert entry["worst_gain"] == pytest.approx(one.worst[1])
        assert entry["mean_rank"] == pytest.approx(scores.ranks[one.label][0])


@pytest.mark.parametrize("data", ["digits", "fashion-mnist"])
def test_version_two_has_the_worlds_that_break_selectors(data):
    names = {setting.name: setting for setting in suite(data)}
    views = {name: s.scenario["shift"] for name, s in names.items() if "shift" in s.scenario}
    assert {view for shift in views.values() for view in shift["views"]} == {
        "rotate", "contrast", "blur", "invert", "sketch", "relabel",
    }  # fmt: skip
    assert min(shift["share"] for shift in views.values()) == 0.05
    for name in ("sizes", "rare-slow", "rare-wrong", "permuted-30%", "cohort-2", "cohort-half", "day-night"):
        assert name in names
    assert ("clients-5000" in names) == (data == "fashion-mnist")
    assert names["cohort-half"].run["cohort"] * 2 == names["cohort-half"].scenario["partition"]["clients"]
    assert kinds(data, ["rare-slow", "rare-wrong"]) == (("rare-slow",), ("rare-wrong",))


def test_what_is_run_is_frozen_first_and_changes_with_code_and_parameters(tmp_path):
    def frozen(entry):
        return Frozen.of(Experiment.from_dict(table("digits", {"mine": entry}, [0], settings=["iid"], rounds=2)))

    plain = frozen({"name": "balanced"})
    assert plain.tag == frozen({"name": "balanced"}).tag and plain.tag.startswith(f"v{VERSION}-")
    assert plain.selectors["uniform"] == frozen({"name": "oort"}).selectors["uniform"]
    assert plain.tag != frozen({"name": "balanced", "share": 2.0}).tag != frozen({"name": "oort"}).tag
    code = "from fedcohort.selectors import Uniform\n\n\nclass Mine(Uniform):\n    name = 'mine'\n"
    own = tmp_path / "own.py"
    own.write_text(code)
    before = frozen({"name": f"{own}:Mine"})
    mine = type(SELECTORS.create(f"{own}:Mine"))
    known = code_hash(mine)
    own.write_text(code + "\n# another thought\n")
    assert code_hash(mine) == known
    own.write_text(code.replace("'mine'", "'yours'"))
    assert code_hash(mine) != known
    assert before.selectors["mine"] not in (known, plain.selectors["mine"])
    plain.write(tmp_path)
    assert Frozen.read(tmp_path) == plain
    with pytest.raises(InputError, match="changed"):
        check_same(plain, frozen({"name": "balanced", "share": 2.0}), tmp_path)
    with pytest.raises(InputError, match="version 1"):
        check_same(replace(plain, suite=1), plain, tmp_path)


def test_a_hash_covers_what_a_selector_imports_of_ours():
    from fedcohort.selectors.ours import balanced
    from fedcohort_bench.benchmark.frozen import sources

    found, folder = sources(balanced.Balanced), Path(balanced.__file__).parents[1]
    for name in ("ours/balanced.py", "ours/goals.py", "numerics/accounts.py", "numerics/class_balance.py"):
        assert (folder / name).read_bytes() in found


def test_results_of_changed_selectors_are_neither_continued_nor_merged(command, tmp_path):
    common = ["--seeds", "0", "--selectors", "balanced", "--quick", "--device", "cpu", "--processes", "1"]
    for name, setting in (("a", "iid"), ("b", "noise")):
        assert command("bench", "--settings", setting, "--out", tmp_path / name, *common).returncode == 0
    merge = ("bench", "--merge", tmp_path / "a", "--merge", tmp_path / "b")
    assert command(*merge).returncode == 0
    submission = json.loads((tmp_path / "a" / "bench.json").read_text())
    assert submission["frozen"]["tag"] == json.loads((tmp_path / "b" / "frozen.json").read_text())["tag"]
    (entry,) = submission["selectors"]
    assert set(entry["worst_group_gains"]) == {"iid", "noise"} == set(entry["not_worse_than_uniform"])
    assert read_scores(tmp_path / "a" / "bench.json").to_dict() == submission
    other = json.loads((tmp_path / "b" / "frozen.json").read_text())
    other["selectors"]["balanced"] = "0" * 64
    (tmp_path / "b" / "frozen.json").write_text(json.dumps(other))
    assert command(*merge).returncode == 1
    assert command("bench", "--out", tmp_path / "b", *common).returncode == 1  # as if its code had changed
    (tmp_path / "b" / "frozen.json").unlink()
    with pytest.raises(InputError, match=r"no frozen\.json"):
        score(load(tmp_path / "a"), load(tmp_path / "b"))


def test_never_worse_is_said_with_its_interval_for_mean_and_worst_group():
    one = replace(
        line("balanced", x=[1.0, 1.1, 0.9], y=[0.2, 0.3, 0.4]),
        minority={"x": np.array([-9.0, -9.1, -9.2]), "y": np.array([-3.0, 0.5, 3.0])},
    )
    assert [claim.verdict for claim in one.claims] == ["no worse", "no worse"]
    assert [claim.minority_verdict for claim in one.claims] == ["worse", "open"]
    assert one.at_a_cost == ("x",)
    assert one.worst_minority == ("x", pytest.approx(-9.1))
    assert "at the worst group's cost in x" in one.sentence
    scores = Scores("digits", (1, 2, 3), 60, ("x", "y"), (one,), True, FROZEN)
    text, html = to_markdown(claims(scores, "balanced")), page(scores)
    assert "-9.1 ± 0.2 | worse" in text and "Is balanced worse than uniform" in html and "Who pays" in html
    assert "over all 4 verdicts" in text


def test_scores_survive_being_written_and_read(small):
    scores = score(small)
    again = Scores.from_dict(json.loads(json.dumps(scores.to_dict())))
    assert [line.label for line in again.lines] == [line.label for line in scores.lines]
    assert again.ranks == scores.ranks
    assert page(again) == page(scores)


@pytest.mark.parametrize("path", SCORES, ids=lambda path: path.stem)
def test_stored_scores_make_pages(path):
    scores = read_scores(path)
    html = page(scores)
    for line in scores.lines:
        assert line.sentence in html.replace("&#39;", "'")


def test_the_picture_of_the_documentation_shows_the_stored_scores(monkeypatch):
    monkeypatch.syspath_prepend(STORED.parents[1] / "docs")
    from _site.picture import PICTURE, draw

    assert PICTURE.read_text() == draw(STORED), "run PYTHONPATH=docs python -m _site.picture"


def test_a_file_without_scores_is_refused(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InputError, match="scores"):
        read_scores(tmp_path / "other.json")
    with pytest.raises(InputError, match="cannot be read"):
        read_scores(tmp_path / "none.json")


def test_it_stops_in_time_and_goes_on(command, tmp_path):
    words = (
        "bench",
        "--quick",
        "--settings",
        "iid",
        "--selectors",
        "balanced",
        "--device",
        "cpu",
        "-o",
        tmp_path / "b",
    )
    stopped = command(*words, "--minutes", "0")
    assert stopped.returncode == 130 and "continue with: fedcohort bench --resume" in stopped.stderr
    assert command(*words).returncode == 0
    assert json.loads((tmp_path / "b" / "bench.json").read_text())["purpose"] == "trial"


def test_any_selector_can_be_the_baseline(tmp_path, capsys):
    out = tmp_path / "x"
    config, _ = plan("digits", {"oort": {}, "fedcs": {}}, [1, 2], settings=["iid"], quick=False, baseline="oort")
    config["run"]["rounds"] = 4
    begin(config, out, CPU).run()
    scores = write_scores(out)
    assert scores.baseline == "oort" and {line.label for line in scores.lines} == {"uniform", "fedcs"}
    against = write_scores(out, baseline="uniform")
    mine, theirs = (next(s for s in each.lines if s.label == label) for each, label in
                    ((scores, "uniform"), (against, "oort")))  # fmt: skip
    np.testing.assert_allclose(mine.gain["iid"], -theirs.gain["iid"])
    assert "over oort" in matrix(scores).title and "uniform" not in matrix(scores).title
    stored = Scores.from_dict(scores.to_dict())
    assert stored.baseline == "oort" and stored.to_dict() == scores.to_dict() and "Gain over oort" in page(stored)
    with pytest.raises(InputError, match="baseline"):
        plan("digits", {"oort": {}}, [1], baseline="oor")
