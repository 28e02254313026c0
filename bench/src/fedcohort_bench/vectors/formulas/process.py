"""FedCor, with covariances of all clients written out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedcohort_bench.vectors.formulas.draws import Expected, Floats, Vector, evenly


def fedcor(v: Vector) -> Iterator[Expected]:
    """Tang 2022, Algorithms 1 and 2: a Gaussian process over loss changes, fitted by Adam to their likelihood."""
    of, n = v["parameters"], v["clients"]
    embedding = np.array(v["start"]["embedding"])
    weights = np.array(v["sizes"]) / sum(v["sizes"])
    picks = np.zeros(n)
    samples: list[tuple[int, Floats]] = []  # round and loss changes, NaN for who did not answer
    measured: tuple[int, Floats] | None = None
    for entry in v["rounds"]:
        t, here, m = entry["round"], entry["available"], entry["size"]
        question, fresh = entry.get("question", {}), list[tuple[int, Floats]]()
        if "tried" in question:
            fresh = [(t, np.array(change)) for change in question["loss_change"]]
        elif question:
            losses = np.full(n, np.nan)
            losses[question["asked"]] = question["loss"]
            fresh = [] if measured is None else [(measured[0], losses - measured[1])]
            measured = (t, losses) if t < of["warmup"] else None
        if fresh:
            samples += fresh
            rounds = sorted({r for r, _ in samples})
            old = of["old_warmup"] if t <= of["warmup"] else of["old"]
            used = [(of["discount"] ** (rounds[-1] - r), y) for r, y in samples if r in rounds[-old - 1 :]]
            embedding = _fitted(embedding, used, of["noise"], of["learning_rate"], of["steps"])
            picks[:] = 0
        if t < of["warmup"]:
            yield Expected(evenly(here, m))
        else:
            alpha = of["scale"] * of["annealing"] ** picks
            chosen, drop = _algorithm_1(embedding @ embedding.T, weights, alpha, here, m, of["noise"])
            yield Expected(dict.fromkeys(chosen, 1.0), drop)
            picks[entry["cohort"]] += 1


def _fitted(x: Floats, samples: list[tuple[float, Floats]], noise: float, rate: float, steps: int) -> Floats:
    """Eqs. 16 and 17: Adam on the log-likelihood of N(0, X X' + s^2 I) over the clients that answered."""
    first, second = np.zeros_like(x), np.zeros_like(x)
    for step in range(1, steps + 1):
        gradient = np.zeros_like(x)
        for weight, y in samples:
            seen = np.flatnonzero(np.isfinite(y))
            inverse = np.linalg.inv(x[seen] @ x[seen].T + noise**2 * np.eye(len(seen)))
            solved = inverse @ y[seen]
            gradient[seen] += weight * (np.outer(solved, solved) - inverse) @ x[seen]
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        x = x + rate * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
    return x


def _algorithm_1(
    covariance: Floats, weights: Floats, alpha: Floats, candidates: list[int], size: int, noise: float
) -> tuple[list[int], dict[int, float]]:
    """Pick by the expected drop of the global loss; return it at the pick, for others at the last pick."""
    chosen: list[int] = []
    drop: dict[int, float] = {}
    for _ in range(size):
        for k in candidates:
            if k not in chosen:
                variance = covariance[k, k]
                drop[k] = float(alpha[k] * (weights @ covariance[:, k]) * np.sqrt(variance) / (variance + noise**2))
        k = max((c for c in candidates if c not in chosen), key=drop.__getitem__)
        chosen.append(k)
        column = covariance[:, k]
        covariance = covariance - np.outer(column, column) / (covariance[k, k] + noise**2)
    return chosen, drop
