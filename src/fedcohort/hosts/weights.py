"""How much each reply of a round may weigh: no more than the client can account for.

A client writes the weight of its own model into its reply. Taken as it comes, a weight of 2**53 is the whole average.
Three bounds hold it, each worked out from the replies of one round, so that a restart finds the same weights:

- A client that declared how many samples it has weighs no more than these. Where apps count samples over several
  epochs, or tokens, the median of what the others weigh per declared sample shows it, and twice as much is let through.
  What most of a cohort weigh, as where everybody weighs 1, anybody may.
- A client that declared nothing weighs at most ten times the median of the others: sizes of real clients lie that far
  apart. So does one whose declaration cannot be compared, because nobody else declared anything.
- ``max_share`` bounds the part of the whole that one client may have. It is the operator's to set, and the one bound
  that also holds against clients who lie about their size.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

_UNDECLARED = 10.0  # times the median of the others
_UNIT = 2.0  # times the usual weight per sample, where that is more than 1


def bounded_weights(
    weights: Mapping[str, float], sizes: Mapping[str, int | None], max_share: float | None = None
) -> tuple[dict[str, float], dict[str, str]]:
    """Return weights within their bounds, by client, and for each that was lowered why.

    Parameters
    ----------
    weights : mapping of str to float
        As the clients sent them, 0 or more.
    sizes : mapping of str to int or None
        The samples each declared.
    max_share : float, optional
        Largest share of the sum that one client may have.

    >>> bounded_weights({"anna": 2.0**53, "ben": 30}, {"anna": 10, "ben": 30})[0]
    {'anna': 10.0, 'ben': 30.0}
    """
    found = {name: float(weight) for name, weight in weights.items()}
    reasons: dict[str, str] = {}
    alone = _bound_by_samples(weights, sizes, found, reasons)
    _bound_by_others(weights, sizes, alone, found, reasons)
    if max_share is not None:
        # Last, on weights that are bounded already: a share is of what the others really weigh.
        most = _largest(list(found.values()), max_share)
        for name in [name for name, weight in found.items() if weight > most]:
            _lower(found, reasons, name, most, f"no client may have more than {max_share:g} of a round's weight")
    return found, reasons


def _bound_by_samples(
    weights: Mapping[str, float], sizes: Mapping[str, int | None], found: dict[str, float], reasons: dict[str, str]
) -> list[str]:
    """Lower weights that the declared samples do not account for; return the clients about which they say nothing."""
    most_weigh = _majority(list(found.values())) or 0.0
    ratios = sorted(weight / size for name, weight in found.items() if (size := sizes.get(name)))
    # Weights that most share and that do not follow sizes say nothing about a sample.
    by_samples = not most_weigh or _majority(ratios) is not None
    alone: list[str] = []
    for name, weight in weights.items():
        size = sizes.get(name)
        if size is None or (size and len(ratios) == 1):
            alone.append(name)
            continue
        per_sample = _most_per_sample(ratios, weight / size) if size and by_samples else 1.0
        most = max(per_sample * size, most_weigh)
        if weight > most:
            _lower(found, reasons, name, most, f"it declared {size:,} samples")
    return alone


def _bound_by_others(
    weights: Mapping[str, float],
    sizes: Mapping[str, int | None],
    alone: Sequence[str],
    found: dict[str, float],
    reasons: dict[str, str],
) -> None:
    """Lower weights of clients that declared no size, or alone did, where they are far above the others'."""
    ordered = sorted(weight for weight in found.values() if weight > 0)
    for name in [name for name in alone if found[name] > 0 and len(ordered) > 1]:
        size = sizes.get(name)
        middle = (len(ordered) - 1) // 2  # of the others: of all but one entry of its own weight
        median = ordered[middle + (bisect_left(ordered, float(weights[name])) <= middle)]
        if found[name] > (most := max(_UNDECLARED * median, size or 0.0)):
            why = "it declared no size" if size is None else f"it alone declared a size, {size:,} samples"
            _lower(found, reasons, name, most, f"{why}, and others weigh {median:g}")


def _most_per_sample(ratios: Sequence[float], own: float) -> float:
    """Return what a declared sample may weigh: 1, or where apps count otherwise, a multiple of what is usual."""
    usual = _median_of_others(ratios, own)
    return _UNIT * usual if usual > 1 else 1.0


def _median_of_others(ordered: Sequence[float], own: float) -> float:
    """Return the median of sorted values without one that is ``own``, the lower of two."""
    middle = (len(ordered) - 2) // 2
    return ordered[middle + (bisect_left(ordered, own) <= middle)]


def _majority(values: Sequence[float]) -> float | None:
    """Return the number that more than half of the values are, or None."""
    common, count = Counter(values).most_common(1)[0] if values else (None, 0)
    return common if 2 * count > len(values) else None


def _lower(found: dict[str, float], reasons: dict[str, str], name: str, most: float, why: str) -> None:
    reasons[name] = f"its weight of {found[name]:g} was lowered to {most:g}: {why}"
    found[name] = most


def _largest(weights: Sequence[float], share: float) -> float:
    """Return the largest weight with which nobody has more than ``share`` of the sum."""
    ordered = sorted((weight for weight in weights if weight > 0), reverse=True)
    for count, weight in enumerate(ordered):
        # With the first ``count`` lowered to one weight, is this one within the share?
        left = 1 - count * share
        if left <= 0:
            break
        most = share * math.fsum(ordered[count:]) / left
        if weight <= most:
            return most if count else math.inf
    return ordered[-1] if ordered else math.inf  # too few clients for such a share: all weigh the same
