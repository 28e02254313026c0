"""The leaderboard of a reproduction, as Markdown.

    python bench/scripts/summary.py RUN [--targets 0.62,0.69] [--noise]

One table per setting, as ``fedcohort compare`` and ``fedcohort report`` show it, with the rounds of every seed to each
target. With --noise, it also has the mean share of wrong labels of the clients picked, over all rounds and the last
fifty. --targets defaults to the configuration's values.
"""

from __future__ import annotations

import argparse
import dataclasses

import numpy as np

from fedcohort.simulate.leaderboard import leaderboard_table, setting_name
from fedcohort.simulate.leaderboard.formats import Cell, to_markdown
from fedcohort.simulate.store import results


def with_column(table, heading, texts):
    rows = tuple((*row, Cell(text)) for row, text in zip(table.rows, texts, strict=True))
    return dataclasses.replace(table, columns=(*table.columns, heading), rows=rows)


def noise_of_picks(experiment, setting, label):
    """Return the mean share of wrong labels of the clients picked, over all rounds and over the last fifty."""
    shares = []
    for run in experiment.runs:
        if run.label == label and setting_name(run.setting) == setting:
            rate = experiment.federation(run.id).noise_rate
            picked = np.array([rate[cohort].mean() if len(cohort) else np.nan for cohort in experiment.cohorts(run)])
            shares.append((np.nanmean(picked), np.nanmean(picked[-50:])))
    return np.mean(shares, axis=0)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--targets", default="")
    parser.add_argument("--noise", action="store_true")
    given = parser.parse_args(arguments)
    experiment = results.load(given.run)
    targets = [float(item) for item in given.targets.split(",") if item]
    for board in experiment.leaderboards(targets=targets):
        table = leaderboard_table(board)
        for i, target in enumerate(board.targets):
            reached = [" ".join(str(seed.rounds_to[i] or "-") for seed in row.seeds) for row in board.rows]
            table = with_column(table, f"Rounds to {board.metric.level(target)} by seed", reached)
        if given.noise:
            shares = [noise_of_picks(experiment, board.setting, row.label) for row in board.rows]
            table = with_column(table, "Noise of picks", [f"{share:.3f}" for share, _ in shares])
            table = with_column(table, "Last 50 rounds", [f"{share:.3f}" for _, share in shares])
        print(f"## {table.title}\n\n{to_markdown(table)}")


if __name__ == "__main__":
    main()
