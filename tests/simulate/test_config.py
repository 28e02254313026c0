"""Configurations: every key is checked, and a written configuration can be read back."""

import re
import sys
import time
import tomllib
from pathlib import Path

import pytest

import fedcohort as fc
from fedcohort.core.params import parameters
from fedcohort.core.registry import resolve_reference
from fedcohort.scenario import Scenario
from fedcohort.simulate.config.experiment import Configuration, Experiment
from fedcohort.simulate.config.sections import DataOptions, ModelOptions, RunOptions
from fedcohort.simulate.config.toml import ConfigError, find_table, merge_tables, override, to_toml
from tests.experiments import read

FULL = """
name = "all of it"
seeds = [3, 5]
[data]
name = "synthetic"
samples = 500
[scenario]
preset = "fedcor-2spc"
partition = {clients = 10}
latency = {name = "shifted-exponential", straggling = 10.0}
[model]
name = "logistic"
[local]
batch_size = 8
epochs = 2
lr = 0.1
milestones = [3, 5]
[aggregator]
name = "fedprox"
mu = 0.5
[run]
rounds = 7
cohort = 3
targets = [0.5, 0.6]
[selectors.uniform]
[selectors.half]
name = "power-of-choice"
local = {steps = 4}
[selectors.filtered]
name = "fedcm-ts"
filter = {name = "fedca", score = "accuracy"}
[[settings]]
name = "as it is"
[[settings]]
name = "iid"
scenario.partition.name = "iid"
run.rounds = 3
"""


@pytest.fixture
def built(tmp_path, monkeypatch):
    """Return how often the parts of an experiment were built: a user's own classes, which say so."""
    monkeypatch.chdir(tmp_path)
    bases = {
        "Chosen": "fedcohort.selectors:Uniform",
        "Data": "fedcohort.simulate.data:Synthetic",
        "Mean": "fedcohort.training.aggregators:FedAvg",
        "Keep": "fedcohort.training.filters:KeepAll",
        "Predict": "fedcohort.simulate.tasks:Classification",
    }
    lines = ["from collections import Counter", "BUILT = Counter()"]
    for name, base in bases.items():
        module, _, cls = base.partition(":")
        lines += [f"from {module} import {cls}", f"class {name}({cls}):"]
        lines += ["    def __post_init__(self):", "        super().__post_init__()", f"        BUILT[{name!r}] += 1"]
    (tmp_path / "counted.py").write_text("\n".join(lines))
    mean, *_ = resolve_reference("counted.py:Mean")
    return sys.modules[mean.__module__].BUILT


@pytest.mark.parametrize("in_settings", [False, True])
def test_a_comparison_builds_every_part_once(built, in_settings, monkeypatch):
    scenarios, build = [], Scenario.from_dict
    monkeypatch.setattr(Scenario, "from_dict", lambda table: scenarios.append(dict(table)) or build(table))
    config = {
        "data": {"name": "counted.py:Data", "samples": 200},
        "task": {"name": "counted.py:Predict"},
        "scenario": {"partition": {"name": "iid", "clients": 4}},
        "aggregator": {"name": "counted.py:Mean"},
        "filter": {"name": "counted.py:Keep"},
        "run": {"rounds": 1, "cohort": 2},
    }
    if in_settings:
        config["settings"] = [{"name": "slow", "local": {"lr": 0.01}}, {"name": "fast", "local": {"lr": 0.1}}]
    results = fc.compare(["counted.py:Chosen", "flash-advantage"], config=config, model="logistic", seeds=5, quiet=True)
    assert len(results.runs) == (20 if in_settings else 10)
    assert built == {"Chosen": 1, "Data": 1, "Mean": 1, "Keep": 1, "Predict": 1}
    # FLASH needs validation losses, so the comparison adds validation data to the scenario.
    assert [table.get("validation") for table in scenarios] == [None, 0.1]


def experiment(text=FULL):
    return Experiment.from_dict(tomllib.loads(text))


def test_runs_are_settings_times_selectors_times_seeds():
    plans = experiment().plans
    assert len(plans) == 2 * 3 * 2
    assert [plan.id for plan in plans[:3]] == ["uniform-as-it-is-s3", "uniform-as-it-is-s5", "half-as-it-is-s3"]
    by_id = {plan.id: plan for plan in plans}
    assert by_id["uniform-iid-s3"].options.rounds == 3
    assert by_id["uniform-as-it-is-s3"].options.rounds == 7
    assert by_id["uniform-iid-s3"].scenario.partition.name == "iid"
    assert by_id["uniform-as-it-is-s3"].scenario.partition.clients == 10
    assert by_id["uniform-iid-s3"].setting == {"scenario.partition.name": "iid", "run.rounds": 3}


