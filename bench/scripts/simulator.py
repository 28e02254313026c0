"""The engine on the CPU against a plain PyTorch loop over pre-loaded tensors: rounds per second, side by side.

    python bench/scripts/simulator.py [W1 W2 W3 idle] [--repeats 3] [--workers 2]

W1: FedCor's Fashion-MNIST job, 100 clients x 600, MLP 784-64-30-10, 10 a round, 20 steps of batch 64.
W2: 200 clients x 250 CIFAR-shaped samples, LeNet of the PyTorch tutorial, 10 a round, 25 steps of batch 50.
W3: 3,500 clients of 20 to 180 samples, FEMNIST-shaped, MLP 784-64-30-62, 350 available, 30 a round, 5 steps
    of batch 64.
idle: W1's round among 100 and among 10,000 clients, and with 10, 20 and 40 clients a round.

Both sides run the same rounds on the same data: local SGD of the same clients, then the average of the models. The
plain loop is the obvious one: a module, ``torch.optim.SGD``, a shuffled index per epoch, ``x[batch]``, torch's own
number of threads. Turns alternate, and each side's best of ``--repeats`` turns counts.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from fedcohort.simulate.engine import ClientData, Engine, Jobs
from fedcohort.simulate.models import build_model
from fedcohort.training.local import LocalTraining

THREADS = torch.get_num_threads()


@dataclass
class Workload:
    name: str
    model: str
    classes: int
    shape: tuple[int, ...]  # of a sample, channels last
    sizes: np.ndarray  # (N,) samples of each client
    available: int
    cohort: int
    local: LocalTraining
    rounds: int  # in one turn


def workloads() -> dict[str, Workload]:
    generator = np.random.default_rng(0)
    w1 = LocalTraining(steps=20, batch_size=64, lr=0.005, weight_decay=1e-4)
    w2 = LocalTraining(steps=25, batch_size=50, lr=0.01)
    w3 = LocalTraining(steps=5, batch_size=64, lr=0.01)
    return {
        "W1": Workload("W1", "mlp", 10, (28, 28), np.full(100, 600), 100, 10, w1, 20),
        "W2": Workload("W2", "lenet", 10, (32, 32, 3), np.full(200, 250), 200, 10, w2, 2),
        "W3": Workload("W3", "mlp", 62, (28, 28), generator.integers(20, 181, 3500), 350, 30, w3, 20),
    }


class Data:
    """Return random images as bytes, and the samples of each client scattered over them."""

    def __init__(self, work: Workload) -> None:
        generator = np.random.default_rng(1)
        total = int(work.sizes.sum())
        self.x = generator.integers(0, 256, (total, *work.shape), dtype=np.uint8)
        self.y = generator.integers(0, work.classes, total)
        order = generator.permutation(total)
        self.clients = ClientData(
            order, np.concatenate([[0], np.cumsum(work.sizes)]), self.y[order], np.zeros(len(work.sizes), np.int64)
        )


def cohorts(work: Workload, turn: int) -> list[np.ndarray]:
    generator = np.random.default_rng((2, turn))
    everybody = len(work.sizes)
    return [
        generator.permutation(generator.permutation(everybody)[: work.available])[: work.cohort]
        for _ in range(work.rounds)
    ]


class Plain:
    """The plain loop."""

    def __init__(self, work: Workload, data: Data, x: torch.Tensor) -> None:
        self.work, self.x = work, x
        self.y = torch.from_numpy(data.y)
        bounds = data.clients.offsets
        indices = torch.from_numpy(data.clients.indices)
        self.indices = [indices[a:b] for a, b in itertools.pairwise(bounds)]
        self.model = build_model(work.model, tuple(x.shape[1:]), work.classes)

    def run(self, chosen: list[np.ndarray]) -> None:
        torch.set_num_threads(THREADS)  # the engine with its workers leaves this process one thread
        try:
            self.rounds(chosen)
        finally:
            torch.set_num_threads(1)

    def rounds(self, chosen: list[np.ndarray]) -> None:
        for cohort in chosen:
            start = {name: value.clone() for name, value in self.model.state_dict().items()}
            total = {name: torch.zeros_like(value) for name, value in start.items()}
            for client in cohort:
                self.model.load_state_dict(start)
                self.client(self.indices[client])
                for name, value in self.model.state_dict().items():
                    total[name] += value / len(cohort)
            self.model.load_state_dict(total)

    def client(self, mine: torch.Tensor) -> None:
        local = self.work.local
        optimizer = torch.optim.SGD(self.model.parameters(), lr=local.lr, weight_decay=local.weight_decay)
        step = 0
        while True:
            order = mine[torch.randperm(len(mine))]
            for start in range(0, len(order), local.batch_size):
                batch = order[start : start + local.batch_size]
                optimizer.zero_grad()
                F.cross_entropy(self.model(self.x[batch]), self.y[batch]).backward()
                optimizer.step()
                step += 1
                if step == local.steps:
                    return


class Ours:
    """The engine."""

    def __init__(self, work: Workload, data: Data, workers: int | None) -> None:
        self.engine = Engine(
            data.x,
            data.y,
            data.x[:10],
            data.y[:10],
            classes=work.classes,
            federations=[data.clients],
            model=work.model,
            local=work.local,
            device="cpu",
            workers=workers,
        )
        self.model = self.engine.init(0)[None]
        self.round = 0

    def run(self, chosen: list[np.ndarray]) -> None:
        for cohort in chosen:
            zeros = np.zeros(len(cohort), np.int64)
            trained = self.engine.train(self.model, Jobs(zeros, zeros, cohort, zeros + self.round, zeros))
            self.model = trained.params.mean(0, keepdim=True)
            self.round += 1


def rate(side: Plain | Ours, chosen: list[np.ndarray]) -> float:
    began = time.perf_counter()
    side.run(chosen)
    return len(chosen) / (time.perf_counter() - began)


def compare(work: Workload, repeats: int, workers: int | None) -> None:
    data = Data(work)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ours = Ours(work, data, workers)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    tensor = ours.engine.store.x.numel() * 4
    x = ours.engine.inputs(np.arange(len(data.x)))
    plain = Plain(work, data, x)
    for side in (ours, plain):
        side.run(cohorts(work, 99)[:2])
    best = {"plain": 0.0, "ours": 0.0}
    for turn in range(repeats):
        chosen = cohorts(work, turn)
        best["plain"] = max(best["plain"], rate(plain, chosen))
        best["ours"] = max(best["ours"], rate(ours, chosen))
    ratio = best["ours"] / best["plain"]
    print(
        f"{work.name}: plain {best['plain']:7.2f} rounds/s, engine {best['ours']:7.2f} rounds/s, {ratio:5.2f}x; "
        f"building the engine took {grown / tensor:.2f}x the data tensor of {tensor / 2**20:.0f} MiB",
        flush=True,
    )
    ours.engine.close()


def idle(repeats: int, workers: int | None) -> None:
    for everybody, cohort in ((100, 10), (10_000, 10), (100, 20), (100, 40)):
        base = workloads()["W1"]
        work = Workload("idle", "mlp", 10, (28, 28), np.full(100, 600), 100, cohort, base.local, 10)
        data = Data(work)
        if everybody > 100:  # further clients own the same samples again, so only the index grows
            clients = data.clients
            times = everybody // 100
            data.clients = ClientData(
                np.tile(clients.indices, times),
                np.arange(0, 600 * everybody + 1, 600),
                np.tile(clients.labels, times),
                np.zeros(everybody, np.int64),
            )
        ours = Ours(work, data, workers)
        ours.run(cohorts(work, 99)[:2])
        best = max(rate(ours, cohorts(work, turn)) for turn in range(repeats))
        print(f"{everybody:6d} clients, {cohort:2d} a round: {1e3 / best:7.2f} ms a round", flush=True)
        ours.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["W1", "W3", "W2", "idle"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name in options.what:
        if name == "idle":
            idle(options.repeats, options.workers)
        else:
            compare(workloads()[name], options.repeats, options.workers)


if __name__ == "__main__":
    main()
