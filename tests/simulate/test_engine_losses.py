"""Losses of many models at once on the device program equal losses one by one."""

import numpy as np
import pytest
import torch

from fedcohort.core.signals import LossMeasure
from fedcohort.simulate.engine import Engine
from fedcohort.simulate.engine.device import DeviceProgram
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.stacked import stack
from fedcohort.simulate.engine.types import ClientData
from fedcohort.simulate.models import build_model
from fedcohort.training.local import LocalTraining


@pytest.mark.parametrize("model", ["mlp", "lenet"])
def test_many_models_in_one_batch(model, monkeypatch):
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
        measures = [
            LossMeasure(part, loss) for part in ("train", "validation") for loss in ("label", "robust", "pseudo")
        ]
        net = stack(FlatModel(build_model(model, engine.sample, 10)), engine.sample)
        device = DeviceProgram(net, engine.store, engine.local, classes=10, device=engine.device)
        # Each its own model: all in one batch. All the same model: one pass over all clients.
        for run in (everyone, 0 * everyone):
            want = engine.measure(models, run, zeros, everyone, measures, pseudo_models=teachers)
            with monkeypatch.context() as patch:
                patch.setattr(engine, "backend", device)
                got = engine.measure(models, run, zeros, everyone, measures, pseudo_models=teachers)
            for measure in measures:
                np.testing.assert_allclose(got[measure], want[measure], rtol=1e-5, equal_nan=True)
