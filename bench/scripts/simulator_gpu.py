"""The engine on one CUDA device: FedCor's two jobs, and the ways to train a stack of convolutional networks.

    python bench/scripts/simulator_gpu.py [fmnist cifar vgg idle] [--ways engine ...] [--rounds 500] [--quick]
        [--device cuda]

fmnist: 100 clients x 600, MLP 784-64-30-10, 10 a round, 20 steps of batch 64; one run, and 20 in lock-step.
cifar: FedCor's convolutional network, 5 a round, 40 steps of batch 50; one run, and 20 in lock-step, in every way: the
    engine's; fused kernels with products in single precision (ieee) or for layers of any width (wide); the stack with
    only torch's operators (operators); vmap; and the plain loop (loop). ``--ways`` chooses some of them.
vgg: the same for VGG-11 without and with batch normalisation, 10 steps, one run and 4 in lock-step.
idle: fmnist's round among 100, 10,000 and 100,000 clients, and with 10, 20, 40 and 80 clients a round.

The data are random and have the right shapes. A way that fails prints its error, and the others still run. Times are
after warm-up.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
import traceback

import numpy as np
import torch

from fedcohort.simulate.engine import ClientData, Engine, Jobs, fused
from fedcohort.simulate.engine.device import DeviceProgram
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.jobs import JobTable
from fedcohort.simulate.engine.modules import ModuleBackend
from fedcohort.simulate.engine.stacked import FunctionalNet, LayerNet, stack
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.models import build_model
from fedcohort.training.local import LocalTraining


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


# -- ways to train ---------------------------------------------------------------------------------------------------


class Operators(LayerNet):
    """The stack with torch's operators."""

    def fuse(self, precision):
        pass


class Ieee(LayerNet):
    """Fused kernels with products in single precision, whatever is requested."""

    def fuse(self, precision):
        super().fuse("ieee")


class Wide(LayerNet):
    """Fused kernels for layers of any width."""

    def fuse(self, precision):
        widest, fused._WIDEST = fused._WIDEST, 4096
        super().fuse(precision)
        fused._WIDEST = widest


