"""The table of a reproduction, as Markdown.

    python reproduce/summary.py RUN [--last 50] [--targets 0.62,0.69] [--noise]

One row per setting and selector over all seeds: rounds to each target (one number per seed), terminal accuracy (mean of
the last rounds, then mean ± standard deviation over seeds), mean class imbalance of the cohorts and, with --noise, the
mean share of wrong labels of those picked, over all rounds and over the last fifty.
"""

from __future__ import annotations

import argparse

import numpy as np

from fedcohort.simulate import results
from fedcohort.simulate.metrics import Curve


def rows(path, last, targets, noise):
    found = results.load(path)
    table = found.rounds.sort_by("round")
    run_of = np.array(table["run"].to_pylist())
    accuracy = table["accuracy"].to_numpy(zero_copy_only=False).astype(float)
    qcid = table["qcid"].to_numpy(zero_copy_only=False).astype(float)
    cohorts = table["cohort"].to_pylist()
    groups = {}
    for run in found.runs:
        mine = np.flatnonzero(run_of == run.id)
        curve = Curve(np.arange(len(mine)), accuracy[mine])
        rate = found.federation(run.id).noise_rate
        picked = np.array([rate[cohorts[i]].mean() if cohorts[i] else np.nan for i in mine])
        groups.setdefault((run.setting.get("name", ""), run.label), []).append(
            {
                "hits": [curve.rounds_to(target) for target in targets],
                "terminal": curve.terminal(last),
                "qcid": np.nanmean(qcid[mine]),
                "noise": (np.nanmean(picked), np.nanmean(picked[-50:])),
            }
        )
    for (setting, label), runs in groups.items():
        terminal = np.array([run["terminal"] for run in runs])
        cells = [setting, label]
        for i in range(len(targets)):
            cells.append(" ".join("-" if run["hits"][i] is None else str(run["hits"][i]) for run in runs))
        deviation = terminal.std(ddof=1) if len(terminal) > 1 else 0.0
        cells += [f"{terminal.mean():.4f} ± {deviation:.4f}", f"{np.mean([run['qcid'] for run in runs]):.4f}"]
        if noise:
            cells += [f"{np.mean([run['noise'][part] for run in runs]):.3f}" for part in (0, 1)]
        yield cells


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--last", type=int, default=50)
    parser.add_argument("--targets", default="")
    parser.add_argument("--noise", action="store_true")
    arguments = parser.parse_args()
    targets = [float(item) for item in arguments.targets.split(",") if item]
    heads = ["setting", "selector", *(f"rounds to {t:.0%}" for t in targets), "terminal accuracy", "mean QCID"]
    heads += ["noise of picks", "last 50 rounds"] if arguments.noise else []
    print("| " + " | ".join(heads) + " |")
    print("|" + "---|" * len(heads))
    for cells in rows(arguments.run, arguments.last, targets, arguments.noise):
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
