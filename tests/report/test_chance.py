"""Nothing is claimed that chance explains: equal selectors are compared many times, and the tables are read."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest

from fedcohort.simulate.leaderboard import Options, RunNumbers, leaderboard, leaderboard_table, to_text
from fedcohort.simulate.leaderboard.conclusion import points
from fedcohort.simulate.leaderboard.formats import render
from fedcohort.simulate.leaderboard.table import pairs_table
from fedcohort.simulate.metrics import Metric

SELECTORS = ("uniform", "a", "b", "c", "d", "e")
CLAIM = re.compile(r"\b(Established|gains|loses|wins|better|worse)\b")
SLOW = [pytest.param(1000, marks=pytest.mark.slow), 120]  # the quick version first finds coarse errors


def draw(rng, seeds, *, shift=(), arrive=1.0, lost=0.0):
    """Return runs of six selectors whose scores differ by chance and by ``shift`` alone, as the runner stores them."""
    runs = []
    shared = rng.normal(0.8, 0.03, seeds)  # a seed is a federation, the same for all selectors
    for place, label in enumerate(SELECTORS):
        for seed in range(seeds):
            end = shared[seed] + (shift[place] if shift else 0.0) + rng.normal(0, 0.01)
            rise = int(10 * math.exp(rng.normal(0, 0.4)))
            accuracy = np.where(np.arange(60) < rise, 0.1, end)
            if rng.random() > arrive:
                accuracy = np.minimum(accuracy, 0.2)
            values = {
                "accuracy": accuracy,
                "clock": np.cumsum(np.full(60, 1.0)),
                "worst_group": accuracy - 0.2 + rng.normal(0, 0.03),
            }
            state = "diverged" if rng.random() < lost else "finished"
            runs.append(RunNumbers(label, label, seed, state, np.arange(60), values))
    return runs


def board_of(rng, seeds, **how):
    return leaderboard("toy", draw(rng, seeds, **how), Options(targets=(0.3,), terminal=10))


@pytest.mark.parametrize("trials", SLOW)
@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_six_equal_selectors_are_told_apart_in_one_table_of_twenty(seeds, trials):
    rng = np.random.default_rng(seeds)
    boards = [board_of(rng, seeds) for _ in range(trials)]
    tables = [leaderboard_table(board) for board in boards]
    found = np.mean([bool(CLAIM.search(to_text(table))) for table in tables])
    allowed = 0.06 if trials >= 1000 else 0.05 + 2.6 * math.sqrt(0.05 * 0.95 / trials)
    assert found <= allowed
    for table, board in zip(tables, boards, strict=True):
        claims = bool(CLAIM.search(table.lead))
        assert claims == any(row.paired is not None and row.paired.p < 0.05 for row in board.rows)
        assert bool(CLAIM.search(render(table, "latex"))) == bool(CLAIM.search(render(table, "markdown"))) == claims


def test_small_differences_keep_their_sign():
    board = board_of(np.random.default_rng(2), 5)
    number = dataclasses.replace(board, metric=Metric("rmse", False, False))
    assert points(number, -0.0114, "+") == "−0.0114" and points(number, -0.0) == "0"
    assert points(board, -0.0114, "+") == "−1.1" and points(board, -0.0001) == "0.0"


def test_one_seed_is_open_whatever_the_difference():
    board = board_of(np.random.default_rng(1), 1, shift=(0, 0.1, 0.2, -0.1, -0.2, 0))
    assert board.conclusion.startswith("Open: with one seed") and not CLAIM.search(to_text(leaderboard_table(board)))
    assert "p" not in leaderboard_table(board).columns


def test_if_no_seed_ended_with_both_nothing_is_said_about_one_seed():
    runs = draw(np.random.default_rng(1), 3)
    lost = [r if r.label == "uniform" else dataclasses.replace(r, state="failed") for r in runs]
    text = leaderboard("toy", lost, Options(targets=(0.3,))).conclusion
    assert text.startswith("Open: no seed ended both with uniform and with another") and "a 3 of 3" in text


def test_true_differences_are_found_and_said_with_their_interval():
    board = board_of(np.random.default_rng(2), 5, shift=(0, 0.1, -0.1, 0, 0, 0))
    assert re.search(r"Established over 5 seeds, against uniform: .*a ends \d+\.\d points above \[", board.conclusion)
    assert "b ends" in board.conclusion and "below" in board.conclusion
    assert re.search(
        r"cannot be told from uniform; the closest is [cde] \(.*: \d+ seeds would show it", board.conclusion
    )


def test_a_selector_that_loses_runs_is_never_called_better():
    rng = np.random.default_rng(3)
    runs = draw(rng, 10, shift=(0, 0.2, 0, 0, 0, 0))
    lost = [
        RunNumbers(r.label, r.selector, r.seed, "diverged", r.round, r.values) if r.label == "a" and r.seed < 2 else r
        for r in runs
    ]
    sure, unsure = (leaderboard("toy", each, Options(targets=(0.3,))).conclusion for each in (runs, lost))
    assert "a ends " in sure and "a ends" not in unsure and "a 2 of 10" in unsure


def covered(values, truth):
    return np.mean([low <= truth <= high for low, high in values])


@pytest.mark.parametrize("trials", SLOW)
@pytest.mark.parametrize("seeds", [5, 10])
def test_intervals_of_gain_worst_group_and_speed_cover_the_truth(seeds, trials):
    rng = np.random.default_rng(100 + seeds)
    gains, groups, speeds = [], [], []
    for _ in range(trials):
        board = board_of(rng, seeds, shift=(0, 0.013, 0, 0, 0, 0))
        row = next(row for row in board.rows if row.label == "a")
        for found, test in ((gains, row.paired), (groups, row.paired_group)):
            found.append((test.difference - test.half, test.difference + test.half))
        speeds.append((row.main.speed.low, row.main.speed.high))
    slack = 0.0 if trials >= 1000 else 0.04
    for found, truth in ((gains, 0.013), (groups, 0.013), (speeds, 1.0)):
        assert 0.93 - slack <= covered(found, truth) <= 0.97 + slack


def journeys(ours, theirs, target=0.3):
    runs = [
        RunNumbers(label, label, seed, state, np.arange(60), {
            "accuracy": np.where(np.arange(60) >= arrives - 1, 0.5, 0.1) if arrives else np.full(60, 0.1),
            "clock": np.arange(1.0, 61.0),
        })
        for label, pairs in (("uniform", theirs), ("ours", ours))
        for seed, (arrives, state) in enumerate(pairs)
    ]  # fmt: skip
    board = leaderboard("toy", runs, Options(targets=(target,)))
    return next(row for row in board.rows if row.label == "ours"), leaderboard_table(
        board, columns=("time", "speed-up")
    )


def end(*arrivals, state="finished"):
    return [(arrival, state) for arrival in arrivals]


@pytest.mark.parametrize(
    ("ours", "theirs", "speed"),
    [
        (end(10, 20, 30), end(20, 40, 60), "2.00×"),
        (end(None, None, 30), end(20, 30, 60), "≤0.50×"),  # 20/60, 30/60 at most, and 2
        (end(20, 30, 10), end(None, None, 5), "≥2.00×"),
        (end(None, None, None), end(None, None, None), "–"),
        (end(None, 10, 20), end(20, 20, 30), "1.50×"),  # the median is known: at most 1/3, then 2 and 1.5
        (end(None, None, state="diverged"), end(20, 30), "never"),
        (end(None, None, None), end(None, None, 40), "–"),
    ],
)
def test_a_ratio_that_nobody_saw_is_printed_as_a_bound(ours, theirs, speed):
    row, table = journeys(ours, theirs)
    assert str(row.main.speed) == speed
    assert table.columns[-1] == "Speed-up, time" and speed in to_text(table)


def test_arrivals_are_medians_in_which_never_counts_as_never():
    row, table = journeys(end(21, 30, None), end(20, 20, 20))
    assert row.main.rounds.median == 30 and row.main.rounds.count == 2 and "30.0 s 2/3" in to_text(table)
    row, table = journeys(end(21, None, None), end(20, 20, 20))
    assert math.isinf(row.main.rounds.median) and "never 1/3" in to_text(table)


def test_while_runs_go_on_nothing_is_never():
    _, table = journeys([(21, "finished"), (None, "running"), (None, "running")], end(20, 20, 20))
    assert "not yet 1/3" in to_text(table) and "never" not in to_text(table).split("Target")[0]


@pytest.mark.parametrize("trials", SLOW)
def test_a_bound_holds_although_most_runs_never_arrive(trials):
    """With a true ratio of 0.2, most runs do not arrive; what is printed is a bound above it, not a measurement."""
    rng, held = np.random.default_rng(9), []
    for _ in range(trials):
        theirs = rng.lognormal(math.log(30), 0.2, 5).round()
        ours = [None if t > 60 else t for t in (theirs / 0.2 * rng.lognormal(0, 0.2, 5)).round()]
        row, _ = journeys(end(*ours), end(*theirs))
        held.append(row.main.speed.least <= 0.2 <= row.main.speed.greatest)
        assert str(row.main.speed).startswith("≤")
    assert np.mean(held) > 0.99


def test_any_two_selectors_are_compared_and_corrected_over_all_pairs():
    board = board_of(np.random.default_rng(2), 5, shift=(0, 0.1, -0.1, 0, 0, 0))
    table = pairs_table(board)
    assert len(table.rows) == 15 and "over all 15 pairs" in table.note
    sure = {frozenset((a.text, b.text)) for a, b, _, p in table.rows if p.text == "<0.001"}
    assert {frozenset("ab"), frozenset(("a", "uniform"))} <= sure
    assert all("a" in pair or "b" in pair for pair in sure)
