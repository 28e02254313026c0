"""The stacked program that runs on CUDA, here on the CPU without graphs; and, with -m gpu, on CUDA itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcohort.simulate.engine import Engine
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.stacked import FunctionalNet, LayerNet, stack
from fedcohort.simulate.models import build_model

from . import test_engine as common

MODELS = ["mlp", "logistic", "lenet", "fedcor-cnn", f"{common.__name__}:Residual"]


@pytest.fixture
def on_stack(monkeypatch):
    """Let engines compute with the stacked program on the CPU."""
    original = Engine.__init__

    def build(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.backend.close()
        self.kind = "stacked models on cpu"
        self.backend = self._backend(1, "single")
        assert isinstance(self.backend.net, FunctionalNet if self.model.endswith("Residual") else LayerNet)

    monkeypatch.setattr(Engine, "__init__", build)


@pytest.mark.parametrize("rule", ["none", "both"])
@pytest.mark.parametrize("how", common.LOCALS)
@pytest.mark.parametrize("model", MODELS)
def test_stack_equals_plain_loop(on_stack, model, how, rule):
    if rule == "both" and how not in ("steps", "momentum"):
        rule = "prox"
    common.check_against_plain(model, common.LOCALS[how], rule, "cpu")


@pytest.mark.parametrize("model", ["mlp", "lenet", f"{common.__name__}:Residual"])
def test_stack_evaluates(on_stack, model):
    common.check_evaluation(model, "cpu")


@pytest.mark.parametrize("model", ["mlp", "lenet", f"{common.__name__}:Residual"])
def test_stack_augments(on_stack, model):
    common.check_augmentation(model, "cpu")


@pytest.mark.parametrize("rule", ["none", "both"])
@pytest.mark.parametrize("how", ["epochs", "momentum", "robust"])
def test_stack_normalises_batches(on_stack, how, rule):
    check_normalised("cpu", how, rule)


def check_normalised(device, how, rule):
    """Short batches, jobs of different lengths: every statistic is of the samples that are there."""
    model = f"{common.__name__}:Normalised"
    data, clients = common.problem(model, sizes=(37, 5, 64, 20), validation=(0, 0, 4, 0))
    with common.build(data, clients, model, common.LOCALS[how], device) as engine:
        models = torch.stack([engine.init(1), engine.init(2)])
        jobs = common.jobs_of([0, 1, 2, 3, 2], run=[0, 1, 0, 1, 1], rounds=[2] * 5)
        correction = 0.01 * torch.randn(5, engine.n_params, generator=torch.Generator().manual_seed(3))
        options = {"prox": 0.3, "correction": correction.to(engine.device)} if rule == "both" else {}
        trained = engine.train(models, jobs, **options).params
        for job in range(5):
            want, _ = common.reference(engine, clients, models[jobs.run[job]], job, jobs, **options)
            common.assert_equal(trained[job], want, models[jobs.run[job]])
            statistics = slice(-24, None)  # the running means and variances of 4 and 8 channels
            assert torch.allclose(trained[job, statistics].cpu().double(), want[statistics], rtol=1e-4, atol=1e-5)
        # Outside training it is the running statistics that count.
        module = build_model(model, engine.sample, common.CLASSES)
        FlatModel(module).load(trained[0].cpu())
        positions = np.arange(9)
        want = module.double().eval()(engine.inputs(positions).cpu().double())
        assert torch.allclose(engine.logits(trained[:2], positions)[0].cpu().double(), want, rtol=1e-4, atol=1e-5)
        gradient = engine.client_gradients(trained[:1], *(np.zeros(1, np.int64),) * 3)[0].cpu()
        x = engine.inputs(clients.indices[:37]).cpu().double()
        loss = torch.nn.functional.cross_entropy(module(x), torch.from_numpy(clients.labels[:37]))
        grads = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(module.parameters()))])
        assert (gradient[: len(grads)].double() - grads).norm() <= 1e-4 * grads.norm()
        assert (gradient[len(grads) :] == 0).all()


def test_stack_handles_empty_clients_and_nan(on_stack):
    common.test_a_client_without_samples_returns_the_global_model()
    common.test_nan_in_one_job_leaves_the_others_alone("mlp")
    common.test_no_jobs_at_all()


@pytest.mark.parametrize("how", ["momentum", "robust", "augmented"])
def test_stack_takes_steps_per_job(on_stack, how):
    common.check_steps_per_job(how, "cpu")


@pytest.mark.parametrize("model", ["vgg11", "vgg11-bn"])
def test_vgg_is_a_stack_of_layers(model):
    flat = FlatModel(build_model(model, (3, 32, 32), 10).eval())
    net = stack(flat, (3, 32, 32))
    assert isinstance(net, LayerNet)
    vectors = torch.nn.functional.pad(flat.vector().expand(2, -1), (0, 1)).index_select(1, net.order)
    x = torch.randn(2, 3, 3 * 32 * 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = net.logits(vectors, x[:, :, net.features])
        want = flat.module(x.view(6, 3, 32, 32)).view(2, 3, 10)
    assert torch.allclose(logits, want, rtol=1e-4, atol=1e-5)


def test_vgg_with_batch_norm_equals_autograd_in_double_precision():
    """In single precision, it is 1e-5 to 4e-2 from it after a few steps, and so is torch's own loop: rounding decides
    which of two nearly equal pixels is the maximum, and normalisation of a few pixels multiplies the difference.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = build_model("vgg11-bn", (3, 32, 32), 10).train()
        x, y = torch.randn(2, 3, 32, 32).double(), torch.tensor([3, 7])
    flat = FlatModel(module)
    net = stack(flat, (3, 32, 32))
    vectors = torch.nn.functional.pad(flat.vector()[None].double(), (0, 1)).index_select(1, net.order)
    module.double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            saved, gradient = [], torch.zeros(1, net.trainable, dtype=torch.float64)
            logits = net.logits(vectors, x.flatten(1)[None][:, :, net.features], saved, torch.ones(1, 2).double())
            delta = (logits.softmax(2) - torch.nn.functional.one_hot(y, 10)) / 2
            net.backward(vectors, saved, delta, gradient)
            vectors[:, : net.trainable] -= 0.05 * gradient
    is_param = net.order < net.n_params
    got = torch.empty(net.n_params, dtype=torch.float64)
    got[net.order[is_param]] = vectors[0, is_param]
    want = FlatModel(module)
    values = torch.empty(net.n_params, dtype=torch.float64)
    want.store(values)
    assert (got - values).norm() <= 1e-11 * values.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["none", "both"])
