"""Networks that people bring: an experiment of fedcohort beside a loop of one's own, pfl, and torch.func by hand.

    python bench/scripts/modules.py --device cpu --cohort 10 --turns 5
    python bench/scripts/modules.py --device cuda --cohort 50 --turns 5 [--networks cnn,gru] [--json FILE]

The job is that of pfl's own speed test: 1,000 users of 50 images of the size of CIFAR-10, 5 steps of batch 10 in a
round. The images are noise, which trains as fast as any other. Printed are milliseconds a round: the median of the
turns, in each of which every side makes its rounds, one after the other in an order drawn for that turn.

loop         one client after another with torch.optim.SGD and an average, with torch's own number of threads
loop-1       the same with one thread of torch (on the CPU)
pfl          pfl's simulated backend, if it can be imported; with one thread on the CPU
vmap         torch.func.vmap over clients, for networks that it can batch; on CUDA in a graph
engine       fedcohort's engine: local training and the average
experiment   an experiment of fedcohort: selector, session with its journal, results, and the test set every tenth round
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.data import from_arrays
from fedcohort.simulate.engine import ClientData, Engine, Jobs
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.runner import Simulation
from fedcohort.training.local import LocalTraining

USERS, IMAGES, STEPS, BATCH, RATE = 1000, 50, 5, 10, 0.05


def convolutions(dropout: float) -> nn.Sequential:
    drop = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(*drop, nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), *drop, nn.Flatten(), nn.Linear(4096, 384), nn.ReLU(), *drop, nn.Linear(384, 10)),
    )


def cnn() -> nn.Module:
    return convolutions(0)


def dropout() -> nn.Module:
    return convolutions(0.25)


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), norm(outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), norm(outputs)),
        )
        same = stride == 1 and inputs == outputs
        self.short = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.short(x))


def residual(norm: Callable[[int], nn.Module]) -> nn.Module:
    blocks = [Block(a, b, 1 if a == b else 2, norm) for a, b in ((16, 16), (16, 32), (32, 64))]
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), norm(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def resnet_gn() -> nn.Module:
    return residual(lambda channels: nn.GroupNorm(2, channels))


def resnet_bn() -> nn.Module:
    return residual(nn.BatchNorm2d)


class Rows(nn.Module):
    """A network over the 32 rows of an image."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.enter, self.body, self.head = nn.Linear(96, width), body, nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(self.enter(x.transpose(1, 2).flatten(2)))
        return self.head((h[0] if isinstance(h, tuple) else h).mean(1))


def gru() -> nn.Module:
    return Rows(nn.GRU(64, 64, batch_first=True), 64)


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True)
    return Rows(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 64)


NETWORKS = {make.__name__: make for make in (cnn, dropout, resnet_gn, resnet_bn, gru, transformer)}


class World:
    """The data, on the device for all sides."""

    def __init__(self, name: str, device: torch.device) -> None:
        generator = np.random.default_rng(0)
        self.name, self.device, self.make = name, device, NETWORKS[name]
        self.images = generator.normal(size=(USERS * IMAGES, 32, 32, 3)).astype(np.float32)
        self.labels = generator.integers(0, 10, USERS * IMAGES)
        self.x = torch.from_numpy(self.images).permute(0, 3, 1, 2).contiguous().to(device)
        self.y = torch.from_numpy(self.labels).to(device)

    def batches(self, user: int, rng: np.random.Generator) -> list[torch.Tensor]:
        order = user * IMAGES + rng.permutation(IMAGES)
        return list(torch.from_numpy(order[: STEPS * BATCH]).to(self.device).split(BATCH))

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def loop(world: World) -> Callable[[np.ndarray], None]:
    module, rng = world.make().to(world.device), np.random.default_rng(0)

    def one_round(cohort: np.ndarray) -> None:
        start = {name: value.clone() for name, value in module.state_dict().items()}
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        for user in cohort:
            module.load_state_dict(start)
            optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
            for batch in world.batches(user, rng):
                optimizer.zero_grad()
                F.cross_entropy(module(world.x[batch]), world.y[batch]).backward()
                optimizer.step()
            for name, value in module.state_dict().items():
                total[name] += (value / len(cohort)).to(value.dtype)
        module.load_state_dict(total)

    return one_round


