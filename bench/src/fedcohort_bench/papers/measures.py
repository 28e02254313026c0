"""Measures that a single figure needs, computed from a run's journal."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

import numpy as np

from fedcohort.core.signals import Signal
from fedcohort.simulate.store.results import Results, RunInfo, open_journal
from fedcohort_bench.papers.declare import Extra


def _neighbours(results: Results, run: RunInfo) -> Mapping[str, float]:
    """Return the share of clients with the same main class as the client with the nearest embedding, by cosine."""
    if run.selector != "fedcor":
        return {}
    with closing(open_journal(results.journal(run))) as journal:
        points = np.asarray(journal.state("")["embedding"], np.float64)
    points = points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-300)
    similarity = points @ points.T
    np.fill_diagonal(similarity, -np.inf)
    main = results.federation(run).label_counts.argmax(axis=1)
    return {"neighbours": float((main[similarity.argmax(axis=1)] == main).mean())}


def _distances(results: Results, run: RunInfo) -> Mapping[str, float]:
    """Return the mean of ||g_i - mean g|| over all clients that were picked."""
    with closing(open_journal(results.journal(run))) as journal:
        blocks = [block.metrics.get(Signal.GRADIENT_DISTANCE.name) for block in journal.reply_blocks()]
    parts = [np.asarray(values, np.float64) for values in blocks if values is not None]
    distances = np.concatenate(parts or [np.zeros(0)])
    distances = distances[np.isfinite(distances)]
    return {"distance": float(distances.mean())} if len(distances) else {}


EXTRAS: Mapping[str, Extra] = {"neighbours": _neighbours, "distances": _distances}
