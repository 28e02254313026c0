"""Compare published numbers with ours, ratio by ratio, and judge which of a paper's claims hold.

A claim *holds* if our means have the claimed order in every setting it names, and *does not hold* otherwise. A margin
holds if ours is at least two thirds of the published one. A claim is *not run* if a number is missing, and *open* where
our figures cannot tell: no method reached the target in all seeds, a method is still at chance, or heterogeneity costs
the baseline too little for a choice of clients to win anything back. Published differences below their standard
deviation are ties, and no claims.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedcohort_bench.papers.declare import (
    MEASURES,
    Beats,
    Exhibit,
    Labels,
    Near,
    Study,
    is_tie,
    margin,
    order,
)
from fedcohort_bench.papers.record import StudyRecord

# Our choice: margins vary with the seeds, so all of one is too much to ask, and half of one is a different effect.
SHARE = 2 / 3
"""The share of the published margin that ours must reach."""

# A run with one seed differs from its repetition by half a point to a point, so a smaller cost cannot be seen.
MIN_COST = 2.0
"""The points of accuracy that heterogeneity must cost the baseline before a setting can judge a selector."""

ABOVE_CHANCE = 0.03
"""How far above guessing a method's accuracy must be before it counts as trained."""


@dataclass(frozen=True)
class MarginComparison:
    """One comparison of two methods in one setting.

    Attributes
    ----------
    better, worse : str or tuple of str
        The better and the worse method in the paper.
    published, ours : float
        Margins (see :func:`fedcohort_bench.papers.declare.margin`); NaN if unknown.
    wins, seeds : int
        The number of our seeds in which the better method is better, and of all seeds.
    tie : bool
        Whether the published difference is below its standard deviation.
    unclear : str
        Why our figures cannot tell; empty if they can.
    """

    setting: str
    measure: str
    better: Labels
    worse: Labels
    published: float
    ours: float
    wins: int
    seeds: int
    tie: bool = False
    unclear: str = ""

    @property
    def state(self) -> str:
        """Whether the order holds."""
        # A tie stays one, whatever our figures are.
        if self.tie:
            return "tie"
        if not self.seeds:
            return "not run"
        if self.unclear or math.isnan(self.ours):
            return "open"
        return "holds" if self.ours > 0 else "does not hold"

    @property
    def margin(self) -> str:
        """Whether the margin holds."""
        if self.state != "holds" or math.isnan(self.published):
            return self.state
        if math.isinf(self.published):  # only the better one reached the target; two thirds of that mean nothing
            return "holds" if math.isinf(self.ours) else "does not hold"
        return "holds" if self.ours >= SHARE * self.published else "does not hold"


@dataclass(frozen=True)
class ClaimVerdict:
    """The verdict on a claim: "holds", "does not hold", "open" or "not run", and the evidence.

    A ``supplement`` is another reading of a claim, or on other data than the paper's. It does not count.
    """

    text: str
    state: str
    detail: str
    supplement: bool = False


def ratios(exhibit: Exhibit, record: StudyRecord) -> list[MarginComparison]:
    """Return every comparison that the exhibit's grids make, in the paper's direction; none of a trial."""
    comparisons = []
    for grid in () if record.trial else exhibit.grids:
        for setting in grid.published if grid.ours else ():
            for label in grid.labels:
                published = order(grid, setting, grid.ours, label) if label != grid.ours else math.nan
                if not math.isnan(published):
                    pair = (grid.ours, label) if published > 0 else (label, grid.ours)
                    claim, tie = Beats("", grid.measure, *pair, (setting,)), is_tie(grid, setting, *pair)
                    margins = order(grid, setting, *pair)
                    comparisons.append(_compare(claim, exhibit.study, record, setting, margins, tie))
    return comparisons


