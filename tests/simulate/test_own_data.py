"""The user's own data and models: tables, archives, folders, arrays in memory; and their errors."""

import csv
import sys

import numpy as np
import pytest

from fedcohort.core.errors import DataError, InputError, MissingExtraError
from fedcohort.simulate.comparison import compared
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
    arrays = from_arrays(np.zeros((10, 2)), [3, 7] * 5)
    assert arrays.class_names == ("3", "7") and "'7' is 1" in arrays.remarks[0]
    assert from_arrays(np.zeros((10, 2)), [3, 7] * 5, classes=8).y_train.max() == 7


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (3, "", r"'town' .* is missing in 1 of 120 rows \(row 5;"),
        (3, "  ", r"'town' .* is missing in 1 of 120 rows"),
        (2, "", "'species' .* is missing"),
        (0, "nan", "'a' .* is missing"),
        (0, "inf", "'a' .* is not finite"),
        (1, "tall", "'b' .* is not a number in 1 of 120 rows .row 5;"),
    ],
)
def test_bad_cells_are_named(tmp_path, at, value, message):
    lines = rows()
    lines[4][at] = value
    with pytest.raises(InputError, match=message):
        read(table(tmp_path / "zoo.csv", lines))


def test_each_text_becomes_a_feature_that_is_0_or_1(tmp_path):
    lines = [[a, ["red", "green", "blue"][i % 3], s, t] for i, (a, _, s, t) in enumerate(rows())]
    dataset = read(table(tmp_path / "zoo.csv", lines, head=("a", "colour", "species", "town")))
    assert dataset.shape == (4,) and "'colour' (3)" in dataset.remarks[0]
    assert set(np.unique(dataset.x_train[:, 1:])) == {0.0, 1.0} and (dataset.x_train[:, 1:].sum(axis=1) == 1).all()
    assert abs(dataset.x_train[:, 0].std() - 1) < 1e-5  # numbers are still standardised
    test = table(tmp_path / "test.csv", [[1.0, "black", "cat", "t1"]], head=("a", "colour", "species", "town"))
    assert read(str(tmp_path / "zoo.csv"), test=test).x_test[0, 1:].tolist() == [0, 0, 0]
    names = [[a, f"name {i}", s, t] for i, (a, _, s, t) in enumerate(rows())]
    with pytest.raises(InputError, match="120") as failure:
        read(table(tmp_path / "names.csv", names, head=("a", "name", "species", "town")))
    assert "features" in failure.value.hint


def test_many_numbers_as_labels_are_a_regression(tmp_path):
    lines = [[i % 7, 100 + 37 * (i % 400), i % 5] for i in range(2000)]
    path = table(tmp_path / "houses.csv", lines, head=("rooms", "price", "street"))
    with pytest.raises(InputError, match="400") as failure:
        read(path, label="price", client=None)
    assert "--task regression" in failure.value.hint
    assert read(path, label="price", client=None, target="number").target == "number"
    assert read(path, label="rooms", client="street").classes == 7


def draw_images(folder, sizes=((8, 6),), grey=False):
    image = pytest.importorskip("PIL.Image")
    draw = np.random.default_rng(0)
    for part, count in (("train", 5), ("test", 2)):
        for value, name in enumerate(("cat", "dog")):
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                width, height = sizes[i % len(sizes)]
                pixels = draw.integers(0, 50, (height, width) if grey else (height, width, 3)) + 200 * value
                image.fromarray(pixels.astype(np.uint8)).save(folder / part / name / f"{i}.png")
    return folder


def test_a_folder_of_images_by_class(tmp_path):
    dataset = OwnFile(path=str(draw_images(tmp_path / "pets"))).load()
    assert dataset.x_train.shape == (10, 6, 8, 3) and dataset.x_train.dtype == np.uint8 and len(dataset.y_test) == 4
    assert (
        dataset.class_names == ("cat", "dog")
        and ((dataset.x_train.mean(axis=(1, 2, 3)) > 150) == dataset.y_train).all()
    )
    assert OwnFile(path=str(draw_images(tmp_path / "grey", grey=True))).load().x_train.shape == (10, 6, 8)
    alone = OwnFile(path=str(tmp_path / "pets" / "train")).load()  # cat/0.png: a share is held out for testing
    assert len(alone.y_train) == 8 and len(alone.y_test) == 2 and "held out" in alone.remarks[-1]
    several = OwnFile(path=str(draw_images(tmp_path / "several", sizes=((8, 6), (9, 9))))).load()
    assert several.shape == (64, 64, 3) and "64 x 64" in several.remarks[0]
    (tmp_path / "pets" / "train" / "cat" / "0.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"0\.png"):
        OwnFile(path=str(tmp_path / "pets")).load()


def test_images_need_pillow(tmp_path, monkeypatch):
    draw_images(tmp_path / "pets")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match="Pillow") as failure:
        OwnFile(path=str(tmp_path / "pets")).load()
    assert failure.value.hint == "pip install pillow"


