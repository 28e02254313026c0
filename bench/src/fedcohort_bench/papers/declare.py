"""Declare a paper's table or figure: what to run, what was published, what is claimed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedcohort.core.errors import InputError
from fedcohort.simulate.store.results import Results, RunInfo

Published = Mapping[str, Mapping[str, "tuple[float, float | None] | None"]]
"""By setting and label: mean and standard deviation (None if the paper gives none). None is "N/A": never reached."""

Labels = str | tuple[str, ...]
"""One label, or several that count by their mean."""

Extra = Callable[[Results, RunInfo], Mapping[str, float]]
"""Computes further measures of a run that a figure needs, by name."""


@dataclass(frozen=True)
class Measure:
    """What a table measures.

    Attributes
    ----------
    name : str
        The key under which a record keeps it.
    lower : bool
        Whether less is better.
    scale : float
        Factor from a recorded value to the paper's unit.
    ratio : bool
        Whether margins are ratios (rounds, imbalance) or differences (points of accuracy).
    """

    name: str
    title: str
    lower: bool
    scale: float = 1.0
    ratio: bool = True
    digits: int = 0


MEASURES = {
    measure.name: measure
    for measure in (
        Measure("rounds", "rounds to target", lower=True),
        Measure("catch-up", "rounds to the baseline's final accuracy", lower=True),
        Measure("seconds", "simulated seconds to target", lower=True),
        Measure("best", "best accuracy, %", lower=False, scale=100, ratio=False, digits=2),
        Measure("terminal", "terminal accuracy, %", lower=False, scale=100, ratio=False, digits=1),
        Measure("final", "accuracy of the last round, %", lower=False, scale=100, ratio=False, digits=1),
        Measure("qcid", "mean QCID, 10^-2", lower=True, scale=100, digits=2),
        Measure("unevenness", "spread of the clients' picks, relative to their mean", lower=True, digits=2),
        Measure(
            "neighbours", "clients whose nearest embedding has their class, %", lower=False, scale=100, ratio=False
        ),
        Measure("distance", "mean gradient distance of the clients picked, -R", lower=True, digits=3),
    )
}


@dataclass(frozen=True)
class Grid:
    """Published figures of one measure.

    Attributes
    ----------
    measure : str
        One of :data:`MEASURES`.
    published : mapping
        By setting and label.
    ours : str
        The paper's own method, which is compared with every other label. Empty: no comparisons.
    """

    measure: str
    published: Published
    ours: str = ""

    @property
    def labels(self) -> list[str]:
        """The labels with a figure, in order."""
        return list(dict.fromkeys(label for row in self.published.values() for label in row))


@dataclass(frozen=True)
class Beats:
    """A claim that ``better`` has a better mean than ``worse`` in each setting.

    Attributes
    ----------
    text : str
        The claim as a sentence; empty for one made from the labels' names.
    better, worse : str or tuple of str
        Labels; several count by their mean.
    average : bool
        Whether the claim is about the mean over the settings instead of each of them.
    supplement : bool
        Whether it is another reading of a statement, which is shown but not counted.
    untestable : str
        Why our setting cannot show it; empty if it can.
    """

    text: str
    measure: str
    better: Labels
    worse: Labels
    settings: tuple[str, ...]
    average: bool = False
    supplement: bool = False
    untestable: str = ""


@dataclass(frozen=True)
class Near:
    """A claim that two labels differ by at most ``within`` units of the measure in each setting.

    With ``one_sided``, ``one`` may be better by any amount.
    """

    text: str
    measure: str
    one: Labels
    other: Labels
    settings: tuple[str, ...]
    within: float
    one_sided: bool = False
    supplement: bool = False


Claim = Beats | Near


@dataclass(frozen=True)
class Study:
    """What to run: one or more experiments whose settings belong together.

    Attributes
    ----------
    parts : mapping of str to dict
        Experiments without name and seeds, each of which can be run separately. All settings of all parts have
        different names.
    seeds : int
        The paper's number of seeds, or ours if it does not say; they are 100, 101, ...
    names : mapping of label to str
        The paper's name of each label.
    baseline : str
        The label whose final accuracy the others catch up with.
    chance : float
        The accuracy of guessing; a method that stays there says nothing about its clients.
    clean : str
        The setting without heterogeneity, which shows what heterogeneity costs the baseline in each of the others;
        empty: none.
    differences : tuple of str
        Differences from the paper, each with its reason.
    extra : callable, optional
        Computes further measures of each run.
    """

    name: str
    parts: Mapping[str, Mapping[str, Any]]
    seeds: int
    names: Mapping[str, str]
    baseline: str
    differences: tuple[str, ...] = ()
    extra: Extra | None = None
    chance: float = 0.0
    clean: str = ""

    def settings(self, part: str) -> list[str]:
        """Return the names of a part's settings."""
        return [str(setting["name"]) for setting in self.parts[part]["settings"]]

    @property
    def rounds(self) -> dict[str, int]:
        """The paper's rounds, by setting."""
        return {
            str(setting["name"]): int(setting.get("run", {}).get("rounds", part["run"]["rounds"]))
            for part in self.parts.values()
            for setting in part["settings"]
        }

    def target(self, name: str) -> float | None:
        """Return the paper's target in a setting; None if it has none."""
        for part in self.parts.values():
            for setting in part["settings"]:
                if setting["name"] == name:
                    targets = setting.get("run", {}).get("targets") or part["run"].get("targets")
                    return float(targets[-1]) if targets else None
        return None