def heterogeneity_cost(study: Study, record: StudyRecord, setting: str, measure: str) -> float:
    """Return how many points of accuracy the baseline loses against the setting without heterogeneity, or NaN.

    What it does not lose, no choice of clients can win back.
    """
    means = [record.mean(name, study.baseline, measure) for name in (study.clean, setting)]
    if MEASURES[measure].ratio or setting == study.clean or not all(mean and mean[0] is not None for mean in means):
        return math.nan
    clean, here = (mean[0] for mean in means if mean and mean[0] is not None)
    return MEASURES[measure].scale * (clean - here)


def _compare(
    claim: Beats, study: Study, record: StudyRecord, setting: str, published: float, tie: bool = False
) -> MarginComparison:
    """Compare two methods in one setting; of several labels only those that are trained on both sides count."""

    def is_trained(label: str) -> bool:
        mean = record.mean(setting, label, claim.measure)
        return mean is None or mean[0] is None or mean[0] >= study.chance + ABOVE_CHANCE

    kind = MEASURES[claim.measure]
    better, worse, unclear = claim.better, claim.worse, ""
    if study.chance and not kind.ratio:
        sides = [(side,) if isinstance(side, str) else tuple(side) for side in (better, worse)]
        if len(sides[0]) == len(sides[1]):
            pairs = [pair for pair in zip(*sides, strict=True) if all(map(is_trained, pair))]
            better, worse = (tuple(labels) for labels in zip(*pairs, strict=True)) if pairs else sides
            unclear = "" if pairs else "at chance"
    ours, theirs = (record.mean(setting, label, claim.measure) for label in (better, worse))
    methods = (setting, claim.measure, claim.better, claim.worse, published)
    if ours is None or theirs is None:
        return MarginComparison(*methods, math.nan, 0, 0, tie)
    cost = heterogeneity_cost(study, record, setting, claim.measure)
    # False for NaN: an unknown cost does not make a comparison unclear.
    if cost < MIN_COST:
        unclear = f"costs only {cost:.1f} points"
    values = [record.values(setting, label, claim.measure) or [] for label in (better, worse)]
    seeds = list(zip(*values, strict=False))
    wins = sum(margin(kind, one, other) > 0 for one, other in seeds)
    scaled = [None if mean[0] is None else kind.scale * mean[0] for mean in (ours, theirs)]
    return MarginComparison(*methods, margin(kind, scaled[0], scaled[1]), wins, len(seeds), tie, unclear)


def judge(exhibit: Exhibit, record: StudyRecord) -> list[ClaimVerdict]:
    """Return the verdict on each claim; none of a trial, whose small data say nothing about the paper."""
    verdicts = []
    for claim in () if record.trial else exhibit.every_claim():
        if isinstance(claim, Near):
            text, (state, seen) = claim.text, _judge_nearness(claim, record)
        else:
            names = exhibit.study.names
            sides = (names[s] if isinstance(s, str) else " and ".join(s) for s in (claim.better, claim.worse))
            text = claim.text or f"{' beats '.join(sides)} in {MEASURES[claim.measure].title}."
            state, seen = ("open", claim.untestable) if claim.untestable else _judge_order(claim, exhibit, record)
        verdicts.append(ClaimVerdict(text, state, seen, exhibit.supplement or claim.supplement))
    return verdicts


def _judge_order(claim: Beats, exhibit: Exhibit, record: StudyRecord) -> tuple[str, str]:
    """Return the state of a claim that one method beats another, and the evidence."""
    comparisons = []
    for setting in claim.settings:
        grids = (grid for grid in exhibit.grids if grid.measure == claim.measure and setting in grid.published)
        published = next((order(grid, setting, claim.better, claim.worse) for grid in grids), math.nan)
        comparisons.append(_compare(claim, exhibit.study, record, setting, published))
    judged = [ratio for ratio in comparisons if ratio.state not in ("not run", "open")]
    if claim.average and judged:
        mean = sum(ratio.ours for ratio in judged) / len(judged)
        detail = f"{mean:+.2f} points on average, ahead in {_evidence(judged)}"
        return "holds" if mean > 0 else "does not hold", detail
    unclear = [f"{ratio.setting} {ratio.unclear}" for ratio in comparisons if ratio.unclear]
    state = _overall_state([ratio.state for ratio in comparisons])
    return state, _evidence(judged) if judged else ", ".join(unclear)


