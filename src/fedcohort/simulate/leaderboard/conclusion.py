"""What a table of one setting shows, in a sentence: which differences are established, and which are not.

Only this module makes a claim. A difference is established if its p-value, corrected over the rows of the table, is
below 5%. With equal selectors, at most one table in twenty then claims anything, whatever the number of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedcohort.simulate.leaderboard.rows import LeaderRow, PairedComparison
from fedcohort.simulate.leaderboard.significance import MAX_SEEDS, seeds_needed
from fedcohort.simulate.leaderboard.words import names, number

if TYPE_CHECKING:
    from fedcohort.simulate.leaderboard.table import Leaderboard

FEW_SEEDS = 5  # what we advise to begin with
_MAX_NAMED = 4  # selectors that a sentence names


def conclusion(board: Leaderboard) -> str:
    """Return which selectors differ from the baseline, which cannot be told from it, and what would settle the closest.

    Empty if nothing is compared.
    """
    # Only p-values that are corrected over the table decide; the intervals shown are for one comparison each.
    tests = {row.label: row.paired for row in board.rows if row.paired is not None}
    if not tests:
        return ""
    lost = [f"{row.label} {row.lost} of {row.runs}" for row in board.rows if row.lost]
    losses = f" Runs that diverged or failed: {names(lost, _MAX_NAMED)}." if lost else ""
    most = max(test.seeds for test in tests.values())
    if most < 2:
        why = "with one seed," if most else f"no seed ended both with {board.baseline} and with another, so"
        return f"{board.so_far}Open: {why} no difference can be told from chance; run {FEW_SEEDS} or more.{losses}"
    compared = [(row, tests[row.label]) for row in board.rows if row.label in tests and tests[row.label].seeds > 1]
    # A selector that lost runs is compared where it survived, which is no reason to call it better.
    claimed = [pair for pair in compared if pair[1].established and not (pair[0].lost and pair[1].difference > 0)]
    unsure = [pair for pair in compared if pair not in claimed]
    text = [
        f"{board.so_far}{_established(board, claimed)}" if claimed else f"{board.so_far}No difference is established."
    ]
    if unsure:
        told = names([row.label for row, _ in unsure], _MAX_NAMED)
        text.append(f"{told} cannot be told from {board.baseline}{_closest(board, unsure, len(compared))}.")
    for row, test in claimed:
        group = row.paired_group
        if group is not None and group.established and group.difference < 0 < test.difference:
            text.append(
                f"{row.label} gains on average but loses {points(board, -group.difference)} points in the worst group "
                f"{interval(board, group)}."
            )
    return " ".join(text) + losses


def interval(board: Leaderboard, test: PairedComparison) -> str:
    """Return the 95% interval of a difference as text; empty if there is none."""
    if math.isnan(test.half):
        return ""
    ends = sorted(board.metric.natural(test.difference + sign * test.half) for sign in (-1, 1))
    return f"[{', '.join(points(board, end) for end in ends)}]"


def points(board: Leaderboard, value: float, sign: str = "") -> str:
    """Return a difference in percentage points, or in the metric's own unit."""
    text = f"{100 * value:{sign}.1f}" if board.metric.share else f"{value:{sign}.3g}"
    if not float(text):
        text = text.replace("-", "")
    return text.replace("-", "−")  # a line may break after a hyphen, but not after a minus sign


def _established(board: Leaderboard, claimed: Sequence[tuple[LeaderRow, PairedComparison]]) -> str:
    unit = " points" if board.metric.share else f" {board.metric.name}"
    parts = []
    for row, test in claimed:
        change = board.metric.natural(test.difference)
        side = "above" if change > 0 else "below"
        parts.append(f"{row.label} ends {points(board, abs(change))}{unit} {side} {interval(board, test)}")
    seeds = {test.seeds for _, test in claimed}
    over = f"{min(seeds)}" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)}"
    return f"Established over {over} seeds, against {board.baseline}: {names(parts, _MAX_NAMED)}."


def _closest(board: Leaderboard, unsure: Sequence[tuple[LeaderRow, PairedComparison]], comparisons: int) -> str:
    """Say how many seeds would settle the comparison that is closest to being settled."""
    tests = {row.label: test for row, test in unsure if test.spread > 0 and not row.lost}
    if not tests:
        return ""
    # The closest to being settled is not the largest difference, but the largest against its own noise.
    label = max(tests, key=lambda label: abs(tests[label].difference) / tests[label].spread)
    test = tests[label]
    seeds = seeds_needed(test.difference, test.spread, comparisons)
    needed = f"{seeds} seeds would show it" if seeds < MAX_SEEDS else f"{MAX_SEEDS:,} seeds would not show it"
    unit = " points" if board.metric.share else ""
    difference = points(board, board.metric.natural(test.difference), "+")
    spread = f"{100 * test.spread:.1f}" if board.metric.share else number(test.spread)
    closest = f"; the closest is {label}" if len(unsure) > 1 else ""
    return f"{closest} ({difference}{unit}, paired sd {spread}: {needed} in 4 of 5 cases)"
