"""Every kind of network: the stack of a GPU (here on the CPU) and the plain loop agree, whoever is trained together."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.engine import ClientData, Engine, Jobs, train_plain
from fedcohort.simulate.engine.device import DeviceProgram, StackedTraining
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.layer_rules import LayerRules, stream_keys
from fedcohort.simulate.engine.stacked import stack, stacking_obstacle
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.runner import Simulation
from fedcohort.training.local import LocalTraining, batch_plan
from tests.experiments import run_experiment

from . import networks
from .outcomes import rows

SIZES = (23, 10, 17, 10, 2)
LOCAL = LocalTraining(epochs=2, batch_size=5, lr=0.05, momentum=0.5, weight_decay=1e-3)


def problem(name, sizes=SIZES):
    generator = np.random.default_rng(0)
    n = sum(sizes)
    if name == "Words":
        x = generator.integers(0, 20, (n, 12))
    else:
        x = generator.normal(size=(n, 8, 8, 3)).astype(np.float32)
    y = generator.integers(0, networks.CLASSES, n)
    clients = ClientData(np.arange(n), np.cumsum([0, *sizes]), y, np.zeros(len(sizes), np.int64))
    return (x, y, x[:20], y[:20]), clients


def build(name, local=LOCAL, sizes=SIZES, **options):
    data, clients = problem(name, sizes)
    model = f"tests.simulate.networks:{name}"
    options = {"device": "cpu", "workers": 1, **options}
    return Engine(*data, classes=networks.CLASSES, federations=[clients], model=model, local=local, **options)


def on_stack(name, local=LOCAL, sizes=SIZES, **options):
    engine = build(name, local, sizes, **options)
    engine.backend.close()
    engine.kind = "stacked models on cpu"
    engine.backend = engine._backend(1, "single")
    assert type(engine.backend) is (StackedTraining if name == "UntrackedResNet" else DeviceProgram)
    return engine


def jobs(clients, runs, round=2, seed=7):
    clients, runs = np.asarray(clients), np.asarray(runs)
    return Jobs(runs, 0 * clients, clients, 0 * clients + round, 0 * clients + seed)


WORK = jobs([0, 1, 2, 3, 4, 2], [0, 1, 0, 1, 0, 1])


def close(got, want, start):
    assert (got - want).norm() <= 2e-5 * want.norm() + 2e-4 * (want - start).norm()


@pytest.mark.parametrize("name", networks.EVERY)
def test_the_stack_trains_as_the_plain_loop(name):
    with build(name) as plain, on_stack(name) as stacked:
        models = torch.stack([plain.init(1), plain.init(2)])
        want, got = plain.train(models, WORK).params, stacked.train(models, WORK).params
        for job, run in enumerate(WORK.run):
            close(got[job], want[job], models[run])
        for one, other in zip(plain.evaluate(want), stacked.evaluate(want), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4)
        zeros = np.zeros(2, np.int64)
        measured = (models, zeros, zeros, np.array([0, 3]))
        close(stacked.client_gradients(*measured), plain.client_gradients(*measured), 0 * models)


@pytest.mark.parametrize("name", networks.EVERY)
def test_on_the_cpu_a_client_has_the_same_bits_whoever_is_trained_with_it(name):
    with build(name) as one, build(name, workers=3) as three:
        models = torch.stack([one.init(1), one.init(2)])
        together = three.train(models, WORK).params
        assert torch.equal(one.train(models, WORK).params, together)
        for job in (5, 0):
            alone = one.train(models, jobs(WORK.client[[job]], WORK.run[[job]])).params[0]
            assert torch.equal(alone, together[job])
        for a, b in zip(one.evaluate(together), three.evaluate(together), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["ResNet", "CumulativeResNet", "OwnState", "LowRank", "Gru"])
def test_the_plain_loop_is_that_of_torch_bit_for_bit(name):
    """Written out once more, with torch's own optimiser and a state_dict, from which one could federate by hand."""
    with build(name) as engine:
        start = engine.init(1)
        trained = engine.train(start[None], jobs([0], [0])).params[0]
        module = copy.deepcopy(engine.flat.module)
        FlatModel(module).load(start)
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.05, 0.5, weight_decay=1e-3)
        x = engine.inputs(np.arange(23))
        y = torch.from_numpy(problem(name)[0][1][:23])
        module.train()
        torch.set_num_threads(1)
        for row, count in zip(*batch_plan(7, 2, 0, 23, LOCAL), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(module(x[row[:count]]), y[row[:count]]).backward()
            optimizer.step()
        assert torch.equal(FlatModel(module).vector(), trained)


@pytest.mark.parametrize("name", ["DropoutCnn", "Noisy", "Lstm", "Vit"])
def test_random_layers_draw_the_same_numbers_in_a_stack_and_alone(name):
    """Bit for bit the same masks: every number that is drawn, in the order of the layers."""
    module = getattr(networks, name)()
    x = torch.randn(6, 3, 8, 8)
    keys = torch.as_tensor(stream_keys(*(np.asarray(part) for part in (7, 2, [1, 5], 3))))
    drawn: list[torch.Tensor] = []
    original = LayerRules.bits

    def watched(rules, shape, device=None):
        values = original(rules, shape, device)
        drawn.append(values)
        return values

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(LayerRules, "bits", watched)
        for key in keys:
            with LayerRules(key):
                module(x)
        alone, drawn = drawn, []

        def one(key):
            first = len(drawn)
            with LayerRules(key, stacked=True):
                module(x)
            return tuple(drawn[first:])

        together = torch.func.vmap(one)(keys)
    each = len(alone) // 2
    assert each == len(together) > 0
    for number, values in enumerate(together):
        assert torch.equal(values[0], alone[number])
        assert torch.equal(values[1], alone[each + number])
        assert not torch.equal(values[0], values[1])


def test_streams_are_uniform_normal_and_independent():
    keys = stream_keys(np.asarray(3), np.arange(40)[:, None], np.arange(25), np.asarray(0))
    values = torch.stack([LayerRules(torch.tensor(int(key))).uniform((1000,)) for key in keys.ravel()])
    # 10^6 numbers: five standard errors.
    assert abs(values.mean() - 0.5) < 5 / np.sqrt(12e6) and abs(values.var() - 1 / 12) < 5e-4
    assert abs(torch.corrcoef(values[:2])[0, 1]) < 5 / np.sqrt(1000)
    for lag in (1, 2, 8):
        assert abs(torch.corrcoef(torch.stack([values[:, lag:].flatten(), values[:, :-lag].flatten()]))[0, 1]) < 5e-3
    assert len(values.flatten().unique()) > 0.96 * values.numel()  # 2**24 values: 2.9% collide
    assert torch.histc(values, 64, 0, 1).div(1e6 / 64).sub(1).abs().max() < 5 * np.sqrt(64 / 1e6)
    normal = LayerRules(torch.tensor(5)).normal((100_000,))
    assert abs(normal.mean()) < 5 / np.sqrt(1e5) and abs(normal.std() - 1) < 0.02 and 4 < normal.abs().max() < 6


def test_dropout_drops_its_share_and_keeps_the_mean():
    layer = nn.Dropout(0.3)
    with LayerRules(torch.tensor(1)):
        out = layer(torch.ones(1000, 100))
    assert abs((out == 0).float().mean() - 0.3) < 0.01 and abs(out.mean() - 1) < 0.01
    with LayerRules(torch.tensor(1)):
        channels = nn.Dropout2d(0.3)(torch.ones(100, 50, 2, 2))
        scaled = nn.AlphaDropout(0.3)(torch.randn(1000, 100))
        assert torch.equal(nn.Dropout(1.0)(torch.ones(3)), torch.zeros(3))
        assert torch.equal(nn.Dropout(0.5).eval()(torch.ones(3)), torch.ones(3))
    assert (channels.flatten(2).var(2) == 0).all() and abs((channels == 0).float().mean() - 0.3) < 0.05
    assert abs(scaled.mean()) < 0.02 and abs(scaled.std() - 1) < 0.02


def test_nothing_of_torchs_generator_is_read_or_moved():
    with build("DropoutCnn") as engine:
        before = torch.get_rng_state()
        engine.train(engine.init(1)[None], jobs([0, 2], [0, 0]))
        assert torch.equal(before, torch.get_rng_state())


def test_only_what_is_trained_is_in_the_vector():
    with build("LowRank") as engine:
        trained = 2 * 192 + 16 * 2 + 16 * 5 + 5
        assert engine.n_trainable == trained and engine.n_params == trained + 2 * 16  # and running statistics
        frozen = engine.flat.module.frozen.weight.clone()
        engine.train(engine.init(1)[None], jobs([0, 1], [0, 0]))
        assert torch.equal(engine.flat.module.frozen.weight, frozen)
    with build("LowRank") as again:  # another process, or a resume
        assert torch.equal(again.flat.module.frozen.weight, frozen)


def test_batch_statistics_of_padded_batches_are_those_of_the_samples():
    """Clients of 23, 16 and 2 samples are one stack only where padding changes nothing; else they are grouped."""
    sample = (3, 8, 8)
    assert stack(FlatModel(networks.ResNet()), sample).pads
    assert stack(FlatModel(networks.Vit()), sample).pads
    assert not stack(FlatModel(networks.SequenceFirst()), sample).pads
    assert not stack(FlatModel(networks.OwnState()), sample).pads


def test_what_cannot_be_stacked_is_named_with_its_layer():
    obstacle = stacking_obstacle(FlatModel(networks.Packed()), (3, 8, 8))
    assert obstacle is not None and "layer" in obstacle and "GRU" in obstacle
    assert stacking_obstacle(FlatModel(networks.Vit()), (3, 8, 8)) is None


def test_a_stack_that_does_not_fit_is_cut(monkeypatch, caplog):
    with on_stack("Gru") as stacked, build("Gru") as plain:
        tried = []

        def small_memory(*_):
            tried.append(stacks[-1])
            if stacks[-1] > 2:
                raise torch.OutOfMemoryError("no room")

        stacks, original = [], stacked.backend.net.logits
        monkeypatch.setattr(
            stacked.backend.net,
            "logits",
            lambda vectors, *rest: stacks.append(len(vectors)) or original(vectors, *rest),
        )
        stacked.backend.net.flat.module.layer.register_forward_pre_hook(small_memory)  # in the user's code
        models = torch.stack([plain.init(1), plain.init(2)])
        got, want = stacked.train(models, WORK).params, plain.train(models, WORK).params
        for job, run in enumerate(WORK.run):
            close(got[job], want[job], models[run])
        assert "do not fit" in caplog.text
        tried.clear()
        stacked.train(models, WORK)  # what was found is remembered
        assert max(tried) <= 2


@pytest.mark.parametrize("name", ["Gru", "DropoutCnn"])
def test_an_own_loss_trains_in_the_stack(name):
    def losses(outputs, targets):
        return F.multi_margin_loss(outputs, targets, reduction="none")

    with build(name) as plain, on_stack(name) as stacked:
        models = torch.stack([plain.init(1), plain.init(2)])
        plain.backend._own = plain.backend._losses = stacked.backend.losses = losses
        want, got = plain.train(models, WORK).params, stacked.train(models, WORK).params
        for job, run in enumerate(WORK.run):
            close(got[job], want[job], models[run])


def test_bfloat16_trains_nearly_the_same():
    with build("ResNet") as full, build("ResNet", precision="bf16") as half:
        start = full.init(1)
        want, got = (engine.train(start[None], WORK_OF_ONE).params[0] for engine in (full, half))
        assert got.dtype == torch.float32 and not torch.equal(got, want)
        assert (got - want).norm() < 0.1 * (want - start).norm()


WORK_OF_ONE = jobs([0], [0])


def test_live_clients_train_with_the_same_loop():
    """A module of one's own, trained by train_plain, with the stream of its client."""
    with build("DropoutCnn") as engine:
        start = engine.init(1)
        module = copy.deepcopy(engine.flat.module)
        FlatModel(module).load(start)
        plan = batch_plan(7, 2, 0, 23, LOCAL)
        keys = stream_keys(np.asarray(7), np.asarray(2), np.asarray(0), np.arange(len(plan.counts)))
        y = torch.from_numpy(problem("DropoutCnn")[0][1][:23])
        train_plain(module, engine.inputs(np.arange(23)), y, plan, LOCAL, round=2, keys=keys)
        trained = engine.train(start[None], WORK_OF_ONE).params[0]
        assert torch.equal(FlatModel(module).vector(), trained)


@pytest.mark.gpu
@pytest.mark.parametrize("name", networks.EVERY)
def test_cuda_trains_as_the_plain_loop(name):
    with build(name) as plain, build(name, device="cuda", precision="single") as cuda:
        assert cuda.kind == "stacked models on cuda"
        models = torch.stack([plain.init(1), plain.init(2)])
        want = plain.train(models, WORK).params
        for _ in range(2):  # captured, then replayed
            got = cuda.train(models.cuda(), WORK).params.cpu()
            for job, run in enumerate(WORK.run):
                assert (got[job] - want[job]).norm() <= 1e-4 * want[job].norm() + 2e-3 * (
                    want[job] - models[run]
                ).norm()
        program = getattr(cuda.backend, "program", cuda.backend)
        assert program.graphs, "the module was not captured as a graph"


TABLE = {
    "seeds": [0, 1],
    "data": {"name": "synthetic", "samples": 120, "test_samples": 40, "classes": 5, "shape": [8, 8, 3]},
    "scenario": {"partition": {"name": "iid", "clients": 6}},
    "local": {"batch_size": 5, "epochs": 1, "lr": 0.05, "momentum": 0.5},
    "run": {"rounds": 4, "cohort": 3, "lockstep": 1, "device": "cpu", "checkpoint_seconds": 0.0, "processes": 1},
    "selectors": {"uniform": {}},
}


class StopAfter(Listener):
    def __init__(self, rounds):
        self.left = rounds

    def on_round(self, run, row):
        self.left -= 1
        if not self.left:
            self.simulation.stop()


@pytest.mark.parametrize("name", ["ResNet", "DropoutCnn", "LowRank"])
def test_one_process_two_and_a_resume_give_the_same_bits(name, tmp_path):
    """The losses of a network with BatchNorm once depended on how many threads each process had."""

    def table(**options):
        model = {"model": {"name": f"{networks.__file__}:{name}"}}
        return {**TABLE, **model, "run": {**TABLE["run"], **options}}

    assert run_experiment(table(workers=2), tmp_path / "one") == "finished"
    assert run_experiment(table(processes=2, workers=1), tmp_path / "two") == "finished"
    stop = StopAfter(3)
    stop.simulation = Simulation(Experiment.from_dict(table(workers=1)), tmp_path / "again", listeners=[stop])
    assert stop.simulation.run() == "interrupted"
    assert Simulation.open(tmp_path / "again").run() == "finished"
    assert rows(tmp_path / "one", "rounds") == rows(tmp_path / "two", "rounds") == rows(tmp_path / "again", "rounds")
