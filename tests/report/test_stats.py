"""The leaderboard's numbers against independent computations."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import stats as reference

from fedcohort.errors import InputError
from fedcohort.report.data import Group, RunCurve, Setting
from fedcohort.report.stats import gini, holm, leaderboard, paired_t_test


def run(label, seed, accuracy, *, clock=None, selector=None, state="finished"):
    rounds = np.arange(len(accuracy))
    values = {name: np.full(len(rounds), np.nan) for name in ("loss", "qcid", "seconds")}
    values["accuracy"] = np.array(accuracy, float)
    values["clock"] = np.array(clock if clock is not None else rounds + 1, float)
    return RunCurve(
        f"{label}-s{seed}", label, selector or label, seed, state, "", "f", {}, rounds, values,
        np.zeros(0, int), np.zeros(0, int), None,
    )  # fmt: skip


def setting(**groups):
    made = tuple(Group(label, label, tuple(runs), i, 0) for i, (label, runs) in enumerate(groups.items()))
    return Setting("toy", made, 4, {}, max(len(r.round) for g in made for r in g.runs))


@pytest.mark.parametrize("seed", range(5))
def test_gini_is_the_mean_absolute_difference(seed):
    counts = np.random.default_rng(seed).integers(0, 20, 30).astype(float)
    pairs = sum(abs(a - b) for a, b in itertools.product(counts, counts))
    assert gini(counts) == pytest.approx(pairs / (2 * len(counts) ** 2 * counts.mean()))


def test_gini_of_nothing_is_unknown():
    assert math.isnan(gini(np.zeros(3)))


@pytest.mark.parametrize("seed", range(5))
def test_paired_test_equals_the_reference(seed):
    rng = np.random.default_rng(seed)
    ours, theirs = rng.normal(0.1, 1, 6), rng.normal(0, 1, 6)
    assert paired_t_test(ours - theirs) == pytest.approx(reference.ttest_rel(ours, theirs).pvalue)


def test_paired_test_needs_two_seeds_that_differ():
    assert math.isnan(paired_t_test(np.array([1.0])))
    assert math.isnan(paired_t_test(np.array([0.5, 0.5, 0.5])))


def test_holm_by_its_definition():
    p = [0.04, 0.001, 0.03, 0.2]
    order = sorted(range(4), key=lambda i: p[i])
    expected = [0.0] * 4
    for k, i in enumerate(order):
        expected[i] = min(1.0, max((4 - j) * p[order[j]] for j in range(k + 1)))
    assert holm(p) == pytest.approx(expected)
    assert holm([math.nan, 0.02])[1] == pytest.approx(0.02)


def test_rounds_to_target_speed_up_and_pairing():
    board = leaderboard(
        setting(
            uniform=[run("uniform", 1, [0.1, 0.3, 0.5, 0.6]), run("uniform", 2, [0.1, 0.2, 0.5, 0.7])],
            ours=[run("ours", 1, [0.5, 0.6, 0.7, 0.8]), run("ours", 2, [0.4, 0.6, 0.7, 0.75])],
        ),
        targets=(0.5, 0.3),
    )
    by = {row.label: row for row in board.rows}
    assert board.rows[0].label == "ours" and board.target == 0.5 and board.lower_targets == (0.3,)
    assert by["uniform"].rounds_to_target.mean == 3 and by["ours"].rounds_to_target.mean == 1.5
    assert by["ours"].speed_up == pytest.approx(2.0)
    assert by["ours"].rounds_to_lower[0].mean == 1.0 and by["uniform"].rounds_to_lower[0].mean == 2.5
    assert by["uniform"].paired is None
    paired = by["ours"].paired
    assert paired.seeds == 2 and paired.wins == 2
    # terminal accuracy is the last fifth of a short run, here the last round alone
    assert paired.difference == pytest.approx(((0.8 - 0.6) + (0.75 - 0.7)) / 2)
    assert "only 2 common seeds" in board.note


def test_seeds_that_only_one_side_ran_do_not_count():
    board = leaderboard(
        setting(
            uniform=[run("uniform", 1, [0.5]), run("uniform", 2, [0.5])],
            ours=[run("ours", 2, [0.6]), run("ours", 3, [0.9])],
        )
    )
    paired = next(row.paired for row in board.rows if row.label == "ours")
    assert paired.seeds == 1 and paired.difference == pytest.approx(0.1) and math.isnan(paired.p)
    assert "no test" in board.note


def test_a_seed_that_never_arrives_takes_the_speed_up_away():
    board = leaderboard(
        setting(
            uniform=[run("uniform", 1, [0.5, 0.6]), run("uniform", 2, [0.5, 0.6])],
            ours=[run("ours", 1, [0.6, 0.6]), run("ours", 2, [0.1, 0.2])],
        ),
        targets=(0.6,),
    )
    row = next(row for row in board.rows if row.label == "ours")
    assert row.rounds_to_target.count == 1 and row.runs == 2
    assert math.isnan(row.speed_up)


def test_default_target_is_where_the_baseline_ends():
    board = leaderboard(setting(uniform=[run("uniform", 1, [0.2, 0.678])], ours=[run("ours", 1, [0.9, 0.95])]))
    assert board.target == pytest.approx(0.67)
    assert "uniform" in board.target_source


def test_unevaluated_and_diverged_runs_do_not_break_the_table():
    nothing = [math.nan, math.nan]
    board = leaderboard(
        setting(uniform=[run("uniform", 1, [0.2, 0.5])], ours=[run("ours", 1, nothing, state="diverged")])
    )
    row = next(row for row in board.rows if row.label == "ours")
    assert row.diverged == 1 and row.terminal.count == 0 and board.rows[-1].label == "ours"
    alone = leaderboard(setting(ours=[run("ours", 1, nothing)]))
    assert math.isnan(alone.target)


def test_baseline_can_be_named_and_a_wrong_name_is_helped():
    groups = setting(uniform=[run("uniform", 1, [0.5])], fedcor=[run("fedcor", 1, [0.6])])
    assert leaderboard(groups, baseline="fedcor").baseline == "fedcor"
    with pytest.raises(InputError, match="did you mean 'fedcor'"):
        leaderboard(groups, baseline="fedcorr")
    without = dataclasses.replace(groups, groups=groups.groups[1:])
    assert leaderboard(without).baseline == "fedcor"


@pytest.mark.parametrize("target", [0.0, 1.5, 62.0])
def test_targets_outside_are_refused(target):
    with pytest.raises(InputError, match=r"62% is 0\.62"):
        leaderboard(setting(uniform=[run("uniform", 1, [0.5])]), targets=(target,))
