"""The engine on one CUDA device: FedCor's two jobs, and the ways to train a stack of convolutional networks.

    python bench/simulator_gpu.py [fmnist cifar idle] [--quick] [--variant the] [--device cuda]

fmnist: 100 clients x 600, MLP 784-64-30-10, 10 a round, 20 steps of batch 64; one run, and 20 in lock-step.
cifar: FedCor's convolutional network, 5 a round, 40 steps of batch 50; one run, and 20 in lock-step.
idle: fmnist's round among 100, 10,000 and 100,000 clients, and with 10, 20, 40 and 80 clients a round.

Random data of the right shapes; every variant stands alone, one that fails prints its error. Times are after warm-up.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
import traceback

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fedcohort.simulate.engine import ClientData, Engine, Jobs
from fedcohort.simulate.engine.device import DeviceProgram, _Batches
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.jobs import JobTable
from fedcohort.simulate.engine.kernels import cuda_kernels
from fedcohort.simulate.engine.stacked import LayerNet, StackedNet, stack
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.local import LocalTraining
from fedcohort.simulate.models import build_model

aten = torch.ops.aten


def federation(clients: int, each: int, classes: int) -> ClientData:
    generator = np.random.default_rng(0)
    total = clients * each
    return ClientData(
        np.arange(total),
        np.arange(0, total + 1, each),
        generator.integers(0, classes, total),
        np.zeros(clients, np.int64),
    )


def images(n: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    return generator.integers(0, 256, (n, *shape), dtype=np.uint8), generator.integers(0, 10, n)


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def guarded(name: str):
    try:
        yield
    except Exception as error:
        print(f"{name:58s} FAILED {type(error).__name__}: {str(error)[:300]}")
        traceback.print_exc(limit=3)
    with contextlib.suppress(Exception):
        torch.cuda.empty_cache()


# -- variants of the stacked network ---------------------------------------------------------------------------------


class GroupedNet(StackedNet):
    """Convolutions of all models as one grouped convolution, (B, J * C, H, W)."""

    def __init__(self, flat: FlatModel, sample: tuple[int, ...], channels_last: bool = False) -> None:
        self.flat, self.sample, self.channels_last = flat, sample, channels_last
        self.order = torch.arange(flat.n_params)
        self.n_params = flat.n_params
        self.slots = {slot.name: slot for slot in flat.slots}
        self.kinds = [(name, layer) for name, layer in flat.module.named_children()]

    def logits(self, vectors, x, saved=None):
        j, b = len(vectors), x.shape[1]
        z = (
            x.expand(j, -1, -1)
            .reshape(j, b, *self.sample)
            .transpose(0, 1)
            .reshape(b, j * self.sample[0], *self.sample[1:])
        )
        if self.channels_last:
            z = z.contiguous(memory_format=torch.channels_last)
        flat = False
        for name, layer in self.kinds:
            if isinstance(layer, nn.Conv2d):
                if saved is not None:
                    saved.append(z)
                w = self.slots[f"{name}.weight"].of(vectors).flatten(0, 1)
                z = F.conv2d(z, w, self.slots[f"{name}.bias"].of(vectors).reshape(-1), padding=layer.padding, groups=j)
            elif isinstance(layer, nn.ReLU):
                z = z.relu_()
                if saved is not None:
                    saved.append(z)
            elif isinstance(layer, nn.MaxPool2d):
                p, where = aten.max_pool2d_with_indices(z, [2, 2], [2, 2])
                if saved is not None:
                    saved += [z, where]
                z = p
            elif isinstance(layer, nn.Flatten):
                if saved is not None:
                    saved.append(z.shape)
                z = z.reshape(b, j, -1).transpose(0, 1)
                flat = True
            else:
                assert flat
                if saved is not None:
                    saved.append(z)
                w = self.slots[f"{name}.weight"].of(vectors)
                z = torch.baddbmm(self.slots[f"{name}.bias"].of(vectors).unsqueeze(1), z, w.transpose(1, 2))
        return z

    def backward(self, vectors, saved, delta, out):
        j = len(vectors)
        for name, layer in reversed(self.kinds):
            if isinstance(layer, nn.Conv2d):
                z = saved.pop()
                w = self.slots[f"{name}.weight"].of(vectors).flatten(0, 1)
                first = name == self.kinds[0][0]
                dx, dw, db = aten.convolution_backward(
                    delta,
                    z,
                    w,
                    [len(w)],
                    [1, 1],
                    list(layer.padding),
                    [1, 1],
                    False,
                    [0, 0],
                    j,
                    [not first, True, True],
                )
                self.slots[f"{name}.weight"].of(out).copy_(dw.view(j, -1, *w.shape[1:]))
                self.slots[f"{name}.bias"].of(out).copy_(db.view(j, -1))
                delta = dx
            elif isinstance(layer, nn.ReLU):
                delta = aten.threshold_backward(delta, saved.pop(), 0)
            elif isinstance(layer, nn.MaxPool2d):
                where, z = saved.pop(), saved.pop()
                delta = aten.max_pool2d_with_indices_backward(delta, z, [2, 2], [2, 2], [0, 0], [1, 1], False, where)
            elif isinstance(layer, nn.Flatten):
                delta = delta.transpose(0, 1).reshape(saved.pop())
            else:
                z = saved.pop()
                w = self.slots[f"{name}.weight"]
                g = w.of(out)
                torch.bmm(delta.transpose(1, 2), z, out=g)
                torch.sum(delta, 1, out=self.slots[f"{name}.bias"].of(out))
                delta = torch.bmm(delta, w.of(vectors))


class PatchesNet(LayerNet):
    """The product's for full single precision, whatever the precision."""

    @staticmethod
    def of(flat: FlatModel, sample: tuple[int, ...]) -> PatchesNet:
        net = stack(flat, sample)
        net.__class__ = PatchesNet
        return net

    def use(self, kernels, fused=None):
        super().use(kernels)


