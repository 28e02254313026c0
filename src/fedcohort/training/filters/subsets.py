r"""Find the subset of models whose mean logits have the best validation score.

Every function accepts NumPy arrays, or torch tensors on any device. Only one number per subset is copied back.

To score a subset S, only the differences of its logits to that of the true class are needed. With the margins
:math:`d_{vc} = \sum_{s \in S} (g_{vc} - g_{v y_v})` over the wrong classes c, a sample is classified correctly iff
:math:`\max_c d_{vc} < 0`, and its cross-entropy under the mean logits is :math:`\ln(1 + \sum_c e^{d_{vc} / |S|})`.
So each model is validated once, and a subset is a sum of margins.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.errors import InputError
from fedcohort.training.arithmetic import namespace, to_numpy

Score = Literal["accuracy", "loss"]

# Numbers per chunk: small enough for a CPU's second-level cache, large enough to fill a GPU.
_CPU_CHUNK = 1 << 20
_DEVICE_CHUNK = 1 << 26


def finite_models(logits: Any) -> BoolArray:
    """Check the shape of ``logits`` (m, V, C) and return which models (m,) have only finite outputs."""
    xp = namespace(logits)
    if logits.ndim != 3 or logits.shape[2] < 2 or logits.shape[1] < 1:
        raise InputError(
            "Logits must have shape (models, samples, classes) with at least one sample and two classes. "
            f"Got {tuple(logits.shape)}."
        )
    return to_numpy(xp.isfinite(logits).all(-1).all(-1))


def margins(logits: Any, labels: Any) -> Any:
    """Return the logits of the wrong classes minus that of the right class.

    Parameters
    ----------
    logits : (m, V, C) array or tensor
        Checked by :func:`finite_models`.
    labels : (V,) integer array or tensor
        Classes 0 to C - 1.

    Returns
    -------
    (m, C - 1, V) of the same kind, at least single precision
    """
    xp = namespace(logits)
    if xp is not np:
        logits = logits.detach()
    # Sums of half-precision logits over twenty models would lose the differences between subsets.
    if logits.dtype not in (xp.float32, xp.float64):
        logits = logits.astype(np.float32) if xp is np else logits.float()
    samples, classes = int(logits.shape[1]), int(logits.shape[2])
    y = _checked_labels(labels, samples, classes)
    wrong = np.arange(classes - 1)[:, None] + (np.arange(classes - 1)[:, None] >= y)  # (C - 1, V)
    rows = np.arange(samples)
    if xp is not np:
        wrong, rows, y = (xp.as_tensor(a, device=logits.device) for a in (wrong, rows, y))
    result = logits[:, rows[None, :], wrong] - logits[:, rows, y][:, None, :]
    return np.ascontiguousarray(result) if xp is np else result.contiguous()


def _checked_labels(labels: Any, samples: int, classes: int) -> IntArray:
    y = np.asarray(to_numpy(labels) if not isinstance(labels, (list, tuple)) else labels)
    if y.shape != (samples,) or y.dtype.kind not in "iu":
        raise InputError(f"Labels must be {samples} whole numbers, one per sample. Got {y.dtype} {y.shape}.")
    if y.min() < 0 or y.max() >= classes:
        raise InputError(f"Labels must be classes 0 to {classes - 1}. Got {int(y.min())} to {int(y.max())}.")
    return y.astype(np.int64)


def _reduce_scores(sums: Any, sizes: Any, score: Score, xp: Any) -> Any:
    """Reduce the margins of S subsets over classes and samples; overwrites ``sums``.

    Parameters
    ----------
    sums : (S, C - 1, V)
    sizes : (S, 1, 1)
        Members of each subset.

    Returns
    -------
    (S,) number of correct samples, or the sum of their cross-entropies in double precision
    """
    if score == "accuracy":
        return (xp.amax(sums, 1) < 0).sum(-1)
    sums /= sizes
    highest = xp.amax(sums, 1)
    if float(highest.max()) < 60:  # e^60 times the number of classes still fits single precision
        xp.exp(sums, out=sums)
        total = sums.sum(1)
        return xp.log1p(total, out=total).sum(-1, dtype=xp.float64)
    highest = highest.clip(0)  # the true class has the margin 0
    sums -= highest[:, None, :]
    xp.exp(sums, out=sums)
    total = sums.sum(1)
    total += xp.exp(-highest)
    return (xp.log(total, out=total) + highest).sum(-1, dtype=xp.float64)


def _all_sums(values: Any, xp: Any) -> Any:
    """Return the sums of all subsets of rows: (h, ...) -> (2^h, ...); row 0 is the highest bit of the index."""
    sums = xp.zeros_like(values[:1]) if len(values) else values
    for row in reversed(range(len(values))):
        sums = xp.concatenate([sums, sums + values[row]])
    return sums


def _chunks(differences: Any, subsets: int) -> list[slice]:
    """Return slices of the samples such that the margins of ``subsets`` subsets fit into a chunk."""
    _, wrong, samples = differences.shape
    on_cpu = isinstance(differences, np.ndarray) or differences.device.type == "cpu"
    width = max(16, (_CPU_CHUNK if on_cpu else _DEVICE_CHUNK) // (subsets * wrong))
    return [slice(begin, min(begin + width, samples)) for begin in range(0, samples, width)]


def _score_all(differences: Any, score: Score) -> FloatArray:
    """Score every subset of the models; O(2^m C V), one addition per number.

    All subsets of the first half of the models are summed once, and so are those of the second half. Every subset is
    then the sum of one row of each. Rounding errors do not accumulate, as they would along a Gray code.

    Parameters
    ----------
    differences : (m, C - 1, V)
        From :func:`margins`.
    score : "accuracy" or "loss"

    Returns
    -------
    (2^m,) float array
        Correct samples, or minus the summed cross-entropy; higher is better. Bit m - 1 - i of the index says whether
        model i is in. The empty subset has -inf.
    """
    xp = namespace(differences)
    m = len(differences)
    first = m // 2
    rows = 1 << (m - first)
    members = np.array([i.bit_count() for i in range(1 << m)]).reshape(-1, rows, 1, 1)
    members[0, 0] = 1  # the empty subset, whose score is replaced below, must not divide by zero
    if xp is np:
        total = np.zeros(members.shape[:2])
        sizes = members.astype(differences.dtype)
    else:
        total = xp.zeros(members.shape[:2], dtype=xp.float64, device=differences.device)
        sizes = xp.as_tensor(members, dtype=differences.dtype, device=differences.device)
    for part in _chunks(differences, rows):
        high = _all_sums(differences[:first, :, part], xp) if first else xp.zeros_like(differences[:1, :, part])
        low = _all_sums(differences[first:, :, part], xp)
        buffer = xp.empty_like(low)
        for h in range(len(high)):
            xp.add(low, high[h], out=buffer)
            total[h] += _reduce_scores(buffer, sizes[h], score, xp)
    result = np.array(to_numpy(total), np.float64).reshape(-1)
    if score == "loss":
        result = -result
    result[0] = -np.inf
    return result


def best_of_all(differences: Any, score: Score) -> tuple[BoolArray, float]:
    """Return the best subset and its score; among equals, the largest, then the one whose members come first.

    Parameters
    ----------
    differences : (m, C - 1, V)
        From :func:`margins`; m >= 1.
    score : "accuracy" or "loss"

    Returns
    -------
    members : (m,) bool array
    score : float
        Share of correct samples, or minus the mean cross-entropy.
    """
    m, _, samples = differences.shape
    scores = _score_all(differences, score)
    ties = np.flatnonzero(scores == scores.max())
    # Among equals, more models are better: each was trained on data that the others have not seen.
    best = max(ties.tolist(), key=lambda mask: (mask.bit_count(), mask))
    members = np.array([bool(best >> (m - 1 - i) & 1) for i in range(m)])
    return members, float(scores[best]) / samples


def _scores_with_each(
    differences: Any, parent: IntArray, others: IntArray, score: Score, parts: list[slice]
) -> FloatArray:
    """(o,) the score of the subset ``parent`` with each of ``others`` added, computed in chunks of samples."""
    xp = namespace(differences)
    index = others if xp is np else xp.as_tensor(others, device=differences.device)
    scores = np.zeros(len(others))
    for part in parts:
        sums = differences[index][:, :, part] if xp is np else differences[index, :, part]
        if len(parent):
            sums = sums + differences[parent.tolist()][:, :, part].sum(0)
        scores += to_numpy(_reduce_scores(sums, len(parent) + 1, score, xp))
    return scores


def best_by_beam(differences: Any, score: Score, width: int) -> tuple[BoolArray, float]:
    """Return a good subset by beam search: grow the ``width`` best subsets of each size by one model.

    O(width m^2 C V). The result is the best subset of any size, so it is at least as good as the best single model and
    as the whole set. Arguments, result and ties are as in :func:`best_of_all`.
    """
    m, _, samples = differences.shape
    parts = _chunks(differences, m)
    # The best of any size wins, because a few good models can beat all of them.
    beam: list[IntArray] = [np.empty(0, np.int64)]
    best_key: tuple[float, int] = (-np.inf, 0)
    best: IntArray = np.arange(m)
    for size in range(1, m + 1):
        grown: dict[bytes, tuple[float, IntArray]] = {}
        for parent in beam:
            others = np.setdiff1d(np.arange(m), parent)
            scores = _scores_with_each(differences, parent, others, score, parts)
            for other, value in zip(others.tolist(), scores.tolist(), strict=True):
                members = np.sort(np.append(parent, other))
                # The same subset is reached from several parents, with scores that may differ by rounding.
                grown.setdefault(members.tobytes(), (value if score == "accuracy" else -value, members))
        ranked = sorted(grown.values(), key=lambda item: -item[0])[:width]
        beam = [members for _, members in ranked]
        # Ties go to the larger subset, as in `best_of_all`.
        if (ranked[0][0], size) >= best_key:
            best_key, best = (ranked[0][0], size), beam[0]
    mask = np.zeros(m, np.bool_)
    mask[best] = True
    return mask, best_key[0] / samples
