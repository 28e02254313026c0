"""Asynchronous runs compared with synchronous ones, and flows at scale.

    python bench/scripts/asynchronous.py [W1] [dispatch] [week] [--repeats 3] [--workers 2]

W1: bench/scripts/simulator.py's W1 as an experiment: 100 clients x 600 samples, MLP 784-64-30-10, 20 steps of batch 64,
    uniform selection, devices of log-normal speeds. Client updates per second of the simulator, in rounds of 10, and
    with 10 and 30 clients at work of which every 10 answers make a model. Turns alternate; each side's best counts.
dispatch: no training. 100,000 clients with sessions and gaps, uniform and balanced selection, an asynchronous session
    with its journal in memory, 100 and 1,000 clients at work: dispatches per second of processor time on one core, and
    the selector's share of that time.
week: the same for a week of 1,000,000 clients, uniform selection, and 100 clients at work for ten minutes each.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fedcohort import ClientTable, LabelCounts, Session
from fedcohort.core.protocol import Status
from fedcohort.hosts.flow import Flow, FlowPolicy
from fedcohort.scenario.devices import WEEK, DrawnDevices, OnlineDevices
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.data import from_arrays
from fedcohort.simulate.rounds.prepare import prepare

MIX = (30, 20, 10, 5, 2, 1, 1, 1, 1, 1)  # of classes, at every client: no selection can balance it
PHONES = {"session": 2400.0, "gap": 7200.0, "spread": 0.8, "variety": 0.5, "daily": 0.7, "zones": 4}


def experiment(mode: str, busy: int, models: int) -> Experiment:
    generator = np.random.default_rng(1)
    x = generator.integers(0, 256, (60_000, 28, 28), dtype=np.uint8)
    y = generator.integers(0, 10, 60_000)
    return Experiment.from_dict(
        {
            "data": from_arrays(x, y, x[:10], y[:10]),
            "scenario": {
                "partition": {"name": "iid", "clients": 100},
                "devices": {"speed": 200.0, "speed_spread": 0.7, "bandwidth_spread": 1.0},
            },
            "model": {"name": "mlp"},
            "local": {"steps": 20, "batch_size": 64, "lr": 0.005, "weight_decay": 1e-4},
            "run": {"mode": mode, "cohort": busy, "buffer": 10, "rounds": models, "eval_every": 10**9},
        }
    )


def compare(repeats: int, workers: int | None) -> None:
    sides = {"rounds of 10": ("sync", 10), "10 at work": ("async", 10), "30 at work": ("async", 30)}
    best = dict.fromkeys(sides, 0.0)
    for _ in range(repeats):
        for name, (mode, busy) in sides.items():
            group = prepare(experiment(mode, busy, 10**6), "cpu").group(0, journals=None, device="cpu", workers=workers)
            group.start()
            for _ in range(3):
                group.step()
            began = time.perf_counter()
            for _ in range(40):
                group.step()
            best[name] = max(best[name], 400 / (time.perf_counter() - began))
            group.close()
    base = best["rounds of 10"]
    for name, rate in best.items():
        print(f"W1, {name:13s} {rate:7.1f} client updates/s, {rate / base:.2f} of rounds", flush=True)


def table(clients: int, mix: Sequence[int] = (1,) * 10) -> ClientTable:
    counts = np.random.default_rng(0).integers(0, 60, (clients, 10)) * mix
    return ClientTable(sizes=counts.sum(axis=1), labels=LabelCounts(counts))


def play(flow: Flow, roster: OnlineDevices, seconds: np.ndarray, *, until: float, most: int) -> tuple[int, float]:
    """Play events until a time or a number of dispatches; return the number of dispatches and the time."""
    queue: list[tuple[float, int]] = []
    clock, asked = 0.0, 0
    while clock < until and asked < most:
        if flow.is_due(clock):
            flow.advance(clock)
        while flow.free and asked < most:
            cohort = flow.choose(available=roster.on)
            if not cohort.size:
                break
            heapq.heappush(queue, (clock + seconds[cohort.clients[0]], cohort.ticket))
            asked += 1
        clock, ticket = heapq.heappop(queue)
        flow.receive(ticket, Status.OK)
        roster.advance(clock)
    return asked, clock


@contextlib.contextmanager
def clocked(selector: object) -> Iterator[list[float]]:
    """Yield a list of one number, the processor time that the selector's functions have taken so far."""
    cls, spent = type(selector), [0.0]
    before = {name: getattr(cls, name) for name in ("select", "update")}

    def measure(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.process_time()
            try:
                return function(*arguments)
            finally:
                spent[0] += time.process_time() - began

        return call

    for name, function in before.items():
        setattr(cls, name, measure(function))
    try:
        yield spent
    finally:
        for name, function in before.items():
            setattr(cls, name, function)


def dispatch(
    clients: int,
    selector: str,
    busy: int,
    most: int,
    until: float = np.inf,
    mean: float = 120.0,
    mix: Sequence[int] = (1,) * 10,
) -> None:
    devices = DrawnDevices(states={"online": PHONES})
    began = time.process_time()
    session = Session(selector, table(clients, mix), asynchronous=True, commit="manual")
    roster = OnlineDevices(devices, clients, seed=0)
    seconds = np.random.default_rng(3).exponential(mean, clients)
    ready = time.process_time()
    flow = Flow(session, FlowPolicy(busy, buffer=max(busy // 10, 1)))
    with clocked(session.selector) as own:
        asked, clock = play(flow, roster, seconds, until=until, most=most)
    spent = time.process_time() - ready
    print(
        f"{clients:,} clients, {selector}, {busy:,} at work: {asked:,} dispatches, {asked / spent:,.0f} a second "
        f"({own[0] / spent:.0%} the selector's own); "
        f"{clock / 3600:.1f} simulated hours in {spent:.1f} s (ready after {ready - began:.1f} s)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["W1", "dispatch", "week"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for what in options.what:
        match what:
            case "W1":
                compare(options.repeats, options.workers)
            case "dispatch":
                for busy in (100, 1000):
                    dispatch(100_000, "uniform", busy, 3000)
                dispatch(100_000, "balanced", 100, 500)
                dispatch(100_000, "balanced", 100, 200, mix=MIX)
            case "week":
                dispatch(1_000_000, "uniform", 100, 10**9, WEEK, 600.0)


if __name__ == "__main__":
    main()