def loop_1(world: World) -> Callable[[np.ndarray], None] | None:
    return with_one_thread(loop(world)) if world.device.type == "cpu" else None


def with_one_thread(work: Callable[[np.ndarray], None]) -> Callable[[np.ndarray], None]:
    def one_round(cohort: np.ndarray) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            work(cohort)
        finally:
            torch.set_num_threads(before)

    return one_round


def pfl(world: World) -> Callable[[np.ndarray], None] | None:
    try:
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.aggregate.weighting import WeightByDatapoints
        from pfl.algorithm.base import NNAlgorithmParams
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.data.dataset import Dataset
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.hyperparam.base import NNTrainHyperParams
        from pfl.model.pytorch import PyTorchModel
    except ImportError:
        return None
    module, users = world.make().to(world.device), iter(())
    module.loss = lambda x, y, **_: F.cross_entropy(module(x), y)
    module.metrics = lambda x, y, **_: {}
    model = PyTorchModel(
        module, lambda parameters, lr: torch.optim.SGD(parameters, lr=lr), torch.optim.SGD(module.parameters(), lr=1.0)
    )

    def data_of(user: int) -> Dataset:
        mine = slice(int(user) * IMAGES, int(user + 1) * IMAGES)
        return Dataset((world.x[mine], world.y[mine]), user_id=str(user))

    data = FederatedDataset(data_of, lambda: next(users))
    backend = SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()])
    local = NNTrainHyperParams(
        local_num_epochs=None, local_learning_rate=RATE, local_batch_size=BATCH, local_num_steps=STEPS
    )

    def one_round(cohort: np.ndarray) -> None:
        nonlocal users
        users = iter(cohort)
        plan = NNAlgorithmParams(
            central_num_iterations=1, evaluation_frequency=2, train_cohort_size=len(cohort), val_cohort_size=0
        )
        FederatedAveraging().run(plan, backend, model, local)

    return with_one_thread(one_round) if world.device.type == "cpu" else one_round


def vmap(world: World) -> Callable[[np.ndarray], None] | None:
    """What one writes by hand: vmap(grad) over the clients' parameters; on CUDA, all steps in one graph."""
    module, rng = world.make().to(world.device), np.random.default_rng(0)
    shared = {name: p.detach().clone() for name, p in module.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(module, parameters, (x,)), y)

    step = torch.func.vmap(torch.func.grad(loss), randomness="different")
    static: dict[str, torch.Tensor] = {}

    def train() -> None:
        clients = {name: p.expand(len(static["x"][0]), *p.shape).clone() for name, p in shared.items()}
        for x, y in zip(static["x"], static["y"], strict=True):
            for name, gradient in step(clients, x, y).items():
                clients[name] = clients[name] - RATE * gradient
        for name, value in clients.items():
            shared[name].copy_(value.mean(0))

    graph: torch.cuda.CUDAGraph | None = None

    def one_round(cohort: np.ndarray) -> None:
        nonlocal graph
        rows = torch.stack([torch.stack(world.batches(user, rng)) for user in cohort], 1)  # (S, J, B)
        given = {"x": world.x[rows], "y": world.y[rows]}
        if not static:
            static.update(given)
        for name, value in given.items():
            static[name].copy_(value)
        if world.device.type == "cuda" and graph is None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                train()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                train()
        if graph is None:
            train()
        else:
            graph.replay()

    try:  # batch normalisation has no rule
        step({name: p[None] for name, p in shared.items()}, world.x[None, :BATCH], world.y[None, :BATCH])
    except RuntimeError:
        return None
    return one_round


def local() -> LocalTraining:
    return LocalTraining(steps=STEPS, batch_size=BATCH, lr=RATE)