def _evidence(comparisons: Sequence[MarginComparison]) -> str:
    """Say in how many settings a claim and its margin hold, and where the claim does not."""
    text = f"{sum(ratio.state == 'holds' for ratio in comparisons)} of {len(comparisons)} settings"
    margins = [ratio.margin for ratio in comparisons if not math.isnan(ratio.published)]
    if margins:
        text += f", the margin in {margins.count('holds')}"
    failed = [ratio.setting for ratio in comparisons if ratio.state == "does not hold"]
    return f"{text}; not in {', '.join(failed)}" if failed else text


def _judge_nearness(claim: Near, record: StudyRecord) -> tuple[str, str]:
    """Return the state of a claim that two methods are alike, and the evidence."""
    states, seen = [], []
    scale = MEASURES[claim.measure].scale
    for setting in claim.settings:
        means = [record.mean(setting, label, claim.measure) for label in (claim.one, claim.other)]
        if means[0] is None or means[1] is None:
            states.append("not run")
        elif means[0][0] is None or means[1][0] is None:
            states.append("open")
        else:
            difference = scale * (means[0][0] - means[1][0])
            shortfall = difference if MEASURES[claim.measure].lower else -difference
            distance = shortfall if claim.one_sided else abs(difference)
            states.append("holds" if distance <= claim.within else "does not hold")
            seen.append(f"{setting} {difference:+.1f}")
    return _overall_state(states), ", ".join(seen)


def _overall_state(states: Sequence[str]) -> str:
    if all(state == "not run" for state in states):
        return "not run"
    if "does not hold" in states:
        return "does not hold"
    return "holds" if "holds" in states else "open"


def count_verdicts(verdicts: Sequence[ClaimVerdict]) -> dict[str, int]:
    """Return how many claims hold, do not hold, are open, and were not run, without supplements."""
    counted = [verdict.state for verdict in verdicts if not verdict.supplement]
    return {state: counted.count(state) for state in ("holds", "does not hold", "open", "not run")}


def to_dict(exhibit: Exhibit, record: StudyRecord) -> dict[str, Any]:
    """Return the comparison as plain values."""

    def rounded(value: float) -> float | str | None:
        return None if math.isnan(value) else "only one arrived" if math.isinf(value) else round(value, 4)

    tables = []
    for grid in exhibit.grids:
        scale, cells = MEASURES[grid.measure].scale, []
        for setting, figures in grid.published.items():
            for label, figure in figures.items():
                ours, std, seeds = record.mean(setting, label, grid.measure) or (None, math.nan, 0)
                cells.append(
                    {
                        "setting": setting,
                        "label": label,
                        "published": None if figure is None else figure[0],
                        "published_std": None if figure is None else figure[1],
                        "ours": None if ours is None else round(scale * ours, 4),
                        "our_std": None if math.isnan(std) else round(scale * std, 4),
                        "seeds": seeds,
                    }
                )
        tables.append({"measure": grid.measure, "cells": cells})
    return {
        "name": exhibit.name,
        "paper": exhibit.paper,
        "place": exhibit.place,
        "title": exhibit.title,
        "tables": tables,
        "ratios": [
            {
                "setting": ratio.setting,
                "measure": ratio.measure,
                "better": str(ratio.better),
                "worse": str(ratio.worse),
                "published_margin": rounded(ratio.published),
                "our_margin": rounded(ratio.ours),
                "wins": ratio.wins,
                "seeds": ratio.seeds,
                "order": ratio.state,
                "margin": ratio.margin,
            }
            for ratio in ratios(exhibit, record)
        ],
        "claims": [
            {"claim": v.text, "verdict": v.state, "seen": v.detail, "supplement": v.supplement}
            for v in judge(exhibit, record)
        ],
        "differences": list(exhibit.study.differences),
        "record": record.settings,
    }
