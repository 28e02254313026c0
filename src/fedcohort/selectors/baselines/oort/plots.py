"""The figure of Oort in a report: the preferred duration of a round."""

from __future__ import annotations

import itertools

from fedcohort.core.plots import Lines, Picture, SelectorRun, number_text


def _pace(record: SelectorRun) -> Lines | None:
    """Return the preferred duration over the rounds, once there is one."""
    known = [(t, float(notes["preferred seconds"])) for t, notes in record.notes if notes.get("preferred seconds")]
    if not known:
        return None
    rounds, seconds = zip(*known, strict=True)
    steps = sum(later > sooner for sooner, later in itertools.pairwise(seconds))
    text = (
        f"{record.opening}, the preferred duration was {number_text(seconds[0])} s at first. The pacer extended it "
        f"{steps:,} time{'s' * (steps != 1)}, to {number_text(seconds[-1])} s."
        if steps
        else f"{record.opening}, the preferred duration was {number_text(seconds[0])} s. The pacer never extended it."
    )
    return Lines({"preferred": (rounds, seconds)}, text=text)


PACE = Picture("oort-pace", "Preferred duration of a round", "seconds", _pace)