def test_as_many_runs_as_are_allowed_are_checked_in_seconds():
    """It took ten minutes while each run was compared with every other."""
    start = time.process_time()
    runs = Experiment.from_dict({"seeds": 50_000, "selectors": {"uniform": {}, "oort": {}}}).plans
    assert len(runs) == 100_000
    assert time.process_time() - start < 60


def test_a_selector_brings_its_own_local_training_and_filter():
    by_id = {plan.id: plan for plan in experiment().plans}
    half, whole = by_id["half-iid-s3"], by_id["uniform-iid-s3"]
    assert (half.local.steps, half.local.epochs, half.local.batch_size) == (4, None, 8)
    assert (whole.local.steps, whole.local.epochs) == (None, 2)
    assert half.selector.name == "power-of-choice"
    assert by_id["filtered-iid-s3"].filter.score == "accuracy"
    assert whole.filter.name == "keep-all"


def test_a_written_configuration_gives_the_same_runs():
    first = experiment()
    text = to_toml(first.table)
    again = Experiment.from_dict(tomllib.loads(text))
    assert to_toml(again.table) == text
    for one, other in zip(first.plans, again.plans, strict=True):
        for name in ("id", "seed", "selector", "data", "scenario", "model", "local", "aggregator", "filter", "options"):
            assert getattr(one, name) == getattr(other, name), name


def test_overrides_are_toml_values_or_text():
    table = override(tomllib.loads(FULL), ["run.rounds=9", "local.lr = 0.5", "seeds=4", "aggregator=mean"])
    built = Experiment.from_dict(table)
    assert built.plans[0].options.rounds == 9
    assert built.plans[0].local.lr == 0.5
    assert built.plans[0].aggregator.name == "mean"
    assert sorted({plan.seed for plan in built.plans}) == [0, 1, 2, 3]


def test_a_changed_name_drops_the_old_parameters():
    assert merge_tables({"aggregator": {"name": "fedprox", "mu": 1.0}}, {"aggregator": {"name": "mean"}}) == {
        "aggregator": {"name": "mean"}
    }
    table = override({"aggregator": "fedprox"}, ["aggregator.mu=2.0"])
    assert Experiment.from_dict(table).plans[0].aggregator.mu == 2.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("runs.rounds=3", r"no key 'runs'(.|\n)*did you mean 'run'"),
        ("rounds=3", r"no key 'rounds'(.|\n)*did you mean 'run.rounds'"),
        ("lr=3", r"no key 'lr'(.|\n)*did you mean 'local.lr'"),
        ("run.round=3", "'rounds'"),
        ("local.batchsize=3", "'batch_size'"),
        ("aggregator.name=fedpox", "'fedprox'"),
        ("aggregator.nu=1", "'nu'"),
        ("aggregator.mu=-1", r"'mu' parameter(.|\n)*Got -1"),
        ("filter=fedc", "'fedca'"),
        ("selectors.uniform.name=unifrom", r"\[selectors.uniform\](.|\n)*did you mean 'uniform'"),
        ("selectors.half.d=-1", r"\[selectors.half\]"),
        ("scenario.partitoin=iid", r"\[scenario\](.|\n)*did you mean 'partition'"),
        ("scenario.preset=fedcor-2sp", r"\[scenario\](.|\n)*did you mean 'fedcor-2spc'"),
        ("data.name=digit", r"\[data\](.|\n)*did you mean 'digits'"),
        ("data.sampels=3", r"\[data\](.|\n)*did you mean 'samples'"),
        ("run.cohort=0", r"'cohort' parameter"),
        ("run.cohort=some", r"'cohort' parameter"),
        ("run.targets=[1.5]", "'targets'"),
        ("run.baseline=unifrom", "'uniform'"),
        ("run.reference=idd", "'iid'"),
        ("seeds=[1, 1]", "seeds must differ"),
        ("seeds=[-1]", r"'seeds' must be"),
        ("seeds=0", r"'seeds' must be"),
        ("name=''", r"'name' must be"),
        ("local.steps=5", "one of"),
        ("aggregator=3", r"\[aggregator\]"),
        ("settings=3", "'settings'"),
        ("selectors=3", r"\[selectors\]"),
        ("run.device=3", r"'device' parameter"),
    ],
)
def test_errors_name_the_mistake(change, message):
    with pytest.raises(ConfigError, match=message):
        Experiment.from_dict(override(tomllib.loads(FULL), [change]))


