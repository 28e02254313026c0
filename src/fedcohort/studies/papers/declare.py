"""The words in which a paper's table or figure is declared: what is run, what was published, what is claimed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedcohort.core.errors import InputError
from fedcohort.simulate.store.results import Results, RunInfo

Published = Mapping[str, Mapping[str, "tuple[float, float | None] | None"]]
"""By setting and label: mean and standard deviation (None where the paper gives none); None is "N/A", never reached."""

Labels = str | tuple[str, ...]
"""One label, or several whose mean counts."""

Extra = Callable[[Results, RunInfo], Mapping[str, float]]
"""What a figure wants of a run besides its curve, by the measure's name."""


@dataclass(frozen=True)
class Measure:
    """What a table counts.

    Attributes
    ----------
    name : str
        The key under which a record keeps it.
    lower : bool
        Whether less is better.
    scale : float
        What a recorded value is multiplied with to have the paper's unit.
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
        Measure("catch-up", "rounds to where the baseline ends", lower=True),
        Measure("seconds", "simulated seconds to target", lower=True),
        Measure("best", "best accuracy, %", lower=False, scale=100, ratio=False, digits=2),
        Measure("terminal", "terminal accuracy, %", lower=False, scale=100, ratio=False, digits=1),
        Measure("final", "accuracy of the last round, %", lower=False, scale=100, ratio=False, digits=1),
        Measure("qcid", "mean QCID, 10^-2", lower=True, scale=100, digits=2),
        Measure("unevenness", "spread of the clients' picks, of their mean", lower=True, digits=2),
        Measure(
            "neighbours", "clients whose nearest embedding has their class, %", lower=False, scale=100, ratio=False
        ),
        Measure("distance", "mean gradient distance of those picked, -R", lower=True, digits=3),
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
        The paper's own method; every other label with a figure is a comparison. Empty: no comparisons are made.
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
    """A claim: in each setting ``better`` has a better mean than ``worse``.

    Attributes
    ----------
    text : str
        As a sentence.
    better, worse : str or tuple of str
        Labels; of several, the mean counts.
    """

    text: str
    measure: str
    better: Labels
    worse: Labels
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Near:
    """A claim: in each setting two labels are alike, to within so much of the measure's unit.

    ``one_sided`` says that ``one`` may be better by any amount.
    """

    text: str
    measure: str
    one: Labels
    other: Labels
    settings: tuple[str, ...]
    within: float
    one_sided: bool = False


Claim = Beats | Near


@dataclass(frozen=True)
class Study:
    """What is run: one or more experiments whose settings belong together.

    Attributes
    ----------
    parts : mapping of str to dict
        Experiments without name and seeds, each a piece that can be run by itself. Settings of all parts have different
        names.
    seeds : int
        How many the paper has, or where it does not say so, we take: 100, 101, ...
    names : mapping of label to str
        What the paper calls it.
    baseline : str
        The label whose end others catch up with.
    differences : tuple of str
        What is different from the paper, each with its reason.
    """

    name: str
    parts: Mapping[str, Mapping[str, Any]]
    seeds: int
    names: Mapping[str, str]
    baseline: str
    differences: tuple[str, ...] = ()
    extra: Extra | None = None

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
        """Return the paper's target in a setting, where rounds to one are counted."""
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
        Besides those that the grids make.
    notes : tuple of str
        What to know of the outcome: why something does not hold, what else was seen.
    """

    name: str
    paper: str
    place: str
    title: str
    study: Study
    grids: tuple[Grid, ...] = ()
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        known = {setting for part in self.study.parts for setting in self.study.settings(part)}
        for grid in self.grids:
            unknown = set(grid.published) - known
            if unknown or grid.measure not in MEASURES:
                raise InputError(f"{self.name} has no setting or measure {sorted(unknown) or grid.measure!r}.")

    def every_claim(self) -> list[Claim]:
        """Return what the grids say about the paper's own method, then the others."""
        found: list[Claim] = []
        for grid in self.grids:
            for label in grid.labels if grid.ours else []:
                if label == grid.ours:
                    continue
                where = tuple(s for s in grid.published if order(grid, s, grid.ours, label) > 0)
                if where:
                    found.append(Beats("", grid.measure, grid.ours, label, where))
        return [*found, *self.claims]


def order(grid: Grid, setting: str, one: Labels, other: Labels) -> float:
    """Return the published margin of one label over another: positive where it is better, NaN where it is unknown.

    A ratio less 1 where the measure's margins are ratios, a difference otherwise; infinite where only one arrived.
    """
    row, means = grid.published[setting], []
    for who in (one, other):
        labels = (who,) if isinstance(who, str) else who
        if any(label not in row for label in labels):
            return math.nan
        known = [figure[0] for label in labels if (figure := row[label]) is not None]
        means.append(sum(known) / len(known) if len(known) == len(labels) else None)
    return margin(MEASURES[grid.measure], *means)


def margin(measure: Measure, one: float | None, other: float | None) -> float:
    """Return by how much one mean is better than another.

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


def row(
    labels: Sequence[str], *values: float | tuple[float, float] | None
) -> dict[str, tuple[float, float | None] | None]:
    """Return a row of published figures: a mean, or mean and standard deviation, or None for "N/A".

    >>> row(["a", "b", "c"], 1.0, (2.0, 0.5), None)
    {'a': (1.0, None), 'b': (2.0, 0.5), 'c': None}
    """
    return {
        label: None if value is None else value if isinstance(value, tuple) else (float(value), None)
        for label, value in zip(labels, values, strict=True)
    }
