"""The batched engine against the plain loop, client by client."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

from fedcohort.core.errors import DeviceError
from fedcohort.core.signals import LossMeasure
from fedcohort.simulate.engine import ClientData, Engine, Jobs, train_plain
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.library import load_compiled
from fedcohort.simulate.engine.plain import pseudo_labels, robust_loss
from fedcohort.simulate.engine.types import HeldOut
from fedcohort.simulate.models import build_model
from fedcohort.training.local import LocalTraining, batch_plan, crop_plan

CLASSES = 5


class WithBatchNorm(nn.Module):
    """A user's model with state of its own."""

    def __init__(self, input_shape, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        return self.head(self.body(x))


class Normalised(nn.Sequential):
    """A user's stack of known layers with batch normalisation."""

    def __init__(self, input_shape, classes):
        super().__init__(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(36, 8), nn.BatchNorm1d(8, momentum=0.3, eps=1e-3), nn.ReLU(), nn.Linear(8, classes),
        )  # fmt: skip


class WithDropout(nn.Sequential):
    """A user's model that draws random numbers."""

    def __init__(self, input_shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), 8), nn.Dropout(0.5), nn.Linear(8, classes))


class Residual(nn.Module):
    """A user's model that is no stack of layers."""

    def __init__(self, input_shape, classes):
        super().__init__()
        self.inner = nn.Linear(int(np.prod(input_shape)), 16)
        self.outer = nn.Linear(16, 16)
        self.head = nn.Linear(16, classes, bias=False)

    def forward(self, x):
        h = torch.tanh(self.inner(x.flatten(1)))
        return self.head(h + torch.relu(self.outer(h)))


def federation(sizes, samples, classes, seed=0, validation=None):
    generator = np.random.default_rng(seed)
    total = int(np.sum(sizes))
    return ClientData(
        indices=generator.permutation(samples)[:total] if total <= samples else generator.integers(0, samples, total),
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        labels=generator.integers(0, classes, total),
        validation=np.zeros(len(sizes), np.int64) if validation is None else np.asarray(validation),
    )


SHAPES = {"lenet": (20, 20, 3), "fedcor-cnn": (20, 20, 1), "vgg11": (32, 32, 3)}


def problem(model, sizes=(37, 5, 64, 1, 20), validation=(0, 0, 4, 0, 3), n=200, seed=0):
    generator = np.random.default_rng(seed)
    shape = SHAPES.get(model, (6, 6))
    x = generator.integers(0, 256, (n, *shape), dtype=np.uint8)
    y = generator.integers(0, CLASSES, n)
    clients = federation(sizes, n, CLASSES, seed, validation)
    return (x, y, x[:50], y[:50]), clients


def jobs_of(clients, *, rounds=None, run=None, seed=None, steps=None):
    clients = np.asarray(clients)
    zeros = np.zeros(len(clients), np.int64)
    return Jobs(
        run=zeros if run is None else np.asarray(run),
        federation=zeros,
        client=clients,
        round=zeros if rounds is None else np.asarray(rounds),
        seed=zeros if seed is None else np.asarray(seed),
        steps=None if steps is None else np.asarray(steps),
    )


def reference(engine, clients, vector, job, jobs, *, prox=0.0, correction=None):
    """Train one job with the plain loop in double precision."""
    module = build_model(engine.model, engine.sample, CLASSES)
    flat = FlatModel(module)
    flat.load(vector.cpu())
    module.double()
    client = int(jobs.client[job])
    start, stop = clients.offsets[client], clients.offsets[client + 1] - clients.validation[client]
    rows = engine.inputs(clients.indices[start:stop]).cpu().double()
    y = torch.from_numpy(clients.labels[start:stop])
    largest = int((np.diff(clients.offsets) - clients.validation).max())
    n = int(stop - start)
    local = engine.local
    steps = local.steps_for(n, largest) if jobs.steps is None else int(jobs.steps[job])
    key = int(jobs.seed[job]), int(jobs.round[job]), client
    plan = batch_plan(*key, n, local, steps)
    train_plain(
        module,
        rows,
        y,
        plan,
        local,
        round=int(jobs.round[job]),
        batches_per_epoch=local.batches_per_epoch(largest if local.epochs_of_largest else n),
        prox=prox,
        correction=None if correction is None else correction[job].cpu().double(),
        crops=crop_plan(int(jobs.seed[job]), int(jobs.round[job]), client, plan.indices.shape)
        if local.augment
        else None,
    )
    parts = [p.detach().reshape(-1) for p in module.parameters()]
    parts += [b.reshape(-1) for b in module.buffers() if b.is_floating_point()]
    return torch.cat(parts), plan


