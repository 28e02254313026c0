"""Sweeps and extensions on the command line."""

import pytest

from fedcohort.simulate.store.results import load

CONFIG = """
name = "tiny"
seeds = [0]
[data]
name = "synthetic"
samples = 200
test_samples = 40
classes = 4
shape = [6]
[scenario]
partition = {name = "shards", clients = 10, per_client = 2}
[model]
name = "logistic"
[local]
steps = 2
batch_size = 8
lr = 0.1
[run]
rounds = 3
cohort = 3
workers = 1
device = "cpu"
[selectors.uniform]
[selectors.fedcor]
[sweep]
fedcor.warmup = [1, 2]
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "tiny.toml"
    path.write_text(CONFIG)
    return path


def labels(out):
    return list(dict.fromkeys(run.label for run in load(out).runs))


def test_sweep_then_extend(command, config, tmp_path):
    out = tmp_path / "out"
    done = command("run", config, "--sweep", "fedcor.warmup=1,3", "--out", out)
    assert done.returncode == 0, done.stderr
    assert labels(out) == ["uniform", "fedcor warmup=1", "fedcor warmup=3"]
    assert "fedcor warmup=3" in done.stdout
    done = command("extend", out, "--sweep", "fedcor.warmup=2", "--selectors", "active-fl", "--seeds", "2")
    assert done.returncode == 0, done.stderr
    assert labels(out) == ["uniform", "fedcor warmup=1", "fedcor warmup=3", "active-fl", "fedcor warmup=2"]
    assert len(load(out).runs) == 5 * 2
    first, then = load(out).meta["command"].split(" && ")
    assert first.startswith("fedcohort run") and then.startswith("fedcohort extend")
    assert command("report", out, "-o", tmp_path / "page.html", "--quiet").returncode == 0
    assert "fedcor warmup=2" in (tmp_path / "page.html").read_text()


def test_compare_sweeps_over_its_selectors(command, config, tmp_path):
    out = tmp_path / "out"
    options = ("--selectors", "uniform,fedcbs", "--sweep", "fedcbs.exploration=1,10", "--rounds", "1", "--out", out)
    done = command("compare", config, *options)
    assert done.returncode == 0, done.stderr
    assert labels(out) == [
        "uniform",
        "fedcbs exploration=1",
        "fedcbs exploration=10",
    ]  # the file's sweep went with fedcor


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run", "{config}", "--sweep", "fedcor.warmpu=1,2"], 1, "did you mean 'warmup'"),
        (["run", "{config}", "--sweep", "fedcor.warmup=1,-2"], 1, "Got -2"),
        (["run", "{config}", "--sweep", "fedcor.warmup"], 1, "selector.parameter=value"),
        (["run", "{config}", "--sweep", "fedcbs.exploration=1,2"], 1, "'fedcbs'"),
        (["compare", "{config}", "--sweep", "uniform.warmup=1,2"], 1, "no parameter 'warmup'"),
        (["run", "--resume", "nowhere", "--sweep", "fedcor.warmup=1"], 2, "fedcohort extend"),
        (["extend", "nowhere", "--seeds", "3"], 1, "There is no experiment"),
        (["extend", "nowhere"], 2, "--seeds"),
        (["extend", "nowhere", "--seeds", "many"], 2, "'many'"),
        (["extend", "nowhere", "--set", "local.lr=0.2"], 2, "No such option"),
        (["extend", "nowhere", "--sweep", "fedcor.warmpu=1"], 1, "There is no experiment"),
    ],
)
def test_mistakes_have_exit_codes_and_change_nothing(command, config, tmp_path, arguments, code, message):
    done = command(*[a.format(config=config) for a in arguments], cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_compare_with_more_seeds_or_selectors_repeats_nothing(command, config, tmp_path):
    small = ("compare", "--rounds", 2, "--partition", "iid", "--data", "synthetic", "-s", "local.steps=1")
    done = command(*small, "--selectors", "uniform,fedcbs", "--seeds", 2, "--baseline", "fedcbs", cwd=tmp_path)
    assert "fedcbs baseline" in done.stdout
    more = (*small, "--selectors", "uniform,fedcbs,oort", "--seeds", 3, "--baseline", "fedcbs")
    again = command(*more, cwd=tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    assert "4 of 9 runs are in" in again.stderr and len(load(folder).runs) == 9
    fresh = command(*more, "--out", tmp_path / "fresh")
    assert fresh.stdout == again.stdout
    command(*small, "--selectors", "uniform,fedcbs", "--seeds", 2, "-s", "local.lr=0.01", cwd=tmp_path)
    assert len(list((tmp_path / "runs").iterdir())) == 2  # set up differently
