"""Figures of what selectors learned: each selector class declares its own, and journals hold the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.errors import FedcohortError, JournalError, needs_extra
from fedcohort.core.plots import Intervals, Lines, Picture, Points, SelectorRun, View
from fedcohort.core.selector_spec import class_of
from fedcohort.report import palette
from fedcohort.report.data import RunCurve, SelectorRuns, Setting
from fedcohort.report.figure import Figure
from fedcohort.report.figures import ROUNDS, json_numbers, thinned
from fedcohort.simulate.store.results import open_journal

_MAX_POINTS = 600  # clients drawn one by one


def selector_figures(setting: Setting) -> tuple[list[Figure], list[str]]:
    """Return the selectors' own figures in a setting, and warnings about what cannot be shown."""
    views: dict[str, tuple[Picture, list[tuple[str, View]]]] = {}
    warnings: list[str] = []
    for group in setting.groups:
        # One seed is enough to show what a selector learns; each has its own clients, so they cannot be averaged.
        run = next((run for run in group.runs if run.journal is not None), None)
        if run is None:
            continue
        try:
            for picture, view in _views(setting, group, run):
                views.setdefault(picture.name, (picture, []))[1].append((group.label, view))
        except FedcohortError as error:
            warnings.append(f"What {group.label} learned cannot be shown: {error.message}")
        except Exception as error:  # the code of a user's selector may fail in any way
            warnings.append(f"What {group.label} learned cannot be shown: {type(error).__name__}: {error}.")
    figures = []
    for picture, labelled in views.values():
        try:
            figures.append(_figure(picture, labelled))
        except FedcohortError:
            raise
        except Exception as error:  # the numbers of a user's selector may be anything
            warnings.append(f"The figure {picture.title!r} cannot be drawn: {type(error).__name__}: {error}")
    return figures, warnings


def _views(setting: Setting, group: SelectorRuns, run: RunCurve) -> list[tuple[Picture, View]]:
    """Return the pictures of a run's selector, each with its view of the run."""
    assert run.journal is not None
    with closing(open_journal(run.journal)) as journal:
        spec = journal.meta()["selector"]
        cls = class_of(spec)
        if cls is None and spec.get("reference") is not None:
            raise JournalError(
                f"its selector is {spec['reference']}, and code is not imported just because a journal names it; "
                "use --selector to import it"
            )
        if cls is None or not cls.pictures:
            return []
        facts = setting.federations.get(run.federation)
        noise = None if facts is None or not (facts.noise_rate > 0).any() else facts.noise_rate
        record = SelectorRun(
            label=group.label,
            seed=run.seed,
            rounds=journal.last()[0] + 1,
            state=journal.state(""),
            notes=[(row.round, row.notes) for row in journal.cohorts()],
            label_counts=None if facts is None or not facts.label_counts.shape[1] else facts.label_counts,
            noise=noise,
            running=run.state == "running",
        )
        views = [(picture, picture.view(record)) for picture in cls.pictures]
    return [(picture, view) for picture, view in views if view is not None]


def _figure(picture: Picture, views: Sequence[tuple[str, View]]) -> Figure:
    """Return the figure with the views of one picture, by the label of their group."""
    # One chart draws one kind of view, so views of another kind than the first are left out.
    kind = type(views[0][1])
    views = [(label, view) for label, view in views if type(view) is kind]
    spec: dict[str, Any] = {
        "y": {"label": picture.quantity, **({"format": "percent"} if picture.share else {})},
        "kind": {Intervals: "intervals", Lines: "lines"}.get(kind, "points"),
        "views": [{"name": label, **_drawn(view)} for label, view in views],
    }
    points = [view for _, view in views if isinstance(view, Points)]
    if points:
        # Every view shares one legend, so the longest list of groups names them all.
        names = max((list(view.group_names) for view in points), key=len) or ["clients"]
        slots = palette.COLOURS - 1  # the first colour is the baseline's
        spec |= {"categories": names, "colors": [1 + c % slots for c in range(len(names))]}
        spec["short"] = [name.split()[-1] if name[-1:].isdecimal() else "" for name in names]
    text = " ".join([view.text for _, view in views if view.text][:2])
    return Figure(picture.name, picture.title, text, spec)


def _drawn(view: View) -> dict[str, Any]:
    """Return what the chart code draws of one view."""
    if isinstance(view, Lines):
        series = []
        for slot, (name, (rounds, values)) in enumerate(view.lines.items(), start=1):
            keep = thinned(len(rounds))
            y = json_numbers(np.asarray(values)[keep])
            series.append({"label": name, "color": slot, "x": [int(rounds[i]) for i in keep], "y": y})
        return {"x": ROUNDS, "series": series}
    if isinstance(view, Intervals):
        order = _evenly_spaced(np.argsort(-view.middle, kind="stable"))
        drawn: dict[str, Any] = {
            "x": {"label": "clients, ranked", "format": "integer"},
            "mid": json_numbers(view.middle[order]),
            "lo": json_numbers(view.low[order]),
            "hi": json_numbers(view.high[order]),
            "names": [str(int(c)) for c in order],
        }
        return drawn | ({"note": [view.notes[int(c)] for c in order]} if view.notes else {})
    keep = _evenly_spaced(np.arange(len(view.points)))
    groups = np.zeros(len(view.points), int) if view.groups is None else view.groups
    place = _tsne(view.points[keep])
    return {
        "x": {"label": "t-SNE of the embeddings; only nearness is meaningful"},
        "px": json_numbers(place[:, 0], 4),
        "py": json_numbers(place[:, 1], 4),
        "category": groups[keep].tolist(),
        "names": [str(int(c)) for c in keep],
    }


def _evenly_spaced(order: IntArray) -> IntArray:
    """Return at most ``_MAX_POINTS`` of the clients, evenly spaced."""
    if len(order) <= _MAX_POINTS:
        return order
    return np.asarray(order[np.linspace(0, len(order) - 1, _MAX_POINTS).astype(int)])


def _tsne(points: FloatArray) -> FloatArray:
    """(n, 2) t-SNE of (n, d) points, the same on every call."""
    with needs_extra("The map of clients needs scikit-learn.", "report"):
        from sklearn.manifold import TSNE
    perplexity = min(30.0, (len(points) - 1) / 3)
    # TSNE rejects a perplexity above a third of the points; 30 is its default.
    flat = TSNE(2, perplexity=perplexity, init="pca", random_state=0, max_iter=500).fit_transform(points)
    return np.asarray(flat, np.float64)