def assert_equal(got, want, start):
    got, want, start = got.cpu().double(), want.double(), start.cpu().double()
    assert (got - want).norm() <= 1e-5 * want.norm()
    # The update is small beside the weights: hold it to account too (single against double precision).
    assert (got - want).norm() <= 1e-3 * (want - start).norm() + 1e-6


LOCALS = {
    "steps": LocalTraining(steps=7, batch_size=16, lr=0.05, weight_decay=1e-3),
    "epochs": LocalTraining(epochs=2, batch_size=16, lr=0.05, lr_decay=0.9),
    "largest": LocalTraining(epochs_of_largest=1, batch_size=16, lr=0.05, lr_decay_epoch=0.9, milestones=(1,)),
    "epoch-decay": LocalTraining(epochs=3, batch_size=16, lr=0.05, lr_decay_epoch=0.7),
    "momentum": LocalTraining(steps=7, batch_size=16, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "robust": LocalTraining(steps=5, batch_size=16, lr=0.05, loss="robust", robust_alpha=0.7, robust_beta=1.3),
    "robust-pseudo": LocalTraining(
        steps=5,
        batch_size=16,
        lr=0.05,
        loss="robust",
        robust_alpha=0.7,
        robust_beta=1.3,
        robust_reverse="pseudo-labels",
    ),
    "augmented": LocalTraining(steps=7, batch_size=16, lr=0.05, augment=True),
}
MODELS = ["mlp", "mlp-64", "logistic", "lenet", "fedcor-cnn", f"{__name__}:Residual"]


def build(data, clients, model, local, device="cpu", **kwargs):
    kwargs.setdefault("workers", 1)
    kwargs.setdefault("precision", "single")
    return Engine(*data, classes=CLASSES, federations=[clients], model=model, local=local, device=device, **kwargs)


@pytest.fixture(params=["machine code", "torch"], autouse=True)
def means(request, monkeypatch):
    """Everything here holds for the compiled programs and for those made of torch's operators."""
    load_compiled.cache_clear()
    if request.param == "torch":
        monkeypatch.setenv("FEDCOHORT_CC", "")
    elif load_compiled("train") is None:
        pytest.skip("no C compiler")
    yield request.param
    load_compiled.cache_clear()


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _this_module())


def _this_module():
    import types

    module = types.ModuleType(__name__)
    module.__dict__.update(globals())
    return module


@pytest.mark.parametrize(
    ("how", "rule"),
    [(how, "none") for how in LOCALS]
    + [(how, rule) for how in ("steps", "momentum") for rule in ("prox", "correction", "both")],
)
@pytest.mark.parametrize("model", MODELS)
def test_equals_plain_loop(model, how, rule):
    check_against_plain(model, LOCALS[how], rule, "cpu")


