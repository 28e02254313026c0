"""FEMNIST: LEAF's json and archives are written and read back; errors name damaged files."""

import json

import numpy as np
import pytest

from fedcohort.core.errors import DataError
from fedcohort.scenario import Scenario
from fedcohort.scenario.predefined import Natural
from fedcohort.simulate.data import load_dataset
from fedcohort_bench.femnist import Femnist

RNG = np.random.default_rng(0)
GREY = {
    "x_train": RNG.integers(0, 256, (20, 28, 28), dtype=np.uint8),
    "y_train": (np.arange(20) % 10).astype(np.uint8),
    "x_test": RNG.integers(0, 256, (10, 28, 28), dtype=np.uint8),
    "y_test": np.arange(10).astype(np.uint8),
}


LEAF_TRAIN = {"anna": 3, "ben": 2, "carl": 4}
LEAF_TEST = {"anna": 1, "carl": 2}


def write_leaf(folder):
    rng = np.random.default_rng(1)
    written = {}
    for part, users in (("train", LEAF_TRAIN), ("test", LEAF_TEST)):
        (folder / part).mkdir(parents=True)
        for i, group in enumerate(np.array_split(sorted(users), 2)):
            table = {"users": group.tolist(), "num_samples": [users[u] for u in group], "user_data": {}}
            for user in group.tolist():
                x = rng.integers(0, 256, (users[user], 784))
                y = rng.integers(0, 62, users[user])
                table["user_data"][user] = {"x": (x / 255).tolist(), "y": y.tolist()}
                written[part, user] = (x.reshape(-1, 28, 28), y)
            (folder / part / f"all_data_{i}.json").write_text(json.dumps(table))
    return written


def test_femnist_npz(tmp_path):
    arrays = {
        **GREY,
        "w_train": (np.arange(20) % 3).astype(np.uint16),
        "w_test": (np.arange(10) % 2).astype(np.uint16),
        "writers": np.array([b"f01", b"f02", b"f03", b"f99"]),
    }
    (tmp_path / "d").mkdir()
    np.savez(tmp_path / "d" / "femnist.npz", **arrays)
    dataset = load_dataset("femnist", folder=tmp_path / "d")
    assert (
        all(np.array_equal(getattr(dataset, key), GREY[key]) for key in GREY)
        and dataset.classes == 62
        and dataset.class_names[36] == "a"
    )
    assert dataset.writers.tolist() == (np.arange(20) % 3).tolist() and dataset.writer_names[2] == "f03"
    federation = Scenario(partition=Natural()).build(
        dataset.y_train, dataset.classes, 0, writers=dataset.writers, writer_names=dataset.writer_names
    )
    assert federation.names == ("f01", "f02", "f03") and federation.sizes.tolist() == [7, 7, 6]


@pytest.mark.parametrize("where", ["", "femnist/data", "leaf/data/femnist/data"])
def test_leaf_json(tmp_path, where):
    written = write_leaf(tmp_path / "d" / where)
    dataset = load_dataset("femnist", folder=tmp_path / "d")
    assert dataset.writer_names == ("anna", "ben", "carl")
    assert np.bincount(dataset.writers).tolist() == [3, 2, 4] and np.bincount(dataset.writers_test).tolist() == [
        1,
        0,
        2,
    ]
    for k, user in enumerate(dataset.writer_names):
        assert np.array_equal(dataset.x_train[dataset.writers == k], written["train", user][0])
        assert np.array_equal(dataset.y_train[dataset.writers == k], written["train", user][1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": [[0.5] * 783] * 3}, "instead of"),
        ({"x": [[1.5] * 784] * 3}, r"outside \[0, 1\]"),
        ({"y": [0.5, 1, 2]}, "instead of"),
    ],
)
def test_bad_leaf_writers(tmp_path, change, words):
    for part in ("train", "test"):
        (tmp_path / "d" / part).mkdir(parents=True)
        data = {"x": [[0.5] * 784] * 3, "y": [0, 1, 2]} | (change if part == "train" else {})
        (tmp_path / "d" / part / "a.json").write_text(json.dumps({"user_data": {"anna": data}}))
    with pytest.raises(DataError, match=words):
        load_dataset("femnist", folder=tmp_path / "d")


def test_digits_of_femnist(tmp_path):
    """Only the digits remain, with their writers."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (8, 28, 28), dtype=np.uint8)
    y = np.array([3, 40, 9, 10, 0, 61, 9, 12], np.uint8)
    w = np.array([0, 0, 1, 1, 2, 2, 1, 0], np.uint16)
    parts = {"x_train": x, "y_train": y, "w_train": w, "x_test": x[:3], "y_test": y[:3], "w_test": w[:3]}
    np.savez(tmp_path / "femnist.npz", **parts, writers=np.array([b"a", b"b", b"c"]))
    dataset = Femnist(digits=True).load(tmp_path)
    assert dataset.classes == 10 and dataset.class_names == tuple("0123456789")
    assert dataset.y_train.tolist() == [3, 9, 0, 9] and dataset.writers.tolist() == [0, 1, 2, 1]
    assert dataset.y_test.tolist() == [3, 9] and dataset.writers_test.tolist() == [0, 1]
    assert np.array_equal(dataset.x_train, x[[0, 2, 4, 6]])
    assert Femnist().load(tmp_path).classes == 62


def test_damaged_and_incomplete_files_are_named(tmp_path):
    write_leaf(tmp_path / "leaf")
    path = tmp_path / "leaf" / "train" / "all_data_0.json"
    whole = path.read_bytes()
    for body in (b"", b"not a dataset", whole[: len(whole) // 2]):
        path.write_bytes(body)
        with pytest.raises(DataError, match=path.name) as caught:
            load_dataset("femnist", folder=tmp_path / "leaf")
        assert caught.value.hint
    path.write_bytes(whole)
    for test in (tmp_path / "leaf" / "test").iterdir():
        test.unlink()
    with pytest.raises(DataError, match=r"no test/\*\.json"):
        load_dataset("femnist", folder=tmp_path / "leaf")
    (tmp_path / "npz").mkdir()
    (tmp_path / "npz" / "femnist.npz").write_bytes(b"PK\x03\x04 rubbish")
    with pytest.raises(DataError, match=r"femnist\.npz"):
        load_dataset("femnist", folder=tmp_path / "npz")
