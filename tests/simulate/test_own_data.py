"""The user's own data and models: tables, archives, folders, arrays in memory; and their errors."""

import csv
import sys

import numpy as np
import pytest

from fedcohort.core.errors import DataError, InputError, MissingExtraError
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.config.toml import ConfigError, read_table
from fedcohort.simulate.data import Dataset, OwnFile, data_section, from_arrays, load_dataset
from fedcohort.simulate.rounds.prepare import prepare
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.results import load
from tests.experiments import run_experiment

N = 120


def rows(seed=0):
    draw = np.random.default_rng(seed)
    species = draw.permutation(np.arange(N) % 3)
    x = draw.normal(size=(N, 2)) * 10 + species[:, None] * 50 + 100
    towns = [f"t{i % 6}" for i in range(N)]
    return [[*map(float, a), ["cat", "dog", "eel"][s], t] for a, s, t in zip(x, species, towns, strict=True)]


def table(path, lines, head=("a", "b", "species", "town")):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows(lines)
    return str(path)


def read(path, **options):
    return OwnFile(path=path, **({"label": "species", "client": "town"} | options)).load()


SMALL = {
    "scenario": {"partition": {"name": "natural"}},
    "model": "logistic",
    "local": {"steps": 4, "batch_size": 8, "lr": 0.2},
    "run": {"rounds": 3, "cohort": 2, "device": "cpu", "checkpoint_seconds": 0.0},
    "selectors": {"uniform": {}},
}


def test_a_table_with_clients_and_text_labels(tmp_path):
    dataset = read(table(tmp_path / "zoo.csv", rows()))
    assert dataset.name == "zoo" and dataset.class_names == ("cat", "dog", "eel") and dataset.shape == (2,)
    assert len(dataset.y_train) == 96 and len(dataset.y_test) == 24
    assert dataset.writer_names == tuple(f"t{i}" for i in range(6))
    assert abs(dataset.x_train.mean()) < 1e-5 and abs(dataset.x_train.std() - 1) < 1e-5
    assert "'cat' is 0" in dataset.remarks[0] and "held out" in dataset.remarks[1]
    as_it_is = read(table(tmp_path / "zoo.csv", rows()), standardise=False)
    assert as_it_is.x_train.mean() > 100
    one = read(table(tmp_path / "zoo.csv", rows()), features=("b",), client=None)
    assert one.shape == (1,) and one.writers is None
    tested = read(str(tmp_path / "zoo.csv"), test=table(tmp_path / "test.csv", rows(1)))
    assert len(tested.y_train) == len(tested.y_test) == N and len(tested.remarks) == 1


def test_labels_with_gaps_are_numbered_with_a_remark(tmp_path):
    lines = [[a, b, {"cat": 3, "dog": 7, "eel": 900}[s], t] for a, b, s, t in rows()]
    dataset = read(table(tmp_path / "zoo.csv", lines))
    assert dataset.classes == 3 and dataset.class_names == ("3", "7", "900")
    assert dataset.remarks[0].endswith("were numbered: '3' is 0, '7' is 1, '900' is 2")
    with pytest.raises(InputError, match=r"\b7\b.* 0, 1, 2.*\n.*classes=8"):
        from_arrays(np.zeros((6, 2)), [3, 7] * 3)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (3, "", r"'town' .* is missing in 1 of 120 rows \(row 5;"),
        (3, "  ", r"'town' .* is missing in 1 of 120 rows"),
        (2, "", "'species' .* is missing"),
        (0, "nan", "'a' .* is missing"),
        (0, "inf", "'a' .* is not finite"),
        (1, "tall", "'b' .* does not hold numbers .* e.g. 'tall'"),
    ],
)
def test_bad_cells_are_named(tmp_path, at, value, message):
    lines = rows()
    lines[4][at] = value
    with pytest.raises(InputError, match=message):
        read(table(tmp_path / "zoo.csv", lines))