def check_against_plain(model, local, rule, device, seeds=(1, 2)):
    data, clients = problem(model)
    with build(data, clients, model, local, device) as engine:
        models = torch.stack([engine.init(seed) for seed in seeds])
        jobs = jobs_of([0, 1, 2, 3, 4, 2], rounds=[3] * 6, run=[0, 1, 0, 1, 0, 1], seed=[5, 5, 5, 5, 5, 6])
        generator = torch.Generator().manual_seed(3)
        correction = None
        if rule in ("correction", "both"):
            correction = 0.01 * torch.randn(len(jobs), engine.n_params, generator=generator).to(engine.device)
        prox = 0.3 if rule in ("prox", "both") else 0.0
        trained = engine.train(models, jobs, prox=prox, correction=correction)
        other_branch = []
        for job in range(len(jobs)):
            start = models[jobs.run[job]]
            want, plan = reference(engine, clients, start, job, jobs, prox=prox, correction=correction)
            assert trained.steps[job] == len(plan.counts)
            try:
                assert_equal(trained.params[job], want, start)
            except AssertionError:
                # Rounding may decide a maximum or a ReLU the other way than double precision. On which job depends on
                # the processor; it changes a single pixel's part of one step.
                update = want - start.cpu().double()
                assert (trained.params[job].cpu().double() - want).norm() <= 1e-2 * update.norm()
                other_branch.append(job)
        assert len(other_branch) <= 1


@pytest.mark.parametrize("how", ["momentum", "robust", "augmented"])
def test_steps_can_be_given_per_job(how):
    check_steps_per_job(how, "cpu")


def check_steps_per_job(how, device):
    """The last client has few samples and lies behind many others: what it does not train must not be looked at."""
    data, clients = problem("mlp")
    with build(data, clients, "mlp", LOCALS[how], device) as engine:
        models = engine.init(1)[None]
        jobs = jobs_of([0, 1, 2, 4], steps=[0, 9, 2, 3])
        trained = engine.train(models, jobs)
        assert trained.steps.tolist() == [0, 9, 2, 3]
        assert torch.equal(trained.params[0], models[0])
        for job in (1, 2, 3):
            want, _ = reference(engine, clients, models[0], job, jobs)
            assert_equal(trained.params[job], want, models[0])


