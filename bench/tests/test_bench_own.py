"""The benchmark on the user's own data: sizes from the data, the settings they allow, the same scores."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fedcohort.cli.app import app
from fedcohort.core.errors import FedcohortError, InputError
from fedcohort.simulate.data import from_arrays, load_dataset, to_npz
from fedcohort.simulate.store.results import load
from fedcohort_bench.benchmark import SubmissionError, check_submission, score
from fedcohort_bench.benchmark.own import own_size
from fedcohort_bench.benchmark.page import page
from fedcohort_bench.benchmark.run import begin, plan
from fedcohort_bench.benchmark.suite import kinds, suite
from fedcohort_bench.launch import Launcher


def samples(n=400, classes=3, shape=None, clients=None):
    """Return separable data; ``shape`` makes images of bytes, ``clients`` gives the data that many owners."""
    draw = np.random.default_rng(0)
    y = np.arange(n) % classes
    x = draw.normal(size=(n, 6)) + 3 * np.eye(6)[y % 6]
    if shape is not None:
        x = draw.integers(0, 256, (n, *shape)).astype(np.uint8)
    owners = None if clients is None else draw.permutation(np.arange(n) % clients)
    return from_arrays(x, y, writers=owners)


def settings_of(config):
    return [setting["name"] for setting in config["settings"]]


def test_data_that_name_their_clients_get_the_settings_of_natural_federations():
    config, notes = plan(samples(clients=12), {}, [1, 2])
    assert settings_of(config) == [setting.name for setting in suite("femnist")]
    assert all(setting["scenario"]["partition"] == {"name": "natural"} for setting in config["settings"])
    assert config["run"]["cohort"] == 3 and any("3 of 12 clients" in note for note in notes)


def test_other_data_get_every_setting_that_they_allow():
    digits = load_dataset("digits")
    same = from_arrays(digits.x_train, digits.y_train, digits.x_test, digits.y_test)
    config, notes = plan(same, {}, [1])
    assert settings_of(config) == [setting.name for setting in suite("digits")]
    assert not any("left out" in note for note in notes)
    table, notes = plan(samples(), {}, [1])
    assert "rotated-20%" not in settings_of(table)  # no images
    assert {"iid", "2-classes", "noise", "concept-20%"} <= set(settings_of(table))
    assert "rotated-20%" in notes[-1]
    with pytest.raises(InputError, match="rotate"):
        plan(samples(), {}, [1], settings=["rotated-20%"])


@pytest.mark.parametrize("classes", [2, 3, 7, 10])
def test_as_many_clients_as_can_be_divided_between_frequent_and_rare_classes(classes):
    table, _ = plan(samples(3000, classes), {}, [1])
    assert {"rare-classes", "rare-online"} <= set(settings_of(table))


def test_sizes_follow_from_the_data():
    small, large = own_size(samples(200)), own_size(samples(60_000, 10))
    assert (small.clients, large.clients, large.cohort) == (10, 100, 10)
    assert small.local["batch_size"] < large.local["batch_size"]
    assert own_size(samples(300, shape=(32, 32, 3))).model == "lenet"
    assert own_size(samples(300, shape=(8, 8, 3))).model == "mlp"  # too small for its filters


def test_what_cannot_be_benchmarked_is_refused():
    numbers = from_arrays(np.zeros((20, 2)), np.arange(20.0), target="number")
    with pytest.raises(InputError, match="two classes") as found:
        plan(numbers, {}, [1])
    assert "compare" in (found.value.hint or "")
    rare = np.zeros(100, int)
    rare[:2] = 1
    with pytest.raises(InputError, match="Class"):
        plan(from_arrays(np.zeros((100, 2)), rare), {}, [1])
    with pytest.raises(FedcohortError, match=r"missing\.csv"):
        plan("missing.csv", {}, [1])
    with pytest.raises(InputError, match="digits"):
        plan("digits", {}, [1], columns={"label": "y"})


def test_the_command_runs_a_table_and_goes_on_from_any_folder(tmp_path, monkeypatch):
    data = samples(clients=8)
    names = [f"f{i}" for i in range(6)]
    lines = [
        ",".join([*map(str, x), f"kind {y}", f"ward {w}"])
        for x, y, w in zip(data.x_train, data.y_train, data.writers, strict=True)
    ]
    (tmp_path / "people.csv").write_text("\n".join([",".join([*names, "illness", "ward"]), *lines]) + "\n")
    monkeypatch.chdir(tmp_path)
    columns = ["--data", "people.csv", "--label", "illness", "--client", "ward"]
    done = CliRunner().invoke(app, ["bench", *columns, "--quick", "--selectors", "balanced", "-o", "b"])
    assert done.exit_code == 0, done.output
    submission = json.loads((tmp_path / "b" / "bench.json").read_text())
    assert (submission["data"], submission["purpose"]) == ("people.csv", "trial")
    assert set(submission["selectors"][0]["gains"]) == {"natural", "natural-30%", "natural-slow"}
    text = (tmp_path / "b" / "bench.html").read_text()
    assert "people.csv" in text and "real owners, slow clients" in text and str(tmp_path) not in text
    monkeypatch.chdir("/")
    again = CliRunner().invoke(app, ["bench", "--resume", str(tmp_path / "b"), "-q"])
    assert again.exit_code == 0, again.output
    with pytest.raises(SubmissionError):
        check_submission(tmp_path / "b" / "config.toml", tmp_path / "b" / "bench.json")


def test_an_archive_called_digits_is_not_the_dataset_of_that_name(tmp_path):
    (tmp_path / "digits.npz").write_bytes(to_npz(samples()))
    config, _ = plan(
        str(tmp_path / "digits.npz"),
        {"balanced": {}},
        [300],
        quick=True,
        settings=["noise", "skew-noise", "skew-noise-slow"],
    )
    begin(config, tmp_path / "b", Launcher(device="cpu")).run()
    scores = score(load(tmp_path / "b"))
    assert scores.data == "digits.npz"
    assert scores.purpose == "trial"  # 20 rounds
    # settings that differ only in time count once, here as everywhere
    assert scores.kinds == kinds("digits", scores.settings) == (("noise",), ("skew-noise", "skew-noise-slow"))
    assert "Dirichlet 0.3 and 30% wrong labels" in page(scores)
