"""Data without files: built-in, synthetic, arrays, partitioners; and the real datasets if they are installed."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from fedcohort.core.errors import DataError, InputError, MissingExtraError, ParameterError, UnknownNameError
from fedcohort.core.params import parameters
from fedcohort.scenario import Scenario, preset
from fedcohort.scenario.predefined import Natural
from fedcohort.simulate.data import (
    DATASETS,
    Synthetic,
    from_arrays,
    from_flwr_partitioner,
    load_dataset,
)

RNG = np.random.default_rng(0)


pytestmark = pytest.mark.usefixtures("nothing_but_the_test_folder")


# --- embedded and synthetic


def test_digits_have_a_fixed_even_split():
    pytest.importorskip("sklearn")
    dataset = load_dataset("digits")
    assert len(dataset.y_train) + len(dataset.y_test) == 1797 and dataset.shape == (8, 8)
    assert dataset.x_train.dtype == np.uint8 and dataset.x_train.max() == 255
    train, test = np.bincount(dataset.y_train), np.bincount(dataset.y_test)
    assert (np.abs(test - (train + test) / 5) < 1).all()
    assert dataset.y_test[:10].tolist() == load_dataset("digits").y_test[:10].tolist()
    # grey values 0 .. 16 are still distinct
    assert len(np.unique(dataset.x_train)) == 17


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"fedcohort\[sim\]"):
        load_dataset("digits")


def nearest_centre_accuracy(dataset, classes):
    centres = np.stack([dataset.x_train[dataset.y_train == c].mean(axis=0) for c in range(classes)])
    distance = ((dataset.x_test[:, None, :] - centres) ** 2).sum(axis=2)
    return (distance.argmin(axis=1) == dataset.y_test).mean()


def test_accuracy_falls_with_difficulty():
    accuracy = [
        nearest_centre_accuracy(load_dataset("synthetic", difficulty=d, modes=1, samples=2000, test_samples=1000), 10)
        for d in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    assert accuracy[0] > 0.99
    assert all(a > b + 0.01 for a, b in itertools.pairwise(accuracy))
    assert accuracy[-1] == pytest.approx(0.1, abs=0.04)


def test_synthetic_any_size_and_seed():
    dataset = load_dataset("synthetic", samples=7, test_samples=3, classes=3, shape=(4, 4, 3), seed=9)
    assert dataset.x_train.shape == (7, 4, 4, 3) and dataset.x_train.dtype == np.float32
    assert np.bincount(dataset.y_train, minlength=3).tolist() == [3, 2, 2]
    again, other = Synthetic(samples=7, seed=9).load(), Synthetic(samples=7, seed=10).load()
    assert np.array_equal(again.x_train, Synthetic(samples=7, seed=9).load().x_train)
    assert not np.array_equal(again.x_train, other.x_train)
    # training and test samples come from the same centres but are not the same draws
    assert not np.isin(again.x_train, again.x_test).any()


def test_names_and_parameters_are_checked():
    assert set(DATASETS.names()) >= {"digits", "synthetic", "mnist", "fashion-mnist", "cifar10"}
    with pytest.raises(UnknownNameError, match="'cifar10'"):
        load_dataset("cifar-10")
    with pytest.raises(ParameterError, match="'check'"):
        load_dataset("mnist", chekc=False)
    for name in ("synthetic", "mnist"):
        for info in parameters(DATASETS.get(name)):
            for bad in info.constraint.bad_values():
                with pytest.raises(ParameterError, match=f"'{info.name}'"):
                    load_dataset(name, **{info.name: bad})


# --- arrays


def test_arrays_with_a_test_set():
    dataset = from_arrays(np.zeros((4, 2), np.int16), [0, 1, 2, 0], np.ones((2, 2)), [1, 4], name="mine", classes=5)
    assert dataset.classes == 5 and dataset.name == "mine" and dataset.x_train.dtype == np.float32
    images = np.zeros((4, 3, 3), np.uint8)
    assert from_arrays(images, [0, 1, 0, 1], images, [0, 1, 0, 1]).x_train.dtype == np.uint8


def test_arrays_without_a_test_set_are_split_by_class():
    x = np.arange(200, dtype=np.float32)[:, None]
    y = np.repeat([0, 1], [150, 50])
    dataset = from_arrays(x, y, test_share=0.1, seed=3, writers=np.arange(200))
    assert np.bincount(dataset.y_test).tolist() == [15, 5]
    seen = np.concatenate([dataset.x_train[:, 0], dataset.x_test[:, 0]])
    assert sorted(seen) == list(range(200))
    assert np.array_equal(dataset.writers, dataset.x_train[:, 0]) and np.array_equal(
        dataset.writers_test, dataset.x_test[:, 0]
    )
    assert not np.array_equal(dataset.x_test, from_arrays(x, y, test_share=0.1, seed=4).x_test)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x": np.zeros((3, 2)), "y": [0, 1]}, "Got"),
        ({"x": np.zeros(3), "y": [0, 1, 0]}, "Got"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0, int)}, "n > 0"),
        ({"x": np.zeros((3, 2)), "y": [0.0, 1.0, 0.5]}, "whole numbers"),
        ({"x": np.zeros((3, 2)), "y": [0, -1, 0], "classes": 2}, "Got -1"),
        ({"x": np.array([["a"]]), "y": [0]}, "numbers"),
        ({"x": np.full((10, 2), np.nan), "y": [0] * 10}, "NaN"),
        ({"x": np.zeros((3, 2)), "y": [0, 1, 0], "x_test": np.zeros((1, 2))}, "missing"),
        ({"x": np.zeros((3, 2)), "y": [0, 1, 0], "x_test": np.zeros((1, 3)), "y_test": [0]}, "one shape"),
        ({"x": np.zeros((10, 2)), "y": [0] * 10, "test_share": 1.5}, "test_share"),
        ({"x": np.zeros((2, 2)), "y": [0, 1]}, "nothing to test on"),
        ({"x": np.zeros((10, 2)), "y": [0] * 9 + [3], "classes": 2}, r"0 \.\. 1"),
        (
            {"x": np.zeros((10, 2)), "y": [0] * 10, "classes": 1, "class_names": ["a", "b"]},
            "2 class names",
        ),
        ({"x": np.zeros((10, 2)), "y": [0] * 10, "writers": [0]}, "one writer"),
        ({"x": np.zeros((10, 2)), "y": [0] * 10, "writers": [5] * 10, "writer_names": ["a"]}, "writer 5"),
    ],
)
def test_bad_arrays(arguments, words):
    with pytest.raises(InputError, match=words):
        from_arrays(**arguments)


# --- partitioners of flwr_datasets


class FakePartitioner:
    """The part of a flwr_datasets partitioner that is used: partitions are tables of columns."""

    def __init__(self, parts):
        self.parts = parts

    @property
    def num_partitions(self):
        return len(self.parts)

    def load_partition(self, partition_id):
        return self.parts[partition_id]


def parts(sizes=(10, 20, 5)):
    partitions, start = [], 0
    for k, n in enumerate(sizes):
        images = [np.full((4, 4), start + i, np.uint8) for i in range(n)]
        partitions.append({"img": images, "fine": [k] * n})
        start += n
    return partitions


def test_partitioner_keeps_its_clients():
    dataset = from_flwr_partitioner(FakePartitioner(parts()), "img", "fine", test_share=0.2)
    assert len(dataset.y_train) == 28 and len(dataset.y_test) == 7 and dataset.shape == (4, 4)
    federation = Scenario(partition=Natural()).build(dataset.y_train, dataset.classes, 0, writers=dataset.writers)
    assert federation.label_counts().tolist() == [[8, 0, 0], [0, 16, 0], [0, 0, 4]]
    everything = sorted([*dataset.x_train[:, 0, 0], *dataset.x_test[:, 0, 0]])
    assert everything == list(range(35))


def test_partitioner_with_a_test_set():
    test = {"img": [np.zeros((4, 4), np.uint8)] * 3, "fine": [0, 1, 2]}
    dataset = from_flwr_partitioner(FakePartitioner(parts()), "img", "fine", test=test)
    assert len(dataset.y_train) == 35 and len(dataset.y_test) == 3
    assert np.bincount(dataset.writers).tolist() == [10, 20, 5]


@pytest.mark.parametrize(
    ("partitions", "keys", "words"),
    [
        ([], ("img", "fine"), "partition"),
        (parts(), ("image", "fine"), "'image'.* img, fine"),
        (parts(), ("img", "label"), "'label'"),
        ([{"img": [], "fine": []}], ("img", "fine"), "empty"),
        ([{"img": [np.zeros(2), np.zeros(3)], "fine": [0, 1]}], ("img", "fine"), "shape"),
        ([{"img": [np.zeros((2, 2))], "fine": [0, 1]}], ("img", "fine"), "1 samples"),
    ],
)
def test_bad_partitioners(partitions, keys, words):
    with pytest.raises(InputError, match=words):
        from_flwr_partitioner(FakePartitioner(partitions), *keys)


def test_bad_test_share_of_a_partitioner():
    with pytest.raises(InputError, match="test_share"):
        from_flwr_partitioner(FakePartitioner(parts()), "img", "fine", test_share=0.0)


# --- the real datasets, if they are installed


def real(name, monkeypatch):
    monkeypatch.undo()
    try:
        return load_dataset(name)
    except DataError as error:
        if "was not found" in error.message:
            pytest.skip(f"{name} is not on this machine; FEDCOHORT_DATA names a folder")
        raise


def test_real_fashion_mnist(monkeypatch):
    dataset = real("fashion-mnist", monkeypatch)
    assert np.bincount(dataset.y_train).tolist() == [6000] * 10 and np.bincount(dataset.y_test).tolist() == [1000] * 10
    federation = preset("fedcor-1spc").build(dataset.y_train, dataset.classes, 0)
    assert (federation.sizes == 600).all()


def test_real_cifar10(monkeypatch):
    dataset = real("cifar10", monkeypatch)
    assert np.bincount(dataset.y_train).tolist() == [5000] * 10 and np.bincount(dataset.y_test).tolist() == [1000] * 10
    means = dataset.x_train.reshape(-1, 3).mean(axis=0) / 255
    assert means == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)


def test_real_femnist(monkeypatch):
    dataset = real("femnist", monkeypatch)
    federation = preset("fedcbs-femnist").build(
        dataset.y_train, dataset.classes, 0, writers=dataset.writers, writer_names=dataset.writer_names
    )
    assert len(federation) == len(np.unique(dataset.writers)) and federation.sizes.sum() == len(dataset.y_train)
    assert dataset.classes == 62


def test_importing_datasets_needs_no_optional_package():
    code = (
        "import sys, fedcohort.simulate.data; "
        "print([m for m in ('torch', 'sklearn', 'pyarrow', 'datasets', 'PIL') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