class StreamsNet(StackedNet):
    """Each model's own convolutions on one of a few parallel streams."""

    def __init__(self, flat: FlatModel, sample: tuple[int, ...], streams: int) -> None:
        self.one = GroupedNet(flat, sample)
        self.order = self.one.order
        self.n_params = flat.n_params
        self.streams = [torch.cuda.Stream() for _ in range(streams)]

    def _each(self, count, function):
        here = torch.cuda.current_stream()
        for stream in self.streams:
            stream.wait_stream(here)
        results = []
        for j in range(count):
            with torch.cuda.stream(self.streams[j % len(self.streams)]):
                results.append(function(j))
        for stream in self.streams:
            here.wait_stream(stream)
        return results

    def logits(self, vectors, x, saved=None):
        mine = [[] for _ in range(len(vectors))]
        shared = x.shape[0] == 1
        parts = self._each(
            len(vectors), lambda j: self.one.logits(vectors[j : j + 1], x[:1] if shared else x[j : j + 1], mine[j])
        )
        if saved is not None:
            saved.append(mine)
        return torch.cat(parts)

    def backward(self, vectors, saved, delta, out):
        mine = saved.pop()
        self._each(
            len(vectors),
            lambda j: self.one.backward(vectors[j : j + 1], mine[j], delta[j : j + 1], out[j : j + 1]),
        )


# -- the jobs --------------------------------------------------------------------------------------------------------


