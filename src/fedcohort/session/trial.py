"""A selector on trial: a shadow that will choose after some rounds, because an operator has ordered it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedcohort.journal import Journal
from fedcohort.journal.events import SHADOW


@dataclass(frozen=True)
class ShadowTrial:
    """What the event of a shadow on trial says beside its name.

    Attributes
    ----------
    name : str
        The shadow's. The trial is over if there is no such shadow.
    until : int
        The round, or the model without rounds, from which it chooses.
    watch : bool
        Whether it is only removed then.
    selector : Mapping
        The selector's description, before it was adapted to what shadows see.
    order : str or None
    """

    name: str
    until: int
    watch: bool
    selector: Mapping[str, Any]
    order: str | None

    def body(self) -> dict[str, Any]:
        """Return the event's part."""
        return {key: value for key, value in asdict(self).items() if key != "name" and value is not None}


def trial_of(journal: Journal) -> ShadowTrial | None:
    """Return the newest trial in a journal, over or not."""
    body = next((body for body in reversed(journal.events(SHADOW)) if "until" in body), None)
    if body is None:
        return None
    return ShadowTrial(body["name"], int(body["until"]), bool(body["watch"]), body["selector"], body.get("order"))
