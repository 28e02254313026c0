"""Datasets: built-in, synthetic, from files, from arrays, from partitioners of flwr_datasets."""

from fedcohort.simulate.data.dataset import Dataset, from_arrays
from fedcohort.simulate.data.own import FlwrDataset, InMemory, OwnFile, data_section, from_pandas, to_npz
from fedcohort.simulate.data.partitioner import from_flwr_partitioner
from fedcohort.simulate.data.sources import (
    DATASETS,
    Cifar10,
    Digits,
    FashionMnist,
    Mnist,
    Source,
    Synthetic,
    load_dataset,
)

__all__ = [
    "DATASETS",
    "Cifar10",
    "Dataset",
    "Digits",
    "FashionMnist",
    "FlwrDataset",
    "InMemory",
    "Mnist",
    "OwnFile",
    "Source",
    "Synthetic",
    "data_section",
    "from_arrays",
    "from_flwr_partitioner",
    "from_pandas",
    "load_dataset",
    "to_npz",
]
