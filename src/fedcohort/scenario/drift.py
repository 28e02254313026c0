"""Data that change while a run goes on: what clients hold before a round, made from what they hold after it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from fedcohort.core.errors import ScenarioError
from fedcohort.core.params import Interval, OneOf, Parameterized, param
from fedcohort.scenario.federation import Federation
from fedcohort.scenario.partition import nearest
from fedcohort.scenario.shift import RELABEL


@dataclass(frozen=True, kw_only=True)
class Drift(Parameterized):
    """The change: a class appears, shares move, sensors are replaced, or new data stream in.

    The scenario describes the clients after the round ``at``. Before it, every client has as many samples, but those
    that are still unknown are repetitions of its others. Nobody tells the server: facts on record stay as they are.

    >>> federation = Federation.of([[0, 1, 2], [3, 4]], labels=[0, 1, 1, 1, 0], classes=2)
    >>> Drift(kind="class", share=0.5).before(federation, np.random.default_rng(0)).label_counts()
    array([[3, 0],
           [2, 0]])
    """

    kind: str = param(
        "class",
        OneOf(("class", "shares", "sensors", "stream")),
        "what is new: the last classes, more of the second half of the classes, the scenario's shift, more samples",
    )
    at: int = param(20, Interval(int, 1, None), "the first round with the new data")
    share: float = param(
        0.5,
        Interval(float, 0, 1, "neither"),
        "share of all classes that are new, of the second half's samples, or of each client's samples",
    )

    def describe(self) -> str:
        """Return one line."""
        return f"{self.kind} ({self.share:.0%}) from round {self.at} on"

    def before(self, federation: Federation, rng: np.random.Generator) -> Federation:
        """Return the federation before the change; all sizes are the same."""
        classes, labels = federation.classes, federation.true_labels
        if self.kind == "sensors":
            groups = federation.groups
            if groups is None or groups.kind != "view":
                raise ScenarioError(
                    "The drift 'sensors' needs a shift to change to.", hint='shift = {views = ["rotate"], share = 0.2}'
                )
            # A view is undone by forgetting the groups. Labels were changed for good and have to be changed back.
            if RELABEL not in groups.views:
                return dataclasses.replace(federation, groups=None)
            moved = (groups.of == groups.views.index(RELABEL))[federation.owner]
            back = {
                name: np.where(moved, (getattr(federation, name) - classes // 2) % classes, getattr(federation, name))
                for name in ("labels", "true_labels")
            }
            return dataclasses.replace(federation, groups=None, **{k: v.astype(np.int32) for k, v in back.items()})
        if self.kind == "class":
            new = labels >= classes - max(1, nearest(self.share * classes))
        elif self.kind == "shares":
            new = (labels >= classes / 2) & (rng.random(len(labels)) < self.share)
        else:
            rank = np.arange(len(labels)) - federation.offsets[federation.owner]
            new = rank >= np.ceil((1 - self.share) * federation.sizes[federation.owner])
        if new.all():
            raise ScenarioError(f"Before the drift {self.kind!r} no client has any data.", hint="use a smaller share")
        # Each new sample is replaced by a known one of the same client, so that sizes do not tell of the change.
        source, known = np.arange(len(labels)), np.flatnonzero(~new)
        for client in np.unique(federation.owner[new]).tolist():
            part = slice(int(federation.offsets[client]), int(federation.offsets[client + 1]))
            places = np.flatnonzero(new[part]) + part.start
            own = np.flatnonzero(~new[part]) + part.start
            # Whoever has only new samples borrows: it must train on something.
            source[places] = rng.choice(own if len(own) else known, len(places))
        changed = {name: getattr(federation, name)[source] for name in ("indices", "labels", "true_labels")}
        return dataclasses.replace(federation, **changed)