def engine(world: World) -> Callable[[np.ndarray], None]:
    offsets = IMAGES * np.arange(USERS + 1)
    clients = ClientData(np.arange(USERS * IMAGES), offsets, world.labels, np.zeros(USERS, np.int64))
    trainer = Engine(
        *(world.images, world.labels, world.images[:100], world.labels[:100]),
        classes=10,
        federations=[clients],
        model=f"{__file__}:{world.name}",
        local=local(),
        device=str(world.device),
    )
    model, number = trainer.init(0)[None], itertools.count()

    def one_round(cohort: np.ndarray) -> None:
        nonlocal model
        zeros = np.zeros(len(cohort), np.int64)
        jobs = Jobs(zeros, zeros, cohort, zeros + next(number), zeros)
        model = trainer.train(model, jobs).params.mean(0, keepdim=True)

    one_round.close = trainer.close  # type: ignore[attr-defined]
    return one_round


class Clock(Listener):
    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.times: list[float] = []

    def on_round(self, *_: object) -> None:
        self.times.append(self.now())


def experiment(world: World, rounds: int, cohort: int, now: Callable[[], float]) -> float:
    """Return the seconds a round takes, without the start."""
    clock = Clock(now)
    data = from_arrays(world.images, world.labels, world.images[:1000], world.labels[:1000], classes=10)
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "data": data,
            "scenario": {"partition": {"name": "iid", "clients": USERS}},
            "model": {"name": f"{__file__}:{world.name}"},
            "local": {"steps": STEPS, "batch_size": BATCH, "lr": RATE},
            "run": {"rounds": 3 + rounds, "cohort": cohort, "eval_every": 10, "device": str(world.device)},
            "selectors": {"uniform": {}},
        }
        Simulation(Experiment.from_dict(config), Path(folder), listeners=[clock]).run()
    return (clock.times[-1] - clock.times[2]) / rounds


def measure(world: World, cohort: int, turns: int, rounds: int, now: Callable[[], float]) -> dict[str, float]:
    """Return the median milliseconds of a round for each side."""
    rng = np.random.default_rng(1)
    sides: dict[str, Callable[[np.ndarray], None]] = {}
    for make in (loop, loop_1, pfl, vmap, engine):
        with contextlib.suppress(torch.OutOfMemoryError):
            if (side := make(world)) is not None:
                sides[make.__name__.replace("_", "-")] = side
    seconds: dict[str, list[float]] = {}
    for turn in range(-1, turns):  # the first is not timed: kernels are chosen, graphs captured
        for name in rng.permutation([*sides, "experiment"]):
            if name == "experiment":
                if turn >= 0:
                    seconds.setdefault("experiment", []).append(experiment(world, rounds, cohort, now))
                continue
            cohorts = [rng.choice(USERS, cohort, replace=False) for _ in range(rounds)]
            world.wait()
            started = now()
            for chosen in cohorts:
                sides[name](chosen)
            world.wait()
            if turn >= 0:
                seconds.setdefault(str(name), []).append((now() - started) / rounds)
    sides["engine"].close()  # type: ignore[attr-defined]
    return {name: 1000 * statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="in a turn")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processor", action="store_true", help="processor time instead of the clock, on a busy CPU")
    given = parser.parse_args()
    now = time.process_time if given.processor else time.perf_counter
    columns = ["loop", "loop-1", "pfl", "vmap", "engine", "experiment"]
    print("network (parameters)".ljust(28), *(column.rjust(10) for column in columns))
    found = {}
    for name in given.networks.split(","):
        world = World(name, torch.device(given.device))
        found[name] = measure(world, given.cohort, given.turns, given.rounds, now)
        size = sum(p.numel() for p in copy.deepcopy(world.make()).parameters())
        cells = [f"{found[name][column]:.1f}" if column in found[name] else "-" for column in columns]
        print(f"{name} ({size:,})".ljust(28), *(cell.rjust(10) for cell in cells), flush=True)
    if given.json:
        machine = torch.cuda.get_device_name() if given.device.startswith("cuda") else platform.processor()
        facts = {"machine": machine, "torch": torch.__version__, "cohort": given.cohort}
        facts |= {"clock": now.__name__, "milliseconds": found}
        given.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