@pytest.mark.parametrize("model", ["mlp", "lenet", f"{__name__}:WithDropout"])
def test_bit_identical_twice_and_threads_agree(model):
    data, clients = problem(model)
    jobs = jobs_of([0, 1, 2, 3, 4])
    results = []
    for workers in (1, 1, 3):
        with build(data, clients, model, LOCALS["epochs"], workers=workers) as engine:
            models = engine.init(1)[None]
            trained = engine.train(models, jobs)
            losses = engine.measure(
                models, jobs.run, jobs.federation, jobs.client, [LossMeasure(), LossMeasure("validation")]
            )
            gradients = engine.client_gradients(models, jobs.run, jobs.federation, jobs.client)
            results.append((trained.params, *losses.values(), gradients, *engine.evaluate(trained.params)))
    once, twice, threaded = results
    for a, b, c in zip(once, twice, threaded, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        np.testing.assert_array_equal(np.asarray(a), np.asarray(c))


@pytest.mark.parametrize("model", ["mlp", "lenet", f"{__name__}:Residual"])
def test_augmentation_is_training_on_images_cropped_by_hand(model):
    check_augmentation(model, "cpu")


def check_augmentation(model, device):
    """One epoch, in which each image is used once: cropping it beforehand must be the same, bit by bit."""
    sizes = (37, 5, 64, 20)
    (x, y, x_test, y_test), clients = problem(model, sizes=sizes, validation=(0, 0, 0, 0))
    x, x_test = x.astype(np.float32), x_test.astype(np.float32)  # taken as they are, so that zeros are zeros
    plain = LocalTraining(epochs=1, batch_size=16, lr=1e-4)
    moved = x.copy()
    for client, n in enumerate(sizes):
        plan = batch_plan(4, 2, client, n, plain)
        crops = crop_plan(4, 2, client, plan.indices.shape)
        mine = clients.indices[clients.offsets[client] :][:n]
        for row, ways, count in zip(plan.indices, crops, plan.counts, strict=True):
            for place, way in zip(row[:count], ways[:count], strict=True):
                mirrored, down, right = way // 81, way // 9 % 9, way % 9
                image = np.pad(x[mine[place]], [(4, 4), (4, 4), (0, 0)][: x.ndim - 1])
                image = image[down : down + x.shape[1], right : right + x.shape[2]]
                moved[mine[place]] = image[:, ::-1] if mirrored else image
    results = []
    for images, local in ((x, dataclasses.replace(plain, augment=True)), (moved, plain), (x, plain)):
        with build((images, y, x_test, y_test), clients, model, local, device) as engine:
            jobs = jobs_of([0, 1, 2, 3], rounds=[2] * 4, seed=[4] * 4)
            results.append(engine.train(engine.init(1)[None], jobs).params.cpu())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("model", ["mlp", "lenet"])
def test_a_run_does_not_depend_on_its_company(model):
    data, clients = problem(model)
    with build(data, clients, model, LOCALS["momentum"]) as engine:
        models = torch.stack([engine.init(seed) for seed in range(12)])
        run, client = np.repeat(np.arange(12), 2), np.tile([0, 2], 12)
        together = engine.train(models, jobs_of(client, run=run)).params
        # A sum that is vectorised over samples, such as torch's logsumexp, ends otherwise in a longer vector.
        losses = engine.measure(models, run, 0 * run, client, [LossMeasure(), LossMeasure("train", "robust")])
        for own in range(12):
            alone = engine.train(models[own : own + 1], jobs_of([0, 2])).params
            assert torch.equal(together[run == own], alone)
            zeros = np.zeros(2, np.int64)
            mine = engine.measure(models[own : own + 1], zeros, zeros, np.array([0, 2]), list(losses))
            for measure, values in losses.items():
                np.testing.assert_array_equal(values[run == own], mine[measure])


@pytest.mark.parametrize("model", ["mlp", "logistic", "lenet"])
def test_nan_in_one_job_leaves_the_others_alone(model):
    data, clients = problem(model)
    with build(data, clients, model, LOCALS["steps"]) as engine:
        models = torch.stack([engine.init(1), torch.full((engine.n_params,), torch.nan)])
        mixed = engine.train(models, jobs_of([0, 1, 2, 1, 0], run=[0, 1, 0, 0, 1]))
        clean = engine.train(models, jobs_of([0, 2, 1], run=[0, 0, 0]))
        loss, _ = engine.evaluate(models)
    assert torch.isnan(mixed.params[1]).all()
    assert torch.isnan(mixed.params[4]).all()
    for a, b in ((0, 0), (2, 1), (3, 2)):
        assert torch.allclose(mixed.params[a], clean.params[b], rtol=1e-5, atol=1e-6)
    assert np.isfinite(loss[0])
    assert np.isnan(loss[1])


@pytest.mark.parametrize("model", ["mlp", "lenet"])
def test_losses_gradients_evaluation_and_logits(model):
    check_evaluation(model, "cpu")


PARTS, LOSSES, MEANS = ("train", "validation"), ("label", "pseudo", "robust"), ("mean", "root-mean-square")


def losses_of(module, teacher, x, y, loss, local):
    """The losses of the samples, as anybody would write them."""
    out, pseudo = module(x), pseudo_labels(teacher, x)
    if loss == "robust":
        return robust_loss(out, y, pseudo, local)
    return nn.functional.cross_entropy(out, y if loss == "label" else pseudo, reduction="none")


@pytest.mark.parametrize("reverse", ["labels", "pseudo-labels"])
def test_the_robust_loss_is_the_papers_sum_over_classes(reverse):
    """Sec. 2.2 sample by sample: CE(y) + alpha CE(z) - beta sum_k p_k log [y or z]_k, with log 0 = A."""
    logits = torch.tensor([[0.3, -1.0, 2.0], [1.5, 0.2, -0.4]], dtype=torch.float64)
    labels, pseudo = [0, 1], [2, 0]
    local = LocalTraining(
        steps=1, loss="robust", robust_alpha=0.7, robust_beta=1.3, robust_log_zero=-3.0, robust_reverse=reverse
    )
    expected = []
    for row, y, z in zip(logits.tolist(), labels, pseudo, strict=True):
        p = [math.exp(value) / sum(map(math.exp, row)) for value in row]
        target = y if reverse == "labels" else z
        one_hot = [float(k == target) for k in range(3)]
        rce = -sum(p[k] * (math.log(one_hot[k]) if one_hot[k] else -3.0) for k in range(3))
        expected.append(-math.log(p[y]) - 0.7 * math.log(p[z]) + 1.3 * rce)
    ours = robust_loss(logits, torch.tensor(labels), torch.tensor(pseudo), local)
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-12)


