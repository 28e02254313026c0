"""The leaderboard's numbers against independent computations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats as reference

from fedcohort.core.errors import InputError
from fedcohort.report.dashboard.feed import ExperimentItem
from fedcohort.report.data import RunCurve, boards, load_bundle
from fedcohort.report.tables import gini
from fedcohort.simulate.leaderboard import (
    Options,
    leaderboard_table,
    leaderboards_of,
    rank_selectors,
    ranking,
)
from fedcohort.simulate.leaderboard import leaderboard as compute
from fedcohort.simulate.leaderboard.significance import holm, paired_t_test
from fedcohort.simulate.store.results import load
from tests.experiments import run_experiment


def run(label, seed, accuracy, *, clock=None, selector=None, state="finished"):
    rounds = np.arange(len(accuracy))
    values = {name: np.full(len(rounds), np.nan) for name in ("loss", "qcid", "seconds")}
    values["accuracy"] = np.array(accuracy, float)
    values["clock"] = np.array(clock if clock is not None else rounds + 1, float)
    return RunCurve(
        label, selector or label, seed, state, rounds, values, f"{label}-s{seed}", "f", {},
        np.zeros(0, int), np.zeros(0, int), None,
    )  # fmt: skip


def setting(**groups):
    return [run for runs in groups.values() for run in runs]


def leaderboard(runs, **options):
    return compute("toy", runs, Options(**options, strict=True))


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
    assert board.rows[0].label == "ours" and board.target == 0.5 and board.targets == (0.3, 0.5)
    assert by["uniform"].main.rounds.median == 3 and by["ours"].main.rounds.median == 1.5
    assert by["ours"].main.speed.least == pytest.approx(math.sqrt(3 * 1.5)) and by["uniform"].main.speed is None
    assert by["ours"].to_target[0].rounds.median == 1.0 and by["uniform"].to_target[0].rounds.median == 2.5
    assert by["uniform"].paired is None
    paired = by["ours"].paired
    assert paired.seeds == 2 and paired.wins == 2
    # terminal accuracy is the last fifth of a short run, here the last round alone
    assert paired.difference == pytest.approx(((0.8 - 0.6) + (0.75 - 0.7)) / 2)


def test_seeds_that_only_one_side_ran_do_not_count():
    board = leaderboard(
        setting(
            uniform=[run("uniform", 1, [0.5]), run("uniform", 2, [0.5])],
            ours=[run("ours", 2, [0.6]), run("ours", 3, [0.9])],
        )
    )
    paired = next(row.paired for row in board.rows if row.label == "ours")
    assert paired.seeds == 1 and paired.difference == pytest.approx(0.1) and math.isnan(paired.p)
    assert board.conclusion.startswith("Open: with one seed")


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


def test_baseline_can_be_named_and_a_wrong_name_gets_a_hint():
    groups = setting(uniform=[run("uniform", 1, [0.5])], fedcor=[run("fedcor", 1, [0.6])])
    assert leaderboard(groups, baseline="fedcor").baseline == "fedcor"
    with pytest.raises(InputError, match="fedcor"):
        leaderboard(groups, baseline="fedcorr")
    assert leaderboard(groups[1:]).baseline == "fedcor"
    # what a configuration names may not have started yet; then the usual baseline serves
    assert compute("toy", groups, Options(baseline="later")).baseline == "uniform"


@pytest.mark.parametrize("target", [0.0, 1.5, 62.0])
def test_targets_outside_are_refused(target):
    with pytest.raises(InputError, match=r"62% is 0\.62"):
        leaderboard(setting(uniform=[run("uniform", 1, [0.5])]), targets=(target,))


# -- terminal accuracy ----------------------------------------------------------------------------------------------


def test_a_run_of_forty_rounds_ends_where_its_last_fifth_is():
    rising = np.minimum(np.linspace(0.1, 1.3, 40), 0.904)  # most of the curve is the way up
    board = leaderboard(setting(uniform=[run("uniform", 1, rising)]))
    (row,) = board.rows
    assert row.terminal.mean == pytest.approx(0.904) and rising.mean() < 0.7
    assert board.window == 8 and "the last 8 rounds (a fifth of 40)" in leaderboard_table(board).note
    asked = leaderboard(setting(uniform=[run("uniform", 1, rising)]), terminal=50)  # more than there are
    assert (
        asked.rows[0].terminal.mean == pytest.approx(0.904)
        and "the 50 configured are the whole run" in leaderboard_table(asked).note
    )
    assert leaderboard(setting(uniform=[run("uniform", 1, rising)]), terminal=20).window == 20


def test_a_run_that_stopped_early_ends_where_its_own_last_fifth_is():
    board = leaderboard(
        setting(
            uniform=[run("uniform", 1, np.full(1000, 0.5))],
            ours=[run("ours", 1, np.linspace(0.1, 0.6, 20), state="stopped")],
        )
    )
    row = next(row for row in board.rows if row.label == "ours")
    assert board.window == 50 and row.seeds[0].window == 4
    assert row.terminal.mean == pytest.approx(np.linspace(0.1, 0.6, 20)[-4:].mean(), abs=1e-6)
    assert "For shorter runs it is the last fifth." in leaderboard_table(board).note


def test_a_diverged_run_reached_what_it_reached_but_ends_nowhere():
    board = leaderboard(
        setting(
            uniform=[run("uniform", 1, [0.2, 0.5]), run("uniform", 2, [0.2, 0.5])],
            ours=[run("ours", 1, [0.2, 0.9], state="diverged"), run("ours", 2, [0.2, 0.4])],
        ),
        targets=(0.4,),
    )
    row = next(row for row in board.rows if row.label == "ours")
    assert row.terminal.count == 1 and row.terminal.mean == pytest.approx(0.4)
    assert row.paired.seeds == 1 and row.paired.difference == pytest.approx(-0.1)
    assert row.main.rounds.count == 2 and row.best.mean == pytest.approx(0.65)
    assert (
        "A run that diverged has no terminal accuracy: means are over the other runs" in leaderboard_table(board).note
    )


def test_an_accuracy_kept_in_32_bits_reaches_its_target():
    assert float(np.float32(0.7)) < 0.7
    board = leaderboard(setting(uniform=[run("uniform", 1, [0.1, float(np.float32(0.7))])]), targets=(0.7,))
    assert board.rows[0].main.rounds.median == 2


def test_the_reference_setting_shows_the_gap_to_close():
    runs = {
        "iid": setting(uniform=[run("uniform", 1, [0.9])], ours=[run("ours", 1, [0.9])]),
        "skewed": setting(uniform=[run("uniform", 1, [0.5])], ours=[run("ours", 1, [0.6])]),
    }
    iid, skewed = leaderboards_of(runs, dict.fromkeys(runs, Options(reference="iid")))
    assert next(r.improvement for r in skewed.rows if r.label == "ours") == pytest.approx(0.25)
    assert iid.reference is None and skewed.reference == "iid"


# -- all against all ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_friedman_and_nemenyi_equal_the_reference(seed):
    rng = np.random.default_rng(seed)
    results = np.round(rng.normal(0, 1, (8, 4)) + np.arange(4) * 0.5, 1)  # rounded, so that some are equal
    labels = ["a", "b", "c", "d"]
    found = rank_selectors(labels, results)
    assert found.friedman == pytest.approx(reference.friedmanchisquare(*results.T).pvalue)
    ranks = np.mean([reference.rankdata(-row) for row in results], axis=0)
    assert dict(zip(found.labels, found.ranks, strict=True)) == pytest.approx(dict(zip(labels, ranks, strict=True)))
    critical = reference.studentized_range.ppf(0.95, 4, np.inf) / math.sqrt(2) * math.sqrt(4 * 5 / (6 * 8))
    assert found.difference == pytest.approx(critical, rel=1e-5)
    for i, j in itertools.combinations(range(4), 2):
        differ = abs(ranks[i] - ranks[j]) >= critical
        assert (found.p[labels[i], labels[j]] < 0.05) == differ
        together = any({labels[i], labels[j]} <= set(group) for group in found.alike)
        assert together != found.differ(labels[i], labels[j]) and (differ or together)
    assert found.friedman < 0.05 or found.alike == (found.labels,)


def test_equal_results_do_not_differ_and_diverged_ones_are_last():
    same = rank_selectors(["a", "b", "c"], np.full((6, 3), 0.5))
    assert same.friedman == 1.0 and same.alike == (("a", "b", "c"),) and not same.differ("a", "c")
    boards = [
        leaderboard(
            setting(
                uniform=[run("uniform", s, [0.5]) for s in range(12)],
                wild=[run("wild", s, [0.9], state="diverged") for s in range(12)],
            )
        )
    ]
    found = ranking(boards)
    assert found.labels == ("uniform", "wild") and found.ranks == (1.0, 2.0) and found.differ("wild", "uniform")


def test_of_two_selectors_the_test_is_a_sign_test():
    found = rank_selectors(["a", "b"], np.array([[1.0, 0.0]] * 6))
    assert found.friedman == pytest.approx(2 * 0.5**6)


def test_more_seeds_do_not_make_more_settings():
    """Seeds of different settings are not independent blocks."""
    results = {
        name: setting(
            uniform=[run("uniform", s, [0.5]) for s in range(20)],
            ours=[run("ours", s, [better]) for s in range(20)],
        )
        for name, better in (("a", 0.6), ("b", 0.4))
    }
    boards = leaderboards_of(results, dict.fromkeys(results, Options()))
    both, one = ranking(boards), ranking(boards[:1])
    assert (both.blocks, both.over, both.friedman) == (2, "setting", 1.0)
    assert (one.blocks, one.over) == (20, "seed") and one.friedman < 1e-4


def false_positives(blocks_of, n_settings=8, seeds=5, labels=4, trials=200):
    """Return how often equal selectors are told apart; seeds of a setting share its effect."""
    rng, found = np.random.default_rng(7), 0
    for _ in range(trials):
        # How well a selector suits a setting is chance, the same for all seeds of that setting.
        suits = rng.normal(size=(n_settings, 1, labels))
        results = 0.6 + 0.05 * suits + 0.01 * rng.normal(size=(n_settings, seeds, labels))
        found += rank_selectors([f"s{i}" for i in range(labels)], blocks_of(results)).friedman < 0.05
    return found / trials


def test_equal_selectors_are_told_apart_in_one_case_of_twenty():
    assert 0.02 < false_positives(lambda results: results.mean(axis=1)) < 0.08
    # Seeds as blocks, as it was: they are no independent settings, and most cases are rejected.
    assert false_positives(lambda results: results.reshape(-1, results.shape[-1])) > 0.5


def test_a_selector_that_lost_a_run_is_never_best_and_says_so():
    board = leaderboard(
        setting(
            uniform=[run("uniform", s, [0.5, 0.5]) for s in (1, 2)],
            wild=[run("wild", 1, [0.9, 0.9]), run("wild", 2, [0.9, 0.1], state="diverged")],
        ),
        targets=(0.4,),
    )
    assert [row.label for row in board.rows] == ["uniform", "wild"]
    table = leaderboard_table(board)
    (wild,) = [row for row in table.rows if row[0].text == "wild"]
    assert "1 diverged" in wild[0].note and not any(cell.best for cell in wild)
    whole = leaderboard(
        setting(
            uniform=[run("uniform", s, [0.5, 0.5]) for s in (1, 2)], wild=[run("wild", s, [0.9, 0.9]) for s in (1, 2)]
        ),
        targets=(0.4,),
    )
    assert [row.label for row in whole.rows] == ["wild", "uniform"]
    assert any(cell.best for cell in leaderboard_table(whole).rows[0])


def test_ranks_are_over_the_settings_with_means_over_the_seeds_that_all_ran():
    boards = leaderboards_of(
        {
            "a": setting(
                uniform=[run("uniform", s, [0.5]) for s in (1, 2)], ours=[run("ours", s, [0.6]) for s in (1, 2)]
            ),
            "b": setting(
                uniform=[run("uniform", s, [0.5]) for s in (1, 2)], ours=[run("ours", s, [0.4]) for s in (2, 3)]
            ),
        },
        dict.fromkeys("ab", Options()),
    )
    found = ranking(boards)
    assert found.blocks == 2 and dict(zip(found.labels, found.ranks, strict=True)) == {"ours": 1.5, "uniform": 1.5}
    assert ranking(boards[:0]) is None


def test_a_setting_has_its_own_targets(tmp_path):
    """A setting's [run] counts in the table, the report and the dashboard; explicit targets win."""
    config = {
        "data": {"name": "digits"},
        "model": {"name": "logistic"},
        "local": {"steps": 2, "batch_size": 8, "lr": 0.1},
        "run": {"rounds": 4, "cohort": 3, "targets": [0.9], "device": "cpu"},
        "scenario": {"partition": {"name": "shards", "clients": 10, "per_client": 2}},
        "selectors": {"uniform": {}},
        "settings": [{"name": "a", "run": {"targets": [0.2], "terminal": 2}}, {"name": "b", "run": {"cohort": 2}}],
    }
    run_experiment(config, tmp_path / "x")
    results = load(tmp_path / "x")
    a, b = results.leaderboards()
    assert (a.target, a.window, b.target) == (0.2, 2, 0.9)
    bundle = load_bundle([tmp_path / "x"])
    assert [board.target for board in boards(bundle.settings)] == [0.2, 0.9]
    assert [board.target for board in results.leaderboards(targets=[0.5])] == [0.5, 0.5]
    live = ExperimentItem(tmp_path / "x", "x")
    live.poll()
    shown = [section["board"] for section in live.detail()["sections"]]
    assert ["20%" in text for text in shown] == [True, False]
    assert ["90%" in text for text in shown] == [False, True]
