"""Sweeps over the parameters of selectors."""

import pytest

from fedcohort.core.errors import FedcohortError
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.config.sweep import expand_sweep, parse_sweeps
from fedcohort.simulate.config.toml import ConfigError, to_toml

SELECTORS = {"uniform": {}, "ours": {"name": "fedcor", "interval": 7, "local": {"lr": 0.5}}}


def test_each_value_becomes_a_selector_that_keeps_its_other_parameters():
    sweep = {"ours": {"warmup": [5, 15], "discount": [0.5, 0.25]}}
    experiment = Experiment.from_dict({"seeds": 2, "selectors": SELECTORS, "sweep": sweep})
    labels = list(dict.fromkeys(plan.label for plan in experiment.plans))
    assert labels == [
        "uniform",
        *(f"ours warmup={warmup} discount={discount}" for warmup in (5, 15) for discount in (0.5, 0.25)),
    ]
    assert len(experiment.plans) == 5 * 2
    last = experiment.plans[-1]
    assert last.id == "ours-warmup=15-discount=0.25-s1"
    assert (last.selector.warmup, last.selector.discount, last.selector.interval) == (15, 0.25, 7)
    assert last.local.lr == 0.5


def test_the_written_configuration_repeats_the_sweep():
    experiment = Experiment.from_dict({"selectors": SELECTORS, "sweep": {"ours": {"warmup": [5, 15]}}})
    again = Experiment.from_dict(experiment.table)
    assert to_toml(again.table) == to_toml(experiment.table)
    assert [plan.id for plan in again.plans] == [plan.id for plan in experiment.plans]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("5,15,30", [5, 15, 30]),
        ("0.5, 1e-3", [0.5, 0.001]),
        ("true,false", [True, False]),
        ("all,near", ["all", "near"]),
        ("all,3", ["all", 3]),
        ('"a,b",c', ['"a', 'b"', "c"]),  # not TOML as a whole: divided at every comma
        ("[1, 2],[3]", [[1, 2], [3]]),
    ],
)
def test_values_are_toml_or_text(text, values):
    assert parse_sweeps([f"some.key={text}"]) == {"some": {"key": values}}


def test_a_label_may_have_dots():
    assert parse_sweeps(["ours.v1.warmup=5"]) == {"ours.v1": {"warmup": [5]}}


@pytest.mark.parametrize("item", ["fedcor", "fedcor=5", ".warmup=5", "fedcor.=5", "fedcor.warmup", "fedcor.warmup="])
def test_malformed_sweeps_are_refused(item):
    with pytest.raises(ConfigError, match=r"selector.parameter=value,value"):
        parse_sweeps([item])


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"ours": {"warmpu": [5]}}, r"ours warmpu=5.*'warmup'"),
        ({"uniform": {"warmup": [5]}}, "'warmup'"),
        ({"our": {"warmup": [5]}}, "'ours'"),
        ({"ours": {"warmup": [5, -1]}}, r"ours warmup=-1.*'warmup' parameter.*Got -1"),
        ({"ours": {"warmup": ["many"]}}, r"'warmup' parameter.*Got 'many'"),
        ({"ours": {"warmup": []}}, r"must be a list of values. Got \[\]"),
        ({"ours": {"warmup": 5}}, "list"),
        ({"ours": {"warmup": [5, 5]}}, "'ours warmup=5'"),
        ({"ours": [5]}, "parameters"),
        ([5], r"\[sweep\] must hold lists"),
    ],
)
def test_impossible_sweeps_are_refused(sweep, message):
    with pytest.raises(FedcohortError, match=rf"(?s){message}"):
        Experiment.from_dict({"selectors": SELECTORS, "sweep": sweep})


def test_a_sweep_given_twice_is_refused():
    with pytest.raises(ConfigError, match="given twice"):
        parse_sweeps(["fedcor.warmup=5", "fedcor.warmup=6"])
    with pytest.raises(ConfigError, match="'fedcor warmup=5'"):
        expand_sweep({"fedcor warmup=5": "fedcor", "fedcor": {}}, {"fedcor": {"warmup": [5]}})