def check_evaluation(model, device):
    data, clients = problem(model)
    validation = np.array([3, 1, 4, 1, 5])
    with build(data, clients, model, LOCALS["robust"], device) as engine:
        models = torch.stack([engine.init(1), engine.init(2)])
        run, client = np.array([0, 1, 1, 0]), np.array([0, 2, 4, 3])
        zeros = np.zeros(4, np.int64)
        measures = [LossMeasure(part, loss, mean) for part in PARTS for loss in LOSSES for mean in MEANS]
        got = engine.measure(models, run, zeros, client, measures, pseudo_models=models.flip(0))
        assert list(got) == measures
        gradients = engine.client_gradients(models, run, zeros, client)
        loss, accuracy = engine.evaluate(models)
        test = np.asarray(engine.store.y_test.cpu())
        cell = np.arange(len(test)) % 3
        losses, right, answers = engine.evaluate_cells(models, HeldOut(engine.store.n_train, test, cell, 4))
        np.testing.assert_allclose(losses, loss, rtol=1e-6)
        np.testing.assert_allclose(right.sum(1) / len(test), accuracy)
        x_test = engine.store.x_test.cpu().double().view(-1, *engine.sample)
        logits = engine.logits(models, validation)
        modules = []
        for vector in models:
            flat = FlatModel(build_model(model, engine.sample, CLASSES))
            modules.append(flat.load(vector.cpu()).double())
        for module, counted, (hit, given) in zip(modules, right, answers, strict=True):
            predicted = module.eval()(x_test).argmax(1).numpy()
            np.testing.assert_array_equal(counted, np.bincount(cell, predicted == test, minlength=4))
            np.testing.assert_array_equal(hit, np.bincount(test, predicted == test, minlength=CLASSES))
            np.testing.assert_array_equal(given, np.bincount(predicted, minlength=CLASSES))
        for q in range(4):
            start, stop = clients.offsets[client[q] : client[q] + 2]
            middle = stop - clients.validation[client[q]]
            x = engine.inputs(clients.indices[start:stop]).cpu().double()
            y = torch.from_numpy(clients.labels[start:stop])
            cut = middle - start
            module = modules[run[q]]
            out = module(x[:cut])
            for measure in measures:
                mine = slice(None, cut) if measure.part == "train" else slice(cut, None)
                with torch.no_grad():
                    want = losses_of(module, modules[1 - run[q]], x[mine], y[mine], measure.loss, engine.local)
                want = want.square().mean().sqrt() if measure.mean == "root-mean-square" else want.mean()
                assert got[measure][q] == pytest.approx(float(want), rel=1e-5, nan_ok=True)
            grads = torch.autograd.grad(nn.functional.cross_entropy(out, y[:cut]), list(module.parameters()))
            want = torch.cat([g.reshape(-1) for g in grads])
            assert (gradients[q].cpu().double() - want).norm() <= 1e-5 * want.norm()
        x = engine.inputs(np.arange(50)).cpu().double()  # the test set is the start of the training set
        for m in range(2):
            out = modules[m](x)
            y = torch.from_numpy(data[3])
            assert loss[m] == pytest.approx(float(nn.functional.cross_entropy(out, y).detach()), rel=1e-5)
            assert accuracy[m] == pytest.approx(float((out.argmax(1) == y).double().mean()))
            want = modules[m](engine.inputs(validation).cpu().double())
            assert torch.allclose(logits[m].cpu().double(), want, rtol=1e-4, atol=1e-5)


def test_flat_features_and_floats_are_taken_as_they_are():
    x = np.random.default_rng(0).normal(size=(30, 7)).astype(np.float32)
    y = np.arange(30) % CLASSES
    clients = federation([10, 20], 30, CLASSES)
    with build((x, y, x, y), clients, "mlp-64", LOCALS["steps"]) as engine:
        assert engine.sample == (7,)
        np.testing.assert_array_equal(engine.inputs(np.arange(30)).numpy(), x)