def test_bad_tables(tmp_path):
    good = table(tmp_path / "zoo.csv", rows())
    with pytest.raises(DataError, match=r"no column 'specie'.*\n.*did you mean 'species'"):
        read(good, label="specie")
    with pytest.raises(DataError, match="There is no file or folder"):
        read(str(tmp_path / "no.csv"))
    with pytest.raises(DataError, match="has no rows"):
        read(table(tmp_path / "empty.csv", []))
    with pytest.raises(DataError, match="more than one column 'a'"):
        read(table(tmp_path / "twice.csv", rows(), head=("a", "a", "species", "town")))
    with pytest.raises(InputError, match=r" 120 .*\n.*task\.name=regression"):
        read(good, label="a", features=("b",))
    with pytest.raises(InputError, match=r"label 'fox' .* only in the test set"):
        read(good, test=table(tmp_path / "test.csv", [[1.0, 2.0, "fox", "t1"]]))
    with pytest.raises(InputError, match="it is the label or the client"):
        read(good, features=("a", "town"))
    (tmp_path / "odd.txt").write_text("a")
    with pytest.raises(DataError, match="not a data file"):
        read(str(tmp_path / "odd.txt"), client=None)


def test_archives_and_folders(tmp_path):
    x, y = np.ones((30, 4)), np.arange(30) % 3
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:6], y_test=y[:6], clients=np.arange(30) % 5 * 1000)
    dataset = load_dataset("file", path=str(tmp_path / "a.npz"))
    assert dataset.remarks == () and dataset.writer_names == ("0", "1000", "2000", "3000", "4000")
    np.save(tmp_path / "x_train.npy", x)
    with pytest.raises(DataError, match=r"has no y_train. It has: x_train"):
        load_dataset("file", path=str(tmp_path))
    np.save(tmp_path / "y_train.npy", y)
    assert len(load_dataset("file", path=str(tmp_path)).y_test) == 6
    np.savez(tmp_path / "half.npz", x_train=x, y_train=y, x_test=x)
    with pytest.raises(InputError, match="one of them is missing"):
        load_dataset("file", path=str(tmp_path / "half.npz"))
    np.savez(tmp_path / "more.npz", x_train=x, y_train=y, client=y)
    with pytest.raises(DataError, match=r"'client'.*\n.*did you mean 'clients'"):
        load_dataset("file", path=str(tmp_path / "more.npz"))
    np.savez(tmp_path / "object.npz", x_train=np.array([{}, 1], dtype=object), y_train=y)
    with pytest.raises(DataError, match="plain arrays"):
        load_dataset("file", path=str(tmp_path / "object.npz"))
    with pytest.raises(InputError, match=r"'data.client' is for tables"):
        load_dataset("file", path=str(tmp_path / "a.npz"), client="c")


def test_meaning_of_a_data_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert data_section("digits") == {"name": "digits"}
    assert data_section("zoo.parquet") == {"name": "file", "path": "zoo.parquet"}
    (tmp_path / "mine").mkdir()
    assert data_section("mine")["name"] == "file" and data_section("nothing") == {"name": "nothing"}


def test_a_configuration_finds_files_next_to_it(tmp_path):
    table(tmp_path / "zoo.csv", rows())
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, shape, classes):\n"
        "        super().__init__(nn.Linear(shape[0], 5), nn.Tanh(), nn.Linear(5, classes))\n"
        "class Nothing: ...\n"
        "class Wrong(Net):\n"
        "    def forward(self, x):\n"
        "        raise KeyError('no')\n"
    )
    text = (
        '[data]\npath = "zoo.csv"\nlabel = "species"\nclient = "town"\n[model]\nname = "net.py:Net"\n'
        '[scenario]\npartition = "natural"\n[run]\ncohort = 2\n[selectors.uniform]\n'
    )
    (tmp_path / "e.toml").write_text(text)
    experiment = Experiment.from_dict(read_table(tmp_path / "e.toml"))
    assert experiment.table["data"]["path"] == str(tmp_path / "zoo.csv")
    assert experiment.table["model"]["name"] == f"{tmp_path / 'net.py'}:Net"
    ready = prepare(experiment)
    assert [f.client_names for f in ready.federations.values()] == [tuple(f"t{i}" for i in range(6))]
    for name, message in {
        "net.py:Nothing": "is the class Nothing, not a torch.nn.Module",
        "net.py:nn": "is a module, not a torch.nn.Module",
        "net.py:Wrong": "cannot take inputs of shape",
    }.items():
        (tmp_path / "e.toml").write_text(text.replace("net.py:Net", name))
        with pytest.raises(InputError, match=message):
            prepare(Experiment.from_dict(read_table(tmp_path / "e.toml")))
    with pytest.raises(ConfigError, match=r"In the section \[model\]: There is no file 'no.py'"):
        Experiment.from_dict({"model": "no.py:Net"})