def test_settings_may_not_change_seeds_or_selectors():
    with pytest.raises(ConfigError, match="no key 'seeds'"):
        Experiment.from_dict({"settings": [{"seeds": [1]}]})


def test_a_changed_section_fits_the_data_of_each_setting():
    own = {"name": "own", "data": {"path": "people.csv", "client": "hospital"}}
    changed = Configuration.of({"settings": [own, {"name": "digits"}]}).with_section("scenario", {"validation": 0.1})
    scenarios = [setting.parts["scenario"] for setting in changed.settings]
    assert [(each.partition.name, each.validation) for each in scenarios] == [("natural", 0.1), ("iid", 0.1)]


def test_two_runs_with_the_same_name_are_refused():
    with pytest.raises(ConfigError, match="both be called"):
        Experiment.from_dict({"settings": [{"name": "a"}, {"name": "a"}]})
    with pytest.raises(ConfigError, match="both be called"):
        Experiment.from_dict({"selectors": {"a b": {"name": "uniform"}, "a-b": {"name": "uniform"}}})


@pytest.mark.parametrize("bad", ["rounds", "=3", "run..rounds=3", ".=1"])
def test_overrides_that_are_not_overrides(bad):
    with pytest.raises(ConfigError, match="key=value"):
        override({}, [bad])


def test_overrides_cannot_reach_into_a_number():
    with pytest.raises(ConfigError, match="'rounds'"):
        override({"run": {"rounds": 3}}, ["run.rounds.x=1"])


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml"):
        read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = = 3")
    with pytest.raises(ConfigError, match="TOML"):
        read(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match="--resume"):
        read(tmp_path)


def test_the_built_in_configuration_is_valid_and_suggested():
    assert Experiment.from_dict(find_table("demo")).plans
    with pytest.raises(ConfigError, match=r"demmo(.|\n)*'demo' for the built-in"):
        find_table("demmo")


@pytest.mark.parametrize("section", [RunOptions, ModelOptions, DataOptions])
def test_bad_values_of_every_option(section):
    for info in parameters(section):
        for bad in info.constraint.bad_values():
            with pytest.raises(ValueError, match=info.name):
                section(**{info.name: bad})


def test_toml_of_awkward_values():
    table = {"a b": 'say "no"\n', "t": {"x": [1.5, True], "empty": {}}, "many": [{"p": {"q": 1}}, {"p": {"q": 2}}]}
    assert tomllib.loads(to_toml(table)) == table


def test_the_configurations_in_the_documentation_are_valid():
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    blocks = [block for page in pages for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.S)]
    experiments = [block for block in blocks if "[selectors" in block]
    assert experiments
    for block in experiments:
        assert Experiment.from_dict(tomllib.loads(block)).plans


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "examples").glob("*.toml")), ids=lambda p: p.name)
def test_the_example_configurations_are_valid(path):
    assert read(path).plans


def test_a_selector_that_learns_from_a_filter_brings_one():
    table = {"selectors": {"fedcm-ts": {}, "uniform": {}}}
    made = Experiment.from_dict(table)
    for experiment in (made, Experiment.from_dict(made.table)):  # the complete table means the same
        assert {plan.label: plan.filter.name for plan in experiment.plans} == {
            "fedcm-ts": "fedca",
            "uniform": "keep-all",
        }
    assert made.notes == ("fedcm-ts comes with the filter 'fedca', because it learns from which models a filter keeps",)
    assert Experiment.from_dict(made.table).notes == ()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"filter": "keep-all"}, ["keep-all"]),
        ({"filter": {"name": "cmfl"}}, ["cmfl"]),
        ({"selectors": {"fedcm-ts": {"filter": {"name": "cmfl"}}}}, ["cmfl"]),
        ({"settings": [{"name": "a", "filter": {"name": "cmfl"}}, {"name": "b"}]}, ["cmfl", "fedca"]),
    ],
)
def test_a_configured_filter_is_used(change, expected):
    made = Experiment.from_dict({"selectors": {"fedcm-ts": {}}, **change})
    assert [plan.filter.name for plan in made.plans] == expected
    assert [plan.filter.name for plan in Experiment.from_dict(made.table).plans] == expected
