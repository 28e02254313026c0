"""What a user types in the first ten minutes, with their own data and without reading much."""

import subprocess
import sys

import numpy as np
import pytest

import fedcohort
from fedcohort.simulate.store.results import load

N = 240
SHORT = ("--rounds", "2", "--seeds", "1", "--cohort", "3", "-s", "run.device=cpu", "-s", "run.workers=1")


@pytest.fixture
def arrays():
    draw = np.random.default_rng(0)
    y = draw.permutation(np.arange(N) % 4)
    x = (draw.normal(size=(N, 5)) + 2 * y[:, None]).astype(np.float32)
    return {"x_train": x[:200], "y_train": y[:200], "x_test": x[200:], "y_test": y[200:]}


def only(folder):
    return load(next((folder / "runs").iterdir()))


def test_a_comparison_on_your_own_data_needs_no_selectors(command, tmp_path, arrays):
    np.savez(tmp_path / "mine.npz", **arrays)
    done = command("compare", "--data", "mine.npz", *SHORT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    selectors = {run.selector for run in only(tmp_path).runs}
    assert {"uniform", "balanced", "fedcor"} <= selectors


def test_your_own_data_do_not_get_the_demos_target(command, tmp_path, arrays):
    np.savez(tmp_path / "mine.npz", **arrays)
    done = command("compare", "--data", "mine.npz", "--selectors", "uniform", *SHORT, cwd=tmp_path)
    assert done.returncode == 0 and "targets" not in done.stderr, done.stderr
    assert not only(tmp_path).config["run"].get("targets")


def test_a_comparison_in_a_scenario_needs_no_selectors(command, tmp_path):
    done = command("compare", "--scenario", "fedcor-1spc", *SHORT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_clients_of_an_archive_are_used(command, tmp_path, arrays):
    clients = np.array(["north", "south", "east", "west"])[np.arange(200) % 4]
    np.savez(tmp_path / "mine.npz", clients=clients, **arrays)
    done = command("compare", "--data", "mine.npz", "--selectors", "uniform", *SHORT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "name their clients" in done.stderr and "'natural'" in done.stderr
    found = only(tmp_path).federation(only(tmp_path).runs[0])
    assert sorted(found.names) == ["east", "north", "south", "west"]


def test_a_requested_partition_is_kept(command, tmp_path, arrays):
    np.savez(tmp_path / "mine.npz", clients=np.arange(200) % 4, **arrays)
    asked = ("-s", "scenario.partition={name='iid', clients=7}")
    done = command("compare", "--data", "mine.npz", "--selectors", "uniform", *SHORT, *asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'natural'" not in done.stderr
    found = only(tmp_path).federation(only(tmp_path).runs[0])
    assert len(found.sizes) == 7


def test_a_regression_leaves_out_what_needs_classes(command, tmp_path, arrays):
    arrays = {**arrays, "y_train": arrays["x_train"][:, 0] * 3, "y_test": arrays["x_test"][:, 0] * 3}
    np.savez(tmp_path / "mine.npz", **arrays)
    done = command("compare", "--data", "mine.npz", "-s", "task.name=regression", *SHORT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fedcbs" in done.stderr and "need classes" in done.stderr
    selectors = {run.selector for run in only(tmp_path).runs}
    assert "uniform" in selectors and "fedcbs" not in selectors


def test_a_regression_in_large_units_does_not_diverge_and_is_reported_in_them(command, tmp_path):
    sklearn = pytest.importorskip("sklearn.datasets")
    raw = sklearn.load_diabetes()
    np.savez(tmp_path / "mine.npz", x_train=raw.data, y_train=raw.target)
    options = ("--selectors", "uniform", "-s", "task.name=regression", "-s", "run.workers=1", "--seeds", "1")
    done = command("compare", "--data", "mine.npz", *options, "--rounds", "20", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = only(tmp_path)
    rmse = results.column(results.runs[0], "metric")
    assert 40 < rmse[-1] < 0.95 * raw.target.std()  # 77 is what the mean alone would reach


def test_mixed_bytes_and_floats_are_refused_before_anything_is_written(command, tmp_path, arrays):
    arrays = {**arrays, "x_train": (arrays["x_train"] * 20).clip(0, 255).astype(np.uint8)}
    np.savez(tmp_path / "mine.npz", **arrays)
    done = command("compare", "--data", "mine.npz", "--selectors", "uniform", *SHORT, cwd=tmp_path)
    assert done.returncode == 1 and "Got uint8 (5,) for training and float32" in " ".join(done.stderr.split())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("compare", "--model", "net.py", "--selectors", "uniform"), "net.py:CLASS"),
        (("compare", "--selectors", "mine.py"), "mine.py:CLASS"),
    ],
)
def test_hints_suggest_the_right_name(command, tmp_path, arguments, hint):
    done = command(*arguments, cwd=tmp_path)
    assert done.returncode == 1 and hint in done.stderr, done.stderr


def test_the_note_says_what_comes_from_a_preset_or_the_demo(command, tmp_path):
    done = command("compare", "--selectors", "uniform", *SHORT, "-s", "local.steps=1", cwd=tmp_path)
    note = " ".join(done.stderr.split())
    for part in ("partition shards(clients=50", "latency shifted-exponential", "validation 0.1", "eval_every 2"):
        assert part in note
    assert "as asked for" not in done.stdout


@pytest.mark.parametrize("kind", ["selectors", "aggregators", "filters", "partitions"])
def test_lists_contain_no_documentation_markup(command, kind):
    listed = command("list", kind, "--format", "json").stdout
    assert ":math:" not in listed and "``" not in listed and "frac{" not in listed


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "fedcohort", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith(fedcohort.__version__)