def fmnist(device: torch.device, rounds: int, runs: int) -> None:
    x, y = images(70_000, (28, 28))
    local = LocalTraining(steps=20, batch_size=64, lr=0.005, weight_decay=1e-4, milestones=(150, 300))
    began = time.perf_counter()
    engine = Engine(
        x[:60_000],
        y[:60_000],
        x[60_000:],
        y[60_000:],
        classes=10,
        federations=[federation(100, 600, 10)],
        model="mlp",
        local=local,
        device=str(device),
        workers=1,
    )
    print(f"fmnist engine built in {time.perf_counter() - began:.2f} s")
    generator = np.random.default_rng(0)
    models = torch.stack([engine.init(0)] * runs)
    zeros = np.zeros(10 * runs, np.int64)
    run = np.repeat(np.arange(runs), 10)

    def one(round: int) -> None:
        nonlocal models
        clients = np.concatenate([generator.permutation(100)[:10] for _ in range(runs)])
        trained = engine.train(models, Jobs(run, zeros, clients, zeros + round, run))
        models = trained.params.view(runs, 10, -1).mean(1)

    for round in range(3):
        one(round)
    engine.evaluate(models)
    sync(device)
    parts = dict.fromkeys(("train", "evaluate"), 0.0)
    began = time.perf_counter()
    for round in range(rounds):
        at = time.perf_counter()
        one(round)
        parts["train"] += time.perf_counter() - at
        if round % 5 == 4:
            at = time.perf_counter()
            engine.evaluate(models)
            parts["evaluate"] += time.perf_counter() - at
    sync(device)
    total = time.perf_counter() - began
    detail = ", ".join(f"{key} {value:.2f}" for key, value in parts.items())
    print(
        f"FMNIST MLP, {runs:2d} run(s), {rounds} rounds: {total:.3f} s = "
        f"{1e3 * total / rounds / runs:.3f} ms a round and run ({detail})"
    )
    # Where a round's time goes.
    clients = generator.permutation(100)[:10]
    jobs = Jobs(zeros[:10], zeros[:10], clients, zeros[:10], zeros[:10])
    table = JobTable.of(jobs, engine.store, local)
    began = time.perf_counter()
    for _ in range(50):
        for job in range(10):
            table.plan(job, local)
    print(f"  plans of 10 clients {20 * (time.perf_counter() - began):.3f} ms")
    if device.type == "cuda":
        program = engine._backend
        t = next(iter(program._tables.values()))
        sync(device)
        began = time.perf_counter()
        for _ in range(10):
            t.graph.replay()
        sync(device)
        print(f"  replay of 20 steps {100 * (time.perf_counter() - began):.3f} ms")
        jobs = Jobs(run, zeros, np.tile(clients, runs), zeros, zeros)
        began = time.perf_counter()
        for _ in range(20):
            batches = _Batches(JobTable.of(jobs, engine.store, local), local, engine.store, 20, len(t.vectors), 64)
        middle = time.perf_counter()
        for _ in range(20):
            program._upload(t, batches, 0, None)
        after = time.perf_counter()
        sync(device)
        print(
            f"  plans as arrays {50 * (middle - began):.3f} ms, upload {50 * (after - middle):.3f} ms "
            f"(with the device {50 * (time.perf_counter() - middle):.3f} ms)"
        )
    engine.close()


def idle(device: torch.device, quick: bool) -> None:
    x, y = images(60_000, (28, 28))
    local = LocalTraining(steps=20, batch_size=64, lr=0.005, weight_decay=1e-4)
    base = federation(100, 600, 10)
    rounds, turns = (3, 1) if quick else (100, 5)
    for everybody, cohort in ((100, 10), (10_000, 10), (100_000, 10), (100, 20), (100, 40), (100, 80)):
        # Beyond the first hundred, clients own the same samples once more: only the index grows.
        times = everybody // 100
        clients = ClientData(
            np.tile(base.indices, times),
            np.arange(0, 600 * everybody + 1, 600),
            np.tile(base.labels, times),
            np.zeros(everybody, np.int64),
        )
        engine = Engine(
            x, y, x[:10], y[:10], classes=10, federations=[clients], model="mlp", local=local, device=str(device)
        )
        generator = np.random.default_rng(0)
        model = engine.init(0)[None]
        zeros = np.zeros(cohort, np.int64)
        best = float("inf")
        for turn in range(turns + 1):  # the first one warms up
            cohorts = [generator.choice(everybody, cohort, replace=False) for _ in range(rounds)]
            sync(device)
            began = time.perf_counter()
            for round, chosen in enumerate(cohorts):
                trained = engine.train(model, Jobs(zeros, zeros, chosen, zeros + round, zeros))
                model = trained.params.mean(0, keepdim=True)
            sync(device)
            if turn:
                best = min(best, (time.perf_counter() - began) / rounds)
        print(f"{everybody:7d} clients, {cohort:2d} a round: {1e3 * best:6.2f} ms a round", flush=True)
        engine.close()