@dataclass(frozen=True)
class Exhibit:
    """One table or figure of a paper.

    Attributes
    ----------
    name : str
        Such as "fedcor-table-1-fmnist".
    claims : tuple of Beats and Near
        Claims besides those that the grids make.
    notes : tuple of str
        Remarks on the outcome, such as why a claim does not hold.
    supplement : bool
        Whether it is on other data than the paper's, and its claims are shown but not counted.
    """

    name: str
    paper: str
    place: str
    title: str
    study: Study
    grids: tuple[Grid, ...] = ()
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = field(default=())
    supplement: bool = False

    def __post_init__(self) -> None:
        # A misspelt setting in a TOML file would silently have no figures.
        known = {setting for part in self.study.parts for setting in self.study.settings(part)}
        for grid in self.grids:
            unknown = set(grid.published) - known
            if unknown or grid.measure not in MEASURES:
                raise InputError(f"{self.name} has no setting or measure {sorted(unknown) or grid.measure!r}.")

    @property
    def heading(self) -> str:
        """The paper, the place in it, and the title."""
        return f"{self.paper}, {self.place}: {self.title}"

    def every_claim(self) -> list[Claim]:
        """Return the claims that the grids make about the paper's own method, then the others."""
        claims: list[Claim] = []
        for grid in self.grids:
            for label in grid.labels if grid.ours else []:
                if label == grid.ours:
                    continue
                settings = tuple(
                    s
                    for s in grid.published
                    if order(grid, s, grid.ours, label) > 0 and not is_tie(grid, s, grid.ours, label)
                )
                if settings:
                    claims.append(Beats("", grid.measure, grid.ours, label, settings))
        return [*claims, *self.claims]


def order(grid: Grid, setting: str, one: Labels, other: Labels) -> float:
    """Return the published margin of one label over another: positive if it is better, NaN if unknown.

    See :func:`margin`.
    """
    row, means = grid.published[setting], []
    for side in (one, other):
        labels = (side,) if isinstance(side, str) else side
        if any(label not in row for label in labels):
            return math.nan
        known = [figure[0] for label in labels if (figure := row[label]) is not None]
        means.append(sum(known) / len(known) if len(known) == len(labels) else None)
    return margin(MEASURES[grid.measure], *means)


def is_tie(grid: Grid, setting: str, one: str, other: str) -> bool:
    """Whether two published means differ by less than the standard deviation of their difference.

    >>> grid = Grid("best", {"a": {"x": (75.06, 1.56), "y": (75.05, 0.46), "z": (63.97, 0.9)}})
    >>> is_tie(grid, "a", "x", "y"), is_tie(grid, "a", "x", "z")
    (True, False)
    """
    mean, deviation = grid.published[setting].get(one) or (0.0, None)
    other_mean, other_deviation = grid.published[setting].get(other) or (0.0, None)
    if deviation is None or other_deviation is None:
        return False
    return abs(mean - other_mean) < math.hypot(deviation, other_deviation)


def margin(measure: Measure, one: float | None, other: float | None) -> float:
    """Return how much better one mean is than another: a ratio less 1, or a difference, as the measure asks.

    None is a target that was never reached. The margin is infinite if only one reached it, and NaN if neither did.

    >>> margin(MEASURES["rounds"], 50.0, 75.0), margin(MEASURES["best"], 80.0, 82.0)
    (0.5, -2.0)
    >>> margin(MEASURES["rounds"], 50.0, None), margin(MEASURES["rounds"], None, None)
    (inf, nan)
    """
    if one is None and other is None:
        return math.nan
    if one is None:
        return -math.inf
    if other is None:
        return math.inf
    if not measure.ratio:
        return other - one if measure.lower else one - other
    if one == other:
        return 0.0
    better, worse = (one, other) if measure.lower else (other, one)
    return worse / better - 1 if better > 0 else math.inf