def test_arrays_run_and_continue_from_the_directory(tmp_path):
    draw = np.random.default_rng(0)
    y = draw.integers(0, 2, N)
    dataset = from_arrays(draw.normal(size=(N, 3)) + y[:, None], y, writers=[f"w{i % 4}" for i in range(N)])
    assert run_experiment({**SMALL, "data": dataset}, tmp_path / "whole") == "finished"
    stopped = Simulation(Experiment.from_dict({**SMALL, "data": dataset}), tmp_path / "parts")

    class Stop:
        def on_start(self, *arguments): ...
        def on_end(self, *arguments): ...
        def on_round(self, *arguments):
            stopped.stop()

    stopped.listeners.append(Stop())
    assert stopped.run() == "interrupted"
    assert Simulation.open(tmp_path / "parts").run() == "finished"
    whole, parts = load(tmp_path / "whole"), load(tmp_path / "parts")
    assert whole.curves["uniform-s0"].accuracy.tolist() == parts.curves["uniform-s0"].accuracy.tolist()
    assert whole.federation("uniform-s0").names == ("w0", "w1", "w2", "w3")
    with pytest.raises(ConfigError, match=r"arrays"):
        Experiment.from_dict({**SMALL, "data": dataset, "settings": [{"name": "x", "data": {"name": "digits"}}]})


def test_nothing_is_written_for_bad_data(tmp_path):
    lines = rows()
    lines[7][3] = ""
    bad = {**SMALL, "data": {"path": table(tmp_path / "zoo.csv", lines), "label": "species", "client": "town"}}
    with pytest.raises(InputError, match="is missing"):
        run_experiment(bad, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_custom_source(tmp_path):
    (tmp_path / "source.py").write_text(
        "import numpy as np\n"
        "from fedcohort.simulate.data import Source, from_arrays\n"
        "class Mine(Source):\n"
        "    def load(self, folder=None, download=False):\n"
        "        return from_arrays(np.eye(8), np.arange(8) % 2, name='mine', test_share=0.25)\n"
        "class Other: ...\n"
    )
    assert isinstance(load_dataset(f"{tmp_path / 'source.py'}:Mine"), Dataset)
    with pytest.raises(ConfigError, match="is the class Other, not a Source"):
        Experiment.from_dict({"data": f"{tmp_path / 'source.py'}:Other"})


def test_flwr_datasets_must_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with pytest.raises(MissingExtraError, match="flwr_datasets, which is not installed"):
        load_dataset("flwr", dataset="ylecun/mnist")


def test_labels_may_have_two_integer_types(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 3))
    y = np.arange(40) % 4
    path = tmp_path / "mine.npz"
    np.savez(path, x_train=x, y_train=y.astype(np.uint8), x_test=x, y_test=y.astype(np.int64))
    dataset = OwnFile(path=str(path)).load()
    assert dataset.y_train.tolist() == dataset.y_test.tolist() == y.tolist()


def test_an_unknown_array_gets_no_suggestion_that_is_taken(tmp_path):
    x, y = np.zeros((20, 3)), np.arange(20) % 2
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, w_train=y)
    with pytest.raises(DataError, match="'w_train'") as failure:
        OwnFile(path=str(tmp_path / "mine.npz")).load()
    assert "'clients'" in failure.value.hint and "y_train" not in failure.value.hint


