"""Skewness analytics on a federation whose skewness is known."""

import numpy as np
import pytest

from fedcohort.core.errors import InputError
from fedcohort.simulate.analytics import rank_by_skewness

TABLE = {
    "data": {"name": "digits"},
    "scenario": {"partition": {"name": "skewness", "clients": 30, "samples": 120}},
    "model": {"name": "logistic"},
    "run": {"cohort": 6, "device": "cpu", "workers": 1, "targets": [0.5], "baseline": "nobody here"},
    "seeds": [3],
}


def test_the_least_skewed_come_first_and_intervals_hold():
    totals, rows = [], []
    report = rank_by_skewness(TABLE, on_start=totals.append, on_round=lambda run, row: rows.append(row["round"]))
    assert totals == [100]
    assert report.rounds == 100 == len(rows)
    truth = report.true_skewness
    assert report.agreement > 0.8
    order = report.ranking.order
    assert truth[order[:10]].mean() < truth[order[-10:]].mean() / 2
    # the ranks that the intervals leave open hold the true rank of nearly everybody
    true_rank = np.empty(30, int)
    true_rank[np.argsort(truth)] = np.arange(1, 31)
    inside = (report.ranking.best_rank <= true_rank) & (true_rank <= report.ranking.worst_rank)
    assert inside.mean() > 0.8


def test_clients_only_compute_gradients():
    """Each client sends one full-batch step and nothing else."""
    report = rank_by_skewness(TABLE, rounds=2)
    assert report.rounds == 2
    parameters = 64 * 10 + 10
    assert report.megabytes == pytest.approx(2 * 6 * 2 * 4 * parameters / 1e6)


def test_bad_arguments():
    with pytest.raises(InputError, match="at least two"):
        rank_by_skewness({**TABLE, "run": {"cohort": 1}})
    with pytest.raises(ValueError, match="level"):
        rank_by_skewness(TABLE, rounds=1, level=1.5)