def test_images_are_standardised_with_the_training_set():
    data, clients = problem("lenet")
    with build(data, clients, "lenet", LOCALS["steps"]) as engine:
        x = engine.inputs(np.arange(200))
        assert x.shape == (200, 3, 20, 20)
        assert torch.allclose(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
        assert torch.allclose(x.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)
        raw = torch.from_numpy(data[0]).permute(0, 3, 1, 2).double()
        want = (raw - raw.mean((0, 2, 3), keepdim=True)) / raw.std((0, 2, 3), keepdim=True, correction=0)
        assert torch.allclose(x.double(), want, atol=1e-5)


def test_running_statistics_travel_with_the_model():
    model = f"{__name__}:WithBatchNorm"
    data, clients = problem(model, sizes=(40, 24), validation=(0, 0))
    with build(data, clients, model, LOCALS["steps"]) as engine:
        models = engine.init(1)[None]
        jobs = jobs_of([0, 1])
        trained = engine.train(models, jobs)
        for job in range(2):
            want, _ = reference(engine, clients, models[0], job, jobs)
            assert_equal(trained.params[job], want, models[0])
        assert engine.n_params == 36 * 8 + 8 + 16 + 8 * CLASSES + CLASSES + 16  # running mean and variance travel along
        gradients = engine.client_gradients(models, jobs.run, jobs.federation, jobs.client)
        assert (gradients[:, -16:] == 0).all()


def test_global_generators_are_left_alone():
    data, clients = problem("mlp")
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002  # the global generator is what is watched
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    with build(data, clients, "mlp", LOCALS["steps"]) as engine:
        engine.train(engine.init(1)[None], jobs_of([0, 1]))
    with build(data, clients, f"{__name__}:WithDropout", LOCALS["steps"]) as engine:
        engine.train(engine.init(1)[None], jobs_of([0, 1]))
    assert torch.equal(before, torch.get_rng_state())
    np.testing.assert_array_equal(numpy_before, np.random.get_state()[1])  # noqa: NPY002


def test_init_is_seeded():
    data, clients = problem("mlp")
    with build(data, clients, "mlp", LOCALS["steps"]) as engine:
        assert torch.equal(engine.init(3), engine.init(3))
        assert not torch.equal(engine.init(3), engine.init(4))


def test_no_jobs_at_all():
    data, clients = problem("mlp")
    with build(data, clients, "mlp", LOCALS["steps"]) as engine:
        trained = engine.train(engine.init(1)[None], jobs_of(np.zeros(0, np.int64)))
        assert trained.params.shape == (0, engine.n_params)
        assert engine.measure(engine.init(1)[None], *(np.zeros(0, np.int64),) * 3, [LossMeasure()])[
            LossMeasure()
        ].shape == (0,)


def test_a_client_without_samples_returns_the_global_model():
    data, clients = problem("mlp", sizes=(10, 0, 4), validation=(0, 0, 4))
    with build(data, clients, "mlp", LOCALS["epochs"]) as engine:
        models = engine.init(1)[None]
        trained = engine.train(models, jobs_of([0, 1, 2]))
        assert torch.equal(trained.params[1], models[0])
        assert torch.equal(trained.params[2], models[0])
        training, held = LossMeasure(), LossMeasure("validation")
        losses = engine.measure(models, *(np.zeros(2, np.int64),) * 2, np.array([1, 2]), [training, held])
        assert np.isnan(losses[training]).all()
        assert np.isfinite(losses[held]).tolist() == [False, True]


def test_an_unknown_device_is_named():
    data, clients = problem("mlp")
    local = LOCALS["steps"]
    with pytest.raises(DeviceError, match=r"cuda:99|no CUDA"):
        build(data, clients, "mlp", local, "cuda:99")
    with pytest.raises(DeviceError, match="nonsense"):
        build(data, clients, "mlp", local, "nonsense")
