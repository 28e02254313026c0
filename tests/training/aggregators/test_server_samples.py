"""What the server computes on its samples, against the engine; and unsuitable public data."""

import numpy as np
import pytest
import torch

from fedcohort.core.errors import InputError
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.engine import ClientData, Engine
from fedcohort.simulate.rounds.prepare import prepare
from fedcohort.simulate.rounds.server import ServerSamples, public_samples, server_samples
from fedcohort.training.aggregators import AGGREGATORS
from fedcohort.training.local import LocalTraining

SERVED = [name for name in AGGREGATORS.names() if AGGREGATORS.get(name).needs_server]
DISTILLED = [name for name in SERVED if "public" in AGGREGATORS.get(name).__dataclass_fields__]
EXPERIMENT = {
    "seeds": [3],
    "data": {"name": "synthetic", "samples": 300, "test_samples": 50, "classes": 3, "shape": [4]},
    "scenario": {"partition": {"name": "dirichlet", "clients": 9, "alpha": 0.5}, "server_validation": 6},
    "model": {"name": "logistic"},
    "local": {"batch_size": 8, "steps": 3, "lr": 0.1},
    "run": {"rounds": 3, "cohort": 4, "device": "cpu", "workers": 1},
}


@pytest.fixture
def images():
    draw = np.random.default_rng(5)
    return draw.integers(0, 256, (24, 8, 8), dtype=np.uint8), draw.integers(0, 3, 24)


@pytest.fixture
def engine(images):
    x, y = images
    clients = ClientData(np.arange(24), np.array([0, 10, 24]), y, np.array([0, 0]))
    local = LocalTraining(steps=1, batch_size=4, lr=0.1)
    with Engine(x, y, x, y, classes=3, federations=[clients], model="mlp", local=local, device="cpu") as engine:
        yield engine


class Data:
    def __init__(self, x, y):
        self.x_train, self.y_train = x, y


def test_logits_and_gradients_equal_those_of_the_engine(engine, images):
    mine = server_samples(engine, Data(*images), np.arange(10), None)  # what the first client holds
    models = torch.stack([engine.init(1), engine.init(2)])
    torch.testing.assert_close(mine.logits(models), engine.logits(models, np.arange(10)), rtol=1e-4, atol=1e-5)
    zeros = np.zeros(2, np.int64)
    want = engine.client_gradients(models, np.arange(2), zeros, zeros)
    for model, gradient in zip(models, want, strict=True):
        got = mine.gradient(model, mine.labels, np.arange(10))
        torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-6)
    assert not models.requires_grad


def test_gradients_of_soft_targets_by_finite_differences(engine, images):
    mine = server_samples(engine, Data(*images), np.arange(10), None)
    model, places = engine.init(1), np.array([7, 2, 5])
    targets = torch.softmax(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)), dim=1)

    def loss(vector):
        return -(targets * mine.logits(vector[None])[0, places].log_softmax(1)).sum(1).mean()

    gradient = mine.gradient(model, targets, places)
    direction = gradient / gradient.norm()
    numeric = (loss(model + 1e-2 * direction) - loss(model - 1e-2 * direction)) / 2e-2
    torch.testing.assert_close(numeric, gradient.norm(), rtol=1e-2, atol=1e-4)


def test_batches_are_passes_and_depend_on_the_round(engine, images):
    mine = server_samples(engine, Data(*images), np.arange(10), None)
    batches = [batch.tolist() for batch in mine.in_round(1, 4).batches(4, 5)]
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4]
    assert sorted(place for batch in batches[:3] for place in batch) == list(range(10))
    assert batches == [batch.tolist() for batch in mine.in_round(1, 4).batches(4, 5)]
    assert batches != [batch.tolist() for batch in mine.in_round(1, 5).batches(4, 5)]
    assert batches != [batch.tolist() for batch in mine.in_round(2, 4).batches(4, 5)]
    assert [len(batch) for batch in mine.batches(500, 3)] == [10, 10, 10]


class Normalised(torch.nn.Module):
    """A model that keeps running statistics."""

    def __init__(self, sample, classes):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(sample[0])
        self.out = torch.nn.Linear(sample[0], classes)

    def forward(self, x):
        return self.out(self.norm(x))


def test_running_statistics_get_no_gradient(monkeypatch):
    build = "fedcohort.simulate.engine.engine.build_model"
    monkeypatch.setattr(build, lambda name, sample, classes, **more: Normalised(sample, classes))
    x, y = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32), np.arange(12) % 3
    clients = ClientData(np.arange(12), np.array([0, 12]), y, np.array([0]))
    local = LocalTraining(steps=1, batch_size=4, lr=0.1)
    with Engine(x, y, x, y, classes=3, federations=[clients], model="own", local=local, device="cpu") as engine:
        mine = server_samples(engine, Data(x, y), np.arange(12), None)
        model = engine.init(0)
        gradient = mine.gradient(model, mine.labels, np.arange(12))
    trainable = 2 * 4 + 3 * 4 + 3
    assert gradient[:trainable].abs().sum() > 0
    assert len(gradient) == trainable + 8
    assert (gradient[trainable:] == 0).all()


