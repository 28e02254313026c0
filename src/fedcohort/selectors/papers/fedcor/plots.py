"""The figure of FedCor in a report: the map of clients."""

from __future__ import annotations

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.plots import Picture, Points, SelectorRun

_COMPARED = 600  # clients, evenly spaced: the cost grows with their square


def _client_map(record: SelectorRun) -> Points | None:
    """Show the clients' embeddings (Fig. 7), coloured by each client's main class if it is known."""
    embedding = record.state["embedding"]
    # Few points have no pattern, and before the first sample the embedding is random.
    if len(embedding) < 5 or not record.state["samples"]:
        return None
    if record.label_counts is None:
        return Points(embedding, text="Clients that are close together have losses that move together.")
    main = record.label_counts.argmax(axis=1)
    names = [f"mainly class {c}" for c in range(record.label_counts.shape[1])]
    near, chance = _same_neighbour(embedding, main)
    if near > 1.5 * chance:
        verdict = "the losses of similar clients move together"
    else:
        verdict = "the map hardly follows the classes" if near >= chance else "the map does not follow the classes"
    text = (
        f"{record.opening} {near:.0%} of the clients have a nearest neighbour of the same main class; by chance it "
        f"would be {chance:.0%}. So {verdict}."
    )
    return Points(embedding, main, names, text)


def _same_neighbour(points: FloatArray, label: IntArray) -> tuple[float, float]:
    """Return how often a point's nearest neighbour has its label, and how often it would by chance."""
    if len(points) > _COMPARED:
        keep = np.linspace(0, len(points) - 1, _COMPARED).astype(int)
        points, label = points[keep], label[keep]
    distance = ((points[:, None, :] - points[None, :, :]) ** 2).sum(axis=2)
    np.fill_diagonal(distance, np.inf)
    counts, n = np.bincount(label), len(label)
    chance = float((counts * (counts - 1)).sum()) / (n * (n - 1))  # a point is not its own neighbour
    return float((label[distance.argmin(axis=1)] == label).mean()), chance


CLIENT_MAP = Picture("fedcor-map", "FedCor: the map of clients", "", _client_map)
