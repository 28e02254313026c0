"""A federation over a week as a self-contained SVG."""

from __future__ import annotations

import numpy as np

from fedcohort.report.render import render
from fedcohort.scenario.week import FederationWeek

_BINS = 40  # of a histogram


def week_svg(week: FederationWeek) -> str:
    """Return the picture: how many clients are on, which ones, and log-scale histograms of both speeds."""
    # Where each row of clients goes on and off again, as columns.
    edges = [np.flatnonzero(np.diff(np.concatenate([[0], on.astype(np.int8), [0]]))) for on in week.on]
    histograms = []
    for unit, values in (("samples per second", week.speeds), ("bytes per second", week.bandwidths)):
        logs = np.log10(values)
        low, high = float(logs.min()), float(logs.max())
        if high - low < 1e-9:
            low, high = low - 0.5, high + 0.5
        counts, _ = np.histogram(logs, bins=_BINS, range=(low, high))
        histograms.append((unit, 10**low, 10**high, counts.tolist()))
    sessions = [places.reshape(-1, 2).tolist() for places in edges]
    return render("week.svg", week=week, sessions=sessions, histograms=histograms)
