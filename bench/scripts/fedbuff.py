"""FedBuff's claim: how much sooner does it reach a target than over-selected rounds, and than FedAsync?

  python bench/scripts/fedbuff.py FOLDER [--seeds 300,301,302] [--ways rounds,fedbuff,fedasync] [--data FOLDER] [--tune]

Nguyen et al. (AISTATS 2022) report that FedBuff is 3.3 times as efficient as synchronous FL with over-selection, and up
to 2.5 times as efficient as asynchronous FL, with hundreds to thousands of clients at work. Here: Fashion-MNIST at
2,000 clients (Dirichlet 0.3, 30 samples each on average), one local epoch, 130 clients at work, durations log-normal
with sigma 1 (the paper's are half-normal), all clients always on. Rounds of FedAvgM ask 130 clients and close with the
first 100; FedBuff makes a model of every 10 answers, FedAsync of every one. Each way uses the best of its STEPS, chosen
with --tune on seed 0.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.leaderboard.significance import half_interval
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.results import load

AT_WORK, GOAL, TARGET, SECONDS = 130, 100, 0.75, 3000.0
STEPS: dict[str, list[dict[str, Any]]] = {
    "rounds": [{"name": "fedavgm", "global_rate": rate} for rate in (1.0, 2.0, 4.0, 8.0)],
    "fedbuff": [{"name": "fedbuff", "global_rate": rate} for rate in (1.0, 2.0, 4.0, 8.0)],
    "fedasync": [{"name": "fedasync", "alpha": alpha} for alpha in (0.2, 0.6, 1.0)],
}
BEST = {"rounds": 2, "fedbuff": 2, "fedasync": 1}  # positions in STEPS


def table(ways: list[str], seeds: list[int], tune: bool, folder: str | None) -> dict[str, Any]:
    run = {
        "rounds": {"cohort": GOAL, "spares": AT_WORK - GOAL},
        "fedbuff": {"mode": "async", "cohort": AT_WORK, "buffer": 10, "max_answers": 10**6, "eval_every": 10},
        "fedasync": {"mode": "async", "cohort": AT_WORK, "buffer": 1, "max_answers": 10**6, "eval_every": 100},
    }
    return {
        "name": "fedbuff",
        "seeds": [0] if tune else seeds,
        "data": {"name": "fashion-mnist", **({} if folder is None else {"folder": folder})},
        "model": {"name": "mlp"},
        "local": {"epochs": 1, "batch_size": 10, "lr": 0.02},
        "scenario": {
            "partition": {"name": "dirichlet", "clients": 2000, "alpha": 0.3},
            "devices": {"speed": 1.0, "speed_spread": 1.0},
        },
        "run": {"targets": [TARGET], "rounds": 10**6, "seconds": SECONDS},
        "settings": [
            {"name": f"{way} {place}", "run": run[way], "aggregator": step}
            for way in ways
            for place, step in enumerate(STEPS[way])
            if tune or place == BEST[way]
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", default="300,301,302")
    parser.add_argument("--ways", default=",".join(STEPS))
    parser.add_argument("--data", help="where the datasets are")
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    config = table(options.ways.split(","), seeds, options.tune, options.data)
    Simulation(Experiment.from_dict(config), Path(options.folder), device="cpu").run()
    base = None
    for board in load(options.folder).leaderboards():
        runs = board.base.seeds
        reached = [run.seconds_to[0] for run in runs]
        seconds = np.array([SECONDS if time is None else time for time in reached])
        base = seconds if base is None else base
        updates = ", ".join("–" if run.rounds_to[0] is None else str(run.rounds_to[0]) for run in runs)
        logs = np.log(base / seconds)
        half = half_interval(logs)
        low, middle, high = (np.exp(logs.mean() + side * half) for side in (-1, 0, 1))
        each = ", ".join(f"{value:,.0f}" for value in seconds)
        print(f"{board.setting}: {len(runs) - reached.count(None)} of {len(runs)} reach {TARGET:.0%}", end="; ")
        print(f"{seconds.mean():,.0f} s ({each}), {middle:.2f} times as fast as the first", end=" ")
        print(f"({low:.2f} to {high:.2f}); models {updates}; best", ", ".join(f"{run.best:.3f}" for run in runs))


if __name__ == "__main__":
    main()
