"""Data loaded by flwr_datasets, from a folder of Parquet files (nothing is downloaded)."""

import os

import numpy as np
import pytest

from fedcohort.core.errors import DataError, InputError
from fedcohort.scenario import Scenario
from fedcohort.scenario.predefined import Natural
from fedcohort.simulate.data import from_flwr_partitioner, load_dataset

os.environ.update(HF_HUB_OFFLINE="1", FLWR_TELEMETRY_ENABLED="0")  # read when they are imported
datasets = pytest.importorskip("datasets")
partitioners = pytest.importorskip("flwr_datasets.partitioner")


def made(samples, seed):
    """Images by seven writers whose brightness is their class."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    y = rng.integers(0, 10, samples)
    images = [Image.fromarray((rng.random((8, 8)) * 10 + 20 * label).astype(np.uint8)) for label in y]
    columns = {"image": images, "label": y.tolist(), "writer": [f"w{i % 7}" for i in range(samples)]}
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=list("0123456789")),
            "writer": datasets.Value("string"),
        }
    )
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    (tmp_path / "mine").mkdir()
    made(350, 0).to_parquet(tmp_path / "mine" / "train-0.parquet")
    made(70, 1).to_parquet(tmp_path / "mine" / "test-0.parquet")
    return tmp_path / "mine"


@pytest.mark.parametrize("library", ["flwr", "huggingface"])
def test_a_dataset_by_name(library, folder):
    dataset = load_dataset(library, dataset=str(folder), client="writer")
    assert dataset.x_train.shape == (350, 8, 8) and dataset.x_train.dtype == np.uint8 and len(dataset.y_test) == 70
    assert dataset.writer_names == tuple(f"w{i}" for i in range(7))
    assert (dataset.x_train.reshape(350, -1).min(axis=1) // 20 == dataset.y_train).all()


def test_a_dataset_that_cannot_be_loaded_is_an_error(folder):
    with pytest.raises(DataError, match="flwr_datasets"):
        load_dataset("flwr", dataset=str(folder), test="validation")
    with pytest.raises(InputError, match="image, label, writer"):
        load_dataset("flwr", dataset=str(folder), client="person")


@pytest.mark.parametrize(
    "partitioner",
    [
        partitioners.IidPartitioner(num_partitions=5),
        partitioners.DirichletPartitioner(num_partitions=5, partition_by="label", alpha=0.5, seed=3),
        partitioners.NaturalIdPartitioner(partition_by="writer"),
    ],
    ids=lambda p: type(p).__name__,
)
def test_partitioners_keep_their_clients(partitioner):
    partitioner.dataset = made(350, 0)
    dataset = from_flwr_partitioner(partitioner, test=made(70, 1))
    federation = Scenario(partition=Natural()).build(dataset.y_train, dataset.classes, 0, writers=dataset.writers)
    theirs = [np.bincount(partitioner.load_partition(k)["label"], minlength=10) for k in range(len(federation))]
    np.testing.assert_array_equal(federation.label_counts(), theirs)
