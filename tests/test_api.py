"""The public surface: what ``import fedcohort`` loads, compare, run, extend and load, and what they refuse."""

import gc
import importlib
import json
import pkgutil
import subprocess
import sys
import threading
from dataclasses import dataclass

import numpy as np
import pytest

import fedcohort as fc
from fedcohort.core.errors import MissingExtraError
from fedcohort.selectors import Uniform

SMALL = {"rounds": 2, "clients": 8, "cohort": 2, "seeds": 2, "model": "logistic", "quiet": True}


@fc.register("last-ones")
@dataclass(frozen=True, kw_only=True)
class LastOnes(Uniform):
    """A selector that a user registers in a script."""


class Unregistered(Uniform):
    """A selector that only its module knows."""


def loaded_by(code):
    script = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(done.stdout))


def test_importing_loads_nothing_heavy():
    heavy = {
        "torch",
        "flwr",
        "nvflare",
        "pyarrow",
        "scipy",
        "rich",
        "typer",
        "pandas",
        "sklearn",
        "cryptography",
        "IPython",
    }
    assert not heavy & loaded_by("import fedcohort as fc; dir(fc)")


def test_nothing_that_hosts_share_loads_torch_or_cryptography_or_a_host():
    light = ["core", "journal", "session", "selectors", "training", "scenario", "audit", "testing"]
    packages = [importlib.import_module(f"fedcohort.{name}") for name in light]
    names = [m.name for p in packages for m in pkgutil.walk_packages(p.__path__, f"{p.__name__}.")]
    names.remove("fedcohort.training.losses")  # it computes with torch
    hosts = pkgutil.iter_modules(importlib.import_module("fedcohort.hosts").__path__, "fedcohort.hosts.")
    names += [module.name for module in hosts if not module.ispkg]  # flower and flare are packages
    loaded = loaded_by(f"import importlib\nfor name in {names}: importlib.import_module(name)")
    assert set(names) <= loaded
    assert not {"torch", "flwr", "nvflare", "cryptography"} & loaded


def test_every_public_name_exists_and_is_listed():
    assert {*fc.__all__, "flare", "flower", "plots"} <= set(dir(fc))
    for name in fc.__all__:
        assert getattr(fc, name) is not None
    with pytest.raises(AttributeError, match="comparee"):
        fc.comparee


def test_flower_is_imported_on_first_use():
    assert fc.flower.CohortStrategy.__name__ == "CohortStrategy"


@pytest.mark.parametrize(
    ("module", "package", "extra"), [("flower", "flwr", "flower"), ("flare", "nvflare", "nvflare")]
)
def test_without_a_host_the_hint_names_the_extra(module, package, extra):
    code = f"import sys; sys.modules[{package!r}] = None\nimport fedcohort as fc\ntry: fc.{module}\n"
    code += f"except fc.FedcohortError as error: assert 'fedcohort[{extra}]' in error.hint, error.hint\n"
    code += "else: raise AssertionError\nfrom fedcohort import *"
    assert "fedcohort" in loaded_by(code)
    assert issubclass(MissingExtraError, fc.FedcohortError)


@pytest.fixture(scope="module")
def results():
    return fc.compare(["uniform", "fedcbs"], data="digits", **SMALL)


def test_compare_returns_results_that_show_themselves(results):
    assert {run.label for run in results.runs} == {"uniform", "fedcbs"}
    assert [run.state for run in results.runs] == ["finished"] * 4
    text, page = str(results), results._repr_html_()
    for label in ("uniform", "fedcbs"):
        assert label in text and label in page
    assert "Terminal" in text and "<table" in page
    assert "4 runs" in repr(results) and "\n" not in repr(results)


