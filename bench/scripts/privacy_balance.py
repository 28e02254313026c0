"""How much balance and accuracy private labels keep: noise by epsilon, estimates, exact products.

Run: python bench/scripts/privacy_balance.py [--folder DATA] [--rounds 200] [--seeds 3]; writes
docs/img/privacy-epsilon.png and bench/results/privacy_balance.md.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.results import load

EPSILONS = (0.5, 1, 2, 4, 8)
ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, dict[str, Any]] = {
    "digits, 29 samples a client": {
        "data": {"name": "digits"},
        "scenario": {"partition": {"name": "dirichlet", "clients": 50, "alpha": 0.1}},
        "local": {"batch_size": 16, "steps": 10, "lr": 0.05},
    },
    "Fashion-MNIST, 300 samples a client": {
        "data": {"name": "fashion-mnist"},
        "scenario": {"partition": {"name": "dirichlet", "clients": 200, "alpha": 0.1}},
        "local": {"batch_size": 32, "steps": 10, "lr": 0.05},
    },
}


def experiment(setting: dict[str, Any], folder: str | None, rounds: int, seeds: int) -> Experiment:
    selectors: dict[str, Any] = {
        "uniform": {},
        "exact": {"name": "fedcbs-chance"},
        "blind": {"name": "fedcbs-blind", "labels": "none"},
    }
    for epsilon in EPSILONS:
        selectors[f"epsilon {epsilon}"] = {
            "name": "fedcbs-chance",
            "labels": {"name": "noisy", "epsilon": float(epsilon)},
        }
    table = {
        **setting,
        "data": {**setting["data"], **({"folder": folder} if folder and setting["data"]["name"] != "digits" else {})},
        "seeds": seeds,
        "model": {"name": "mlp"},
        "run": {"rounds": rounds, "cohort": 10, "eval_every": 5, "device": "cpu"},
        "selectors": selectors,
    }
    return Experiment.from_dict(table)


def measured(folder: str | None, rounds: int, seeds: int) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Return QCID and accuracy of every seed in the last quarter of the rounds, by setting and label."""
    figures: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for title, setting in SETTINGS.items():
        with tempfile.TemporaryDirectory() as place:
            out = Path(place) / "out"
            Simulation(experiment(setting, folder, rounds, seeds), out, device="cpu").run()
            results = load(out)
            by_run = {run.id: run.label for run in results.runs}
            rows = results.rounds.to_pylist()
            figures[title] = {}
            for label in dict.fromkeys(by_run.values()):
                runs = [run for run, of in by_run.items() if of == label]
                late = [[r for r in rows if r["run"] == run and r["round"] >= 3 * rounds // 4] for run in runs]
                qcid = [float(np.mean([r["qcid"] for r in part])) for part in late]
                accuracy = [
                    float(
                        np.mean(
                            [r["accuracy"] for r in part if r["accuracy"] is not None and np.isfinite(r["accuracy"])]
                        )
                    )
                    for part in late
                ]
                figures[title][label] = (qcid, accuracy)
    return figures


def picture(figures: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (balance, accuracy) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for (title, labels), colour in zip(figures.items(), ("#1f77b4", "#d95f02"), strict=True):
        for place, axes in enumerate((balance, accuracy)):
            values = [labels[f"epsilon {e}"][place] for e in EPSILONS]
            axes.errorbar(
                EPSILONS, [np.mean(v) for v in values], [np.std(v) for v in values], marker="o", color=colour,
                label=title,
            )  # fmt: skip
            for label, style in (("exact", "--"), ("blind", "-."), ("uniform", ":")):
                axes.axhline(np.mean(labels[label][place]), color=colour, linestyle=style, label=label)
    for axes in (balance, accuracy):
        axes.set_xscale("log")
        axes.set_xticks(EPSILONS, [str(e) for e in EPSILONS])
        axes.xaxis.minorticks_off()
        axes.set_xlabel("epsilon")
    balance.set_title("QCID of the cohorts (lower is better)")
    balance.set_yscale("log")
    figure.legend(*balance.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    accuracy.set_title("accuracy")
    figure.savefig(path, dpi=200)


def page(figures: dict[str, Any], rounds: int, seeds: int) -> str:
    lines = [
        "# Class balance and accuracy with private labels",
        "",
        f"`python bench/scripts/privacy_balance.py --rounds {rounds} --seeds {seeds}`: Dirichlet(0.1) label skew, MLP, "
        f"cohorts of 10, {rounds} rounds, {seeds} seeds; means over the last quarter of the rounds, with the standard "
        "deviation over seeds. Geometric noise, one release.",
    ]
    for title, labels in figures.items():
        lines += ["", f"## {title}", "", "| labels | QCID | accuracy |", "|---|---:|---:|"]
        for label, (qcid, accuracy) in labels.items():
            cells = [f"{np.mean(values):.4f} ± {np.std(values):.4f}" for values in (qcid, accuracy)]
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where the datasets are")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    outcome = measured(arguments.folder, arguments.rounds, arguments.seeds)
    (ROOT / "bench/results/privacy_balance.md").write_text(page(outcome, arguments.rounds, arguments.seeds))
    picture(outcome, ROOT / "docs/img/privacy-epsilon.png")
    print(page(outcome, arguments.rounds, arguments.seeds))
