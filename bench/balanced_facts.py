"""What `balanced` makes of the facts it is given: exact and private label counts, directions of updates, nothing.

Run: python bench/balanced_facts.py [--seeds report|tuning|LIST] [--processes N]; writes its numbers to
bench/results/balanced_facts.json and draws docs/img/balanced-facts.png, which --picture draws anew from what is stored.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.rounds.runner import Simulation
from fedcohort.simulate.store.results import load
from fedcohort.studies.benchmark.run import parse_seeds
from fedcohort.studies.benchmark.scores import half_interval, score
from fedcohort.studies.benchmark.suite import table

ROOT = Path(__file__).parents[1]
STORED = ROOT / "bench/results/balanced_facts.json"
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
BLIND = {"name": "balanced", "labels": {"name": "none"}}
FACTS: dict[str, dict[str, Any]] = {
    "counts": {"name": "balanced"},
    "rotated": {"name": "balanced", "labels": {"name": "rotated"}},
    **{f"epsilon {e:g}": {"name": "balanced", "labels": {"name": "noisy", "epsilon": e}} for e in EPSILONS},
    "directions": BLIND,
    "turns": {**BLIND, "balance": "nothing"},
}


def measured(seeds: list[int], processes: int | None) -> dict[str, Any]:
    """Gain over uniform of every fact, setting and seed, on digits."""
    with tempfile.TemporaryDirectory() as place:
        experiment = Experiment.from_dict(table("digits", FACTS, seeds))
        Simulation(experiment, Path(place) / "out", device="cpu", processes=processes).run()
        found = score(load(Path(place) / "out"))
    return {
        "data": found.data,
        "seeds": list(found.seeds),
        "rounds": found.rounds,
        "settings": list(found.settings),
        "facts": {
            line.label: {
                "parameters": FACTS[line.label],
                "mean_gain": line.mean,
                "interval": line.interval,
                "worst_setting": line.worst[0],
                "worst_gain": line.worst[1],
                "gains": {name: values.tolist() for name, values in line.gain.items()},
            }
            for line in sorted(found.lines, key=lambda line: list(FACTS).index(line.label))
        },
    }


def markdown(found: dict[str, Any]) -> str:
    """Return the table of the page."""
    lines = ["| what is known | mean gain | worst |", "|:--|--:|--:|"]
    for label, fact in found["facts"].items():
        lines.append(
            f"| {label} | {fact['mean_gain']:+.2f} ± {fact['interval']:.2f} | {fact['worst_gain']:+.1f}"
            f" ({fact['worst_setting']}) |"
        )
    return "\n".join(lines)


def picture(found: dict[str, Any], path: Path) -> None:
    """Draw the mean gain by epsilon, and what other facts give as lines."""
    import matplotlib.pyplot as plt

    def mean(label: str) -> tuple[float, float]:
        gains = np.mean(list(found["facts"][label]["gains"].values()), axis=0)
        return float(gains.mean()), half_interval(gains)

    private = [mean(f"epsilon {e:g}") for e in EPSILONS]
    figure, axes = plt.subplots(figsize=(7.6, 4.2), layout="constrained")
    axes.errorbar(
        EPSILONS, [m for m, _ in private], [h for _, h in private], marker="o", color="#1f77b4",
        label="counts with noise",
    )  # fmt: skip
    for label, style in {"counts": "-", "directions": "-.", "turns": ":"}.items():
        axes.axhline(mean(label)[0], color="#d95f02", linestyle=style, label=label)
    axes.set_xscale("log")
    axes.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
    axes.xaxis.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("epsilon of one release")
    axes.set_ylabel("accuracy above uniform, points")
    axes.legend()
    figure.savefig(path, dpi=200)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="report")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument("--picture", action="store_true", help="only draw what is stored")
    arguments = parser.parse_args()
    if not arguments.picture:
        outcome = measured(parse_seeds(arguments.seeds), arguments.processes)
        arguments.out.write_text(json.dumps(outcome, indent=1) + "\n")
    stored = json.loads(arguments.out.read_text())
    print(markdown(stored))
    if arguments.picture or arguments.out == STORED:
        picture(stored, ROOT / "docs/img/balanced-facts.png")