@pytest.mark.parametrize("width", [60, 80, 120, 250])
def test_printed_results_explain_only_the_columns_they_show(results, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    table, _, notes = str(results).partition("±: ")
    explained = " ".join(notes.split())
    assert "Worst" in table and "Worst group: " in explained
    for heading in ("Worst tenth", "Spread", "Jain", "Longest absence"):
        assert f"{heading}: " not in explained


def test_results_explain_a_choice(results):
    run = results.runs[0]
    assert "Round 1" in str(results.explain(run, 1)) and "Client 3" in str(results.explain(run.id, 1, client=3))


def test_a_temporary_folder_lives_as_long_as_its_results():
    first = fc.compare("uniform", **SMALL)
    path = first.path
    second = fc.extend(first, seeds=3, quiet=True)
    del first
    gc.collect()
    assert len(second.runs) == 3 and fc.load(path).rounds.num_rows == 6
    del second
    gc.collect()
    assert not path.exists()


def test_the_command_line_compares_the_same(results, tmp_path):
    options = ["--selectors", "uniform,fedcbs", "--data", "digits", "--rounds", "2", "--clients", "8", "--cohort", "2"]
    options += ["--seeds", "2", "--model", "logistic", "--out", str(tmp_path / "out"), "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "fedcohort.cli.app", "compare", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    same = fc.load(tmp_path / "out")
    assert same.config == results.config
    for run in results.runs:
        np.testing.assert_array_equal(same.score(run), results.score(run))


def test_out_keeps_the_results_and_run_continues_them(tmp_path):
    fc.compare("uniform", out=tmp_path / "kept", **SMALL)
    again = fc.run(tmp_path / "kept", quiet=True)
    assert again.path == tmp_path / "kept" and again.status["state"] == "finished"


def test_run_takes_a_table_a_file_and_overrides(tmp_path):
    table = {
        "data": {"name": "synthetic", "samples": 200},
        "scenario": {"partition": {"name": "iid", "clients": 5}},
        "model": {"name": "logistic"},
        "run": {"rounds": 3, "cohort": 2},
    }
    (tmp_path / "small.toml").write_text(
        '[data]\nname = "synthetic"\nsamples = 200\n[scenario]\npartition = {name = "iid", clients = 5}\n'
        '[model]\nname = "logistic"\n[run]\nrounds = 3\ncohort = 2\n'
    )
    from_table = fc.run(table, overrides={"run.rounds": 2}, quiet=True)
    from_file = fc.run(tmp_path / "small.toml", overrides={"run.rounds": 2}, quiet=True)
    assert from_table.config == from_file.config and from_table.rounds.num_rows == 2
    assert table["run"]["rounds"] == 3  # the user's table must not change


def test_selectors_in_every_form():
    given = [
        "uniform",
        LastOnes,
        fc.create("power-of-choice", d=4),
        {"eager": {"name": "fedcor", "warmup": 1}, "plain": Unregistered},
    ]
    found = fc.compare(given, data="digits", **(SMALL | {"seeds": 1})).config["selectors"]
    assert list(found) == ["uniform", "last-ones", "power-of-choice", "eager", "plain"]
    assert found["power-of-choice"]["d"] == 4 and found["eager"]["warmup"] == 1
    assert found["plain"]["name"].endswith(":Unregistered")


def test_data_can_be_arrays_frames_and_datasets():
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(120, 4)).astype(np.float32), np.arange(120) % 3
    frame = pandas.DataFrame(x, columns=list("abcd")).assign(kind=y, site=[f"site-{i % 6}" for i in range(120)])
    few = {"rounds": 1, "cohort": 2, "seeds": 1, "quiet": True, "model": "logistic"}
    of_arrays = fc.compare("uniform", data=(x, y), partition="iid", clients=5, **few)
    of_frame = fc.compare("uniform", data=frame, label="kind", client="site", **few)
    of_dataset = fc.compare("uniform", data=fc.from_arrays(x, y), partition="iid", clients=5, **few)
    assert of_arrays.client_count(of_arrays.runs[0]) == 5
    assert of_frame.client_count(of_frame.runs[0]) == 6
    assert of_arrays.config["scenario"] == of_dataset.config["scenario"]


def test_it_works_outside_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(fc.compare("uniform", **SMALL)))
    thread.start()
    thread.join()
    assert found[0].status["state"] == "finished"


def test_notes_and_progress_go_to_stderr(capsys):
    fc.compare("uniform", data="digits", **(SMALL | {"quiet": False}))
    shown = capsys.readouterr()
    assert not shown.out
    assert "'demo'" in shown.err