def test_a_file_that_is_not_there_gets_the_name_of_one_that_is(tmp_path):
    table(tmp_path / "people.csv", rows())
    with pytest.raises(DataError, match="no file") as failure:
        read(str(tmp_path / "peopel.csv"))
    assert "'people.csv'" in failure.value.hint


def test_bad_tables(tmp_path):
    good = table(tmp_path / "zoo.csv", rows())
    with pytest.raises(DataError, match="'species'"):
        read(good, label="specie")
    with pytest.raises(DataError, match="no file"):
        read(str(tmp_path / "no.csv"))
    with pytest.raises(DataError, match="has no rows"):
        read(table(tmp_path / "empty.csv", []))
    with pytest.raises(DataError, match="column 'a'"):
        read(table(tmp_path / "twice.csv", rows(), head=("a", "a", "species", "town")))
    with pytest.raises(InputError, match="--task regression"):
        read(good, label="a", features=("b",))
    with pytest.raises(InputError, match="'fox'"):
        read(good, test=table(tmp_path / "test.csv", [[1.0, 2.0, "fox", "t1"]]))
    with pytest.raises(InputError, match="label or the client"):
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
    with pytest.raises(DataError, match="no y_train"):
        load_dataset("file", path=str(tmp_path))
    np.save(tmp_path / "y_train.npy", y)
    assert len(load_dataset("file", path=str(tmp_path)).y_test) == 6
    np.savez(tmp_path / "half.npz", x_train=x, y_train=y, x_test=x)
    with pytest.raises(InputError, match="missing"):
        load_dataset("file", path=str(tmp_path / "half.npz"))
    np.savez(tmp_path / "more.npz", x_train=x, y_train=y, client=y)
    with pytest.raises(DataError, match="'clients'"):
        load_dataset("file", path=str(tmp_path / "more.npz"))
    np.savez(tmp_path / "object.npz", x_train=np.array([{}, 1], dtype=object), y_train=y)
    with pytest.raises(DataError, match="plain arrays"):
        load_dataset("file", path=str(tmp_path / "object.npz"))
    with pytest.raises(InputError, match=r"data\.client"):
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
    with pytest.raises(ConfigError, match=r"\[model\].*no\.py"):
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
    with pytest.raises(ConfigError, match="Other, not a Source"):
        Experiment.from_dict({"data": f"{tmp_path / 'source.py'}:Other"})


def test_flwr_datasets_must_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with pytest.raises(MissingExtraError, match="flwr_datasets"):
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
        ({"label": "species", "features": ["a", "b", "species"]}, "label or the client"),
        ({"label": "species", "target": "token"}, "'class', 'number'"),
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

    for module in ("tables", "own"):
        monkeypatch.setattr(f"fedcohort.simulate.data.{module}.memory_limit", lambda: 1_000_000)
    zeros = np.zeros(200_000)
    write_table(pa.table({"label": zeros.astype(int), "x": zeros}), tmp_path / "t.parquet")
    np.savez_compressed(tmp_path / "a.npz", x_train=zeros[:, None], y_train=zeros.astype(int))
    for name in ("t.parquet", "a.npz"):
        assert (tmp_path / name).stat().st_size < 10_000
        with pytest.raises(DataError, match=f"{name} cannot be read .* it claims to hold 0.00298"):
            load_dataset("file", path=str(tmp_path / name))


@pytest.mark.parametrize("frame", [False, True])
def test_the_task_of_a_comparison_decides_what_arrays_and_frames_predict(frame):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 3))
    y = x @ [1.0, 2.0, 3.0]
    data, options = (x, y), {}
    if frame:
        pandas = pytest.importorskip("pandas")
        data, options = pandas.DataFrame({"a": x[:, 0], "b": x[:, 1], "price": y}), {"label": "price"}
    experiment = compared(selectors=["uniform", "oort"], data=data, task="regression", clients=5, **options)
    assert experiment.plans[0].data.source.load().target == "number"
    with pytest.raises(InputError) as caught:
        compared(selectors=["uniform"], data=data, **options)
    assert "regression" in caught.value.hint


def test_a_baseline_that_is_not_compared_is_refused():
    with pytest.raises(ConfigError, match="oort"):
        compared(selectors=["uniform", "fedcbs"], baseline="oort")
