"""How heavy should pseudo-labels be? Random selection with FLASH's loss and with cross-entropy, in settings of tables.

    python bench/experiments/flash/pseudo_labels.py OUT [--folder DATA]

Writes an experiment for each of digits, CIFAR-10 and FEMNIST to OUT, with seeds that no table reports. Prints when runs
get above chance, their best accuracy and their last. Experiments found in OUT are continued.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np

from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.progress import Progress
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.results import load
from fedcohort_bench.papers.catalogue import EXHIBITS
from fedcohort_bench.papers.run import table_of

EVERY = 5  # rounds between two evaluations
SWEEPS = {
    "digits": ("flash-figure-3-digits", "all", ("0/0.45", "0.6/0.3"), (0, 1, 2), 60, 0.15),
    "femnist": ("flash-table-1", "noise", ("15% noise",), (0,), 60, 0.05),
    "cifar10": ("flash-figure-3", "all", ("0/0.45", "0.6/0.3"), (0,), 200, 0.15),
}
"""Exhibit, part, settings, seeds, rounds, and an accuracy above chance."""

ROWS = {
    "cross-entropy": {"loss": "cross-entropy"},
    **{f"alpha {alpha:g}": {"robust_alpha": alpha} for alpha in (0.0, 0.1, 0.25, 0.5, 1.0)},
    "alpha 1, beta 0": {"robust_beta": 0.0},
}


def experiment(data: str, folder: str | None) -> Experiment:
    exhibit, part, settings, seeds, rounds, _ = SWEEPS[data]
    table = table_of(EXHIBITS[exhibit].study, part, rounds=rounds, folder=folder)
    table["seeds"] = list(seeds)
    table["settings"] = [setting for setting in table["settings"] if setting["name"] in settings]
    table["selectors"] = {label: {"name": "uniform", "local": local} for label, local in ROWS.items()}
    table["run"] |= {"baseline": "cross-entropy", "eval_every": EVERY}
    return Experiment.from_dict(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--folder", help="where the datasets are")
    given = parser.parse_args()
    print("| data | setting | loss | leaves chance at round | best | last |\n|---|---|---|---|---|---|")
    for data, (_, _, settings, _, _, level) in SWEEPS.items():
        place = given.out / data
        there = (place / "meta.json").is_file()
        simulation = Simulation.open(place) if there else Simulation(experiment(data, given.folder), place)
        simulation.listeners.append(Progress())
        simulation.run()
        results = load(place)
        for setting in settings:
            for label in ROWS:
                runs = [run for run in results.runs if (run.setting["name"], run.label) == (setting, label)]
                curves = [results.curves[run.id] for run in runs]
                left = [math.inf if (at := curve.rounds_to(level)) is None else at for curve in curves]
                when = "never" if math.isinf(max(left)) else f"{max(left)}"
                best = 100 * np.mean([curve.accuracy.max() for curve in curves])
                last = 100 * np.mean([curve.accuracy[-1] for curve in curves])
                print(f"| {data} | {setting} | {label} | {when} | {best:.1f} | {last:.1f} |")


if __name__ == "__main__":
    main()
