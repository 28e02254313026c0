"""What several tests of the simulator share."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcohort.simulate.data import FashionMnist
from fedcohort.simulate.engine import train_plain
from fedcohort.simulate.models import build_model
from fedcohort.training.local import batch_plan


class PlainClient:
    """One client's data and a module, for computing everything the slow way."""

    def __init__(self, prepared, client, key=None):
        dataset = next(iter(prepared.datasets.values()))
        federation = prepared.federations[key or next(iter(prepared.federations))]
        own = federation.owner == client
        indices, labels = federation.indices[own], federation.labels[own].astype(np.int64)
        train = len(indices) - int(federation.validation[client])
        self.x, self.y = torch.as_tensor(dataset.x_train[indices[:train]]), torch.as_tensor(labels[:train])
        self.x_validation = torch.as_tensor(dataset.x_train[indices[train:]])
        self.y_validation = torch.as_tensor(labels[train:])
        self.classes, self.shape = dataset.classes, dataset.shape
        self.client = client

    def module(self, vector):
        model = build_model("mlp-64", self.shape, self.classes)
        torch.nn.utils.vector_to_parameters(vector.clone(), model.parameters())  # the module keeps it
        return model

    def train(self, vector, local, seed, round_, **extra):
        model = self.module(vector)
        plan = batch_plan(seed, round_, self.client, len(self.x), local)
        train_plain(model, self.x, self.y, plan, local, round=round_, **extra)
        return torch.nn.utils.parameters_to_vector(model.parameters()).detach()

    def loss(self, vector):
        with torch.no_grad():
            return float(F.cross_entropy(self.module(vector)(self.x), self.y))

    def loss_rms(self, vector):
        with torch.no_grad():
            losses = F.cross_entropy(self.module(vector)(self.x), self.y, reduction="none")
        return math.sqrt(sum(float(loss) ** 2 for loss in losses) / len(losses))

    def output_bias(self, vector):
        return list(self.module(vector).parameters())[-1].detach()

    def validation_loss(self, vector):
        with torch.no_grad():
            return float(F.cross_entropy(self.module(vector)(self.x_validation), self.y_validation))

    def pseudo_loss(self, vector, teacher):
        with torch.no_grad():
            guess = self.module(teacher)(self.x).argmax(1)
            return float(F.cross_entropy(self.module(vector)(self.x), guess))

    def gradient(self, vector):
        model = self.module(vector)
        F.cross_entropy(model(self.x), self.y).backward()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


@pytest.fixture
def plain_client():
    """What builds a :class:`PlainClient` from a prepared experiment and a client's number."""
    return PlainClient


@pytest.fixture
def nothing_but_the_test_folder(monkeypatch, tmp_path):
    """No test finds a dataset that happens to be on the machine, unless it asks for it."""
    monkeypatch.delenv("FEDCOHORT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(FashionMnist, "system", "no/such/folder")
