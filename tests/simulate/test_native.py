"""Training in machine code: any network it accepts trains as torch's own loop does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedcohort.core.signals import LossMeasure
from fedcohort.simulate.engine import Engine
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.jobs import JobTable
from fedcohort.simulate.engine.layers import read_layers
from fedcohort.simulate.engine.library import load_compiled
from fedcohort.simulate.engine.native import NativeBackend, describe
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.engine.types import ClientData, Jobs, Spans
from fedcohort.training.local import LocalTraining, batch_plan


@pytest.fixture(autouse=True)
def library():
    if load_compiled("train") is None:
        pytest.skip("no C compiler")


def described(module, sample):
    return describe(FlatModel(module), sample, LocalTraining(steps=1))


@st.composite
def networks(draw):
    """A random chain of convolutions and dense layers, and the shape of its input."""
    layers: list[nn.Module] = []
    sample = (draw(st.integers(1, 5)), draw(st.integers(6, 17)), draw(st.integers(6, 17)))
    shape = sample
    for _ in range(draw(st.integers(0, 3))):
        kernel = (draw(st.integers(1, 5)), draw(st.integers(1, 5)))
        padding = (draw(st.integers(0, kernel[0] - 1)), draw(st.integers(0, kernel[1] - 1)))
        result = tuple(side + 2 * pad - k + 1 for side, pad, k in zip(shape[1:], padding, kernel, strict=True))
        if min(result) < 1:
            break
        outputs = draw(st.integers(1, 20))
        layers.append(nn.Conv2d(shape[0], outputs, kernel, padding=padding))
        window = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
        after: list[nn.Module] = [nn.ReLU()] if draw(st.booleans()) else []
        if min(result[0] // window[0], result[1] // window[1]) >= 1 and window != (1, 1):
            after.insert(draw(st.integers(0, len(after))), nn.MaxPool2d(window))
            result = (result[0] // window[0], result[1] // window[1])
        layers += after
        shape = (outputs, *result)
    layers.append(nn.Flatten())
    width = int(np.prod(shape))
    for outputs in draw(st.lists(st.integers(1, 140), max_size=2)):
        layers += [nn.Linear(width, outputs), nn.ReLU()]
        width = outputs
    layers.append(nn.Linear(width, draw(st.integers(2, 70))))
    return sample, layers


# Always the same networks: about one in a thousand has two pixels of a window so near to each other that single
# precision gives the derivative to the wrong one.
@settings(max_examples=60, deadline=None, derandomize=True)
@given(networks(), st.integers(0, 2**31), st.sampled_from([0.0, 0.9]), st.integers(1, 70))
def test_any_network_it_accepts_equals_autograd(network, seed, momentum, batch_size):
    sample, layers = network
    torch.manual_seed(seed)
    module = nn.Sequential(*layers)
    for layer in module:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    flat = FlatModel(module)
    local = LocalTraining(steps=3, batch_size=batch_size, lr=0.01, momentum=momentum, weight_decay=0.01)
    classes = flat.slots[-1].shape[0]
    n = 75
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(n, int(np.prod(sample)))).astype(np.float32)
    y = generator.integers(0, classes, n)
    clients = ClientData(np.arange(n), np.array([0, n]), y, np.zeros(1, np.int64))
    store = Store(x, x[:1], y[:1], [clients])
    backend = NativeBackend(store, local, describe(flat, sample, local), 1)
    start = flat.vector()[None]

    zero = np.zeros(1, np.int64)
    table = JobTable.of(Jobs(zero, zero, zero, zero, zero), store.spans(zero, zero, zero), store, local)
    out = backend.train(table, start, 0.0, None)
    scores = backend.outputs(start, slice(0, n))[0]
    gradient = backend.gradients(start, Spans(zero, zero, zero + n))[0]

    module.double()
    images, labels = store.x[:n].double().view(n, *sample), torch.from_numpy(y)
    logits = module(images)
    assert torch.allclose(scores.double(), logits, rtol=1e-4, atol=1e-5)
    grads = torch.autograd.grad(nn.functional.cross_entropy(logits, labels), list(module.parameters()))
    want = torch.cat([g.reshape(-1) for g in grads])
    assert (gradient.double() - want).norm() <= 1e-4 * want.norm() + 1e-7
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=momentum, weight_decay=0.01)
    indices, counts = batch_plan(0, 0, 0, n, local)
    for row, count in zip(indices, counts, strict=True):
        batch = torch.from_numpy(row[:count])
        loss = nn.functional.cross_entropy(module(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    end = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    # Where two pixels of a window tie in single precision the derivative may go to either of them.
    assert (out[0].double() - end).norm() <= 1e-3 * (end - start[0].double()).norm() + 1e-6


def test_a_layer_that_stands_in_several_places_counts_in_each():
    relu, square = nn.ReLU(), nn.Linear(6, 6)
    once = described(nn.Sequential(nn.Linear(4, 6), relu, square, relu, nn.Linear(6, 2)), (4,))
    assert once["width"][:4].tolist() == [4, 6, 6, 2]
    apart = described(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), square, nn.ReLU(), nn.Linear(6, 2)), (4,))
    assert once == apart
    shared = nn.Sequential(nn.Linear(4, 6), relu, square, relu, square, relu, nn.Linear(6, 2))
    assert read_layers(FlatModel(shared), (4,)) is None  # one weight, two layers: no stack


def engine(threads, **options):
    generator = np.random.default_rng(0)
    x = generator.integers(0, 256, (300, 8, 8), dtype=np.uint8)
    y = generator.integers(0, 4, 300)
    clients = ClientData(np.arange(300), np.arange(0, 301, 30), y, np.full(10, 5))
    return Engine(
        x, y, x, y, classes=4, federations=[clients], model="mlp", device="cpu", workers=threads,
        local=LocalTraining(epochs=2, batch_size=8, lr=0.1, **options),
    )  # fmt: skip


@pytest.mark.parametrize("loss", ["cross-entropy", "robust"])
def test_the_number_of_threads_changes_nothing(loss):
    zeros = np.zeros(40, np.int64)
    jobs = Jobs(zeros, zeros, np.arange(40) % 10, zeros, np.arange(40) // 10)
    everyone = np.arange(10)
    found = []
    for threads in (1, 2, 7, 600):
        with engine(threads, loss=loss) as one:
            assert isinstance(one.backend, NativeBackend)
            models = torch.stack([one.init(0), one.init(1)])
            trained = one.train(models, jobs)
            measures = [LossMeasure(part, loss) for part in ("train", "validation") for loss in ("label", "robust")]
            numbers = one.measure(models, everyone % 2, 0 * everyone, everyone, measures)
            gradients = one.client_gradients(models, everyone % 2, 0 * everyone, everyone)
            found.append([trained.params, gradients, *numbers.values(), *one.evaluate(models)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_torch_gets_its_threads_back():
    before = torch.get_num_threads()
    with engine(2):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_one_bad_model_does_not_spoil_the_losses_of_the_others():
    with engine(2) as one:
        models = torch.stack([one.init(0), torch.full((one.n_params,), torch.nan)])
        run, client = np.array([0, 1, 0]), np.array([3, 4, 5])
        measures = [LossMeasure(), LossMeasure("validation")]
        mixed = one.measure(models, run, 0 * run, client, measures)
        alone = one.measure(models[:1], 0 * run, 0 * run, client, measures)
    for measure in measures:
        np.testing.assert_array_equal(mixed[measure][[0, 2]], alone[measure][[0, 2]])
        assert np.isnan(mixed[measure][1])


def test_the_description():
    module = nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(6, 16, (5, 3), padding=(1, 0)), nn.Flatten(),
        nn.Linear(2304, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip
    record = described(module, (3, 32, 32))
    assert (record["convolutions"], record["layers"]) == (2, 2)
    assert record["kernel"][:2].tolist() == [(3, 32, 32, 6, 5, 5, 0, 0, 2, 2, 1), (6, 14, 14, 16, 5, 3, 1, 0, 1, 1, 0)]
    assert record["width"][:3].tolist() == [2304, 84, 10]
    record = described(nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), (3, 2, 2))
    assert (record["convolutions"], record["layers"], *record["width"][:2]) == (0, 1, 12, 5)


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)],
        [nn.Conv2d(1, 2, 3), nn.Flatten(), nn.ReLU(), nn.Linear(128, 3)],
        [nn.Flatten(), nn.Linear(100, 4), nn.Linear(4, 3)],
    ],
)
def test_what_it_cannot_do_is_left_to_torch(layers):
    assert described(nn.Sequential(*layers), (1, 10, 10)) is None
