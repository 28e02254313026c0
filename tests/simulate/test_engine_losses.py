"""Losses of many models at once on the device program equal losses one by one."""

import numpy as np
import pytest
import torch

from fedcohort.simulate.engine import Engine
from fedcohort.simulate.engine.device import DeviceProgram
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.stacked import stack
from fedcohort.simulate.engine.types import ClientData
from fedcohort.simulate.local import LocalTraining
from fedcohort.simulate.models import build_model


@pytest.mark.parametrize("model", ["mlp", "lenet"])
def test_many_models_in_one_batch(model):
    rng = np.random.default_rng(0)
    shape = (32, 32, 3) if model == "lenet" else (28, 28)
    x = rng.integers(0, 255, (120, *shape), dtype=np.uint8)
    y = rng.integers(0, 10, 120)
    offsets = np.array([0, 30, 31, 31, 70, 120])  # ragged, one client empty
    clients = ClientData(np.arange(120), offsets, rng.permutation(y), np.array([5, 0, 0, 9, 10]))
    local = LocalTraining(batch_size=8, steps=1, loss="robust")
    options = {"classes": 10, "federations": [clients], "model": model, "local": local, "device": "cpu"}
    with Engine(x, y, x[:9], y[:9], **options) as engine:
        models = torch.stack([engine.init(seed) for seed in range(5)])
        teachers = torch.stack([engine.init(seed + 50) for seed in range(5)])
        everyone, zeros = np.arange(5), np.zeros(5, np.int64)
        wanted = {"train": True, "validation": True, "robust": True, "pseudo": True, "pseudo_models": teachers}
        want = engine.client_losses(models, everyone, zeros, everyone, **wanted)
        net = stack(FlatModel(build_model(model, engine.sample, 10)), engine.sample)
        device = DeviceProgram(net, engine.store, engine.local, classes=10, device=engine.device)
        queries = engine._queries(everyone, zeros, everyone, 5)
        flags = {"train": True, "validation": True, "robust": True, "pseudo": True}
        many = device.losses(models, queries, flags, teachers)
        for column, name in enumerate(["loss", "validation_loss", "robust_loss", "pseudo_loss"]):
            np.testing.assert_allclose(many[:, column], want[name], rtol=1e-5, equal_nan=True)
        # The same clients under one model go the other way, and must agree with the batch.
        alone = np.full_like(many, np.nan)
        for i in range(5):
            out = torch.full((5, 4), float("nan"), dtype=torch.float64)
            device._losses_of_one(models[i : i + 1], queries, np.array([i]), flags, teachers[i : i + 1], out)
            alone[i] = out[i].numpy()
        np.testing.assert_allclose(alone, many, rtol=1e-5, equal_nan=True)