@dataclass(frozen=True)
class Named:
    """A wrong argument with its value, and what the message must name."""

    arguments: dict
    words: tuple[str, ...]


def local_class():
    class Hidden(Uniform):
        pass

    return Hidden


NONSENSE = [
    Named({"selectors": 3}, ("selectors", "3", "names")),
    Named({"selectors": []}, ("selectors", "[]", "names")),
    Named({"selectors": [3.5]}, ("selector", "3.5", "name")),
    Named({"selectors": ["unifrom"]}, ("unifrom", "uniform")),
    Named({"selectors": ["uniform", "uniform"]}, ("selectors", "uniform", "label")),
    Named({"selectors": {"": {}}}, ("label", "''", "string")),
    Named({"selectors": {"x": {"name": "fedcor", "warmpu": 3}}}, ("warmpu", "warmup")),
    Named({"selectors": [local_class()]}, ("Hidden", "register")),
    Named({"data": 7}, ("data", "7", "name of a dataset", "from_arrays")),
    Named({"data": "digit"}, ("digit", "digits")),
    Named({"data": "nowhere.csv"}, ("nowhere.csv",)),
    Named({"data": (np.zeros((4, 2)), np.zeros(4, int)), "label": "y"}, ("label", "table")),
    Named({"label": 5}, ("digits", "label")),
    Named({"scenario": 5}, ("scenario", "5", "preset")),
    Named({"scenario": "fedcor-1spx"}, ("fedcor-1spx", "fedcor-1spc")),
    Named({"partition": 5}, ("partition", "5", "name")),
    Named({"partition": "shrads"}, ("shrads", "shards")),
    Named({"clients": 0}, ("clients", "0")),
    Named({"clients": "many"}, ("clients", "many")),
    Named({"model": 5}, ("model", "5", "name")),
    Named({"model": "mpl"}, ("mpl", "mlp")),
    Named({"task": "regresion"}, ("regresion", "regression")),
    Named({"rounds": 0}, ("rounds", "0")),
    Named({"rounds": "ten"}, ("rounds", "ten")),
    Named({"cohort": -1}, ("cohort", "-1")),
    Named({"seeds": 0}, ("seeds", "0")),
    Named({"seeds": "five"}, ("seeds", "five")),
    Named({"seeds": [1, 1]}, ("seeds", "[1, 1]")),
    Named({"targets": "high"}, ("targets", "high")),
    Named({"targets": 0.5}, ("targets", "0.5")),
    Named({"sweep": {"fedcor": {"warmup": 3}}, "selectors": ["fedcor"]}, ("warmup", "3")),
    Named({"overrides": ["a"]}, ("overrides", "['a']", "local.lr")),
    Named({"overrides": {"local.lrr": 1}}, ("lrr", "lr")),
    Named({"config": 5}, ("config", "5", "TOML")),
    Named({"config": "nothing.toml"}, ("nothing.toml",)),
    Named({"out": 5}, ("out", "5", "folder")),
    Named({"device": "gpu"}, ("gpu", "cuda")),
]


@pytest.mark.parametrize("case", NONSENSE, ids=lambda case: str(case.arguments)[:50])
def test_nonsense_is_refused_with_its_name_and_value(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fc.FedcohortError) as caught:
        fc.compare(**({"selectors": ["uniform"], "rounds": 1, "seeds": 1, "quiet": True} | case.arguments))
    text = f"{caught.value.message} {caught.value.hint}"
    for word in case.words:
        assert word in text, text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [None, 5, ["uniform"]])
def test_run_refuses_other_values(value):
    with pytest.raises(fc.FedcohortError, match="experiment"):
        fc.run(value)


def test_extend_and_load_name_a_missing_folder(tmp_path):
    with pytest.raises(fc.FedcohortError, match="nowhere"):
        fc.load(tmp_path / "nowhere")
    with pytest.raises(fc.FedcohortError, match="nowhere"):
        fc.extend(tmp_path / "nowhere", seeds=2)
    with pytest.raises(fc.FedcohortError, match="add"):
        fc.extend(tmp_path / "nowhere")
    with pytest.raises(fc.FedcohortError, match="continue"):
        fc.run(tmp_path, out=tmp_path / "other")