def cifar(device: torch.device, quick: bool, chosen: str | None = None) -> None:
    x, y = images(60_000 if not quick else 2_000, (32, 32, 3))
    cut = len(x) * 5 // 6
    local = LocalTraining(steps=40, batch_size=50, lr=0.01, weight_decay=3e-4)
    clients = federation(100, cut // 100, 10)
    sample = (3, 32, 32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        flat = FlatModel(build_model("fedcor-cnn", sample, 10))
    store = Store(x[:cut], x[cut:], y[cut:], [clients])
    start = flat.vector()[None].to(device)
    cuda = device.type == "cuda"
    variants = {
        "the product's": lambda: stack(flat, sample),
        "patches and bmm": lambda: PatchesNet.of(flat, sample),
        "grouped convolution, channels last": lambda: GroupedNet(flat, sample, True),
        "one convolution per model, 8 streams": lambda: StreamsNet(flat, sample, 8),
    }
    if chosen is not None:
        variants = {name: make for name, make in variants.items() if name.startswith(chosen)}
    wanted: dict[int, torch.Tensor] = {}
    for name, make in variants.items():
        for tf32 in (False, True) if cuda else (False,):
            for runs in (1, 20):
                count = 5 * runs
                label = f"CIFAR CNN, {count:3d} models, tf32 {'on ' if tf32 else 'off'}, {name}"
                if not cuda and (runs > 1 or "streams" in name):
                    continue
                if runs > 1 and "streams" in name:
                    continue
                with guarded(label):
                    began = time.perf_counter()
                    program = DeviceProgram(make(), store, local, classes=10, device=device, tf32=tf32)
                    zeros = np.zeros(count, np.int64)
                    jobs = Jobs(zeros, zeros, np.arange(count) % 100, zeros, zeros + np.arange(count) // 5)
                    table = JobTable.of(jobs, store, local)
                    params = program.train(table, start, 0.0, None)
                    sync(device)
                    warm = time.perf_counter() - began
                    best = float("inf")
                    for _ in range(3 if cuda else 1):
                        began = time.perf_counter()
                        program.train(table, start, 0.0, None)
                        sync(device)
                        best = min(best, time.perf_counter() - began)
                    wanted.setdefault(count, params)
                    off = float((params - wanted[count]).norm() / wanted[count].norm())
                    memory = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
                    print(
                        f"{label:90s} {1e3 * best / runs:8.2f} ms a round and run, first {warm:.1f} s, "
                        f"differs {off:.1e}, peak {memory:.1f} GiB",
                        flush=True,
                    )
                    if cuda:
                        torch.cuda.reset_peak_memory_stats()
                        if name.startswith("the") and tf32:
                            profile(program, table, start)
                    program.close()
                    del program, params


def profile(program: DeviceProgram, table: JobTable, start: torch.Tensor) -> None:
    """Print which kernels a round spends its time in."""
    program.graphs = False
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        program.train(table, start, 0.0, None)
        torch.cuda.synchronize()
    kernels = sorted(record.key_averages(), key=lambda item: -item.self_device_time_total)
    total = sum(item.self_device_time_total for item in kernels)
    print(f"  kernels of one round: {total / 1e3:.1f} ms in {sum(item.count for item in kernels)} launches")
    for item in kernels[:16]:
        print(f"  {item.self_device_time_total / 1e3:8.2f} ms {item.count:6d} x  {item.key[:110]}")


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["fmnist", "cifar", "idle"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--variant", help="only the variants whose name begins so, for example 'patches'")
    parser.add_argument("--quick", action="store_true", help="a little of each, to see that it runs")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        print(f"kernels: {type(cuda_kernels(torch.cuda.current_device())).__name__}")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'}")
    rounds = 5 if options.quick else 500
    for runs in (1, 20) if "fmnist" in options.what else ():
        with guarded(f"FMNIST, {runs} runs"):
            fmnist(device, rounds if runs == 1 else max(2, rounds // 10), runs)
    if "cifar" in options.what:
        with guarded("CIFAR"):
            cifar(device, options.quick, options.variant)
    if "idle" in options.what:
        with guarded("idle clients"):
            idle(device, options.quick)


if __name__ == "__main__":
    main()
