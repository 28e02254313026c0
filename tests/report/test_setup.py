"""The setup in a report: complete, and as TOML that runs the experiment again."""

from __future__ import annotations

import html
import re
import tomllib

import pytest

from fedcohort.report.page import assemble, build_report
from fedcohort.report.setup import facts, method, setup_table
from fedcohort.scenario import PRESETS, preset
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.leaderboard.formats import render
from tests.experiments import run_experiment

TABLE = {
    "name": "cited",
    "seeds": [3, 5],
    "data": {"name": "synthetic", "samples": 300, "test_samples": 80, "classes": 4, "shape": [6]},
    "scenario": {
        "partition": {"name": "shards", "clients": 10, "per_client": 2},
        "availability": {"name": "bernoulli", "probability": 0.6},
        "latency": {"name": "shifted-exponential"},
        "noise": {"level": 0.2},
        "failure": 0.05,
        "deadline": 60.0,
        "validation": 0.1,
    },
    "model": {"name": "logistic"},
    "local": {"steps": 3, "batch_size": 8, "lr": 0.125},
    "run": {"rounds": 4, "cohort": 3, "workers": 1, "device": "cpu"},
    "selectors": {"uniform": {}, "mine": {"name": "power-of-choice"}},
}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    out = tmp_path_factory.mktemp("setup") / "cited"
    assert run_experiment(TABLE, out) == "finished"
    return build_report(assemble([out])), out


def stated(text):
    found = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text, re.DOTALL)
    return {html.unescape(name): html.unescape(value) for name, value in found}


def test_everything_that_matters_is_stated(page):
    said = stated(page[0])
    for name, expected in {
        "Data": ["synthetic", "300 training and 80 test samples", "4 classes"],
        "Partition": ["shards", "clients 10", "per_client 2"],
        "Availability": ["bernoulli", "0.6"],
        "Latency": ["shifted-exponential"],
        "Label noise": ["level 0.2"],
        "Failures": ["probability 0.05"],
        "Deadline": ["60 s"],
        "Held out": ["10% of each client's data"],
        "Model": ["logistic"],
        "Local training": ["steps 3", "batch_size 8", "lr 0.125"],
        "Aggregation": ["fedavg"],
        "Rounds and cohort": ["4 rounds, 3 clients per round"],
        "Selectors": ["uniform; mine = power-of-choice"],
        "Seeds": ["2: 3 and 5"],
        "Versions": ["fedcohort", "torch", "numpy", "python"],
        "Machine": ["cpu"],
    }.items():
        assert all(part in said[name] for part in expected), (name, said.get(name))
    assert said["Command"] and said["Started"]


def test_the_toml_in_the_page_gives_the_same_runs(page):
    text, out = page
    toml = html.unescape(re.search(r'<pre class="toml"[^>]*>(.*?)</pre>', text, re.DOTALL)[1])
    assert tomllib.loads(toml) == tomllib.loads((out / "config.toml").read_text())
    again = Experiment.from_dict(tomllib.loads(toml))
    assert [plan.id for plan in again.plans] == ["uniform-s3", "uniform-s5", "mine-s3", "mine-s5"]
    assert again.plans[0].local.lr == 0.125 and again.plans[0].scenario.validation == 0.1
    assert "Copy as TOML" in text and 'data-copy="toml-0"' in text


def test_a_bare_configuration_states_what_it_has():
    assert facts({}, {}) == {}
    always = facts({"scenario": "fedcor-1spc", "seeds": 2}, {})
    assert "clients 100" in always["Partition"] and always["Availability"] == "all clients, in every round"
    assert always["Seeds"] == "2: 0 and 1"


def test_a_preset_is_spelled_out():
    seen = set()
    for name in PRESETS:
        said = facts({"scenario": {"preset": name}}, {})["Availability"]
        always = preset(name).to_dict()["availability"]["name"] == "always"
        assert (said == "all clients, in every round") == always
        seen.add(always)
    assert seen == {True, False}


def test_the_method_says_what_was_done_and_with_which_statistics(page):
    content = assemble([page[1]])
    text = method(content.bundle, content.sections[0].board)
    for part in ("mine and uniform", "300 training", "10 clients", "3 clients train", "3 steps", "learning rate 0.125",
                 "4 rounds", "same 2 seeds", "differences to uniform", "Holm", "fedcohort 0."):  # fmt: skip
        assert part in text, part
    assert html.escape(text) in page[0] or text in html.unescape(page[0])


@pytest.mark.parametrize("form", ["latex", "markdown"])
def test_the_setup_is_a_table_for_an_appendix(page, form):
    table = setup_table(assemble([page[1]]).bundle)
    text = render(table, form)
    stated = {row[0].text: row[1].text for row in table.rows}
    assert stated["Seeds"] == "2: 3 and 5" and "Seeds" in text and "Selectors" in text
    if form == "latex":
        assert "p{0.70\\linewidth}" in text and "per\\_client 2" in text