@pytest.mark.parametrize("how", common.LOCALS)
@pytest.mark.parametrize("model", MODELS)
def test_cuda_equals_plain_loop(model, how, rule):
    common.check_against_plain(model, common.LOCALS[how], rule, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["momentum", "robust", "augmented"])
def test_cuda_takes_steps_per_job(how):
    common.check_steps_per_job(how, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["mlp", "lenet", f"{common.__name__}:WithBatchNorm"])
def test_cuda_augments(model):
    common.check_augmentation(model, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["epochs", "momentum", "robust"])
def test_cuda_normalises_batches(how):
    check_normalised("cuda", how, "both")


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_cuda_evaluates(model):
    common.check_evaluation(model, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["mlp", "lenet", f"{common.__name__}:WithBatchNorm"])
def test_cuda_is_bit_identical_twice(model):
    data, clients = common.problem(model, sizes=(40, 24, 8), validation=(0, 0, 2))
    results = []
    for _ in range(2):
        with common.build(data, clients, model, common.LOCALS["momentum"], "cuda") as engine:
            trained = engine.train(engine.init(1)[None], common.jobs_of([0, 1, 2]))
            again = engine.train(engine.init(1)[None], common.jobs_of([0, 1, 2]))
            assert torch.equal(trained.params, again.params)
            results.append(trained.params.cpu())
    assert torch.equal(*results)


@pytest.mark.gpu
def test_cuda_follows_changing_shapes_and_rates():
    data, clients = common.problem("mlp")
    local = common.LOCALS["epoch-decay"]
    with common.build(data, clients, "mlp", local, "cuda") as engine:
        models = engine.init(1)[None]
        for round, chosen in enumerate([[0, 1, 2], [3], [0, 1, 2], [4, 2], [2, 1, 0]]):
            jobs = common.jobs_of(chosen, rounds=[round] * len(chosen))
            trained = engine.train(models, jobs)
            for job in range(len(chosen)):
                want, _ = common.reference(engine, clients, models[0], job, jobs)
                common.assert_equal(trained.params[job], want, models[0])
