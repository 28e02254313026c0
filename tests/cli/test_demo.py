"""The demo: its report, and sentences that match its results."""

import numpy as np
import pytest

from fedcohort.cli.demo import explain_losses, known_reasons
from fedcohort.simulate.config.toml import find_table
from fedcohort.simulate.leaderboard import RunNumbers, leaderboard
from fedcohort.simulate.store.results import load


def board(setting, **accuracies):
    """The leaderboard of runs that end where they are said to, a seed for each."""
    runs = [
        RunNumbers(label, label, seed, "finished", np.arange(5), {"accuracy": np.full(5, end)})
        for label, ends in accuracies.items()
        for seed, end in enumerate(ends)
    ]
    return leaderboard(setting, runs)


def test_only_selectors_that_do_badly_beyond_chance_are_explained():
    found = board("skewed", uniform=[0.8, 0.81, 0.8], fedacs=[0.7, 0.69, 0.71], balanced=[0.5, 0.51, 0.52])
    (said,) = explain_losses([found])  # of balanced nobody knows why
    assert said.startswith("In skewed, fedacs is worse than uniform: ") and known_reasons()["skewed"]["fedacs"] in said
    assert explain_losses([board("skewed", uniform=[0.8, 0.8, 0.8], fedacs=[0.6, 0.81, 0.8])]) == []
    assert explain_losses([board("skewed", uniform=[0.8], fedacs=[0.6])]) == []


def test_every_remark_is_about_a_selector_in_the_demo():
    table = find_table("demo")
    assert set(known_reasons()) == {setting["name"] for setting in table["settings"]}
    assert {label for said in known_reasons().values() for label in said} <= set(table["selectors"])


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
    page = (out / "report.html").read_text()
    assert said.stdout.count("Open: with one seed") == page.count("Open: with one seed") == 2
    assert "0-accuracy" in page


def test_the_next_command_works(done, command):
    folder, said = done
    line = said.stdout.splitlines()[-1].removeprefix("Next: fedcohort ")
    following = command(*line.split(), "--seeds", "1", "--rounds", "1", "--quiet", cwd=folder)
    assert following.returncode == 0, following.stderr