def test_samples_of_another_shape_are_refused(engine):
    with pytest.raises(InputError, match=r"\(1, 8, 8\).*\(1, 7, 8\)"):
        ServerSamples(engine, torch.zeros(5, 1, 7, 8), None)


def test_unlabelled_samples_have_no_labels(engine):
    with pytest.raises(InputError, match="unlabelled"):
        _ = ServerSamples(engine, torch.zeros(5, 1, 8, 8), None).labels


def test_public_images_are_standardised_like_the_training_set(engine, images, tmp_path):
    x, _ = images
    np.save(tmp_path / "public.npy", x[3:9])
    got = public_samples(tmp_path / "public.npy", x, engine.sample)
    torch.testing.assert_close(got, engine.inputs(np.arange(3, 9)))
    colours = np.random.default_rng(1).integers(0, 256, (7, 5, 4, 3), dtype=np.uint8)
    np.save(tmp_path / "colours.npy", colours[:2])
    got = public_samples(tmp_path / "colours.npy", colours, (3, 5, 4)).numpy()
    flat = colours.reshape(-1, 3).astype(float)
    want = ((colours[:2] - flat.mean(0)) / flat.std(0)).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        (np.zeros((5, 8, 7), np.uint8), r"shape \(n, 8, 8\).*Got an array of shape \(5, 8, 7\)"),
        (np.zeros((5, 64), np.uint8), r"Got an array of shape \(5, 64\)"),
        (np.zeros((0, 8, 8), np.uint8), "n at least 1"),
        (np.zeros((5, 8, 8)), r"must be bytes \(uint8\).*Got float64"),
        (np.zeros((5, 8, 8), "U3"), "must be bytes"),
    ],
)
def test_public_data_of_another_type_are_an_error(images, tmp_path, samples, says):
    np.save(tmp_path / "public.npy", samples)
    with pytest.raises(InputError, match=says):
        public_samples(tmp_path / "public.npy", images[0], (1, 8, 8))


def test_unreadable_public_files_are_an_error(images, tmp_path):
    with pytest.raises(InputError, match=r"gone\.npy"):
        public_samples(tmp_path / "gone.npy", images[0], (1, 8, 8))
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(InputError, match="read"):
        public_samples(tmp_path / "text.npy", images[0], (1, 8, 8))
    np.savez(tmp_path / "several.npz", a=np.zeros(3))
    with pytest.raises(InputError, match="several"):
        public_samples(tmp_path / "several.npz", images[0], (1, 8, 8))
    np.save(tmp_path / "nan.npy", np.full((2, 4), np.nan))
    with pytest.raises(InputError, match="NaN"):
        public_samples(tmp_path / "nan.npy", np.zeros((3, 4)), (4,))


def after_three_rounds(aggregator, **changes):
    config = {**EXPERIMENT, **changes, "selectors": {"uniform": {"aggregator": aggregator}}}
    group = prepare(Experiment.from_dict(config)).group(0, journals=None, device="cpu", workers=1)
    group.start()
    while not group.done:
        group.step()
    model = group.models[0].numpy().copy()
    group.close()
    return model


@pytest.mark.parametrize("name", DISTILLED)
def test_a_public_file_equals_the_same_samples_at_the_server(tmp_path, name):
    prepared = prepare(Experiment.from_dict({**EXPERIMENT, "selectors": {"uniform": {}}}))
    (data,), (federation,) = prepared.datasets.values(), prepared.federations.values()
    np.save(tmp_path / "public.npy", data.x_train[federation.server_validation])
    own = after_three_rounds({"name": name})
    public = after_three_rounds({"name": name, "public": str(tmp_path / "public.npy")})
    np.testing.assert_array_equal(public, own)
    np.save(tmp_path / "other.npy", 3 * data.x_train[:40])
    other = after_three_rounds({"name": name, "public": str(tmp_path / "other.npy")})
    assert np.abs(other - own).max() > 1e-6


@pytest.mark.parametrize("name", SERVED)
def test_a_server_without_samples_is_refused_at_the_start(name):
    scenario = {"partition": {"name": "dirichlet", "clients": 9, "alpha": 0.5}}
    table = {**EXPERIMENT, "scenario": scenario, "selectors": {"uniform": {"aggregator": {"name": name}}}}
    with pytest.raises(InputError, match=f"'{name}'") as raised:
        prepare(Experiment.from_dict(table))
    assert "scenario.server_validation" in raised.value.hint


def test_public_data_of_another_shape_end_an_experiment_before_it_starts(tmp_path):
    np.save(tmp_path / "public.npy", np.zeros((5, 9)))
    with pytest.raises(InputError, match=r"\(5, 9\)"):
        after_three_rounds({"name": "feddf", "public": str(tmp_path / "public.npy")})
