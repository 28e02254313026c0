"""The leaderboard of a reproduction, as Markdown.

    python reproduce/summary.py RUN [--last 50] [--targets 0.62,0.69] [--noise]

One table per setting, the same that ``fedcohort compare`` and ``fedcohort report`` show, with the rounds of every seed
to each target and, with --noise, the mean share of wrong labels of those picked, over all rounds and the last fifty.
Without --last and --targets, the configuration's.
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


def noise_of_picks(found, setting, label):
    """Mean share of wrong labels among the picked, over all rounds and over the last fifty, over seeds."""
    shares = []
    for run in found.runs:
        if run.label == label and setting_name(run.setting) == setting:
            rate = found.federation(run.id).noise_rate
            picked = np.array([rate[cohort].mean() if len(cohort) else np.nan for cohort in found.cohorts(run)])
            shares.append((np.nanmean(picked), np.nanmean(picked[-50:])))
    return np.mean(shares, axis=0)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--last", type=int, default=None)
    parser.add_argument("--targets", default="")
    parser.add_argument("--noise", action="store_true")
    given = parser.parse_args(arguments)
    found = results.load(given.run)
    targets = [float(item) for item in given.targets.split(",") if item]
    for board in found.leaderboards(targets=targets, terminal=given.last):
        table = leaderboard_table(board)
        for i, target in enumerate(board.targets):
            reached = [" ".join(str(seed.rounds_to[i] or "-") for seed in row.seeds) for row in board.rows]
            table = with_column(table, f"Rounds to {board.metric.level(target)} by seed", reached)
        if given.noise:
            shares = [noise_of_picks(found, board.setting, row.label) for row in board.rows]
            table = with_column(table, "Noise of picks", [f"{share:.3f}" for share, _ in shares])
            table = with_column(table, "Last 50 rounds", [f"{share:.3f}" for _, share in shares])
        print(f"## {table.title}\n\n{to_markdown(table)}")


if __name__ == "__main__":
    main()