def ways(model: str, sample: tuple[int, ...], store: Store, local: LocalTraining, device: torch.device) -> dict:
    """Return a function that builds each backend (its argument allows TF32), or None if it cannot train the model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = build_model(model, sample, 10)
    flat = FlatModel(module)

    def program(kind):
        def make(tf32):
            net = FunctionalNet(flat, sample, torch.float32, "single") if kind is FunctionalNet else stack(flat, sample)
            net.__class__ = kind
            return DeviceProgram(net, store, local, classes=10, device=device, precision="tf32" if tf32 else "single")

        return make

    def loop(_):
        return ModuleBackend(FlatModel(module), store, local, None, device=device, precision="single")

    return {
        "engine": program(LayerNet),
        "ieee": program(Ieee),
        "wide": program(Wide),
        "operators": program(Operators),
        "vmap": program(FunctionalNet),
        "loop": loop,
    }


def _table(jobs: Jobs, store: Store, local: LocalTraining) -> JobTable:
    return JobTable.of(jobs, store.spans(jobs.run, jobs.federation, jobs.client), store, local)


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
    table = _table(jobs, engine.store, local)
    began = time.perf_counter()
    slots = np.empty(20 * 10 * 64, np.int64)
    for _ in range(50):
        table.draw(local, slots, base=0, start=np.arange(10) * 64, stride=640, row=64)
    print(f"  plans of 10 clients {20 * (time.perf_counter() - began):.3f} ms")
    if device.type == "cuda":
        whole = Jobs(run, zeros, np.tile(clients, runs), zeros, zeros)
        profile(engine.backend, _table(whole, engine.store, local), models)
    engine.close()


def idle(device: torch.device, quick: bool) -> None:
    x, y = images(60_000, (28, 28))
    local = LocalTraining(steps=20, batch_size=64, lr=0.005, weight_decay=1e-4)
    base = federation(100, 600, 10)
    rounds, turns = (3, 1) if quick else (100, 5)
    for everybody, cohort in ((100, 10), (10_000, 10), (100_000, 10), (100, 20), (100, 40), (100, 80)):
        # Beyond the first hundred, clients own the same samples again, so only the index grows.
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


def networks(device: torch.device, quick: bool, model: str, each: int, ways: list[str]) -> None:
    """Time every way to train ``each`` models, and those of 20 runs in lock-step, on CIFAR-shaped data."""
    x, y = images(2_000 if quick else 12_000, (32, 32, 3))
    cut = len(x) * 5 // 6
    steps = 2 if quick else 40 if model == "fedcor-cnn" else 10
    local = LocalTraining(steps=steps, batch_size=50, lr=0.01, weight_decay=3e-4)
    clients = federation(20, cut // 20, 10)
    sample = (3, 32, 32)
    store = Store(x[:cut], x[cut:], y[cut:], [clients])
    start = FlatModel(build_model(model, sample, 10)).vector()[None].to(device)
    cuda = device.type == "cuda"
    for name, make in ways(model, sample, store, local, device).items():
        if ways and name not in ways:
            continue
        for tf32 in (False, True) if cuda else (False,):
            for runs in (1, 20 if model == "fedcor-cnn" else 4):
                slow = runs > 1 and (not cuda or name == "loop")  # runs one after the other take the same time again
                if make is None or slow or (name in ("loop", "ieee") and tf32):
                    continue
                count = each * runs
                label = f"{model}, {count:3d} models, {steps} steps, tf32 {'on ' if tf32 else 'off'}, {name}"
                with guarded(label):
                    began = time.perf_counter()
                    program = make(tf32)
                    zeros = np.zeros(count, np.int64)
                    jobs = Jobs(zeros, zeros, np.arange(count) % 20, zeros, zeros + np.arange(count) // each)
                    table = _table(jobs, store, local)
                    program.train(table, start, 0.0, None)
                    sync(device)
                    warm = time.perf_counter() - began
                    best = float("inf")
                    for _ in range(3 if cuda else 1):
                        began = time.perf_counter()
                        program.train(table, start, 0.0, None)
                        sync(device)
                        best = min(best, time.perf_counter() - began)
                    memory = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
                    print(
                        f"{label:92s} {1e3 * best / runs:8.2f} ms a round and run, first {warm:5.1f} s, "
                        f"peak {memory:.1f} GiB",
                        flush=True,
                    )
                    if cuda:
                        torch.cuda.reset_peak_memory_stats()
                        if name == "engine" and model == "fedcor-cnn" and runs > 1:
                            profile(program, table, start)
                    program.close()
                    del program


def profile(program: DeviceProgram, table: JobTable, start: torch.Tensor) -> None:
    """Print the kernels in which a round spends its time."""
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
    parser.add_argument("what", nargs="*", default=["fmnist", "cifar", "vgg", "idle"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ways", nargs="*", default=[], help="only these ways of cifar and vgg")
    parser.add_argument("--rounds", type=int, default=500, help="rounds of fmnist")
    parser.add_argument("--quick", action="store_true", help="a little of each, to check that it runs")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        usable = {precision: fused.usable(torch.cuda.current_device(), precision) for precision in ("tf32", "tf32x3")}
        print(f"fused kernels: {usable}")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'}")
    rounds = 5 if options.quick else options.rounds
    for runs in (1, 20) if "fmnist" in options.what else ():
        with guarded(f"FMNIST, {runs} runs"):
            fmnist(device, rounds if runs == 1 else max(2, rounds // 10), runs)
    if "cifar" in options.what:
        networks(device, options.quick, "fedcor-cnn", 5, options.ways)
    for model in ("vgg11", "vgg11-bn") if "vgg" in options.what else ():
        networks(device, options.quick, model, 5, options.ways)
    if "idle" in options.what:
        with guarded("idle clients"):
            idle(device, options.quick)


if __name__ == "__main__":
    main()
