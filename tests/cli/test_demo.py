"""The demo: its report, and sentences that match its results."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from fedcohort.cli.demo import compare_worst_groups, explain_losses, fair_baseline, known_reasons, summarise
from fedcohort.simulate.config.toml import find_table
from fedcohort.simulate.metrics import Metric, Spread
from fedcohort.simulate.store.results import load

CONFIG = {
    "selectors": {
        "uniform": {"name": "uniform"},
        "uniform-robust": {"name": "uniform", "local": {"loss": "robust"}},
        "fedacs": {"name": "fedacs"},
        "flash-advantage": {"name": "flash-advantage", "local": {"loss": "robust"}},
    }
}


def board(setting, **accuracies):
    """A leaderboard of two seeds with the given terminal accuracies."""

    def row(label, values):
        seeds = [SimpleNamespace(seed=i, terminal=value) for i, value in enumerate(values)]
        mean = SimpleNamespace(mean=Spread.of(values).mean)
        return SimpleNamespace(label=label, seeds=seeds, terminal=mean, lost=int(np.isnan(values).sum()))

    labels = {"uniform_robust": "uniform-robust", "flash": "flash-advantage"}
    rows = [row(labels.get(label, label), values) for label, values in accuracies.items()]
    return SimpleNamespace(setting=setting, baseline="uniform", rows=rows, metric=Metric())


def values(sentence):
    """The accuracies and differences in a sentence, in order."""
    return re.findall(r"[+−]?\d+\.\d(?=%| pts)", sentence)


def leader(sentence):
    """The selectors that a sentence puts first."""
    found = re.match(r"In \w+, (.+?) ends? highest", sentence)
    assert found, sentence
    return found[1]


def test_a_gain_is_divided_into_loss_and_choice():
    found = board("noisy", uniform=[0.8, 0.82], uniform_robust=[0.85, 0.87], flash=[0.86, 0.88], fedacs=[0.8, 0.8])
    (said,) = summarise([found], CONFIG)
    assert leader(said) == "flash-advantage" and "noisy" in said
    assert values(said) == ["87.0", "+6.0", "+5.0", "+1.0"]  # the end, the gain, and its two parts
    worse = board("noisy", uniform=[0.8, 0.82], uniform_robust=[0.9, 0.9], flash=[0.86, 0.88], fedacs=[0.8, 0.8])
    (said,) = summarise([worse], CONFIG)
    assert leader(said) == "uniform-robust" and values(said) == ["90.0", "+9.0"] and "loss" in said
    other = board("skewed", uniform=[0.8, 0.82], uniform_robust=[0.7, 0.7], flash=[0.6, 0.6], fedacs=[0.85, 0.85])
    (said,) = summarise([other], CONFIG)
    assert leader(said) == "fedacs" and values(said) == ["85.0", "+4.0"] and "loss" not in said
    none = board("skewed", uniform=[0.9, 0.9], uniform_robust=[0.7, 0.7], flash=[0.6, 0.6], fedacs=[0.85, 0.85])
    (said,) = summarise([none], CONFIG)
    assert leader(said) == "uniform" and values(said) == ["90.0"]


def groups_board(lost=0, **worst):
    """A leaderboard of worst groups; the last selector lost ``lost`` runs."""
    last = list(worst)[-1]
    rows = [
        SimpleNamespace(label=label, lost=lost if label == last else 0, fair=lambda _, value=value: Spread.of([value]))
        for label, value in worst.items()
    ]
    return SimpleNamespace(setting="skewed", baseline="uniform", rows=rows)


def test_the_sentence_about_the_worst_group_is_true():
    (said,) = compare_worst_groups([groups_board(uniform=0.6, balanced=0.8, fedcbs=0.7)])
    assert "skewed" in said and "balanced" in said and values(said) == ["80.0", "60.0"]
    for equal in (groups_board(uniform=0.6, balanced=0.5), groups_board(uniform=0.6, balanced=0.5, fedcbs=0.9, lost=1)):
        (said,) = compare_worst_groups([equal])
        assert said.startswith("In skewed, no selector") and "uniform" in said and values(said) == ["60.0"]
    assert compare_worst_groups([groups_board(uniform=math.nan, balanced=0.5)]) == []


def test_a_selector_that_lost_a_run_or_shares_the_lead_is_not_called_highest():
    (lost,) = summarise([board("noisy", uniform=[0.8, 0.82], fedacs=[0.99, math.nan])], CONFIG)
    assert leader(lost) == "uniform" and values(lost) == ["81.0"]
    (tied,) = summarise([board("noisy", uniform=[0.8, 0.82], fedacs=[0.82, 0.8001])], CONFIG)
    assert leader(tied) == "uniform and fedacs" and values(tied) == ["81.0"]
    (alone,) = summarise([board("noisy", uniform=[0.8, math.nan], fedacs=[0.7, 0.7])], CONFIG)
    assert "uniform lost a run" in alone and values(alone) == []
    assert explain_losses([board("noisy", uniform=[math.nan], fedacs=[0.7])], CONFIG) == []


def test_only_selectors_that_do_badly_are_explained():
    bad = board("skewed", uniform=[0.8, 0.8], uniform_robust=[0.82, 0.82], flash=[0.7, 0.7], fedacs=[0.77, 0.78])
    flash, fedacs = explain_losses([bad], CONFIG)
    reasons = known_reasons()["skewed"]
    for said, label, against, points in (
        (flash, "flash-advantage", "uniform-robust", "−12.0"),
        (fedacs, "fedacs", "uniform", "−2.5"),
    ):
        start, _, why = said.partition(": ")
        assert start == f"In skewed, {label} ends {points} pts compared with {against}"
        assert why.startswith(reasons[label])
    # As good as uniform selection with the same loss, though below the one with the other loss.
    good = board("skewed", uniform=[0.8, 0.8], uniform_robust=[0.795, 0.795], flash=[0.79, 0.79], fedacs=[0.81, 0.81])
    assert explain_losses([good], CONFIG) == []
    chance = board("skewed", uniform=[0.8, 0.8], uniform_robust=[0.8, 0.8], flash=[0.8, 0.8], fedacs=[0.6, 0.81])
    assert explain_losses([chance], CONFIG) == []  # worse in one seed of two
    gone = board("skewed", uniform=[0.8], uniform_robust=[0.8], flash=[math.nan], fedacs=[0.8])
    assert explain_losses([gone], CONFIG) == []


def test_every_remark_is_about_a_selector_in_the_demo():
    table = find_table("demo")
    assert set(known_reasons()) == {setting["name"] for setting in table["settings"]}
    assert {label for said in known_reasons().values() for label in said} <= set(table["selectors"])


def test_every_kind_of_training_also_runs_with_uniform_selection():
    table = find_table("demo")
    selectors = {label: {"name": label, **entry} for label, entry in table["selectors"].items()}
    for label, entry in selectors.items():
        fair = selectors[fair_baseline({"selectors": selectors}, label, "uniform")]
        assert fair["name"] == "uniform" and fair.get("local") == entry.get("local")
    assert "balanced" in selectors and "terminal" not in table["run"]


@pytest.fixture(scope="module")
def done(command, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return folder, command("demo", "--rounds", "2", "--seeds", "1", cwd=folder)


def test_it_ends_with_a_report_a_verdict_and_the_next_command(done):
    folder, said = done
    assert said.returncode == 0, said.stderr
    (out,) = (folder / "runs").iterdir()
    assert {run.label for run in load(out).runs} == set(find_table("demo")["selectors"])
    *_, report, following = said.stdout.splitlines()
    assert report == f"Report: runs/{out.name}/report.html"
    assert following.startswith("Next: fedcohort compare --selectors ")
    sentences = re.findall(r"In (skewed|noisy), \S+ ends highest with [\d.]+%", said.stdout)
    assert sentences == ["skewed", "noisy"]
    page = (out / "report.html").read_text()
    assert "In skewed, " in page and "0-accuracy" in page


def test_the_next_command_works(done, command):
    folder, said = done
    line = said.stdout.splitlines()[-1].removeprefix("Next: fedcohort ")
    following = command(*line.split(), "--seeds", "1", "--rounds", "1", "--quiet", cwd=folder)
    assert following.returncode == 0, following.stderr