def frame():
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(rows(), columns=["a", "b", "species", "town"])


def test_columns_of_text_are_labels_and_writers():
    data = frame()
    dataset = from_arrays(data[["a", "b"]], data["species"].astype(object), writers=data["town"].astype(object))
    assert dataset.class_names == ("cat", "dog", "eel") and dataset.writer_names == tuple(f"t{i}" for i in range(6))
    data.loc[3, "species"] = None
    with pytest.raises(InputError, match=r"label.* 1 of 120 .* 3\)"):
        from_arrays(data[["a", "b"]], data["species"].astype(object))


def test_a_frame_equals_its_file(tmp_path):
    import fedcohort

    of_file = read(table(tmp_path / "zoo.csv", rows()))
    of_frame = fedcohort.from_pandas(frame(), label="species", client="town")
    for part in ("x_train", "y_train", "x_test", "y_test", "writers"):
        assert np.array_equal(getattr(of_file, part), getattr(of_frame, part))
    assert of_frame.class_names == of_file.class_names and of_frame.writer_names == of_file.writer_names
    assert fedcohort.from_arrays is from_arrays


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"label": "specie"}, "no column 'specie'.*did you mean 'species'.*label="),
        ({"label": "species", "features": ["a", "town"]}, "'town' of 'frame' does not hold numbers"),
        ({"label": "species", "target": "token"}, "'class' or 'number'"),
    ],
)
def test_bad_frames_are_an_error(options, words):
    from fedcohort.simulate.data import from_pandas

    with pytest.raises((DataError, InputError), match=f"(?s){words}"):
        from_pandas(frame(), **options)


def test_a_frame_must_be_a_pandas_frame():
    from fedcohort.simulate.data import from_pandas

    with pytest.raises(InputError, match=r"pandas DataFrame.*ndarray"):
        from_pandas(np.zeros((3, 2)), label="a")


@pytest.mark.parametrize("data", [np.zeros((1000, 20)), [list(range(5000))], (np.zeros(3), np.zeros(3)), object()])
def test_a_wrong_object_as_data_is_named_not_printed(data):
    with pytest.raises(ConfigError, match=type(data).__name__) as failure:
        Experiment.from_dict({"data": data})
    assert len(str(failure.value)) < 300 and "from_arrays" in failure.value.hint


def test_clients_of_a_dataset_in_memory_are_the_clients():
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 3
    dataset = from_arrays(x, y, writers=[f"w{i % 5}" for i in range(60)])
    whole = {"data": dataset, "run": {"cohort": 2, "device": "cpu"}, "local": {"steps": 1}}
    experiment = Experiment.from_dict(whole)
    assert experiment.plans[0].scenario.partition.name == "natural" and "'natural'" in experiment.notes[0]
    asked = Experiment.from_dict({**whole, "scenario": {"partition": {"name": "iid", "clients": 4}}})
    assert asked.plans[0].scenario.partition.name == "iid" and not asked.notes
    kept = Experiment.from_dict({**whole, "settings": [{"name": "noisy", "scenario": {"noise": {"level": 0.1}}}]})
    assert kept.plans[0].scenario.partition.name == "natural"
    assert kept.table["scenario"]["partition"] == {"name": "natural"}


def test_a_small_file_that_claims_more_than_the_memory_is_refused(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    monkeypatch.setattr("fedcohort.simulate.data.own.memory_limit", lambda: 1_000_000)
    zeros = np.zeros(200_000)
    write_table(pa.table({"label": zeros.astype(int), "x": zeros}), tmp_path / "t.parquet")
    np.savez_compressed(tmp_path / "a.npz", x_train=zeros[:, None], y_train=zeros.astype(int))
    for name in ("t.parquet", "a.npz"):
        assert (tmp_path / name).stat().st_size < 10_000
        with pytest.raises(DataError, match=f"{name} cannot be read .* it claims to hold 0.00298"):
            load_dataset("file", path=str(tmp_path / name))
